"""The verb pack: `clipstream.curation.pack`."""

from clipstream.curation.pack import OWN_FLAGS as OWN_FLAGS
from clipstream.curation.pack import main as main

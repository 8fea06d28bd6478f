"""The verb check: `clipstream.curation.check`."""

from clipstream.curation.check import build_parser as build_parser
from clipstream.curation.check import main as main

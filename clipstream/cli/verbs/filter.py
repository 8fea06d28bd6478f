"""The verb filter: choose the samples to train on, by conditions on fields and scores."""

from __future__ import annotations

from clipstream.config.command_line import Verb
from clipstream.config.help import READING
from clipstream.curation.filter import FilterFlags, filter_samples

main = Verb("filter", FilterFlags, filter_samples, READING)

"""The `Evaluator` protocol."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from clipstream.data.settings import SourceSettings
from clipstream.errors import SettingsError
from clipstream.evals.context import EvalContext
from clipstream.evals.settings import EvalSettings


class Evaluator(Protocol):
    """Yields (metric, value) pairs for one model and one source. Constructed as `Name(settings)`."""

    def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
        """Evaluate. Collective: every rank calls this and yields the same pairs."""


def source_of(settings: EvalSettings) -> SourceSettings:
    """The data source of an evaluator that needs one.

    Raises:
        SettingsError: none is set.
    """
    if settings.data is None:
        raise SettingsError("the evaluator has no data: give data.shards")
    return settings.data

"""Owns the errors that users meet and the exit code of each, and the hint at a near word; never prints.

Every error here ends a process with its `exit_code`, its message on stderr and no traceback. An error that is not
one of these is a bug of ours (exit code 1, with a traceback).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ClipstreamError(Exception):
    """Base of all errors with a message made for users."""

    exit_code = 1


class SettingsError(ClipstreamError):
    """Wrong settings, or a model, tokenizer or file that they name and that is not there."""

    exit_code = 2


class DataError(ClipstreamError):
    """The data give nothing usable, fail too often, or stall; or a data worker died."""

    exit_code = 3


class DivergedError(ClipstreamError):
    """The loss or a gradient is not finite."""

    exit_code = 4


class Stopped(ClipstreamError):
    """A signal asked the run to end; it has saved and goes on when it is started again with `--resume`."""

    exit_code = 75


class Dropped(Exception):
    """A sample that cannot be used, raised by fields, decoders and users' extractors; counted under `reason`.

    Never ends a run by itself: the loader catches it, counts it and takes the lane's next sample.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


def did_you_mean(wrong: str, known: Iterable[str], most: int = 1) -> str:
    """`; did you mean 'x'?` for the nearest of `known` (up to `most` of them), or nothing where none is near."""
    by_lower = {name.lower(): name for name in known}
    near = [by_lower[name] for name in difflib.get_close_matches(wrong.lower(), by_lower, n=most, cutoff=0.6)]
    return f"; did you mean {' or '.join(repr(name) for name in near)}?" if near else ""

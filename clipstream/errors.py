"""Owns the errors that users meet and the exit code of each; never formats a traceback, never prints.

Every error here ends a process with its `exit_code`, its message on stderr and no traceback. An error that is not
one of these is a bug of ours (exit code 1, with a traceback).
"""

from __future__ import annotations


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

"""The errors for users with their exit codes, and suggestions for misspelt words.

A `ClipstreamError` ends a process with its `exit_code`, its message on stderr and no traceback. Any other exception is
a bug (exit code 1, with a traceback).
"""

from __future__ import annotations

import difflib
import heapq
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from clipstream.text import printable, printable_lines

INTERRUPTED = 130  # exit code of Ctrl-C, as shells have it


class ClipstreamError(Exception):
    """Base class of errors with a message for users, which is safe to print even if it quotes untrusted text."""

    exit_code = 1
    rank: int | None = None  # the rank that raised it, if not this one

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class SettingsError(ClipstreamError):
    """Wrong settings, or settings that name a model, tokenizer or file that does not exist."""

    exit_code = 2


class DataError(ClipstreamError):
    """The data have no usable sample, fail too often or stall, or a data worker has died."""

    exit_code = 3


class DivergedError(ClipstreamError):
    """The loss or a gradient is not finite."""

    exit_code = 4


class Stopped(ClipstreamError):
    """A signal has stopped the run, which has saved a checkpoint and can be resumed.

    Attributes:
        signal: name of the signal, if it is known here.
    """

    exit_code = os.EX_TEMPFAIL  # 75

    def __init__(self, message: str, *, signal: str | None = None) -> None:
        super().__init__(message)
        self.signal = signal

    @classmethod
    def before_training(cls, signal: str | None) -> Stopped:
        """The error of a run that a signal stopped before its first step."""
        return cls(f"stopped by {signal} before the first step: start the same command again", signal=signal)


class Interrupted(BaseException):
    """The wait for a batch was interrupted. Not an `Exception`, which plug-ins may catch."""


class Dropped(Exception):
    """A sample that cannot be used, raised by fields, decoders and users' extractors; counted under `reason`.

    Never ends a run by itself: the loader catches it, counts it and takes the lane's next sample. Reason and detail,
    which may repeat what a sample holds, are kept on one line that is safe to print.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason: str = printable(reason)
        self.detail: str = printable(detail)
        super().__init__(f"{self.reason}: {self.detail}" if detail else self.reason)


def wrong_type(name: str, expected: str, value: object) -> SettingsError:
    """The error of an argument `name` that is none of what is expected."""
    return SettingsError(f"{name}: expected {expected}, not {type(value).__name__}")


def each(name: str, expected: str, value: Any, kinds: type | tuple[type, ...]) -> Iterator[Any]:
    """The items of an argument that is one of `kinds` or several of them.

    Raises SettingsError: it is something else, or an item is.
    """
    if isinstance(value, kinds):
        yield value
        return
    if isinstance(value, str | bytes | Mapping):
        raise wrong_type(name, expected, value)
    try:
        items = iter(value)
    except TypeError:  # also of an array without dimensions
        raise wrong_type(name, expected, value) from None
    for number, item in enumerate(items):
        if not isinstance(item, kinds):
            raise wrong_type(f"{name}[{number}]", expected, item)
        yield item


def did_you_mean(wrong: str, known: Iterable[str], most: int = 1) -> str:
    """`; did you mean 'x'?` with up to `most` of `known`; empty if none is similar."""
    near = nearest(wrong, known, most)
    return f"; did you mean {' or '.join(repr(name) for name in near)}?" if near else ""


def nearest(wrong: str, known: Iterable[str], most: int = 1) -> list[str]:
    """Up to `most` of `known` that `wrong` may be a misspelling of, the most similar one first.

    A word is similar if `wrong` is a prefix of it (of at least 4 letters), if it is the first half of `wrong` or more,
    or if they differ by one typing error in every 4 letters (one in words of up to 7). Case and dashes are ignored.
    """
    word = _plain(wrong)
    found = []
    for name in known:
        other = _plain(name)
        limit = max(1, max(len(word), len(other)) // 4)
        begins = len(word) >= 4 and (other.startswith(word) or (word.startswith(other) and 2 * len(other) >= len(word)))
        if begins or _typing_errors(word, other) <= limit:
            found.append((difflib.SequenceMatcher(None, word, other).ratio(), name))
    return [name for _, name in heapq.nlargest(most, found)]


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def _typing_errors(a: str, b: str) -> int:
    """The optimal string alignment distance: insertions, deletions, substitutions and swaps of neighbours."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, start=1):
        older, before, row = before, row, [i]
        for j, other in enumerate(b, start=1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (letter != other)))
            if i > 1 and j > 1 and (letter, a[i - 2]) == (b[j - 2], other):
                row[j] = min(row[j], older[j - 2] + 1)
    return row[-1]

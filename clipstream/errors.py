"""The errors for users with their exit codes, and suggestions for misspelt words.

A `ClipstreamError` ends a process with its `exit_code`, its message on stderr and no traceback. Any other exception is
a bug (exit code 1, with a traceback).
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from clipstream.text import Lines, message, printable

INTERRUPTED = 130  # exit code of Ctrl-C, as shells have it


class ClipstreamError(Exception):
    """Base class of errors with a message for users, which is safe to print even if it quotes untrusted text.

    The message is one line, unless it is made by `clipstream.text.lines`, or the `str` of another such error.
    """

    exit_code = 1
    rank: int | None = None  # the rank that raised it, if not this one

    def __str__(self) -> str:
        return message(self.args[0] if self.args else "")


class SettingsError(ClipstreamError):
    """Wrong settings, or settings that name a model, tokenizer or file that does not exist."""

    exit_code = 2


class DataError(ClipstreamError):
    """The data have no usable sample, fail too often or stall, or a data worker has died."""

    exit_code = 3


class DivergedError(ClipstreamError):
    """The loss or a gradient is not finite."""

    exit_code = 4


class CopyError(ClipstreamError):
    """The run is complete, but its copy in remote storage (`checkpoint.remote_sync`) is not."""

    exit_code = 5


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
        return cls(f"stopped by {signal} before the first step: rerun the same command", signal=signal)


class WorkInterrupted(KeyboardInterrupt):
    """Ctrl-C, or a signal that is handled like it, while shards were worked off; the same command goes on."""

    exit_code = Stopped.exit_code


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


class ShardError(Exception):
    """A shard that cannot be opened, counted by `reason`, unless that is `credentials`: refused for all shards alike.

    Reasons: `missing`, `denied`, `unreadable` (local), `unreachable`, `http_404` and so on, `truncated_download`,
    `timeout`, `pipe_failed`, `unknown_scheme`, `bad_gzip`, `bad_zstd`, `disk` (the cache's), `not_a_tar`, `too_large`.
    `detail` contains no credentials. `transient` says whether another attempt may succeed.
    """

    def __init__(self, reason: str, detail: str, *, transient: bool = False) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail
        self.transient = transient

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


@contextmanager
def errors_as(kind: type[Exception], text: str, *errors: type[Exception], advice: str = "") -> Iterator[None]:
    """Raise any of `errors` as a `kind` that says `text: REASON; advice`; without `text` or `advice`, the rest."""
    try:
        yield
    except errors as error:
        reason = getattr(error, "strerror", None) or error
        said = ": ".join(filter(None, map(message, (text, reason))))
        raise kind(Lines("; ".join(filter(None, (said, advice))))) from error


def wrong_type(name: str, expected: str, value: object) -> SettingsError:
    """The error for an argument `name` of an unexpected type."""
    return SettingsError(f"{name}: expected {expected}, not {type(value).__name__}")


def each(name: str, expected: str, value: Any, kinds: type | tuple[type, ...]) -> Iterator[Any]:
    """The items of an argument: one value of `kinds`, or several.

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


def absent(path: str | os.PathLike[str]) -> str:
    """`PATH does not exist`, and what its folder has instead: a similar name, but no other number, or some names."""
    whole, there = Path(path), ""
    lost = next((part for part in (*reversed(whole.parents), whole) if not os.path.lexists(part)), whole)
    with suppress(OSError), os.scandir(lost.parent) as entries:
        names = sorted(entry.name for entry in islice(entries, 10_000) if not entry.name.startswith("."))
        form = re.sub(r"\d", "", lost.name)
        if near := nearest(lost.name, [name for name in names if re.sub(r"\d", "", name) != form]):
            found = lost.parent / near[0]
            rest = found / whole.relative_to(lost)
            there = f"; did you mean {str(rest if rest.exists() else found)!r}?"
        elif names and lost.parent != Path("/"):
            there = f": {lost.parent.absolute()} has {', '.join(map(printable, names[:5]))}{', …' * (len(names) > 5)}"
    return f"{printable(path)} does not exist{there}"


def nearest(wrong: str, known: Iterable[str], most: int = 1) -> list[str]:
    """Up to `most` of `known` that `wrong` may be a misspelling of, the most similar one first.

    A word is similar if `wrong` is a prefix of it (of at least 4 letters), if it is the first half of `wrong` or more,
    or if their `difflib` ratio is at least 0.75. Case and dashes are ignored.
    """
    word = _plain(wrong)

    def likeness(name: str) -> float:
        other = _plain(name)
        begins = len(word) >= 4 and (other.startswith(word) or (word.startswith(other) and 2 * len(other) >= len(word)))
        ratio = difflib.SequenceMatcher(None, word, other).ratio()
        return ratio if begins or ratio >= 0.75 else 0.0

    found = sorted(((likeness(name), name) for name in known), key=lambda pair: -pair[0])
    return [name for ratio, name in found[:most] if ratio]


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")

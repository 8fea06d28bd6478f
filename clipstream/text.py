"""Text of messages: counts, shares and times, long texts cut, rows of a help, and untrusted text made safe to print or
to name a file.

A message is one line: errors and the logger print control characters as their escapes, line breaks included. Only
`lines` makes a message of several. Untrusted text (keys, captions, file names, JSON fields, plug-ins' messages) may
contain escape sequences that move the cursor, set the terminal's title or hide a link, and Unicode's directional
controls, which reorder the characters of a line.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from urllib.parse import quote

# C0 and C1 controls, invisible and directional characters, line and paragraph separators, halves of characters. The
# joiners U+200C and U+200D are left, as emoji and several scripts are written with them.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
VALUE = 300  # characters of a value that a message shows
FRAME = 700  # pixels, height of a page in a notebook
MESSAGE = 20_000  # characters of a whole message


def printable(text: object, most: int = VALUE) -> str:
    """The text on one line, with control characters replaced by their escapes, such as `\\x1b`.

    Args:
        most: characters of the text to keep; a longer text ends with its length.
    """
    return _cut(str(text), most, _UNSAFE)


def printable_lines(text: object, most: int = MESSAGE) -> str:
    """As `printable`, but line breaks and tabs are kept."""
    return _cut(str(text), most, _UNSAFE_IN_LINES)


_UNSAFE_IN_LINES = re.compile(r"(?![\n\t])" + _UNSAFE.pattern)


class Lines(str):
    """A message that is safe to print, and whose line breaks are meant."""

    __slots__ = ()


def message(text: object) -> Lines:
    """A message for users: `Lines` as they are, and any other text on one line, safe to print."""
    text = text if isinstance(text, str) else str(text)  # of an error of ours, `Lines`
    return Lines(printable_lines(text) if isinstance(text, Lines) else printable(text, MESSAGE))


def lines(*parts: object) -> Lines:
    """A message of several lines, each of which is as `message` makes it."""
    return Lines("\n".join(map(message, parts)))


def file_name(text: str) -> str:
    """A name as that of one file or folder: different for different names, and never '.', '..' or a path."""
    name = quote(text, safe="", errors="surrogateescape")
    return name if name.strip(".") else name.replace(".", "%2E") or "%"


def _cut(text: str, most: int, unsafe: re.Pattern[str]) -> str:
    end = f"… ({len(text):,} characters)" if len(text) > most else ""
    return unsafe.sub(lambda match: match[0].encode("unicode_escape").decode(), text[:most]) + end


def counted(count: float, noun: str, form: str = "") -> str:
    """`1 shard`, `2 shards`; the format `,` gives `2,000 shards`."""
    return f"{count:{form}} {noun}{'' if count == 1 else 's'}"


def listed(items: Sequence[str], most: int = 5, noun: str = "") -> str:
    """The first items by commas, and how many more there are: `a, b and 1,998 more`."""
    return ", ".join(items[:most]) + (f" and {len(items) - most:,} more{noun}" if len(items) > most else "")


def listed_lines(lines: Sequence[str], most: int, noun: str = "") -> list[str]:
    """The first lines, and one that tells how many more there are."""
    return [*lines[:most], *([f"  … and {len(lines) - most:,} more{noun}"] if len(lines) > most else [])]


def shortened(text: str, most: int) -> str:
    """The text on one line, each run of white space as one space, cut to `most` characters with `…` as the last."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def percent(share: float) -> str:
    """A share in percent: 12.3%, or 0.12% below 1%."""
    value = 100 * share
    return f"{value:.2g}%" if 0 < value < 1 else f"{value:.1f}%"


def duration(seconds: float) -> str:
    """Seconds as 3.2s, 42s, 4m10s or 2h05m."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def milliseconds(seconds: float) -> str:
    """Seconds as 0.31 ms or 42 ms; from 1 s on as `duration`."""
    if seconds >= 1:
        return duration(seconds)
    return f"{seconds * 1e3:.2g} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"


def frame(page: str, title: str) -> str:
    """A page of HTML for a notebook: in a frame, so that its style does not leak into the notebook."""
    return (
        f'<iframe sandbox="allow-scripts" style="width:100%;height:{FRAME}px;border:0" title="{html.escape(title)}" '
        f'srcdoc="{html.escape(page)}"></iframe>'
    )


def terminal_width() -> int:
    """Columns of the terminal or of the variable COLUMNS, at most 140; 120 without both."""
    terminal = sys.stdout.isatty() or "COLUMNS" in os.environ
    return min(shutil.get_terminal_size().columns, 140) if terminal else 120


def row(head: str, text: str, column: int, width: int) -> list[str]:
    """A name, and its meaning from `column` on; below the name if this is long."""
    first = f"  {head}"
    body = textwrap.wrap(text, width - column, break_on_hyphens=False) or [""]
    if len(first) < column - 1:
        first, body = f"{first:<{column}}{body[0]}".rstrip(), body[1:]
    return [first, *(f"{'':<{column}}{line}" for line in body)]

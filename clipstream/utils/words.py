"""Words of messages: counts with their nouns, and long texts cut to a line."""

from __future__ import annotations


def counted(count: float, noun: str, form: str = "") -> str:
    """`1 shard`, `2 shards`; the format `,` gives `2,000 shards`."""
    return f"{count:{form}} {noun}{'' if count == 1 else 's'}"


def shortened(text: str, most: int) -> str:
    """The text on one line, each run of white space as one space, cut to `most` characters with `…` as the last."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"

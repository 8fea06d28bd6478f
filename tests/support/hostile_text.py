"""Text with characters that a terminal would obey."""

from __future__ import annotations

import unicodedata

HOSTILE = "\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\ \x9b31m \u202egnp.exe\u2066 \ufeff\x07\r\udcff"


def obeyed(text: str) -> list[str]:
    """Characters that a terminal acts on, or that cannot be encoded."""
    directional = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    return [
        char
        for char in text
        if unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")
        or unicodedata.bidirectional(char) in directional
        or char in "\u200e\u200f\u061c"
    ]

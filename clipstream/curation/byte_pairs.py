"""CLIP's byte pair encoding without importing torch: texts enter, ids or their number leave.

The vocabulary is open_clip's, and so are ids. Source: open_clip 3.3.0, tokenizer.py, SimpleTokenizer.
"""

from __future__ import annotations

import gzip
import html
import re
from functools import cache, cached_property
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

CACHED_WORDS = 100_000
LONGEST = 256  # letters of a word up to which its count is exact: base64, for example, has no spaces
VOCABULARY = "bpe_simple_vocab_16e6.txt.gz"
MERGES, READ = 49152 - 256 - 2, 1 << 20  # lines of it that are used, and bytes that hold them
_ASCII = re.compile(  # of lower case; the kinds that are frequent are tried first
    r"[a-z]+|[0-9]|'(?:s|t|re|ve|m|ll|d)|<start_of_text>|<end_of_text>|[^\sa-z0-9]+", re.ASCII
)
_SPECIAL = ("<start_of_text>", "<end_of_text>")
_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that the vocabulary has as themselves


class BytePairs:
    """Encodes texts. The vocabulary is read on use, once a process, in 0.03 s."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = dict.fromkeys(_SPECIAL, 1)  # of words, a bounded cache

    def encode(self, text: str) -> list[int]:
        """The ids of the start, of a text that is not cut, and of the end."""
        found = (part for word in _words(text) for part in ([word] if word in _SPECIAL else self._parts(word)))
        return [self._ids[part] for part in (_SPECIAL[0], *found, _SPECIAL[1])]

    def count(self, text: str) -> int:
        """The number of these ids."""
        known = self._counts
        return 2 + sum([known.get(word) or self._count(word) for word in _words(text)])

    @cached_property
    def _letters(self) -> dict[int, str]:
        """The letter that the vocabulary has for each byte, in the order of their ids."""
        others = (byte for byte in range(256) if byte not in _PLAIN)
        return {byte: chr(byte) for byte in _PLAIN} | {byte: chr(256 + n) for n, byte in enumerate(others)}

    @cached_property
    def _ids(self) -> dict[str, int]:
        letters = self._letters.values()
        pieces = [
            *letters,
            *(f"{letter}</w>" for letter in letters),
            *(pair.replace(" ", "") for pair in _ranks()),
            *_SPECIAL,
        ]
        return {piece: number for number, piece in enumerate(pieces)}

    def _count(self, word: str) -> int:
        """The ids of a word that is not in the cache."""
        if len(word) > LONGEST:
            return sum(self._count(word[at : at + LONGEST]) for at in range(0, len(word), LONGEST))
        if len(self._counts) >= CACHED_WORDS:
            self._counts = dict.fromkeys(_SPECIAL, 1)
        self._counts[word] = count = len(self._parts(word))
        return count

    def _parts(self, word: str) -> list[str]:
        """The pieces of a word that are in the vocabulary."""
        letters, ranks = self._letters, _ranks()
        parts = [letters[byte] for byte in word.encode("utf-8", "surrogatepass")]
        parts[-1] += "</w>"
        while len(parts) > 1:
            pairs = [f"{one} {other}" for one, other in pairwise(parts)]
            found = [ranks.get(pair, MERGES) for pair in pairs]
            if (least := min(found)) == MERGES:
                break
            best, merged, at = pairs[found.index(least)], list[str](), 0
            while at < len(parts):
                both = at < len(pairs) and pairs[at] == best
                merged.append(parts[at] + parts[at + 1] if both else parts[at])
                at += 1 + both
            parts = merged
        return parts


@cache
def _ranks() -> dict[str, int]:
    """The rank of each pair of pieces that is merged; a space is between them."""
    package = find_spec("open_clip")
    assert package is not None and package.origin is not None
    with gzip.open(Path(package.origin).with_name(VOCABULARY)) as file:
        lines = file.read(READ).decode(errors="ignore").split("\n")
    return {pair: rank for rank, pair in enumerate(lines[1 : MERGES + 1])}


def _words(text: str) -> list[str]:
    if text.isascii() and text.isprintable() and "&" not in text:
        return _ASCII.findall(text.lower())
    import ftfy  # of open_clip, as regex: on use, as their import takes long
    import regex

    letters = _ASCII.pattern.replace("a-z", r"\p{L}").replace("0-9", r"\p{N}")
    text = html.unescape(html.unescape(ftfy.fix_text(text))).lower()
    found: list[str] = regex.findall(letters, text, regex.IGNORECASE)
    return found

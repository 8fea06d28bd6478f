"""The number of tokens that CLIP's tokenizer makes of a text, without importing torch.

Texts enter, exact counts leave, with those of the start and the end token. The vocabulary is open_clip's.
"""

from __future__ import annotations

import gzip
import html
import re
from functools import cached_property
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

CACHED_WORDS = 100_000
LONGEST = 256  # letters of a word up to which its count is exact: base64, for example, has no spaces
VOCABULARY = "bpe_simple_vocab_16e6.txt.gz"
MERGES = 49152 - 256 - 2  # lines of it that are used
_ASCII = re.compile(
    r"<start_of_text>|<end_of_text>|'s|'t|'re|'ve|'m|'ll|'d|[a-z]+|[0-9]|[^\sa-z0-9]+", re.IGNORECASE | re.ASCII
)
_SPECIAL = ("<start_of_text>", "<end_of_text>")


class TokenCounter:
    """Counts tokens, with a bounded cache of words. Source: open_clip 3.3.0, tokenizer.py, SimpleTokenizer."""

    def __init__(self) -> None:
        self._words: dict[str, int] = dict.fromkeys(_SPECIAL, 1)

    def __call__(self, text: str) -> int:
        """The tokens of a text that is not cut."""
        if text.isascii() and text.isprintable() and "&" not in text:
            words = _ASCII.findall(text.lower())
        else:
            import ftfy  # of open_clip, as regex: on use, as their import takes long
            import regex

            letters = _ASCII.pattern.replace("a-z", r"\p{L}").replace("0-9", r"\p{N}")
            text = html.unescape(html.unescape(ftfy.fix_text(text))).lower()
            words = regex.findall(letters, text, regex.IGNORECASE)
        known, total = self._words, 2
        for word in words:
            total += known[word] if word in known else self._count(word)
        return total

    @cached_property
    def _ranks(self) -> dict[tuple[str, str], int]:
        package = find_spec("open_clip")
        assert package is not None and package.origin is not None
        text = gzip.decompress(Path(package.origin).with_name(VOCABULARY).read_bytes()).decode()
        pairs = (line.split() for line in text.split("\n")[1 : MERGES + 1])
        return {(first, second): rank for rank, (first, second) in enumerate(pairs)}

    @cached_property
    def _letters(self) -> list[str]:
        """The letter that the vocabulary has for each byte."""
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = iter(range(256, 512))
        return [chr(byte if byte in plain else next(others)) for byte in range(256)]

    def _count(self, word: str) -> int:
        """The tokens of a word that is not in the cache."""
        if len(word) > LONGEST:
            return sum(self._count(word[at : at + LONGEST]) for at in range(0, len(word), LONGEST))
        letters, ranks = self._letters, self._ranks
        parts = [letters[byte] for byte in word.encode("utf-8", "surrogatepass")]
        parts[-1] += "</w>"
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            found = [ranks.get(pair, MERGES) for pair in pairs]
            if (least := min(found)) == MERGES:
                break
            best, merged, at = pairs[found.index(least)], list[str](), 0
            while at < len(parts):
                both = at < len(pairs) and pairs[at] == best
                merged.append(parts[at] + parts[at + 1] if both else parts[at])
                at += 1 + both
            parts = merged
        if len(self._words) >= CACHED_WORDS:
            self._words = dict.fromkeys(_SPECIAL, 1)
        self._words[word] = len(parts)
        return len(parts)

"""MetaCLIP's balancing (arXiv:2309.16671): captions and a list of entries enter, probabilities of samples leave."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from clipstream.errors import SettingsError
from clipstream.utils.content import read_text

_WRAPPED, _SPACE = re.compile(r"([,.;:?!`])"), str.maketrans("\t\n\r", "   ")


class Balance:
    """The entries in captions, which are those of MetaCLIP's `substr_matching`: between spaces or `, . ; : ? !`.

    An entry is looked up by its words: those that begin with a caption's word, with as many words as such entries have.

    Args:
        path: the entries: a JSON list or a line each.
        t: captions with an entry beyond which it is thinned.

    Raises SettingsError: the file cannot be read, or has no entries.
    """

    def __init__(self, path: str, t: int) -> None:
        try:
            text = read_text(Path(path))
            entries = json.loads(text) if text.lstrip().startswith("[") else text.splitlines()
        except (OSError, ValueError) as error:
            raise SettingsError(f"--balance: {path} cannot be read: {error}") from error
        self.t, self._numbers = t, dict[str, int]()
        self._lengths: dict[str, tuple[int, ...]] = {}  # first word -> numbers of words
        for entry in entries:
            if isinstance(entry, str) and entry.strip():
                self._numbers.setdefault(entry, len(self._numbers))
                first, length = entry.split(" ")[0], entry.count(" ") + 1
                self._lengths[first] = tuple({*self._lengths.get(first, ()), length})
        if not self._numbers:
            raise SettingsError(f"--balance: {path} has no entries")
        self._found: list[np.ndarray[Any, Any]] = []
        self._counts: list[int] = []

    def matches(self, caption: str) -> set[int]:
        """The numbers of the entries in a caption."""
        words = _WRAPPED.sub(r" \1 ", caption).translate(_SPACE).split(" ")
        numbers, found = self._numbers, set[int]()
        for place, word in enumerate(words):
            for length in self._lengths.get(word, ()):
                number = numbers.get(word if length == 1 else " ".join(words[place : place + length]))
                if number is not None:
                    found.add(number)
        return found

    def add(self, captions: Iterable[str | None]) -> None:
        """Count the entries of further samples."""
        found = [self.matches(caption or "") for caption in captions]
        self._counts += map(len, found)
        self._found.append(np.fromiter((number for one in found for number in one), np.int32))

    def probabilities(self) -> np.ndarray[Any, Any]:
        """Of each added sample, float64: 1 - prod(1 - min(1, t / captions with the entry)) over its entries."""
        found, counts = np.concatenate([np.zeros(0, np.int32), *self._found]), np.array(self._counts, np.int64)
        share = np.minimum(1, self.t / np.maximum(np.bincount(found, minlength=len(self._numbers)), 1))
        self.head = int((share < 1).sum())  # entries that are thinned
        self.used = len(np.unique(found))
        with np.errstate(divide="ignore"):
            left = np.bincount(np.repeat(np.arange(len(counts)), counts), np.log1p(-share[found]), len(counts))
        return np.asarray(np.abs(np.expm1(left)))

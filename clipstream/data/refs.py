"""Owns where a shard's samples lie: a reference to one, and the table of all; never opens a file.

A worker holds the tables of all shards that its lanes have open, a million samples and more where shards are large, so
a table keeps numbers in arrays and makes a reference when it is asked for one. Against a list of references that is a
seventh of the memory, and no slower, as the collector of garbage need not look at a thousand dicts again and again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple, overload


class SampleRef(NamedTuple):
    """Where a sample's members lie: suffix in lower case -> (offset, size) in bytes."""

    key: str
    members: dict[str, tuple[int, int]]


class SampleTable(Sequence[SampleRef]):
    """References, to which more are appended."""

    def __init__(self, samples: Iterable[SampleRef] = ()) -> None:
        self._keys, self._key_ends = bytearray(), array("Q", [0])  # all keys in UTF-8, one behind the other
        self._kinds: dict[tuple[str, ...], int] = {}  # suffixes of a sample's members -> number
        self._suffixes: list[tuple[str, ...]] = []  # by that number
        self._kind = array("I")
        self._places, self._place_ends = array("Q"), array("Q", [0])  # offset and size of each member
        for key, members in samples:
            self.append(key, members)

    def append(self, key: str, members: dict[str, tuple[int, int]]) -> None:
        """Add a sample."""
        self.add(key, members, list(chain.from_iterable(members.values())))

    def add(self, key: str, members: Iterable[str], places: list[int]) -> None:
        """Add a sample by its members' suffixes and, of each in turn, offset and size."""
        suffixes = tuple(members)
        kind = self._kinds.get(suffixes)
        if kind is None:
            kind = self._kinds[suffixes] = len(self._suffixes)
            self._suffixes.append(suffixes)
        self._kind.append(kind)
        self._keys += key.encode()
        self._key_ends.append(len(self._keys))
        self._places.fromlist(places)
        self._place_ends.append(len(self._places))

    def __len__(self) -> int:
        return len(self._kind)

    @overload
    def __getitem__(self, number: int) -> SampleRef: ...
    @overload
    def __getitem__(self, number: slice) -> list[SampleRef]: ...
    def __getitem__(self, number: int | slice) -> SampleRef | list[SampleRef]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        suffixes = self._suffixes[self._kind[number]]  # raises IndexError
        if number < 0:
            number += len(self)
        key = self._keys[self._key_ends[number] : self._key_ends[number + 1]].decode()
        places = iter(self._places[self._place_ends[number] : self._place_ends[number + 1]])
        return SampleRef(key, dict(zip(suffixes, zip(places, places, strict=True), strict=True)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

"""Random numbers that are functions of a key: hashes, permutations, and a generator for each sample.

Nothing is drawn from a shared stream, so every worker can compute any part of the order, and a resumed run needs no
replay. The numbers are the same on all platforms and versions of Python and numpy.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeAlias, overload

import numpy as np

MASK = (1 << 64) - 1
Keys: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
_DRAWN = 21  # hashed with the key of a sample that has a probability
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 times the golden ratio, rounded to an odd number


def scramble(x: Any) -> Any:
    """The finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).

    Integers of Python are cut to 64 bits by MASK; numpy's wrap around silently in arrays.
    """
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@overload
def mix(*values: int, state: int = 0) -> int: ...


@overload
def mix(*values: Keys, state: Keys | int = 0) -> Keys: ...


def mix(*values: Any, state: Any = 0) -> Any:
    """A 64-bit hash of a sequence of integers, or of each element of arrays uint64 [n].

    `mix(b, state=mix(a))` equals `mix(a, b)`. Each step is a bijection of the state, so sequences of the same length
    that differ in one value never collide.
    """
    for value in values:
        state = scramble(((state * 0xD1342543DE82EF95 & MASK) + (value & MASK) + GOLDEN) & MASK)
    return state


def hash_of(data: bytes) -> int:
    """64 bits of data."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def is_drawn(keys: Keys, probabilities: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Whether samples are drawn, each with its own probability: bool [n].

    Args:
        keys: of the samples' random numbers, uint64 [n]; what SampleRNG draws does not depend on this.
        probabilities: 0 to 1, float64 [n]; NaN for never.
    """
    points = (mix(np.full(1, _DRAWN, dtype=np.uint64), state=keys) >> np.uint64(11)) * 2.0**-53
    return np.asarray(points < probabilities)


class SampleRNG:
    """The generator of one sample, splitmix64: augmentation and the choice of captions draw from it alone."""

    __slots__ = ("_state",)

    def __init__(self, key: int) -> None:
        self._state = key & MASK

    def _next(self) -> int:
        self._state = (self._state + GOLDEN) & MASK
        drawn: int = scramble(self._state)
        return drawn

    def copy(self) -> SampleRNG:
        """A generator that draws the same numbers from here on."""
        return SampleRNG(self._state)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """A number in [low, high)."""
        return low + (high - low) * ((self._next() >> 11) * 2.0**-53)

    def integer(self, n: int) -> int:
        """An integer from 0 to n - 1."""
        return (self._next() * n) >> 64


class SampleRNGs:
    """The generators of n samples: what each draws is what `SampleRNG` of its key draws.

    Args:
        keys: uint64 [n].
    """

    def __init__(self, keys: Keys) -> None:
        self._states = keys.astype(np.uint64)

    def _next(self, which: np.ndarray[Any, Any]) -> Keys:
        states = self._states[which] + np.uint64(GOLDEN)
        self._states[which] = states
        drawn: Keys = scramble(states)
        return drawn

    def uniform(self, which: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """A number in [0, 1) of each generator that `which` selects: positions [m] or a mask [n]."""
        drawn: np.ndarray[Any, np.dtype[np.float64]] = (self._next(which) >> np.uint64(11)) * 2.0**-53
        return drawn

    def integer(self, n: np.ndarray[Any, Any], which: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """An integer from 0 to n - 1, with n below 2^32 for each selected generator: int64 [m]."""
        x, most = self._next(which), n.astype(np.uint64)
        # The upper half of the product of 128 bits.
        low = (x & np.uint64(0xFFFFFFFF)) * most >> np.uint64(32)
        high: Keys = (x >> np.uint64(32)) * most + low >> np.uint64(32)
        return high.astype(np.int64)


def permutation(n: int, key: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A permutation of 0 … n - 1 as int64 [n]: the order of n hashes."""
    x = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(key & MASK)
    order: np.ndarray[Any, np.dtype[np.int64]] = np.argsort(scramble(x), kind="stable")
    return order


def permute(positions: np.ndarray[Any, Any], n: int, key: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The elements of a permutation of 0 … n - 1 at some positions, int64 [m], in memory of O(m).

    A Feistel network of four rounds on the next even number of bits, walked until it ends below n (Black and Rogaway:
    Ciphers with arbitrary finite domains, 2002).
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    found = np.asarray(positions).astype(np.uint64)
    left = np.arange(len(found))
    while len(left):
        high, low = found[left] >> half, found[left] & mask
        for turn in range(4):
            high, low = low, high ^ (scramble(low + np.uint64(mix(key, turn))) & mask)
        found[left] = (high << half) | low
        left = left[found[left] >= np.uint64(n)]
    return found.astype(np.int64)

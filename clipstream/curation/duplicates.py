"""Duplicates among samples: captions, image files, and images that show nearly the same.

Captions and image files enter; hashes of 64 bits, pairs of near ones, and groups leave. Imports no torch.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from PIL import Image

from clipstream.data.decode.images import FACTORS, Colour, ImageHeader, decode, decode_grey, read_header, turn_upright
from clipstream.data.loader.health import FLAT_RANGE, is_flat
from clipstream.data.order.rng import hash_of
from clipstream.data.settings import MAX_PIXELS

SIDE, WAVES = 32, 9  # pixels of a side that an image is reduced to, and lowest frequencies of each side
BATCH = 256  # images that are hashed at once
NEAR = 8  # differing bits of 64 up to which two images are nearly the same
EQUAL = 3  # bands of bits that are compared at once: fewer take more comparisons, more take more passes
MANY = 1 << 21  # hashes from which these bands are wider
Hashes = np.ndarray[Any, np.dtype[np.uint64]]


class Look(NamedTuple):
    """What an image file shows."""

    grey: np.ndarray[Any, np.dtype[np.uint8]]  # [SIDE, SIDE]
    one_colour: bool  # whether all its pixels are (nearly) the same


def look_of(data: bytes, background: Colour, max_pixels: int = MAX_PIXELS, header: ImageHeader | None = None) -> Look:
    """What an image shows, upright. Raises Dropped: the image cannot be decoded.

    A JPEG is decoded at a fraction of its size (`scale_of`), which reads all of the file: only the inverse transform
    and the colours of its pixels are left out.
    """
    header = header or read_header(data, True, max_pixels)
    factor = scale_of(header)
    image = decode_grey(data, header, factor, background)
    box = (0.0, 0.0, header.size[0] / factor, header.size[1] / factor) if factor > 1 else None  # without the padding
    small = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box, reducing_gap=2.0)
    if flat := bool(np.ptp(np.asarray(small)) <= FLAT_RANGE):  # of one grey, which may be of several colours
        flat = is_flat(decode(data, read_header(data, True, max_pixels), factor, background))
    return Look(np.asarray(turn_upright(small, header.orientation)), flat)


def scale_of(header: ImageHeader) -> int:
    """The fraction of its size, one of FACTORS or 1, at which an image is decoded for its look."""
    return next((one for one in FACTORS if header.scales and min(header.size) >= SIDE * one), 1)


def hashes_of(greys: Sequence[np.ndarray[Any, Any]]) -> Hashes:
    """Of each image, uint8 [SIDE, SIDE], whether the 64 lowest frequencies but the mean are above their median.

    A copy that was scaled, encoded again or cropped by some percent differs in few bits.

    Source: the perceptual hash of phash.org, by the discrete cosine transform of 32 x 32 grey pixels, which are
    weighted by a sine, as a crop changes what is near the border most.
    """
    weights, waves, order = _waves()
    grey = np.asarray(greys, np.float64).reshape(-1, SIDE, SIDE)
    values = waves @ (grey - (weights @ grey @ weights)[:, None, None]) @ waves.T
    values = np.round(values.reshape(len(values), WAVES * WAVES).take(order, axis=1), 3)
    middle = np.sort(values)[:, 31:33].mean(axis=1, keepdims=True)
    return np.packbits(values > middle, axis=1).view(">u8")[:, 0].astype(np.uint64)


@cache
def _waves() -> tuple[np.ndarray[Any, Any], ...]:
    """The weights of a row's pixels, their sum being 1, the weighted cosines [WAVES, SIDE], and the places of the 64
    lowest of WAVES x WAVES frequencies without the mean.
    """
    window = np.sin(np.pi / SIDE * (np.arange(SIDE) + 0.5))
    waves = np.cos(np.pi / SIDE * np.outer(np.arange(WAVES), np.arange(SIDE) + 0.5))
    sums = np.add.outer(np.arange(WAVES), np.arange(WAVES)).ravel()
    return window / window.sum(), waves * window, np.argsort(sums, kind="stable")[1:65]


def file_hash(data: bytes) -> int:
    """64 bits of a file, the CRC-32 of each half: in a quarter of the time that BLAKE2 takes."""
    half = len(data) // 2
    return crc32(data[:half]) << 32 | crc32(data[half:])


def caption_hash(text: str) -> int:
    """64 bits of a caption, the same for other spaces, another case and other forms of the same characters."""
    if text.isascii():
        plain = text.lower()
    else:
        plain = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return hash_of(" ".join(plain.split()).encode(errors="surrogatepass"))


def near_pairs(hashes: Hashes, most: int = NEAR) -> Iterator[tuple[Any, Any]]:
    """Numbers of pairs of different hashes with at most `most` differing bits; a pair may come more than once.

    Of `most` + EQUAL bands of bits, EQUAL are the same in such a pair: it stands together if sorted by these. From MANY
    hashes on, bands are wider: of pairs with `most` bits 7 of 8 are found, and all with `most` - 2.
    """
    bands = np.array_split(np.arange(64), most + EQUAL - 2 * (len(hashes) >= MANY))
    for chosen in itertools.combinations(bands, EQUAL):
        keys = np.zeros(len(hashes), np.uint64)
        for bits in chosen:
            keys <<= np.uint64(len(bits))
            keys |= (hashes >> np.uint64(bits[0])) & np.uint64((1 << len(bits)) - 1)
        keys <<= np.uint64(32)
        keys |= np.arange(len(hashes), dtype=np.uint64)
        keys.sort()  # with the number of the hash in its lower half: faster than argsort
        numbers = keys.astype(np.uint32)
        keys >>= np.uint64(32)
        keys, ordered = keys.astype(np.uint32), hashes[numbers]
        left = np.flatnonzero(keys[1:] == keys[:-1])
        for distance in itertools.count(1):
            near = left[_ones(ordered[left] ^ ordered[left + distance]) <= most]
            if len(near):
                yield numbers[near], numbers[near + distance]
            left = left[left + distance + 1 < len(keys)]
            left = left[keys[left] == keys[left + distance + 1]]
            if not len(left):
                break


def _ones(values: Hashes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The number of bits that are set in each value."""
    if hasattr(np, "bitwise_count"):  # since NumPy 2.0
        found: np.ndarray[Any, np.dtype[np.uint8]] = np.asarray(np.bitwise_count(values), np.uint8)
        return found
    bits: np.ndarray[Any, np.dtype[np.uint8]] = np.unpackbits(values.view(np.uint8).reshape(-1, 8), axis=1)
    return np.asarray(bits.sum(axis=1), np.uint8)


class Disjoint:
    """Disjoint sets of the numbers 0 to n - 1, joined by pairs (union-find on arrays).

    Attributes:
        parents: int64 [n], a number of the same set, never a larger one.
    """

    def __init__(self, n: int) -> None:
        self.parents = np.arange(n, dtype=np.int64)

    def join(self, one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> None:
        """Join the sets of one[i] and other[i], int64 [m], for all i."""
        while len(one):
            one, other = self.roots(one), self.roots(other)
            differ = one != other
            low, high = np.minimum(one, other)[differ], np.maximum(one, other)[differ]
            np.minimum.at(self.parents, high, low)
            one, other = low, high

    def roots(self, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The smallest member of each number's set, int64 [m]."""
        found: np.ndarray[Any, Any] = self.parents[numbers]
        while not np.array_equal(above := self.parents[found], found):
            found = above
        self.parents[numbers] = found
        return found


def near_groups(looks: Hashes, most: int = NEAR) -> np.ndarray[Any, Any]:
    """The group of each of the hashes, uint64 [n], by its first one, int64 [n]: near pairs and chains of them."""
    hashes, places, of = np.unique(looks, return_index=True, return_inverse=True)
    sets = Disjoint(len(hashes))
    for some, others in near_pairs(hashes, most):
        sets.join(some, others)
    found: np.ndarray[Any, Any] = places[sets.roots(np.arange(len(hashes)))[of]]
    return found


def group(looks: Hashes, marks: Iterable[tuple[Any, Any]], most: int) -> tuple[np.ndarray[Any, Any], int, int]:
    """The group of each sample, by the number of its first one, int64 [n]; how many samples have a near-duplicate
    image; and up to how many differing bits images are near ones.

    Images that are near others by chance chain a large set to one group: where near images alone make a group of more
    than `most` different hashes, fewer bits may differ, 4 at least. Copies of one image make no chain.

    Args:
        looks: of the samples' images, uint64 [n].
        marks: numbers of samples, int64 [m], and hashes of what they have, [m]: those of an equal hash are a group.
    """
    sets = Disjoint(len(looks))
    for numbers, values in marks:
        first, of = np.unique(values, return_index=True, return_inverse=True)[1:]
        sets.join(numbers[first[of]], numbers)
    once = np.unique(looks, return_index=True)[1]
    for bits in (NEAR, 6, 4):
        near = near_groups(looks, bits)
        if np.bincount(near[once], minlength=1).max() <= most:
            break
    sets.join(near, np.arange(len(looks)))
    return sets.roots(np.arange(len(looks))), int((np.bincount(near)[near] > 1).sum()), bits

"""Owns the shards of `synthetic:`, which no disk holds: one picture for all samples, for tests of speed without data.

The picture is a JPEG, so that a run decodes, crops and resizes as it would; nothing can be learnt from it.
"""

from __future__ import annotations

import io
from collections.abc import Collection
from functools import lru_cache

import numpy as np

from clipstream.data.tarstream import SampleRef, ShardIndex
from clipstream.errors import SettingsError

SHARDS = 100
SAMPLES = 1000  # of a shard
PIXELS = 256
MOST_PIXELS = 4096


def names(spec: str) -> list[str]:
    """The shards of `synthetic:` or `synthetic:PIXELS`.

    Raises:
        SettingsError: PIXELS is no side of a picture.
    """
    text = spec.partition(":")[2]
    pixels = PIXELS if not text else int(text) if text.isdecimal() else 0
    if not 8 <= pixels <= MOST_PIXELS:
        raise SettingsError(f"{spec!r}: synthetic:PIXELS takes the pictures' side, 8 to {MOST_PIXELS} pixels")
    return [f"synthetic:{pixels}/{number:04d}" for number in range(SHARDS)]


class SyntheticShard:
    """Samples with the members `jpg` and `txt`, with an open shard's protocol."""

    def __init__(self, name: str) -> None:
        pixels, _, number = name.partition(":")[2].partition("/")
        self._pixels = int(pixels)
        first = int(number) * SAMPLES
        self.index = ShardIndex([SampleRef(f"{first + i:06d}", {}) for i in range(SAMPLES)], None)

    def load(self, ref: SampleRef, suffixes: Collection[str] | None = None) -> dict[str, bytes]:
        """The sample's members."""
        members = {"jpg": _picture(self._pixels), "txt": f"picture number {int(ref.key)}".encode()}
        return {name: data for name, data in members.items() if suffixes is None or name in suffixes}

    def look(self, ref: SampleRef) -> dict[str, bytes]:
        """As `load`, all members."""
        return self.load(ref)

    def close(self) -> None:
        """Nothing is open."""


@lru_cache(maxsize=8)
def _picture(pixels: int) -> bytes:
    """A JPEG of soft colours: about as many bytes as a photograph's of its size."""
    from PIL import Image

    coarse = np.random.default_rng(0).integers(0, 256, (-(-pixels // 8), -(-pixels // 8), 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(coarse).resize((pixels, pixels), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
    return out.getvalue()

"""Synthetic data as a source type: one JPEG for all samples, for measuring speed without data on disk.

The JPEG is decoded, cropped and resized as a photograph is; nothing can be learned from it.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from functools import lru_cache

import numpy as np
from PIL import Image

from clipstream.data.settings import SourceSettings
from clipstream.data.sources.protocol import OpenShard, SourceContext, SourceType
from clipstream.data.tar import SampleRef, ShardIndex
from clipstream.errors import SettingsError

SHARDS = 100
SAMPLES = 1000  # per shard
PIXELS = 256
MOST_PIXELS = 4096


class SyntheticSource(SourceType):
    """The shards of `synthetic:` or `synthetic:PIXELS`, named `synthetic:PIXELS/NUMBER`."""

    def __init__(self, settings: SourceSettings, context: SourceContext) -> None:
        return

    def list_shards(self, spec: str) -> Sequence[str]:
        """100 shards of 1,000 samples. Raises SettingsError if PIXELS is not 8 to 4096."""
        text = spec.partition(":")[2]
        pixels = PIXELS if not text else int(text) if text.isdecimal() else 0
        if not 8 <= pixels <= MOST_PIXELS:
            raise SettingsError(f"{spec!r}: synthetic:PIXELS takes the pictures' side, 8 to {MOST_PIXELS} pixels")
        return [f"synthetic:{pixels}/{number:04d}" for number in range(SHARDS)]

    def open(self, shard: str) -> OpenShard:
        """The shard; nothing is read."""
        return SyntheticShard(shard)

    def num_samples(self, shard: str) -> int:
        """The same for all shards."""
        return SAMPLES


class SyntheticShard(OpenShard):
    """Samples with the members `jpg` and `txt`."""

    def __init__(self, name: str) -> None:
        pixels, _, number = name.partition(":")[2].partition("/")
        self._pixels = int(pixels)
        first = int(number) * SAMPLES
        self.index = ShardIndex([SampleRef(f"{first + i:06d}") for i in range(SAMPLES)])

    def load(self, ref: SampleRef, suffixes: Collection[str] | None = None) -> dict[str, bytes]:
        """The JPEG, and a caption with the sample's number."""
        members = {"jpg": _picture(self._pixels), "txt": f"picture number {int(ref.key)}".encode()}
        return {name: data for name, data in members.items() if suffixes is None or name in suffixes}


@lru_cache(maxsize=8)
def _picture(pixels: int) -> bytes:
    """A JPEG of smooth colours, about as large in bytes as a photograph of its size."""
    coarse = np.random.default_rng(0).integers(0, 256, (-(-pixels // 8), -(-pixels // 8), 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(coarse).resize((pixels, pixels), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
    return out.getvalue()

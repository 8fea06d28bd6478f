"""Small shards of real images, and a byte tokenizer."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.support.tars import write_tar


class ByteTokenizer:
    """UTF-8 bytes as ids, padded with 0."""

    context_length = 16
    vocab_size = 256

    def encode(self, texts: Sequence[str]) -> np.ndarray[Any, np.dtype[np.int32]]:
        ids = np.zeros((len(texts), self.context_length), dtype=np.int32)
        for row, text in zip(ids, texts, strict=True):
            data = text.encode()[: self.context_length]
            row[: len(data)] = list(data)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i).decode(errors="replace")


def picture(seed: int, size: int = 24, kind: str = "JPEG") -> bytes:
    """A picture of smooth colours that differs by seed."""
    draw = np.random.default_rng(seed)
    small = Image.fromarray(draw.integers(0, 256, (3, 3, 3), dtype=np.uint8))
    out = io.BytesIO()
    small.resize((size, size + seed % 5), Image.Resampling.BICUBIC).save(out, kind)
    return out.getvalue()


def make_shards(folder: Path, counts: Sequence[int], start: int = 0, **extra: Any) -> list[str]:
    """One shard per count, members jpg, txt, json ({"caption": {"en": …}}) and cls; keys run through all shards."""
    paths = []
    number = start
    for i, count in enumerate(counts):
        samples = []
        for _ in range(count):
            caption = f"picture {number}"
            samples.append(
                {
                    "__key__": f"{number:06d}",
                    "jpg": picture(number),
                    "txt": caption,
                    "json": json.dumps({"caption": {"en": caption, "alt": [caption]}, "n": number}),
                    "cls": str(number % 3),
                    **extra,
                }
            )
            number += 1
        paths.append(str(write_tar(folder / f"{i:05d}.tar", samples)))
    return paths


def photo(seed: int) -> Image.Image:
    """An image with structure at several scales."""
    draw, image = np.random.default_rng(seed), np.zeros((128, 128, 3))
    for side in (3, 7, 20):
        noise = Image.fromarray(draw.integers(0, 256, (side, side, 3), dtype=np.uint8))
        image += np.asarray(noise.resize((128, 128), Image.Resampling.BICUBIC), np.float64) / 3
    return Image.fromarray(image.astype(np.uint8))

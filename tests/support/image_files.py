"""Images encoded in every format, and their distance in decibels."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def smooth(width: int, height: int, channels: int = 3, seed: int = 0) -> np.ndarray[Any, Any]:
    """uint8 [height, width, channels] of smooth colours with some noise."""
    draw = np.random.default_rng(seed)
    small = draw.integers(0, 256, (4, 4, channels), dtype=np.uint8)
    planes = [Image.fromarray(small[..., c]).resize((width, height), Image.Resampling.BICUBIC) for c in range(channels)]
    noise = draw.integers(-20, 20, (height, width, channels))
    return np.clip(np.stack([np.asarray(plane) for plane in planes], axis=-1) + noise, 0, 255).astype(np.uint8)


def save(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def decibels(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    return float(10 * np.log10(255**2 / max(1e-6, np.mean((one.astype(float) - other) ** 2))))


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header promises a huge picture."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunk + b"\0\0\0\0IDAT5\xaf\x06\x1e"

"""Images encoded in every format, and their distance in decibels."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import ExifTags, Image


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


def turning(orientation: int) -> bytes:
    """EXIF with an orientation."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif.tobytes()


def turned(picture: Image.Image, orientation: int) -> Image.Image:
    """The picture as a camera stores it that was held so: turned by its EXIF, it is upright."""
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}.get(orientation)
    return picture if undo is None else picture.transpose(Image.Transpose(undo))


def decibels(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    return float(10 * np.log10(255**2 / max(1e-6, np.mean((one.astype(float) - other) ** 2))))


def photograph(width: int, height: int, seed: int) -> Image.Image:
    """A picture with a photograph's spectrum, amplitudes as 1 / frequency, and some edges."""
    draw = np.random.default_rng(seed)
    side = -(-max(width, height) // 256) * 256  # whose transform is fast
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None])
    frequency[0, 0] = 1
    planes = []
    for strength in (1.0, 0.2, 0.2):  # brightness, and two of colour
        noise = draw.normal(size=frequency.shape) + 1j * draw.normal(size=frequency.shape)
        plane = np.fft.irfft2(noise / frequency**1.2, s=(side, side))[:height, :width]
        planes.append(128 + 40 * strength * plane / plane.std())
    planes[0][height // 3 : height // 2, width // 4 : width // 2] += 60
    stack = np.stack(planes, axis=-1)
    return Image.fromarray(np.clip(stack, 0, 255).astype(np.uint8), "YCbCr").convert("RGB")


def sharpness(pixels: np.ndarray[Any, Any]) -> float:
    """Energy of the Laplacian of the grey picture."""
    grey = pixels.astype(float).mean(axis=2)
    inside = 4 * grey[1:-1, 1:-1] - grey[:-2, 1:-1] - grey[2:, 1:-1] - grey[1:-1, :-2] - grey[1:-1, 2:]
    return float(np.mean(inside**2))


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header promises a huge picture."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunk + b"\0\0\0\0IDAT5\xaf\x06\x1e"


def tiff(
    values: np.ndarray[Any, Any],
    order: str = "<",
    photometric: int = 2,
    extra: int | None = None,
    apart: bool = False,
    packed: bool = False,
) -> bytes:
    """A TIFF of one strip, or of one for each band, of the values [height, width, bands] (TIFF 6.0).

    Args:
        order: of bytes, < or >.
        extra: value of ExtraSamples for each band beyond those of `photometric`; None leaves the tag out.
        packed: whether strips are compressed by zlib.
    """
    height, width, bands = values.shape
    parts = [values[..., band] for band in range(bands)] if apart else [values]
    strips = [part.astype(values.dtype.newbyteorder(order)).tobytes() for part in parts]
    strips = [zlib.compress(strip) if packed else strip for strip in strips]
    kind = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    tags: dict[int, tuple[str, list[int]]] = {
        256: ("H", [width]), 257: ("H", [height]), 258: ("H", [8 * values.itemsize] * bands),
        259: ("H", [8 if packed else 1]), 262: ("H", [photometric]), 273: ("I", [0] * len(strips)),
        277: ("H", [bands]), 278: ("H", [height]), 279: ("I", [len(strip) for strip in strips]),
        284: ("H", [1 + apart]), 339: ("H", [kind] * bands),
    }  # fmt: skip
    if extra is not None:
        tags[338] = ("H", [extra] * (bands - (3 if photometric == 2 else 1)))
    start = 8 + 2 + 12 * len(tags) + 4
    sizes = {tag: struct.calcsize(form) * len(found) for tag, (form, found) in tags.items()}
    at = start + sum(size for size in sizes.values() if size > 4)
    for number, strip in enumerate(strips):
        tags[273][1][number] = at
        at += len(strip)
    entries, rest = b"", b""
    for tag, (form, found) in sorted(tags.items()):
        data = struct.pack(f"{order}{len(found)}{form}", *found)
        entries += struct.pack(f"{order}HHI", tag, 3 if form == "H" else 4, len(found))
        entries += data.ljust(4, b"\0") if len(data) <= 4 else struct.pack(f"{order}I", start + len(rest))
        rest += data if len(data) > 4 else b""
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, 8)
    return b"".join([head, struct.pack(f"{order}H", len(tags)), entries, bytes(4), rest, *strips])


def png(values: np.ndarray[Any, Any], bits: int, clear: bytes = b"") -> bytes:
    """A PNG of grey or RGB values [height, width, 1 or 3], or 2 or 4 with alpha, with the chunk tRNS `clear`."""
    height, width, channels = values.shape
    rows = []
    for row in values:
        digits = np.unpackbits(row.astype(">u2").reshape(-1, 1).view(np.uint8), axis=1)[:, 16 - bits :]
        rows.append(np.packbits(digits).tobytes())
    header = struct.pack(">IIBBBBB", width, height, bits, (0, 4, 2, 6)[channels - 1], 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row for row in rows))
    chunks = ((b"IHDR", header), *([(b"tRNS", clear)] if clear else []), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )

"""Generated images for benchmarks: noise with the spectrum of photographs, edges and gradients, in shards.

Photographs have power spectra that fall about as 1/f² (Field 1987, J. Opt. Soc. Am. A 4, 2379), which determines the
size of a JPEG and the time to decode it.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

KINDS = {  # name -> (longer side in pixels, format, pictures, options of the encoder)
    "jpeg-256": (256, "JPEG", 400, {"quality": 85}),
    "jpeg-512": (512, "JPEG", 400, {"quality": 85}),
    "jpeg-1024": (1024, "JPEG", 120, {"quality": 85}),
    "jpeg-2500": (2500, "JPEG", 40, {"quality": 85}),
    "png-512": (512, "PNG", 200, {}),
    "webp-512": (512, "WEBP", 200, {"quality": 80}),
}
SHARDS = 4


def make(kind: str, folder: Path, captions: Sequence[str] = ()) -> list[str]:
    """Shards of one kind, with jpg, png or webp and txt members; their paths.

    Args:
        captions: one for each picture; unless given, the pictures are as many as `KINDS` says.
    """
    side, form, count, options = KINDS[kind]
    captions = captions or [f"a made photograph, number {number}, of hills in mist" for number in range(count)]
    folder.mkdir(parents=True)
    suffix = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}[form]
    paths = [str(folder / f"{shard:05d}.tar") for shard in range(SHARDS)]
    for shard, path in enumerate(paths):
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(shard, len(captions), SHARDS):
                file = io.BytesIO()
                photograph(side, number).save(file, form, **options)
                _add(tar, f"{number:08d}.{suffix}", file.getvalue())
                _add(tar, f"{number:08d}.txt", captions[number].encode())
    return paths


def photograph(side: int, seed: int) -> Image.Image:
    """A picture of side x about 3/4 side pixels (or upright), a function of the seed."""
    rng = np.random.default_rng(seed)
    width, height = (side, side * 3 // 4) if rng.random() < 0.7 else (side * 3 // 4, side)
    fy, fx = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :]
    fall = 1 / np.maximum(np.hypot(fy, fx), 1 / side)
    grey, *tints = (_noise(rng, fall, (height, width)) for _ in range(3))
    red, blue = (0.3 * tint for tint in tints)
    planes = np.stack([grey + red, grey - 0.5 * (red + blue), grey + blue], axis=2)
    image = Image.fromarray(np.clip(128 + 50 * planes, 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(8):  # things with edges
        x, y = rng.integers(0, width), rng.integers(0, height)
        r = int(rng.integers(side // 40, side // 6))
        draw.ellipse([x - r, y - r // 2, x + r, y + r // 2], fill=tuple(int(c) for c in rng.integers(0, 255, 3)))
    return image


def _noise(rng: np.random.Generator, fall: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    spectrum = fall * np.exp(2j * np.pi * rng.random(fall.shape))
    field = np.fft.irfft2(spectrum, shape)
    return np.asarray((field - field.mean()) / field.std())


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    about = tarfile.TarInfo(name)
    about.size = len(data)
    tar.addfile(about, io.BytesIO(data))

"""Owns the pictures of the embedded scenes: shapes, colours, textures and where they stand on 64 x 64 pixels.

It never chooses what a scene holds nor words a caption (`scenes` does), and imports Pillow and numpy only.
"""

from __future__ import annotations

import io
import math
from functools import cache
from random import Random

import numpy as np
from PIL import Image, ImageDraw

SIDE = 64
JPEG_QUALITY = 90
# Masks are drawn this many times larger and averaged down: smooth edges at any size.
FINE = 4

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (215, 25, 30),
    "orange": (250, 130, 10),
    "yellow": (240, 215, 10),
    "green": (30, 150, 50),
    "cyan": (20, 200, 215),
    "blue": (30, 70, 215),
    "purple": (130, 35, 170),
    "pink": (250, 120, 185),
    "brown": (125, 70, 25),
    "black": (22, 22, 26),
}
TEXTURES = ("plain", "striped", "dotted", "checked")
SIZES: dict[str, tuple[int, int]] = {"small": (15, 17), "medium": (23, 25), "large": (34, 38)}
TILTS = (-12, -6, 0, 6, 12)
RAMP = np.linspace(-0.5, 0.5, SIDE, dtype=np.float32)

Point = tuple[float, float]


def _wheel(points: int, inner: float = 1.0, turn: float = -90.0) -> list[Point]:
    """Corners of a regular polygon in the unit square; with `inner` below 1, of a star with twice the corners."""
    corners = points if inner == 1.0 else 2 * points
    radii = [0.5 if i % 2 == 0 else 0.5 * inner for i in range(corners)] if inner < 1.0 else [0.5] * corners
    angles = [math.radians(turn + 360.0 * i / corners) for i in range(corners)]
    return [(0.5 + r * math.cos(a), 0.5 + r * math.sin(a)) for r, a in zip(radii, angles, strict=True)]


def _heart() -> list[Point]:
    """The heart curve x = 16 sin^3 t, y = 13 cos t - 5 cos 2t - 2 cos 3t - cos 4t, in the unit square."""
    outline = []
    for i in range(48):
        t = 2 * math.pi * i / 48
        x = 16 * math.sin(t) ** 3
        y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        outline.append((0.5 + x / 34, 0.46 - y / 34))
    return outline


POLYGONS: dict[str, list[Point]] = {
    "square": [(0.08, 0.08), (0.92, 0.08), (0.92, 0.92), (0.08, 0.92)],
    "triangle": [(0.5, 0.04), (0.98, 0.92), (0.02, 0.92)],
    "diamond": [(0.5, 0.0), (0.85, 0.5), (0.5, 1.0), (0.15, 0.5)],
    "star": _wheel(5, 0.42),
    "cross": [
        (x / 3, y / 3)
        for x, y in ((1, 0), (2, 0), (2, 1), (3, 1), (3, 2), (2, 2), (2, 3), (1, 3), (1, 2), (0, 2), (0, 1), (1, 1))
    ],
    "heart": _heart(),
    "arrow": [(0.0, 0.33), (0.5, 0.33), (0.5, 0.05), (1.0, 0.5), (0.5, 0.95), (0.5, 0.67), (0.0, 0.67)],
    "hourglass": [(0.08, 0.02), (0.92, 0.02), (0.56, 0.5), (0.92, 0.98), (0.08, 0.98), (0.44, 0.5)],
    "bolt": [(0.55, 0.0), (0.15, 0.58), (0.45, 0.58), (0.3, 1.0), (0.85, 0.38), (0.52, 0.38), (0.78, 0.0)],
}
SHAPES = ("circle", "ring", "crescent", *POLYGONS)


@cache
def shape_mask(shape: str, size: int, tilt: int) -> Image.Image:
    """Coverage of a shape: an 'L' picture [size, size], 255 inside, turned by `tilt` degrees."""
    full = size * FINE
    mask = Image.new("L", (full, full), 0)
    draw = ImageDraw.Draw(mask)
    if shape in POLYGONS:
        draw.polygon([(x * (full - 1), y * (full - 1)) for x, y in POLYGONS[shape]], fill=255)
    else:
        draw.ellipse((0, 0, full - 1, full - 1), fill=255)
        hole = {"ring": (0.28, 0.28, 0.72, 0.72), "crescent": (0.35, -0.05, 1.15, 0.75)}.get(shape)
        if hole:
            draw.ellipse(tuple(part * full for part in hole), fill=0)
    return mask.rotate(tilt, Image.Resampling.BILINEAR).reduce(FINE)


@cache
def texture_mask(texture: str, size: int, phase: int) -> Image.Image:
    """Where the second, lighter colour shows: an 'L' picture [size, size]; `phase` in 0..3 shifts the pattern."""
    period = max(4.0, size / 4.0)
    y, x = np.mgrid[0 : size * FINE, 0 : size * FINE] / FINE + phase * period / 4
    if texture == "striped":
        on = (y % period) < period / 2
    elif texture == "checked":
        on = ((x // (period * 0.75)) + (y // (period * 0.75))) % 2 == 0
    elif texture == "dotted":
        on = (x % period - period / 2) ** 2 + (y % period - period / 2) ** 2 < (0.32 * period) ** 2
    else:
        on = np.zeros_like(x, dtype=bool)
    return Image.fromarray((on * 255).astype(np.uint8)).reduce(FINE)


def _background(random: Random) -> Image.Image:
    """A pale colour that fades a little from one side to the other."""
    base = np.array([205 + 45 * random.random() for _ in range(3)], dtype=np.float32)
    slope_x, slope_y = random.uniform(-14, 14), random.uniform(-14, 14)
    fade = slope_x * RAMP[None, :] + slope_y * RAMP[:, None]
    return Image.fromarray(np.minimum(base + fade[:, :, None], 255).astype(np.uint8))


class Canvas:
    """A picture of SIDE x SIDE pixels that things are stamped on; every chance comes from `random`."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._picture = _background(random)

    def stamp(self, shape: str, colour: str, texture: str, size: int, left: int, top: int, phase: int) -> None:
        """Lay one thing of `size` pixels with its upper left corner at (left, top)."""
        random = self._random
        tone = tuple(min(255, max(0, part - 16 + int(random.random() * 33))) for part in COLOURS[colour])
        mask = shape_mask(shape, size, random.choice(TILTS))
        patch = Image.new("RGB", (size, size), tone)
        if texture != "plain":
            # A darker (of black: a lighter) shade of the colour, so that outline and colour stay what they are.
            shade = tuple(part // 2 for part in tone) if max(tone) > 96 else tuple(part + 80 for part in tone)
            patch.paste(shade, (0, 0), texture_mask(texture, size, phase))
        self._picture.paste(patch, (left, top), mask)

    def group(
        self, box: tuple[int, int, int, int], count: int, size: str, colour: str, texture: str, shape: str
    ) -> None:
        """Lay `count` like things apart from each other inside the box (left, top, right, bottom).

        The box is cut into cells that hold one thing each, so they cannot overlap.
        """
        random = self._random
        left, top, right, bottom = box
        side = min(random.randint(*SIZES[size]), right - left, bottom - top)
        columns, rows = max(1, (right - left) // (side + 1)), max(1, (bottom - top) // (side + 1))
        wide, high = (right - left) / columns, (bottom - top) / rows
        phase = random.randrange(4)
        for cell in random.sample(range(columns * rows), count):
            x = left + cell % columns * wide + random.random() * (wide - side)
            y = top + cell // columns * high + random.random() * (high - side)
            self.stamp(shape, colour, texture, side, int(x), int(y), phase)

    def jpeg(self) -> bytes:
        """The picture as JPEG with full colour resolution."""
        out = io.BytesIO()
        self._picture.save(out, "JPEG", quality=JPEG_QUALITY, subsampling=0)
        return out.getvalue()

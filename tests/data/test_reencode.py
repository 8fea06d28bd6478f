"""Resized and re-encoded images: training and evaluation see the same."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, features

from clipstream.curation.pack_shards import Format, Recipe, recode
from clipstream.data.batch import ImageSpec
from clipstream.data.decode.images import EvalTransform
from clipstream.errors import Dropped
from tests.support.image_files import save

NEAR, PALETTE = 2.5, 4.0  # mean differences; evaluation resizes palettes without a filter
KEYS = ("jpg", "jpeg", "png", "webp", "gif")
TO_64 = Recipe(64, "keep", 95)
PROFILE = b"a profile of RGB" * 9


def smooth(width: int, height: int, channels: int = 3) -> Image.Image:
    """Smooth colours, no two corners alike."""
    small = np.random.default_rng(channels).integers(0, 256, (3, 4, channels), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def read(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    exif[ExifTags.Base.Make] = "somebody"
    return exif.tobytes()


def distance(one: bytes, other: bytes, *, upright: bool = False) -> float:
    """Of what the transforms make of two images, at a small size."""
    transform = EvalTransform(ImageSpec((48, 48), resize_mode="squash"), "green", upright)
    return float(np.abs(transform(one).astype(float) - transform(other)).mean())


RGB, RGBA, GREY = smooth(300, 200), smooth(300, 200, 4), smooth(300, 200).convert("L")


@pytest.mark.parametrize(
    ("image", "kind", "options"),
    [
        (smooth(1600, 1200), "JPEG", {"quality": 95}),  # decoded at a smaller scale
        (RGB, "JPEG", {"quality": 95, "icc_profile": PROFILE}),
        (smooth(200, 1200), "JPEG", {"quality": 95}),
        (GREY, "JPEG", {}),
        (RGB.convert("CMYK"), "JPEG", {"quality": 95, "icc_profile": PROFILE}),
        (RGB, "PNG", {"icc_profile": PROFILE}),
        (RGBA, "PNG", {}),
        (RGB.quantize(), "PNG", {}),
        (RGB.quantize(), "PNG", {"transparency": 7}),
        (GREY.convert("LA"), "PNG", {}),
        (Image.fromarray(np.asarray(GREY).astype(np.uint16) << 8), "PNG", {}),
        (RGBA, "WEBP", {"lossless": True}),
        (RGB, "BMP", {}),
        (RGB, "TIFF", {}),
        *([(RGBA, "AVIF", {"quality": 95})] if features.check("avif") else []),
    ],
)
def test_smaller_images_look_the_same(image: Image.Image, kind: str, options: dict[str, Any]) -> None:
    data = save(image, kind, **options)
    smaller, what = recode(data, TO_64)
    found = read(smaller)
    width, height = image.size
    short = min(width, height)
    assert what == "resized"
    assert found.format == kind and found.size == (round(width * 64 / short), round(height * 64 / short))
    clear = "A" in image.mode or "transparency" in options
    assert found.has_transparency_data == clear, "transparency stays, and nothing else becomes transparent"
    assert distance(smaller, data) < (PALETTE if image.mode == "P" else NEAR)
    fits = "icc_profile" in options and image.mode == "RGB"
    assert found.info.get("icc_profile") == (PROFILE if fits else None), "a profile stays where it fits"


def test_unchanged_and_undecodable_files_stay_byte_for_byte() -> None:
    for data in (save(smooth(64, 90), "JPEG"), save(smooth(90, 50), "PNG"), save(smooth(400, 300), "GIF")):
        assert recode(data, TO_64) == (data, "unchanged")
    data = save(RGB, "PNG")
    assert recode(data, Recipe(None, "png", 95)) == (data, "unchanged")
    data = save(RGB, "JPEG")
    for broken in (b"", b"<html>", data[: len(data) // 2], data[:200] + b"damage" * 99):
        assert recode(broken, TO_64) == (broken, "undecodable")
        with pytest.raises(Dropped):
            distance(broken, data)


@pytest.mark.parametrize(("kind", "wanted"), [("jpg", "JPEG"), ("webp", "WEBP"), ("png", "PNG")])
def test_another_format(kind: Format, wanted: str) -> None:
    for image, before in ((smooth(120, 100, 4), "TIFF"), (smooth(120, 100), "BMP"), (smooth(120, 100), "GIF")):
        data = save(image, before)
        other, what = recode(data, Recipe(None, kind, 95, "green"))
        found = read(other)
        assert (what, found.format, found.size) == ("reencoded", wanted, (120, 100))
        assert found.has_transparency_data == (kind != "jpg" and before == "TIFF")
        # Without transparency, the source's background shows.
        assert distance(other, data) < (PALETTE if before == "GIF" else NEAR)


@pytest.mark.parametrize(("kind", "wanted"), [("JPEG", "keep"), ("WEBP", "jpg"), ("PNG", "webp"), ("JPEG", "png")])
def test_orientation_stays_a_tag(kind: str, wanted: Format) -> None:
    """Evaluation takes images as they are stored, training upright ones: both must see what they saw."""
    for orientation in range(1, 9):
        data = save(RGB, kind, exif=turned(orientation))
        smaller, _ = recode(data, Recipe(64, wanted, 95))
        assert read(smaller).size == (96, 64)
        assert distance(smaller, data) < NEAR and distance(smaller, data, upright=True) < NEAR
        assert b"somebody" not in smaller, "other metadata is not needed"
    tiff = save(RGB, "TIFF", exif=turned(6))  # Pillow turns a TIFF as it decodes it
    smaller, _ = recode(tiff, TO_64)
    assert read(smaller).size == (64, 96)
    assert distance(smaller, tiff) < NEAR and distance(smaller, tiff, upright=True) < NEAR

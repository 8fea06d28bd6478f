"""Re-encoding of images, smaller or in another format.

The image transforms give the same pixels of the result as of the original, as far as its size and format allow: the
orientation stays in its EXIF tag, and transparency stays if the format has it.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Literal

from PIL import ExifTags, Image

from clipstream.data.decode.images import eight_bits, opened, orientation_of

Format = Literal["keep", "jpg", "webp", "png"]
_NAMES = {"jpg": "JPEG", "webp": "WEBP", "png": "PNG"}
_SAMES = {"MPO": "JPEG"}  # Pillow's name -> format of its first frame
_WRITTEN = frozenset(("JPEG", "PNG", "WEBP", "AVIF", "BMP", "TIFF"))  # not GIF, whose palette would change
_WITHOUT_ALPHA = frozenset(("JPEG", "BMP"))
# Pillow's mode -> the colour space of its profile.
_COLOURS = {"1": "L", "L": "L", "LA": "L", "P": "RGB", "PA": "RGB", "RGB": "RGB", "RGBA": "RGB"}
FINE = 90  # quality from which colour has full resolution: 46 instead of 43 dB at 95, with a quarter more bytes
# A JPEG is decoded at a reduced scale if at least so many times the target's pixels remain: from 2,000 to 3,200 px to
# 512 in a third of the time, with 53 dB to the full decode (42 dB for the most detailed of 6 photographs).
SPARE = 2


@dataclass(frozen=True)
class Recipe:
    """How images are re-encoded."""

    size: int | None  # pixels of the shorter side of larger images; None keeps sizes
    format: Format  # of the result; 'keep' keeps each image's own
    quality: int  # of JPEG, WebP and AVIF, 1 to 100
    background: str = "white"  # colour under transparent pixels, for formats without transparency


def recode(data: bytes, recipe: Recipe) -> tuple[bytes, str]:
    """Re-encode an image file. Only the first frame of an animation is kept, as training uses no other.

    Orientation and colour profile are kept, other metadata is not. Palettes are replaced by RGB; evaluation, which
    resizes palettes without a filter as open_clip does, then has a smoother image. A GIF that is to keep its format is
    returned unchanged.

    Returns:
        (file, 'resized', 'reencoded', 'unchanged' or 'undecodable'); the last two have the original file.
    """
    try:
        image = opened(data)
        orientation = orientation_of(image)
        have = _SAMES.get(str(image.format), str(image.format))
        want = have if recipe.format == "keep" else _NAMES[recipe.format]
        if have == "TIFF":  # turned by Pillow when it is decoded
            image.load()
        smaller = recipe.size is not None and min(image.size) > recipe.size
        if want not in _WRITTEN or not (smaller or want != have):
            return (data, "unchanged")
        colours, profile = _COLOURS.get(image.mode), image.info.get("icc_profile")
        target = image.size
        if smaller and recipe.size is not None:
            scale = recipe.size / min(image.size)
            width, height = (max(recipe.size, round(side * scale)) for side in image.size)
            target = (width, height)
            if have == "JPEG":
                image.draft(image.mode, (target[0] * SPARE, target[1] * SPARE))
        image = eight_bits(image, recipe.background if want in _WITHOUT_ALPHA else None)
        if image.size != target:
            image = image.resize(target, Image.Resampling.LANCZOS)
        # Always given: else Pillow writes the original profile, which may be of another colour space.
        options: dict[str, object] = {"icc_profile": profile if _COLOURS[image.mode] == colours else None}
        if want in ("JPEG", "WEBP", "AVIF"):
            options["quality"] = recipe.quality
        if want == "JPEG":
            options["subsampling"] = "4:4:4" if recipe.quality >= FINE else "4:2:0"
        elif want == "TIFF":
            options["compression"] = "tiff_lzw"
        if orientation != 1:
            exif = Image.Exif()
            exif[ExifTags.Base.Orientation] = orientation
            options["exif"] = exif.tobytes()
        file = io.BytesIO()
        image.save(file, want, **options)
        return (file.getvalue(), "resized" if smaller else "reencoded")
    except Exception:  # Dropped, or any exception of Pillow's readers and writers; training counts the image
        return (data, "undecodable")

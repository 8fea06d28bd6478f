"""Owns the way from a picture's bytes to fewer of them: a smaller picture, or the same in another format.

What the transforms of `images` make of the result is what they made of the picture, as near as its size and format
allow: pixels stay as they are stored, with the orientation's tag beside them, and transparency stays where the format
holds it. It never chooses which pictures are changed.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from PIL import ExifTags, Image

from clipstream.data.images import eight_bits, opened, orientation_of

Format = Literal["keep", "jpg", "webp", "png"]
_NAMES = {"jpg": "JPEG", "webp": "WEBP", "png": "PNG"}
_SAMES = {"MPO": "JPEG"}  # Pillow's name -> the format that it is
_WRITTEN = frozenset(("JPEG", "PNG", "WEBP", "AVIF", "BMP", "TIFF"))  # a GIF would get another palette
_WITHOUT_ALPHA = frozenset(("JPEG", "BMP"))
_SUFFIXES = {"jpg": "JPEG", "jpeg": "JPEG", "webp": "WEBP", "png": "PNG", "gif": "", "avif": "", "bmp": "", "tif": "",
             "tiff": ""}  # fmt: skip
# Pillow's modes by what their colour profile is for.
_COLOURS = {"1": "L", "L": "L", "LA": "L", "P": "RGB", "PA": "RGB", "RGB": "RGB", "RGBA": "RGB"}
FINE = 90  # quality from which colour is kept at full resolution: 46 instead of 43 dB at 95, for a quarter more bytes
# A JPEG is decoded at a reduced scale as long as that leaves so many times the target: at 2,000 to 3,200 px to 512 it
# takes a third of the time, 53 dB from the full decode (42 dB for the most detailed of 6 photographs).
SPARE = 2


@dataclass(frozen=True)
class Recipe:
    """What becomes of pictures.

    Attributes:
        size: pixels of the shorter side of those that are larger; None leaves sizes alone.
        format: what they are written as; 'keep' writes each as what it is.
        quality: of JPEG, WebP and AVIF, 1 to 100.
        background: colour under transparent pixels where the format has none.
    """

    size: int | None
    format: Format
    quality: int
    background: str = "white"

    def suffix(self, suffix: str) -> str:
        """The suffix of a member whose picture gets this format: only its last part is a format's name, or is none."""
        head, dot, last = suffix.rpartition(".")
        same = self.format == "keep" or _SUFFIXES.get(last.lower(), _NAMES[self.format]) == _NAMES[self.format]
        return suffix if same else f"{head}{dot}{self.format}"


class Recoded(NamedTuple):
    """A picture as it goes on.

    Attributes:
        data: its bytes; those that came in where nothing was to be done, or nothing could be.
        what: 'resized', 'reencoded', 'unchanged' or 'undecodable'.
    """

    data: bytes
    what: str


def recode(data: bytes, recipe: Recipe) -> Recoded:
    """A picture by the recipe. Of an animation only the first frame goes on, as training sees no other.

    Of metadata, the orientation and the colour profile stay. A picture with a palette gets rid of it, and evaluation,
    which resizes palettes without a filter as open_clip does, then sees a smoother one. A picture that cannot be
    decoded or written stays as it is, and so does a GIF that is to keep its format.
    """
    try:
        picture = opened(data)
        orientation = orientation_of(picture)
        have = _SAMES.get(str(picture.format), str(picture.format))
        want = have if recipe.format == "keep" else _NAMES[recipe.format]
        if have == "TIFF":  # which Pillow turns as it decodes it
            picture.load()
        smaller = recipe.size is not None and min(picture.size) > recipe.size
        if want not in _WRITTEN or not (smaller or want != have):
            return Recoded(data, "unchanged")
        colours, profile = _COLOURS.get(picture.mode), picture.info.get("icc_profile")
        target = picture.size
        if smaller and recipe.size is not None:
            target = _fitted(picture.size, recipe.size)
            if have == "JPEG":
                picture.draft(picture.mode, (target[0] * SPARE, target[1] * SPARE))
        picture = eight_bits(picture, recipe.background if want in _WITHOUT_ALPHA else None)
        if picture.size != target:
            picture = picture.resize(target, Image.Resampling.LANCZOS)
        profile = profile if _COLOURS[picture.mode] == colours else None
        encoded = _written(picture, want, recipe.quality, orientation, profile)
        return Recoded(encoded, "resized" if smaller else "reencoded")
    except Exception:  # Dropped, or what Pillow's readers and writers raise; training counts the picture
        return Recoded(data, "undecodable")


def _fitted(size: tuple[int, int], shorter: int) -> tuple[int, int]:
    """(width, height) with the shorter side as given, and the ratio as it was."""
    scale = shorter / min(size)
    width, height = (max(shorter, round(side * scale)) for side in size)
    return width, height


def _written(picture: Image.Image, kind: str, quality: int, orientation: int, profile: bytes | None) -> bytes:
    options: dict[str, Any] = {"quality": quality} if kind in ("JPEG", "WEBP", "AVIF") else {}
    if kind == "JPEG":
        options["subsampling"] = "4:4:4" if quality >= FINE else "4:2:0"
    elif kind == "TIFF":
        options["compression"] = "tiff_lzw"
    if orientation != 1:
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        options["exif"] = exif.tobytes()
    # Always told: Pillow writes that of the picture otherwise, which is another's now.
    options["icc_profile"] = profile
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()

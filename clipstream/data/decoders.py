"""Owns the fast ways from a picture's bytes to its pixels: the header alone, and decoding no more than a crop needs.

JPEG goes through simplejpeg (libjpeg-turbo) at 1/1, 1/2, 1/4 or 1/8 of its size, WebP through torchcodec where that is
installed (the extra `webp`), the rest through Pillow, and so does whatever the fast ones refuse. They give Pillow's
pixels, but for JPEG's chroma, which is not smoothed where it is enlarged; and a picture is used or dropped whichever
decoded it.

Measured on one core, JPEG of 350 to 700 px, whole: simplejpeg 0.90 ms, torchcodec 1.15, opencv 1.13, Pillow 1.48; of
2,000 to 3,200 px at 1/8: all 9.7 to 9.9, as nearly all of that is undoing the entropy coding. WebP of 256 px:
torchcodec 0.67 ms, Pillow 1.14. None of them decodes a WebP scaled, or some rows of a JPEG only. PNG stays with Pillow:
torchvision's decoder ends the process on some broken files, pyspng (twice as fast) takes broken data for pixels.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import simplejpeg
from PIL import Image

from clipstream.data.images import Colour, Pixels, check_size, converted, loaded, opaque, opened, orientation_of

try:
    from torchcodec.decoders import decode_webp
except (ImportError, OSError, RuntimeError):  # not installed, too old, or made for another torch
    decode_webp = None

FACTORS = (8, 4, 2)  # that libjpeg-turbo has fast code for
_SPACES = frozenset(("YCbCr", "Gray", "RGB"))  # the others, of four inks, go through Pillow
_EXIF = b"Exif\0\0"


class Header(NamedTuple):
    """What the first bytes of a picture say.

    Attributes:
        kind: 'jpeg', 'webp' or 'other'; 'other' is decoded by Pillow.
        size: (width, height) as stored, in pixels.
        orientation: what EXIF says of it, 1 to 8; 1 where nobody asked.
        scales: whether it can be decoded at less than its size.
        picture: Pillow's, where it had to be opened.
    """

    kind: str
    size: tuple[int, int]
    orientation: int
    scales: bool
    picture: Image.Image | None = None


def read_header(data: bytes, upright: bool) -> Header:
    """The header; nothing is decoded.

    Args:
        data: a picture file.
        upright: whether its orientation counts.

    Raises:
        Dropped: `undecodable_image` or `image_too_large`.
    """
    jpeg = _jpeg_size(data)
    if jpeg is not None and not (upright and _EXIF in data):
        check_size(jpeg)
        return Header("jpeg", jpeg, 1, True)
    picture = opened(data)
    orientation = orientation_of(picture) if upright else 1
    if jpeg is not None:
        return Header("jpeg", jpeg, orientation, True)
    still = picture.format == "WEBP" and not getattr(picture, "is_animated", False)
    kind = "webp" if still and decode_webp is not None else "other"
    return Header(kind, picture.size, orientation, picture.format in ("JPEG", "MPO"), picture)


def decode(data: bytes, header: Header, factor: int, background: Colour) -> Pixels:
    """The pixels as stored, uint8 [ceil(h / factor), ceil(w / factor), c] with c = 1 (grey), 3, or 4 (with alpha).

    Args:
        data: the file.
        header: what `read_header` gave.
        factor: 1, or one of FACTORS where `header.scales`.
        background: laid under transparency where the pixels come without it.

    Raises:
        Dropped: `undecodable_image`.
    """
    width, height = header.size
    try:
        if header.kind == "jpeg":
            least = {"min_height": -(-height // factor), "min_width": -(-width // factor)}
            pixels: Pixels = simplejpeg.decode_jpeg(data, "RGB", fastupsample=True, **least)
            return pixels
        if header.kind == "webp":
            pixels = decode_webp(data, mode="UNCHANGED").permute(1, 2, 0).numpy()
            return pixels
    except (ValueError, RuntimeError):
        pass  # Pillow forgives more, or says what is wrong
    picture = header.picture or opened(data)
    if factor > 1:
        picture.draft(picture.mode, (max(1, width // factor), max(1, height // factor)))
    picture = opaque(loaded(picture), background)
    return np.asarray(picture if picture.mode == "RGB" else converted(picture))


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    """(width, height) of a JPEG that simplejpeg decodes."""
    if data[:2] != b"\xff\xd8":
        return None
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    return (width, height) if space in _SPACES else None

"""Owns Pillow's way from a picture's bytes to uint8 pixels: every format that is promised, and evaluation's transform.

The size is checked in the header, transparency is laid on a background, 16-bit greys are scaled to 8 bits, EXIF
orientation is followed where that is asked for. Of an animation the first frame counts. Colour profiles are left alone,
as open_clip does. It never normalises (the model does, on its device), never draws from random state, never imports
torch. Training's crops are in `crops`, decoders that are faster in `decoders`.
"""

from __future__ import annotations

import io
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from clipstream.batch import ImageSpec
from clipstream.data.settings import rgb
from clipstream.errors import Dropped, SettingsError

if TYPE_CHECKING:
    from clipstream.data.order import Draws

MAX_PIXELS = 178_956_970  # where Pillow refuses a picture as a decompression bomb (a quarter of 2 GiB of RGBX)
# Not every format of Pillow: its EPS reader, for one, starts a program. An MPO is opened as a JPEG.
PLUGINS = {"JPEG": "Jpeg", "PNG": "Png", "WEBP": "WebP", "GIF": "Gif", "BMP": "Bmp", "TIFF": "Tiff"}
PLUGINS |= {"AVIF": "Avif"} if find_spec("PIL._avif") else {}
FORMATS = tuple(PLUGINS)
Image.preinit()  # Pillow would do it at the first picture: in each worker anew, which costs memory and time
for _name in PLUGINS.values():
    import_module(f"PIL.{_name}ImagePlugin")

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
Colour = tuple[int, int, int]

FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
_WITH_ALPHA = frozenset(("RGBA", "LA", "PA", "RGBa", "La"))
_TURNS = {  # EXIF 2.32, table 6, tag Orientation -> what makes it upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class EvalTransform:
    """The picture as open_clip's evaluation transform makes it, before ToTensor and Normalize, bit for bit.

    Resizing comes before the conversion to RGB, as there (it matters for palettes and CMYK). Two kinds of pictures
    differ on purpose: open_clip drops an alpha channel and shows whatever lies under it, and turns 16-bit grey white.
    Source: open_clip 3.3.0, transform.py, image_transform(is_train=False).
    """

    def __init__(self, spec: ImageSpec, background: str, upright: bool = False) -> None:
        """
        Args:
            spec: size and mode of the resize.
            background: colour under transparent pixels, a name or #rrggbb.
            upright: whether pictures are turned by their EXIF orientation, which open_clip does not.

        Raises:
            SettingsError: no such colour.
        """
        self.spec = spec
        self.background = colour(background)
        self.upright = upright

    def __call__(self, data: bytes, draws: Draws | None = None, out: Pixels | None = None) -> Pixels:
        """Pixels uint8 [H, W, 3], C-contiguous; written into `out` where that is given. `draws` is not used.

        Raises:
            Dropped: `undecodable_image` or `image_too_large`.
        """
        picture = opened(data)
        orientation = orientation_of(picture) if self.upright else 1
        picture = turned(opaque(loaded(picture), self.background), orientation)
        height, width = _target(picture.size, self.spec)
        if height * width > MAX_PIXELS:
            raise Dropped("image_too_large", f"a strip of {picture.size[0]} x {picture.size[1]} pixels")
        if picture.size != (width, height):
            # open_clip forgets the filter where a picture's shortest side is fitted to a target that is not square.
            oblong = self.spec.resize_mode == "shortest" and self.spec.size[0] != self.spec.size[1]
            picture = picture.resize((width, height), FILTERS["bicubic" if oblong else self.spec.interpolation])
        fill = self.spec.fill if self.spec.resize_mode == "longest" else 0
        return written(_centre(picture, self.spec.size, fill), out)


def colour(name: str) -> Colour:
    """The colour of a name or #rrggbb. Raises SettingsError."""
    try:
        return rgb(name)
    except ValueError as error:
        raise SettingsError(f"background: {error}") from error


def opened(data: bytes) -> Image.Image:
    """The picture with its header read and nothing decoded. Raises Dropped."""
    try:
        picture: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise Dropped("image_too_large", str(error)) from error
    except UnidentifiedImageError as error:
        raise Dropped("undecodable_image", f"no picture: {len(data)} bytes that begin {bytes(data[:8])!r}") from error
    except Exception as error:  # Pillow's readers raise nearly anything on broken files
        raise Dropped("undecodable_image", repr(error)) from error
    check_size(picture.size)
    return picture


def check_size(size: tuple[int, int]) -> None:
    """Refuse what would fill the memory.

    Raises:
        Dropped: `image_too_large`, or `undecodable_image` where there is nothing.
    """
    width, height = size
    if width * height > MAX_PIXELS:
        raise Dropped("image_too_large", f"{width} x {height} pixels")
    if width * height == 0:
        raise Dropped("undecodable_image", f"{width} x {height} pixels")


def orientation_of(picture: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; 1 where there is none that can be read."""
    if "exif" not in picture.info or picture.format == "TIFF":  # Pillow turns TIFFs itself
        return 1  # without parsing anything: nearly all pictures of shards are here
    try:
        found = picture.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # a damaged tag is no damaged picture
        return 1
    return found if found in _TURNS else 1


def turned(picture: Image.Image, orientation: int) -> Image.Image:
    """The picture upright."""
    return picture if orientation == 1 else picture.transpose(_TURNS[orientation])


def loaded(picture: Image.Image) -> Image.Image:
    """The picture, decoded. Raises Dropped."""
    try:
        picture.load()
    except Exception as error:  # as above
        raise Dropped("undecodable_image", repr(error)) from error
    return picture


def opaque(picture: Image.Image, background: Colour) -> Image.Image:
    """The picture without transparency and with 8 bits a channel; any other picture as it is."""
    if picture.mode == "I" or picture.mode.startswith("I;16"):
        return Image.fromarray((np.clip(np.asarray(picture), 0, 65535) >> 8).astype(np.uint8))
    if picture.mode not in _WITH_ALPHA and "transparency" not in picture.info:
        return picture
    if picture.mode != "RGBA":
        picture = converted(picture, "RGBA")
    ground = Image.new("RGB", picture.size, background)
    ground.paste(picture, mask=picture)
    return ground


def converted(picture: Image.Image, mode: str = "RGB") -> Image.Image:
    """The picture in another mode. Raises Dropped."""
    try:
        return picture.convert(mode)
    except Exception as error:  # a palette or a transparency chunk that makes no sense
        raise Dropped("undecodable_image", repr(error)) from error


def _target(size: tuple[int, int], spec: ImageSpec) -> tuple[int, int]:
    """(height, width) that the picture is resized to before the crop or the padding, at least 1."""
    width, height = size
    goal_height, goal_width = spec.size
    if spec.resize_mode == "squash":
        return goal_height, goal_width
    if spec.resize_mode == "shortest" and goal_height == goal_width:
        # torchvision's Resize with one number: rounded down.
        if width <= height:
            return int(goal_height * height / width), goal_height
        return goal_height, int(goal_height * width / height)
    pick = min if spec.resize_mode == "shortest" else max
    ratio = pick(height / goal_height, width / goal_width)
    return max(1, round(height / ratio)), max(1, round(width / ratio))


def _centre(picture: Image.Image, size: tuple[int, int], fill: int) -> Image.Image:
    """The centre [H, W] of a picture; where the picture is smaller, `fill` around it (an index, in a palette)."""
    height, width = size
    left, top = _offset(picture.size[0], width), _offset(picture.size[1], height)
    if picture.size[0] >= width and picture.size[1] >= height:
        return picture.crop((left, top, left + width, top + height))
    channels = len(picture.getbands())
    canvas = Image.new(picture.mode, (width, height), fill if channels == 1 else (fill,) * channels)
    palette = picture.getpalette()
    if palette is not None:
        canvas.putpalette(palette)
    canvas.paste(picture, (-left, -top))
    return canvas


def _offset(have: int, want: int) -> int:
    """Where the window of `want` pixels begins; negative where it must be padded (the odd pixel at the end)."""
    return round((have - want) / 2.0) if have >= want else -((want - have) // 2)


def written(picture: Image.Image, out: Pixels | None) -> Pixels:
    """The picture's pixels, uint8 [H, W, 3], in `out` where that is given. Raises Dropped."""
    if picture.mode != "RGB":
        picture = converted(picture)
    if out is None:
        return np.array(picture)
    out[...] = np.asarray(picture)
    return out


def eight_bits(picture: Image.Image, background: str | None) -> Image.Image:
    """An opened picture, decoded, as the transforms see it: of mode RGB or L, or RGBA or LA where it has transparency.

    Args:
        background: colour laid under transparent pixels; None keeps them transparent.

    Raises:
        Dropped: `undecodable_image`.
        SettingsError: no such colour.
    """
    picture = loaded(picture)
    clear = picture.mode in _WITH_ALPHA or "transparency" in picture.info
    if not clear or background is not None:
        picture = opaque(picture, colour(background or "white"))
        return picture if picture.mode in ("RGB", "L") else converted(picture, "L" if picture.mode == "1" else "RGB")
    return picture if picture.mode in ("RGBA", "LA") else converted(picture, "RGBA")

"""Owns the way from a picture's bytes to uint8 pixels of the model's size, for training and for evaluation.

One decode path for JPEG, PNG, WebP and what else Pillow reads: the size is checked in the header, transparency is laid
on a background, 16-bit greys are scaled to 8 bits, EXIF orientation is followed where that is asked for. Of an
animation the first frame counts. Colour profiles are left alone, as open_clip does. It never normalises (the model
does, on its device), never draws from global random state, never imports torch.
"""

from __future__ import annotations

import io
import math
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from clipstream.batch import ImageSpec
from clipstream.data.jitter import ColourJitter
from clipstream.data.settings import AugmentSettings, rgb
from clipstream.errors import Dropped, SettingsError

if TYPE_CHECKING:
    from clipstream.data.order import Draws

MAX_PIXELS = 178_956_970  # where Pillow refuses a picture as a decompression bomb (a quarter of 2 GiB of RGBX)
# Not every format of Pillow: its EPS reader, for one, starts a program. An MPO is opened as a JPEG.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", *(["AVIF"] if find_spec("PIL._avif") else []))

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
_Colour = tuple[int, int, int]

_FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
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
_SIDEWAYS = frozenset((5, 6, 7, 8))


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
        self.background = _colour(background)
        self.upright = upright

    def __call__(self, data: bytes, draws: Draws | None = None, out: Pixels | None = None) -> Pixels:
        """Pixels uint8 [H, W, 3], C-contiguous; written into `out` where that is given. `draws` is not used.

        Raises:
            Dropped: `undecodable_image` or `image_too_large`.
        """
        picture = _open(data)
        orientation = _orientation(picture) if self.upright else 1
        picture = _turned(_opaque(_load(picture), self.background), orientation)
        height, width = _target(picture.size, self.spec)
        if height * width > MAX_PIXELS:
            raise Dropped("image_too_large", f"a strip of {picture.size[0]} x {picture.size[1]} pixels")
        if picture.size != (width, height):
            # open_clip forgets the filter where a picture's shortest side is fitted to a target that is not square.
            oblong = self.spec.resize_mode == "shortest" and self.spec.size[0] != self.spec.size[1]
            picture = picture.resize((width, height), _FILTERS["bicubic" if oblong else self.spec.interpolation])
        fill = self.spec.fill if self.spec.resize_mode == "longest" else 0
        return _pixels(_centre(picture, self.spec.size, fill), out)


class TrainTransform:
    """A random crop resized to the model's size, perhaps mirrored. A picture so long and thin that a crop would show
    next to nothing of it is dropped.

    Trade-off: a JPEG is decoded at 1/2, 1/4 or 1/8 of its size as long as the crop stays at least as large as the
    target, which saves most of the decoding of large photographs. The crop's box may lie between pixels then. Against
    the full decode at 224 px: 36 to 53 dB on five photographs of 2,000 to 3,200 px, 30 dB and more on twenty of 350
    to 700 px.
    """

    def __init__(self, spec: ImageSpec, augment: AugmentSettings, background: str, upright: bool = True) -> None:
        """
        Args:
            spec: size of the result, [H, W]; the crop makes its resize mode and filter meaningless.
            augment: areas and ratios of the crop, the thinnest picture, filter, share of mirrored pictures.
            background: colour under transparent pixels, a name or #rrggbb.
            upright: whether pictures are turned by their EXIF orientation.

        Raises:
            SettingsError: no such colour.
        """
        self.spec = spec
        self.augment = augment
        self.background = _colour(background)
        self.upright = upright
        self.jitter = ColourJitter(augment)

    def __call__(self, data: bytes, draws: Draws | None, out: Pixels | None = None) -> Pixels:
        """Pixels uint8 [H, W, 3], C-contiguous; written into `out` where that is given.

        Raises:
            Dropped: `undecodable_image`, `image_too_large` or `image_too_thin`.
        """
        assert draws is not None, "training draws its crops"
        picture = _open(data)
        if max(picture.size) > self.augment.max_aspect * min(picture.size):
            raise Dropped("image_too_thin", f"{picture.size[0]} x {picture.size[1]} pixels")
        orientation = _orientation(picture) if self.upright else 1
        full = picture.size[::-1] if orientation in _SIDEWAYS else picture.size
        left, top, width, height = crop_box(full, self.augment, draws)
        names = list(_FILTERS) if self.augment.interpolation == "random" else [self.augment.interpolation]
        name = names[draws.integer(len(names))] if len(names) > 1 else names[0]
        flip = self.augment.flip > 0 and draws.uniform() < self.augment.flip
        target_height, target_width = self.spec.size
        scale = min(width / target_width, height / target_height)
        if picture.format in ("JPEG", "MPO") and scale >= 2:
            picture.draft(picture.mode, (int(picture.size[0] / scale), int(picture.size[1] / scale)))
        picture = _turned(_opaque(_load(picture), self.background), orientation)
        if picture.mode not in ("RGB", "L"):
            picture = _convert(picture)
        x, y = picture.size[0] / full[0], picture.size[1] / full[1]
        box = (left * x, top * y, min((left + width) * x, picture.size[0]), min((top + height) * y, picture.size[1]))
        picture = picture.resize((target_width, target_height), _FILTERS[name], box=box)
        if flip:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if not self.jitter.does_nothing:
            picture = self.jitter(_convert(picture), draws)
        return _pixels(picture, out)


def crop_box(size: tuple[int, int], augment: AugmentSettings, draws: Draws) -> tuple[int, int, int, int]:
    """A random crop's (left, top, width, height) in a picture of `size` (width, height), in pixels.

    Ten tries of an area and a ratio (uniform in its logarithm); then the largest centred crop with an allowed ratio.
    Source: torchvision's RandomResizedCrop.get_params (Inception's crop, arXiv:1409.4842, section 6).
    """
    full_width, full_height = size
    low, high = math.log(augment.ratio[0]), math.log(augment.ratio[1])
    for _ in range(10):
        area = full_width * full_height * (augment.scale[0] + (augment.scale[1] - augment.scale[0]) * draws.uniform())
        ratio = math.exp(low + (high - low) * draws.uniform())
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < width <= full_width and 0 < height <= full_height:
            top = draws.integer(full_height - height + 1)
            return draws.integer(full_width - width + 1), top, width, height
    width, height = full_width, full_height
    if full_width / full_height < augment.ratio[0]:
        height = max(1, round(full_width / augment.ratio[0]))
    elif full_width / full_height > augment.ratio[1]:
        width = max(1, round(full_height * augment.ratio[1]))
    return (full_width - width) // 2, (full_height - height) // 2, width, height


def _colour(name: str) -> _Colour:
    try:
        return rgb(name)
    except ValueError as error:
        raise SettingsError(f"background: {error}") from error


def _open(data: bytes) -> Image.Image:
    """The picture with its header read and nothing decoded."""
    try:
        picture: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise Dropped("image_too_large", str(error)) from error
    except UnidentifiedImageError as error:
        raise Dropped("undecodable_image", f"no picture: {len(data)} bytes that begin {bytes(data[:8])!r}") from error
    except Exception as error:  # Pillow's readers raise nearly anything on broken files
        raise Dropped("undecodable_image", repr(error)) from error
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise Dropped("image_too_large", f"{width} x {height} pixels")
    if width * height == 0:
        raise Dropped("undecodable_image", f"{width} x {height} pixels")
    return picture


def _orientation(picture: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; 1 where there is none that can be read."""
    if "exif" not in picture.info or picture.format == "TIFF":  # Pillow turns TIFFs itself
        return 1  # without parsing anything: nearly all pictures of shards are here
    try:
        found = picture.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # a damaged tag is no damaged picture
        return 1
    return found if found in _TURNS else 1


def _turned(picture: Image.Image, orientation: int) -> Image.Image:
    return picture if orientation == 1 else picture.transpose(_TURNS[orientation])


def _load(picture: Image.Image) -> Image.Image:
    try:
        picture.load()
    except Exception as error:  # as above
        raise Dropped("undecodable_image", repr(error)) from error
    return picture


def _opaque(picture: Image.Image, background: _Colour) -> Image.Image:
    """The picture without transparency and with 8 bits a channel; any other picture as it is."""
    if picture.mode == "I" or picture.mode.startswith("I;16"):
        return Image.fromarray((np.clip(np.asarray(picture), 0, 65535) >> 8).astype(np.uint8))
    if picture.mode not in _WITH_ALPHA and "transparency" not in picture.info:
        return picture
    if picture.mode != "RGBA":
        picture = _convert(picture, "RGBA")
    ground = Image.new("RGB", picture.size, background)
    ground.paste(picture, mask=picture.getchannel("A"))
    return ground


def _convert(picture: Image.Image, mode: str = "RGB") -> Image.Image:
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


def _pixels(picture: Image.Image, out: Pixels | None) -> Pixels:
    if picture.mode != "RGB":
        picture = _convert(picture)
    if out is None:
        return np.array(picture)
    out[...] = np.asarray(picture)
    return out


def opened(data: bytes) -> tuple[Image.Image, int]:
    """A picture with its header read and nothing decoded, and the EXIF orientation that the transforms see, 1 to 8.

    Raises:
        Dropped: `undecodable_image` or `image_too_large`.
    """
    picture = _open(data)
    return picture, _orientation(picture)


def eight_bits(picture: Image.Image, background: str | None) -> Image.Image:
    """An opened picture, decoded, as the transforms see it: of mode RGB or L, or RGBA or LA where it has transparency.

    Args:
        background: colour laid under transparent pixels; None keeps them transparent.

    Raises:
        Dropped: `undecodable_image`.
        SettingsError: no such colour.
    """
    picture = _load(picture)
    clear = picture.mode in _WITH_ALPHA or "transparency" in picture.info
    if not clear or background is not None:
        picture = _opaque(picture, _colour(background or "white"))
        return picture if picture.mode in ("RGB", "L") else _convert(picture, "L" if picture.mode == "1" else "RGB")
    return picture if picture.mode in ("RGBA", "LA") else _convert(picture, "RGBA")

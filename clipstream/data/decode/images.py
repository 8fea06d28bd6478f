"""Images: every supported format decoded to uint8 pixels, for training and for evaluation.

An image file enters, uint8 [H, W, 3] leaves. The size is checked in the header, transparency is laid on a background,
values of more than 8 bits are scaled, and EXIF orientation is applied where the settings ask for it. Of an animation
the first frame counts. Colour profiles are ignored, as in open_clip. The model normalizes the pixels.
`train_transform` has the random crop of training, which decodes JPEG and WebP faster (`read_header`, `decode`).
"""

from __future__ import annotations

import contextlib
import io
import re
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import simplejpeg
from PIL import ExifTags, Image

from clipstream.data.batch import ImageSpec
from clipstream.data.decode.image_files import FORMATS, check_size, jpeg_header
from clipstream.data.decode.image_files import open_image as open_image
from clipstream.data.settings import MAX_PIXELS
from clipstream.data.source_settings import ImageTransformSettings, rgb
from clipstream.errors import Dropped
from clipstream.utils.plugins import call_plugin
from clipstream.utils.section import make_part

if TYPE_CHECKING:
    from clipstream.data.order.rng import SampleRNG


MAX_ASPECT = 20  # long side of a training image, relative to the short one

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
Colour = tuple[int, int, int]

FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
_WITH_ALPHA = frozenset(("RGBA", "LA", "PA", "RGBa", "La"))
_DEEP = re.compile("'(?:RGB[AX]?|LA);16[BLN]'")  # in Pillow's description of a file's pixels: colours of 16 bits
_TURNS = {  # EXIF 2.32, table 6: tag Orientation -> operation that makes the image upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class ImageTransform(Protocol):
    """Makes the pixels of an image file."""

    # shares of the last image's area that its crop, and evaluation's, left out; None if they are not known
    lost: tuple[float, float] | None = None
    # of the last image, if its file was written in place of its pixels, what Batch.jpegs says of it
    jpeg: tuple[int, ...] | None = None

    def __call__(self, data: bytes, rng: SampleRNG | None, out: Pixels | None = None) -> Pixels:
        """uint8 [H, W, 3] of the file `data`; written into `out` if given.

        `rng` has the random numbers of the sample; None in evaluation. Raises Dropped if the image cannot be used.
        """
        ...


class UserImageTransform(Protocol):
    """A user's own image transform, constructed with its settings (`data.sources.X.image_transform`)."""

    def __call__(self, image: Image.Image, size: tuple[int, int], rng: SampleRNG | None) -> Pixels:
        """The pixels that the model sees, before normalisation: uint8 [H, W, 3].

        Args:
            image: decoded, in mode RGB, without transparency, upright unless `orientation` is `stored`.
            size: (H, W) of the model.
            rng: random numbers of the sample; None in evaluation, which must not depend on chance.

        Raises Dropped: the image is not wanted; the reason is a short name such as 'too_dark'.
        """
        ...


class OwnImageTransform(ImageTransform):
    """An ImageTransform around a user's UserImageTransform; its exceptions and wrong results drop the sample.

    Args:
        settings: with the class in `type`.
        spec: of the model's pixels.
        background: colour under transparent pixels, a name or #rrggbb.
        upright: whether images are turned by their EXIF orientation.
        max_pixels: images with more are dropped.

    Raises SettingsError: there is no such class, or its construction failed.
    """

    def __init__(
        self,
        settings: ImageTransformSettings,
        spec: ImageSpec,
        background: str,
        upright: bool,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self._size, self._background, self._upright = spec.size, rgb(background), upright
        self._max_pixels = max_pixels
        self._transform: UserImageTransform = make_part("image_transform", settings)

    def __call__(self, data: bytes, rng: SampleRNG | None, out: Pixels | None = None) -> Pixels:
        """See ImageTransform. Raises Dropped: as EvalTransform, `image_transform_error`, or the user's own reason."""
        image = decode_image(data, self._background, self._upright, self._max_pixels)
        image = image if image.mode == "RGB" else convert_image(image)
        pixels = call_plugin("image_transform_error", "the image transform", self._transform, image, self._size, rng)
        shape, dtype = getattr(pixels, "shape", None), getattr(pixels, "dtype", None)
        if not isinstance(pixels, np.ndarray) or shape != (*self._size, 3) or dtype != np.uint8:
            got = f"{type(pixels).__name__} {dtype or ''} {shape or ''}".strip()
            raise Dropped("image_transform_error", f"expected an array uint8 {(*self._size, 3)}, not {got}")
        if out is None:
            return np.ascontiguousarray(pixels)
        out[...] = pixels
        return out


class EvalTransform(ImageTransform):
    """open_clip's evaluation transform, bit for bit, before ToTensor and Normalize.

    The image is resized before it is converted to RGB, which matters for palettes and CMYK. Two kinds of images
    differ on purpose: open_clip drops an alpha channel and shows the pixels under it, and turns 16-bit grey white.
    Source: open_clip 3.3.0, transform.py, image_transform(is_train=False).

    Args:
        spec: size and mode of the resize.
        background: colour under transparent pixels, a name or #rrggbb.
        upright: whether images are turned by their EXIF orientation, which open_clip does not.
    """

    def __init__(self, spec: ImageSpec, background: str, upright: bool = False, max_pixels: int = MAX_PIXELS) -> None:
        self.spec, self.background, self.upright, self.max_pixels = spec, rgb(background), upright, max_pixels

    def __call__(self, data: bytes, rng: SampleRNG | None = None, out: Pixels | None = None) -> Pixels:
        """See ImageTransform; `rng` is not used. Raises Dropped: `undecodable_image` or `image_too_large`."""
        return self.fit(decode_image(data, self.background, self.upright, self.max_pixels), out)

    def fit(self, image: Image.Image, out: Pixels | None = None) -> Pixels:
        """uint8 [H, W, 3] of an image that is decoded. Raises Dropped: as `__call__`."""
        image = opaque(image, self.background)
        self.lost = (lost_area(image.size, self.spec),) * 2
        return write_pixels(fit_image(image, self.spec), out)


def fit_image(image: Image.Image, spec: ImageSpec) -> Image.Image:
    """An opaque image of the model's size, in its own mode. Raises Dropped: `image_too_large`, for an extreme strip."""
    height, width = _target(image.size, spec)
    if height * width > MAX_PIXELS:
        raise Dropped("image_too_large", f"a strip of {image.size[0]} x {image.size[1]} pixels")
    if image.size != (width, height):
        # open_clip ignores the filter in mode 'shortest' if the target is not square.
        oblong = spec.resize_mode == "shortest" and spec.size[0] != spec.size[1]
        image = image.resize((width, height), FILTERS["bicubic" if oblong else spec.interpolation])
    return _centre(image, spec.size, spec.fill if spec.resize_mode == "longest" else 0, spec.floor_crop)


def check_shape(size: tuple[int, int]) -> None:
    """Refuse images that are too long and thin for a training crop (`MAX_ASPECT`). Raises Dropped."""
    if max(size) > MAX_ASPECT * min(size):
        raise Dropped("image_too_thin", f"{size[0]} x {size[1]} pixels")


def orientation_of(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; 1 if there is none that can be read."""
    # Pillow turns TIFFs itself, libjxl what is not the JPEG that a file was made of (ISO 18181-2: not by EXIF).
    upright = image.format == "TIFF" or (image.format == "JXL" and not getattr(image, "jpeg", False))
    if "exif" not in image.info or upright:
        return 1  # nearly all images of shards: nothing is parsed
    try:
        found = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # the image may be intact although the tag is damaged
        return 1
    return found if found in _TURNS else 1


def turn_upright(image: Image.Image, orientation: int) -> Image.Image:
    return image if orientation == 1 else image.transpose(_TURNS[orientation])


def load_image(image: Image.Image) -> Image.Image:
    """The image, decoded; 16-bit colours, of which Pillow keeps the upper 8, are scaled. Raises Dropped."""
    tiles, file = getattr(image, "tile", []), getattr(image, "fp", None)  # gone once it is decoded
    try:
        image.load()
        if tiles and isinstance(file, io.BytesIO):
            if _DEEP.search(str(tiles[0])):
                _scale_colours(image, file.getvalue())
            if image.format == "TIFF" and image.mode == "RGBA":
                _check_alpha(image)
            low = image.getextrema()[0] if image.mode == "I" and image.format == "TIFF" else 0
            if low < 0 and image.tag_v2.get(339) == (1,):  # type: ignore[operator,attr-defined]
                what = "a TIFF image of 1 x 32 bits, unsigned, with values over 2,147,483,647: save it as PNG"
                raise Dropped("undecodable_image", what)
            if image.format == "JPEG2000" and image.mode in ("RGB", "RGBA"):
                _check_depth(image, file.getvalue())
    except Dropped:
        raise
    except Exception as error:  # as in `open_image`
        raise Dropped("undecodable_image", repr(error)) from error
    return image


def decode_image(data: bytes, background: Colour, upright: bool, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The image of a file, decoded, without transparency, and upright if this is asked for. Raises Dropped."""
    image = open_image(data, max_pixels)
    orientation = orientation_of(image) if upright else 1
    return turn_upright(opaque(load_image(image), background), orientation)


def opaque(image: Image.Image, background: Colour) -> Image.Image:
    """The image without transparency and with 8 bits per channel; unchanged if it is so already."""
    image = _narrow(image)
    if not _has_alpha(image):
        return image
    if image.mode != "RGBA":
        image = convert_image(image, "RGBA")
    ground = Image.new("RGB", image.size, background)
    ground.paste(image, mask=image)
    return ground


def is_transparent(image: Image.Image) -> bool:
    """Whether a loaded image has pixels that are not opaque. Raises Dropped."""
    image = _narrow(image)
    return _has_alpha(image) and convert_image(image, "RGBA").getchannel("A").getextrema()[0] != 255


def transparency_note(transparent: int, images: int, background: str) -> str:
    """What is done with transparent images, if there are any."""
    share = transparent / max(images, 1)
    told = f"{share:.0%}" if share >= 0.005 else "less than 1%"
    return f"images: {told} transparent, laid on {background}" if transparent else ""


def _has_alpha(image: Image.Image) -> bool:
    return image.mode in _WITH_ALPHA or "transparency" in image.info


def _narrow(image: Image.Image) -> Image.Image:
    """The image with 8 bits: one of wide values in mode L, or LA where one value is transparent."""
    if not _is_wide(image):
        return image
    values, clear = np.asarray(image), image.info.get("transparency")
    if not isinstance(clear, int) or (seen := values != clear).all():
        return Image.fromarray(_to_uint8(values))
    narrow = _to_uint8(np.where(seen, values, values[seen].min(initial=clear)))
    return Image.fromarray(np.dstack([narrow, seen * np.uint8(255)]))


def _check_alpha(image: Image.Image) -> None:
    """Make a TIFF opaque whose fourth band is not said to be alpha, and refuse one whose alpha looks like another band.

    Pillow takes a band without the tag ExtraSamples as alpha. Raises Dropped.
    """
    if 338 not in image.tag_v2:  # type: ignore[attr-defined]
        image.putalpha(255)
    low, high = image.getchannel("A").getextrema()
    if 0 < int(low) < int(high) < 255:  # type: ignore[arg-type]
        detail = "a TIFF image whose alpha is nowhere 0 or 255, as of near infrared: save the three bands of RGB as PNG"
        raise Dropped("undecodable_image", detail)


def _check_depth(image: Image.Image, data: bytes) -> None:
    """Refuse a JPEG 2000 of more than 8 bits whose values are so low that Pillow, which keeps the upper 8, loses them.

    Source: ISO 15444-1, A.5.1: the marker segment SIZ. Raises Dropped.
    """
    bits = data[data.index(b"\xff\x4f\xff\x51") + 42] % 128 + 1
    if bits > 8 and max(int(high) for _, high in image.getextrema()[:3]) < 64:  # type: ignore[misc]
        raise Dropped("undecodable_image", f"a JPEG 2000 image of {bits} bits with low values: save it as PNG")


def _is_wide(image: Image.Image) -> bool:
    return image.mode in ("I", "F") or image.mode.startswith("I;16")


def _scale_colours(image: Image.Image, data: bytes) -> None:
    """Scale decoded 16-bit colours, and their transparency, by their range, as greys are."""
    upper, clear = np.asarray(image), image.info.pop("transparency", None)
    if clear is None and min(int(upper[..., :3].max()), int(upper[..., 3:].max(initial=255))) >= 64:
        return  # all 16 bits are used
    lower = Image.open(io.BytesIO(data), formats=FORMATS)
    for number, tile in enumerate(lower.tile):  # with the bytes swapped, Pillow keeps the lower 8; of grey, all bytes
        mode, *rest = (tile.args,) if isinstance(tile.args, str) else tile.args or ("",)
        mode = "RGBA" if (grey := mode.startswith("LA")) else mode[:-1] + ("L" if mode[-1] == "B" else "B")
        lower.tile[number] = tile._replace(args=(mode, *rest) if rest else mode)
    values = upper.astype(np.uint16) << 8 | np.asarray(lower)[..., [1, 1, 1, 3] if grey else slice(None)]
    seen = np.ones(values.shape[:2], bool) if clear is None else (values != np.array(clear)).any(axis=2)
    parts = [_to_uint8(part * seen[..., None]) for part in (values[..., :3], values[..., 3:]) if part.size]
    image.paste(Image.fromarray(np.concatenate(parts, axis=2)))
    if not seen.all():  # of the 16 bits, where Pillow compares the lower 8 of one with the upper of the other
        image.putalpha(Image.fromarray(seen * np.uint8(255)))


def _to_uint8(values: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Values of more than 8 bits as uint8, by the range of the image.

    Integers have 8, 10, 12, 14 or 16 bits, whichever holds the highest; fractions range from 0 to 1, to the highest
    below 32, or to 255. If values are negative or higher, the lowest becomes 0 and the highest 255. Values without
    data become 0: NaN, infinite ones, and single ones far outside of the range of the others (-9999, -3.4e38).
    """
    integers = values.dtype.kind in "iu"
    most = 65535 if integers else 255
    wide = values.astype(np.float64)
    found = np.unique(wide[np.isfinite(wide)])
    for _ in range(2):  # the lowest, then the highest value; either may hide the other
        if len(found) > 2 and found[0] < 0 and found[1] - found[0] > (found[-1] - found[1]) / 2:
            found = found[1:]
        if len(found) > 2 and found[-1] > most and found[-1] - found[-2] > (found[-2] - found[0]) / 2:
            found = found[:-1]
    low, high = (float(found[0]), float(found[-1])) if found.size else (0.0, 0.0)
    void = ~((wide >= low) & (wide <= high))  # and NaN
    wide[void] = low
    if low < 0 or high > most:
        wide = (wide - low) * (255 / max(high - low, 1e-30))
    elif integers:
        wide = wide // (1 << next(bits for bits in (0, 2, 4, 6, 8) if high < 256 << bits))
    elif high < 32:
        wide = wide * (255 / max(1.0, high))
    narrow: np.ndarray[Any, np.dtype[np.uint8]] = np.rint(wide).astype(np.uint8)
    narrow[void] = 0
    return narrow


def is_smooth(image: Image.Image) -> bool:
    """Whether a loaded image, once opaque, may be converted to RGB before it is resized, with the same result.

    Not so for palettes and single bits, which Pillow resizes without a filter, nor for CMYK, which is not linear in
    RGB.
    """
    return image.mode in ("L", "RGB") or _is_wide(image) or _has_alpha(image)


def convert_image(image: Image.Image, mode: str = "RGB") -> Image.Image:
    """The image in another mode. Raises Dropped."""
    try:
        return image.convert(mode)
    except Exception as error:  # an invalid palette or transparency chunk
        raise Dropped("undecodable_image", repr(error)) from error


def _target(size: tuple[int, int], spec: ImageSpec) -> tuple[int, int]:
    """(height, width) after the resize, before the crop or the padding; at least 1."""
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


def lost_area(size: tuple[int, int], spec: ImageSpec) -> float:
    """Share of the area of an image of `size` (width, height) that evaluation's centre crop leaves out, 0 to 1."""
    height, width = _target(size, spec)
    return 1 - min(height, spec.size[0]) * min(width, spec.size[1]) / (height * width or 1)


def _centre(image: Image.Image, size: tuple[int, int], fill: int, floor: bool = False) -> Image.Image:
    """The centre [H, W] of an image, padded with `fill` (for a palette, an index) if the image is smaller; `floor` is
    `ImageSpec.floor_crop`.
    """
    height, width = size
    # The start of the window in the image; negative for padding, whose odd pixel is at the end.
    left, top = (
        (round((have - want) / 2.0) if not floor else (have - want) // 2) if have >= want else -((want - have) // 2)
        for have, want in zip(image.size, (width, height), strict=True)
    )
    if image.size[0] >= width and image.size[1] >= height:
        return image.crop((left, top, left + width, top + height))
    channels = len(image.getbands())
    canvas = Image.new(image.mode, (width, height), fill if channels == 1 else (fill,) * channels)
    palette = image.getpalette()
    if palette is not None:
        canvas.putpalette(palette)
    canvas.paste(image, (-left, -top))
    return canvas


def write_pixels(image: Image.Image, out: Pixels | None) -> Pixels:
    """The image's pixels, uint8 [H, W, 3], in `out` if given. Raises Dropped."""
    if image.mode != "RGB":
        image = convert_image(image)
    if out is None:
        return np.array(image)
    out[...] = np.asarray(image)
    return out


def eight_bits(image: Image.Image, background: str | None) -> Image.Image:
    """An opened image, decoded, with 8 bits per channel: in mode RGB or L, or RGBA or LA if it has transparency.

    `background` is the colour under transparent pixels; None keeps the transparency. Raises Dropped.
    """
    image = _narrow(load_image(image))
    if background is None and _has_alpha(image):
        return image if image.mode in ("RGBA", "LA") else convert_image(image, "RGBA")
    image = opaque(image, rgb(background or "white"))
    return image if image.mode in ("RGB", "L") else convert_image(image, "L" if image.mode == "1" else "RGB")


@cache
def webp_decoder() -> Any:
    """torchcodec's decoder of WebP; None if it is not installed, too old, or built for another torch."""
    try:
        return import_module("torchcodec.decoders").decode_webp
    except (ImportError, OSError, RuntimeError, AttributeError):
        return None


FACTORS = (8, 4, 2)  # scales at which libjpeg-turbo decodes fast
_SPACES = frozenset(("YCbCr", "Gray", "RGB"))  # CMYK and YCCK are left to Pillow


class ImageHeader(NamedTuple):
    """The header of an image file."""

    kind: str  # 'jpeg', 'webp' or 'other'; 'other' is decoded by Pillow
    size: tuple[int, int]  # (width, height) as stored, in pixels
    orientation: int  # by EXIF, 1 to 8; 1 if it is ignored
    scales: bool  # whether it can be decoded at a fraction of its size
    image: Image.Image | None = None  # the image opened by Pillow, if that was needed
    hardware: bool = False  # whether the hardware decoder of a GPU takes it as it is, upright


def read_header(data: bytes, upright: bool, max_pixels: int = MAX_PIXELS) -> ImageHeader:
    """The header of an image file, with its orientation if `upright`; no pixels are decoded.

    Raises Dropped: `undecodable_image` or `image_too_large`.
    """
    jpeg, hardware = None, False  # size of a JPEG that simplejpeg decodes
    found = jpeg_header(data) if data[:2] == b"\xff\xd8" else None
    if found is not None and found.is_plain:  # of others libjpeg-turbo has ended the process
        try:
            height, width, space, _ = simplejpeg.decode_jpeg_header(data)
            jpeg = (width, height) if space in _SPACES else None
            hardware = found.is_baseline and space == "YCbCr" and data[-2:] == b"\xff\xd9"  # not cut off
        except ValueError:
            pass  # Pillow tells what is wrong
    if jpeg is not None and not (upright and found is not None and found.exif):
        check_size(jpeg, max_pixels)
        return ImageHeader("jpeg", jpeg, 1, True, hardware=hardware)
    image = open_image(data, max_pixels)
    orientation = orientation_of(image) if upright else 1
    if jpeg is not None:
        return ImageHeader("jpeg", jpeg, orientation, True, hardware=hardware and orientation == 1)
    # torchcodec (0.16, 0.17) turns images by EXIF itself, also where the stored pixels are asked for.
    still = image.format == "WEBP" and not getattr(image, "is_animated", False) and "exif" not in image.info
    kind = "webp" if still and webp_decoder() is not None else "other"
    return ImageHeader(kind, image.size, orientation, found is not None and found.scales, image)


def decode(data: bytes, header: ImageHeader, factor: int, background: Colour) -> Pixels:
    """The pixels as stored, uint8 [ceil(h / factor), ceil(w / factor), c] with c = 3, or 4 (with alpha).

    Args:
        data: the file.
        header: from `read_header`.
        factor: 1, or one of FACTORS if `header.scales`.
        background: colour under transparent pixels in formats that are decoded without alpha.

    Raises Dropped: `undecodable_image`.
    """
    pixels = _pixels(data, header, factor, "RGB")
    if pixels is None:
        image = _by_pillow(data, header, factor, background)
        pixels = np.asarray(image if image.mode == "RGB" else convert_image(image))
    return pixels


def decode_grey(data: bytes, header: ImageHeader, factor: int, background: Colour) -> Image.Image:
    """As `decode`, in grey (mode L); JPEGs are decoded without their colours."""
    pixels = _pixels(data, header, factor, "GRAY")
    if pixels is None:
        image = _by_pillow(data, header, factor, background)
    else:
        image = opaque(Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels), background)
    return image if image.mode == "L" else convert_image(image, "L")


def _pixels(data: bytes, header: ImageHeader, factor: int, space: str) -> Pixels | None:
    """The pixels of a JPEG or WebP; None for what is left to Pillow, which tolerates more and gives better errors."""
    width, height = header.size
    with contextlib.suppress(ValueError, RuntimeError):
        if header.kind == "jpeg":
            least = {"min_height": -(-height // factor), "min_width": -(-width // factor)}
            pixels: Pixels = simplejpeg.decode_jpeg(data, space, fastupsample=True, **least)
            return pixels
        if header.kind == "webp":
            pixels = webp_decoder()(data, mode="UNCHANGED").permute(1, 2, 0).numpy()
            return pixels
    return None


def _by_pillow(data: bytes, header: ImageHeader, factor: int, background: Colour) -> Image.Image:
    """The image without transparency. Raises Dropped."""
    image = header.image or open_image(data)
    if factor > 1:
        image.draft(image.mode, (max(1, header.size[0] // factor), max(1, header.size[1] // factor)))
    return opaque(load_image(image), background)

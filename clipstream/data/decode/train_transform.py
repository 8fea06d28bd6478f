"""Training's image transform: a random crop, resized to the model's size, optionally mirrored and recoloured.

The crop is drawn from the header alone, so that no more than it needs is decoded, and both decoders draw the same crop.
Random numbers come from the sample's SampleRNG only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageEnhance

from clipstream.data.batch import ImageSpec
from clipstream.data.decode.images import (
    FACTORS,
    FILTERS,
    ImageHeader,
    ImageTransform,
    Pixels,
    check_shape,
    decode,
    is_smooth,
    load_image,
    lost_area,
    opaque,
    open_image,
    read_header,
    turn_upright,
    webp_decoder,
    write_pixels,
)
from clipstream.data.settings import MAX_PIXELS, AugmentSettings
from clipstream.data.source_settings import rgb

if TYPE_CHECKING:
    from clipstream.data.order.rng import SampleRNG


# torch's resize of uint8, antialiased as Pillow's and within 1 of it: 0.6 ms where Pillow takes 1.6 to 3.2 (528 px to
# 224). As operators, because only these take a scale besides the sizes, and write into a given tensor.
_RESIZES = {
    "bicubic": torch.ops.aten._upsample_bicubic2d_aa.out,
    "bilinear": torch.ops.aten._upsample_bilinear2d_aa.out,
}
# A JPEG is decoded at a reduced scale if at least so many times the target's pixels remain along each side. With 1,
# crops of large photographs had 0.82 of their detail (Laplacian energy) and 47 instead of 54 dB, in 0.8 of the time.
SPARE = 2
# Longest side of a JPEG that `gpu` leaves to the GPU, which decodes it whole: a worker decodes larger ones reduced.
MAX_SIDE = 1024
# EXIF orientation (2.32, table 6) -> mirror x, mirror y, then transpose, to make the stored pixels upright.
_TURNS = {
    1: (False, False, False), 2: (True, False, False), 3: (True, True, False), 4: (False, True, False),
    5: (False, False, True), 6: (False, True, True), 7: (True, True, True), 8: (True, False, True),
}  # fmt: skip


class Box(NamedTuple):
    """A rectangle of an image, in its pixels."""

    left: int
    top: int
    width: int
    height: int


class TrainTransform(ImageTransform):
    """A random crop, resized to the model's size and optionally mirrored and recoloured.

    `exact` has open_clip's pixels, bit for bit given the same crop: the complete image is decoded and cropped, and
    the crop resized by Pillow, before the conversion to RGB. `fast` decodes a JPEG at 1/2, 1/4 or 1/8 if the crop keeps
    twice the target's pixels, and sharpens the result to compensate. Its crop is at the same position, also between
    pixels. Palettes, single bits and CMYK are handled as in `exact`. `gpu` writes the file of a baseline JPEG of up to
    MAX_SIDE pixels in place of the pixels, if it is no longer than they are, and says so in `jpeg`; it decodes other
    files as `fast` does.

    Trade-off: `benchmarks/decoders.py` compares speed, sharpness and PSNR.

    Args:
        spec: size of the result, [H, W]; its resize mode and filter are not used.
        augment: crop, filter, mirroring and colours.
        background: colour under transparent pixels, a name or #rrggbb.
        upright: whether images are turned by their EXIF orientation, which open_clip does not.
        decoder: fast, exact or gpu.
        max_pixels: images with more are dropped.
    """

    def __init__(
        self,
        spec: ImageSpec,
        augment: AugmentSettings,
        background: str,
        upright: bool = True,
        decoder: Literal["fast", "exact", "gpu"] = "fast",
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self.spec, self.augment, self.max_pixels = spec, augment, max_pixels
        self.background, self.upright = rgb(background), upright
        self.jitter = ColourJitter(augment)
        self._make = self._exact if decoder == "exact" else self._fast
        self._leaves = decoder == "gpu"
        webp_decoder()  # imported before the workers are forked

    def __call__(self, data: bytes, rng: SampleRNG | None, out: Pixels | None = None) -> Pixels:
        """See ImageTransform. Raises Dropped: `undecodable_image`, `image_too_large` or `image_too_thin`."""
        assert rng is not None, "training draws its crops"
        header = read_header(data, self.upright, self.max_pixels)
        check_shape(header.size)
        full = header.size[::-1] if _TURNS[header.orientation][2] else header.size
        box = crop_box(full, self.augment, rng)
        self.lost = 1 - box.width * box.height / (full[0] * full[1]), lost_area(full, self.spec)
        names = list(FILTERS) if self.augment.interpolation == "random" else [self.augment.interpolation]
        name = names[rng.integer(len(names))] if len(names) > 1 else names[0]
        flip = self.augment.flip > 0 and rng.uniform() < self.augment.flip
        self.jpeg = None
        if self._leaves and header.hardware and max(full) <= MAX_SIDE and out is not None and len(data) <= out.nbytes:
            out.reshape(-1)[: len(data)] = np.frombuffer(data, dtype=np.uint8)
            self.jpeg = (len(data), *box, flip, name == "bilinear")
            return out
        pixels = self._make(data, header, box, name, None if flip else out)
        if flip:
            pixels = pixels[:, ::-1]
        if not self.jitter.does_nothing:
            pixels = np.asarray(self.jitter(Image.fromarray(pixels), rng))
        if out is None:
            return np.ascontiguousarray(pixels)
        if pixels is not out:
            out[...] = pixels
        return out

    def _exact(self, data: bytes, header: ImageHeader, box: Box, name: str, out: Pixels | None) -> Pixels:
        image = turn_upright(opaque(load_image(header.image or open_image(data)), self.background), header.orientation)
        image = image.crop((box.left, box.top, box.left + box.width, box.top + box.height))
        return write_pixels(image.resize(self.spec.size[::-1], FILTERS[name]), out)

    def _fast(self, data: bytes, header: ImageHeader, box: Box, name: str, out: Pixels | None) -> Pixels:
        mirror_x, mirror_y, transpose = _TURNS[header.orientation]
        if header.kind == "other" and not header.scales and not is_smooth(load_image(header.image or open_image(data))):
            return self._exact(data, header, box, name, out)
        # The crop as one of the stored image.
        left, top, width, height = (box.top, box.left, box.height, box.width) if transpose else box
        if mirror_x:
            left = header.size[0] - left - width
        if mirror_y:
            top = header.size[1] - top - height
        box = Box(left, top, width, height)
        size = self.spec.size[::-1] if transpose else self.spec.size
        # The largest reduction with which the crop keeps SPARE times the target's pixels.
        scale = min(box.width / size[1], box.height / size[0])
        factor = next((factor for factor in FACTORS if header.scales and scale >= SPARE * factor), 1)
        pixels = decode(data, header, factor, self.background)
        rows, columns = (slice(at // factor, -(-(at + n) // factor)) for at, n in ((top, height), (left, width)))
        part = pixels[rows, columns]
        if part.shape[2] == 4:
            part = np.asarray(opaque(Image.fromarray(part), self.background))
        if not part.flags.writeable:
            part = part.copy()  # else torch warns, although it only reads
        target = out if header.orientation == 1 and part.shape[2] == 3 else None
        if factor > 1:
            pixels = _resize_between(part, box, factor, size, name, target)
        else:
            pixels = np.empty((*size, part.shape[2]), dtype=np.uint8) if target is None else target
            _RESIZES[name](_planes(part), size, False, size[0] / height, size[1] / width, out=_planes(pixels))
            if part.shape[2] == 1:
                pixels = np.repeat(pixels, 3, axis=2)
        if header.orientation == 1:
            return pixels
        # Turned last, when there are fewest pixels.
        pixels = pixels[:: -1 if mirror_y else 1, :: -1 if mirror_x else 1]
        return pixels.transpose(1, 0, 2) if transpose else pixels


def crop_box(size: tuple[int, int], augment: AugmentSettings, rng: SampleRNG) -> Box:
    """A random crop in an image of `size` (width, height).

    Ten attempts with a random area and ratio (uniform in its logarithm); else the largest centred crop with an allowed
    ratio.
    Source: torchvision's RandomResizedCrop.get_params (Inception's crop, arXiv:1409.4842, section 6).
    """
    full_width, full_height = size
    low, high = math.log(augment.ratio[0]), math.log(augment.ratio[1])
    for _ in range(10):
        area = full_width * full_height * (augment.scale[0] + (augment.scale[1] - augment.scale[0]) * rng.uniform())
        ratio = math.exp(low + (high - low) * rng.uniform())
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < width <= full_width and 0 < height <= full_height:
            top = rng.integer(full_height - height + 1)
            return Box(rng.integer(full_width - width + 1), top, width, height)
    width, height = full_width, full_height
    if full_width / full_height < augment.ratio[0]:
        height = max(1, round(full_width / augment.ratio[0]))
    elif full_width / full_height > augment.ratio[1]:
        width = max(1, round(full_height * augment.ratio[1]))
    return Box((full_width - width) // 2, (full_height - height) // 2, width, height)


def _resize_between(
    part: Pixels, box: Box, factor: int, size: tuple[int, int], name: str, out: Pixels | None
) -> Pixels:
    """The crop, of RGB pixels decoded at 1 / factor, resized to `size` (height, width), where the crop may begin
    between two pixels.

    torch's operator begins at whole pixels, so the results for the pixels on both sides are interpolated.
    Interpolation, and the decoder, which gives about the mean of factor x factor pixels, soften the image.
    Subtracting k times a second difference, x - k (x[-1] - 2 x + x[+1]) along each axis, compensates to second order
    (Taylor series of the frequency responses, with half as much again for the higher orders: see
    `benchmarks/decoders.py`).
    """
    scales = (factor * size[0] / box.height, factor * size[1] / box.width)  # target pixels per decoded pixel
    offsets = (box.top % factor / factor, box.left % factor / factor)
    # (first pixel, share) of the crops from the pixel before and the one behind; an offset of 0 needs only the first.
    rows, columns = ([(0, 1 - offset), (1, offset)][: 1 + (offset > 0)] for offset in offsets)
    height, width = size
    soft = torch.zeros(height, width, 3, dtype=torch.float32, device="cpu")
    # The results of one axis, and of both, used again for each pair of beginnings.
    narrow = np.empty((part.shape[0], width, 3), dtype=np.uint8)
    made = np.empty((height, width, 3), dtype=np.uint8)
    for column, share in columns:
        _RESIZES[name](_planes(part[:, column:]), narrow.shape[:2], False, 1.0, scales[1], out=_planes(narrow))
        for row, other in rows:
            _RESIZES[name](_planes(narrow[row:]), size, False, scales[0], 1.0, out=_planes(made))
            soft.add_(torch.from_numpy(made), alpha=share * other)
    sharp = soft.clone()
    for axis in (0, 1):
        k = (1 / 16 + 0.75 * offsets[axis] * (1 - offsets[axis])) * scales[axis] ** 2
        inside, before, after = (soft.narrow(axis, start, size[axis] - 2) for start in (1, 0, 2))
        sharp.narrow(axis, 1, size[axis] - 2).add_(inside, alpha=2 * k).sub_(before, alpha=k).sub_(after, alpha=k)
    target = made if out is None else out
    torch.from_numpy(target).copy_(sharp.round_().clamp_(0, 255))
    return target


def _planes(pixels: Pixels) -> torch.Tensor:
    """[h, w, c] as a view [1, c, h, w]."""
    return torch.from_numpy(pixels).permute(2, 0, 1)[None]


_ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


class ColourJitter:
    """Random brightness, contrast, saturation, hue and greyscale, each with a probability, as in torchvision."""

    def __init__(self, settings: AugmentSettings) -> None:
        self._strengths = settings.color_jitter or (0.0, 0.0, 0.0, 0.0)
        self._share = settings.color_jitter_prob if settings.color_jitter else 0.0
        self._grey = settings.gray_scale_prob

    @property
    def does_nothing(self) -> bool:
        """Whether no image is ever changed; then no random number is drawn."""
        return self._share == 0 and self._grey == 0

    def __call__(self, image: Image.Image, rng: SampleRNG) -> Image.Image:
        """The image, in RGB."""
        order = []
        if self._share > 0 and rng.uniform() < self._share:
            order = [0, 1, 2, 3]  # in a random order, as they do not commute
            for last in (3, 2, 1):
                other = rng.integer(last + 1)
                order[last], order[other] = order[other], order[last]
        for kind in order:
            strength = self._strengths[kind]
            if strength > 0 and kind == 3:
                image = shift_hue(image, rng.uniform(-strength, strength))
            elif strength > 0:
                factor = rng.uniform(max(0.0, 1 - strength), 1 + strength)
                image = _ENHANCERS[kind](image).enhance(factor)
        if self._grey > 0 and rng.uniform() < self._grey:
            image = image.convert("L").convert("RGB")
        return image


def shift_hue(image: Image.Image, turn: float) -> Image.Image:
    """The image with its hues shifted by `turn` of the circle, -0.5 to 0.5."""
    hue, saturation, value = image.convert("HSV").split()
    shifted = np.asarray(hue) + np.uint8(int(turn * 255) % 256)  # uint8 wraps around
    return Image.merge("HSV", (Image.fromarray(shifted), saturation, value)).convert("RGB")

"""Owns training's pixels: a random crop of a picture, resized to the model's size, perhaps mirrored and recoloured.

The crop is drawn from the header alone, so that no more is decoded than it needs, and both decoders draw the same one.
It never draws from global random state.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image

from clipstream.batch import ImageSpec
from clipstream.data.decoders import FACTORS, Header, decode, read_header
from clipstream.data.images import FILTERS, Colour, Pixels, colour, loaded, opaque, opened, turned, written
from clipstream.data.jitter import ColourJitter
from clipstream.data.settings import AugmentSettings
from clipstream.errors import Dropped

if TYPE_CHECKING:
    from clipstream.data.order import Draws

# torch's own resize of bytes, antialiased as Pillow's and within 1 of it: 0.6 ms where Pillow takes 1.6 to 3.2 (528 px
# to 224). As operators, because only these take the scale apart from the sizes, and write to a given place.
_RESIZES = {
    "bicubic": torch.ops.aten._upsample_bicubic2d_aa.out,
    "bilinear": torch.ops.aten._upsample_bilinear2d_aa.out,
}
# EXIF orientation (2.32, table 6) -> mirror x, mirror y, then transpose: that makes the stored pixels upright.
_TURNS = {
    1: (False, False, False), 2: (True, False, False), 3: (True, True, False), 4: (False, True, False),
    5: (False, False, True), 6: (False, True, True), 7: (True, True, True), 8: (True, False, True),
}  # fmt: skip


class Box(NamedTuple):
    """A rectangle of a picture, in its pixels."""

    left: int
    top: int
    width: int
    height: int


class TrainTransform:
    """A random crop resized to the model's size, perhaps mirrored.

    `exact` is open_clip's own way, bit for bit given the same crop: all of the picture is decoded and cropped, and the
    crop resized by Pillow, before the conversion to RGB. `fast` decodes a JPEG at 1/2, 1/4 or 1/8 as long as the crop
    stays at least as large as the target. Its crop lies where the exact one lies, also between pixels.

    Trade-off: against exact, on the mean, at 224 px: 58 dB on photographs of 350 to 700 px, 48 dB on those of 2,000 to
    3,200 px; 3.5 and 7 times the pictures.
    """

    def __init__(
        self,
        spec: ImageSpec,
        augment: AugmentSettings,
        background: str,
        upright: bool = True,
        decoder: Literal["fast", "exact"] = "fast",
    ) -> None:
        """
        Args:
            spec: size of the result, [H, W]; the crop makes its resize mode and filter meaningless.
            augment: areas and ratios of the crop, the thinnest picture, filter, share of mirrored pictures.
            background: colour under transparent pixels, a name or #rrggbb.
            upright: whether pictures are turned by their EXIF orientation, which open_clip does not.
            decoder: fast or exact.

        Raises:
            SettingsError: no such colour.
        """
        self.spec = spec
        self.augment = augment
        self.background = colour(background)
        self.upright = upright
        self.jitter = ColourJitter(augment)
        self._make = self._exact if decoder == "exact" else self._fast

    def __call__(self, data: bytes, draws: Draws | None, out: Pixels | None = None) -> Pixels:
        """Pixels uint8 [H, W, 3], C-contiguous; written into `out` where that is given.

        Raises:
            Dropped: `undecodable_image`, `image_too_large` or `image_too_thin`.
        """
        assert draws is not None, "training draws its crops"
        header = read_header(data, self.upright)
        if max(header.size) > self.augment.max_aspect * min(header.size):
            raise Dropped("image_too_thin", f"{header.size[0]} x {header.size[1]} pixels")
        full = header.size[::-1] if _TURNS[header.orientation][2] else header.size
        box = crop_box(full, self.augment, draws)
        names = list(FILTERS) if self.augment.interpolation == "random" else [self.augment.interpolation]
        name = names[draws.integer(len(names))] if len(names) > 1 else names[0]
        flip = self.augment.flip > 0 and draws.uniform() < self.augment.flip
        pixels = self._make(data, header, box, name, None if flip else out)
        if flip:
            pixels = pixels[:, ::-1]
        if not self.jitter.does_nothing:
            pixels = np.asarray(self.jitter(Image.fromarray(pixels), draws))
        if out is None:
            return np.ascontiguousarray(pixels)
        if pixels is not out:
            out[...] = pixels
        return out

    def _exact(self, data: bytes, header: Header, box: Box, name: str, out: Pixels | None) -> Pixels:
        picture = turned(opaque(loaded(header.picture or opened(data)), self.background), header.orientation)
        picture = picture.crop((box.left, box.top, box.left + box.width, box.top + box.height))
        return written(picture.resize(self.spec.size[::-1], FILTERS[name]), out)

    def _fast(self, data: bytes, header: Header, box: Box, name: str, out: Pixels | None) -> Pixels:
        mirror_x, mirror_y, transpose = _TURNS[header.orientation]
        box = _as_stored(box, header)
        size = self.spec.size[::-1] if transpose else self.spec.size
        factor = _factor(box, size) if header.scales else 1
        pixels = decode(data, header, factor, self.background)
        pixels = _resized(pixels, box, factor, size, name, self.background, out if header.orientation == 1 else None)
        if header.orientation == 1:
            return pixels
        # Only now, as there is least to turn.
        pixels = pixels[:: -1 if mirror_y else 1, :: -1 if mirror_x else 1]
        return pixels.transpose(1, 0, 2) if transpose else pixels


def crop_box(size: tuple[int, int], augment: AugmentSettings, draws: Draws) -> Box:
    """A random crop in a picture of `size` (width, height).

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
            return Box(draws.integer(full_width - width + 1), top, width, height)
    width, height = full_width, full_height
    if full_width / full_height < augment.ratio[0]:
        height = max(1, round(full_width / augment.ratio[0]))
    elif full_width / full_height > augment.ratio[1]:
        width = max(1, round(full_height * augment.ratio[1]))
    return Box((full_width - width) // 2, (full_height - height) // 2, width, height)


def _as_stored(box: Box, header: Header) -> Box:
    """The crop of the upright picture in the picture as it is stored."""
    mirror_x, mirror_y, transpose = _TURNS[header.orientation]
    left, top, width, height = (box.top, box.left, box.height, box.width) if transpose else box
    if mirror_x:
        left = header.size[0] - left - width
    if mirror_y:
        top = header.size[1] - top - height
    return Box(left, top, width, height)


def _factor(box: Box, size: tuple[int, int]) -> int:
    """By how much the picture may be decoded smaller, so that the crop stays at least `size` (height, width).

    A crop that begins between the pixels of the smaller picture has to be resized by Pillow. At 1/2 that costs more
    than decoding saves.
    """
    height, width = size
    scale = min(box.width / width, box.height / height)
    for factor in FACTORS:
        if scale >= factor and (factor > 2 or _aligned(box, factor)):
            return factor
    return 1


def _aligned(box: Box, factor: int) -> bool:
    return box.left % factor == 0 and box.top % factor == 0


def _resized(
    pixels: Pixels, box: Box, factor: int, size: tuple[int, int], name: str, background: Colour, out: Pixels | None
) -> Pixels:
    """The crop at `size` (height, width), out of pixels decoded at 1 / factor; uint8 [height, width, 3]."""
    column, row = box.left // factor, box.top // factor
    part = pixels[row : -(-(box.top + box.height) // factor), column : -(-(box.left + box.width) // factor)]
    if part.shape[2] == 4:
        part = np.asarray(opaque(Image.fromarray(part), background))
    height, width = size
    if not _aligned(box, factor):
        left, top = box.left / factor - column, box.top / factor - row
        edges = (left, top, left + box.width / factor, top + box.height / factor)
        return written(Image.fromarray(part.squeeze()).resize((width, height), FILTERS[name], box=edges), out)
    if not part.flags.writeable:
        part = part.copy()  # torch would warn, although it only reads
    channels = part.shape[2]
    into = out if out is not None and channels == 3 else np.empty((height, width, channels), dtype=np.uint8)
    scales = (factor * height / box.height, factor * width / box.width)
    _RESIZES[name](_planes(part), [height, width], False, *scales, out=_planes(into))
    return into if channels == 3 else np.repeat(into, 3, axis=2)


def _planes(pixels: Pixels) -> torch.Tensor:
    """[h, w, c] as [1, c, h, w], in the same memory."""
    return torch.from_numpy(pixels).permute(2, 0, 1)[None]

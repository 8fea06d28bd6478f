"""Batch, the interface between data and models: one rank's part of a global batch."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


TENSORS = ("pixels", "ids", "weights", "sources", "checksums", "groups", "teacher_pixels", "teacher_ids", "roles")

Lengths = tuple[int, ...] | tuple[tuple[int, ...], ...]


def flat_lengths(lengths: Any) -> tuple[int, ...]:
    """The lengths of all texts, one after the other."""
    return tuple(chain(*lengths)) if lengths and isinstance(lengths[0], tuple) else tuple(lengths)


def hash_rows(ids: torch.Tensor) -> torch.Tensor:
    """int64 [n], equal for equal rows of token ids [n, T].

    The ids times fixed random odd factors, summed modulo 2^64. Of 2^16 rows, two different ones collide with a
    probability near 2^-32.
    """
    import torch

    draw = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (ids.shape[1],), generator=draw) * 2 + 1
    return (ids.long() * factors.to(ids.device, non_blocking=True)).sum(dim=1)


def checksum(data: bytes) -> int:
    """Length and CRC-32 of an image file in one int64, equal for equal files; costs little beside decoding.

    Different files are equal by chance only if they have the same length, and then once in 2^32.
    """
    return (len(data) & 0x7FFFFFFF) << 32 | zlib.crc32(data)


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch, n samples in lane order.

    The tensors of a loader with `zero_copy=True` on the CPU are views of a buffer that it fills again: they are valid
    until the next batch is asked for.

    Attributes:
        pixels: uint8 [n, 3, H, W], not normalised, channels_last in memory; None where `features` holds the images. For
            stored features, with V views of each image, [n V, 3, H, W].
        ids: int32 [n, T], token ids, with M texts of a sample [n, M T]; or class ids [n, 1] of labelled data.
        weights: float32 [n]; with weight 0 a sample does not count in loss, gradients and metrics.
        keys: n strings 'SHARD_BASENAME/KEY', which name samples in logs; '' for padding.
        sources: int tensor [n], position of each sample's source in the sorted list of source names.
        step: number of this batch in its run, from 0.
        global_size: samples of the global batch over all ranks, B.
        features: rows of a feature store by part, [n, W] each, encoded as stored (see `features.manifest`): 'image' and
            'text' in place of images and texts, 'TEACHER.image' and 'TEACHER.text' beside them.
        checksums: int64 [n], checksums of the image files, equal for the same image; None if none were read.
        groups: int64 [n], labels of the samples, equal for those of a group (`loss.positives`), odd for those without a
            group; None if no groups are set.
        teacher_pixels: as `pixels`, at a live teacher's size; None where the teacher takes `pixels`.
        teacher_ids: as `ids`, of a live teacher's tokenizer; None where the teacher takes `ids`.
        known: 'image' or 'text' where `features` has what the tower would give, as it is.
        captions: the texts that `ids` were made of, in evaluation and in the first batch of a process that trains.
        lengths: true length of each text in tokens, or those of a sample's M texts, counted on the host; None if nobody
            counted.
        roles: int32 [n, M], what each of the M texts of a sample is: 1 a caption, -1 a hard negative, 2 a short text, 0
            absent (a copy of a caption); None for a caption of each sample.
        has_short: whether the last of the M texts is the short one.
        jpegs: int32 [n, 7] on the CPU, before the files of JPEGs in `pixels` are decoded: bytes of the file, left, top,
            width and height of the crop, whether it is mirrored, and whether it is resized by bilinear in place of
            bicubic interpolation; zeros where `pixels` has pixels. None in batches that a loader hands out.
    """

    pixels: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor
    keys: Sequence[str]
    sources: torch.Tensor
    step: int
    global_size: int
    features: dict[str, torch.Tensor] = field(default_factory=dict)
    checksums: torch.Tensor | None = None
    groups: torch.Tensor | None = None
    teacher_pixels: torch.Tensor | None = None
    teacher_ids: torch.Tensor | None = None
    lengths: Lengths | None = None
    known: tuple[Literal["image", "text"], ...] = ()
    captions: tuple[str, ...] | None = None
    roles: torch.Tensor | None = None
    jpegs: torch.Tensor | None = None
    has_short: bool = False

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def images(self) -> torch.Tensor:
        """Input of the image tower: `pixels`, or stored features in their place."""
        found = self.features.get("image", self.pixels)
        assert found is not None, "a batch has pixels or features of images"
        return found

    @property
    def texts(self) -> torch.Tensor:
        """Input of the text tower: `ids`, or stored features in their place."""
        return self.features.get("text", self.ids)

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device; copied asynchronously to a GPU if its memory is pinned, and never to the CPU."""
        to_gpu = not str(device).startswith("cpu")
        return self._map(lambda tensor: tensor.to(device, non_blocking=to_gpu))

    def clone(self) -> Batch:
        """A copy that shares no memory with the batch."""
        return self._map(lambda tensor: tensor.clone())

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        held = {name: getattr(self, name) for name in TENSORS}
        changed: dict[str, Any] = {name: function(tensor) for name, tensor in held.items() if tensor is not None}
        return replace(self, features={name: function(rows) for name, rows in self.features.items()}, **changed)

    def tensors(self) -> list[torch.Tensor]:
        held = [*(getattr(self, name) for name in TENSORS), *self.features.values()]
        return [tensor for tensor in held if tensor is not None]

    def without_padding(self) -> Batch:
        """The batch without its samples of weight 0."""
        kept = self.weights > 0
        if bool(kept.all()):
            return self
        places = kept.nonzero().flatten().tolist()
        keys = tuple(self.keys[place] for place in places)
        lengths: Any = None if self.lengths is None else tuple(self.lengths[place] for place in places)
        captions = None if self.captions is None else tuple(self.captions[place] for place in places)
        return replace(self._map(lambda tensor: tensor[kept]), keys=keys, lengths=lengths, captions=captions)


@dataclass(frozen=True)
class ImageSpec:
    """How an image becomes the model's pixels before normalisation, in the terms of open_clip's preprocessing config.

    Attributes:
        size: (height, width) in pixels.
        interpolation: 'bicubic' or 'bilinear'.
        resize_mode: 'shortest' (then a centre crop), 'longest' (then padding) or 'squash'.
        fill: value from 0 to 255 of padding in mode 'longest'.
        floor_crop: whether the offset of the centre crop is rounded down, as transformers does; open_clip, and
            torchvision, round half to even.
    """

    size: tuple[int, int]
    interpolation: str = "bicubic"
    resize_mode: str = "shortest"
    fill: int = 0
    floor_crop: bool = False

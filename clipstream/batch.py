"""Owns Batch, what the data room hands to the model room: one rank's part of a global batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch, n samples in lane order.

    The tensors may be views of a slab that the loader fills again: they are valid until the next batch is asked for.

    Attributes:
        pixels: uint8 [n, 3, H, W], not normalised, channels_last in memory; None where `features` holds the images.
        ids: int32 [n, T], token ids; or class ids [n, 1] of labelled data.
        weights: float32 [n]; 0 makes loss, gradients and metrics as if the sample were not there.
        keys: n strings 'SHARD_BASENAME/KEY', to name samples in logs and to compare orders; '' of padding.
        sources: uint8 or int tensor [n], position of each sample's source in the sorted list of source names.
        step: number of this batch in its run, from 0.
        global_size: samples of the global batch over all ranks, B.
        features: precomputed features of frozen towers by name, [n, D] each; empty for pixels.
        pictures: int64 [n], checksums of the picture files, equal for the same picture; None where none were read.
    """

    pixels: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor
    keys: tuple[str, ...]
    sources: torch.Tensor
    step: int
    global_size: int
    features: dict[str, torch.Tensor] = field(default_factory=dict)
    pictures: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device, copied without blocking where its memory is pinned."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=True)

        return replace(
            self,
            pixels=None if self.pixels is None else move(self.pixels),
            ids=move(self.ids),
            weights=move(self.weights),
            sources=move(self.sources),
            features={name: move(tensor) for name, tensor in self.features.items()},
            pictures=None if self.pictures is None else move(self.pictures),
        )

    def moving(self) -> list[torch.Tensor]:
        """The tensors that `to` moves."""
        found = [self.pixels, self.ids, self.weights, self.sources, *self.features.values(), self.pictures]
        return [tensor for tensor in found if tensor is not None]

    def without_padding(self) -> Batch:
        """The batch without its samples of weight 0."""
        kept = self.weights > 0
        if bool(kept.all()):
            return self
        return Batch(
            pixels=None if self.pixels is None else self.pixels[kept],
            ids=self.ids[kept],
            weights=self.weights[kept],
            keys=tuple(key for key, keep in zip(self.keys, kept.tolist(), strict=True) if keep),
            sources=self.sources[kept],
            step=self.step,
            global_size=self.global_size,
            features={name: rows[kept] for name, rows in self.features.items()},
            pictures=None if self.pictures is None else self.pictures[kept],
        )


@dataclass(frozen=True)
class ImageSpec:
    """How a picture becomes the model's pixels before normalisation, as open_clip's preprocessing config says it.

    Attributes:
        size: (height, width) in pixels.
        interpolation: 'bicubic' or 'bilinear'.
        resize_mode: 'shortest' (then a centre crop), 'longest' (then padding) or 'squash'.
        fill: value from 0 to 255 of padding in mode 'longest'.
    """

    size: tuple[int, int]
    interpolation: str = "bicubic"
    resize_mode: str = "shortest"
    fill: int = 0

"""A live teacher: frozen towers that add their features of each batch, for the losses of distillation.

A batch with pixels and ids enters; the same batch with `teacher.image` and `teacher.text` leaves. The teacher is no
part of the model: it is not trained, saved with checkpoints, or sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from clipstream.data.batch import Batch
from clipstream.models.towers import Towers

NAME = "teacher"  # of its features in a batch


class Teacher:
    """Callable that adds the teacher's L2-normalised features [n, E], float32 or float64, to a batch.

    Args:
        towers: frozen here, in evaluation mode, and moved to `device`.
        autocast: returns the context of a forward pass.

    Attributes:
        chunk: returns the samples of a forward pass; None for all.
    """

    def __init__(self, towers: Towers, device: str, autocast: Callable[[], AbstractContextManager[None]]) -> None:
        self.towers = towers.requires_grad_(False).eval().to(device)
        self.chunk: Callable[[], int | None] = lambda: None
        self._autocast = autocast

    @property
    def scale(self) -> float:
        """exp(logit_scale) of the teacher."""
        scale, _ = self.towers.scalars()
        return float(scale)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Batch:
        """The batch with the teacher's features of its pixels and ids, or of its own where they differ."""
        pixels = batch.pixels if batch.teacher_pixels is None else batch.teacher_pixels
        ids = batch.ids if batch.teacher_ids is None else batch.teacher_ids
        assert pixels is not None, "a live teacher needs pixels"
        size = self.chunk() or len(batch)
        chunks = [slice(start, start + size) for start in range(0, len(batch), size)]
        with self._autocast():
            images = [self.towers.encode_image(pixels[chunk]) for chunk in chunks]
            texts = [self.towers.encode_text(ids[chunk]) for chunk in chunks]
        found = {f"{NAME}.image": torch.cat(images), f"{NAME}.text": torch.cat(texts)}
        return replace(batch, features={**batch.features, **found})

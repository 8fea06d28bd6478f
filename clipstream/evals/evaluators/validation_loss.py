"""Validation loss: the training loss on held-out pairs, in batches of the training's global size.

The batches are fixed: pairs are ordered by a hash of image and ids, for any number of ranks and packing into shards. A
contrastive loss depends on its batch size, so an incomplete last batch is left out (`left_out` counts its pairs); if
there are fewer pairs than one batch, they form a single smaller batch (`batch_size`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from clipstream.data.batch import Batch
from clipstream.errors import SettingsError
from clipstream.evals.context import EvalContext
from clipstream.evals.fingerprints import of_samples
from clipstream.evals.settings import LossEvalSettings, source_of


class ValidationLoss:
    """Yields val_loss (mean over batches), n (pairs in them), batch_size, batches and left_out (pairs).

    Raises SettingsError: no data are set.
    """

    def __init__(self, settings: LossEvalSettings) -> None:
        self.settings = settings
        self.source = source_of(settings)

    def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
        """Evaluate. Collective.

        Raises:
            DataError: no usable pair.
            SettingsError: the loss or the batch size is unknown.
        """
        size = self.settings.global_batch_size or context.data.global_batch_size
        if context.loss is None or not size:
            raise SettingsError("there is no training to take the loss and its global batch size from")
        pairs = self._encoded(context)
        total = len(pairs.keys)
        size = min(size, total)
        count, world = total // size, context.world
        losses = []
        for number in range(count):
            # This rank's part of a batch, as in training.
            first, last = (number * size + size * rank // world.size for rank in (world.rank, world.rank + 1))
            images, texts, batch = pairs.batch(slice(first, last), number, size)
            with torch.no_grad():
                share = context.loss(context.with_scalars(images, texts), batch, world)
            losses.append(share.detach().double())
        yield "val_loss", float(world.all_reduce_sum(torch.stack(losses)).mean())
        yield "n", count * size
        yield "batch_size", size
        yield "batches", count
        yield "left_out", total - count * size

    def _encoded(self, context: EvalContext) -> _Pairs:
        """All ranks' pairs, on every rank."""
        images, texts, rest = [], [], []
        keys: list[str] = []
        for batch in context.batches(self.source, self.settings.batch_size, max_samples=self.settings.max_samples):
            assert batch.pixels is not None and batch.pictures is not None, "an evaluation source gives pixels"
            images.append(context.encode_image(batch.pixels))
            texts.append(context.encode_text(batch.ids))
            marks = torch.from_numpy(of_samples(batch)[1].astype(np.int64))
            rest.append(torch.cat([marks[:, None], batch.pictures[:, None], batch.ids.long()], dim=1))
            keys += batch.keys
        world = context.world
        width = max(world.gather_objects(images[0].shape[1] if images else 0))
        if width == 0:
            raise context.unusable("pair")
        nothing = torch.zeros((0, width), device=world.device)
        none = torch.zeros((0, 2 + context.tokenizer.context_length), dtype=torch.int64)
        numbers = world.gather_rows(torch.cat([none, *rest]).to(world.device))
        return _Pairs(
            images=world.gather_rows(torch.cat([nothing, *images])),
            texts=world.gather_rows(torch.cat([nothing, *texts])),
            pictures=numbers[:, 1],
            ids=numbers[:, 2:],
            keys=[key for some in world.gather_objects(keys) for key in some],
            order=numbers[:, 0].sort(stable=True).indices,
        )


@dataclass(frozen=True)
class _Pairs:
    """All ranks' pairs: features [n, D], image checksums int64 [n], ids int64 [n, T], keys, the order of the rows."""

    images: torch.Tensor
    texts: torch.Tensor
    pictures: torch.Tensor
    ids: torch.Tensor
    keys: list[str]
    order: torch.Tensor

    def batch(self, part: slice, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor, Batch]:
        """Image features, text features and batch of a slice of the order."""
        rows = self.order[part]
        batch = Batch(
            pixels=None,
            ids=self.ids[rows].int(),
            weights=torch.ones(len(rows), device=rows.device),
            keys=tuple(self.keys[row] for row in rows.tolist()),
            sources=torch.zeros(len(rows), dtype=torch.uint8),
            step=step,
            global_size=size,
            pictures=self.pictures[rows],
        )
        return self.images[rows], self.texts[rows], batch

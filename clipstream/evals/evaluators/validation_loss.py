"""Validation loss: the training loss on held-out pairs, in batches of the training's global size.

The batches are fixed: pairs are ordered by a hash of image and ids, for any number of ranks and packing into shards. A
contrastive loss depends on its batch size, so an incomplete last batch is left out (`left_out` counts its pairs); if
there are fewer pairs than one batch, they form a single smaller batch (`batch_size`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from clipstream.data.batch import Batch
from clipstream.errors import SettingsError
from clipstream.evals.context import EvalContext, of_samples
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
            raise SettingsError("requires a training run, or global_batch_size")
        world, images, texts, numbers = context.world, [], [], []
        keys: list[str] = []
        for batch in context.batches(self.source, self.settings.batch_size, max_samples=self.settings.max_samples):
            assert batch.pictures is not None, "an evaluation source gives images"
            images.append(context.encode_image(batch.images))
            texts.append(context.encode_text(batch.ids))
            marks = torch.from_numpy(of_samples(batch)[1].astype(np.int64))
            numbers.append(torch.cat([marks[:, None], batch.pictures[:, None], batch.ids.long()], dim=1))
            keys += batch.keys
        # All ranks' pairs, on every rank.
        all_images, all_texts = map(world.gather_rows, context.stacked("pair", images, texts))
        none = torch.zeros((0, 2 + context.tokenizer.context_length), dtype=torch.int64)
        all_numbers = world.gather_rows(torch.cat([none, *numbers]).to(world.device))
        all_keys = [key for some in world.gather_objects(keys) for key in some]
        order = all_numbers[:, 0].sort(stable=True).indices
        total = len(order)
        size = min(size, total)
        count = total // size
        losses = []
        for number in range(count):
            # This rank's part of a batch, as in training.
            first, last = (number * size + size * rank // world.size for rank in (world.rank, world.rank + 1))
            rows = order[first:last]
            batch = Batch(
                pixels=None,
                ids=all_numbers[rows, 2:].int(),
                weights=torch.ones(len(rows), device=rows.device),
                keys=tuple(all_keys[row] for row in rows.tolist()),
                sources=torch.zeros(len(rows), dtype=torch.uint8),
                step=number,
                global_size=size,
                pictures=all_numbers[rows, 1],
            )
            with torch.no_grad():
                share = context.loss(context.with_scalars(all_images[rows], all_texts[rows]), batch, world)
            losses.append(share.detach().double())
        yield "val_loss", float(world.all_reduce_sum(torch.stack(losses)).mean())
        yield "n", count * size
        yield "batch_size", size
        yield "batches", count
        yield "left_out", total - count * size

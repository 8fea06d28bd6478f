"""Forward and backward passes of a batch: features, the loss on them, and its gradients down to the weights.

**Exactness.** A loss gives each rank its share of the global loss, and one backward pass on every rank gives gradients
whose sum over the ranks is that of the whole batch. DDP averages, so the share is multiplied by the number of ranks.

**Micro-batches** follow GradCache (arXiv:2101.06983). Chunks of the batch pass through the towers without a graph; the
loss is computed once on all features and gives their gradients; then each chunk passes through the towers again, with
the same random numbers, to propagate its features' gradients to the weights. The cost is one more forward pass and
memory for the features, n x 2D. Ranks may have different numbers of chunks: gradients are summed over the ranks once,
in the last chunk of each. Scale and bias take part in the last chunk only, so that they are counted once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.training.parallel import is_sharded, no_sync
from clipstream.training.precision import Precision, autocast, set_torch_state, torch_state

if TYPE_CHECKING:
    from clipstream.losses.contrastive import ContrastiveLoss
    from clipstream.models.towers import Features

Forward = Callable[[Any, Any], Any]  # images, texts -> features


@dataclass(eq=False)
class GradCache:
    """Callable that adds the gradients of the global batch to the parameters."""

    towers: Any  # the model, not wrapped; `image.size`, `context_length` and `has_batch_norm` are read
    model: nn.Module  # the same, wrapped in DDP or sharded
    loss: ContrastiveLoss  # returns this rank's share of the global loss
    world: World  # this rank among the others
    precision: Precision  # of the forward pass
    scaled: Callable[[torch.Tensor], torch.Tensor]  # applied to a share before its backward pass (GradScaler.scale)
    size: int | None = None  # samples per forward pass on this rank; None for all

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's share of the loss, and exp(logit_scale) as it was used. Raises SettingsError: memory runs out."""
        try:
            features, backward = self.forward(batch, self._features)
            leaves, share = self._loss(features, batch)
            backward(leaves)
            return share, leaves.logit_scale.detach()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            advice = "--train.micro-batch-size auto"
            if self.towers.has_batch_norm:
                advice = "a smaller batch"
            elif is_sharded(self.model):
                advice = "a smaller --train.micro-batch-size"
            raise SettingsError(
                f"memory ran out with {min(len(batch), self.size or len(batch))} samples at once: give {advice}, "
                f"--grad-checkpointing or another --precision ({str(error).splitlines()[0]})"
            ) from error

    def warm_up(self) -> None:
        """Forward and backward pass of two samples of zeros; its gradients are zero or nan, and have to be dropped."""
        features = self._features(*self.towers.zeros(2, self.world.device))
        propagate(features, detached(features))

    def forward(self, batch: Batch, last: Forward) -> tuple[Features, Callable[[Features], None]]:
        """The features of all samples, and the function that propagates gradients of their leaves to the weights.

        Args:
            last: the forward pass of the last chunk; it decides whether gradients are summed over the ranks.
        """
        n, device = len(batch), self.world.device
        count = -(-n // (self.size or n))
        if self.size is not None and is_sharded(self.model):
            count = max(self.world.gather_objects(count))  # every pass is collective
        if count == 1:
            features = last(batch.images, batch.texts)
            return features, partial(propagate, features)
        # Chunks of equal size, as a small last one would cost a whole pass; with n < count, some are empty.
        chunks = [slice(n * number // count, n * (number + 1) // count) for number in range(count)]
        states, parts = [], []
        with torch.no_grad():
            for chunk in chunks:
                states.append(torch_state(device))
                found = self._features(*_samples(batch, chunk), self.towers)
                parts.append((found, _length(chunk)))
        images, texts = zip(*((part.image[:size], part.text[:size]) for part, size in parts), strict=True)

        def backward(leaves: Features) -> None:
            after = torch_state(device)
            for chunk, state in zip(chunks, states, strict=True):
                set_torch_state(state, device)
                if chunk is not chunks[-1]:
                    with no_sync(self.model):
                        propagate(self._features(*_samples(batch, chunk)), _rows(leaves, chunk), scalars=False)
                else:
                    propagate(last(*_samples(batch, chunk)), _rows(leaves, chunk))
            set_torch_state(after, device)

        return parts[0][0]._replace(image=torch.cat(images), text=torch.cat(texts)), backward

    def _unsummed(self, images: torch.Tensor, texts: torch.Tensor) -> Features:
        """Features whose backward pass does not sum gradients over the ranks."""
        with no_sync(self.model):
            return self._features(images, texts)

    def _features(self, images: torch.Tensor, texts: torch.Tensor, module: nn.Module | None = None) -> Features:
        with autocast(self.world.device, self.precision):
            features: Features = (module or self.model)(images, texts)
        return features

    def _loss(self, features: Features, batch: Batch) -> tuple[Features, torch.Tensor]:
        """The features as leaves with gradients of the global loss (times the number of ranks), and the share."""
        leaves = detached(features)
        for leaf in leaves:
            if leaf is not None:
                leaf.requires_grad_()
        share = self.loss(leaves, batch, self.world)
        self.scaled(share * self.world.size).backward()  # type: ignore[no-untyped-call]
        return leaves, share.detach()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error of CUDA, of its libraries or of the CPU says that memory ran out."""
    text = str(error)
    signs = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(words in text for words in signs)


def detached(features: Features) -> Features:
    """The features without their graph."""
    bias = features.logit_bias
    return features._replace(
        image=features.image.detach(),
        text=features.text.detach(),
        logit_scale=features.logit_scale.detach(),
        logit_bias=None if bias is None else bias.detach(),
    )


def propagate(features: Features, leaves: Features, *, scalars: bool = True) -> None:
    """Backward pass of the towers from the gradients of `leaves`; zeros if the loss did not use a feature.

    Args:
        scalars: whether the logits' scale and bias take part.
    """
    count = len(features) if scalars else 2
    outputs, gradients = [], []
    for output, leaf in zip(features[:count], leaves[:count], strict=True):
        if output is not None and leaf is not None and output.requires_grad:
            outputs.append(output)
            gradients.append(torch.zeros_like(output) if leaf.grad is None else leaf.grad.to(output.dtype))
    if outputs:
        torch.autograd.backward(outputs, gradients)


def _length(chunk: slice) -> int:
    return int(chunk.stop - chunk.start)


def _samples(batch: Batch, chunk: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and texts of a chunk; of an empty one a single sample's, as the other ranks wait for this rank's pass."""
    taken = chunk if _length(chunk) else slice(0, 1)
    return batch.images[taken], batch.texts[taken]


def _rows(leaves: Features, chunk: slice) -> Features:
    """A chunk's rows of the leaves, with their gradients; of an empty one, the row of `_samples` without gradient."""
    rows = []
    for leaf in (leaves.image, leaves.text):
        part = leaf.detach()[chunk if _length(chunk) else slice(0, 1)]
        part.grad = None if leaf.grad is None or not _length(chunk) else leaf.grad[chunk]
        rows.append(part)
    return leaves._replace(image=rows[0], text=rows[1])

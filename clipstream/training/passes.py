"""Owns the passes through the towers: features of a batch, the loss on them, and its gradients back to the weights.

Never updates a weight. It knows no precision's scaling but for the scaler that it is handed.

**Exactness.** A loss gives each rank its share of the global loss, and one backward pass on every rank gives gradients
whose sum over the ranks is that of the whole batch. DDP averages, so the share is multiplied by the number of ranks.

**Micro-batches** are GradCache's (arXiv:2101.06983). Chunks of the batch go through the towers without a graph, the
loss is computed once on all features together and gives their gradients, and then each chunk goes through the towers
again, with the same random numbers, to carry its features' gradients to the weights. This costs one more forward pass
and memory for the features, n x 2D. Ranks may have different numbers of chunks: gradients are summed over the ranks
once, in the last chunk of each. Scale and bias take part in the last chunk alone, so that they are counted once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from clipstream.batch import Batch
from clipstream.errors import SettingsError
from clipstream.training.distributed import no_sync
from clipstream.training.precision import Precision, autocast, set_torch_state, torch_state
from clipstream.world import World

if TYPE_CHECKING:
    from clipstream.model.towers import Features

Forward = Callable[[Any, Any], Any]  # pixels, ids -> features


class Loss(Protocol):
    """A rank's share of the global batch's loss, as `clipstream.model.losses` has it."""

    def __call__(self, features: Features, batch: Batch, world: World) -> torch.Tensor:
        """Scalar; the sum over the ranks is the loss."""


class Passes:
    """Callable: puts the global batch's gradients into the parameters.

    Args:
        towers: the model, not wrapped; `image.size`, `context_length` and `has_batch_norm` are read.
        model: the same, wrapped for its ranks.
        loss: gives shares of the global loss.
        world: this rank among the others.
        precision: of the forward pass.
        micro_batch_size: samples a forward pass takes at once on this rank; None for all.
        scaled: what multiplies a share before its backward pass.

    Attributes:
        size: samples at once; None for all.
    """

    def __init__(
        self,
        towers: Any,
        model: nn.Module,
        loss: Loss,
        world: World,
        *,
        precision: Precision,
        micro_batch_size: int | None,
        scaled: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.towers = towers
        self.model, self.loss, self.world, self.precision = model, loss, world, precision
        self.size = micro_batch_size
        self.scaled = scaled

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's share of the loss, and exp(logit_scale) as it was used.

        Raises:
            SettingsError: memory runs out.
        """
        try:
            return self._at_once(batch) if len(batch) <= (self.size or len(batch)) else self._in_chunks(batch)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            advice = "a smaller batch" if self.towers.has_batch_norm else "--train.micro-batch-size auto"
            raise SettingsError(
                f"memory ran out with {min(len(batch), self.size or len(batch))} samples at once: give {advice}, "
                f"--grad-checkpointing or another --precision ({str(error).splitlines()[0]})"
            ) from error

    def empty(self) -> None:
        """Two samples of zeros through the model and back, with gradients of zero, or nan of some towers: no use."""
        device = self.world.device
        pixels = torch.zeros(2, 3, *self.towers.image.size, dtype=torch.uint8, device=device)
        ids = torch.zeros(2, self.towers.context_length, dtype=torch.int32, device=device)
        features = self._features(self.model, pixels, ids)
        carry(features, detached(features))

    def _at_once(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        features = self._features(self.model, batch.pixels, batch.ids)
        leaves, share = self._loss(features, batch)
        carry(features, leaves)
        return share, leaves.logit_scale.detach()

    def _in_chunks(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """As `_at_once`, with the last chunk's backward pass summing over the ranks."""
        chunks, states, features = self._without_graph(batch)
        leaves, share = self._loss(features, batch)
        self._with_graph(chunks, states, leaves, partial(self._features, self.model))
        return share, leaves.logit_scale.detach()

    def _without_graph(self, batch: Batch) -> tuple[list[Any], list[Any], Features]:
        """The chunks, the random states before each, and the features of all."""
        count = -(-len(batch) // (self.size or len(batch)))
        size = -(-len(batch) // count)  # chunks of one size: a small last one would take a pass for little
        chunks = list(zip(_parts(batch.pixels, size), _parts(batch.ids, size), strict=True))
        states, parts = [], []
        with torch.no_grad():
            for pixels, ids in chunks:
                states.append(torch_state(self.world.device))
                parts.append(self._features(self.towers, pixels, ids))
        return chunks, states, _join(parts)

    def _with_graph(self, chunks: list[Any], states: list[Any], leaves: Features, last: Forward) -> None:
        """Carry the leaves' gradients to the weights, chunk by chunk; `last` is the last chunk's forward pass."""
        after = torch_state(self.world.device)
        slices = _cut(leaves, len(chunks[0][1]))
        for number, ((pixels, ids), state) in enumerate(zip(chunks, states, strict=True)):
            set_torch_state(state, self.world.device)
            if number < len(chunks) - 1:
                carry(self._unsummed(pixels, ids), slices[number], scalars=False)
            else:
                carry(last(pixels, ids), slices[number])
        set_torch_state(after, self.world.device)

    def _unsummed(self, pixels: torch.Tensor | None, ids: torch.Tensor) -> Features:
        """Features whose backward pass leaves gradients on this rank alone."""
        with no_sync(self.model):
            return self._features(self.model, pixels, ids)

    def _features(self, module: nn.Module, pixels: torch.Tensor | None, ids: torch.Tensor) -> Features:
        with autocast(self.world.device, self.precision):
            features: Features = module(pixels, ids)
        return features

    def _loss(self, features: Features, batch: Batch) -> tuple[Features, torch.Tensor]:
        """The features as leaves with their gradients of the global loss (times the number of ranks); the share."""
        leaves = detached(features)
        for leaf in leaves:
            if leaf is not None:
                leaf.requires_grad_()
        share = self.loss(leaves, batch, self.world)
        self.scaled(share * self.world.size).backward()  # type: ignore[no-untyped-call]
        return leaves, share.detach()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error says so: CUDA's own, those of libraries beside it, the CPU's."""
    text = str(error)
    said = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(words in text for words in said)


def detached(features: Features) -> Features:
    bias = features.logit_bias
    return features._replace(
        image=features.image.detach(),
        text=features.text.detach(),
        logit_scale=features.logit_scale.detach(),
        logit_bias=None if bias is None else bias.detach(),
    )


def carry(features: Features, leaves: Features, *, scalars: bool = True) -> None:
    """Backward pass of the towers from the gradients of `leaves`; zeros where the loss did not use a feature."""
    count = len(features) if scalars else 2
    outputs, gradients = [], []
    for output, leaf in zip(features[:count], leaves[:count], strict=True):
        if output is not None and leaf is not None and output.requires_grad:
            outputs.append(output)
            gradients.append(torch.zeros_like(output) if leaf.grad is None else leaf.grad.to(output.dtype))
    if outputs:
        torch.autograd.backward(outputs, gradients)


def _parts(rows: torch.Tensor | None, size: int) -> tuple[torch.Tensor, ...]:
    assert rows is not None, "a batch of precomputed features has no pixels to cut"
    return torch.split(rows, size)


def _join(parts: list[Features]) -> Features:
    """Chunks' features as those of the whole batch."""
    return parts[0]._replace(
        image=torch.cat([part.image for part in parts]), text=torch.cat([part.text for part in parts])
    )


def _cut(leaves: Features, size: int) -> list[Features]:
    """The leaves of the whole batch by chunks, with their gradients."""
    chunks = []
    for start in range(0, len(leaves.image), size):
        rows = []
        for leaf in (leaves.image, leaves.text):
            part = leaf.detach()[start : start + size]
            part.grad = None if leaf.grad is None else leaf.grad[start : start + size]
            rows.append(part)
        chunks.append(leaves._replace(image=rows[0], text=rows[1]))
    return chunks

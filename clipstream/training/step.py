"""Owns one training step: from a rank's batch to the exact gradients of the global batch, and the update.

Never reads data, logs or saves. It agrees on what it returns: the result is the same on all ranks.

**Exactness.** A loss gives each rank its share of the global loss, and one backward pass on every rank gives gradients
whose sum over the ranks is that of the whole batch. DDP averages, so the share is multiplied by the number of ranks.

**Micro-batches** are GradCache's (arXiv:2101.06983). Chunks of the batch go through the towers without a graph, the
loss is computed once on all features together and gives their gradients, and then each chunk goes through the towers
again, with the same random numbers, to carry its features' gradients to the weights. This costs one more forward pass
and memory for the features, n x 2D. Ranks may have different numbers of chunks: gradients are summed over the ranks
once, in the last chunk of each. Scale and bias take part in the last chunk alone, so that they are counted once.

**fp16** scales the loss, and so all gradients, by a factor that torch's GradScaler moves; where it was too large, some
gradient is not finite, on all ranks alike as they hold the same sums: the step changes no weight, and is counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from clipstream.batch import Batch
from clipstream.errors import DivergedError, SettingsError
from clipstream.training.distributed import no_sync, warm_up_buckets, wrap
from clipstream.training.optim import clip_gradients, gradient_norm
from clipstream.training.precision import Precision, autocast, set_torch_state, torch_state
from clipstream.world import World

if TYPE_CHECKING:
    from clipstream.model.towers import Features

_SHOWN_KEYS = 8
SMALLEST_SCALE = 2.0**-10  # of fp16: gradients that are not finite at this one never will be


class Loss(Protocol):
    """A rank's share of the global batch's loss, as `clipstream.model.losses` has it."""

    def __call__(self, features: Features, weights: torch.Tensor, world: World, global_size: int) -> torch.Tensor:
        """Scalar; the sum over the ranks is the loss."""


@dataclass(frozen=True)
class StepResult:
    """What a step did, the same on all ranks.

    Attributes:
        loss: of the global batch, before the update.
        grad_norm: L2 norm of the global gradient, before clipping.
        logit_scale: exp of the parameter as the loss used it.
        n: samples of the global batch.
        stop: whether any rank asked to stop.
        loss_scale: factor of the gradients in fp16, after the step; None elsewhere.
        overflow: whether that was too large, and no weight was changed; `grad_norm` is not finite then.
    """

    loss: float
    grad_norm: float
    logit_scale: float
    n: int
    stop: bool
    loss_scale: float | None = None
    overflow: bool = False


class TrainStep:
    """Callable: one step on a batch.

    Args:
        model: the towers (or torch.compile of them) on this rank's device, in their final type; `image.size`,
            `context_length`, `has_batch_norm` and `clip.logit_scale` are read. Not wrapped in DDP.
        loss: gives shares of the global loss.
        optimizer: over the model's trainable parameters.
        world: this rank among the others.
        precision: of the forward pass.
        micro_batch_size: samples a forward pass takes at once on this rank; None for all.
        clip_norm: gradients with a larger norm are scaled down to it; None for no limit.
        max_logit_scale: upper limit of exp(logit_scale); None for none. A step never raises the scale above it. A
            scale that was above it when it was loaded stays where it is or falls, so that lr 0 changes nothing.

    Raises:
        SettingsError: micro-batches with batch norm: features would depend on the cut.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        world: World,
        *,
        precision: Precision = "fp32",
        micro_batch_size: int | None = None,
        clip_norm: float | None = None,
        max_logit_scale: float | None = None,
    ) -> None:
        if micro_batch_size is not None and getattr(model, "has_batch_norm", False):
            raise SettingsError(
                "train.micro_batch_size: this model has batch norm, whose statistics would be those of the "
                "micro-batches: unset it, or take a model without batch norm (a ViT)"
            )
        self.towers: Any = model
        self.loss, self.optimizer, self.world = loss, optimizer, world
        self.precision, self.micro_batch_size = precision, micro_batch_size
        self.clip_norm, self.max_logit_scale = clip_norm, max_logit_scale
        self.scaler = torch.amp.GradScaler(torch.device(world.device).type, enabled=precision == "fp16")
        self.model = wrap(model, world)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        warm_up_buckets(self.model, self._zero_pass, world)

    def __call__(self, batch: Batch, lr: float, stop: bool = False) -> StepResult:
        """One step.

        Args:
            batch: this rank's part, at least one sample.
            lr: learning rate.
            stop: this rank's wish to stop after the step.

        Raises:
            DivergedError: loss or gradient is not finite; on all ranks alike, and the weights are as before.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batch = batch.to(self.world.device)
        share, scale = self._backward(batch)
        self.scaler.unscale_(self.optimizer)
        norm = gradient_norm(self.parameters)
        agreed = self.world.all_reduce_sum(torch.stack([share.double(), share.new_tensor(stop).double()]))
        loss, stops, grad_norm, logit_scale = torch.cat([agreed, torch.stack([norm, scale]).double()]).tolist()
        overflow = not math.isfinite(grad_norm) and self._may_scale_down()
        if not math.isfinite(loss) or not (math.isfinite(grad_norm) or overflow):
            self.optimizer.zero_grad(set_to_none=True)
            raise DivergedError(_diverged(batch, loss, grad_norm))
        if not overflow:
            clip_gradients(self.parameters, norm, self.clip_norm)
        self._update()
        loss_scale = self.scaler.get_scale() if self.scaler.is_enabled() else None
        return StepResult(loss, grad_norm, logit_scale, batch.global_size, stops > 0, loss_scale, overflow)

    def _may_scale_down(self) -> bool:
        return self.scaler.is_enabled() and self.scaler.get_scale() > SMALLEST_SCALE

    def _backward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Put the global batch's gradients into the parameters; this rank's share of the loss, and the scale."""
        size = self.micro_batch_size or len(batch)
        if size >= len(batch):
            features = self._features(self.model, batch.pixels, batch.ids)
            leaves, share = self._loss(features, batch)
            _carry(features, leaves)
            return share, leaves.logit_scale.detach()
        chunks = list(zip(_parts(batch.pixels, size), _parts(batch.ids, size), strict=True))
        states, parts = [], []
        with torch.no_grad():
            for pixels, ids in chunks:
                states.append(torch_state(self.world.device))
                parts.append(self._features(self.towers, pixels, ids))
        leaves, share = self._loss(_join(parts), batch)
        after = torch_state(self.world.device)
        slices = _cut(leaves, size)
        for number, ((pixels, ids), state) in enumerate(zip(chunks, states, strict=True)):
            set_torch_state(state, self.world.device)
            if number < len(chunks) - 1:
                with no_sync(self.model):
                    features = self._features(self.model, pixels, ids)
                    _carry(features, slices[number], scalars=False)
            else:
                _carry(self._features(self.model, pixels, ids), slices[number])
        set_torch_state(after, self.world.device)
        return share, leaves.logit_scale.detach()

    def _features(self, module: nn.Module, pixels: torch.Tensor | None, ids: torch.Tensor) -> Features:
        with autocast(self.world.device, self.precision):
            features: Features = module(pixels, ids)
        return features

    def _loss(self, features: Features, batch: Batch) -> tuple[Features, torch.Tensor]:
        """The features as leaves with their gradients of the global loss (times the number of ranks); the share."""
        leaves = _detached(features)
        for leaf in leaves:
            if leaf is not None:
                leaf.requires_grad_()
        share = self.loss(leaves, batch.weights, self.world, batch.global_size)
        self.scaler.scale(share * self.world.size).backward()  # type: ignore[no-untyped-call]
        return leaves, share.detach()

    def _update(self) -> None:
        scale = self.towers.clip.logit_scale
        before = scale.detach().clone()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.max_logit_scale is not None and scale.requires_grad:
            with torch.no_grad():
                scale.copy_(torch.minimum(scale, before.clamp(min=math.log(self.max_logit_scale))))

    def _zero_pass(self) -> None:
        """Two samples of zeros through the model and back, with gradients of zero."""
        device = self.world.device
        pixels = torch.zeros(2, 3, *self.towers.image.size, dtype=torch.uint8, device=device)
        ids = torch.zeros(2, self.towers.context_length, dtype=torch.int32, device=device)
        features = self._features(self.model, pixels, ids)
        _carry(features, _detached(features))


def _detached(features: Features) -> Features:
    bias = features.logit_bias
    return features._replace(
        image=features.image.detach(),
        text=features.text.detach(),
        logit_scale=features.logit_scale.detach(),
        logit_bias=None if bias is None else bias.detach(),
    )


def _carry(features: Features, leaves: Features, *, scalars: bool = True) -> None:
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


def _diverged(batch: Batch, loss: float, grad_norm: float) -> str:
    more = f" and {len(batch) - _SHOWN_KEYS} more" if len(batch) > _SHOWN_KEYS else ""
    return (
        f"step {batch.step}: loss is {loss:g} and the gradient's norm {grad_norm:g}; lower optim.lr, set "
        f"optim.grad_clip_norm or look at the samples: {', '.join(batch.keys[:_SHOWN_KEYS])}{more}"
    )

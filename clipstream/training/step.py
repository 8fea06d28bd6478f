"""Owns one training step: from a rank's batch to the exact gradients of the global batch, and the update.

Never reads data, logs or saves. It agrees on what it returns: the result is the same on all ranks.

How the gradients come about, in micro-batches or at once, is in `passes` and `fitting`.

**What is not finite.** A step whose loss or gradient is not finite on some rank is not so on any, as all hold the same
sums: all leave it out, and weights, moments, averages and batch statistics stay as they were.

**fp16** scales the loss, and so all gradients, by a factor that torch's GradScaler moves; where the loss is finite and
some gradient is not, the factor was too large: the step changes no weight, lowers the factor, and is counted apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from clipstream.batch import Batch
from clipstream.errors import SettingsError
from clipstream.training.averaging import Averages
from clipstream.training.batch_norm import batch_statistics
from clipstream.training.distributed import finish_gradients, warm_up_buckets, wrap
from clipstream.training.fitting import FittingPasses, MicroBatch
from clipstream.training.optim import clip_gradients, gradient_norm
from clipstream.training.passes import Loss, Passes
from clipstream.training.precision import Precision
from clipstream.training.sharding import is_sharded
from clipstream.world import World

SMALLEST_SCALE = 2.0**-10  # of fp16: gradients that are not finite at this one never will be


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
        skipped: whether loss or gradient was not finite for another reason, and nothing was changed.
    """

    loss: float
    grad_norm: float
    logit_scale: float
    n: int
    stop: bool
    loss_scale: float | None = None
    overflow: bool = False
    skipped: bool = False


class TrainStep:
    """Callable: one step on a batch.

    Args:
        model: the towers on this rank's device, in their final type; `image.size`,
            `context_length`, `has_batch_norm` and `clip.logit_scale` are read. Not wrapped in DDP; it may be sharded.
        loss: gives shares of the global loss.
        optimizer: over the model's trainable parameters.
        world: this rank among the others.
        precision: of the forward pass.
        micro_batch_size: samples a forward pass takes at once on this rank; None for all, 'auto' for what fits.
        clip_norm: gradients with a larger norm are scaled down to it; None for no limit.
        max_logit_scale: upper limit of exp(logit_scale); None for none. A step never raises the scale above it. A
            scale that was above it when it was loaded stays where it is or falls, so that lr 0 changes nothing.
        averages: moved along with the weights; None for none.

    Raises:
        SettingsError: micro-batches with batch norm: features would depend on the cut; 'auto' with a sharded model.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        world: World,
        *,
        precision: Precision = "fp32",
        micro_batch_size: MicroBatch = None,
        clip_norm: float | None = None,
        max_logit_scale: float | None = None,
        averages: Averages | None = None,
    ) -> None:
        if micro_batch_size is not None and model.has_batch_norm:
            raise SettingsError(
                "train.micro_batch_size: this model has batch norm, whose statistics would be those of the "
                "micro-batches: unset it, or take a model without batch norm (a ViT)"
            )
        self.towers: Any = model
        self.optimizer, self.world = optimizer, world
        self.clip_norm, self.max_logit_scale, self.averages = clip_norm, max_logit_scale, averages
        self.scaler = torch.amp.GradScaler(torch.device(world.device).type, enabled=precision == "fp16")
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._statistics = batch_statistics(model)
        if is_sharded(model) and micro_batch_size == "auto":
            raise SettingsError(
                "train.micro_batch_size: auto does not go with fsdp, whose ranks wait for each other in every pass: "
                "give a number"
            )
        wrapped = wrap(model, world)
        parts = (model, wrapped, loss, world)
        self.passes = (
            FittingPasses(*parts, precision=precision, scaled=self.scaler.scale, unmade=self._unmade)
            if isinstance(micro_batch_size, str)
            else Passes(*parts, precision=precision, micro_batch_size=micro_batch_size, scaled=self.scaler.scale)
        )
        warm_up_buckets(wrapped, self.passes.empty, world)

    def __call__(self, batch: Batch, lr: float, stop: Callable[[], bool] = lambda: False) -> StepResult:
        """One step.

        Args:
            batch: this rank's part, at least one sample.
            lr: learning rate.
            stop: this rank's wish to stop after the step; asked late in it, so that a signal need not wait for another.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batch = batch.to(self.world.device)
        statistics = [tensor.clone() for tensor in self._statistics]
        share, scale = self.passes(batch)
        finish_gradients(self.towers, self.world)
        self.scaler.unscale_(self.optimizer)
        norm = gradient_norm(self.parameters, self.world)
        agreed = self.world.all_reduce_sum(torch.stack([share.double(), share.new_tensor(stop()).double()]))
        loss, stops, grad_norm, logit_scale = torch.cat([agreed, torch.stack([norm, scale]).double()]).tolist()
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        overflow = not finite and math.isfinite(loss) and self._may_scale_down()
        skipped = not finite and not overflow
        if skipped:
            self._leave_out(statistics)
        else:
            if finite:
                clip_gradients(self.parameters, norm, self.clip_norm)
            self._update()
        if finite and self.averages is not None:
            self.averages.update()
        loss_scale = self.scaler.get_scale() if self.scaler.is_enabled() else None
        return StepResult(
            loss, grad_norm, logit_scale, batch.global_size, stops > 0, loss_scale, overflow=overflow, skipped=skipped
        )

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to take the same steps, JSON-able."""
        state: dict[str, Any] = {"precision": self.passes.precision, "scaler": self.scaler.state_dict()}
        if isinstance(self.passes, FittingPasses):
            # The cut decides the last bits, and which dropout a sample gets.
            state["micro_batch"] = self.passes.size
        if self.averages is not None:
            state["averages"] = self.averages.state()
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave; keys may be missing."""
        if scaler := state.get("scaler"):
            self.scaler.load_state_dict(scaler)
        if isinstance(self.passes, FittingPasses):
            self.passes.size = state.get("micro_batch")  # None: what all fitted then is tried again

    def _unmade(self) -> int:
        """Bytes of AdamW's moments, while it has none."""
        weights = sum(p.numel() * p.element_size() for p in self.parameters)
        return 0 if self.optimizer.state else 2 * weights

    def _may_scale_down(self) -> bool:
        return self.scaler.is_enabled() and self.scaler.get_scale() > SMALLEST_SCALE

    @torch.no_grad()
    def _leave_out(self, statistics: list[torch.Tensor]) -> None:
        """Forget the step."""
        if self.scaler.is_enabled():
            self.scaler.update(self.scaler.get_scale())  # the same one: the loss is not its work
        self.optimizer.zero_grad(set_to_none=True)
        for tensor, before in zip(self._statistics, statistics, strict=True):
            tensor.copy_(before)

    def _update(self) -> None:
        scale = self.towers.clip.logit_scale
        before = scale.detach().clone()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.max_logit_scale is not None and scale.requires_grad:
            with torch.no_grad():
                scale.copy_(torch.minimum(scale, before.clamp(min=math.log(self.max_logit_scale))))

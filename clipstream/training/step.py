"""One training step: from a rank's batch to the exact gradients of the global batch, and the update.

The result is the same on all ranks. How gradients are computed, at once or in micro-batches, is in `gradcache`.

**Non-finite steps.** If the loss or the norm of the gradients is not finite on some rank, it is not finite on any, as
all hold the same sums: all skip the step, and weights, moments, averages and batch statistics stay as they were.

**fp16** scales the loss, and so all gradients, by a factor that torch's GradScaler adapts. If the loss is finite and
the norm is not, the factor was too large: the step changes no weight, lowers the factor, and counts as an overflow.

**The host does not wait for the device** in a step: a flag on the device, torch's `found_inf`, decides whether it is
skipped, and `TrainStep.start` returns before the step's figures are there. Optimizers that do not take the flag are the
exception: all but torch's fused ones, and any in the first step of a parameter. For these the host reads it, once.
"""

from __future__ import annotations

import gc
import inspect
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.losses.contrastive import ContrastiveLoss, warn_of_dominance
from clipstream.models.execution.batch_features import FeatureCache, caches_of
from clipstream.models.execution.checkpointing import fit_budgets
from clipstream.models.execution.compile import Compilation, compile_towers, compiling, eagerly
from clipstream.models.layers import batch_norms
from clipstream.models.precision import WithoutBF16, autocast, computes_bf16
from clipstream.storage.shard_cache import cache_root
from clipstream.training.ema import WeightAverages
from clipstream.training.gradcache import AutoMicroBatch, GradCache
from clipstream.training.parallel import FullTowers, finish_gradients, local_tensor, reshard, warm_up_buckets, wrap
from clipstream.training.settings import AUTO_ON_CPU, MICRO_NORMS, TrainSettings
from clipstream.training.state import StepState, same_randomness
from clipstream.utils.logs import announce
from clipstream.utils.timing import COPY, OPTIMIZER, begin, time_part

if TYPE_CHECKING:
    from clipstream.models.settings import ModelSettings
    from clipstream.models.towers import Towers

FLOAT32 = TrainSettings(precision="fp32")
SMALLEST_SCALE = 2.0**-10  # of fp16: gradients that are not finite at this scale never will be
CACHED_AT_ONCE = 64  # samples of a pass for the cache, where no size of micro-batches is known


@dataclass(frozen=True)
class StepResult:
    """Result of a step, the same on all ranks."""

    loss: float  # of the global batch, before the update
    grad_norm: float  # L2 norm of the global gradient, before clipping
    logit_scale: float  # exp of the parameter as the loss used it
    n: int  # samples of the global batch
    loss_scale: float | None = None  # loss scale of fp16 after the step; None for other precisions
    # whether the loss scale was too large, and no weight changed; `grad_norm` is not finite then
    overflow: bool = False
    skipped: bool = False  # whether loss or gradient was not finite for another reason, and nothing changed
    # the losses that `loss` adds up, by name, if there are several
    parts: dict[str, float] = field(default_factory=dict)


class TrainStep:
    """Callable that trains towers on a batch.

    Args:
        towers: the model, on this rank's device, in its final dtype, not wrapped in DDP, with locks that have an end
            open; or the layout of `parallelize`. Of a model `image.size`, `context_length`, `has_batch_norm`,
            `text_lengths`, `unchanging` and `clip.logit_scale` are read.
        loss: a step never raises exp(logit_scale) above its `max_logit_scale`, nor lowers it below its
            `min_logit_scale`, if it has such limits; a scale that was loaded beyond a limit stays or comes nearer, so
            that learning rate 0 changes nothing.
        settings: precision, micro-batches, compilation, averages and DDP.
        clip_norm: gradients with a larger norm are scaled down to it; None for no limit.
        caches: of the features of frozen towers.

    Attributes:
        averages: of the weights, updated after each step that changed them; None without `ema`.
        compilation: of the model's parts, logged by rank 0; None if nothing is compiled.
        totals: of the last step, float64 [losses + 1]: the loss and its parts over all ranks, and the number of ranks.
        torn: finishes the last step with the totals of another rank, where the exchange of these failed; else None.

    Raises SettingsError: micro-batches with batch norm, whose features would depend on the cut.
    """

    def __init__(
        self,
        towers: Any,
        loss: ContrastiveLoss,
        optimizer: torch.optim.Optimizer,
        world: World,
        settings: TrainSettings = FLOAT32,
        *,
        clip_norm: float | None = None,
        caches: Sequence[FeatureCache] = (),
    ) -> None:
        self.layout = FullTowers(towers) if isinstance(towers, nn.Module) else towers
        self.towers: Any = self.layout.towers
        self.optimizer, self.world, self.settings = optimizer, world, settings
        self.clip_norm, self.caches = clip_norm, caches
        model, precision = self.towers, settings.arithmetic
        size, kept = settings.micro_batch_size, settings.kept_micro_batches
        if size is not None and model.has_batch_norm:
            raise MICRO_NORMS.error("train.micro_batch_size")
        self.totals: torch.Tensor | None = None
        self.torn: Callable[[torch.Tensor], Callable[[], StepResult]] | None = None
        self.compilation: Compilation | None = None
        if settings.compile != "off":
            cache = cache_root() / "inductor"
            options = settings.compile, settings.compile_backend, settings.compile_mode
            self.compilation = compile_towers(model, *options, cache=cache)
        self.averages: WeightAverages | None = None
        if settings.ema is not None:
            self.averages = WeightAverages(model, settings.ema, warmup=settings.ema_warmup)
        self.max_logit_scale: float | None = getattr(loss, "max_logit_scale", None)
        self.min_logit_scale: float | None = getattr(loss, "min_logit_scale", None)
        self.scaler = torch.amp.GradScaler(torch.device(world.device).type, enabled=precision == "fp16")
        self.parameters: list[nn.Parameter] = [p for p in model.parameters() if p.requires_grad]
        self._statistics = [tensor for norm in batch_norms(model) for tensor in norm.buffers()]  # of batch norm
        # By torch's contract with GradScaler, but for its deprecated form.
        takes_flag = getattr(optimizer, "_step_supports_amp_scaling", False)
        self._takes_flag = takes_flag and "grad_scaler" not in inspect.signature(optimizer.step).parameters
        narrow = precision == "pure_bf16" or computes_bf16(world.device)
        self._updating = nullcontext() if narrow else WithoutBF16()
        self._compared = not world.is_main  # whether the terms of the loss were compared
        self._set_locks(0)
        parts = (model, wrap(model, world, settings), loss, world, precision, self.scaler.scale)
        self.gradcache: GradCache
        if isinstance(size, str):

            def reserved() -> int:  # by AdamW for its moments, before a parameter's first step
                new = [p for p in self.parameters if p.requires_grad and not optimizer.state.get(p)]
                return 2 * sum(p.numel() * p.element_size() for p in new)

            context = partial(eagerly, self.compilation)
            self.gradcache = AutoMicroBatch(*parts, None, kept, reserved=reserved, trial_context=context)
        else:
            self.gradcache = GradCache(*parts, size, kept)
        self._warm_up()

    def unlock(self, step: int) -> None:
        """Train what `model.unlock_image_at` and `model.unlock_text_at` leave locked for at most `step` steps.

        The optimizer has these parameters from the beginning, and no state of them before their first gradient. DDP
        takes the parameters that it sums at its construction only, so it is constructed again. Collective; to be called
        before each step.
        """
        if not self._set_locks(step):
            return
        self.gradcache.model = self.towers
        gc.collect()  # the former DDP module, whose hooks on the parameters go with it
        self.gradcache.model = wrap(self.towers, self.world, self.settings)
        if isinstance(self.gradcache, AutoMicroBatch):
            self.gradcache.fitted = 0  # more is trained than before
        self._warm_up()

    def _warm_up(self) -> None:
        with eagerly(self.compilation):
            warm_up_buckets(self.gradcache.model, self.gradcache.warm_up, self.world)

    def __call__(self, batch: Batch, lr: float) -> StepResult:
        """One step on this rank's part of a batch, at least one sample; waits for its result."""
        return self.start(batch, lr)()

    def start(self, batch: Batch, lr: float) -> Callable[[], StepResult]:
        """Start one step, and return the function that waits for its result.

        The next step may be started before: the device then has work while the host reads the result.
        """
        began = time.perf_counter()
        if batch.lengths is None:
            batch = replace(batch, lengths=self.towers.text_lengths(batch.ids))
        with time_part(COPY):
            batch = batch.to(self.world.device)
        statistics = [tensor.clone() for tensor in self._statistics]
        self.torn = None
        try:
            with compiling(self.compilation):
                for cache in self.caches:
                    unknown = isinstance(self.gradcache, AutoMicroBatch) and self.gradcache.size is None
                    batch = cache(batch, CACHED_AT_ONCE if unknown else self.gradcache.size)
                share, scale = self.gradcache(batch)
            begin(OPTIMIZER)
            finish_gradients(self.towers, self.world)
            self.scaler.unscale_(self.optimizer)
            norm = gradient_norm(self.parameters, self.world)
            parts: dict[str, torch.Tensor] = getattr(self.gradcache.loss, "parts", {})
            own = [share, *parts.values(), torch.ones_like(share)]  # the last counts the ranks
            self.torn = partial(self._finish, lr, norm, scale, batch.global_size, list(parts), statistics)
            totals = self.world.all_reduce_sum(torch.stack([figure.double() for figure in own]))
        except BaseException:
            restore(self._statistics, statistics, torch.ones((), dtype=torch.bool, device=self.world.device))
            raise
        finish, self.torn = self.torn, None
        result = finish(totals)
        if self.compilation is not None:
            self.compilation.on_step(time.perf_counter() - began, shown=self.world.is_main)
        return result

    def _finish(
        self,
        lr: float,
        norm: torch.Tensor,
        scale: torch.Tensor,
        n: int,
        names: list[str],
        statistics: list[torch.Tensor],
        totals: torch.Tensor,
    ) -> Callable[[], StepResult]:
        """The update, after the last exchange of the ranks; the arguments are of `start`. Not collective."""
        self.totals = totals
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        # After an abort, what is still queued on a GPU runs on whatever was received.
        finite_loss = totals[0].isfinite() & (totals[-1] == self.world.size)
        finite = finite_loss & norm.isfinite()
        found_inf = (~finite).float()
        clip_gradients(self.parameters, norm, self.clip_norm)
        self._update(found_inf)
        restore(self._statistics, statistics, ~finite)
        if self.averages is not None:
            self.averages.update(found_inf)
        figures = [*totals, norm, scale]
        if self.scaler.is_enabled():
            figures += self._adapt_scale(found_inf, finite_loss)
        values = read_later(torch.stack([figure.double() for figure in figures]))
        return partial(self._result, values, n, names)

    @torch.no_grad()
    def _update(self, found_inf: torch.Tensor) -> None:
        """Update the weights, unless `found_inf` is 1."""
        log_scale = self.towers.clip.logit_scale
        log_before = log_scale.detach().clone()
        optimizer: Any = self.optimizer
        # Fused SGD would begin with momentum that nothing has filled.
        if self._takes_flag and all(p in optimizer.state for p in self.parameters if p.grad is not None):
            optimizer.found_inf, optimizer.grad_scale = found_inf, None
            with self._updating:
                optimizer.step()
            del optimizer.found_inf, optimizer.grad_scale
        elif not found_inf.item():
            with self._updating:
                optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if self.max_logit_scale is not None and log_scale.requires_grad:
            log_scale.copy_(torch.minimum(log_scale, log_before.clamp(min=math.log(self.max_logit_scale))))
        if self.min_logit_scale is not None and log_scale.requires_grad:
            log_scale.copy_(torch.maximum(log_scale, log_before.clamp(max=math.log(self.min_logit_scale))))

    def _adapt_scale(self, found_inf: torch.Tensor, finite_loss: torch.Tensor) -> list[torch.Tensor]:
        """Adapt the loss scale of fp16; returns whether it was too large, and what it is now.

        It stays where it is not the cause: the loss is not finite, or no smaller scale would help.
        """
        scaler: Any = self.scaler
        state = [scaler._scale, scaler._growth_tracker]
        before = [tensor.clone() for tensor in state]
        overflow = found_inf.bool() & finite_loss & (scaler._scale > SMALLEST_SCALE)
        for flag in scaler._found_inf_per_device(self.optimizer).values():
            flag.copy_(found_inf)  # also where the norm of finite gradients is not finite
        scaler.update()
        restore(state, before, found_inf.bool() & ~overflow)
        return [overflow, scaler._scale]

    def _result(self, values: Callable[[], list[float]], n: int, names: list[str]) -> StepResult:
        """The result of a step from its figures, which are waited for.

        Raises RuntimeError: the exchange of the ranks was aborted on the device, and the step changed nothing.
        """
        loss, *rest = values()
        of_parts, (ranks, grad_norm, logit_scale, *scaling) = rest[: len(names)], rest[len(names) :]
        if ranks != self.world.size:
            raise RuntimeError(f"{self.world.size - ranks:g} of {self.world.size} ranks took no part in the step")
        parts = dict(zip(names, of_parts, strict=True))
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if finite and not self._compared:
            self._compared = True
            warn_of_dominance(self.gradcache.loss, parts)
        overflow, loss_scale = (bool(scaling[0]), scaling[1]) if scaling else (False, None)
        skipped = not finite and not overflow
        return StepResult(loss, grad_norm, logit_scale, n, loss_scale, overflow, skipped, parts)

    def _set_locks(self, step: int) -> bool:
        """Lock and unlock the towers for a run of `step` steps; whether anything changed."""
        if changing := self.towers.changing_locks(step):
            reshard(self.towers)  # FSDP2 reads from the shards what is trained
            self.towers.toggle(changing)
        return bool(changing)

    @contextmanager
    def whole_weights(self, instead: Mapping[str, torch.Tensor] | None = None) -> Iterator[Any]:
        """A context with the whole model on this rank's device: shards are gathered, stored towers loaded. Collective.

        Compiled towers run eagerly, with the text setting of eager ones: evaluations have many shapes, and figures must
        be those of `clipstream evaluate`. Parameters may have values `instead`, by name, as the averages.
        """
        device, compilation = self.world.device, self.compilation
        full = self.layout.full_weights(device, instead=instead)
        with full as towers, towers.whole(device), eagerly(compilation):
            compiled = towers.text_buckets
            if compilation is not None and compiled is not None:
                towers.text_buckets = compilation.text_buckets
            try:
                yield towers
            finally:
                towers.text_buckets = compiled

    @torch.no_grad()
    def has_finite_weights(self) -> bool:
        """Whether the trained weights are finite on all ranks. Collective."""
        return not self.world.all_reduce_sum(self.count_broken()).item()

    @torch.no_grad()
    def count_broken(self) -> torch.Tensor:
        """How many of the trained parameters, or of this rank's shards, are not finite: a float64 scalar."""
        return torch.stack([~local_tensor(p).isfinite().all() for p in self.parameters]).sum().double()

    def state(self) -> StepState:
        """What a resumed run needs to repeat the same steps."""
        auto = self.gradcache if isinstance(self.gradcache, AutoMicroBatch) else None
        return StepState(
            precision=self.gradcache.precision,
            scaler=self.scaler.state_dict(),
            micro_batch=None if auto is None else auto.size,
            ema_updates=None if self.averages is None else self.averages.updates,
        )

    def load_state(self, state: StepState) -> None:
        """Continue from a saved state; averaged weights are loaded apart (`WeightAverages.load`)."""
        if state.scaler:
            self.scaler.load_state_dict(state.scaler)
        if isinstance(self.gradcache, AutoMicroBatch):
            self.gradcache.size = state.micro_batch  # None: all samples fitted, which is tried again


def fit_memory(
    towers: Towers, model: ModelSettings, batch_size: int, world: World, settings: TrainSettings
) -> list[FeatureCache]:
    """Fit activations into the budgets of `model.grad_checkpointing`, for the largest global batch; returns the caches
    of frozen towers' features.

    Raises SettingsError: a budget is too little, a tower with a cache has weights that are trained, or micro-batches
    are to be fitted on the CPU.
    """
    if settings.micro_batch_size == "auto" and not world.device.startswith("cuda"):
        raise AUTO_ON_CPU.error("train.micro_batch_size")
    samples, size = -(-batch_size // world.size), settings.micro_batch_size
    context = partial(autocast, world.device, settings.arithmetic)
    with same_randomness(world.device):
        lines = fit_budgets(towers, model, min(samples, size) if isinstance(size, int) else samples, context)
    reshard(towers)
    caches = caches_of(towers, model, world, context)
    for line in [*lines, *(cache.summary() for cache in caches)] if world.is_main else ():
        announce(f"memory   {line}")
    return caches


@torch.no_grad()
def restore(tensors: Sequence[torch.Tensor], before: Sequence[torch.Tensor], where: torch.Tensor) -> None:
    """Set tensors to what they were before if `where`, a scalar on their device, is true."""
    for tensor, kept in zip(tensors, before, strict=True):
        tensor.copy_(torch.where(where, kept, tensor))


def read_later(tensor: torch.Tensor) -> Callable[[], list[float]]:
    """Start to copy a vector to the host, and return the function that waits for its values."""
    if tensor.device.type != "cuda":
        return tensor.tolist
    copied = tensor.to("cpu", non_blocking=True)  # into pinned memory
    cuda: Any = torch.cuda  # untyped in torch
    done = cuda.Event()
    done.record(cuda.current_stream(tensor.device))

    def values() -> list[float]:
        done.synchronize()
        return copied.tolist()

    return values


def gradient_norm(parameters: Iterable[nn.Parameter], world: World | None = None) -> torch.Tensor:
    """Scalar L2 norm of all gradients as one vector, in their dtype but at least float32; collective over the ranks of
    `world`, if parameters are sharded.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    norm = _norm([gradient for gradient in gradients if not isinstance(gradient, DTensor)])
    if world is None or not sharded:
        return norm
    mesh = sharded[0].device_mesh
    copies, own = world.size // mesh.size(mesh.ndim - 1), _norm([gradient.to_local() for gradient in sharded])
    return (world.all_reduce_sum(own.square()) / copies + norm.square()).sqrt()


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    if all(gradient.dtype != torch.bfloat16 for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def clip_gradients(parameters: Iterable[nn.Parameter], norm: torch.Tensor, limit: float | None) -> None:
    """Scale all gradients in place by limit / norm if `norm` is above `limit`."""
    if limit is None:
        return
    parameters = list(parameters)
    torch.nn.utils.clip_grads_with_norm_([p for p in parameters if not isinstance(p, DTensor)], limit, norm)
    torch.nn.utils.clip_grads_with_norm_([p for p in parameters if isinstance(p, DTensor)], limit, norm)

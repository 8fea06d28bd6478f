"""The audit of a training step's precision: a step of `TrainStep` on a batch enters, an `Audit` leaves.

The step is the run's own, with its loss, optimizer and averages, at learning rate 0. Afterwards weights, gradients,
moments, averages, batch statistics, loss scale and random states are what they were: training goes on with the same
bits. (A user's optimizer that keeps state outside of `Optimizer.state` may change.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clipstream.data.batch import Batch
from clipstream.data.decode.tokenizers import Tokenizer, wrap
from clipstream.distributed.world import World
from clipstream.models.teacher import Teacher
from clipstream.models.towers import Towers
from clipstream.performance.precision.audit import Audit, ScaleRecord, audited
from clipstream.performance.precision.findings import Findings
from clipstream.performance.precision.gradients import ASSUMED_SCALE, GradientGroup, gradient_groups
from clipstream.performance.precision.recorder import Phase, Recorder
from clipstream.report.precision_audit import audit_text, verdict, write_audit
from clipstream.report.sinks import AUDIT_FILE, METRICS_FILE, lines
from clipstream.training.parallel import batch_statistics, local_tensor
from clipstream.training.precision import same_randomness
from clipstream.training.step import TrainStep
from clipstream.utils.logs import announce, logger

MOST_STEPS = 24  # of fp16, whose loss scale falls by half until no gradient overflows
LOGGED_ROWS = 6  # of each table in a run's log
STEPS = 2  # the first one makes moments and warms caches up; the last one is recorded
# fmt: off
WORDS = ("a", "photo", "of", "red", "green", "small", "old", "city", "river", "bird", "dog", "on", "the", "left",
         "with", "light", "near", "two", "people")  # of synthetic texts
# fmt: on


def audit_step(step: TrainStep, batch: Batch, *, history: list[ScaleRecord] | None = None) -> Audit:
    """Audit one step on this rank's part of a batch. Collective, as a step is.

    Args:
        batch: at least one sample; pixels and ids on the host or on the device.
        history: the loss scale over the steps of the run so far.
    """
    history = [] if history is None else history
    recorder = Recorder(step.towers, step.world.device)
    watch = _Watch(step, recorder)
    own: list[ScaleRecord] = []
    with preserved(step):
        for number in range(MOST_STEPS):
            if number < STEPS - 1 or (own and own[-1].overflows):
                result = step(batch, lr=0.0)
            else:
                with watch.watching(), recorder.recording():
                    result = step(batch, lr=0.0)
            if result.loss_scale is not None:
                own.append(ScaleRecord(number, result.loss_scale, float(result.overflow)))
            if watch.gradients:
                break
        if not watch.gradients:  # every step overflowed: the last one is recorded all the same
            with watch.watching(), recorder.recording():
                step(batch, lr=0.0)
        check_state(watch.findings, step)
    trained = {
        name
        for name, module in step.towers.named_modules()
        if all(parameter.requires_grad for parameter in module.parameters())
    }
    return audited(
        recorder,
        watch.findings,
        precision=step.gradcache.precision,
        device=step.world.device,
        samples=len(batch),
        frozen={name for name, parameter in step.towers.named_parameters() if not parameter.requires_grad},
        trained=trained,
        gradients=watch.gradients,
        scale=watch.scale,
        history=history,
        own=own,
    )


class _Watch:
    """Tells the recorder the phases of a step, and reads the gradients before they are unscaled."""

    def __init__(self, step: TrainStep, recorder: Recorder) -> None:
        self.step, self.recorder = step, recorder
        self.findings = Findings()
        self.gradients: list[GradientGroup] = []
        self.scale = 1.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The context of one step."""
        step, scaler = self.step, self.step.scaler
        loss, unscale, take, average = step.gradcache.loss, scaler.unscale_, scaler.step, step.averages

        def read(optimizer: torch.optim.Optimizer) -> None:
            with torch.utils._python_dispatch._disable_current_modes():
                self.scale = scaler.get_scale() if scaler.is_enabled() else ASSUMED_SCALE
                self.gradients = gradient_groups(step.towers, 1.0 if scaler.is_enabled() else self.scale)
            unscale(optimizer)

        scaler.unscale_ = read  # type: ignore[method-assign]
        scaler.step = self._in("optimizer", take)  # type: ignore[method-assign]
        step.gradcache.loss = _WatchedLoss(loss, self)
        if average is not None:
            average.update = self._in("optimizer", average.update)  # type: ignore[method-assign]
        try:
            yield
        finally:
            del scaler.unscale_, scaler.step
            step.gradcache.loss = loss
            if average is not None:
                del average.update

    def _in(self, phase: Phase, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            before, self.recorder.phase = self.recorder.phase, phase
            try:
                return function(*args, **kwargs)
            finally:
                self.recorder.phase = before

        return run


class _WatchedLoss:
    """The loss of a step, whose operators are recorded as such."""

    def __init__(self, loss: Any, watch: _Watch) -> None:
        self._loss, self._watch = loss, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)

    def __call__(self, features: Any, batch: Batch, world: World) -> torch.Tensor:
        share: torch.Tensor = self._watch._in("loss", self._loss)(features, batch, world)
        for what, tensor in (("features", features.image), ("features", features.text), ("loss", share)):
            _require_wide(self._watch.findings, "loss", what, [tensor])
        return share


def check_state(findings: Findings, step: TrainStep) -> None:
    """Add an error for each part of the state of a step that has to be float32 and is not."""
    pure = step.gradcache.precision == "pure_bf16"
    for name, parameter in step.towers.named_parameters():
        if not pure or parameter.numel() == 1:
            state = step.optimizer.state.get(parameter, {})
            moments = [value for value in state.values() if isinstance(value, torch.Tensor)]
            _require_wide(findings, name, "moments", moments)
            if parameter.requires_grad:
                _require_wide(findings, name, "weights", [parameter])
    for name, module in step.towers.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            _require_wide(findings, name, "running statistics", list(module.buffers()))
    if step.averages is not None:
        for name, average in step.averages.tensors.items():
            _require_wide(findings, name, "averaged weights", [average])


def _require_wide(findings: Findings, where: str, what: str, tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.itemsize < 4:
            kind = str(tensor.dtype).removeprefix("torch.")
            findings.add_state(where, f"{what} are {kind}", "keep them in float32: small changes of them are lost")


@contextmanager
def preserved(step: TrainStep) -> Iterator[None]:
    """A context after which the step's state is what it was. What is on a GPU is kept in the host's memory meanwhile.

    A loss that is a module keeps its buffers as well.
    """
    towers: Towers = step.towers
    modules = [towers, *([step.gradcache.loss] if isinstance(step.gradcache.loss, nn.Module) else [])]
    tensors: list[torch.Tensor] = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    tensors += batch_statistics(towers)
    if step.averages is not None:
        tensors += step.averages.tensors.values()
    kept = {id(tensor): (tensor, _copy(tensor)) for tensor in tensors}
    gradients = {parameter: parameter.grad for parameter in towers.parameters()}
    for parameter in gradients:
        parameter.grad = None
    optimizer, scaler = step.optimizer, step.scaler
    state = {p: {key: (value, _copy(value)) for key, value in own.items()} for p, own in optimizer.state.items()}
    groups = [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    inner = {key: copy.deepcopy(value) for key, value in vars(scaler).items() if key != "_per_optimizer_states"}
    updates = 0 if step.averages is None else step.averages.updates
    caches, step.caches = step.caches, ()  # a locked tower is audited as well, and its features are not kept
    # With `auto`, the audited step searches for them, and the first step of training as it would without an audit.
    searched = {key: value for key, value in vars(step.gradcache).items() if key in ("size", "kept", "tried_for")}
    try:
        with same_randomness(step.world.device):
            yield
    finally:
        with torch.no_grad():
            for tensor, before in kept.values():
                local_tensor(tensor).copy_(before)
            optimizer.state.clear()
            for held, own in state.items():
                optimizer.state[held] = {key: _restored(value, before) for key, (value, before) in own.items()}
        for trained, gradient in gradients.items():
            trained.grad = gradient
        for group, before_group in zip(optimizer.param_groups, groups, strict=True):
            for key in group.keys() - before_group.keys() - {"params"}:
                del group[key]
            group.update(before_group)
        vars(scaler).update(inner)
        if step.averages is not None:
            step.averages.updates = updates
        vars(step.gradcache).update(searched)
        step.caches = caches


def _copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    local = local_tensor(value).detach()
    return local.clone() if local.device.type == "cpu" else local.to("cpu", copy=True)


def _restored(value: Any, before: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return before
    local_tensor(value).copy_(before)
    return value


def audit_run(folder: Path, step: TrainStep, batch: Batch) -> None:
    """Audit a step of a run that trains; the result goes to its folder and, in short, to the log. Collective.

    What is wrong is a warning: the run goes on.
    """
    result = audit_step(step, batch, history=scale_history(folder))
    if not step.world.is_main:
        return
    announce(audit_text(result, rows=LOGGED_ROWS))
    if result.of("error"):
        logger.warning(
            f"audit of the precision: {verdict(result)}: what needs float32 is computed in 16 bits, see above"
        )
    try:
        write_audit(result, folder / AUDIT_FILE)
    except OSError as error:
        logger.warning(f"{folder / AUDIT_FILE} could not be written: {error.strerror}")


def scale_history(run: Path) -> list[ScaleRecord]:
    """The course of the loss scale in a run's metrics; empty without fp16."""
    path = run / METRICS_FILE
    records = [record for _, record in lines(path)] if path.is_file() else []
    return [
        ScaleRecord(record["step"], record["loss_scale"], record.get("overflow_rate", 0.0))
        for record in records
        if "loss_scale" in record
    ]


def synthetic_batch(
    size: int, world: World, seed: int, towers: Towers, tokenizer: Tokenizer, teacher: Teacher | None = None
) -> Batch:
    """This rank's part of a batch of random pictures, and of texts of 3 to 20 words.

    Args:
        size: samples of the global batch.
    """
    bounds = [size * rank // world.size for rank in (world.rank, world.rank + 1)]
    n, draw = bounds[1] - bounds[0], torch.Generator().manual_seed(seed * 1000 + world.rank)
    counts = torch.randint(3, 21, (n,), generator=draw).tolist()
    texts = [" ".join(WORDS[(row + place) % len(WORDS)] for place in range(count)) for row, count in enumerate(counts)]

    def pixels(like: Towers) -> torch.Tensor:
        return torch.randint(0, 256, (n, 3, *like.image.size), dtype=torch.uint8, generator=draw)

    own = torch.from_numpy(tokenizer.encode(texts)).int()
    others: dict[str, Any] = {}
    if teacher is not None and teacher.towers.image.size != towers.image.size:
        others["teacher_pixels"] = pixels(teacher.towers)
    if teacher is not None and not teacher.towers.same_tokenizer(towers):
        encode = wrap(teacher.towers.open_clip_tokenizer(), teacher.towers.context_length).encode
        others["teacher_ids"] = torch.from_numpy(encode(texts)).int()
    keys = tuple(f"synthetic/{number}" for number in range(*bounds))
    return Batch(pixels(towers), own, torch.ones(n), keys, torch.zeros(n, dtype=torch.uint8), 0, size, **others)

"""The audit of a training step: what it computes in which dtype, and what fp16 would lose of its gradients.

A `TrainStep` and a batch enter; an `Audit` leaves. The step is the run's own, with its loss, optimizer and averages, at
learning rate 0, under a dispatch mode that sees each operator. Afterwards weights, gradients, moments, averages, batch
statistics, loss scale and random states are what they were: training goes on with the same bits. (A user's optimizer
that keeps state outside of `Optimizer.state` may change.)

**Float32 in every precision:** statistics of normalisation, softmax, logits, loss and sums in it; of the state of a
step: moments and weights (except with pure_bf16), averaged weights, batch statistics, scale and bias of the logits.
16 bits there are errors. Warnings are matrix products in another dtype than the run's, weights that are cast more than
once, and gradients that fp16 loses.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from clipstream.data.batch import Batch
from clipstream.data.decode.tokenizers import Tokenizer, wrap
from clipstream.distributed.world import World
from clipstream.models.teacher import Teacher
from clipstream.models.towers import Towers
from clipstream.performance.precision import NARROW, Finding, Phase, Recorder, Severity, named, tensors
from clipstream.report.sinks import AUDIT_FILE
from clipstream.report.terminal import OFF_TERMINAL, milliseconds, percent
from clipstream.text import counted
from clipstream.training.parallel import batch_statistics, local_tensor
from clipstream.training.precision import same_randomness
from clipstream.training.step import TrainStep
from clipstream.utils import atomic_write
from clipstream.utils.logs import announce, logger

MOST_STEPS = 24  # of fp16, whose loss scale falls by half until no gradient overflows
ROWS = 12  # of the table of costs
COLOURS = {"error": "red", "warning": "yellow"}
FP16_ZERO, FP16_NORMAL, FP16_MOST = 2.0**-25, 2.0**-14, 65504.0
ASSUMED_SCALE = 2.0**16  # GradScaler's first one, for runs without a loss scale
LOST = 0.1  # share of a tower's gradients that lose digits in fp16, which is a finding
EMBEDDINGS = ("embed", "conv1", "stem", "pos_", "positions")
# fmt: off
WORDS = ("a", "photo", "of", "red", "green", "small", "old", "city", "river", "bird", "dog", "on", "the", "left",
         "with", "light", "near", "two", "people")  # of synthetic texts
# fmt: on


@dataclass
class GradientGroup:
    """The gradients of a tower's matrices, vectors or embeddings, times the loss scale.

    Attributes:
        n: elements.
        zeros: exact zeros; in fp16, also what the backward pass has rounded to 0.
        underflow: others that float16 rounds to 0.
        subnormal: others that float16 holds with fewer digits.
        overflow: above float16's largest number, or not finite.
    """

    name: str
    n: int = 0
    zeros: int = 0
    underflow: int = 0
    subnormal: int = 0
    overflow: int = 0

    def add(self, gradient: torch.Tensor, scale: float) -> None:
        """Add a gradient of any shape, which was not multiplied by the loss scale."""
        sizes = gradient.detach().double().abs() * scale
        self.n += sizes.numel()
        self.zeros += int((sizes == 0).sum())
        self.underflow += int(((sizes > 0) & (sizes < FP16_ZERO)).sum())
        self.subnormal += int(((sizes >= FP16_ZERO) & (sizes < FP16_NORMAL)).sum())
        self.overflow += int((~sizes.isfinite() | (sizes > FP16_MOST)).sum())

    def share(self, count: int) -> float:
        """A count as a share of the elements that are not exactly 0."""
        return count / max(self.n - self.zeros, 1)


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes:
        samples: of this rank in the audited step.
        operators: their number.
        findings: errors, then warnings, then costs, each the slowest first.
        scale: that gradients are judged at: the loss scale, or without one 65536.
    """

    precision: str
    device: str
    samples: int
    operators: int
    seconds: float
    findings: list[Finding]
    gradients: list[GradientGroup]
    scale: float

    def of(self, severity: Severity) -> list[Finding]:
        """The findings of a severity."""
        return [finding for finding in self.findings if finding.severity == severity]

    @property
    def verdict(self) -> str:
        """The number of errors and warnings in a line."""
        errors, warnings = len(self.of("error")), len(self.of("warning"))
        if not errors and not warnings:
            return "No finding: what has to be float32 is, and no product is wider than it has to be."
        return f"{counted(errors, 'error')}, {counted(warnings, 'warning')}"

    def write(self, path: Path) -> None:
        """Write everything as JSON. Raises OSError: the file cannot be written."""
        atomic_write.replace(path, (json.dumps(asdict(self), indent=2) + "\n").encode())

    def show(self, console: Console) -> None:
        """Print the tables."""
        console.print(f"Precision of a step: {self.precision} on {self.device}, {self.samples} samples")
        console.print(f"{self.operators:,} operators, {milliseconds(self.seconds)}")
        wrong = [*self.of("error"), *self.of("warning")]
        table = _table("Findings", "", "where", "what", "to do", "times", "time", right=2)
        for one in wrong:
            where, what, advice = map(escape, (one.where, one.what, one.advice))
            mark = f"[{COLOURS[one.severity]}]{one.severity}[/]"
            table.add_row(mark, where, what, advice, f"{one.count:,}", milliseconds(one.seconds))
        if wrong:
            console.print(table)
        table = _table("Casts and float32 operations", "where", "what", "times", "bytes", "time", "share", right=4)
        for one in self.of("cost")[:ROWS]:
            share = percent(one.seconds / max(self.seconds, 1e-12))
            numbers = f"{one.count:,}", f"{one.bytes / 1e6:,.3g} MB", milliseconds(one.seconds), share
            table.add_row(escape(one.where), one.what, *numbers)
        console.print(table)
        title = f"Gradients {'' if self.precision == 'fp16' else 'if they were '}in fp16, at loss scale {self.scale:g}"
        table = _table(title, "group", "zero", "underflow", "subnormal", "overflow", right=4)
        for group in self.gradients:
            shares = map(group.share, (group.underflow, group.subnormal, group.overflow))
            table.add_row(group.name, percent(group.zeros / max(group.n, 1)), *map(percent, shares))
        console.print(table)
        console.print(self.verdict, markup=False)


def _table(title: str, *columns: str, right: int) -> Table:
    """A table whose last `right` columns are numbers."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number >= len(columns) - right else "left", overflow="fold")
    return table


def audit_step(step: TrainStep, batch: Batch) -> Audit:
    """Audit one step on this rank's part of a batch. Collective, as a step is.

    Args:
        batch: at least one sample; pixels and ids on the host or on the device.
    """
    precision, device = step.gradcache.precision, step.world.device
    recorder = Recorder(step.towers, precision, device)
    gradients: list[GradientGroup] = []
    with preserved(step):
        # The first step makes moments and warms caches up; the last one is recorded. With fp16, a loss scale whose
        # gradients overflow falls first.
        overflow = step(batch, lr=0.0).overflow
        for _ in range(MOST_STEPS):
            if not overflow:
                break
            overflow = step(batch, lr=0.0).overflow
        scale = step.scaler.get_scale() if step.scaler.is_enabled() else ASSUMED_SCALE
        with _watching(step, recorder, gradients, scale), recorder.recording():
            step(batch, lr=0.0)
        _check_state(recorder, step)
    for group in gradients:
        lost = group.share(group.underflow + group.subnormal)
        if precision == "fp16" and "matrices" in group.name and lost > LOST:
            what = f"{lost:.0%} of the gradients lose digits or become 0 in fp16 at loss scale {scale:g}"
            recorder.add("warning", group.name, what, "--precision bf16, whose exponents are float32's")
    if scale < 1:
        what = f"the loss scale fell to {scale:g}: small gradients become 0"
        recorder.add("warning", "loss scale", what, "--precision bf16, or a lower --lr or --grad-clip-norm")
    order = ("error", "warning", "cost")
    findings = sorted(recorder.found.values(), key=lambda one: (order.index(one.severity), -one.seconds))
    return Audit(precision, device, len(batch), recorder.operators, recorder.seconds, findings, gradients, scale)


@contextmanager
def _watching(step: TrainStep, recorder: Recorder, gradients: list[GradientGroup], scale: float) -> Iterator[None]:
    """Tell the recorder the phases of a step, and read the gradients before they are unscaled."""
    scaler, loss, averages = step.scaler, step.gradcache.loss, step.averages
    unscale = scaler.unscale_

    def within(phase: Phase, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, recorder.phase = recorder.phase, phase
        try:
            return function(*args, **kwargs)
        finally:
            recorder.phase = before

    def read(optimizer: torch.optim.Optimizer) -> None:
        with _disable_current_modes():
            gradients.extend(gradient_groups(step.towers, 1.0 if scaler.is_enabled() else scale))
        unscale(optimizer)

    watched: list[tuple[Any, str, Any]] = [
        (scaler, "unscale_", read),
        (step.optimizer, "step", partial(within, "optimizer", step.optimizer.step)),
        (step.gradcache, "loss", _WatchedLoss(loss, recorder, partial(within, "loss", loss))),
    ]
    if (teacher := getattr(loss, "_add_features", None)) is not None:
        watched.append((loss, "_add_features", partial(within, "teacher", teacher)))
    if averages is not None:
        watched.append((averages, "update", partial(within, "optimizer", averages.update)))
    kept = [(holder, name, vars(holder).get(name)) for holder, name, _ in watched]
    for holder, name, function in watched:
        setattr(holder, name, function)
    try:
        yield
    finally:
        for holder, name, before in kept:
            delattr(holder, name) if before is None else setattr(holder, name, before)


class _WatchedLoss:
    """The loss of a step, whose features and share are looked at."""

    def __init__(self, loss: Any, recorder: Recorder, call: Callable[..., torch.Tensor]) -> None:
        self._loss, self._recorder, self._call = loss, recorder, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)

    def __call__(self, features: Any, batch: Batch, world: World) -> torch.Tensor:
        share = self._call(features, batch, world)
        _require_wide(self._recorder, "loss", "features", [features.image, features.text])
        _require_wide(self._recorder, "loss", "loss", [share])
        return share


def gradient_groups(towers: nn.Module, scale: float) -> list[GradientGroup]:
    """The groups of the trained parameters, with the gradients that they have now.

    Args:
        scale: factor to judge them with; they are not multiplied by it yet.
    """
    groups: dict[str, GradientGroup] = {}
    for name, parameter in towers.named_parameters():
        if parameter.grad is None or parameter.numel() == 1:
            continue
        kind = "matrices" if parameter.ndim > 1 else "vectors"
        kind = "embeddings" if any(part in name for part in EMBEDDINGS) else kind
        key = f"{'image' if name.startswith('clip.visual.') else 'text'} {kind}"
        groups.setdefault(key, GradientGroup(key)).add(local_tensor(parameter.grad), scale)
    return [groups[key] for key in sorted(groups)]


def _check_state(recorder: Recorder, step: TrainStep) -> None:
    """Add an error for each part of the state of a step that has to be float32 and is not."""
    pure = step.gradcache.precision == "pure_bf16"
    for name, parameter in step.towers.named_parameters():
        if not pure or parameter.numel() == 1:
            _require_wide(recorder, name, "moments", step.optimizer.state.get(parameter, {}).values())
            if parameter.requires_grad:
                _require_wide(recorder, name, "weights", [parameter])
    for name, module in step.towers.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            _require_wide(recorder, name, "running statistics", module.buffers())
    if step.averages is not None:
        for name, average in step.averages.tensors.items():
            _require_wide(recorder, name, "averaged weights", [average])


def _require_wide(recorder: Recorder, where: str, what: str, values: Any) -> None:
    for tensor in tensors(values):
        if tensor.dtype in NARROW:
            advice = "keep them in float32: small changes of them are lost"
            recorder.add("error", where, f"{what} are {named(tensor.dtype)}", advice)


@contextmanager
def preserved(step: TrainStep) -> Iterator[None]:
    """A context after which the step's state is what it was. What is on a GPU is kept in the host's memory meanwhile.

    A loss that is a module keeps its buffers as well.
    """
    towers: Towers = step.towers
    modules = [towers, *([step.gradcache.loss] if isinstance(step.gradcache.loss, nn.Module) else [])]
    every: list[torch.Tensor] = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    every += batch_statistics(towers)
    if step.averages is not None:
        every += step.averages.tensors.values()
    kept = {id(tensor): (tensor, _copy(tensor)) for tensor in every}
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
    """Audit a step of a run that trains; the result goes to its folder and log. Collective.

    What is wrong is a warning: the run goes on.
    """
    result = audit_step(step, batch)
    if not step.world.is_main:
        return
    out = io.StringIO()
    result.show(Console(file=out, width=OFF_TERMINAL, highlight=False, emoji=False))
    announce(out.getvalue().rstrip())
    if result.of("error"):
        logger.warning(
            f"audit of the precision: {result.verdict}: what needs float32 is computed in 16 bits, see above"
        )
    try:
        result.write(folder / AUDIT_FILE)
    except OSError as error:
        logger.warning(f"{folder / AUDIT_FILE} could not be written: {error.strerror}")


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

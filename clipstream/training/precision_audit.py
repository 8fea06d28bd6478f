"""Audit of a training step: what it computes in which dtype, and which gradients fp16 would lose.

A `TrainStep` and a batch enter; an `Audit` leaves: findings, casts and float32 operations by time, gradients outside of
fp16's range. One step runs at learning rate 0 under a dispatch mode that sees each operator; compiled modules run
eagerly. A run audits a model of its own, so that it trains the same weights with and without an audit.

Errors are statistics of normalisation, softmax, logits, and sums of the loss in 16 bits. Warnings are matrix products
in another dtype than the run's, weights that are cast more than once, and gradients that fp16 loses.
"""

from __future__ import annotations

import io
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from clipstream.data.batch import Batch, ImageSpec
from clipstream.data.loader.reading_recipe import ModelInputs
from clipstream.distributed.world import World
from clipstream.models.execution.compile import eagerly
from clipstream.text import counted, milliseconds, percent
from clipstream.training.parallel import local_tensor
from clipstream.training.settings import AUDIT_FILE
from clipstream.training.step import TrainStep
from clipstream.utils import atomic_write
from clipstream.utils.console import result_table
from clipstream.utils.logs import announce, logger

Severity = Literal["error", "warning", "cost"]
Phase = Literal["forward", "teacher", "loss", "backward", "optimizer", "step"]

MOST_STEPS = 24  # of fp16, whose loss scale falls by half until no gradient overflows
LENGTHS = (3, 21)  # words of a synthetic text: at least, and one more than at most
ROWS = 12  # of the table of costs
OFF_TERMINAL = 120  # columns where there is no terminal
NUMBERS = ("times", "time", "bytes", "share", "zero", "underflow", "subnormal", "overflow")  # columns of tables
COLOURS = {"error": "red", "warning": "yellow"}
FP16_ZERO, FP16_NORMAL, FP16_MOST = 2.0**-25, 2.0**-14, 65504.0
ASSUMED_SCALE = 2.0**16  # GradScaler's first one, for runs without a loss scale
LOST = 0.1  # share of a tower's gradients that lose digits in fp16, from which on it is a finding
EMBEDDINGS = ("embed", "conv1", "stem", "pos_", "positions")

NARROW = (torch.bfloat16, torch.float16)
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "fp16": torch.float16}  # else bfloat16
NORMS = ("layer_norm", "group_norm", "batch_norm", "rms_norm")  # in the names of their operators
SOFTMAXES = ("_softmax", "_log_softmax", "_safe_softmax", "logsumexp")
SUMS = (*SOFTMAXES, "sum", "mean", "var", "var_mean", "std", "logaddexp", "nll_loss_forward", "linalg_vector_norm")
ALLOCATIONS = ("empty", "new_empty", "_local_scalar_dense")  # touch no memory
CAST_AGAIN = "autocast drops its copies after each pass: a larger --train.micro-batch-size makes fewer"
CAST_FROZEN = "autocast keeps no copy of frozen weights: --model.image.precision or --model.text.precision"


@dataclass
class Finding:
    """Operators or tensors of one kind, in modules whose names differ by numbers only."""

    severity: Severity
    where: str  # names of modules with * for numbers, or a phase of the step
    what: str
    advice: str = ""
    count: int = 0
    bytes: int = 0  # of inputs and outputs
    seconds: float = 0.0


@dataclass
class GradientGroup:
    """The gradients of a tower's matrices, vectors or embeddings, times the loss scale."""

    name: str
    n: int = 0  # elements
    zeros: int = 0  # exact zeros; in fp16, also what the backward pass has rounded to 0
    underflow: int = 0  # others that float16 rounds to 0
    subnormal: int = 0  # others that float16 holds with fewer digits
    overflow: int = 0  # above float16's largest number, or not finite

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
    """The results of an audit."""

    precision: str
    device: str
    samples: int  # of this rank in the audited step
    operators: int  # their number
    seconds: float
    findings: list[Finding]  # errors, then warnings, then costs, each by time
    gradients: list[GradientGroup]
    scale: float  # the loss scale that gradients are judged at; 65536 without one

    def of(self, severity: Severity) -> list[Finding]:
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
        console.print(f"Precision of a step: {self.precision} on {self.device}, {self.samples} samples")
        console.print(f"{self.operators:,} operators, {milliseconds(self.seconds)}")
        wrong = [*self.of("error"), *self.of("warning")]
        table = result_table("Findings", ("", "where", "what", "to do", "times", "time"), NUMBERS)
        for one in wrong:
            where, what, advice = map(escape, (one.where, one.what, one.advice))
            mark = f"[{COLOURS[one.severity]}]{one.severity}[/]"
            table.add_row(mark, where, what, advice, f"{one.count:,}", milliseconds(one.seconds))
        if wrong:
            console.print(table)
        columns = ("where", "what", "times", "bytes", "time", "share")
        table = result_table("Casts and float32 operations", columns, NUMBERS)
        for one in self.of("cost")[:ROWS]:
            share = percent(one.seconds / max(self.seconds, 1e-12))
            numbers = f"{one.count:,}", f"{one.bytes / 1e6:,.3g} MB", milliseconds(one.seconds), share
            table.add_row(escape(one.where), one.what, *numbers)
        console.print(table)
        title = f"Gradients {'' if self.precision == 'fp16' else 'if they were '}in fp16, at loss scale {self.scale:g}"
        table = result_table(title, ("group", "zero", "underflow", "subnormal", "overflow"), NUMBERS)
        for group in self.gradients:
            shares = map(group.share, (group.underflow, group.subnormal, group.overflow))
            table.add_row(group.name, percent(group.zeros / max(group.n, 1)), *map(percent, shares))
        console.print(table)
        console.print(self.verdict, markup=False)


class _Site(NamedTuple):
    phase: Phase
    module: str  # name in the towers; '' for the towers themselves
    norm: bool = False  # in a module of normalisation


class Recorder(TorchDispatchMode):
    """Dispatch mode that sums up the operators of a step, by module and kind.

    In forward passes an operator belongs to the innermost module that is being called. In backward passes it belongs to
    the module that made the node of autograd: nodes are numbered in the order in which forward passes make them.

    Attributes:
        phase: of operators outside of forward and backward passes.
        found: findings by severity, place, kind and advice.
    """

    def __init__(self, root: nn.Module, precision: str, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase: Phase = "step"
        self.found: dict[tuple[str, ...], Finding] = {}
        self.operators, self.seconds = 0, 0.0
        self._precision, self._device = precision, torch.device(device)
        self._computes = DTYPES.get(precision, torch.bfloat16)
        self._names = {id(module): name for name, module in root.named_modules()}
        parameters = dict(root.named_parameters())
        self._owners = {id(parameter): name.rpartition(".")[0] for name, parameter in parameters.items()}
        self._weights = {_address(parameter): name for name, parameter in parameters.items()}
        self._frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
        self._weight_casts: Counter[tuple[str, str]] = Counter()
        self._stack: list[tuple[str, bool]] = []  # names of the modules, and whether one of them normalises
        self._sites: dict[int, _Site] = {}  # by number of autograd's node
        self._events: list[tuple[Finding | None, Any, Any]] = []

    def add(self, severity: Severity, where: str, what: str, advice: str = "") -> Finding:
        """The finding of this kind, counted once more."""
        where = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", where.removeprefix("clip."))
        finding = self.found.setdefault((severity, where, what, advice), Finding(severity, where, what, advice))
        finding.count += 1
        return finding

    @contextmanager
    def recording(self) -> Iterator[None]:
        hooks = nn.modules.module
        before = hooks.register_module_forward_pre_hook(self._enter)
        after = hooks.register_module_forward_hook(lambda *args: self._stack.pop() and None, always_call=True)
        try:
            with torch.compiler.set_stance("force_eager"), self:
                yield
        finally:
            before.remove()
            after.remove()
        if self._events:
            torch.cuda.synchronize(self._device)
        for finding, start, stop in self._events:
            self._took(finding, start.elapsed_time(stop) / 1e3)
        for (weight, target), count in self._weight_casts.items():
            if count > 1:
                tower = "image tower" if weight.startswith("clip.visual.") else "text tower"
                advice = CAST_FROZEN if weight in self._frozen else CAST_AGAIN
                self.add("warning", tower, f"weights are cast to {target} {count} times a step", advice)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, and add it to the sums."""
        packet = getattr(func, "overloadpacket", func)
        name, site, kwargs = str(getattr(packet, "__name__", packet)), self._site(), kwargs or {}
        cuda = self._device.type == "cuda"
        start = self._event() if cuda else time.perf_counter()
        out = func(*args, **kwargs)
        stop = self._event() if cuda else time.perf_counter()
        if getattr(func, "is_view", False) or name.startswith(ALLOCATIONS):
            return out
        ins = [tensor for tensor in _tensors((args, kwargs)) if tensor.is_floating_point()]
        outs = [tensor for tensor in _tensors(out) if tensor.is_floating_point() and tensor.numel()]
        finding = self._judge(name, packet in flop_registry, site, ins, outs)
        if finding is not None:
            finding.bytes += sum(tensor.numel() * tensor.itemsize for tensor in (*ins, *outs))
        self.operators += 1
        if cuda:
            self._events.append((finding, start, stop))
        else:
            self._took(finding, stop - start)
        return out

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        return torch.cuda.current_stream(self._device).record_event(event)

    def _took(self, finding: Finding | None, seconds: float) -> None:
        self.seconds += seconds
        if finding is not None:
            finding.seconds += seconds

    def _judge(
        self, op: str, product: bool, site: _Site, ins: list[torch.Tensor], outs: list[torch.Tensor]
    ) -> Finding | None:
        """Count an operator; None if it is neither wrong nor wider than the run's precision."""
        where = site.module or "towers" if site.phase in ("forward", "backward") else site.phase
        if (wrong := self._violation(op, product, site, ins, outs)) is not None:
            return self.add("error", where, *wrong)
        source = None if not ins else ins[-1] if op == "copy_" else ins[0] if op == "_to_copy" else None
        if source is not None and outs and source.dtype != (target := outs[0].dtype):
            weight = self._weights.get(_address(source))
            if weight and site.phase == "forward" and target.itemsize < source.itemsize:
                self._weight_casts[weight, _name(target)] += 1
            return self.add("cost", where, f"casts {_name(source.dtype)} to {_name(target)}")
        if product and ins and where not in ("loss", "optimizer", "step"):
            widest = max((tensor.dtype for tensor in ins), key=lambda dtype: dtype.itemsize)
            what = f"matrix products in {_name(widest)}"
            if widest.itemsize < self._computes.itemsize:
                advice = f"--precision is {self._precision}: remove the cast before it, or train in that precision"
                return self.add("warning", where, what, advice)
            # On a CPU, attention in 16 bits is made of products in float32, as they take less time.
            attention = self._device.type == "cpu" and (op in ("bmm", "baddbmm") or "scaled_dot_product" in op)
            if widest.itemsize > self._computes.itemsize and not attention:
                advice = "remove .float() or autocast(enabled=False) around it, or keep it if it needs the digits"
                return self.add("warning", where, what, advice)
        wide = [tensor.dtype for tensor in (*ins, *outs) if tensor.itemsize > self._computes.itemsize]
        return self.add("cost", where, f"operations in {_name(wide[0])}") if wide else None

    def _violation(
        self, op: str, product: bool, site: _Site, ins: list[torch.Tensor], outs: list[torch.Tensor]
    ) -> tuple[str, str] | None:
        """What is wrong with an operator in 16 bits, and what to do; None if nothing is."""
        dtype = next((_name(tensor.dtype) for tensor in (*outs, *ins) if tensor.dtype in NARROW), None)
        if dtype is None:
            return None
        summed = any(tensor.dtype in NARROW for tensor in outs)
        if site.phase == "loss" and product:
            return f"logits are computed in {dtype}", "multiply float32 features: features.image.float() and the like"
        if site.phase == "loss" and op in SUMS and summed:
            return f"the loss is summed in {dtype}", "compute the loss in float32: rounding hides small changes of it"
        if site.phase != "forward":
            return None
        # Frozen norms have no statistics.
        trained = not any(name.startswith(f"{site.module}.") for name in self._frozen)
        if any(norm in op for norm in NORMS) and trained and any(tensor.dtype in NARROW for tensor in outs[1:]):
            return f"statistics of normalisation are {dtype}", "give the norm float32 weights, or a float32 input"
        if site.norm and op in SUMS and summed:
            return f"statistics of normalisation are summed in {dtype}", "cast the input up first: x.float()"
        if op in SOFTMAXES and summed:
            return f"softmax in {dtype}", "use F.scaled_dot_product_attention, or softmax(..., dtype=torch.float32)"
        return None

    def _site(self) -> _Site:
        node = torch._C._current_autograd_node()
        if node is not None and not self._stack:  # in a backward pass, and no recomputation
            if (variable := getattr(node, "variable", None)) is not None:
                return _Site("backward", self._owners.get(id(variable), ""))
            return self._sites.get(node._sequence_nr(), _Site("backward", ""))._replace(phase="backward")
        module, norm = self._stack[-1] if self._stack else ("", False)
        phase: Phase = "forward" if self._stack and self.phase == "step" else self.phase
        site = _Site(phase if node is None else "backward", module, norm)  # a recomputation is of the backward pass
        if node is None:
            # Operators without a gradient, which make no node, come after the one that made the last.
            self._sites.setdefault(torch.autograd._get_sequence_nr() - 1, site)
        return site

    def _enter(self, module: nn.Module, args: object) -> None:
        outer, norm = self._stack[-1] if self._stack else ("", False)
        name = self._names.get(id(module), outer)  # DDP is transparent, and so is a module of the loss
        self._stack.append((name, norm or "norm" in type(module).__name__.lower()))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _address(tensor: torch.Tensor) -> int:
    return int(getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def log_audit(result: Audit, folder: Path) -> None:
    """Put the audit of a run into its log and folder; errors are a warning in the log, as the run continues."""
    out, path = io.StringIO(), folder / AUDIT_FILE
    result.show(Console(file=out, width=OFF_TERMINAL, highlight=False, emoji=False))
    announce(out.getvalue().rstrip())
    if result.of("error"):
        logger.warning(f"precision audit: {result.verdict}: 16 bits where float32 is needed, see the table above")
    try:
        result.write(path)
    except OSError as error:
        logger.warning(f"{path} could not be written: {error.strerror}")


def synthetic_batch(size: int, seed: int, world: World, inputs: ModelInputs) -> Batch:
    """This rank's part of a batch of `size` random images, and of texts of 3 to 20 words."""
    start, stop = (size * rank // world.size for rank in (world.rank, world.rank + 1))
    draw = torch.Generator().manual_seed(seed * 1000 + world.rank)
    texts = [" ".join(["word"] * int(n)) for n in torch.randint(*LENGTHS, (stop - start,), generator=draw)]

    def pixels(like: ImageSpec) -> torch.Tensor:
        return torch.randint(0, 256, (stop - start, 3, *like.size), dtype=torch.uint8, generator=draw)

    ids = torch.from_numpy(inputs.tokenizer.encode(texts)).int()
    others: dict[str, torch.Tensor] = {}
    if inputs.teacher_image is not None:
        others["teacher_pixels"] = pixels(inputs.teacher_image)
    if inputs.teacher_tokenizer is not None:
        others["teacher_ids"] = torch.from_numpy(inputs.teacher_tokenizer.encode(texts)).int()
    keys = tuple(f"synthetic/{number}" for number in range(start, stop))
    one = torch.ones(stop - start)
    return Batch(pixels(inputs.image), ids, one, keys, torch.zeros_like(one, dtype=torch.uint8), 0, size, **others)  # type: ignore[arg-type]


def audit_step(step: TrainStep, batch: Batch) -> Audit:
    """Audit one step on this rank's part of a batch. Collective, as a step is.

    Moments, averages and batch statistics change as by steps of learning rate 0. Features of locked towers are computed
    and not cached.
    """
    precision, device = step.gradcache.precision, step.world.device
    recorder = Recorder(step.towers, precision, device)
    gradients: list[GradientGroup] = []
    step.caches = ()
    with eagerly(step.compilation):
        # The first step makes moments and warms caches up; the last one is recorded. With fp16, a loss scale whose
        # gradients overflow falls first.
        for _ in range(MOST_STEPS + 1):
            if not step(batch, lr=0.0).overflow:
                break
        scale = step.scaler.get_scale() if step.scaler.is_enabled() else ASSUMED_SCALE
        with _phases(step, recorder, gradients, scale), recorder.recording():
            step(batch, lr=0.0)
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
def _phases(step: TrainStep, recorder: Recorder, gradients: list[GradientGroup], scale: float) -> Iterator[None]:
    """Tell the recorder the phases of a step, and read the gradients before they are unscaled."""
    scaler, averages, unscale = step.scaler, step.averages, step.scaler.unscale_

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

    with ExitStack() as stack:

        def put(holder: Any, name: str, function: Any) -> None:
            setattr(holder, name, function)  # hides the method of the class
            stack.callback(delattr, holder, name)

        put(scaler, "unscale_", read)
        put(step.optimizer, "step", partial(within, "optimizer", step.optimizer.step))
        put(step.gradcache, "_loss", partial(within, "loss", step.gradcache._loss))
        if (teacher := getattr(step.gradcache.loss, "_add_features", None)) is not None:
            put(step.gradcache.loss, "_add_features", partial(within, "teacher", teacher))
        if averages is not None:
            put(averages, "update", partial(within, "optimizer", averages.update))
        yield


def gradient_groups(towers: nn.Module, scale: float) -> list[GradientGroup]:
    """The groups of the trained parameters, with the gradients that they have now, which are judged times `scale`."""
    groups: dict[str, GradientGroup] = {}
    for name, parameter in towers.named_parameters():
        if parameter.grad is None or parameter.numel() == 1:
            continue
        kind = "matrices" if parameter.ndim > 1 else "vectors"
        kind = "embeddings" if any(part in name for part in EMBEDDINGS) else kind
        key = f"{'image' if name.startswith('clip.visual.') else 'text'} {kind}"
        groups.setdefault(key, GradientGroup(key)).add(local_tensor(parameter.grad), scale)
    return [groups[key] for key in sorted(groups)]

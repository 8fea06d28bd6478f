"""What a step computes in which dtype: a dispatch mode that sums up its operators by module and kind.

The operators of the code that runs within `Recorder.recording` enter; findings leave: operators and casts that are
wrong, or that cost time in float32. Kernels that torch.compile makes are not seen: compiled modules run eagerly.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

Severity = Literal["error", "warning", "cost"]
Phase = Literal["forward", "teacher", "loss", "backward", "optimizer", "step"]

NARROW = (torch.bfloat16, torch.float16)
NORMS = ("layer_norm", "group_norm", "batch_norm", "rms_norm")  # in the names of their operators
SOFTMAXES = ("_softmax", "_log_softmax", "_safe_softmax", "logsumexp")
SUMS = (*SOFTMAXES, "sum", "mean", "var", "var_mean", "std", "logaddexp", "nll_loss_forward", "linalg_vector_norm")
ALLOCATIONS = ("empty", "new_empty", "_local_scalar_dense")  # touch no memory


@dataclass
class Finding:
    """Operators or tensors of the same kind, in modules whose names differ by numbers only."""

    severity: Severity
    where: str  # names of modules with * for numbers; '' for the towers themselves
    what: str
    advice: str = ""
    count: int = 0
    bytes: int = 0  # of inputs and outputs
    seconds: float = 0.0


class _Site(NamedTuple):
    """A place in the step."""

    phase: Phase
    module: str  # name in the towers; '' for the towers themselves
    norm: bool = False  # in a module of normalisation


@dataclass
class Recorder:
    """Sums up the operators of a step, by module and kind.

    In forward passes an operator belongs to the innermost module that is being called. In backward passes it belongs to
    the module that made the node of autograd: nodes are numbered in the order in which forward passes make them.
    """

    root: nn.Module
    precision: str
    device: str
    phase: Phase = "step"  # of operators outside of forward and backward passes
    found: dict[tuple[str, ...], Finding] = field(default_factory=dict)
    operators: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        dtypes = {"fp32": torch.float32, "fp64": torch.float64, "fp16": torch.float16}
        self._computes = dtypes.get(self.precision, torch.bfloat16)
        self._names = {id(module): name for name, module in self.root.named_modules()}
        parameters = dict(self.root.named_parameters())
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
        """The context of the operators that are recorded."""
        hooks = nn.modules.module
        before = hooks.register_module_forward_pre_hook(self._enter)
        after = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            with torch.compiler.set_stance("force_eager"), _Mode(self):
                yield
        finally:
            before.remove()
            after.remove()
        if self._events:
            torch.cuda.synchronize(self.device)
        for finding, start, stop in self._events:
            self._took(finding, start.elapsed_time(stop) / 1e3)
        for (weight, target), count in self._weight_casts.items():
            if count > 1:
                advice = "autocast forgets its copies after each pass: a larger --train.micro-batch-size makes fewer"
                if weight in self._frozen:
                    advice = (
                        "autocast keeps no copy of frozen weights: --model.image.precision or --model.text.precision"
                    )
                tower = "image tower" if weight.startswith("clip.visual.") else "text tower"
                self.add("warning", tower, f"weights are cast to {target} {count} times a step", advice)

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator, and add it to the sums."""
        packet = getattr(func, "overloadpacket", func)
        name, site = str(getattr(packet, "__name__", packet)), self._site()
        cuda = torch.device(self.device).type == "cuda"
        start = _event(self.device) if cuda else time.perf_counter()
        out = func(*args, **kwargs)
        stop = _event(self.device) if cuda else time.perf_counter()
        if getattr(func, "is_view", False) or name.startswith(ALLOCATIONS):
            return out
        ins = [tensor for tensor in tensors((*args, *kwargs.values())) if tensor.is_floating_point()]
        outs = [tensor for tensor in tensors((out,)) if tensor.is_floating_point() and tensor.numel()]
        finding = self._judge(name, packet in flop_registry, site, ins, outs)
        if finding is not None:
            finding.bytes += sum(tensor.numel() * tensor.itemsize for tensor in (*ins, *outs))
        self.operators += 1
        if cuda:
            self._events.append((finding, start, stop))
        else:
            self._took(finding, stop - start)
        return out

    def _took(self, finding: Finding | None, seconds: float) -> None:
        self.seconds += seconds
        if finding is not None:
            finding.seconds += seconds

    def _judge(
        self, op: str, product: bool, site: _Site, ins: list[torch.Tensor], outs: list[torch.Tensor]
    ) -> Finding | None:
        """Count an operator under what it is; None if it is neither wrong nor costs more than it has to."""
        where = site.module or "towers" if site.phase in ("forward", "backward") else site.phase
        if (wrong := self._violation(op, product, site, ins, outs)) is not None:
            return self.add("error", where, *wrong)
        source = None if not ins else ins[-1] if op == "copy_" else ins[0] if op == "_to_copy" else None
        if source is not None and outs and source.dtype != (target := outs[0].dtype):
            weight = self._weights.get(_address(source))
            if weight and site.phase == "forward" and target.itemsize < source.itemsize:
                self._weight_casts[weight, named(target)] += 1
            return self.add("cost", where, f"casts {named(source.dtype)} to {named(target)}")
        dtypes = {tensor.dtype for tensor in ins}
        if product and dtypes and where not in ("loss", "optimizer", "step"):
            widest = max(dtypes, key=lambda dtype: dtype.itemsize)
            what = f"matrix products in {named(widest)}"
            if widest.itemsize < self._computes.itemsize:
                advice = f"--precision is {self.precision}: remove the cast before it, or train in that precision"
                return self.add("warning", where, what, advice)
            # On a CPU, attention in 16 bits is made of products in float32, as they take less time.
            attention = self.device == "cpu" and (op in ("bmm", "baddbmm") or "scaled_dot_product" in op)
            if widest.itemsize > self._computes.itemsize and not attention:
                advice = "remove .float() or autocast(enabled=False) around it, or keep it if it needs the digits"
                return self.add("warning", where, what, advice)
        wide = [tensor.dtype for tensor in (*ins, *outs) if tensor.itemsize > self._computes.itemsize]
        return self.add("cost", where, f"operations in {named(wide[0])}") if wide else None

    def _violation(
        self, op: str, product: bool, site: _Site, ins: list[torch.Tensor], outs: list[torch.Tensor]
    ) -> tuple[str, str] | None:
        """What is wrong with an operator in 16 bits, and what to do; None if nothing is."""
        narrow = next((tensor.dtype for tensor in (*outs, *ins) if tensor.dtype in NARROW), None)
        if narrow is None:
            return None
        dtype, narrow_out = named(narrow), any(tensor.dtype in NARROW for tensor in outs)
        if site.phase == "loss":
            if product:
                return (
                    f"logits are computed in {dtype}",
                    "multiply float32 features: features.image.float() and the like",
                )
            if op in SUMS and narrow_out:
                return (
                    f"the loss is summed in {dtype}",
                    "compute the loss in float32: rounding hides small changes of it",
                )
        if site.phase != "forward":
            return None
        trained = not any(
            name.startswith(f"{site.module}.") for name in self._frozen
        )  # frozen norms keep no statistics
        if any(norm in op for norm in NORMS) and trained and any(tensor.dtype in NARROW for tensor in outs[1:]):
            return f"statistics of normalisation are {dtype}", "give the norm float32 weights, or a float32 input"
        if site.norm and op in SUMS and narrow_out:
            return f"statistics of normalisation are summed in {dtype}", "cast the input up first: x.float()"
        if op in SOFTMAXES and narrow_out:
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

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        self._stack.pop()


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.operator(func, args, kwargs or {})


def _event(device: str) -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return torch.cuda.current_stream(device).record_event(event)


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _address(tensor: torch.Tensor) -> int:
    return int(getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata)


def tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)

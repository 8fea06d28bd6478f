"""What a step computes in which dtype: a dispatch mode that sums up the operators and follows the casts.

The operators of the code that runs within `Recorder.recording` enter; `Recorder.ops` and `Recorder.casts` leave.

**Where an operator belongs.** In forward passes, to the innermost module that is being called. In backward passes, to
the module that made the node of autograd: nodes are numbered in the order in which forward passes make them, so the
number of the node that runs gives back the place in the forward pass. Kernels that torch.compile makes are not seen:
`recording` runs compiled modules eagerly.

**Traffic** is the bytes of all inputs and outputs of operators that are no views; what is written in place counts as
both. What caches save is not known.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

Phase = Literal["forward", "recomputation", "loss", "backward", "optimizer", "step"]
Region = Literal["", "norm", "attention", "loss", "inputs"]

PRODUCTS = {
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "mv",
    "addmv",
    "dot",
    "convolution",
    "convolution_backward",
    "_addmm_activation",
    "linear",
    "mkldnn_linear",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_varlen_attn",
    "_varlen_attn_backward",
}
TEACHER = "teacher"
CASTS = ("_to_copy", "copy_", "_foreach_copy_")
# Copies that leave values as they are: what is known of the input holds for the output.
COPIES = {"clone", "cat", "stack", "index_select", "_unsafe_view", "slice_scatter", "select_scatter", "repeat"}
ALLOCATIONS = ("empty", "new_empty", "_local_scalar_dense")  # touch no memory
HIDDEN = (str(Path(torch.__file__).parent), __file__)


class Site(NamedTuple):
    """A place in the step."""

    phase: Phase
    module: str  # dotted name in the towers; '' for the towers themselves
    region: Region  # 'norm': in a module of normalisation; 'attention': in F.scaled_dot_product_attention
    line: str  # FILE:LINE of the model's code that calls the operator; '' in torch's own


class OpKey(NamedTuple):
    """Operators that are summed up together."""

    site: Site
    op: str
    ins: tuple[torch.dtype, ...]  # floating-point dtypes of the inputs, sorted by name
    outs: tuple[torch.dtype, ...]  # of each output that is a floating-point tensor with elements, in order


@dataclass
class Total:
    """Sums over operators."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, other: Total) -> None:
        """Add other sums."""
        self.count += other.count
        self.bytes += other.bytes
        self.seconds += other.seconds


class CastKey(NamedTuple):
    """Casts that are summed up together."""

    site: Site
    source: torch.dtype
    target: torch.dtype
    weight: str  # name of the parameter that is cast, or whose gradient is; '' for other tensors
    trip: bool  # whether the values were cast from the target's dtype before, and did not change since
    again: bool  # whether the same values were cast to the target's dtype before


@dataclass
class Cast(Total):
    """Casts of one kind, and the operators around them."""

    producers: set[str] = field(default_factory=set)
    consumers: set[str] = field(default_factory=set)


class _Known(NamedTuple):
    """What is known about the values in a storage."""

    alive: StorageWeakRef
    op: str = ""  # that made them
    cast: Cast | None = None  # the cast that made them
    source: torch.dtype | None = None  # the dtype before that cast
    targets: tuple[tuple[object, ...], ...] = ()  # dtypes that they were cast to, each with the part that was


class Modules:
    """The module that is being called, by global hooks.

    Args:
        root: whose modules have names. A module outside of it (a loss) has the name of its class; those of other towers
            begin with 'teacher'.
    """

    def __init__(self, root: nn.Module) -> None:
        self._kind = type(root)
        self.names = {id(module): name for name, module in root.named_modules()}
        self.stack: list[tuple[str, bool]] = []  # names, and whether the module or one around it normalises

    @contextmanager
    def followed(self) -> Iterator[None]:
        """A context in which `stack` is up to date."""
        before = nn.modules.module.register_module_forward_pre_hook(self._enter)
        after = nn.modules.module.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, args: object) -> None:
        name = self.names.get(id(module))
        if name is None and isinstance(module, self._kind):
            self.names |= {id(part): f"{TEACHER}.{name}".strip(".") for name, part in module.named_modules()}
            name = TEACHER
        if name is None:  # DDP is transparent
            outer = self.stack[-1][0] if self.stack else ""
            name = outer if isinstance(module, nn.parallel.DistributedDataParallel) else type(module).__name__
        norm = "norm" in type(module).__name__.lower() or bool(self.stack and self.stack[-1][1])
        self.stack.append((name, norm))

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        self.stack.pop()


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums up the operators of a step.

    Args:
        root: the model.
        device: whose time is measured: by CUDA events on a GPU.

    Attributes:
        ops: sums of operators.
        casts: sums of casts between dtypes.
        phase: of operators outside of forward and backward passes; set by the caller.
    """

    def __init__(self, root: nn.Module, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules = Modules(root)
        self.ops: dict[OpKey, Total] = {}
        self.casts: dict[CastKey, Cast] = {}
        self.phase: Phase = "step"
        self._parameters = {
            tensor.untyped_storage()._cdata: name for name, parameter in root.named_parameters()
            for tensor in [_plain(parameter)]
        }  # fmt: skip
        self._owners = {id(parameter): name for name, parameter in root.named_parameters()}
        self._sites: dict[int, Site] = {}  # by number of autograd's node
        self._known: dict[int, _Known] = {}  # by address of the storage
        self._attention = False
        self._cuda = torch.device(device).type == "cuda"
        self._events: list[tuple[Total, Any, Any]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The context of the operators that are recorded."""
        with ExitStack() as stack:
            stack.enter_context(self.modules.followed())
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self._attention_marked())
            stack.enter_context(self)
            yield
        if self._cuda:
            torch.cuda.synchronize()
            for total, start, stop in self._events:
                total.seconds += start.elapsed_time(stop) / 1e3
        self._known.clear()
        self._sites.clear()

    @contextmanager
    def _attention_marked(self) -> Iterator[None]:
        """Note which operators F.scaled_dot_product_attention is made of: dispatch modes see only those."""
        original = F.scaled_dot_product_attention

        def marked(*args: Any, **kwargs: Any) -> Any:
            before, self._attention = self._attention, True
            try:
                return original(*args, **kwargs)
            finally:
                self._attention = before

        F.scaled_dot_product_attention = marked
        try:
            yield
        finally:
            F.scaled_dot_product_attention = original

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func.overloadpacket.__name__) if hasattr(func, "overloadpacket") else str(func)
        site = self._site(name)
        ins = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
        starts = self._start()
        out = func(*args, **kwargs)
        seconds, stop = self._stop(starts)
        outs = [*_tensors((out,)), *(() if out is not None else _written(func, args))]
        if getattr(func, "is_view", False) or name.startswith(ALLOCATIONS):
            return out
        inputs = {id(tensor): tensor for tensor in ins}
        total = Total(1, sum(map(_size, inputs.values())) + sum(map(_size, outs)), seconds)
        ins_floats = tuple(sorted({t.dtype for t in ins if t.is_floating_point()}, key=str))
        key = OpKey(site, name, ins_floats, tuple(t.dtype for t in outs if t.is_floating_point() and t.numel()))
        summed = self.ops.setdefault(key, Total())
        summed.add(total)
        source = args[1] if name == "copy_" else args[0] if name == "_to_copy" else None
        cast = None
        if isinstance(source, torch.Tensor) and outs and source.dtype != outs[0].dtype:
            cast = self._add_cast(site, source, outs[0], total)
        elif not (name in COPIES or name in CASTS):
            self._consumed(ins, name)
        self._made(func, name, ins, outs, cast, None if cast is None or source is None else source.dtype)
        if stop is not None:
            self._events.append((summed, starts, stop))
            if cast is not None:
                self._events.append((cast, starts, stop))
        return out

    def _site(self, op: str) -> Site:
        node = torch._C._current_autograd_node()
        stack = self.modules.stack
        if node is not None and not stack:  # in a backward pass, and no recomputation
            if (variable := getattr(node, "variable", None)) is not None:
                module = self._owners.get(id(variable), "").rpartition(".")[0]
                return Site("backward", module, "", "")
            site = self._sites.get(node._sequence_nr())
            return Site("backward", "", "", "") if site is None else site._replace(phase="backward")
        module, norm = stack[-1] if stack else ("", False)
        phase: Phase = self.phase
        region: Region = "norm" if norm else "attention" if self._attention else ""
        if node is not None:
            phase = "recomputation"
        elif phase == "loss" and not module.startswith(TEACHER):
            region = "loss"
        elif stack:
            phase = "forward"
            region = region or ("" if module else "inputs")
        site = Site(phase, module, region, _line() if phase in ("forward", "loss") else "")
        if node is None:
            self._sites[torch.autograd._get_sequence_nr() - 1] = site
        return site

    def _add_cast(self, site: Site, source: torch.Tensor, target: torch.Tensor, total: Total) -> Cast:
        known = self._find(source) or _Known(_weak(source))
        trip = known.cast is not None and known.source == target.dtype
        weight = self._parameters.get(_address(source), "") or self._weight_of_gradient()
        part = (target.dtype, source.storage_offset(), source.shape, source.stride())
        key = CastKey(site, source.dtype, target.dtype, weight, trip, part in known.targets)
        cast = self.casts.setdefault(key, Cast())
        cast.add(total)
        if known.op:
            cast.producers.add(known.op)
        if known.cast is not None:
            known.cast.consumers.add("_to_copy")
        self._known[_address(source)] = known._replace(targets=(*known.targets, part))
        return cast

    def _weight_of_gradient(self) -> str:
        """The parameter whose gradient the backward pass makes now; '' if it is not the last node before it."""
        node = torch._C._current_autograd_node()
        following = [] if node is None or self.modules.stack else [one for one, _ in node.next_functions]
        variable = getattr(following[0], "variable", None) if len(following) == 1 else None
        return self._owners.get(id(variable), "")

    def _consumed(self, ins: list[torch.Tensor], op: str) -> None:
        for tensor in ins:
            if (known := self._find(tensor)) is not None and known.cast is not None:
                known.cast.consumers.add(op)

    def _made(
        self,
        func: Any,
        name: str,
        ins: list[torch.Tensor],
        outs: list[torch.Tensor],
        cast: Cast | None,
        source: torch.dtype | None,
    ) -> None:
        """Note what made the outputs, and forget what was known about values that are written in place."""
        kept = next((known for tensor in ins if (known := self._find(tensor)) is not None), None)
        for tensor in outs:
            storage = _plain(tensor).untyped_storage()
            known = _Known(_weak(tensor), name, cast, source)
            if name in COPIES and kept is not None:
                known = known._replace(op=kept.op, cast=kept.cast, source=kept.source)
            self._known[storage._cdata] = known

    def _find(self, tensor: torch.Tensor) -> _Known | None:
        known = self._known.get(_address(tensor))
        return None if known is None or known.alive.expired() else known  # type: ignore[no-untyped-call]

    def _start(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _stop(self, start: Any) -> tuple[float, Any]:
        if not self._cuda:
            return time.perf_counter() - start, None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return 0.0, event


def traffic(ops: Mapping[OpKey, Total]) -> Total:
    """The sums of all operators."""
    total = Total()
    for one in ops.values():
        total.add(one)
    return total


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a sharded tensor."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def _weak(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(_plain(tensor).untyped_storage())  # type: ignore[no-untyped-call]


def _address(tensor: torch.Tensor) -> int:
    return int(_plain(tensor).untyped_storage()._cdata)


def _size(tensor: torch.Tensor) -> int:
    """Bytes of the memory behind a tensor; expanded dimensions take none."""
    tensor = _plain(tensor)
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _written(func: Any, args: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """The arguments that an operator without a result writes to."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors((value,))


def _line() -> str:
    """FILE:LINE of the innermost caller outside of torch and of this module."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(HIDDEN):
            parent = Path(path)
            return f"{parent.parent.name}/{parent.name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""

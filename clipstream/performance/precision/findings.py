"""What the operators of a step say about its precision: violations, casts and products that need not be, and costs.

The sums of a `Recorder` and the run's precision enter; findings leave, the dearest first. A finding is an 'error' where
what has to be float32 is not, a 'warning' where a change saves time, memory or digits, and 'meant' where the precision
is as it has to be, or cannot be changed; it says which setting to change, or why nothing is to be changed.

**Float32 in every precision:** statistics of normalisation, logits, loss and sums in it, statistics of softmax; of the
state of a step: gradients, weights and moments (except with pure_bf16), averaged weights, batch statistics, scale and
bias of the logits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from clipstream.performance.precision.recorder import CASTS, PRODUCTS, Cast, CastKey, OpKey, Recorder, Site, Total

Severity = Literal["error", "warning", "meant"]
Precision = Literal["fp32", "bf16", "fp16", "pure_bf16", "fp64"]
COMPUTES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "pure_bf16": torch.bfloat16,
    "fp64": torch.float64,
}
NARROW = (torch.bfloat16, torch.float16)
NORMS = {
    "native_layer_norm",
    "native_group_norm",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "cudnn_batch_norm",
    "_batch_norm_with_update",
    "miopen_batch_norm",
    "_fused_rms_norm",
    "batch_norm_gather_stats_with_counts",
}
SOFTMAXES = {"_softmax", "_log_softmax", "_safe_softmax", "logsumexp"}
ATTENTIONS = frozenset(op for op in PRODUCTS if op.startswith("_scaled_dot_product") and "backward" not in op)
SUMS = SOFTMAXES | {
    "sum",
    "mean",
    "prod",
    "cumsum",
    "var",
    "var_mean",
    "std",
    "logaddexp",
    "nll_loss_forward",
    "linalg_vector_norm",
    "norm",
    "native_norm",
}
# What autocast computes in float32, and what a step computes there on purpose.
ISLANDS = (
    NORMS
    | SUMS
    | {"pow", "exp", "expm1", "log", "log2", "log10", "log1p", "rsqrt", "reciprocal", "softplus", "cumprod", "dist"}
)

PACKED = "execution/packed_text.py:"  # whose attention is in float32 on a CPU
ONCE = "pure_bf16 has no float32 weights to cast"
REASONS = {
    "weights": f"autocast over float32 weights: once in a pass of a trained tower; --precision {ONCE}",
    "weight gradients": "gradients are summed in float32, the dtype of the weights",
    "operands": "operands of matrix products that an operation in float32 made",
    "gradients of casts": "the backward pass of a cast casts the gradient back",
    "elementwise": "autocast leaves other operations in the dtype of their input, such as a residual stream of "
    "float32 embeddings",
    "norm": "statistics of normalisation need float32; --train.compile fuses the casts around it",
    "attention": "softmax needs float32, and plain matrix products are the fastest attention of a CPU in 16 bits",
    "loss": "logits, softmax and loss need float32",
    "inputs": "pixels are scaled as torchvision does, and features are normalised, in float32",
    "numbers": "integers become numbers, or other integers",
    "optimizer": "weights, moments and averages need float32: updates are smaller than a 16-bit weight's digits",
    "step": "norm of the gradients, and the loss over all ranks",
}


@dataclass
class Finding(Total):
    """A finding, and its sums over the operators that it is about."""

    kind: str = ""  # island, product, round trip, repeated cast, widened, underflow, loss scale; or a cost
    severity: Severity = "meant"
    where: str = ""  # module, or group of modules with * for numbers
    what: str = ""
    advice: str = ""  # the setting to change, or the reason
    lines: set[str] = field(default_factory=set)  # FILE:LINE of the code
    modules: set[str] = field(default_factory=set)

    def to_json(self) -> dict[str, object]:
        """As a dictionary."""
        return {
            "kind": self.kind, "severity": self.severity, "where": self.shown, "what": self.what,
            "advice": self.advice, "lines": sorted(self.lines), "count": self.count, "bytes": self.bytes,
            "seconds": self.seconds,
        }  # fmt: skip

    @property
    def shown(self) -> str:
        """The module, if it is one; else the group and how many modules it has."""
        if len(self.modules) == 1:
            return next(iter(self.modules))
        return f"{self.where} ({len(self.modules)} modules)" if len(self.modules) > 1 else self.where


class Findings:
    """Collects findings; equal ones in modules that differ by a number are one."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, ...], Finding] = {}

    def add(self, kind: str, severity: Severity, site: Site | None, what: str, advice: str, total: Total) -> None:
        """Add a finding about operators at a place; None for the whole step."""
        module = "" if site is None else place(site)
        group = grouped(module)
        key = (kind, severity, group, what, advice)
        finding = self.found.setdefault(key, Finding(0, 0, 0.0, kind, severity, group, what, advice))
        finding.add(total)
        if module:
            finding.modules.add(module)
        if site is not None and site.line:
            finding.lines.add(site.line)

    def add_state(self, where: str, what: str, advice: str, kind: str = "island") -> None:
        """Add a finding about the state of a step: an error, or what is not an island, a warning."""
        severity: Severity = "error" if kind == "island" else "warning"
        group = grouped(where)
        key = (kind, severity, group, what, advice)
        finding = self.found.setdefault(key, Finding(0, 0, 0.0, kind, severity, group, what, advice))
        finding.count += 1
        finding.modules.add(where)

    def sorted(self) -> list[Finding]:
        """Errors, then warnings, then costs; the dearest first."""
        order = ("error", "warning", "meant")
        return sorted(self.found.values(), key=lambda one: (order.index(one.severity), -one.bytes, -one.seconds))


def grouped(module: str) -> str:
    """A module's name with * for numbers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)


def place(site: Site) -> str:
    """The name of a place for people."""
    if site.region == "loss":
        return "loss"
    if site.phase in ("optimizer", "step"):
        return "optimizer" if site.phase == "optimizer" else "gradient norm"
    return site.module.removeprefix("clip.") or "towers"


def is_wide(dtypes: Iterable[torch.dtype], precision: str) -> bool:
    """Whether one of the dtypes is wider than what the precision computes in."""
    return any(dtype.itemsize > COMPUTES[precision].itemsize for dtype in dtypes)


def is_meant(key: OpKey | CastKey) -> str:
    """Why an operation or a cast may be wider than the run's precision: a key of `REASONS`."""
    site = key.site
    if site.phase in ("optimizer", "step"):
        return site.phase
    if isinstance(key, CastKey):
        if not (key.source.is_floating_point and key.target.is_floating_point):
            return "numbers"
        if key.weight and site.phase == "backward":
            return "weight gradients"
        if key.weight and key.target.itemsize < key.source.itemsize:
            return "weights"
    if site.region:
        return site.region
    if isinstance(key, OpKey):
        return "elementwise"
    if site.phase == "backward":
        return "gradients of casts"
    return "operands" if key.target.itemsize < key.source.itemsize else "elementwise"


def analyse(
    findings: Findings, recorder: Recorder, precision: str, device: str, frozen: set[str], trained: set[str]
) -> None:
    """Add all findings about the operators of a step.

    Args:
        frozen: names of the parameters that are not trained.
        trained: names of the modules with parameters that are, or with none at all.
    """
    _check_islands(findings, recorder, trained)
    _find_products(findings, recorder, precision, device)
    _find_casts(findings, recorder, precision, frozen)
    for cast_key, cast in recorder.casts.items():
        reason = is_meant(cast_key)
        findings.add("casts", "meant", None, reason, REASONS[reason], cast)
    for key, total in recorder.ops.items():
        if key.op not in CASTS and key.op not in PRODUCTS and is_wide((*key.ins, *key.outs), precision):
            reason = is_meant(key)
            findings.add("wide operations", "meant", None, reason, REASONS[reason], total)


def _check_islands(findings: Findings, recorder: Recorder, trained: set[str]) -> None:
    """What has to be float32 in every precision, among the operators. Frozen norms keep no statistics."""
    for key, total in recorder.ops.items():
        if key.op in NORMS and key.site.module not in trained:
            continue
        if (found := _violation(key)) is not None:
            findings.add("island", "error", key.site, *found, total)


def _violation(key: OpKey) -> tuple[str, str] | None:
    """What is wrong with an operator in 16 bits, and what to change; None if nothing is."""
    site, op = key.site, key.op
    narrow = next((dtype for dtype in (*key.outs, *key.ins) if dtype in NARROW), None)
    if narrow is None:
        return None
    name = str(narrow).removeprefix("torch.")
    narrow_out = any(dtype in NARROW for dtype in key.outs)
    if site.region == "loss" and op in PRODUCTS:
        return f"logits are computed in {name}", "multiply float32 features: features.image.float() and the like"
    if site.region == "loss" and op in SUMS and narrow_out:
        return f"the loss is summed in {name}", "compute the loss in float32: rounding hides small changes of it"
    if site.phase not in ("forward", "recomputation"):
        return None
    if op in NORMS and any(dtype in NARROW for dtype in key.outs[1:]):
        return f"statistics of normalisation are {name}", "give the norm float32 weights, or a float32 input"
    if site.region == "norm" and op in SUMS and narrow_out:
        return f"statistics of normalisation are summed in {name}", "cast the input up first: x.float()"
    if op in SOFTMAXES and narrow_out:
        return f"softmax in {name}", "use F.scaled_dot_product_attention, or softmax(..., dtype=torch.float32)"
    if op in ATTENTIONS and any(dtype in NARROW for dtype in key.outs[1:2]):
        return (
            f"statistics of the attention's softmax are {name}",
            "use another backend: torch.nn.attention.sdpa_kernel",
        )
    return None


def _find_products(findings: Findings, recorder: Recorder, precision: str, device: str) -> None:
    """Matrix products that are wider or narrower than the run's precision."""
    narrow = [key.site for key in recorder.casts if key.source in NARROW]
    plain = {site.module for site in narrow if site.region == "attention" or PACKED in site.line}
    for key, total in recorder.ops.items():
        site = key.site
        if key.op not in PRODUCTS or not key.ins or site.region == "loss" or site.phase in ("optimizer", "step"):
            continue
        name = str(max(key.ins, key=lambda dtype: dtype.itemsize)).removeprefix("torch.")
        if all(is_wide([dtype], precision) for dtype in key.ins):
            what = f"matrix products in {name}"
            if site.region == "attention" and site.module in plain and device.startswith("cpu"):
                findings.add("product", "meant", site, what, REASONS["attention"], total)
            elif site.region == "attention" and site.module in plain:
                advice = "no fused kernel takes this attention (mask, head width): see torch.nn.attention.sdpa_kernel"
                findings.add("product", "warning", site, what, advice, total)
            else:
                advice = "remove .float() or autocast(enabled=False) around it, or keep it if it needs the digits"
                findings.add("product", "warning", site, what, advice, total)
        elif all(dtype.itemsize < COMPUTES[precision].itemsize for dtype in key.ins):
            advice = f"--precision is {precision}: remove the cast before it, or train in that precision"
            findings.add("product", "warning", site, f"matrix products in {name}", advice, total)


def _find_casts(findings: Findings, recorder: Recorder, precision: str, frozen: set[str]) -> None:
    """Casts that change nothing, that lose digits, that are repeated, or that widen activations for no sum."""
    weights: dict[tuple[str, torch.dtype], Cast] = {}
    sites: dict[tuple[str, torch.dtype], Site] = {}
    for key, cast in recorder.casts.items():
        if not (key.source.is_floating_point and key.target.is_floating_point):
            continue
        source, target = (str(dtype).removeprefix("torch.") for dtype in (key.source, key.target))
        wider = key.target.itemsize > key.source.itemsize
        if key.trip:
            what = f"round trip {target} -> {source} -> {target}"
            loses = "loses digits" if wider else "has no effect"
            findings.add("round trip", "warning", key.site, what, f"remove both casts: the first one {loses}", cast)
        elif key.weight and not wider and key.site.phase == "forward":
            weights.setdefault((key.weight, key.target), Cast()).add(cast)
            sites.setdefault((key.weight, key.target), key.site)
        elif key.again and not key.weight:
            what = f"the same tensor is cast to {target} again"
            findings.add("repeated cast", "meant", key.site, what, "autocast keeps its copies of weights only", cast)
        elif wider and _is_widened(key, cast) and is_wide([key.target], precision):
            what = f"activations are cast to {target} for {', '.join(sorted(cast.consumers))}"
            advice = "remove .float(): elementwise operations need no more digits than their input has"
            findings.add("widened", "warning", key.site, what, advice, cast)
    for (weight, dtype), cast in weights.items():
        if cast.count > 1:
            spared = Total(cast.count - 1, cast.bytes * (cast.count - 1) // cast.count)
            spared.seconds = cast.seconds * spared.count / cast.count
            name = str(dtype).removeprefix("torch.")
            what = f"weights are cast to {name} {cast.count} times a step"
            advice = "autocast forgets its copies after each pass: a larger --train.micro-batch-size makes fewer"
            if weight in frozen:
                advice = "autocast keeps no copy of frozen weights: --model.image.precision or --model.text.precision"
            findings.add("repeated cast", "warning", sites[weight, dtype], what, advice, spared)


def _is_widened(key: CastKey, cast: Cast) -> bool:
    """Whether activations are cast up in a forward pass for elementwise operations alone."""
    consumers = cast.consumers - {"_to_copy"}
    return (
        key.site.phase == "forward"
        and not key.site.region
        and not key.weight
        and bool(consumers)
        and not consumers & (ISLANDS | PRODUCTS)
    )


def by_module(recorder: Recorder, precision: str) -> Iterator[tuple[str, Total, Total]]:
    """For each group of modules: its name, its sums, and those of its operations wider than the precision."""
    found: dict[str, tuple[Total, Total]] = {}
    for key, total in recorder.ops.items():
        every, wide = found.setdefault(grouped(place(key.site)), (Total(), Total()))
        every.add(total)
        if is_wide((*key.ins, *key.outs), precision):
            wide.add(total)
    yield from ((name, *sums) for name, sums in found.items())

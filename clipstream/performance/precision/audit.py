"""The result of an audit of a step's precision, and its JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from clipstream.performance.precision.findings import Finding, Findings, analyse, by_module, grouped, place
from clipstream.performance.precision.gradients import BIN, LOWEST, GradientGroup
from clipstream.performance.precision.recorder import Recorder, Total, traffic

MANY = 0.1  # share of a group's gradients that lose digits in fp16, or of steps that overflow, which is a finding


@dataclass(frozen=True)
class ScaleRecord:
    """The loss scale of fp16 after a step, and the share of the steps before it that overflowed."""

    step: int
    scale: float
    overflows: float


@dataclass(frozen=True)
class ModuleShare:
    """A group of modules: its sums, and those of its operations that are wider than the run's precision."""

    module: str
    total: Total
    wide: Total


@dataclass(frozen=True)
class CastShare:
    """Casts of a group of modules between two dtypes."""

    module: str
    phase: str
    source: str
    target: str
    total: Total


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes:
        precision: of the run.
        samples: of this rank in the audited step.
        total: sums over all operators of the step.
        findings: errors first, then warnings, then costs, each the dearest first.
        scale: that the gradients were multiplied with; of a run without loss scale, the one that they are judged at.
        history: of the loss scale, in the run so far.
        own_history: in the audited steps.
    """

    precision: str
    device: str
    samples: int
    total: Total
    findings: list[Finding]
    casts: list[CastShare]
    modules: list[ModuleShare]
    gradients: list[GradientGroup]
    scale: float
    history: list[ScaleRecord]
    own_history: list[ScaleRecord]

    def of(self, severity: str) -> list[Finding]:
        """The findings of a severity."""
        return [finding for finding in self.findings if finding.severity == severity]

    def to_json(self) -> dict[str, Any]:
        """Everything, as nested dictionaries."""
        found = asdict(self)
        found["findings"] = [finding.to_json() for finding in self.findings]
        found["histogram"] = {"log2_from": LOWEST, "log2_step": BIN}
        return found


def audited(
    recorder: Recorder,
    findings: Findings,
    *,
    precision: str,
    device: str,
    samples: int,
    frozen: set[str],
    trained: set[str],
    gradients: list[GradientGroup],
    scale: float,
    history: list[ScaleRecord],
    own: list[ScaleRecord],
) -> Audit:
    """The audit of a recorded step, with the findings that do not follow from its operators."""
    analyse(findings, recorder, precision, device, frozen, trained)
    if precision == "fp16":
        _judge_gradients(findings, gradients, scale)
        _judge_scale(findings, [*history, *own])
    casts: dict[tuple[str, str, str, str], Total] = {}
    for key, cast in recorder.casts.items():
        source, target = (str(dtype).removeprefix("torch.") for dtype in (key.source, key.target))
        casts.setdefault((grouped(place(key.site)), key.site.phase, source, target), Total()).add(cast)
    shares = [ModuleShare(*parts) for parts in by_module(recorder, precision)]
    return Audit(
        precision,
        device,
        samples,
        traffic(recorder.ops),
        findings.sorted(),
        sorted((CastShare(*at, total) for at, total in casts.items()), key=lambda one: -one.total.bytes),
        sorted(shares, key=lambda one: -one.total.bytes),
        gradients,
        scale,
        history,
        own,
    )


def _judge_gradients(findings: Findings, gradients: list[GradientGroup], scale: float) -> None:
    for group in gradients:
        lost = group.share(group.underflow + group.subnormal)
        if ("matrices" in group.name or "projections" in group.name) and lost > MANY:
            what = f"{lost:.0%} of the gradients lose digits or become 0 in fp16 at loss scale {scale:g}"
            findings.add_state(group.name, what, "--precision bf16, whose exponents are float32's", "underflow")


def _judge_scale(findings: Findings, history: list[ScaleRecord]) -> None:
    if history and history[-1].scale < 1:
        what = f"the loss scale fell to {history[-1].scale:g}: small gradients become 0"
        findings.add_state("loss scale", what, "--precision bf16, or a lower --lr or --grad-clip-norm", "loss scale")
    late = history[len(history) // 2 :] if len(history) > 8 else []
    if late and (share := sum(record.overflows for record in late) / len(late)) > MANY:
        what = f"{share:.0%} of the later steps overflow, and change no weight"
        findings.add_state("loss scale", what, "--precision bf16, or a lower --lr", "loss scale")

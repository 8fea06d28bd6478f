"""The audit of a step's precision: misplaced casts, violations of float32, and clean models, in every precision."""

from __future__ import annotations

import io
import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from clipstream.cli.verbs import audit as verb
from clipstream.cli.verbs.train import main as train
from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.losses.contrastive import build_loss
from clipstream.losses.distillation import DistilledLoss
from clipstream.losses.settings import ClipLossSettings, DistillSettings
from clipstream.models.execution.batch_features import FeatureCache, Teacher
from clipstream.models.precision import autocast, prepare
from clipstream.models.settings import Precision
from clipstream.models.towers import Features
from clipstream.training.precision_audit import Audit, GradientGroup, Recorder, Severity, audit_step
from clipstream.training.settings import AUDIT_FILE
from clipstream.training.step import TrainStep
from tests.support import gpu_steps
from tests.support.gpu_steps import make_batch, make_towers
from tests.support.model_files import write
from tests.support.runs import flags as run_flags
from tests.support.runs import same_weights, weights

RESNET = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8}


class Around(nn.Module):
    def __init__(self, inner: nn.Module, around: Any) -> None:
        super().__init__()
        self.inner, self.around = inner, around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.around(self.inner, x)


def in_float32(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return inner(x.float()).to(x.dtype)


class NarrowLoss:
    """A softmax loss whose logits are bfloat16."""

    max_logit_scale = None

    def __init__(self, settings: object = None) -> None: ...

    def __call__(self, features: Features, batch: Batch, world: World) -> torch.Tensor:
        logits = features.image.bfloat16() @ features.text.bfloat16().T
        return F.cross_entropy(logits.float() * features.logit_scale, torch.arange(len(logits)))


def make_step(towers: Any, precision: Precision, **options: Any) -> TrainStep:
    prepare(towers, precision)
    return gpu_steps.make_step(towers, "cpu", precision=precision, **options)


def run(step: TrainStep) -> Audit:
    return audit_step(step, make_batch(4))


def found(audit: Audit, severity: Severity) -> list[tuple[str, str]]:
    return [(finding.where, finding.what) for finding in audit.of(severity)]


@pytest.mark.parametrize(
    ("precision", "buckets", "vision"),
    [("bf16", 9, None), ("fp16", "packed", None), ("pure_bf16", 9, None), ("pure_bf16", 9, RESNET), ("fp32", 9, None)],
)
def test_a_clean_model_has_no_finding(
    tmp_path: Path, precision: Precision, buckets: int | str, vision: dict[str, Any] | None
) -> None:
    audit = run(make_step(make_towers(tmp_path, "cpu", vision, text_buckets=buckets), precision, ema=0.9))
    assert found(audit, "error") == found(audit, "warning") == []
    assert audit.operators > 100 and audit.seconds > 0 and sum(one.seconds for one in audit.findings) <= audit.seconds
    narrow = {what for _, what in found(audit, "cost") if re.match(r"casts float32 to .*float16", what)}
    assert bool(narrow) == (precision != "fp32")


def narrow_product(inner: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x.bfloat16(), inner.weight.bfloat16()).float()


def root_mean_square(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A norm that sums up in the dtype of its input."""
    return x * (x * x).mean(-1, keepdim=True).add(1e-6).rsqrt()


@pytest.mark.parametrize(
    ("precision", "where", "around", "severity", "what", "times"),
    [
        ("fp32", "mlp.c_fc", narrow_product, "warning", "matrix products in bfloat16", 3),
        ("bf16", "mlp", in_float32, "warning", "matrix products in float32", 3),  # two of them backward
        ("bf16", "mlp.gelu", lambda _, x: x.softmax(dim=-1), "error", "softmax in bfloat16", 1),
        ("bf16", "ln_1", root_mean_square, "error", "statistics of normalisation are summed in bfloat16", 1),
    ],
)
def test_a_wrong_precision_is_found_with_its_module(
    tmp_path: Path, precision: Precision, where: str, around: Any, severity: Severity, what: str, times: int
) -> None:
    towers = make_towers(tmp_path, "cpu")
    block = towers.clip.visual.transformer.resblocks[0]
    kind = type("OwnNorm", (Around,), {}) if where == "ln_1" else Around  # norms are known by their classes' names
    block.set_submodule(where, kind(block.get_submodule(where), around))
    audit = run(make_step(towers, precision))
    where = f"visual.transformer.resblocks.*.{where}"
    (finding,) = (one for one in audit.of(severity) if one.where in (where, f"{where}.inner.c_fc"))
    assert (finding.what, finding.count) == (what, times) and finding.bytes > 0 and finding.advice
    wrong = [*found(audit, "error"), *found(audit, "warning")]
    assert all(place.startswith(where) for place, _ in wrong)
    shown = io.StringIO()
    audit.show(Console(file=shown, width=250))  # wide enough that no name is folded
    assert where in shown.getvalue() and what in shown.getvalue()


def test_operators_without_a_gradient_do_not_take_the_backward_pass_of_the_module_before() -> None:
    towers = nn.Sequential(nn.Linear(4, 4), Around(nn.Linear(4, 4), lambda inner, x: x + inner(x.detach()).detach()))
    towers[1].requires_grad_(False)
    recorder = Recorder(towers, "bf16", "cpu")
    with recorder.recording():
        towers(torch.ones(3, 4)).sum().backward()
    products = {one.where: one.count for one in recorder.found.values() if one.what == "matrix products in float32"}
    assert products == {"0": 2, "1.inner": 1}  # forward passes, and the one for the gradient of the first's weights


def test_the_products_of_a_live_teacher_are_no_logits(tmp_path: Path) -> None:
    teacher = Teacher(make_towers(tmp_path, "cpu"), "cpu", lambda: autocast("cpu", "bf16"))
    settings = DistillSettings(weight=1.0)
    loss = DistilledLoss(build_loss(ClipLossSettings(), "clip"), settings, {"teacher": teacher.scale}, teacher)
    audit = run(make_step(make_towers(tmp_path, "cpu"), "bf16", loss=loss))
    assert found(audit, "error") == [] and "teacher" in {where for where, _ in found(audit, "cost")}


def test_weights_that_are_cast_for_each_micro_batch_are_found(tmp_path: Path) -> None:
    audit = run(make_step(make_towers(tmp_path, "cpu"), "bf16", micro_batch_size=2, kept_micro_batches=1))
    assert {f.what for f in audit.of("warning")} == {"weights are cast to bfloat16 3 times a step"}
    assert all("micro-batch" in f.advice for f in audit.of("warning"))
    assert found(audit, "error") == []


def test_a_tower_whose_features_are_cached_is_audited(tmp_path: Path) -> None:
    towers = make_towers(tmp_path, "cpu", lock_image=True)
    cache = FeatureCache(towers, "image", 0.001, World(), nullcontext)
    audit = run(make_step(towers, "bf16", caches=[cache]))
    assert any(where.startswith("visual.") for where, _ in found(audit, "cost"))
    assert len(cache) == 0


def test_gradients_are_compared_with_the_limits_of_fp16() -> None:
    group = GradientGroup("some")
    sizes = [0.0, 2.0**-30, 2.0**-26, 2.0**-20, 1.0, -1.0, 1e6, float("inf"), 2.0**-130]
    group.add(torch.tensor(sizes, dtype=torch.float64), 1.0)
    assert (group.n, group.zeros, group.underflow, group.subnormal, group.overflow) == (9, 1, 3, 1, 2)
    scaled = GradientGroup("scaled")
    scaled.add(torch.tensor([2.0**-30]), 2.0**16)
    assert (scaled.underflow, scaled.subnormal) == (0, 0)


def test_a_loss_scale_that_is_too_small_is_found(tmp_path: Path) -> None:
    step = make_step(make_towers(tmp_path, "cpu"), "fp16")
    step.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-20)
    step.gradcache.scaled = step.scaler.scale
    audit = run(step)
    assert audit.scale == 2.0**-20
    whats = [what for _, what in found(audit, "warning")]
    assert any("lose digits" in what for what in whats) and any("loss scale fell" in what for what in whats)


def test_the_verb_names_what_is_wrong_and_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = write(tmp_path), tmp_path / "audit.json"
    flags = ["precision", "--model", model, "--data.global-batch-size", "4", "--device", "cpu", "--precision", "fp32"]
    flags += ["--run.threads", "1"]
    assert verb.main([*flags, "--json", str(out)]) == 0
    assert "No finding" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert {"findings", "gradients", "scale"} <= written.keys()
    assert verb.main([*flags, "--loss.type", f"{__name__}:NarrowLoss"]) == 1
    captured = capsys.readouterr()
    assert "logits are computed in bfloat16" in captured.out and "1 error" in captured.err
    assert verb.main(["--model", model]) == 2 and "clipstream audit precision" in capsys.readouterr().err
    assert verb.main([*flags, "--batch", "shards"]) == 2 and "--train-data" in capsys.readouterr().err
    assert verb.main(["precision", "--run", str(tmp_path)]) == 2 and "config.yaml is missing" in capsys.readouterr().err
    assert verb.main(["precision", "--help"]) == 0 and "--json" in capsys.readouterr().out


def test_a_run_that_audits_its_first_step_trains_the_same_weights(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fp16 = ("--precision", "fp16", "--train.ema", "0.9")
    assert train(run_flags(place, "plain", *fp16, steps=2)) == 0
    assert train(run_flags(place, "audited", *fp16, "--audit-precision", steps=2)) == 0
    assert same_weights(weights(place, "plain", 2), weights(place, "audited", 2))
    assert same_weights(weights(place, "plain", 2, "averaged"), weights(place, "audited", 2, "averaged"))
    run = place / "runs" / "audited"
    assert json.loads((run / AUDIT_FILE).read_text())["samples"] == 24
    assert "No finding" in (run / "out.log").read_text()
    assert not (place / "runs" / "plain" / AUDIT_FILE).exists()
    pages = {name: (place / "runs" / name / "report.html").read_text() for name in ("plain", "audited")}
    assert "Precision of a step: fp16" in pages["audited"] and "Precision of a step" not in pages["plain"]
    capsys.readouterr()
    assert verb.main(["precision", "--run", str(run)]) == 0  # its settings, shards and weights
    out = capsys.readouterr().out
    assert "fp16 on cpu, 24 samples" in out

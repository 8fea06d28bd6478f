"""The audit of a step's precision: misplaced casts, violations of float32, and clean models, in every precision."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from clipstream import audit as verb
from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.losses.contrastive import build_loss
from clipstream.losses.settings import ClipLossSettings
from clipstream.models.execution.feature_cache import FeatureCache
from clipstream.models.towers import Features
from clipstream.performance.precision.audit import Audit, ScaleRecord
from clipstream.performance.precision.gradients import GradientGroup
from clipstream.report.precision_audit import audit_text, scale_line, show_audit
from clipstream.report.sinks import AUDIT_FILE
from clipstream.tools.precision_audit import audit_step
from clipstream.train import main as train
from clipstream.training.auto_micro_batch import AutoMicroBatch
from clipstream.training.ema import WeightAverages
from clipstream.training.optim import parameter_groups
from clipstream.training.precision import Precision, prepare
from clipstream.training.step import TrainStep
from tests.support.model_files import build, write
from tests.support.runs import flags as run_flags
from tests.support.runs import furnish, same_weights, weights

RESNET = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8}
N = 4


class Around(nn.Module):
    """A module with something around it."""

    def __init__(self, inner: nn.Module, around: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.around = inner, around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Around the inner module."""
        return self.around(self.inner, x)


def in_float32(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        wide: torch.Tensor = inner(x.float())
    return wide.to(x.dtype)


class NarrowLoss:
    """A softmax loss whose logits are bfloat16."""

    max_logit_scale = None

    def __init__(self, settings: object = None) -> None: ...

    def __call__(self, features: Features, batch: Batch, world: World) -> torch.Tensor:
        """See ContrastiveLoss."""
        logits = features.image.bfloat16() @ features.text.bfloat16().T
        return F.cross_entropy(logits.float() * features.logit_scale, torch.arange(len(logits)))


class RootMeanSquareNorm(nn.Module):
    """A norm that sums up in the dtype of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of any shape."""
        return x * (x * x).mean(-1, keepdim=True).add(1e-6).rsqrt()


def make_step(
    folder: Path,
    precision: Precision,
    change: Callable[[Any], None] = lambda clip: None,
    *,
    vision: dict[str, Any] | None = None,
    loss: Any = None,
    ema: bool = False,
    buckets: int | str = 9,
    **options: Any,
) -> TrainStep:
    towers = build(write(folder, vision), text_buckets=buckets)
    change(towers.clip)
    prepare(towers.train(), precision)
    optimizer = torch.optim.AdamW(parameter_groups(towers, 0.1), lr=1e-3)
    averages = WeightAverages(towers, 0.9) if ema else None
    loss = loss or build_loss(ClipLossSettings(), "clip")
    return TrainStep(towers, loss, optimizer, World(), precision=precision, averages=averages, **options)


def make_batch(towers: Any, n: int = N) -> Batch:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (n, 3, *towers.image.size), dtype=torch.uint8, generator=generator)
    ids = towers.open_clip_tokenizer()(["a", "b c", "d e f", "g h"] * (n // 4)).int()
    return Batch(pixels, ids, torch.ones(n), ("",) * n, torch.zeros(n), step=0, global_size=n)


def run(step: TrainStep, n: int = N) -> Audit:
    return audit_step(step, make_batch(step.towers, n))


def found(audit: Audit, severity: str) -> list[tuple[str, str, str]]:
    return [(finding.kind, finding.shown, finding.what) for finding in audit.of(severity)]


@pytest.mark.parametrize("buckets", [9, "packed"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "pure_bf16", "fp32"])
def test_a_clean_vit_has_no_finding(tmp_path: Path, precision: Precision, buckets: int | str) -> None:
    audit = run(make_step(tmp_path, precision, ema=True, buckets=buckets))
    assert found(audit, "error") == found(audit, "warning") == []
    assert audit.of("meant") and audit.total.bytes > 0 and audit.total.seconds > 0
    weights = [finding for finding in audit.of("meant") if finding.what == "weights"]
    assert bool(weights) == (precision in ("bf16", "fp16"))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "pure_bf16"])
def test_a_clean_resnet_has_no_finding(tmp_path: Path, precision: Precision) -> None:
    audit = run(make_step(tmp_path, precision, vision=RESNET))
    assert found(audit, "error") == found(audit, "warning") == []


def widen_mlp(clip: Any) -> None:
    block = clip.visual.transformer.resblocks[1]
    block.mlp = Around(block.mlp, in_float32)


def round_trip(clip: Any) -> None:
    block = clip.visual.transformer.resblocks[1]
    block.mlp = Around(block.mlp, lambda inner, x: inner(x.float()))


def widen_activation(clip: Any) -> None:
    mlp = clip.visual.transformer.resblocks[0].mlp
    mlp.gelu = Around(mlp.gelu, lambda inner, x: inner(x.float()).to(x.dtype))


def narrow_softmax(clip: Any) -> None:
    mlp = clip.visual.transformer.resblocks[0].mlp
    mlp.gelu = Around(mlp.gelu, lambda inner, x: x.softmax(dim=-1))


def narrow_norm(clip: Any) -> None:
    clip.visual.transformer.resblocks[0].ln_1 = RootMeanSquareNorm()


BLOCK = "visual.transformer.resblocks"


@pytest.mark.parametrize(
    ("change", "severity", "kind", "where", "what"),
    [
        (widen_mlp, "warning", "product", f"{BLOCK}.1.mlp.inner.c_fc", "matrix products in float32"),
        (round_trip, "warning", "round trip", f"{BLOCK}.1.mlp.inner.c_fc", "bfloat16 -> float32 -> bfloat16"),
        (widen_activation, "warning", "widened", f"{BLOCK}.0.mlp.gelu", "float32 for gelu"),
        (narrow_softmax, "error", "island", f"{BLOCK}.0.mlp.gelu", "softmax in bfloat16"),
        (narrow_norm, "error", "island", f"{BLOCK}.0.ln_1", "summed in bfloat16"),
    ],
)
def test_a_misplaced_cast_is_found_with_its_module(
    tmp_path: Path, change: Callable[[Any], None], severity: str, kind: str, where: str, what: str
) -> None:
    audit = run(make_step(tmp_path, "bf16", change))
    matching = [f for f in audit.of(severity) if f.kind == kind and f.shown == where and what in f.what]
    assert matching, audit_text(audit)
    assert matching[0].bytes > 0 and matching[0].advice and matching[0].lines
    others = [f for f in audit.findings if f.severity != "meant" and not f.shown.startswith(where.split(".inner")[0])]
    assert others == []
    shown = io.StringIO()
    show_audit(audit, Console(file=shown, width=200))  # wide enough that no name is folded
    assert where in shown.getvalue()


def test_float32_products_count_forward_and_backward(tmp_path: Path) -> None:
    audit = run(make_step(tmp_path, "bf16", widen_mlp))
    counts = {f.shown: f.count for f in audit.of("warning") if f.kind == "product"}
    assert counts == {f"{BLOCK}.1.mlp.inner.c_fc": 3, f"{BLOCK}.1.mlp.inner.c_proj": 3}


def test_logits_in_16_bits_are_an_error(tmp_path: Path) -> None:
    audit = run(make_step(tmp_path, "bf16", loss=NarrowLoss()))
    assert ("island", "loss", "logits are computed in bfloat16") in found(audit, "error")
    logits = next(f for f in audit.of("error") if "logits" in f.what)
    assert logits.count == 3  # their two gradients as well
    assert any("test_precision_audit.py" in line for line in logits.lines)


class NarrowMoments(torch.optim.SGD):
    """Keeps a moment in bfloat16."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """See Optimizer."""
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["exp_avg"] = parameter.grad.bfloat16()


def test_narrow_averages_and_moments_are_errors(tmp_path: Path) -> None:
    step = make_step(tmp_path, "bf16", ema=True)
    assert step.averages is not None
    name = "clip.visual.proj"
    step.averages.tensors[name] = step.averages.tensors[name].bfloat16()
    step.optimizer = NarrowMoments([step.towers.clip.text_projection], lr=1e-3)
    assert set(found(run(step), "error")) == {
        ("island", name, "averaged weights are bfloat16"),
        ("island", "clip.text_projection", "moments are bfloat16"),
    }
    assert not step.optimizer.state


def test_weights_that_are_cast_for_each_micro_batch_are_found(tmp_path: Path) -> None:
    audit = run(make_step(tmp_path, "bf16", micro_batch_size=2, kept=1))
    repeated = [f for f in audit.of("warning") if f.kind == "repeated cast"]
    assert repeated and {f.what for f in audit.of("warning")} == {"weights are cast to bfloat16 3 times a step"}
    assert "micro-batch" in repeated[0].advice
    assert found(audit, "error") == []


def test_a_matrix_product_narrower_than_the_run_is_found(tmp_path: Path) -> None:
    def change(clip: Any) -> None:
        mlp = clip.visual.transformer.resblocks[1].mlp
        weight = mlp.c_fc.weight
        mlp.c_fc = Around(mlp.c_fc, lambda inner, x: F.linear(x.bfloat16(), weight.bfloat16()).float())

    audit = run(make_step(tmp_path, "fp32", change))
    assert ("product", f"{BLOCK}.1.mlp.c_fc", "matrix products in bfloat16") in found(audit, "warning")


@pytest.mark.parametrize(("precision", "vision"), [("fp16", None), ("bf16", RESNET)])
def test_training_goes_on_with_the_same_bits(
    tmp_path: Path, precision: Precision, vision: dict[str, Any] | None
) -> None:
    results, states = [], []
    for audited in (False, True):
        torch.manual_seed(0)
        step = make_step(tmp_path, precision, vision=vision, ema=True, clip_norm=1.0)
        batch = make_batch(step.towers)
        if audited:
            audit_step(step, batch)
            assert not step.optimizer.state and all(p.grad is None for p in step.parameters)
        one = step(batch, lr=1e-3)
        if audited:
            audit_step(step, batch)
        two = step(batch, lr=1e-3)
        results.append((one, two))
        moments = [value for state in step.optimizer.state.values() for value in state.values()]
        assert step.averages is not None
        states.append([*step.towers.state_dict().values(), *moments, *step.averages.tensors.values(), torch.rand(1)])
    assert results[0] == results[1]
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_one_step_more_than_the_recorded_one_is_taken(tmp_path: Path) -> None:
    step, seen = make_step(tmp_path, "bf16"), []
    finish = step.gradcache._loss
    step.gradcache._loss = lambda *args: (seen.append(args), finish(*args))[1]  # type: ignore[method-assign]
    run(step)
    assert len(seen) == 2
    overflows = [record.overflows for record in run(make_step(tmp_path, "fp16")).own_history]
    assert overflows[-2:] == [0.0, 0.0] and all(overflows[:-2])  # those whose loss scale was too large come before


def test_the_search_of_auto_begins_anew_after_an_audit(tmp_path: Path) -> None:
    step = make_step(tmp_path, "bf16", micro_batch_size="auto")
    cache = cast(AutoMicroBatch, step.gradcache)
    cache._largest = lambda top, first, trial: 2  # type: ignore[method-assign]
    run(step)
    assert (cache.size, cache.kept, cache.tried_for) == (None, 1, 0)
    step(make_batch(step.towers), lr=0.0)
    assert (cache.size, cache.tried_for) == (2, N)


def test_a_tower_whose_features_are_cached_is_audited(tmp_path: Path) -> None:
    towers = build(write(tmp_path), lock_image=True).train()
    cache = FeatureCache(towers, "image", 0.001, World(), nullcontext)
    optimizer = torch.optim.AdamW([p for p in towers.parameters() if p.requires_grad], lr=1e-3)
    step = TrainStep(
        towers, build_loss(ClipLossSettings(), "clip"), optimizer, World(), precision="bf16", caches=[cache]
    )
    audit = run(step)
    assert any(share.module.startswith("visual.") for share in audit.modules)
    assert len(cache) == 0 and step.caches == [cache]


def test_gradients_are_compared_with_the_limits_of_fp16() -> None:
    group = GradientGroup("some")
    sizes = [0.0, 2.0**-30, 2.0**-26, 2.0**-20, 1.0, -1.0, 1e6, float("inf"), 2.0**-130]
    group.add(torch.tensor(sizes, dtype=torch.float64), 1.0)
    assert (group.n, group.zeros, group.underflow, group.subnormal, group.overflow) == (9, 1, 3, 1, 2)
    assert group.bf16_subnormal == 1 and sum(group.histogram) == 7
    scaled = GradientGroup("scaled")
    scaled.add(torch.tensor([2.0**-30]), 2.0**16)
    assert (scaled.underflow, scaled.subnormal, scaled.median) == (0, 0, -13.0)


def test_a_loss_scale_that_is_too_small_is_found(tmp_path: Path) -> None:
    step = make_step(tmp_path, "fp16")
    step.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-20)
    step.gradcache.scaled = step.scaler.scale
    history = [ScaleRecord(10 * n, 2.0**-n, float(n % 2)) for n in range(21)]
    audit = audit_step(step, make_batch(step.towers), history=history)
    kinds = {finding.kind for finding in audit.of("warning")}
    assert kinds == {"underflow", "loss scale"}
    assert audit.own_history[-1].scale == audit.scale == 2.0**-20
    assert "overflows before 10 of 21 records, last at step 190" in scale_line(history)


def test_the_verb_names_what_is_wrong_and_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = write(tmp_path), tmp_path / "audit.json"
    flags = ["precision", "--model", model, "--data.global-batch-size", "4", "--device", "cpu", "--precision", "fp32"]
    flags += ["--run.threads", "1"]
    assert verb.main([*flags, "--json", str(out), "--rows", "3"]) == 0
    assert "No finding" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert {"findings", "casts", "modules", "gradients", "history"} <= written.keys()
    assert verb.main([*flags, "--loss.type", f"{__name__}:NarrowLoss"]) == 1
    captured = capsys.readouterr()
    assert "logits are computed in bfloat16" in captured.out and "1 error" in captured.err
    assert verb.main(["--model", model]) == 2 and "clipstream audit precision" in capsys.readouterr().err
    assert verb.main([*flags, "--batch", "shards"]) == 2 and "--train-data" in capsys.readouterr().err
    assert verb.main(["precision", "--run", str(tmp_path)]) == 2 and "no config.yaml" in capsys.readouterr().err
    assert verb.main(["precision", "--help"]) == 0 and "--json" in capsys.readouterr().out


def test_a_run_that_audits_its_first_step_trains_the_same_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = furnish(tmp_path)
    fp16 = ("--precision", "fp16", "--train.ema", "0.9", "--workers", "0")
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
    assert verb.main(["precision", "--run", str(run)]) == 0  # its settings, shards, weights and history
    out = capsys.readouterr().out
    assert "fp16 on cpu, 24 samples" in out and "Loss scale of the run: 65536 to 65536" in out

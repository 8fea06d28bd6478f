"""Compiled towers in steps on ranks, in micro-batches and with text buckets: the gradients of the eager step."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from clipstream.cli.verbs.train import main
from clipstream.distributed.world import World
from clipstream.training.parallel import parallelize
from clipstream.training.precision import prepare
from clipstream.training.settings import TrainSettings
from clipstream.training.step import TrainStep
from tests.support.model_files import TEXT, VIT, build, write
from tests.support.pictures import make_shards
from tests.support.ranks import TIMEOUT, run_ranks
from tests.support.runs import MODEL, flags, same_weights, start, weights
from tests.support.sharded import LAYERS
from tests.support.steps import LOSSES, sgd
from tests.support.text_batches import TOKENS, part_of_batch

# what is compiled, parallel, text_buckets, micro_batch_size, kept, and the policy of activation checkpointing
Case = tuple[Any, str, int | str, int | None, int, str]
CASES: list[Case] = [
    ("blocks", "ddp", "auto", 3, 1, "all"),
    ("towers", "ddp", 2, 3, 2, "all"),
    ("step", "ddp", "auto", 3, 1, "off"),
    ("step", "ddp", "off", None, 1, "off"),
]
SHARDED: list[Case] = [("blocks", "fsdp", 2, None, 1, "off"), ("blocks", "fsdp", 1, 3, 1, "all")]


def gradients(
    world: World, model: str, kind: str, cases: list[Case], backend: str = "eager", **settings: Any
) -> list[tuple[dict[str, torch.Tensor], int]]:
    """The gradient that a step goes along in each case, in float64, and the number of graphs."""
    torch.set_num_threads(1)
    found = []
    for parts, parallel, buckets, micro, kept, policy in cases:
        options = {"text_buckets": buckets, "grad_checkpointing": policy, **settings}
        towers = build(model, loss_type=kind, **options).train()
        prepare(towers, "fp64")
        before = {name: p.detach().clone() for name, p in towers.named_parameters()}
        parallelize(towers, world, TrainSettings(parallel=parallel, precision="fp64"))
        how = {"compile": parts, "compile_backend": backend, "micro_batch_size": micro, "kept_micro_batches": kept}
        step = TrainStep(towers, LOSSES[kind], sgd(towers), world, TrainSettings(precision="fp64", **how))
        step(part_of_batch(world), lr=1.0)
        after = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in towers.named_parameters()}
        graphs = 0 if step.compilation is None else step.compilation.graphs
        found.append(({name: (before[name] - p).detach() for name, p in after.items()}, graphs))
        torch._dynamo.reset()
    return found


def check(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor], case: str = "") -> None:
    assert found.keys() == truth.keys()
    for name, gradient in truth.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-10, msg=f"{case}: {name}")


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write(tmp_path, {**VIT, "layers": 2}, text_cfg={**TEXT, "context_length": TOKENS, "vocab_size": 64})


@pytest.mark.parametrize(("kind", "cases"), [("clip", [*CASES, *SHARDED]), ("siglip", [CASES[2]])])
def test_compilation_changes_no_gradient_on_ranks(kind: str, cases: list[Case], model: str) -> None:
    ((truth, _),) = gradients(World(), model, kind, [("off", "ddp", "off", None, 1, "off")])
    for results in run_ranks(2, gradients, model, kind, cases):
        for case, (found, graphs) in zip(cases, results, strict=True):
            assert graphs, case
            check(found, truth, str(case))


@pytest.mark.parametrize("frozen", ["image", "text"])
def test_compiled_locked_towers(frozen: str, model: str) -> None:
    lock = {f"lock_{frozen}": True}
    cases: list[Case] = [(parts, "ddp", "off", 4, 1, "off") for parts in ("off", "blocks", "step")]
    (truth, _), *others = gradients(World(), model, "clip", cases, **lock)
    for found, graphs in others:
        assert graphs
        check(found, truth)


def log_of(place: Path, name: str) -> str:
    return (place / "runs" / name / "out.log").read_text()


def test_a_compiled_run_resumes_with_the_same_bits_and_is_the_eager_one(tmp_path: Path) -> None:
    """With weight averages, micro-batches, patch dropout, and a tower that is locked in the first steps."""
    make_shards(tmp_path / "pairs", [21, 17, 19, 5])
    (tmp_path / "model.json").write_text(json.dumps({**MODEL, **LAYERS}))
    more = ["--lock-image", "--model.unlock-image-at", "2", "--train.ema", "0.9", "--train.micro-batch-size", "10"]
    more += ["--force-patch-dropout", "0.5", "--precision", "fp64", "--checkpoint.every", "1"]
    more += ["--checkpoint.keep-last", "9"]
    compiled = [*more, "--torchcompile", "--torchcompile-backend", "eager"]
    first = f"{tmp_path}/runs/whole/checkpoints/step_00000001"
    assert main(flags(tmp_path, "eager", *more, steps=3)) == 0
    assert main(flags(tmp_path, "whole", *compiled, steps=3)) == 0
    assert main(flags(tmp_path, "again", *compiled, "--checkpoint.resume", first, steps=3)) == 0
    assert "train.compile: compiled" in log_of(tmp_path, "again") and "train.compile" not in log_of(tmp_path, "eager")
    locked, trained = (weights(tmp_path, "whole", step)["visual.conv1.weight"] for step in (1, 3))
    assert not torch.equal(locked, trained)
    for file in ("open_clip_model", "averaged"):
        whole = weights(tmp_path, "whole", 3, file)
        assert same_weights(whole, weights(tmp_path, "again", 3, file))
        check(whole, weights(tmp_path, "eager", 3, file), file)


@pytest.mark.slow  # inductor takes a C++ compiler's time
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler here")
def test_a_second_run_takes_what_it_compiles_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_shards(tmp_path / "pairs", [21, 17, 19, 5])
    vision = {**MODEL["vision_cfg"], "layers": 2}  # type: ignore[dict-item]
    (tmp_path / "model.json").write_text(json.dumps({**MODEL, "vision_cfg": vision}))
    monkeypatch.setenv("CLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    libraries: list[dict[Path, int]] = []
    for name in ("first", "second"):
        (process,) = start(flags(tmp_path, name, "--torchcompile", steps=2))
        _, errors = process.communicate(timeout=5 * TIMEOUT)
        assert process.returncode == 0, errors
        assert "compiled 1 graph with inductor in a step" in log_of(tmp_path, name)
        found = (tmp_path / "cache" / "inductor").rglob("*.so")
        libraries.append({path: path.stat().st_mtime_ns for path in found})
    assert "has no repeated blocks and runs eagerly" in log_of(tmp_path, "first")
    assert libraries[0] == libraries[1] != {}


@pytest.mark.slow  # inductor takes a C++ compiler's time
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler here")
def test_inductor_on_ranks(model: str) -> None:
    ((truth, _),) = gradients(World(), model, "clip", [("off", "ddp", "off", None, 1, "off")])
    run = partial(gradients, backend="inductor")
    for ((found, graphs),) in run_ranks(2, run, model, "clip", [("blocks", "ddp", 1, 4, 1, "off")]):
        assert graphs
        check(found, truth)


def test_the_beginning_of_each_step_is_marked_once_for_cuda_graphs(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[int] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    towers = build(model, loss_type="clip", lock_image=True).train()
    settings = TrainSettings(precision="fp32", compile="towers", compile_backend="eager")
    step = TrainStep(towers, LOSSES["clip"], sgd(towers), World(), settings)
    assert step.compilation is not None
    step.compilation.cuda_graphs = True
    for number in range(1, 3):
        step(part_of_batch(World()), lr=1.0)
        assert len(marks) == number

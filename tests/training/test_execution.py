"""Text buckets, compiled parts, frozen towers and shards, on ranks and in micro-batches: the gradients of one pass."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from clipstream.config.plan import survey
from clipstream.config.settings import load
from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.models.precision import prepare
from clipstream.train import build_loader, build_model, build_plan
from clipstream.training.parallel import parallelize
from clipstream.training.settings import TrainSettings
from tests.support.model_files import build, write
from tests.support.ranks import TIMEOUT, run_ranks
from tests.support.runs import MODEL, flags, furnish, start
from tests.support.steps import CUTS, assert_close, make_step, taken
from tests.support.text_batches import TEXT_CFG, make_texts

Case = tuple[dict[str, Any], dict[str, Any]]  # settings of the model and of training
WHOLE: Case = {"text_buckets": "off"}, {}


def case(buckets: int | str, micro: int | None = None, kept: int = 1, checkpointing: str = "off", **train: Any) -> Case:
    train |= {"compile_backend": "eager"} if "compile" in train else {}
    model = {"text_buckets": buckets, "grad_checkpointing": checkpointing}
    return model, {"micro_batch_size": micro, "kept_micro_batches": kept, **train}


CASES = [case("packed"), case("packed", 2, 0), case(9, 2, 2), case(2, 3, 9), case(2, None, 1, "all")]
SHARDED = [case("packed", parallel="fsdp"), case(3, 2, 1, "all", parallel="fsdp")]
COMPILED = [
    case("auto", 3, 1, "all", compile="blocks"),
    case("auto", 3, compile="step"),
    case(1, 3, 1, "all", compile="blocks", parallel="fsdp"),
]
LOCKED = [
    case(2, 1),
    case("packed", 2, 0, parallel="fsdp"),
    case("off", 4, compile="step"),
]


def part_of_batch(world: World) -> Batch:
    """A rank's part of a batch of ten samples, with texts of 2 to 20 tokens."""
    first = sum(CUTS[world.size][: world.rank])
    n = CUTS[world.size][world.rank]
    pixels, ids = (rows[first : first + n] for rows in make_texts())
    return Batch(pixels, ids, torch.ones(n), ("",) * n, torch.zeros(n), 0, 10)


def gradients(world: World, name: str, cases: list[Case], locks: dict[str, bool]) -> list[dict[str, torch.Tensor]]:
    """The gradients that a step goes along in each case, in float64."""
    found = []
    for own, train in cases:
        towers = prepare(build(name, loss_type="clip", **own, **locks).train(), "fp64")
        parallelize(towers, world, TrainSettings(precision="fp64", **train))
        step = make_step(towers, world, precision="fp64", **train)
        found.append(taken(step, part_of_batch(world))[1])
        assert step.compilation is None or step.compilation.graphs
        torch._dynamo.reset()
    return found


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write(tmp_path, text_cfg=TEXT_CFG)


@pytest.mark.parametrize(
    ("size", "cases", "lock"),
    [
        (1, CASES, None),
        (3, [*CASES, *SHARDED], None),
        (2, COMPILED, None),
        (2, LOCKED, "lock_image"),
        (2, LOCKED, "lock_text"),
    ],
    ids=["alone", "ranks", "compiled", "image", "text"],
)
def test_they_change_no_gradient(size: int, cases: list[Case], lock: str | None, model: str) -> None:
    locks = {} if lock is None else {lock: True}
    (truth,) = gradients(World(), model, [WHOLE], locks)
    for results in run_ranks(size, gradients, model, cases, locks):
        for found in results:
            assert_close(found, truth)


@pytest.mark.parametrize(("kept", "buckets"), [(0, 1), (2, 1), (1, "packed")])
@pytest.mark.parametrize("frozen", ["image", "text", None])
def test_a_frozen_tower_runs_once_and_micro_batches_pass_as_many_together_as_are_kept(
    kept: int, buckets: int | str, frozen: str | None, model: str
) -> None:
    locks = {} if frozen is None else {f"lock_{frozen}": True}
    (truth,) = gradients(World(), model, [WHOLE], locks)
    towers = prepare(build(model, text_buckets=buckets, **locks).train(), "fp64")
    calls: dict[str, list[bool]] = {"image": [], "text": []}
    for tower, module in (("image", towers.clip.visual), ("text", towers.clip.transformer)):
        module.register_forward_hook(lambda _, __, out, seen=calls[tower]: seen.append(out.requires_grad))
    step = make_step(towers, precision="fp64", micro_batch_size=2, kept_micro_batches=kept)
    assert_close(taken(step, part_of_batch(World()))[1], truth)
    for tower, seen in calls.items():
        first, joined = -(-(5 - kept) // max(kept, 1)), min(kept, 1)
        graphs = [False] * (first + joined) if tower == frozen else [False] * first + [True] * (joined + first)
        assert seen == graphs, tower


def test_the_step_counts_lengths_on_the_host(model: str) -> None:
    """So that no step waits for a device: the batch that towers get has its lengths."""
    towers, given = build(model), list[Any]()
    towers.register_forward_pre_hook(lambda _, args, options: given.append(options.get("lengths")), with_kwargs=True)
    make_step(towers, micro_batch_size=6)(part_of_batch(World()), lr=0.0)
    assert given == [(2, 2, 3, 4, 5), (8, 9, 12, 17, 20), (2, 2, 3, 4, 5)]


@pytest.mark.parametrize("setting", ["auto", "off"])
def test_the_loader_counts_lengths_before_batches_go_to_the_device(setting: str, tmp_path: Path) -> None:
    """As the step sees ids that are on a GPU already, where it would have to wait for them."""
    settings = load([*flags(furnish(tmp_path), "x", "--model.text-buckets", setting), "--workers", "0"], ranks=1)
    made = build_plan(survey(settings), World())
    model = build_model(made, World())
    with build_loader(made, World(), model) as loader:
        given: list[Batch] = []
        start = loader._prefetch.start
        loader._prefetch.start = lambda batch: given.append(batch) or start(batch)
        batch = next(loader)
        assert given[0].lengths == batch.lengths == model.towers.text_lengths(batch.ids)
        assert (batch.lengths is None) == (setting == "off") and (batch.lengths is None or max(batch.lengths) < 8)


@pytest.mark.slow  # inductor takes a C++ compiler's time
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler here")
def test_a_second_run_takes_what_it_compiles_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path, {**MODEL, "vision_cfg": {**MODEL["vision_cfg"], "layers": 2}})
    monkeypatch.setenv("CLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    libraries: list[dict[Path, int]] = []
    for name in ("first", "second"):
        (process,) = start(flags(tmp_path, name, "--torchcompile", steps=2))
        _, errors = process.communicate(timeout=5 * TIMEOUT)
        assert process.returncode == 0, errors
        said = (tmp_path / "runs" / name / "out.log").read_text()
        assert "compiled 1 graph with inductor in a step" in said
        assert "has no repeated blocks and runs eagerly" in said
        found = (tmp_path / "cache" / "inductor").rglob("*.so")
        libraries.append({path: path.stat().st_mtime_ns for path in found})
    assert libraries[0] == libraries[1] != {}


def test_the_beginning_of_each_step_is_marked_once_for_cuda_graphs(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[int] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    step = make_step(build(model, lock_image=True).train(), compile="towers", compile_backend="eager")
    assert step.compilation is not None
    step.compilation.cuda_graphs = True
    for number in range(1, 3):
        step(part_of_batch(World()), lr=1.0)
        assert len(marks) == number

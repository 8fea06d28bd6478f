"""Steps with text buckets, on ranks and in micro-batches: the gradients of padded texts at once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from clipstream.config.settings import load, resolve
from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.losses.contrastive import SoftmaxLoss
from clipstream.losses.settings import ClipLossSettings
from clipstream.train import build_loader, build_model
from clipstream.training.parallel import parallelize
from clipstream.training.precision import prepare
from clipstream.training.settings import TrainSettings
from clipstream.training.step import TrainStep
from tests.support.model_files import TEXT, build, write
from tests.support.ranks import run_ranks
from tests.support.runs import furnish
from tests.support.steps import sgd
from tests.support.text_batches import TOKENS, part_of_batch

Case = tuple[str, int | str, int | None, int]  # parallel, text_buckets, micro_batch_size, kept


def gradients(world: World, model: str, cases: list[Case], **settings: Any) -> list[dict[str, torch.Tensor]]:
    """The gradient that a step goes along in each case, in float64."""
    torch.set_num_threads(1)
    found = []
    for parallel, buckets, micro, kept in cases:
        towers = build(model, text_buckets=buckets, **settings).train()
        prepare(towers, "fp64")
        before = {name: p.detach().clone() for name, p in towers.named_parameters()}
        parallelize(towers, world, TrainSettings(parallel=parallel, precision="fp64"))
        loss = SoftmaxLoss(ClipLossSettings())
        step = TrainStep(
            towers,
            loss,
            sgd(towers),
            world,
            TrainSettings(precision="fp64", micro_batch_size=micro, kept_micro_batches=kept),
        )
        step(part_of_batch(world), lr=1.0)
        after = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in towers.named_parameters()}
        found.append({name: (before[name] - p).detach() for name, p in after.items()})
    return found


def check_on_ranks(size: int, model: str, cases: list[Case], truth: dict[str, torch.Tensor], **settings: Any) -> None:
    """Check that every rank has the true gradients in each case."""
    for results in run_ranks(size, partial(gradients, **settings), model, cases):
        for case, found in zip(cases, results, strict=True):
            assert found.keys() == truth.keys()
            for name, gradient in truth.items():
                torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-10, msg=f"{case}: {name}")


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write(tmp_path, text_cfg={**TEXT, "context_length": TOKENS, "vocab_size": 64})


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_micro_batches_and_buckets_change_no_gradient(size: int, model: str) -> None:
    (truth,) = gradients(World(), model, [("ddp", "off", None, 1)])
    cases: list[Case] = [
        ("ddp", buckets, micro, kept)
        for buckets in ("packed", 9, 2)
        for micro, kept in ((None, 1), (2, 0), (2, 2), (3, 9))
    ]
    if size > 1:
        cases += [("fsdp", "packed", None, 1), ("fsdp", 2, None, 1), ("fsdp", 3, 2, 1), ("fsdp", "packed", 2, 0)]
    check_on_ranks(size, model, cases, truth, grad_checkpointing=size > 1)


@pytest.mark.parametrize(("kept", "buckets"), [(0, 1), (1, 1), (2, 1), (3, 1), (1, "packed")])
@pytest.mark.parametrize("frozen", ["image", "text", None])
def test_a_frozen_tower_runs_once_and_micro_batches_pass_as_many_together_as_are_kept(
    kept: int, buckets: int | str, frozen: str | None, model: str
) -> None:
    locks = {} if frozen is None else {f"lock_{frozen}": True}
    (truth,) = gradients(World(), model, [("ddp", "off", None, 1)], **locks)
    towers = build(model, text_buckets=buckets, **locks).train()
    prepare(towers, "fp64")
    before = {name: p.detach().clone() for name, p in towers.named_parameters()}
    calls: dict[str, list[bool]] = {"image": [], "text": []}
    for tower, module in (("image", towers.clip.visual), ("text", towers.clip.transformer)):
        module.register_forward_hook(lambda _, __, out, seen=calls[tower]: seen.append(out.requires_grad))
    loss = SoftmaxLoss(ClipLossSettings())
    step = TrainStep(
        towers, loss, sgd(towers), World(), TrainSettings(precision="fp64", micro_batch_size=2, kept_micro_batches=kept)
    )
    step(part_of_batch(World()), lr=1.0)
    for name, p in towers.named_parameters():
        torch.testing.assert_close(before[name] - p.detach(), truth[name], rtol=0, atol=1e-10)
    for tower, seen in calls.items():
        first, joined = -(-(5 - kept) // max(kept, 1)), min(kept, 1)
        graphs = [False] * (first + joined) if tower == frozen else [False] * first + [True] * (joined + first)
        assert seen == graphs, tower


@pytest.mark.parametrize("frozen", ["image", "text"])
def test_a_frozen_tower_changes_no_gradient_on_ranks(frozen: str, model: str) -> None:
    locks = {f"lock_{frozen}": True}
    (truth,) = gradients(World(), model, [("ddp", "off", None, 1)], **locks)
    cases: list[Case] = [("ddp", 2, 1, 1), ("fsdp", 2, 1, 2), ("fsdp", "packed", 2, 0)]
    check_on_ranks(2, model, cases, truth, **locks)


def test_the_step_counts_lengths_on_the_host(model: str) -> None:
    """So that no step waits for a device: the batch that towers get has its lengths."""
    towers = build(model)
    given: list[Any] = []
    towers.register_forward_pre_hook(lambda _, args, options: given.append(options.get("lengths")), with_kwargs=True)
    step = TrainStep(
        towers,
        SoftmaxLoss(ClipLossSettings()),
        sgd(towers),
        World(),
        TrainSettings(precision="fp32", micro_batch_size=6),
    )
    step(part_of_batch(World()), lr=0.0)
    assert given == [(2, 2, 3, 4, 5), (8, 9, 12, 17, 20), (2, 2, 3, 4, 5)]


@pytest.mark.parametrize("setting", ["auto", "off"])
def test_the_loader_counts_lengths_before_batches_go_to_the_device(setting: str, tmp_path: Path) -> None:
    """As the step sees ids that are on a GPU already, where it would have to wait for them."""
    model = str(furnish(tmp_path) / "model.json")
    flags = [
        "--train-data",
        f"{tmp_path}/pairs/{{00000..00003}}.tar",
        "--model",
        model,
        "--data.global-batch-size",
        "8",
    ]
    settings = load([*flags, "--precision", "fp32", "--model.text-buckets", setting, "--workers", "0"], ranks=1)
    settings = resolve(settings, World())
    model = build_model(settings, World(), None)
    with build_loader(settings, World(), model) as loader:
        given: list[Batch] = []
        start = loader._prefetch.start
        loader._prefetch.start = lambda batch: given.append(batch) or start(batch)  # type: ignore[func-returns-value, method-assign]
        batch = next(loader)
        assert given[0].lengths == batch.lengths == model.towers.text_lengths(batch.ids)
        assert (batch.lengths is None) == (setting == "off") and (batch.lengths is None or max(batch.lengths) < 8)

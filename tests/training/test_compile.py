"""Compiled towers in steps on ranks, in micro-batches and with text buckets: the gradients of the eager step."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from clipstream.distributed.world import World
from clipstream.models.execution.compile import compile_towers
from clipstream.training.parallel import parallelize
from clipstream.training.precision import prepare
from clipstream.training.step import TrainStep
from tests.support.model_files import TEXT, VIT, build, write
from tests.support.ranks import run_ranks
from tests.support.steps import LOSSES, sgd
from tests.support.text_batches import TOKENS, part_of_batch

# what is compiled, parallel, text_buckets, micro_batch_size, kept, and the policy of activation checkpointing
Case = tuple[Any, str, int | str, int | None, int, str]
CASES: list[Case] = [
    ("blocks", "ddp", "auto", None, 1, "off"),
    ("blocks", "ddp", "auto", 3, 1, "all"),
    ("towers", "ddp", 2, 3, 2, "all"),
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
        parallelize(towers, world, parallel=parallel, precision="fp64")
        compilation = None if parts == "off" else compile_towers(towers, parts, backend)
        step = TrainStep(
            towers,
            LOSSES[kind],
            sgd(towers),
            world,
            precision="fp64",
            micro_batch_size=micro,
            kept=kept,
            compilation=compilation,
        )
        step(part_of_batch(world), lr=1.0)
        after = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in towers.named_parameters()}
        graphs = 0 if compilation is None else compilation.graphs
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


@pytest.mark.parametrize(("kind", "cases"), [("clip", [*CASES, *SHARDED]), ("siglip", CASES[1:2])])
def test_compilation_changes_no_gradient_on_ranks(kind: str, cases: list[Case], model: str) -> None:
    ((truth, _),) = gradients(World(), model, kind, [("off", "ddp", "off", None, 1, "off")])
    for results in run_ranks(2, gradients, model, kind, cases):
        for case, (found, graphs) in zip(cases, results, strict=True):
            assert graphs, case
            check(found, truth, str(case))


@pytest.mark.parametrize("frozen", ["image", "text"])
def test_compiled_locked_towers(frozen: str, model: str) -> None:
    lock = {f"lock_{frozen}": True}
    cases: list[Case] = [(parts, "ddp", "off", 4, 1, "off") for parts in ("off", "blocks")]
    (truth, _), (found, graphs) = gradients(World(), model, "clip", cases, **lock)
    assert graphs
    check(found, truth)


@pytest.mark.slow  # inductor takes a C++ compiler's time
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler here")
def test_inductor_on_ranks(model: str) -> None:
    ((truth, _),) = gradients(World(), model, "clip", [("off", "ddp", "off", None, 1, "off")])
    run = partial(gradients, backend="inductor")
    for ((found, _),) in run_ranks(2, run, model, "clip", [("blocks", "ddp", 1, 4, 1, "off")]):
        check(found, truth)

"""Checkpoints of a run on a GPU: of their step, and bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from clipstream.checkpoint.async_writer import AsyncWriter, Content
from clipstream.checkpoint.state import WEIGHTS, load
from clipstream.training.settings import CheckpointSettings
from clipstream.training.state import TrainState
from clipstream.training.step import TrainStep
from tests.support.gpu_steps import make_batch, make_step, make_towers, weights


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Deterministic algorithms, as `run.deterministic` sets them."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def writer_of(folder: Path, step: TrainStep) -> AsyncWriter:
    return AsyncWriter(folder, step.world, CheckpointSettings(), Content(step.towers, step.optimizer))


def test_a_checkpoint_holds_the_weights_of_its_time(device: str, tmp_path: Path) -> None:
    step = make_step(make_towers(tmp_path, device), device)
    step(make_batch(), lr=1e-3)
    with writer_of(tmp_path / "saved", step) as writer:
        before = {name: tensor.cpu().clone() for name, tensor in step.towers.clip.state_dict().items()}
        writer.save(TrainState(1))
        for number in range(1, 5):
            step(make_batch(seed=number), lr=1e-2)
        assert writer.finish()
    saved = load_file(tmp_path / "saved/step_00000001" / WEIGHTS)
    assert all(torch.equal(saved[name], tensor) for name, tensor in before.items() if name in saved)
    assert saved.keys() <= before.keys() and len(saved) > 30


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_resumed_run_is_the_same_bit_for_bit(
    device: str, precision: str, tmp_path: Path, deterministic: None
) -> None:
    def begin(seed: int) -> TrainStep:
        towers = make_towers(tmp_path, device, patch_dropout=0.5, seed=seed)
        return make_step(towers, device, precision=precision, micro_batch_size=8)

    step = begin(0)
    for number in range(4):
        if number == 2:
            with writer_of(tmp_path / "saved", step) as writer:
                writer.save(TrainState(2, train_step=step.state()))
        step(make_batch(seed=number), lr=1e-3)
    again = begin(1)
    path = tmp_path / "saved/step_00000002"
    state = load(path, towers=again.towers, optimizer=again.optimizer, world=again.world)
    again.load_state(state.train_step)
    for number in range(2, 4):
        again(make_batch(seed=number), lr=1e-3)
    wanted = weights(step.towers)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in weights(again.towers).items())

"""The position of a run and its random states, which a checkpoint stores so that a resumed run repeats the same bits.

`TrainState` is everything that is stored as JSON. Its parts are owned and updated by the objects named in their
docstrings; `Trainer.state()` collects them. All values except `TrainState.data` are the same on every rank.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import AfterValidator, Field, InstanceOf
from typing_extensions import NotRequired, TypedDict

from clipstream.data.order.lanes import DataState
from clipstream.training.settings import EarlyStopState
from clipstream.utils.section import Count

TWISTER = 624  # words of the state of a Mersenne Twister
SourceCounts = dict[str, int | str | dict[str, int | str]]  # as clipstream.data.loader.health.merge_counts


@dataclass
class IntervalState:
    """Sums since the last training line, owned by `Trainer`."""

    loss: float = 0.0  # over steps that were not skipped
    grad_norm: float = 0.0  # over steps that changed the weights
    parts: dict[str, float] = field(default_factory=dict)  # as `loss`, of the losses that it adds up
    steps: Count = 0  # all steps
    overflows: Count = 0  # fp16 steps whose loss scale was too large
    skipped: Count = 0  # steps without a finite loss or gradient


@dataclass
class RollbackState:
    """Owned by `Rollback`."""

    nonfinite: Count = 0  # steps skipped in a row, up to now
    last_finite: Count = 0  # steps done before this row began
    applied: bool = False  # whether any step of the run changed the weights
    saves: list[Count] = field(default_factory=list)  # steps of checkpoints that were saved, newest last
    rollbacks: Count = 0  # rollbacks since the last checkpoint that proved good
    rolled_back_at: int = -1  # step of the last rollback; -1 for none


@dataclass
class StepState:
    """Owned by `TrainStep`."""

    precision: str = "auto"  # of the forward pass, after `auto` was resolved
    scaler: dict[str, int | float] = field(default_factory=dict)  # state of torch's GradScaler; empty without fp16
    # micro-batch size that `auto` found; it decides the last bits. None if all samples fit, or not auto
    micro_batch: Count | None = None
    ema_updates: Count | None = None  # updates of the averaged weights; None without averaging


@dataclass
class TrainState:
    """Position of a run between two steps."""

    step: Count = 0  # steps done
    samples: Count = 0  # samples trained on, over all ranks
    # position in the data after the last batch trained on: one rank's part; in a checkpoint, all merged
    data: DataState = field(default_factory=DataState)
    # data counters of all ranks since the run began, by source
    health: dict[str, SourceCounts] = field(default_factory=dict)
    evaluation_pending: bool = False  # whether the evaluation of this step was interrupted and has to be repeated
    interval: IntervalState = field(default_factory=IntervalState)
    rollback: RollbackState = field(default_factory=RollbackState)
    early_stop: EarlyStopState = field(default_factory=EarlyStopState)
    train_step: StepState = field(default_factory=StepState)


def _row(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in (torch.uint8, torch.int64) or tensor.ndim != 1:
        raise ValueError("no row of bytes or of numbers")
    return tensor


_Row = Annotated[InstanceOf[torch.Tensor], AfterValidator(_row)]
_Word = Annotated[int, Field(ge=0, lt=1 << 32)]
_Words = Annotated[tuple[_Word, ...], Field(min_length=TWISTER + 1, max_length=TWISTER + 1)]  # the last one: a position


class TorchState(TypedDict):
    """Random states of torch's generators: of the CPU and of a CUDA device."""

    cpu: _Row
    cuda: NotRequired[_Row]


class RandomState(TorchState):
    """Random states of a process: as `random.getstate` has it, NumPy's with its words as a tensor, and torch's."""

    python: tuple[Literal[3], _Words, float | None]
    numpy: tuple[Literal["MT19937"], _Row, Annotated[int, Field(ge=0, le=TWISTER)], Literal[0, 1], float]


def seed_all(seed: int, rank: int, *step: int) -> None:
    """Seed Python's, NumPy's and torch's generators, each rank with its own: dropout differs between ranks."""
    mixed = int(np.random.SeedSequence([seed, rank, *step]).generate_state(1, np.uint64)[0])
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    # torch.manual_seed formats a stack for each kind of device that is not in use (torch 2.15), which takes 1 ms.
    torch.default_generator.manual_seed(mixed >> 1)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(mixed >> 1)


def random_state(device: str | torch.device) -> RandomState:
    """All random states of this process, in types that `torch.load(weights_only=True)` accepts."""
    numpy: Any = np.random.get_state()
    name, keys, *rest = numpy
    words = torch.from_numpy(np.asarray(keys, np.int64))
    return {"python": random.getstate(), "numpy": (name, words, *rest), **torch_state(device)}


def set_random_state(state: RandomState, device: str | torch.device) -> None:
    random.setstate(state["python"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    set_torch_state(state, device)


def torch_state(device: str | torch.device) -> TorchState:
    """Random states of torch: the CPU's, and a CUDA device's."""
    state: TorchState = {"cpu": torch.get_rng_state()}
    if torch.device(device).type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_torch_state(state: TorchState, device: str | torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.device(device).type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def same_randomness(device: str | torch.device) -> Iterator[None]:
    """Restore all random states at the end of the context."""
    state = random_state(device)
    try:
        yield
    finally:
        set_random_state(state, device)

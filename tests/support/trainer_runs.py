"""A trainer with stand-ins for its parts."""

from __future__ import annotations

import json
import os
import signal
import time
from array import array
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from clipstream.checkpoint.state import CheckpointMeta
from clipstream.data.batch import Batch
from clipstream.data.loader.health import DroppedSample as Lost
from clipstream.data.loader.stage_timing import NUMBER, StageIntervals, StageTimes
from clipstream.data.order.lanes import DataState
from clipstream.distributed.signals import StopSignals
from clipstream.distributed.world import World
from clipstream.losses.contrastive import ContrastiveLoss
from clipstream.training.optim import AdamW
from clipstream.training.settings import TrainSettings
from clipstream.training.state import TrainState
from clipstream.training.step import TrainStep
from clipstream.training.trainer import Hooks, Length, Rollback, Trainer
from tests.support.steps import LOSSES, TinyTowers, make_batch


def lap(stage: str, seconds: float) -> StageIntervals:
    return StageIntervals(bytes([NUMBER[stage]]), array("d", [0.0, seconds]).tobytes())


class Health:
    """Counts as clipstream.data.loader.health has them."""

    def __init__(self) -> None:
        self.used, self.dropped, self.sources = 0, {"no_caption": 1}, dict[str, Any]()
        self.losses = [Lost("train", "a/00.tar", "k1", "no_caption", "no txt")]

    def take_dropped(self) -> list[Lost]:
        taken, self.losses = self.losses, []
        return taken

    def summary(self) -> dict[str, Any]:
        return {"train": {"used": self.used, "dropped": self.dropped}}

    counts = summary


class Batches:
    """A rank's stream of batches; every one takes 10 ms."""

    def __init__(self, world: World, start: int = 0, end: int = 1000, kill_at: int = -1) -> None:
        self.world, self.step, self.end, self.kill_at = world, start, end, kill_at
        self.wait_seconds, self.health, self.trained = 0.0, Health(), Health()
        self.given = 0

    def __next__(self) -> Batch:
        if self.step == self.end:
            raise StopIteration
        if self.step == self.kill_at:
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.01)
        self.wait_seconds += 0.01
        batch = make_batch(self.step, self.world.rank, self.world.size)
        self.step += 1
        self.given = len(batch)
        return batch

    def mark_trained(self) -> None:
        self.trained.used += self.given

    def state(self) -> DataState:
        return DataState(self.step)

    def worker_pids(self) -> list[int]:
        return []

    def take_times(self) -> StageTimes:
        times = StageTimes()
        times.add([lap("decode", 0.01)])
        return times


class Save(NamedTuple):
    state: TrainState
    model: dict[str, Any]
    optimizer: dict[str, Any]


class Signals(StopSignals):
    """Signals whose names nobody passes on to the other ranks."""

    def name(self, seconds: float = 0.0) -> str:
        return super().name(seconds)


class Run:
    """A trainer with its parts, which makes its checkpoints, and what came out of it."""

    has_room = True

    def __init__(
        self,
        world: World,
        total: int,
        save: Save | None = None,
        save_every: int = 0,
        loss: ContrastiveLoss = LOSSES["clip"],
        **batches: int,
    ) -> None:
        self.model = TinyTowers()
        optimizer = AdamW.Settings(lr=0.01).build(self.model, "ViT")
        self.lines, self.evaluations = list[dict[str, Any]](), []
        self.saves: list[Save] = []
        self.save_every, self.checks = save_every, 0
        state = None
        if save:
            meta = CheckpointMeta(save.state)
            state = CheckpointMeta.from_json(json.dumps(meta.to_json()).encode(), Path("state")).train
            self.model.load_state_dict(save.model)
            optimizer.load_state_dict(deepcopy(save.optimizer))  # which would train on the save's own tensors
        self.signals = Signals()
        self.optimizer = optimizer
        self.trainer = Trainer(
            TrainStep(self.model, loss, optimizer, world),
            Batches(world, start=state.data.step if state else 0, **batches),
            self,
            Length(total, lambda step: 0.01 / (step + 1), 3, epoch_samples=20),
            Hooks(self.lines.append, lambda step, last: self.evaluations.append((step, last))),
            self.signals,
            Rollback(TrainSettings(max_nonfinite=3), self.restore, state and state.rollback),
            state=state,
        )

    def due(self, step: int) -> bool:
        return bool(self.save_every) and step % self.save_every == 0

    def save(self, state: TrainState) -> None:
        self.saves.append(Save(state, deepcopy(self.model.state_dict()), deepcopy(self.optimizer.state_dict())))

    def check(self) -> None:
        self.checks += 1

    def finish(self) -> bool:
        return self.has_room

    def restore(self, good: Sequence[int]) -> int | None:
        found = next((save for save in reversed(self.saves) if save.state.step in good), None)
        if found is None:
            return None
        self.model.load_state_dict(found.model)
        self.optimizer.load_state_dict(deepcopy(found.optimizer))
        return found.state.step

    def go(self) -> Run:
        with self.signals:
            self.trainer.run()
        return self

    def training_lines(self) -> list[dict[str, Any]]:
        """Without what depends on the clock."""
        timed = ("samples_per_s", "tokens_per_s", "tflops", "mfu", "data_wait", "bottleneck", "time", "cpu")
        return [{k: v for k, v in line.items() if k not in timed} for line in self.lines if "loss" in line]

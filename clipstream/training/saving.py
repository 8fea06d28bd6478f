"""Owns the saves of a run: when one is due, the copy that is taken, and the thread that writes while training goes on.

At most one save is under way: the next one waits for it. All that ranks do together is done by the training thread;
the writing thread is rank 0's alone. A full disk is a warning, and the older checkpoints stay; any other failure of
the thread ends the run at its next step.

**A thread, not a process**: it writes and sums up what lies in memory already, in calls that hold no lock of the
interpreter (`benchmarks/saving.py` measures what a save takes from training).
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from clipstream import durable
from clipstream.data.loader import merge_states
from clipstream.errors import ClipstreamError
from clipstream.training import checkpoint, shelf
from clipstream.training.checkpoint import OPTIMIZER, RANDOM, STATE, WEIGHTS, SavedTowers, State, Tensors
from clipstream.training.mirror import Mirror
from clipstream.training.precision import random_state
from clipstream.training.settings import CheckpointSettings
from clipstream.training.sharding import reshard
from clipstream.training.snapshot import Snapshot
from clipstream.versions import versions
from clipstream.world import World

NOTICEABLE = 1.0  # s that a save waits for the one before, from which on it is told


@dataclass(frozen=True)
class _Job:
    """A save under way: what the thread needs besides the snapshot."""

    step: int
    groups: dict[str, str]
    state: bytes
    random: list[Any]
    heard: tuple[int, float] | None


class Saver:
    """Writes a run's checkpoints. Context manager: its end waits for the save that is under way.

    Args:
        folder: LOGS/NAME/checkpoints.
        world: this rank among the others.
        settings: when to save, and what stays.
        towers: the model, without wrappers; it may be sharded.
        optimizer: over its parameters.
        state: what to save in state.json besides the run's position; asked at each save.
        tensors: further files of tensors: name -> what to save in it; asked at each save, on all ranks.
        mirror: gets a copy of what is written, on rank 0.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        settings: CheckpointSettings,
        *,
        towers: SavedTowers,
        optimizer: torch.optim.Optimizer,
        state: Callable[[], State] = dict,
        tensors: Mapping[str, Callable[[], Tensors]] | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        self.folder, self.world, self.settings, self._metric = folder, world, settings, settings.best_by
        self._towers, self._optimizer, self._state, self._more = towers, optimizer, state, tensors or {}
        self._snapshot = Snapshot(world.device, optimizer, kept=world.is_main)
        self._description = towers.description() if world.is_main else {}
        self._mirror = mirror
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._written = True  # whether the last save was
        best = shelf.best_of(folder) if world.is_main else None
        same = best is not None and best.metric == settings.keep_best
        self._best: float | None = world.broadcast_object(best.value if best is not None and same else None)
        self._record: int | None = None  # step of the best evaluation that this process heard of
        self._heard: tuple[int, float] | None = None

    def due(self, step: int) -> bool:
        """Whether to save after `step` steps; the same on all ranks."""
        cadences = (self.settings.every, self.settings.keep_every)
        return step == self._record or any(every and step % every == 0 for every in cadences)

    def expect(self, metrics: Mapping[str, Sequence[str]]) -> None:
        """Take note of what evaluators will give: the names of their metrics, where they are known.

        Raises:
            SettingsError: as `Metric.expect`, of keep_best's.
        """
        if self._metric is not None:
            self._metric.expect("checkpoint.keep_best", metrics)

    def hear(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take note of evaluations (step, eval, metrics), before the save of their step; the same on all ranks."""
        metric = self._metric
        for record in records:
            if metric is None or record["eval"] != metric.evaluator:
                continue
            step, value = int(record["step"]), metric.value(record)
            if value is None:
                self._say(f"warning: checkpoint.keep_best: {metric.evaluator} gave no {metric.name!r} at step {step}")
                continue
            self._heard = step, value
            if metric.is_better(value, self._best):
                self._best, self._record = value, step

    def save(self, step: int, state: State) -> None:
        """Take a copy of everything, and have it written. Every rank calls this, between two steps.

        Args:
            step: steps done.
            state: this rank's; JSON-able. `state["data"]` is the rank's part of the data's state, the ranks' parts are
                saved as one. The rest is taken from rank 0.

        Raises:
            ClipstreamError: the save before failed, other than by a full disk.
        """
        self._wait(step)
        told = self.world.gather_objects((state.get("data"), random_state(self.world.device)))
        reshard(self._towers)
        self._snapshot.take(
            {
                WEIGHTS: self._towers.clip.state_dict(),
                OPTIMIZER: checkpoint.moments(self._optimizer),
                **{name: tensors() for name, tensors in self._more.items()},
            }
        )
        if not self.world.is_main:
            return
        merged = {**state, **self._state(), "step": step, "versions": versions()}
        if data := [part for part, _ in told if part is not None]:
            merged["data"] = merge_states(data)
        text = (json.dumps(merged, indent=1, allow_nan=False) + "\n").encode()
        job = _Job(step, checkpoint.groups(self._optimizer), text, [random for _, random in told], self._heard)
        self._thread = threading.Thread(target=self._run, args=(job,), name="save", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what went wrong in the background; at no cost, at each step.

        Raises:
            ClipstreamError: a file could not be written, other than for a full disk. On rank 0 alone.
        """
        if self._error is not None:
            error, self._error = self._error, None
            if isinstance(error, OSError):
                raise ClipstreamError(f"the checkpoint could not be written: {error}") from error
            raise error

    def whole(self, steps: Iterable[int], instead: Path | None = None) -> Path | None:
        """The first of these steps' checkpoints that has no fault, when all that was saved is written. Collective.

        Args:
            instead: lies elsewhere, in place of the one of its name.

        Raises:
            ClipstreamError: as `check`.
        """
        paths = [self.folder / shelf.folder_of(step) for step in steps]
        if instead is not None:
            paths = [instead if path.name == instead.name else path for path in paths]

        def look() -> Path | None:
            self._join()
            return next((path for path in paths if shelf.fault(path) is None), None)

        found: Path | None = self.world.on_main(look)
        return found

    def finish(self) -> bool:
        """Wait until what was saved is written, and copied to its remote place. Every rank calls this.

        Returns:
            Whether the last save was written: False where the disk was full.

        Raises:
            ClipstreamError: as `check`.
        """
        written: bool = self.world.on_main(self._finish)
        return written

    def close(self) -> None:
        """Wait for what is under way on this rank."""
        if self._thread is not None:
            self._thread.join()
        if self._mirror is not None:
            self._mirror.drain()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            return  # at once
        if error is None and self._mirror is not None:
            self._mirror.wake()  # the metrics' last line, that the run has ended, comes after the last save
        if error is None or self.world.size == 1:
            self.close()
        else:
            atexit.register(self.close)  # the other ranks are told of the error first

    def _wait(self, step: int) -> None:
        """Wait for the save before."""
        began = time.monotonic()
        self.world.on_main(self._join)
        seconds = time.monotonic() - began
        if seconds > NOTICEABLE:
            self._say(
                f"the save of step {step} waited {seconds:.0f} s for the one before: raise checkpoint.every, or save "
                "to a faster disk"
            )

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self.check()

    def _finish(self) -> bool:
        self._join()
        if self._heard is not None:  # the last evaluation comes after the last save
            self._crown(*self._heard)
            self._keep()
        if self._mirror is not None:
            self._mirror.wake()
            self._mirror.drain()
        return self._written

    def _run(self, job: _Job) -> None:
        """The thread."""
        self._written = False
        try:
            self._write(job)
            self._written = True
        except BaseException as error:
            if durable.is_full(error):
                shelf.clear(self.folder)
                self._keep()  # a run that was resumed with a lower keep_last has its room for the next save
                self._say(f"warning: the disk of {self.folder} is full: step {job.step} is not saved; {self._left()}")
            else:
                self._error = error

    def _write(self, job: _Job) -> None:
        self._snapshot.wait()
        others = {**self._description, RANDOM: checkpoint.packed(job.random), STATE: job.state}
        described = {name: {"format": "pt"} for name in (WEIGHTS, *self._more)} | {OPTIMIZER: job.groups}
        after = 0 if self._mirror is None else self._mirror.last_serial
        checkpoint.write(self.folder, job.step, self._snapshot.files, described, others, after=after)
        if job.heard is not None:
            self._crown(*job.heard)
        self._keep()
        if self._mirror is not None:
            self._mirror.wake()

    def _crown(self, step: int, value: float) -> None:
        """Have `best` name a step's checkpoint, if that is here, and better than the one that it names."""
        name, metric = shelf.folder_of(step), self._metric
        marker, best = shelf.marker_of(self.folder / name), shelf.best_of(self.folder)
        before = best.value if best is not None and best.metric == str(metric) else None
        if marker is not None and metric is not None and metric.is_better(value, before):
            durable.replace(self.folder / shelf.BEST, shelf.Best(name, str(metric), value, marker.serial).dump())

    def _keep(self) -> None:
        with nullcontext(()) if self._mirror is None else self._mirror.holding() as held:
            shelf.keep(self.folder, last=self.settings.keep_last, every=self.settings.keep_every, spared=held)

    def _left(self) -> str:
        found = shelf.whole(self.folder)
        if not found:
            return "there is no checkpoint yet: free some space"
        return f"the newest checkpoint is {found[0].name}: free some space, or lower checkpoint.keep_last"

    def _say(self, text: str) -> None:
        if self.world.is_main:
            print(text, file=sys.stderr, flush=True)

"""Saves a run's checkpoints: when one is due, the copy in memory, and the thread that writes it during training.

A `TrainState` and the tensors of model and optimizer enter; checkpoint folders leave. At most one save is in progress,
and the next one waits for it. Collectives run in the training thread; only rank 0 has a writing thread. A full disk is
a warning, and the older checkpoints stay; so is a folder that is away or read-only, which is not made anew before the
end, as it may return. Any other failure of the thread ends the run at its next step.

A thread suffices, without a process: it writes and checksums memory in calls that release the interpreter's lock
(`benchmarks/saving.py` measures the cost of a save for training).
"""

from __future__ import annotations

import atexit
import io
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from clipstream.checkpoint import store
from clipstream.checkpoint.remote_sync import RemoteSync
from clipstream.checkpoint.state import (
    GROUPS,
    OPTIMIZER,
    RANDOM,
    STATE,
    WEIGHTS,
    CheckpointMeta,
    TensorFile,
    Tensors,
    moments,
    write,
)
from clipstream.data.order.lanes import DataState
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError
from clipstream.models.towers import Towers
from clipstream.text import lines
from clipstream.training.optimizer_state import groups_to_json
from clipstream.training.parallel import full_tensor, reshard
from clipstream.training.rescue import Whole
from clipstream.training.settings import CheckpointSettings, EvalRecord
from clipstream.training.state import RandomState, TrainState, random_state
from clipstream.utils import atomic_write
from clipstream.utils.logs import logger

AWAIT = 10  # s at the end, until a folder that is away is made anew
_Evaluated = tuple[int, float] | None  # step and value of the last evaluation of `keep_best`


@dataclass(frozen=True)
class Content:
    """What a run's checkpoints contain, beside its position and random states."""

    towers: Towers  # the model, without wrappers; it may be sharded
    optimizer: torch.optim.Optimizer
    recorded: Mapping[str, object] = field(default_factory=dict)  # settings to record in state.json, by dotted key
    # further files of tensors: name -> function that returns them; called at each save, on all ranks
    tensors: Mapping[str, Callable[[], Tensors]] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)  # further files


class AsyncWriter:
    """Writes a run's checkpoints. Context manager: its exit waits for the save in progress. On rank 0, `sync` copies
    them to remote storage, and `status` gets 'saving' when a save begins, and '' at the next step after it is written.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        settings: CheckpointSettings,
        content: Content,
        *,
        sync: RemoteSync | None = None,
        status: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.folder, self.world, self.settings, self._metric = folder, world, settings, settings.best_by
        self._content = content
        self._snapshot = Snapshot(world.device, content.optimizer, kept=world.is_main)
        self._description = {**content.towers.description(), **content.files} if world.is_main else {}
        self._sync, self._status = sync, status
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._written = True  # whether the last save succeeded
        self._again: Callable[[], None] | None = None  # repeats the last save, whose folder was away
        self._told = ""  # the last warning
        if world.is_main:
            store.clear_claims(folder)
        best = store.best_of(folder) if world.is_main else None
        known = best.value if best is not None and best.metric == settings.keep_best else None
        self._best: float | None = world.broadcast_object(known)
        self._record: int | None = None  # step of the best evaluation in this process
        self._evaluated: _Evaluated = None

    def due(self, step: int) -> bool:
        """Whether to save after `step` steps; the same on all ranks."""
        cadences = (self.settings.every, self.settings.keep_every)
        return step == self._record or any(every and step % every == 0 for every in cadences)

    def on_eval(self, records: Iterable[EvalRecord]) -> None:
        """Record evaluations (step, eval, metrics) before the save of their step; the same on all ranks."""
        metric = self._metric
        for record in records:
            if metric is None or record["eval"] != metric.evaluator:
                continue
            step, value = int(record["step"]), metric.value(record)
            if value is None:
                self._warn(f"checkpoint.keep_best: {metric.evaluator} has no metric {metric.name!r} at step {step}")
                continue
            self._evaluated = step, value
            if metric.is_better(value, self._best):
                self._best, self._record = value, step

    def save(self, state: TrainState) -> None:
        """Copy weights, moments and random states, and start to write them. Every rank calls this, between two steps,
        with its part of the position in the data, which is saved merged; the rest of the state is that of rank 0.

        Raises ClipstreamError: the previous save failed, other than by a folder that is full or away.
        """
        self.world.on_main(self._join)
        if self.world.is_main:
            self._status("saving")
        parts = self.world.gather_objects((state.data, random_state(self.world.device)))
        content = self._content
        reshard(content.towers)
        self._snapshot.take(self._tensors())
        if not self.world.is_main:
            return
        state = replace(state, data=DataState.merge([part for part, _ in parts]))
        groups = groups_to_json(content.optimizer)
        job = CheckpointMeta(state, dict(content.recorded)), groups, [random for _, random in parts], self._evaluated
        self._thread = threading.Thread(target=self._run, args=job, name="save", daemon=True)
        self._thread.start()

    def _tensors(self) -> dict[str, Tensors]:
        content = self._content
        files = {WEIGHTS: content.towers.saved_tensors(), OPTIMIZER: moments(content.optimizer)}
        return files | {name: tensors() for name, tensors in content.tensors.items()}

    def has(self, step: int) -> bool:
        """Whether there is a whole checkpoint of a step, once this rank's save in progress is done. Not collective."""
        if self._thread is not None:
            self._thread.join()
        marker = store.markers(self.folder, []).get(store.folder_of(step))
        return marker is not None and marker.step == step

    def prepare_rescue(self, *, claim: str | None) -> None:
        """Wait for the save in progress, before `rescue`. Not collective. The rank that is to write claims the name of
        the process group: of those that have it, one rank writes.

        Raises OSError, ClipstreamError: the save in progress failed, or another rank writes.
        """
        self._join()
        if claim is not None:
            store.claim(self.folder, claim)

    def rescue(self, state: TrainState, random: Sequence[RandomState], whole: Whole, *, writes: bool) -> None:
        """Write a checkpoint on one rank (`writes`), where other ranks are lost, with the position of the data and the
        random states of all ranks. All that are left call this.

        Raises OSError: it cannot be written.
        """
        content = self._content
        reshard(content.towers)
        if not (self.world.is_main and writes):
            self._snapshot = Snapshot(self.world.device, content.optimizer, kept=writes)
        self._snapshot.take(self._tensors(), whole)
        if writes:
            self._description = {**content.towers.description(), **content.files}
            meta = CheckpointMeta(state, dict(content.recorded))
            self._write(meta, groups_to_json(content.optimizer), random, self._evaluated)

    def check(self) -> None:
        """Raise the error of the writing thread, if any; cheap enough to call at each step.

        Raises ClipstreamError: a file could not be written, in a folder that is neither full nor away. On rank 0 only.
        """
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            self._status("")
        if self._error is not None:
            error, self._error = self._error, None
            if isinstance(error, OSError):
                raise ClipstreamError(f"cannot write the checkpoint: {error}") from error
            raise error

    def whole(self, steps: Iterable[int], instead: Path | None = None) -> Path | None:
        """The first of these steps' checkpoints without damage, after the save in progress; `instead`, of another
        folder, replaces the one of its name. Collective.

        Raises ClipstreamError: as `check`.
        """

        def look() -> Path | None:
            self._join()
            paths = (self.folder / store.folder_of(step) for step in steps)
            paths = (instead if instead is not None and path.name == instead.name else path for path in paths)
            return next((path for path in paths if store.fault(path) is None), None)

        found: Path | None = self.world.on_main(look)
        return found

    def finish(self) -> bool:
        """Wait until all saves are written, and copied to remote storage. Every rank calls this. Returns whether the
        last save was written: False if the folder was full or away, for AWAIT seconds more.

        Raises ClipstreamError: as `check`.
        """

        def wait() -> bool:
            self._join()
            for left in reversed(range(AWAIT)):
                if self._again is not None:
                    time.sleep(1.0)
                    if not left:
                        with suppress(OSError):
                            self.folder.mkdir(parents=True, exist_ok=True)
                    self._again()
            self.check()
            if self._evaluated is not None:  # the last evaluation may be newer than the last save
                try:
                    self.update_best(*self._evaluated)
                    self._prune()
                except OSError as error:
                    self._warn(f"the best checkpoint could not be named: {error}")
            if self._sync is not None:
                self._sync.wake()
            self.close()
            return self._written

        return bool(self.world.on_main(wait))

    def close(self) -> None:
        """Wait for the save and the copy in progress on this rank."""
        if self._thread is not None:
            self._thread.join()
        if self._sync is not None:
            self._sync.drain()

    def __enter__(self) -> AsyncWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyboardInterrupt):
            return  # at once
        if error is None and self._sync is not None:
            self._sync.wake()  # the last line of the metrics comes after the last save
        if self._sync is not None and isinstance(error, ClipstreamError) and (behind := self._sync.behind()):
            error.args = (lines(str(error), behind),)
        if error is None or self.world.size == 1:
            self.close()
        else:
            atexit.register(self.close)  # the error is passed to the other ranks first

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self.check()

    def _write(self, meta: CheckpointMeta, groups: str, random: Sequence[RandomState], evaluated: _Evaluated) -> None:
        self._snapshot.wait()
        headers = {name: {"format": "pt"} for name in (WEIGHTS, *self._content.tensors)} | {OPTIMIZER: {GROUPS: groups}}
        after = 0 if self._sync is None else self._sync.last_serial
        torch.save(list(random), pickled := io.BytesIO())
        text = json.dumps(meta.to_json(), indent=1, allow_nan=False) + "\n"
        others = {**self._description, RANDOM: pickled.getvalue(), STATE: text.encode()}
        write(self.folder, meta.train.step, self._snapshot.files, headers, others, after=after)
        self._written = True
        if evaluated is not None:
            self.update_best(*evaluated)
        self._prune()
        if self._sync is not None:
            self._sync.wake()

    def _run(self, meta: CheckpointMeta, groups: str, random: Sequence[RandomState], evaluated: _Evaluated) -> None:
        step = meta.train.step
        self._written, self._again = False, None
        try:
            self._write(meta, groups, random, evaluated)
        except BaseException as error:
            if (why := atomic_write.obstacle(error, self.folder)) is None:
                self._error = error
                return
            advice, found = "the next save tries again", list[str]()
            if atomic_write.is_full(error):
                advice = "free some space, or lower checkpoint.keep_last"
            elif not self._written:
                self._again = partial(self._run, meta, groups, random, evaluated)
            with suppress(OSError):
                store.clear(self.folder)
                self._prune()  # frees space if the run was resumed with a lower keep_last
                found = list(store.markers(self.folder, []))
            done = "is saved, and older checkpoints are left" if self._written else "was not saved"
            left = f"the newest checkpoint is {found[0]}" if found else "there is no checkpoint"
            self._warn(f"{why}: step {step} {done}; {left}: {advice}")

    def update_best(self, step: int, value: float) -> None:
        """Point `best` to a step's checkpoint, if that exists and is better than the present one."""
        name, metric = store.folder_of(step), self._metric
        marker, best = store.markers(self.folder, []).get(name), store.best_of(self.folder)
        before = best.value if best is not None and best.metric == str(metric) else None
        if marker is not None and metric is not None and metric.is_better(value, before):
            better = store.Best(name, str(metric), value, marker.serial)
            atomic_write.replace(self.folder / store.BEST, better.to_text())

    def _prune(self) -> None:
        with nullcontext(()) if self._sync is None else self._sync.holding() as held:
            store.prune(self.folder, last=self.settings.keep_last, every=self.settings.keep_every, spared=held)

    def _warn(self, text: str) -> None:
        if self.world.is_main and text != self._told:
            logger.warning(text)
        self._told = text


class Snapshot:
    """The contents of files, copied from tensors, of which only the optimizer changes its parameters and moments. Ranks
    that do not keep the copies (`kept`) only take part in gathering sharded tensors. `files`: the last copy, by name.
    """

    def __init__(self, device: str, optimizer: torch.optim.Optimizer, *, kept: bool) -> None:
        self.files: dict[str, TensorFile] = {}
        self._device, self._optimizer, self._kept = device, optimizer, kept
        self._stream: Any = None
        self._copied: list[Any] = []  # CUDA events to wait for
        if kept and device.startswith("cuda"):
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

            def delay_update(*_: Any) -> None:
                """Let the GPU finish the copies before the optimizer's update, without blocking this thread."""
                for event in self._copied:
                    torch.cuda.current_stream(device).wait_event(event)

            optimizer.register_step_pre_hook(delay_update)

    def take(self, files: Mapping[str, Tensors], gather: Whole = full_tensor) -> None:
        """Copy the tensors of files over the last copy. Collective if tensors are sharded, which are gathered."""
        if self._kept:
            self.files = {name: file for name, file in self.files.items() if name in files and file.fits(files[name])}
            for name in [name for name in files if name not in self.files]:
                self.files[name] = TensorFile(files[name], pin=None if self._stream is None else self._device)
        stable: set[int] = set()  # addresses that only the optimizer's update writes to
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            parameters = (p for group in self._optimizer.param_groups for p in group["params"])
            moments = (v for state in self._optimizer.state.values() for v in state.values() if torch.is_tensor(v))
            stable = {t.data_ptr() for t in (*parameters, *moments) if t.is_cuda and not isinstance(t, DTensor)}
        with torch.no_grad():
            for name, tensors in files.items():
                for key, tensor in tensors.items():
                    whole = gather(tensor)
                    if self._kept:
                        aside = whole is tensor and tensor.data_ptr() in stable
                        with torch.cuda.stream(self._stream) if aside else nullcontext():
                            target = self.files[name].views[key]
                            target.copy_(whole, non_blocking=self._stream is not None)
        if self._stream is not None:
            self._copied = [self._stream.record_event(), torch.cuda.current_stream(self._device).record_event()]

    def wait(self) -> None:
        """Wait until the copies are complete; from any thread."""
        if self._copied:
            with torch.cuda.device(self._device):  # else a thread takes memory of GPU 0
                for event in self._copied:
                    event.synchronize()

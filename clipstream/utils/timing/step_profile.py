"""A profile of a few training steps: a trace for Perfetto or chrome://tracing, and the dearest operations.

torch's profiler records the steps on rank 0, with the parts of `timing` as named ranges; the step before them warms the
profiler up. The files are RUN/profile/steps_FIRST-LAST.json.gz and .txt.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from clipstream.utils import atomic_write
from clipstream.utils.logs import logger
from clipstream.utils.timing.step_timer import RANGE

FOLDER = "profile"
SHOWN = 20  # operations in the record; the text file has all
_OWN = (RANGE, "ProfilerStep")  # of names that are ranges, not operations


class Operation(NamedTuple):
    """An operation in all its calls, in seconds. Self time is the time without that of operations it calls."""

    name: str
    calls: int
    self_device: float  # of kernels on the GPU; 0 without one
    device: float
    self_cpu: float
    cpu: float


class StepProfiler:
    """Profiles steps of a run on rank 0. Other ranks have one as well, which records nothing.

    Args:
        steps: numbers of the steps, consecutive, from 1; may be empty.
        folder: of the run.
        device: torch's name of the device that the steps run on.
        records: whether this rank records.
    """

    def __init__(self, steps: range, folder: Path, device: str, *, records: bool) -> None:
        self.steps, self._folder, self._records = steps, folder, records
        self._device = torch.device(device)
        self._profile: Any = None

    def begin_step(self, step: int) -> bool:
        """Begin a step, recording if it is to be profiled; whether it is recorded, or warms the profiler up."""
        if not self.steps or not self._records or not self.steps.start - 1 <= step < self.steps.stop:
            return False
        if self._profile is None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # no messages about its own work
            profiler = torch.profiler
            on_gpu = self._device.type == "cuda"
            activities = [profiler.ProfilerActivity.CPU, *([profiler.ProfilerActivity.CUDA] if on_gpu else [])]
            warm_up = self.steps.start - step
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Profiler won't be using warmup")
                schedule = profiler.schedule(wait=0, warmup=warm_up, active=len(self.steps), repeat=1)
                self._profile = profiler.profile(activities=activities, schedule=schedule)
                self._profile.start()
        return True

    def end_step(self, step: int) -> bool:
        """End a step; whether the profile is complete: then all ranks call `finish`."""
        last = bool(self.steps) and step == self.steps[-1]
        if self._profile is not None and not last:
            self._profile.step()
        return last

    def finish(self) -> dict[str, object] | None:
        """Write the files; returns the record of the profile: steps, device, trace, operations. None if not recorded.

        Files that cannot be written are a warning, and missing.
        """
        if self._profile is None:
            return None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # kernels of the last step
        profile = self._profile
        self.close()
        found = dearest(profile.key_averages())
        name = f"steps_{self.steps[0]}-{self.steps[-1]}"
        record: dict[str, object] = {"steps": [self.steps[0], self.steps[-1]], "device": self._device.type}
        folder = self._folder / FOLDER
        draft = folder / f".{name}.json.gz"
        try:
            folder.mkdir(exist_ok=True)
            profile.export_chrome_trace(str(draft))
            draft.replace(folder / f"{name}.json.gz")
            record["trace"] = f"{FOLDER}/{name}.json.gz"
            text = f"{len(self.steps)} steps, {name}, by self time\n\n{table(found)}\n"
            atomic_write.replace(folder / f"{name}.txt", text.encode())
        except (OSError, RuntimeError) as error:
            reason = "its disk is full" if atomic_write.is_full(error) else str(error)
            logger.warning(f"the profile could not be written to {folder}: {reason}")
            with suppress(OSError):
                draft.unlink(missing_ok=True)
        return {**record, "operations": [one._asdict() for one in found[:SHOWN]]}

    def close(self) -> None:
        """Stop recording; what was recorded is dropped unless `finish` is called."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None


def dearest(averages: Iterable[Any]) -> list[Operation]:
    """The operations of `torch.profiler.profile.key_averages()`, the dearest first: by self time on the GPU, if any."""
    found = [
        Operation(
            event.key,
            int(event.count),
            event.self_device_time_total / 1e6,
            event.device_time_total / 1e6,
            event.self_cpu_time_total / 1e6,
            event.cpu_time_total / 1e6,
        )
        for event in averages
        if not event.key.startswith(_OWN)
    ]
    by_device = any(one.self_device for one in found)
    return sorted(found, key=lambda one: one.self_device if by_device else one.self_cpu, reverse=True)


def table(operations: Sequence[Operation]) -> str:
    """Operations as text, a line each; times in ms."""
    rows: list[tuple[str, ...]] = [("operation", "calls", "self GPU", "GPU", "self CPU", "CPU, ms")]
    for one in operations:
        times = (one.self_device, one.device, one.self_cpu, one.cpu)
        rows.append((one.name[:100], str(one.calls), *(f"{1e3 * seconds:.3f}" for seconds in times)))
    name = max(len(row[0]) for row in rows)
    return "\n".join(f"{row[0]:<{name}}" + "".join(f"{cell:>14}" for cell in row[1:]) for row in rows)

"""Owns how many reading processes a rank gets where the settings leave it open (`data.workers: auto`).

As many as cores, and more where they wait for the disk: a worker is tried for a second. That changes no batch, as the
order of samples does not depend on workers. It never looks at how fast the model is.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

from clipstream.batch import ImageSpec
from clipstream.data.opening import Opener
from clipstream.data.order import lanes_of_rank
from clipstream.data.settings import MOST_AUTO_WORKERS, DataSettings
from clipstream.data.sources import training_loader
from clipstream.data.stages import HAND_OVER, IDLE, OPEN
from clipstream.data.text import Tokenizer
from clipstream.errors import ClipstreamError
from clipstream.world import World

ON_CPU = 2  # where the model is trained on the same cores, and slowly
SECONDS = 1.0  # of the trial
_SAMPLES = 16  # of a trial's batch
_WAITING = (OPEN, "read")  # stages in which another worker may use the core
_MOST_WAITING = 0.75  # share of its time: what is so slow gains little from still more readers


@dataclass(frozen=True)
class Crew:
    """The choice.

    Attributes:
        workers: processes a rank.
        why: in a few words.
    """

    workers: int
    why: str


def settle(settings: DataSettings, world: World, tokenizer: Tokenizer, image: ImageSpec) -> Crew:
    """The number in place of auto, the same on all ranks. Collective: rank 0 tries, on a GPU's machine."""
    lanes = min(len(lanes_of_rank(rank, world.size, int(settings.lanes))) for rank in range(world.size))
    if world.device == "cpu":
        return Crew(min(without_trial(world), lanes), f"{_counted(cores(), 'core')}, which train as well")
    found: tuple[float, float] | None = None
    if world.is_main and not _has_remote(settings):
        found = tried(settings, tokenizer, image)
    rate, waiting = world.broadcast_object(found) or (0.0, 0.0)
    wanted = round(without_trial(world) / (1 - min(waiting, _MOST_WAITING)))
    why = f"{_counted(cores(), 'core')} for {_counted(world.local_size, 'rank')}"
    if rate:
        why += f"; one makes {rate:,.0f} samples/s, and reads for {waiting:.0%} of its time"
    return Crew(world.broadcast_object(min(wanted, lanes, MOST_AUTO_WORKERS)), why)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count > 1)}"


def without_trial(world: World) -> int:
    """The number by the cores alone: one is left to the training process."""
    share = max(1, cores() // world.local_size)
    if world.device == "cpu":
        return min(ON_CPU, share)
    return min(max(1, share - 1), MOST_AUTO_WORKERS)


def cores() -> int:
    """Cores that this process may use: its affinity, and the limit of its control group (containers, Slurm)."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, _quota())))


def _quota() -> float:
    """Cores that the control group's limit amounts to; cgroup v2 writes 'max 100000' or '200000 100000'."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.inf if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return math.inf


def _has_remote(settings: DataSettings) -> bool:
    """Whether a shard would have to be fetched for the trial."""
    for name, source in settings.sources.items():
        opener = Opener(source, None, cache=settings.cache, place=f"data.sources.{name}")
        if any(map(opener.is_remote, opener.names)):
            return True
    return False


def tried(settings: DataSettings, tokenizer: Tokenizer, image: ImageSpec) -> tuple[float, float] | None:
    """Samples per second of one worker, and the share of its time in which it reads; None where it cannot be said."""
    shuffle = settings.shuffle.model_copy(update={"shards": 1})  # the fewest that have to be opened
    changes = {"lanes": 1, "global_batch_size": _SAMPLES, "batch_schedule": [], "workers": 1, "trace": 0}
    alone = settings.model_copy(update={**changes, "shuffle": shuffle})
    try:
        with training_loader(alone, world=World(), seed=0, tokenizer=tokenizer, image=image) as loader:
            next(loader)
            loader.take_times()
            began, count = time.monotonic(), 0
            while time.monotonic() - began < SECONDS:
                count += len(next(loader))
            took, seconds = time.monotonic() - began, loader.take_times().seconds
    except ClipstreamError:
        return None  # the run will meet it, too, and say more of it
    worked = sum(seconds.values()) - seconds[IDLE] - seconds[HAND_OVER]
    return count / took, sum(seconds[stage] for stage in _WAITING) / worked if worked else 0.0

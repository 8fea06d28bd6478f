"""The number of data workers of a rank where the settings leave it open (`data.workers: auto`).

A GPU's rank gets a worker for each of its cores but one, which the training process needs; on a CPU, where the model
takes the cores itself, two. The order of samples does not depend on the number. Workers that wait for a slow disk may
be worth more than that: `python -m clipstream.bench` measures several numbers.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from clipstream.data.order.lanes import lanes_of_rank
from clipstream.data.settings import MAX_AUTO_WORKERS, DataSettings
from clipstream.distributed.world import World

ON_CPU = 2


def resolve_workers(settings: DataSettings, world: World) -> tuple[int, str]:
    """Workers of this rank, at most one for each lane; and the reason, in a few words.

    Args:
        settings: with `lanes` resolved.
    """
    lanes = min(len(lanes_of_rank(rank, world.size, int(settings.lanes))) for rank in range(world.size))
    have, ranks = cores(), world.local_size
    why = f"{have} core{'s' * (have > 1)}"
    why += ", which train as well" if world.device == "cpu" else f" for {ranks} rank{'s' * (ranks > 1)}"
    return min(auto_workers(world), lanes), why


def auto_workers(world: World) -> int:
    """Workers of a rank by the cores of its node alone."""
    share = max(1, cores() // world.local_size)
    return min(ON_CPU, share) if world.device == "cpu" else min(max(1, share - 1), MAX_AUTO_WORKERS)


def cores() -> int:
    """Cores that this process may use: its affinity, and the limit of its control group (containers, Slurm)."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, _quota())))


def _quota() -> float:
    """The control group's limit in cores; cgroup v2 writes 'max 100000' or '200000 100000'."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.inf if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return math.inf

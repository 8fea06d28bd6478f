"""The ranks that are left when others die: who they are, and a process group of their own.

The ranks meet in the store of the run's rendezvous, whose process group was aborted. Each says that it has arrived.
Who has waited long enough proposes those that have; the first proposal is taken, by all. A rank that is not in it, as
it came too late, has no part in what follows.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError

POLL = 0.05  # s between two looks into the store
_ARRIVED, _MEMBERS = "clipstream/survivors/arrived/{}", "clipstream/survivors/members"


@dataclass(frozen=True)
class Survivors:
    world: World  # of the ranks that are left, numbered anew; its process group is the default one, of gloo
    ranks: tuple[int, ...]  # their numbers before


def meet_survivors(world: World, store: Any, lost: Collection[int], seconds: float) -> Survivors:
    """Agree on the ranks that are left, and make their process group in the place of the default one.

    Args:
        store: torch's store that all of them reach.
        lost: ranks that are not waited for.
        seconds: to wait for the others; as many again to connect.

    Raises:
        ClipstreamError: the others went on without this rank.
        RuntimeError: the store or one of them is gone.
    """
    store.set(_ARRIVED.format(world.rank), "")
    end = time.monotonic() + seconds
    others = [rank for rank in range(world.size) if rank not in lost]
    while not store.check([_MEMBERS]) and time.monotonic() < end:
        if store.check([_ARRIVED.format(rank) for rank in others]):
            break
        time.sleep(POLL)
    arrived = [rank for rank in others if store.check([_ARRIVED.format(rank)])]
    ranks = tuple(json.loads(store.compare_set(_MEMBERS, "", json.dumps(arrived))))
    if world.rank not in ranks:
        raise ClipstreamError(f"the other ranks did not wait for rank {world.rank}")
    with contextlib.suppress(RuntimeError):  # aborted
        dist.destroy_process_group()
    mine = replace(world, rank=ranks.index(world.rank), size=len(ranks))
    if mine.size > 1:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("survivors", store),  # type: ignore[attr-defined]
            rank=mine.rank,
            world_size=mine.size,
            timeout=timedelta(seconds=seconds),
        )
    return Survivors(mine, ranks)

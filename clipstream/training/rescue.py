"""Where other ranks die, those that are left save the last whole step, and the run goes on from it.

Weights and moments change at the end of a step only, after the last exchange of the ranks. So whatever breaks a step
leaves each rank with the weights, or its shard of them, after a whole one. What it does not hold is the position of
lost ranks: that in the data, and their random states. Therefore the exchange before a step, which there is anyway,
has the positions of all lanes; and after a step that drew random numbers the generators are seeded by the run's seed,
rank and step, so that the states of all ranks follow from these.

A rank may have ended the step that others could not. The newer one is saved: unsharded, by a rank that has it; of
shards, those that are one step behind finish it first, as they only lack its totals (`TrainStep.torn`). Which rank
writes follows from what all have told each other; where the network is in two parts, the part that makes a file of the
group's name in the folder of checkpoints. A second failure leaves the last checkpoint as it is.

The ranks that are left meet in the store of the run's rendezvous, whose process group was aborted. Who has waited long
enough proposes those that have arrived; the first proposal is taken, by all, and a rank that is not in it has no part.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from clipstream.data.loader.health import merge_counts
from clipstream.data.order.lanes import Cursor, DataState, LaneState
from clipstream.distributed.failure import Cause, FailureWatch
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError, Stopped
from clipstream.training.parallel import local_tensor
from clipstream.training.state import RandomState, SourceCounts, TrainState, random_state, same_randomness, seed_all
from clipstream.training.step import TrainStep

REMEMBERED = 3  # steps: on a GPU two may be unfinished
_Skips = dict[int, list[list[int]]]  # `Cursor.skipped` by lane and source, of lanes that have any
Whole = Callable[[torch.Tensor], torch.Tensor]


class RescueWriter(Protocol):
    def has(self, step: int) -> bool:
        """Whether there is a whole checkpoint of a step, once the save in progress is done. On any rank."""

    def prepare_rescue(self, *, claim: str | None) -> None:
        """Wait for the save in progress; with a claim, be the one that writes, or raise ClipstreamError."""

    def rescue(self, state: TrainState, random: Sequence[RandomState], whole: Whole, *, writes: bool) -> None:
        """Write a checkpoint on one rank. Every rank that is left calls this."""


class Held(NamedTuple):
    """What a rank holds after a failure."""

    state: TrainState  # after the last whole step; with the health of the run's former processes
    counts: list[SourceCounts]  # of data since, by rank; those of other ranks as they were last gathered
    saved: bool  # whether a checkpoint of this step was begun


class _Part(NamedTuple):
    """What a rank tells the others."""

    step: int
    nonfinite: bool  # whether the weights may be broken
    shard: int  # number of its shard
    digest: int  # of its weights
    counts: SourceCounts
    totals: torch.Tensor | None  # of the last step
    torn: bool  # whether it can finish one more step with the totals of that


class Rescue:
    """Remembers the positions of all ranks (`position`: of this rank's lanes, as last exchanged), and saves the last
    whole step, within so many seconds, where some of them are lost.
    """

    def __init__(self, watch: FailureWatch, step: TrainStep, writer: RescueWriter, seconds: float, seed: int) -> None:
        self.watch, self.train_step, self.writer, self.seconds, self.seed = watch, step, writer, seconds, seed
        self.world = step.world
        self._name = ""  # of the process group that would be rescued
        self._random: list[RandomState] = []  # of all ranks, before the first step
        self._before: RandomState | None = None
        self._drawn: list[int] = []  # the last steps that drew random numbers
        self._positions: dict[int, tuple[DataState, torch.Tensor, _Skips]] = {}  # by steps done
        self._skips: _Skips = {}  # of all ranks
        self._own_skips: _Skips = {}  # of this one
        self._width = 0  # numbers of a lane
        self.position = DataState()

    def begin(self, step: int, data: DataState, sources: int) -> None:
        """Exchange positions before the first step. Collective."""
        self._width = 1 + 3 * sources
        self._before = random_state(self.world.device)
        found = self.world.gather_objects((self._before, secrets.token_hex(8)))
        self._random, self._name = [state for state, _ in found], found[0][1]
        self.exchange(step, data)

    def exchange(self, step: int, data: DataState, *flags: bool) -> list[bool]:
        """As `World.any`, and remember the positions of all ranks after `step` steps. Collective."""
        self.position = data
        table = np.zeros((data.lanes_total, self._width), np.int64)
        rows = [
            (lane.drawn, *(number for one in lane.cursors for number in (one.group, one.window, one.position)))
            for lane in data.lanes.values()
        ]
        table[list(data.lanes)] = np.array(rows, np.int64).reshape(-1, self._width)
        skips = {
            number: [one.skipped for one in lane.cursors]
            for number, lane in data.lanes.items()
            if any(one.skipped for one in lane.cursors)
        }
        changed, self._own_skips = skips != self._own_skips, skips
        tensor = self.world.all_reduce_sum(torch.from_numpy(np.concatenate(([*flags, changed], table.ravel()))))
        *found, changed = (bool(count) for count in tensor[: len(flags) + 1].tolist())
        if changed:
            self._skips = {n: skipped for part in self.world.gather_objects(skips) for n, skipped in part.items()}
        self._positions[step] = data, tensor[len(flags) + 1 :].view(table.shape), self._skips
        for old in sorted(self._positions)[:-REMEMBERED]:
            del self._positions[old]
        return found

    def end_step(self, step: int) -> None:
        """After a step, the `step`-th: seed the generators if it drew random numbers."""
        after = random_state(self.world.device)
        if self._before is None or not _same(after, self._before):
            seed_all(self.seed, self.world.rank, step)
            self._before = random_state(self.world.device)
            self._drawn = [*self._drawn, step][-REMEMBERED:]

    @contextmanager
    def on_failure(self, held: Callable[[], Held]) -> Iterator[None]:
        """Within the context, a failure of another rank leads to a checkpoint of what this rank holds (not collective),
        and the error is raised again.
        """
        self.watch.rescue_seconds = self.seconds
        try:
            yield
        except ClipstreamError:  # of the data or the weights, on all ranks; or this rank's own
            self.watch.rescue_seconds = 0.0
            raise
        except Exception as error:
            cause = self.watch.find_cause(error)
            lost = set() if cause.broken or cause.stuck else {*cause.dead} or {cause.rank}
            if cause.code == 1 and self.world.rank not in lost:
                self._rescue(cause, lost, held)
            raise
        self.watch.rescue_seconds = 0.0

    def _rescue(self, cause: Cause, lost: set[int], held: Callable[[], Held]) -> None:
        try:
            survivors = meet_survivors(self.world, self.watch.store, lost, self.seconds / 3)
            step, rank = self._save(survivors, held())
            code = Stopped.exit_code if cause.dead or cause.broken or cause.stuck else cause.code
            text = f"rank {rank} saved step {step}; the same command with --resume latest goes on"
        except Exception as error:  # whatever it is, the first cause is told
            why = next(iter(str(error).splitlines()), type(error).__name__)
            code, text = cause.code, f"the steps since the last checkpoint are lost ({why})"
        self.watch.set_outcome(code, text)

    def _save(self, survivors: Survivors, held: Held) -> tuple[int, int]:
        """Save the newest step that the ranks which are left hold as a whole; returns it, and the rank that wrote it.

        Raises ClipstreamError: there is none, or it cannot be written.
        """
        world, model = survivors.world, self.train_step
        weights = [local_tensor(parameter).detach() for parameter in model.parameters]
        mesh = next((p.device_mesh for p in model.parameters if isinstance(p, DTensor)), None)
        place = None if mesh is None else mesh.get_coordinate()
        shard = 0 if place is None else place[-1]
        nonfinite = bool(held.state.rollback.nonfinite) or bool(model.count_broken().item())
        counts = held.counts[self.world.rank]
        digest = 0 if mesh is not None else _digest(weights)
        totals = None if model.totals is None else model.totals.cpu()
        part = _Part(held.state.step, nonfinite, shard, digest, counts, totals, model.torn is not None)
        parts: list[_Part] = world.gather_objects(part)
        newest = max(part.step for part in parts)
        having = [number for number, part in enumerate(parts) if part.step == newest]
        writer = having[0]
        if any(part.nonfinite for part in parts):
            raise ClipstreamError("the last steps had no finite loss, and the weights may be broken")
        if len({parts[number].digest for number in having}) > 1:
            raise ClipstreamError("the weights of the ranks that are left differ")
        if mesh is not None:
            behind = [number for number, part in enumerate(parts) if part.torn and part.step == newest - 1]
            if world.rank in behind and model.torn is not None:
                totals = parts[writer].totals
                assert totals is not None, "that of the newest step"
                model.torn(totals.to(self.world.device))()
            having += behind
        shards = 1 if mesh is None else mesh.size(mesh.ndim - 1)
        holders = {parts[number].shard: number for number in reversed(having)}
        if missing := [number for number in range(shards) if number not in holders]:
            which = ", ".join(map(str, missing))
            raise ClipstreamError(f"no rank has shard {which} of the weights: --train.fsdp-replicas 2 keeps two copies")
        writes = world.rank == writer
        done = mesh is None and writes and held.saved and self.writer.has(newest)
        with _raising_on_all(world):  # before shards are sent to a rank that will not write
            self.writer.prepare_rescue(claim=self._name if writes and not done else None)
        with _raising_on_all(world):
            if not done:
                merged = replace(held.state, health=self._health(survivors, held, parts))
                data = self._data(newest) if writes else DataState()
                random = self._random_states(newest) if writes else []
                whole = _gather_with(world, holders, writer)
                self.writer.rescue(replace(merged, data=data), random, whole, writes=writes)
        return newest, survivors.ranks[writer]

    def _health(self, survivors: Survivors, held: Held, parts: Sequence[_Part]) -> dict[str, SourceCounts]:
        counts = list(held.counts)
        for rank, part in zip(survivors.ranks, parts, strict=True):
            counts[rank] = part.counts
        return merge_counts([held.state.health, *counts])

    def _data(self, step: int) -> DataState:
        """The position of all lanes after `step` steps."""
        if step not in self._positions:
            raise ClipstreamError(f"the positions of the data after step {step} are not known")
        own, table, skips = self._positions[step]
        lanes = {}
        for number, (drawn, *numbers) in enumerate(table.tolist()):
            if not drawn:  # before its first sample
                continue
            skipped = skips.get(number, [[] for _ in numbers[::3]])
            cursors = zip(numbers[::3], numbers[1::3], numbers[2::3], map(list, skipped), strict=True)
            lanes[number] = LaneState(drawn, [Cursor(*cursor) for cursor in cursors])
        return replace(own, lanes=lanes)

    def _random_states(self, step: int) -> list[RandomState]:
        """Those of all ranks after `step` steps."""
        drawn = max((at for at in self._drawn if at <= step), default=None)
        if drawn is None:
            return self._random
        states = []
        with same_randomness(self.world.device):
            for rank in range(self.world.size):
                seed_all(self.seed, rank, drawn)
                states.append(random_state(self.world.device))
        return states


@contextmanager
def _raising_on_all(world: World) -> Iterator[None]:
    """Raise an error of the context on all ranks. Collective."""
    error: str | None = None
    try:
        yield
    except (ClipstreamError, OSError) as failure:
        error = str(failure)
    if errors := [text for text in world.gather_objects(error) if text is not None]:
        raise ClipstreamError(errors[0])


def _gather_with(world: World, holders: dict[int, int], writer: int) -> Whole:
    """Gathers sharded tensors on the rank `writer`, from the ranks that hold them by number of the shard.

    Other ranks get a tensor of the same shape, type and device 'meta'. All call it for the same tensors in turn.
    """

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        local = tensor.to_local().detach().cpu().contiguous()
        found = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu" if world.rank == writer else "meta")
        # As torch shards: equal parts of the first dimension, but for the last of them, which may be shorter or empty.
        rows = torch.split(found, max(1, math.ceil(len(found) / len(holders)))) if len(found) else ()
        for (_, holder), part in zip(sorted(holders.items()), rows, strict=False):
            if writer == holder == world.rank:
                part.copy_(local)
            elif writer == world.rank:
                dist.recv(part, src=holder)
            elif holder == world.rank:
                dist.send(local, dst=writer)
        return found

    return whole


def _digest(tensors: Sequence[torch.Tensor]) -> int:
    found = 0
    for tensor in tensors:
        found = crc32(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data, found)
    return found


def _same(state: RandomState, other: RandomState) -> bool:
    """Whether two states of one process are equal."""
    if state.keys() != other.keys():
        return False
    (_, words, *rest), (_, others, *more) = state["numpy"], other["numpy"]
    equal = state["python"] == other["python"] and torch.equal(words, others) and rest == more
    return equal and all(torch.equal(state[name], other[name]) for name in ("cpu", "cuda") if name in state)


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
        prefixed = dist.PrefixStore("survivors", store)  # type: ignore[attr-defined]
        options: Any = {"rank": mine.rank, "world_size": mine.size, "timeout": timedelta(seconds=seconds)}
        dist.init_process_group("gloo", store=prefixed, **options)
    return Survivors(mine, ranks)

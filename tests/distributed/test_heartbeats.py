"""A rank that was killed or stopped is named with its host, the others' collectives raise, and they may still save."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from subprocess import PIPE

import pytest
import torch
from torch.distributed import TCPStore, distributed_c10d

from clipstream.distributed import failure, shared_keys
from clipstream.distributed import world as world_module
from clipstream.distributed.failure import FailureWatch
from clipstream.distributed.shared_keys import SharedKeys, connections_since, open_sockets
from clipstream.distributed.world import World
from clipstream.errors import Stopped
from tests.support.forks import wait_until
from tests.support.ranks import end_ranks, run_ranks

RANKS = 3
SAVED = "step 7 is saved"


def connect(world: World) -> FailureWatch:
    """The watch of a rank on a host of its own, with short limits."""
    failure.QUIET, failure.LONG_SILENCE, shared_keys.ANSWER = 1.5, 4.0, 1.0
    socket.gethostname = lambda: f"node-{world.rank}"
    world.start()
    watch = FailureWatch(world)
    watch.start()
    return watch


def lose(world: World, number: int, lost: int) -> int:
    """A run that loses a rank while the others are in an all_reduce, and save."""
    watch = connect(world)
    pid = world.gather_objects(os.getpid())[lost]
    watch.rescue_seconds = 30.0
    try:
        if world.rank == lost:
            os.kill(pid, number)
        world.all_reduce_sum(torch.ones(1))
        return 9
    except RuntimeError as error:
        cause = watch.find_cause(error)
    signal.raise_signal(signal.SIGTERM)  # as torchrun sends it to the others
    alive = [rank for rank in range(RANKS) if rank != lost]
    watch.store.set(f"here/{world.rank}", "")
    watch.store.wait([f"here/{rank}" for rank in alive])
    if number == signal.SIGSTOP and world.rank == alive[0]:
        os.kill(pid, signal.SIGKILL)  # no process stays
    watch.set_outcome(Stopped.exit_code, SAVED)
    return watch.report(Stopped(SAVED)) if cause.dead == [lost] else 8


@pytest.mark.parametrize(("number", "lost"), [(signal.SIGKILL, 0), (signal.SIGKILL, 2), (signal.SIGSTOP, 0)])
def test_the_others_of_a_lost_rank_name_it_and_its_host_and_may_save(number: int, lost: int) -> None:
    """Rank 0 holds the store where the ranks met, and the last one the spare one."""
    ends = end_ranks(RANKS, lose, number, lost)
    assert [end.code for end in ends] == [-9 if rank == lost else 75 for rank in range(RANKS)], ends
    why = "ended without an error message" if number == signal.SIGKILL else "gives no sign of life"
    for rank, end in enumerate(ends):
        told = re.findall(f"^rank {lost} on node-{lost} {why}.*; {SAVED}$", end.stderr, re.MULTILINE)
        assert len(told) == (rank == (1 if lost == 0 else 0)), end.stderr


def end_by_itself(world: World) -> int:
    """A run that loses rank 1 and does not save: the main thread of the others stays where it is."""
    watch = connect(world)
    pid = world.gather_objects(os.getpid())[1]
    if world.rank == 1:
        os.kill(pid, signal.SIGSTOP)
    elif world.rank == 0:
        watch.on_exit(lambda: os.kill(pid, signal.SIGKILL))
    time.sleep(120)
    return 9


def test_a_stopped_rank_ends_the_others_wherever_they_are() -> None:
    ends = end_ranks(RANKS, end_by_itself)
    assert [end.code for end in ends] == [1, -9, 1], ends
    assert all("error: rank 1: rank 1 on node-1 gives no sign of life" in ends[rank].stderr for rank in (0, 2))


def abort_in_a_collective(world: World) -> None:
    """Rank 1 aborts the all_reduce, to which rank 2 does not come: that waits until the others are woken."""
    store = distributed_c10d._get_default_store()
    if world.rank == 1:
        threading.Timer(0.5, world.abort).start()
    if world.rank < 2:
        with pytest.raises(RuntimeError):
            world.all_reduce_sum(torch.ones(1))
        store.set(f"woken/{world.rank}", "")
    else:
        store.wait(["woken/0", "woken/1"])


def test_an_abort_wakes_all_ranks_of_a_collective() -> None:
    """Without it they wait until the group's timeout of 30 minutes."""
    run_ranks(RANKS, abort_in_a_collective)


def abort_unwoken(world: World) -> int:
    """The same where gloo does not wake a rank, as if a connection broke in the moment of a send: none is closed."""
    world.start()
    world_module._connections.clear()
    store = distributed_c10d._get_default_store()
    if world.rank < 2:
        threading.Timer(0.5, world.abort).start()
        with pytest.raises(RuntimeError, match="by this rank"):
            world.all_reduce_sum(torch.ones(1))
        world.stop()
    else:
        store.wait(["left/1"])
    store.set(f"left/{world.rank}", "")
    if world.rank == 0:  # which holds the store
        store.wait(["left/1", "left/2"])
    return 0


def test_an_abort_ends_a_wait_of_which_gloo_wakes_nobody() -> None:
    ends = end_ranks(RANKS, abort_unwoken)
    assert [end.code for end in ends] == [0] * RANKS, ends


def be_busy(world: World) -> int:
    """A run whose rank 1 computes for longer than the limits, while rank 2 has ended and rank 0 watches both."""
    watch = connect(world)
    end = time.monotonic() + 1.2 * (failure.QUIET + failure.LONG_SILENCE) * (world.rank < 2)
    while time.monotonic() < end:
        time.sleep(0.1) if world.rank == 0 else sum(range(1000))
    watch.stop()
    world.stop()
    return 0


def test_a_rank_that_is_busy_or_has_ended_well_is_not_taken_for_dead() -> None:
    for end in end_ranks(RANKS, be_busy):
        assert (end.code, end.stderr) == (0, "")


HOLDER = """
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
input()
"""


def test_keys_outlast_a_store_that_stops_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_keys, "ANSWER", 1.0)
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=PIPE, stdout=PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            keys = SharedKeys(TCPStore("127.0.0.1", int(holder.stdout.readline()), wait_for_workers=False))
            keys.meet(0, 1)
            assert keys.add("number", 1) == 1 and not keys.spare
            holder.send_signal(signal.SIGSTOP)
            os.waitpid(holder.pid, os.WUNTRACED)  # it may answer until it has stopped
            assert keys.add("number", 1) == 2 and keys.agree("text", "first") == "first" and keys.spare
            holder.send_signal(signal.SIGCONT)
            wait_until(lambda: keys.add("number", 0) == 2 and not keys.spare)
            assert keys.get(["number", "text", "none"]) == ["2", "first", ""] and keys.agree("text", "2nd") == "first"
        finally:
            holder.kill()
        holder.wait()
        assert keys.add("number", 1) == 3 and keys.spare


def test_connections_that_a_server_of_before_accepts_are_not_those_of_a_group() -> None:
    """Where rank 0 hosts the store, other ranks connect to it while rank 0 still makes its group."""
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        before = open_sockets()
        client = stack.enter_context(socket.create_connection(store.getsockname()))
        accepted, _ = store.accept()
        stack.enter_context(accepted)
        group = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        pair = stack.enter_context(socket.create_connection(group.getsockname()))
        joined, _ = group.accept()
        stack.enter_context(joined)
        found = {file.number for file in connections_since(before)}
        assert accepted.fileno() not in found
        assert {one.fileno() for one in (client, pair, joined)} <= found

"""How ranks find each other: Slurm's variables, the store of a Slurm step, and the agreement on one attempt of a run.

Slurm's variables and torch's store enter; rank, size, address and a key prefix for this attempt leave. srun sets the
variables of its step (`SLURM_STEP_…`) in every task; if one is missing, that of the whole job is used.
"""

from __future__ import annotations

import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from clipstream.errors import SettingsError

FIRST_PORT, PORTS = 12_000, 16_384  # below the system's ephemeral ports
_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


class Task(NamedTuple):
    """One task of a Slurm step; the attributes are those of `World`."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    step: str


def task_of(env: Mapping[str, str]) -> Task | None:
    """The task that the variables describe; None outside of Slurm and for a step with one task.

    MASTER_ADDR and MASTER_PORT override the address derived from the list of nodes and the job's number.

    Raises:
        SettingsError: a variable is not what Slurm sets.
    """
    if "SLURM_PROCID" not in env:
        return None
    size = _slurm_number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=1)
    if size == 1:
        return None
    rank, local_rank = _slurm_number(env, "SLURM_PROCID"), _slurm_number(env, "SLURM_LOCALID")
    nodes = next((env[name] for name in _NODES if env.get(name)), "")
    # Tasks of this node, from '2(x3),1': two on each of three nodes, one on the fourth.
    node = _slurm_number(env, "SLURM_NODEID", default=0)
    node_count = _slurm_number(env, "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", default=1)
    per_node = next((env[name] for name in _PER_NODE if env.get(name)), "")
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node)
    counts = [int(count) for count, times in pairs for _ in range(int(times or 1))]
    # The job's own list may describe more tasks than the step has.
    local_size = counts[node] if sum(counts) == size and node < len(counts) else -(-size // node_count)
    host = env.get("MASTER_ADDR") or (first_node(nodes) if local_size < size else "127.0.0.1")
    if not host:
        raise SettingsError("Slurm's variables name no nodes (SLURM_JOB_NODELIST): set MASTER_ADDR to the first one")
    if port := env.get("MASTER_PORT"):
        return Task(rank, size, local_rank, local_size, f"{host}:{port}", "")
    job = _slurm_number(env, "SLURM_JOB_ID", "SLURM_JOBID", default=0)
    step = _slurm_number(env, "SLURM_STEP_ID", default=0)
    first = FIRST_PORT + (8 * job + step % 8) % PORTS  # differs between steps and jobs, which may share a node
    name = f"{job}.{step}.{_slurm_number(env, 'SLURM_RESTART_COUNT', default=0)}"
    return Task(rank, size, local_rank, local_size, f"{host}:{first}", name)


def first_node(nodes: str) -> str:
    """The first node of a Slurm list: 'gpu003' of 'gpu[003-005,9],login1'; '' of an empty list."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\]]*)\]", lambda found: re.split("[-,]", found[1])[0], first[0] if first else "")


def _slurm_number(env: Mapping[str, str], *names: str, default: int | None = None) -> int:
    for name in names:
        if env.get(name):
            try:
                return int(env[name])
            except ValueError:
                raise SettingsError(f"{name} is {env[name]!r}, which Slurm never sets: unset it") from None
    if default is None:
        raise SettingsError(f"Slurm's {names[0]} is missing: start the run with srun, or unset SLURM_PROCID")
    return default


SHORTEST, LONGEST = 0.02, 0.5  # s between two looks into the store
_NUMBER, _ANSWER, _ARRIVED = "clipstream/number/{}", "clipstream/answer/{}", "clipstream/heard/{}"  # keys of a store
TRIED = 8  # ports of a Slurm step, from its first one on
ANSWER, LONGEST_ANSWER = 3.0, 100  # s and bytes; a program that takes more is not rank 0


def step_store(address: str, step: str, rank: int, timeout: timedelta) -> Any:
    """The TCPStore of a Slurm step, whose tasks have agreed on no port; every rank calls this.

    Rank 0's store listens on any free port. Rank 0 sends this port and the step's name to all who connect to the first
    free one of TRIED ports. The others try these ports, where other programs and other jobs may listen too.

    Args:
        address: 'HOST:PORT' of rank 0's node and the first of the ports.
        step: the step's name, the same on all ranks and different in every other step.

    Raises:
        TimeoutError: no port was free, or rank 0 was not found.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, _, first = address.rpartition(":")
    ports = range(int(first), int(first) + TRIED)
    if rank == 0:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        for port in ports:
            with suppress(OSError):
                listener = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
                break
        else:
            raise TimeoutError(f"none of the ports {ports[0]} to {ports[-1]} is free")
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        text = f"{step} {store.port}".encode()

        def answer() -> None:
            while True:
                with suppress(OSError), listener.accept()[0] as connection:
                    connection.sendall(text)

        threading.Thread(target=answer, daemon=True).start()
        return store
    for _ in _looks(timeout):
        for port in ports:
            with suppress(OSError), socket.create_connection((host, port), ANSWER) as connection:
                name, _, found = connection.recv(LONGEST_ANSWER).decode(errors="replace").partition(" ")
                if name == step:
                    return TCPStore(host, int(found), is_master=False, wait_for_workers=False, timeout=timeout)
    raise TimeoutError(f"rank 0 listens on none of the ports {ports[0]} to {ports[-1]} of {host}")


def meet(store: Any, rank: int, size: int, timeout: timedelta) -> str:
    """A random word for this attempt of the run, the same on all ranks; every rank calls this.

    The store may hold keys of an earlier attempt, so each rank sends a random number, and rank 0 answers with that
    number and the word.

    Args:
        store: a torch.distributed.Store.
        rank: of this process.
        size: number of ranks.
        timeout: how long to wait for the other ranks.

    Raises:
        TimeoutError: some ranks did not arrive.
    """
    if rank > 0:
        mine = secrets.token_hex(8)
        store.set(_NUMBER.format(rank), mine)
        for _ in _looks(timeout):
            if store.check([_ANSWER.format(rank)]):
                answer: str = store.get(_ANSWER.format(rank)).decode()
                number, _, word = answer.partition(" ")
                if number == mine:
                    store.add(_ARRIVED.format(word), 1)
                    return word
        raise TimeoutError("rank 0 did not answer")
    word = secrets.token_hex(8)
    answered: dict[int, bytes] = {}
    for _ in _looks(timeout):
        for other in range(1, size):
            key = _NUMBER.format(other)
            if store.check([key]) and (sent := store.get(key)) != answered.get(other):
                answered[other] = sent
                store.set(_ANSWER.format(other), f"{sent.decode()} {word}")
        if store.add(_ARRIVED.format(word), 0) == size - 1:
            return word
    missing = size - 1 - store.add(_ARRIVED.format(word), 0)
    raise TimeoutError(f"{missing} of {size - 1} other ranks did not arrive")


def _looks(timeout: timedelta) -> Iterator[None]:
    """Yield at once, and then after waits that grow, until the timeout."""
    end, wait = time.monotonic() + timeout.total_seconds(), SHORTEST
    while True:
        yield
        if time.monotonic() > end:
            return
        time.sleep(wait)
        wait = min(2 * wait, LONGEST)

"""Owns what Slurm's variables say of a task: which it is of how many, on which node, and where the tasks meet.

Pure reading of a mapping that `World` hands over; it starts nothing. srun sets the variables of its step
(`SLURM_STEP_…`) in every task; where one is missing, that of the whole job stands in for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from clipstream.errors import SettingsError

FIRST_PORT, PORTS = 12_000, 16_384  # below those that the system gives to connections
_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


@dataclass(frozen=True)
class Task:
    """One task of a step.

    Attributes:
        rank: 0 to size - 1.
        size: tasks of the step.
        local_rank: number among the tasks of its node.
        local_size: tasks of its node.
        address: 'HOST:PORT' where the tasks meet, on the first node.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str


def task_of(env: Mapping[str, str]) -> Task | None:
    """The task that the variables describe; None outside of Slurm, and for a task that is alone.

    MASTER_ADDR and MASTER_PORT, where they are set, stand above what is made of the list of nodes and the job's number.

    Raises:
        SettingsError: a variable is not what Slurm sets.
    """
    if "SLURM_PROCID" not in env:
        return None
    size = _number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=1)
    if size == 1:
        return None
    rank, local_rank = _number(env, "SLURM_PROCID"), _number(env, "SLURM_LOCALID")
    nodes = next((env[name] for name in _NODES if env.get(name)), "")
    local_size = _tasks_of_node(env, size)
    host = env.get("MASTER_ADDR") or (first_node(nodes) if local_size < size else "127.0.0.1")
    if not host:
        raise SettingsError("Slurm's variables name no nodes (SLURM_JOB_NODELIST): set MASTER_ADDR to the first one")
    port = env.get("MASTER_PORT") or _port(env)
    return Task(rank, size, local_rank, local_size, f"{host}:{port}")


def first_node(nodes: str) -> str:
    """The first of 'gpu[003-005,9],login1', as Slurm writes lists of nodes: 'gpu003'; '' of an empty list."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\]]*)\]", lambda found: re.split("[-,]", found[1])[0], first[0] if first else "")


def _tasks_of_node(env: Mapping[str, str], size: int) -> int:
    """Tasks of this task's node, out of '2(x3),1': two on each of three nodes, one on the fourth."""
    node = _number(env, "SLURM_NODEID", default=0)
    nodes = _number(env, "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", default=1)
    told = next((env[name] for name in _PER_NODE if env.get(name)), "")
    counts = [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", told) for _ in range(int(times or 1))]
    # The job's own list may be of more tasks than the step has.
    return counts[node] if sum(counts) == size and node < len(counts) else -(-size // nodes)


def _port(env: Mapping[str, str]) -> int:
    """Another one for each step of each job, as those may share a node."""
    job, step = _number(env, "SLURM_JOB_ID", "SLURM_JOBID", default=0), _number(env, "SLURM_STEP_ID", default=0)
    return FIRST_PORT + (8 * job + step % 8) % PORTS


def _number(env: Mapping[str, str], *names: str, default: int | None = None) -> int:
    for name in names:
        if env.get(name):
            try:
                return int(env[name])
            except ValueError:
                raise SettingsError(f"{name} is {env[name]!r}, which Slurm never sets: unset it") from None
    if default is None:
        raise SettingsError(f"Slurm's {names[0]} is missing: start the run with srun, or unset SLURM_PROCID")
    return default

"""The rank of this process, its device, the rendezvous of the ranks, and their collectives.

The variables of torchrun, MPI or Slurm enter, which are read nowhere else. A `World` is passed as an argument, so that
tests can run many ranks in one process. torch is imported only to talk to other ranks and to count GPUs: with one rank,
every collective is the identity and there is no process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar
from zlib import crc32

from clipstream.distributed.shared_keys import Socket, connections_since, open_sockets
from clipstream.errors import ClipstreamError, SettingsError

if TYPE_CHECKING:
    import torch

POLL = 5.0  # s between two broadcasts to ranks that wait for rank 0
FIRST_PORT, PORTS = 12_000, 16_384  # below the system's ephemeral ports
POLL_WAIT = 1.0  # s of a wait for other ranks between two looks at this one's connections
SHORTEST, LONGEST = 0.02, 0.5  # s between two looks into the store
# Has NCCL's watchdog write the last exchanges to a file; torch records them from version 2.11 on.
DUMP = "TORCH_NCCL_DUMP_ON_TIMEOUT"
_NUMBER, _ANSWER, _ARRIVED = "clipstream/number/{}", "clipstream/answer/{}", "clipstream/heard/{}"  # keys of a store
_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# The same of Open MPI, MVAPICH, and MPICH's Hydra, which is Intel MPI's, by a name that nothing else sets: what mpirun
# starts in a Slurm job has SLURM_PROCID as well.
_OF_MPI = "{0}_COMM_WORLD_RANK {0}_COMM_WORLD_SIZE {0}_COMM_WORLD_LOCAL_RANK {0}_COMM_WORLD_LOCAL_SIZE"
_MPIRUN = {f"{mpi}_COMM_WORLD_RANK": _OF_MPI.format(mpi).split() for mpi in ("OMPI", "MV2")}
_MPIRUN["MPI_LOCALRANKID"] = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
# Of HPE's PALS and other servers of PMI, such as srun --mpi=pmi2, which sets Slurm's variables as well.
_PMI = {"PALS_RANKID": ["PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE"],
        "PMI_RANK": ["PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"],
        "PMIX_RANK": ["PMIX_RANK", "PMIX_SIZE"] * 2}  # fmt: skip  # of prterun, which tells nobody how many there are
_connections: set[Socket] = set()  # of this process's groups
_aborted = threading.Event()  # these are shut down
_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_START = "start the ranks with torchrun or srun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
T = TypeVar("T")
W = TypeVar("W", bound="World")


@dataclass(frozen=True)
class World:
    """One process among `size`."""

    rank: int = 0  # 0 to size - 1
    size: int = 1  # number of processes of the run
    local_rank: int = 0  # rank among the processes of this node
    local_size: int = 1  # processes of this node
    device: str = "cpu"  # torch's name of this rank's device: 'cpu' or 'cuda:N'
    address: str = ""  # 'HOST:PORT' of the rendezvous; '' if MASTER_ADDR and MASTER_PORT name it

    @property
    def is_main(self) -> bool:
        """Whether this rank prints to the user and writes the run's files."""
        return self.rank == 0

    @classmethod
    def from_env(cls, device: str = "cpu", env: Mapping[str, str] | None = None) -> World:
        """The world that the variables of torchrun, mpirun or srun describe; a single process without them.

        Args:
            device: 'cpu', 'cuda' (see `gpu`), or 'cuda:N' with one rank.

        Raises SettingsError: the variables are incomplete or not numbers.
        """
        env = os.environ if env is None else env
        if given := {name: env[name] for name in _TORCHRUN[:2] if name in env}:
            advice = "start the run with torchrun, or unset RANK and WORLD_SIZE"
            for name in set(_TORCHRUN[:2]) - given.keys():
                index = " to $JOB_COMPLETION_INDEX" if name == "RANK" and "JOB_COMPLETION_INDEX" in env else ""
                raise SettingsError(f"{next(iter(given))} is set, but {name} is not: set it{index}, {advice}")
            try:
                world = cls(*_numbers(env, _TORCHRUN))
            except SettingsError as error:
                raise SettingsError(f"invalid {given} in the environment: {advice} ({error})") from error
        else:
            pmi = {} if "SLURM_PROCID" in env else _PMI
            world = mpi_world(env, _MPIRUN) or slurm_world(env) or mpi_world(env, pmi) or cls()
        return replace(world, device=world.gpu(env) if device == "cuda" else device)

    @classmethod
    def of(cls: type[W], world: World) -> W:
        """The same rank, as this class."""
        return cls(**{field.name: getattr(world, field.name) for field in fields(World)})

    @classmethod
    def of_launcher(cls) -> World:
        """As `from_env`; a single process if the variables are wrong, as settings say later."""
        with contextlib.suppress(SettingsError):
            return cls.from_env()
        return cls()

    @classmethod
    def of_group(cls, device: str = "cpu") -> World:
        """The world of the process group that the program has made; a single process without one."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return cls(device=device)
        rank, size = dist.get_rank(), dist.get_world_size()
        local = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
        world = cls(rank, size, *local)
        return replace(world, device=world.gpu(os.environ) if device == "cuda" else device)

    def gpu(self, env: Mapping[str, str]) -> str:
        """torch's name of this rank's GPU: the only one that the process sees, else number `local_rank` of its node."""
        alone = len(env.get("CUDA_VISIBLE_DEVICES", ",").split(",")) == 1  # as of srun --gpus-per-task 1
        if not alone and "RANK" in env and "LOCAL_RANK" not in env:  # as in a pod of Kubernetes, with its own GPU
            import torch

            alone = torch.cuda.device_count() == 1
        return f"cuda:{0 if alone else self.local_rank}"

    def start(self, timeout: timedelta = timedelta(minutes=30)) -> None:
        """Make this rank's GPU the current one, and the process group: nccl with gloo beside it on CUDA, else gloo.

        There is no group with one rank, and none is made if the program has one.

        Args:
            timeout: how long a rank waits for the others, here and in every collective.

        Raises SettingsError: some ranks did not arrive, or NCCL cannot connect the GPUs.
        """
        backend, gpu = "gloo", None
        if self.device.startswith("cuda"):
            import torch

            backend, gpu = "cpu:gloo,cuda:nccl", torch.device(self.device)
            torch.cuda.set_device(self.device)
        if self.size == 1:
            if "RANK" not in os.environ and os.environ.keys() >= {"MASTER_ADDR", "JOB_COMPLETION_INDEX"}:
                said = "MASTER_ADDR and JOB_COMPLETION_INDEX are set, but RANK and WORLD_SIZE are not: set them"
                raise SettingsError(f"{said} for one run of all pods, or RANK=0 and WORLD_SIZE=1 for a run of each")
            return
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        if dist.is_initialized():
            return
        if "?" in self.rendezvous:
            raise SettingsError(f"where the {self.size} ranks meet is not known: {_START}")
        if gpu is not None:
            os.environ.setdefault(DUMP, "1")
        where = f"tcp://{self.address}" if self.address else "env://"
        try:
            store, _, _ = next(rendezvous(where, self.rank, self.size, timeout=timeout))
            store.set_timeout(timeout)
            word = meet(store, self.rank, self.size, timeout)
            attempt = dist.PrefixStore(word, store)  # type: ignore[attr-defined]
            # With `device_id`, NCCL connects the GPUs here and not in the first exchange.
            with self.connecting():
                dist.init_process_group(
                    backend, store=attempt, timeout=timeout, rank=self.rank, world_size=self.size, device_id=gpu
                )
        except (RuntimeError, ValueError, TimeoutError) as error:  # ValueError: no MASTER_ADDR
            if isinstance(error, dist.DistBackendError) and gpu is not None:
                raise SettingsError(
                    f"NCCL cannot connect {self.device} of rank {self.rank} with the other GPUs: check that each rank "
                    f"has its own GPU (LOCAL_RANK); NCCL_DEBUG=WARN shows details ({str(error).splitlines()[-1]})"
                ) from error
            raise SettingsError(
                f"the {self.size} ranks did not connect at {self.rendezvous} (--run.timeout is "
                f"{timeout.total_seconds():g} s): check that all are started; MASTER_ADDR and MASTER_PORT set another "
                f"address ({str(error).splitlines()[0]})"
            ) from error

    @property
    def rendezvous(self) -> str:
        """'HOST:PORT' of the rendezvous, for messages."""
        return self.address or ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """Record the connections of the process groups that are made within, for `abort`."""
        before = open_sockets()
        _aborted.clear()
        yield
        _connections.update(connections_since(before))

    def abort(self) -> None:
        """Let every collective in progress raise, here and on the other ranks; from any thread, also more than once.

        The groups cannot be used afterwards. With nccl, a wait for the GPU returns, and the next collective raises.
        Connections of gloo are shut down: its own `abort` (torch 2.15) leaves a thread that waits, or is about to,
        waiting until its timeout.
        """
        if self.size == 1:
            return
        import torch
        from torch.distributed import distributed_c10d

        for group in list(distributed_c10d._world.pg_map):
            # Its destructor would wait for threads that gloo does not wake (see `complete`).
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            if self.device.startswith("cuda"):
                with contextlib.suppress(RuntimeError):  # a group without nccl
                    backend = group._get_backend(torch.device(self.device))
                    # In a thread: aborting one nccl communicator may wait for another one (pytorch's issue 119797).
                    threading.Thread(target=backend.abort, name="abort", daemon=True).start()
        _aborted.set()
        for connection in list(_connections):
            with contextlib.suppress(OSError), connection.duplicate() as opened:
                if not opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # else gloo aborts the process
                    opened.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """Destroy the process group, if there is one."""
        if self.size > 1:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()

    def barrier(self) -> None:
        self.gather_objects(None)

    def arrive(self, name: str) -> None:
        """Wait until every rank calls this with the same `name`, once; unlike in a collective, for any time."""
        if self.size == 1:
            return
        from torch.distributed import distributed_c10d

        store = distributed_c10d._get_default_store()
        store.set(f"clipstream/arrived/{name}/{self.rank}", "")
        keys = [f"clipstream/arrived/{name}/{rank}" for rank in range(self.size)]
        while not store.check(keys):
            time.sleep(LONGEST)

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value` (picklable, small), in rank order, on every rank."""
        if self.size == 1:
            return [value]
        import torch

        message = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self._message_device)
        counts = self.gather_counts(len(message))
        parts = torch.split(self.gather_rows(message, counts).cpu(), list(counts))
        return [pickle.loads(part.numpy().data) for part in parts]

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's `value` on every rank."""
        if self.size == 1:
            return value
        import torch
        import torch.distributed as dist

        content = bytearray(pickle.dumps(value) if self.is_main else b"")
        count = self.gather_counts(len(content))[0]
        message = torch.frombuffer(content or bytearray(count), dtype=torch.uint8).to(self._message_device)
        complete(dist.broadcast(message, src=0, async_op=True), message)
        return value if self.is_main else pickle.loads(message.cpu().numpy().data)

    def on_main(self, function: Callable[[], Any]) -> Any:
        """Call `function` on rank 0 alone, and return its result on every rank; it may take hours.

        It runs in a thread, while the ranks exchange a message every few seconds: if the others waited in one
        collective, it would time out.
        """
        if self.size == 1:
            return function()
        outcome: Future[Any] = Future()

        def run() -> None:
            try:
                outcome.set_result(function())
            except BaseException as error:
                outcome.set_exception(error)

        if self.is_main:
            threading.Thread(target=run, daemon=True).start()
        while True:
            done = self.is_main and bool(wait([outcome], POLL).done)
            result = self.broadcast_object((outcome.result(),) if done else None)
            if result is not None:
                return result[0]

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, whether any rank has set it. Collective, on the CPU, without a synchronization of the GPU."""
        if self.size == 1:
            return list(flags)
        import torch

        return [bool(count) for count in self.all_reduce_sum(torch.tensor(flags, dtype=torch.int32)).tolist()]

    def gather_counts(self, count: int) -> tuple[int, ...]:
        """Every rank's `count`, in rank order; no GPU waits for it if the process group has gloo."""
        if self.size == 1:
            return (count,)
        import torch

        counts = torch.zeros(self.size, dtype=torch.int64, device=self._message_device)
        counts[self.rank] = count
        return tuple(self.all_reduce_sum(counts).tolist())

    @property
    def _message_device(self) -> str:
        """The CPU if the process group has gloo."""
        import torch.distributed as dist

        return "cpu" if self.device == "cpu" or "cpu:" in dist.get_backend_config() else self.device

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over the ranks, in place, and return it."""
        if self.size > 1:
            import torch.distributed as dist

            complete(dist.all_reduce(tensor, async_op=True), tensor)
        return tensor

    def gather_rows(self, tensor: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        """Concatenate every rank's rows [n_r, ...] in rank order, without gradient; n_r may differ by rank.

        Args:
            counts: n_r of each rank, if known; gathered otherwise.
        """
        if self.size == 1:
            return tensor
        import torch
        import torch.distributed as dist

        counts = self.gather_objects(tensor.shape[0]) if counts is None else counts
        longest, mine = max(counts), tensor.contiguous()
        if tensor.shape[0] < longest:
            mine = tensor.new_zeros((longest, *tensor.shape[1:]))
            mine[: tensor.shape[0]] = tensor
        found = mine.new_empty((self.size * longest, *tensor.shape[1:]))
        complete(dist.all_gather_into_tensor(found, mine, async_op=True), mine)
        if min(counts) == longest:
            return found
        parts = found.view(self.size, longest, *tensor.shape[1:])
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def complete(work: Any, tensor: torch.Tensor) -> None:
    """Wait until an exchange of `tensor`, whose work torch has returned, is complete.

    Where a connection breaks in the moment of a send, gloo does not wake the one who waits for it (`signalException` of
    its `tcp/pair.cc`), until `run.timeout`. So this looks whether the groups were aborted.

    Raises RuntimeError: a connection broke.
    """
    if tensor.device.type != "cpu":  # a wait with a time limit would block the host
        work.wait()
        return
    while True:
        try:
            work.wait(timedelta(seconds=POLL_WAIT))
            return
        except RuntimeError as error:
            if "Operation timed out" not in str(error):
                raise
            if _aborted.is_set():
                raise RuntimeError("Connection closed by peer, or by this rank") from error


def resolve_device(wanted: str) -> str:
    """Resolve 'auto': a GPU if torch sees one. Raises SettingsError: a GPU is wanted, and torch sees none."""
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise SettingsError(f"device {wanted!r}: no GPU is available to torch: use cpu, or check nvidia-smi")
    return wanted


def mpi_world(env: Mapping[str, str], launchers: Mapping[str, Sequence[str]]) -> World | None:
    """The world that the variables of one of the launchers describe, on the CPU; None if none is set.

    MPI names no address: MASTER_ADDR and MASTER_PORT do. On a single node, the port follows from the job, the working
    directory and the command line.

    Raises SettingsError: the number of ranks is missing, or a variable is not a number.
    """
    row = next((names for mark, names in launchers.items() if mark in env), None)
    if row is None:
        return None
    for name in row[:2]:
        if name not in env:
            raise SettingsError(f"{name} is not set in the environment, as by mpirun: {_START}")
    rank, size, local_rank, local_size = _numbers(env, row)
    if size == 1:
        return World()
    host = env.get("MASTER_ADDR") or ("127.0.0.1" if row[3] in env and local_size == size else "")
    job = crc32(repr([*(env.get(name) for name in _JOBS), os.getcwd(), sys.argv]).encode(errors="replace"))
    port = env.get("MASTER_PORT") or FIRST_PORT + job % PORTS
    return World(rank, size, local_rank, local_size, address=f"{host}:{port}" if host else "")


def _numbers(env: Mapping[str, str], row: Sequence[str]) -> tuple[int, int, int, int]:
    """The values of a launcher's four variables, of which the last two may be missing.

    Without them, the ranks of the node of MASTER_ADDR count as the first ones, and another node has one rank.

    Raises SettingsError: one is not a number.
    """
    rank, size = (_number(env, name) for name in row[:2])
    here = row[2] in env or _is_here(env.get("MASTER_ADDR", "127.0.0.1"))
    local_rank, local_size = (rank, size) if here else (0, 1)
    return rank, size, _number(env, row[2], default=local_rank), _number(env, row[3], default=local_size)


@cache
def _is_here(host: str) -> bool:
    """Whether a host is this machine: whether one of its addresses can be bound."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as bound:
                bound.bind(address)
                return True
    return False


def slurm_world(env: Mapping[str, str]) -> World | None:
    """The world that Slurm's variables describe, on the CPU; None outside of Slurm and for a step with one task.

    srun sets the variables of its step (`SLURM_STEP_…`) in every task; if one is missing, that of the job is used.
    MASTER_ADDR and MASTER_PORT override the address derived from the list of nodes and the job's number.

    Raises SettingsError: a variable is not what Slurm sets.
    """
    if "SLURM_PROCID" not in env:
        return None
    size = _number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=1)
    if size == 1:
        return None
    rank, local_rank = _number(env, "SLURM_PROCID"), _number(env, "SLURM_LOCALID")
    nodes = next((env[name] for name in _NODES if env.get(name)), "")
    # Tasks of this node, from '2(x3),1': two on each of three nodes, one on the fourth.
    node = _number(env, "SLURM_NODEID", default=0)
    node_count = _number(env, "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", default=1)
    per_node = next((env[name] for name in _PER_NODE if env.get(name)), "")
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node)
    counts = [int(count) for count, times in pairs for _ in range(int(times or 1))]
    # The job's own list may describe more tasks than the step has.
    local_size = counts[node] if sum(counts) == size and node < len(counts) else -(-size // node_count)
    host = env.get("MASTER_ADDR") or (first_node(nodes) if local_size < size else "127.0.0.1")
    if not host:
        raise SettingsError("SLURM_JOB_NODELIST is not set: set MASTER_ADDR to the first node")
    job = _number(env, "SLURM_JOB_ID", "SLURM_JOBID", default=0)
    step = _number(env, "SLURM_STEP_ID", default=0)
    # Differs between steps and jobs, which may share a node.
    port = env.get("MASTER_PORT") or FIRST_PORT + (8 * job + step % 8) % PORTS
    return World(rank, size, local_rank, local_size, address=f"{host}:{port}")


def first_node(nodes: str) -> str:
    """The first node of a Slurm list: 'gpu003' of 'gpu[003-005,9],login1'; '' of an empty list."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\]]*)\]", lambda found: re.split("[-,]", found[1])[0], first[0] if first else "")


def _number(env: Mapping[str, str], *names: str, default: int | None = None) -> int:
    for name in names:
        if env.get(name):
            try:
                return int(env[name])
            except ValueError:
                raise SettingsError(f"invalid {name} {env[name]!r}: unset it") from None
    if default is None:
        raise SettingsError(f"Slurm's {names[0]} is missing: start the run with srun, or unset SLURM_PROCID")
    return default


def meet(store: Any, rank: int, size: int, timeout: timedelta) -> str:
    """A random word for this attempt of the run, the same on all ranks; every rank calls this.

    The store may hold keys of an earlier attempt, so each rank sends a random number, and rank 0 answers with that
    number and the word.

    Raises TimeoutError: some ranks did not arrive.
    """
    if rank > 0:
        mine = secrets.token_hex(8)
        store.set(_NUMBER.format(rank), mine)
        for _ in _looks(timeout.total_seconds()):
            if store.check([_ANSWER.format(rank)]):
                answer: str = store.get(_ANSWER.format(rank)).decode()
                number, _, word = answer.partition(" ")
                if number == mine:
                    store.add(_ARRIVED.format(word), 1)
                    return word
        raise TimeoutError("rank 0 did not answer")
    word = secrets.token_hex(8)
    answered: dict[int, bytes] = {}
    for _ in _looks(timeout.total_seconds()):
        for other in range(1, size):
            key = _NUMBER.format(other)
            if store.check([key]) and (sent := store.get(key)) != answered.get(other):
                answered[other] = sent
                store.set(_ANSWER.format(other), f"{sent.decode()} {word}")
        if store.add(_ARRIVED.format(word), 0) == size - 1:
            return word
    missing = size - 1 - store.add(_ARRIVED.format(word), 0)
    raise TimeoutError(f"{missing} of {size - 1} other ranks did not arrive")


def _looks(timeout: float) -> Iterator[None]:
    """Yield at once, and then after waits that grow, until the timeout in seconds."""
    end, wait = time.monotonic() + timeout, SHORTEST
    while True:
        yield
        if time.monotonic() > end:
            return
        time.sleep(wait)
        wait = min(2 * wait, LONGEST)


@dataclass(frozen=True)
class Failure:
    """An error on one rank: its message for users, and the class of error that has the right exit code."""

    rank: int
    message: str
    kind: type[ClipstreamError] = ClipstreamError

    @classmethod
    def of(cls, error: Exception, rank: int) -> Failure:
        if isinstance(error, ClipstreamError):
            return cls(rank, str(error), type(error))
        return cls(rank, f"{type(error).__name__}: {error}")


class RankFailed(Exception):
    """Some rank sent a failure; raised on all of them."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Torn(RuntimeError):
    """A collective itself failed: the ranks can no longer agree. Its cause is the collective's error."""


class AgreeingWorld(World):
    """A world whose collectives raise `RankFailed` on all ranks if a rank sent a failure instead of taking part.

    A rank that fails on its own cannot reach the others, which wait for it in some collective. A status is therefore
    exchanged before each collective: the rank that failed sends its failure there, once, and all ranks raise it.
    """

    @property
    def _plain(self) -> World:
        return World.of(self)

    def exchange(self, failure: Failure | None = None) -> None:
        """Exchange this rank's status with the others. Collective; any other collective matches it.

        Raises RankFailed: some rank failed; has the failure of the first one.
        """
        try:
            statuses = self._plain.gather_objects(failure)
        except Exception as error:
            raise Torn(str(error)) from error
        if failures := [status for status in statuses if status is not None]:
            raise RankFailed(failures[0])

    def _run(self, collective: Callable[..., T], *args: Any) -> T:
        if self.size == 1:
            return collective(*args)
        self.exchange()
        try:
            return collective(*args)
        except Exception as error:
            raise error if isinstance(error, Torn) else Torn(str(error)) from error

    def gather_objects(self, value: Any) -> list[Any]:
        return self._run(self._plain.gather_objects, value)

    def broadcast_object(self, value: Any) -> Any:
        return self._run(self._plain.broadcast_object, value)

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._run(self._plain.all_reduce_sum, tensor)

    def gather_rows(self, tensor: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        return self._run(self._plain.gather_rows, tensor, counts)

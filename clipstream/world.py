"""Owns World: which rank this process is, on which device. The only reader of RANK, WORLD_SIZE, LOCAL_RANK and Slurm's.

A World is passed as an argument, so that a test can play many ranks in one process. It imports torch only where it
talks to other ranks. With one rank every collective is the identity, and no process group exists.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from clipstream import slurm
from clipstream.errors import SettingsError
from clipstream.meeting import meet

if TYPE_CHECKING:
    import torch

MEET = 5.0  # s between two meetings of ranks that wait for rank 0


@dataclass(frozen=True)
class World:
    """One process among `size`.

    Attributes:
        rank: 0 to size - 1.
        size: number of processes of the run.
        local_rank: rank among the processes of this node.
        local_size: processes of this node.
        device: torch's name of this rank's device: 'cpu' or 'cuda:N'.
        address: 'HOST:PORT' where the ranks meet; '' where MASTER_ADDR and MASTER_PORT say it.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: str = "cpu"
    address: str = ""

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks to the user and writes the run's files."""
        return self.rank == 0

    @classmethod
    def from_env(cls, device: str = "cpu", env: Mapping[str, str] | None = None) -> World:
        """The world that torchrun's variables describe, or srun's; a single process without them.

        Args:
            device: 'cpu' or 'cuda' ('cuda' becomes this node's GPU number `local_rank`, or the only one that srun
                shows to it), or 'cuda:N' with one rank.

        Raises:
            SettingsError: the variables are incomplete or not numbers.
        """
        env = os.environ if env is None else env
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        given = {name: env[name] for name in names if name in env}
        if "RANK" not in given and "WORLD_SIZE" not in given:
            task = slurm.task_of(env)
            if task is None:
                return cls(device=_numbered(device, 0))
            alone = len(env.get("CUDA_VISIBLE_DEVICES", ",").split(",")) == 1  # srun --gpus-per-task 1
            device = _numbered(device, 0 if alone else task.local_rank)
            return cls(task.rank, task.size, task.local_rank, task.local_size, device, task.address)
        try:
            rank, size = int(given["RANK"]), int(given["WORLD_SIZE"])
            local_rank = int(given.get("LOCAL_RANK", given["RANK"]))
            local_size = int(given.get("LOCAL_WORLD_SIZE", given["WORLD_SIZE"]))
        except (KeyError, ValueError) as error:
            raise SettingsError(
                f"the environment has {given}, which is not what a launcher sets: start the run with torchrun, "
                "or unset RANK and WORLD_SIZE"
            ) from error
        return cls(rank, size, local_rank, local_size, _numbered(device, local_rank))

    def start(self, timeout: timedelta = timedelta(minutes=30)) -> None:
        """Make the process group (nccl with gloo beside it on CUDA, gloo on the CPU); nothing with one rank.

        Args:
            timeout: after which a rank no longer waits for the others, here and in every collective.

        Raises:
            SettingsError: the ranks did not come together.
        """
        if self.size == 1:
            return
        import torch
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        backend = "gloo"
        if self.device.startswith("cuda"):
            torch.cuda.set_device(self.device)
            backend = "cpu:gloo,cuda:nccl"
        where = f"tcp://{self.address}" if self.address else "env://"
        try:
            store, _, _ = next(rendezvous(where, self.rank, self.size, timeout=timeout))
            store.set_timeout(timeout)
            word = meet(store, self.rank, self.size, timeout)
            attempt = dist.PrefixStore(word, store)  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=attempt, timeout=timeout, rank=self.rank, world_size=self.size)
        except (RuntimeError, ValueError, TimeoutError) as error:  # ValueError: no MASTER_ADDR
            raise SettingsError(
                f"the {self.size} ranks did not come together at {self.meeting_point} (--run.timeout is "
                f"{timeout.total_seconds():g} s): are all of them started? MASTER_ADDR and MASTER_PORT name another "
                f"place ({str(error).splitlines()[0]})"
            ) from error

    @property
    def meeting_point(self) -> str:
        """'HOST:PORT' where the ranks meet, for messages."""
        return self.address or ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))

    def stop(self) -> None:
        """Take the process group down, if there is one."""
        if self.size > 1:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.gather_objects(None)

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value` (picklable, small), in rank order, on every rank."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's `value` on every rank."""
        if self.size == 1:
            return value
        import torch
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def on_main(self, function: Callable[[], Any]) -> Any:
        """What `function` gives on rank 0, on every rank. It is called there alone, and may take hours.

        It has a thread of its own, while the ranks meet every few seconds: a collective in which the others waited for
        it would run into its time limit.
        """
        if self.size == 1:
            return function()
        outcome: Future[Any] = Future()
        if self.is_main:
            threading.Thread(target=_settle, args=(outcome, function), daemon=True).start()
        while (told := self.broadcast_object(_result(outcome) if self.is_main else None)) is None:
            pass
        return told[0]

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over the ranks, in place, and return it."""
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor)
        return tensor

    def gather_rows(self, tensor: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        """Concatenate every rank's rows [n_r, ...] in rank order, without gradient; n_r may differ by rank.

        Args:
            counts: n_r of each rank, where the caller knows them: they are asked for otherwise.
        """
        if self.size == 1:
            return tensor
        import torch
        import torch.distributed as dist

        counts = self.gather_objects(tensor.shape[0]) if counts is None else counts
        longest = max(counts)
        padded = tensor.new_zeros((longest, *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def _numbered(device: str, gpu: int) -> str:
    return f"cuda:{gpu}" if device == "cuda" else device


def _settle(outcome: Future[Any], function: Callable[[], Any]) -> None:
    try:
        outcome.set_result(function())
    except BaseException as error:
        outcome.set_exception(error)


def _result(outcome: Future[Any]) -> tuple[Any] | None:
    """What came out, or None if there is nothing yet after a while. Raises what the function raised."""
    wait([outcome], MEET)
    return (outcome.result(),) if outcome.done() else None

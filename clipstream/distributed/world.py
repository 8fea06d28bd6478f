"""The rank of this process, its device, and the collectives of a run.

The variables of torchrun or Slurm enter, which are read nowhere else. A `World` is passed as an argument, so that tests
can run many ranks in one process. torch is imported only to talk to other ranks: with one rank, every collective is the
identity and there is no process group.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from clipstream.distributed import rendezvous as slurm
from clipstream.distributed.rendezvous import meet, step_store
from clipstream.errors import SettingsError

if TYPE_CHECKING:
    import torch

POLL = 5.0  # s between two broadcasts to ranks that wait for rank 0


@dataclass(frozen=True)
class World:
    """One process among `size`.

    Attributes:
        rank: 0 to size - 1.
        size: number of processes of the run.
        local_rank: rank among the processes of this node.
        local_size: processes of this node.
        device: torch's name of this rank's device: 'cpu' or 'cuda:N'.
        address: 'HOST:PORT' of the rendezvous; '' if MASTER_ADDR and MASTER_PORT name it.
        step: Slurm's step, whose ranks meet on the first free port from `address` on; '' if the port is fixed.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: str = "cpu"
    address: str = ""
    step: str = ""

    @property
    def is_main(self) -> bool:
        """Whether this rank prints to the user and writes the run's files."""
        return self.rank == 0

    @classmethod
    def from_env(cls, device: str = "cpu", env: Mapping[str, str] | None = None) -> World:
        """The world that the variables of torchrun or srun describe; a single process without them.

        Args:
            device: 'cpu', 'cuda' (GPU `local_rank` of this node, or the only one that srun shows to the task), or
                'cuda:N' with one rank.

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
            return cls(device=device, **task._asdict())
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
            timeout: how long a rank waits for the others, here and in every collective.

        Raises:
            SettingsError: some ranks did not arrive.
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
            if self.step:
                store = step_store(self.address, self.step, self.rank, timeout)
            else:
                store, _, _ = next(rendezvous(where, self.rank, self.size, timeout=timeout))
                store.set_timeout(timeout)
            word = meet(store, self.rank, self.size, timeout)
            attempt = dist.PrefixStore(word, store)  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=attempt, timeout=timeout, rank=self.rank, world_size=self.size)
        except (RuntimeError, ValueError, TimeoutError) as error:  # ValueError: no MASTER_ADDR
            raise SettingsError(
                f"the {self.size} ranks did not connect at {self.rendezvous} (--run.timeout is "
                f"{timeout.total_seconds():g} s): are all of them started? MASTER_ADDR and MASTER_PORT name another "
                f"address ({str(error).splitlines()[0]})"
            ) from error

    @property
    def rendezvous(self) -> str:
        """'HOST:PORT' of the rendezvous, for messages."""
        return self.address or ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))

    def stop(self) -> None:
        """Destroy the process group, if there is one."""
        if self.size > 1:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()

    def barrier(self) -> None:
        """Wait until every rank calls this."""
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

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over the ranks, in place, and return it."""
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor)
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
        longest = max(counts)
        padded = tensor.new_zeros((longest, *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def _numbered(device: str, gpu: int) -> str:
    return f"cuda:{gpu}" if device == "cuda" else device

"""The parts of torch.cuda that copy batches, on a CPU."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from clipstream.data.batch import Batch
from clipstream.data.loader.batch_buffers import HostBatches

SECONDS = 0.03  # that a copy takes


class SlowCopies(HostBatches):
    """As a GPU's: it reads the buffer some time after it was told to, beside what the process does meanwhile."""

    ahead = True

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[int, threading.Thread] = {}
        self.early = 0  # batches that were begun before they were asked for
        self.asked_for = 0

    def start(self, batch: Batch) -> Batch:
        self.early += batch.step >= self.asked_for
        moved = batch.clone()
        for tensor in moved.tensors():
            tensor.fill_(7)

        def copy() -> None:
            time.sleep(SECONDS)
            for target, tensor in zip(moved.tensors(), batch.tensors(), strict=True):
                target.copy_(tensor)

        self.copies[batch.step] = threading.Thread(target=copy)
        self.copies[batch.step].start()
        return moved

    def finish(self, batch: Batch) -> Batch:
        self.asked_for = batch.step + 1  # the process does not wait for the copy
        return batch

    def reading(self, step: int, wait: bool = False) -> bool:
        copy = self.copies.get(step)
        if copy is None:
            return False
        if wait:
            copy.join()
        return copy.is_alive()


class FakeCuda:
    """CUDA as `CudaPrefetch` calls it, whose copies are `SlowCopies`; events end with them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> None:
        self.code, self.error, self.copies, self.guards = code, 0, SlowCopies(), list[torch.device]()
        self.registered: dict[int, int] = {}  # address -> flags
        self.calls: list[tuple[str, str, int]] = []  # function, the current device, children of the process
        self.stuck = threading.Event()
        for name in ("Stream", "current_stream", "stream", "cudart"):
            monkeypatch.setattr(torch.cuda, name, contextlib.nullcontext if name == "stream" else lambda *_: self)
        monkeypatch.setattr(torch.cuda, "device", self._guard)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch, "ones", self._launch)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
        monkeypatch.setattr(Batch, "to", lambda batch, device: self.copies.start(batch))

    @contextlib.contextmanager
    def _guard(self, device: torch.device) -> Iterator[None]:
        self.guards.append(device)
        yield
        self.guards.pop()

    def _call(self, name: str) -> None:
        self.calls.append((name, str(*self.guards), len(multiprocessing.active_children())))

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self._call("register")
        self.error = self.code
        if self.code == 0:
            self.registered[address] = flags
        return self.code

    def cudaGetErrorString(self, code: int) -> str:
        return {801: "operation not supported"}[code]

    def cudaHostUnregister(self, address: int) -> int:
        self._call("unregister")
        self.stuck.wait()
        del self.registered[address]
        return 0

    def _launch(self, *_: object, device: torch.device) -> None:
        error, self.error = self.error, 0
        if error:
            raise RuntimeError("CUDA error: operation not supported")

    def record_event(self) -> Any:
        return Event(list(self.copies.copies.values())[-1])

    def wait_stream(self, stream: Any) -> None:
        """The step waits for the copies; here, the test does."""

    def synchronize(self, device: object = None) -> None:
        for copy in self.copies.copies.values():
            copy.join()


class Event:
    def __init__(self, copy: threading.Thread) -> None:
        self.synchronize = copy.join
        self.query = lambda: not copy.is_alive()

"""Owns copies of a run's tensors in memory, taken between two steps and written while the next ones run.

Memory is asked for at the first copy and used again by the later ones: as much as the files of a checkpoint take. It
writes nothing, and decides on nothing.

**On a GPU** weights and moments are copied on a stream of their own, while the next step computes: forward and backward
passes only read them, and the optimiser's next update waits until they are copied. What else is copied (batch norm's
statistics, averages, gathered shards) might be written to before that, and goes in order with the computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from clipstream.training.sharding import full_tensor
from clipstream.training.tensors import TensorFile

Tensors = Mapping[str, torch.Tensor]


class Snapshot:
    """Files' contents, copied from tensors.

    Args:
        device: of this rank.
        optimizer: whose parameters and moments nobody else changes.
        kept: whether this rank wants the copies; others only help where tensors are sharded.

    Attributes:
        files: what was copied last, by the file's name.
    """

    def __init__(self, device: str, optimizer: torch.optim.Optimizer, *, kept: bool) -> None:
        self.files: dict[str, TensorFile] = {}
        self._device, self._optimizer, self._kept = device, optimizer, kept
        self._stream: Any = None
        self._copied: list[Any] = []  # events: what is to be waited for
        if kept and device.startswith("cuda"):
            stream: Any = torch.cuda.Stream  # untyped in torch
            self._stream = stream(device)
            optimizer.register_step_pre_hook(lambda *_: self._hold_back())

    def take(self, files: Mapping[str, Tensors]) -> None:
        """Copy the tensors of files; what was copied before is lost. Collective where tensors are sharded."""
        if self._kept:
            self._make_room(files)
        quiet = self._changed_by_steps_only() if self._stream is not None else frozenset()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.no_grad():
            for name, tensors in files.items():
                for key, tensor in tensors.items():
                    whole = full_tensor(tensor)
                    if self._kept:
                        aside = whole is tensor and tensor.data_ptr() in quiet
                        self._copy(self.files[name].places[key], whole, aside=aside)
        if self._stream is not None:
            self._copied = [self._stream.record_event(), torch.cuda.current_stream(self._device).record_event()]

    def wait(self) -> None:
        """Wait until everything is copied; from any thread."""
        for event in self._copied:
            event.synchronize()

    def _copy(self, place: torch.Tensor, tensor: torch.Tensor, *, aside: bool) -> None:
        if aside:
            with torch.cuda.stream(self._stream):
                place.copy_(tensor, non_blocking=True)
        else:
            place.copy_(tensor, non_blocking=self._stream is not None)

    def _make_room(self, files: Mapping[str, Tensors]) -> None:
        for name in [name for name in self.files if name not in files or not self.files[name].fits(files[name])]:
            del self.files[name]
        for name, tensors in files.items():
            if name not in self.files:
                self.files[name] = TensorFile(tensors, pin=self._stream is not None)

    def _changed_by_steps_only(self) -> frozenset[int]:
        """Addresses of what only the optimiser's update writes to."""
        parameters = (p for group in self._optimizer.param_groups for p in group["params"])
        moments = (v for state in self._optimizer.state.values() for v in state.values() if torch.is_tensor(v))
        whole = (tensor for tensor in (*parameters, *moments) if tensor.is_cuda and not isinstance(tensor, DTensor))
        return frozenset(tensor.data_ptr() for tensor in whole)

    def _hold_back(self) -> None:
        """Before the optimiser's update: let the GPU finish copying first. This thread goes on at once."""
        for event in self._copied:
            torch.cuda.current_stream(self._device).wait_event(event)

"""Page-locked host memory, from and to which GPUs copy asynchronously."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch

PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all GPUs of the process
# Address -> memory that CUDA has page-locked. It stays mapped: a copy from a later map there would read the old pages.
_locked: dict[int, torch.Tensor] = {}


def page_lock(memory: torch.Tensor, device: str | torch.device) -> str:
    """Page-lock memory, which then lives until `page_unlock`; returns why CUDA cannot, or '' if it did."""
    cuda: Any = torch.cuda  # untyped in torch
    with cuda.device(device):
        error = cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE)
        if int(error) == 0:
            _locked[memory.data_ptr()] = memory
            return ""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)  # the launch raises, and clears, the error that CUDA keeps
        return str(cuda.cudart().cudaGetErrorString(error))


def page_unlock(address: int, device: str | torch.device, seconds: float = 0.0) -> None:
    """Unlock and free memory in a thread, because CUDA waits for the GPU, where a kernel may hang.

    Args:
        seconds: time to wait for the thread. Memory that CUDA does not release stays mapped.
    """

    def unlock() -> None:
        cuda: Any = torch.cuda
        # A new thread's device is GPU 0, on which each rank would allocate. Errors of kernels are raised elsewhere.
        with contextlib.suppress(RuntimeError), cuda.device(device):
            cuda.synchronize(device)
            if int(cuda.cudart().cudaHostUnregister(address)) == 0:
                del _locked[address]

    thread = threading.Thread(target=unlock, daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread starts while Python ends
        thread.start()
        thread.join(seconds)

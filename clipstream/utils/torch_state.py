"""What torch has once for a process: how OpenMP's threads wait, the precision of float32 products, page-locked memory.

Threads that wait by spinning take the cores of the data workers, and then the threads with work wait for a core: some
steps on a CPU take ten times as long. It is fixed when torch is imported. The package is imported by way of this module
before signals are handled, so it imports nothing that takes time.

torch has two interfaces to the precision: `fp32_precision` of a backend, and the older `allow_tf32` and
`set_float32_matmul_precision`. Reading the older one raises where a program has set the newer one. Setting the older
one sets both, and `torch.compile` reads both (torch 2.11): read `fp32_precision`, and set by the older one.

GPUs copy asynchronously from and to page-locked host memory.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VARIABLE = "OMP_WAIT_POLICY"
_late = False
PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all GPUs of the process
# Address -> memory that CUDA has page-locked. It stays mapped: a copy from a later map there would read the old pages.
_locked: dict[int, torch.Tensor] = {}


def wait_passively() -> None:
    """Let the threads sleep while they wait, unless the environment says how; call it before torch is imported."""
    global _late
    if VARIABLE not in os.environ:
        _late = "torch" in sys.modules
        os.environ[VARIABLE] = "passive"


def spinning_notice(device: str, workers: int) -> str | None:
    """A notice, once, if torch's threads spin beside data workers where the model is on the CPU; else None.

    That is so where torch was imported before `wait_passively` was called, and uses several threads.
    """
    global _late
    if not _late or not workers or device.startswith("cuda") or sys.modules["torch"].get_num_threads() == 1:
        return None
    _late = False
    return (
        f"notice: torch was imported before clipstream, so that its waiting threads take the data workers' cores: "
        f"import clipstream first, or set {VARIABLE}=passive"
    )


@contextmanager
def restore_matmul_precision() -> Iterator[None]:
    """Restore, at the end of the context, what was changed in it."""
    import torch

    backends: Any = torch.backends  # without `mkldnn.matmul` for type checkers
    matmuls = backends.cuda.matmul, backends.mkldnn.matmul
    before, older = [matmul.fp32_precision for matmul in matmuls], "highest"  # torch's default
    with suppress(RuntimeError):  # the program has set `fp32_precision` alone
        older = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        if [matmul.fp32_precision for matmul in matmuls] != before:
            torch.set_float32_matmul_precision(older)
            for matmul, precision in zip(matmuls, before, strict=True):
                matmul.fp32_precision = "none"  # what `torch.backends.fp32_precision` says
                if matmul.fp32_precision != precision:
                    matmul.fp32_precision = precision


def page_lock(memory: torch.Tensor, device: str | torch.device) -> str:
    """Page-lock memory, which then lives until `page_unlock`; returns why CUDA cannot, or '' if it did."""
    import torch

    cuda: Any = torch.cuda  # untyped in torch
    with cuda.device(device):
        error = cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE)
        if int(error) == 0:
            _locked[memory.data_ptr()] = memory
            return ""
        with suppress(RuntimeError):
            torch.ones(1, device=device)  # the launch raises, and clears, the error that CUDA keeps
        return str(cuda.cudart().cudaGetErrorString(error))


def page_unlock(address: int, device: str | torch.device, seconds: float = 0.0) -> None:
    """Unlock and free memory in a thread, because CUDA waits for the GPU, where a kernel may hang. It is waited for so
    many seconds; memory that CUDA does not release stays mapped.
    """
    cuda: Any = sys.modules["torch"].cuda

    def unlock() -> None:
        # A new thread's device is GPU 0, on which each rank would allocate. Errors of kernels are raised elsewhere.
        with suppress(RuntimeError), cuda.device(device):
            cuda.synchronize(device)
            if int(cuda.cudart().cudaHostUnregister(address)) == 0:
                del _locked[address]

    thread = threading.Thread(target=unlock, daemon=True)
    with suppress(RuntimeError):  # no thread starts while Python ends
        thread.start()
        thread.join(seconds)

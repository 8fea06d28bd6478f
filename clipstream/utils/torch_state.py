"""What torch has once for a process: how OpenMP's threads wait for work, and the precision of float32 products.

Threads that wait by spinning take the cores of the data workers, and then the threads with work wait for a core: some
steps on a CPU take ten times as long. It is fixed when torch is imported. The package is imported by way of this module
before signals are handled, so it imports nothing that takes time.

torch has two interfaces to the precision: `fp32_precision` of a backend, and the older `allow_tf32` and
`set_float32_matmul_precision`. Reading the older one raises where a program has set the newer one. Setting the older
one sets both, and `torch.compile` reads both (torch 2.11): read `fp32_precision`, and set by the older one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

VARIABLE = "OMP_WAIT_POLICY"
_late = False


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
def restored_matmul_precision() -> Iterator[None]:
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

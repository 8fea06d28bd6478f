"""torch's precision of float32 matrix products, in a process whose program may set it as well.

torch has two interfaces: `fp32_precision` of a backend, and the older `allow_tf32` and `set_float32_matmul_precision`.
Reading the older one raises where a program has set the newer one. Setting the older one sets both, and
`torch.compile` reads both (torch 2.11): read `fp32_precision`, and set by the older one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


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

"""Memory of tensors, real or fake."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Records the largest sum of the sizes of all tensors that are made inside and alive at once, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record the tensors that it returns."""
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                ref = StorageWeakRef(tensor.untyped_storage())
                self.alive[ref.cdata] = ref, tensor.untyped_storage().nbytes()
        self.alive = {key: value for key, value in self.alive.items() if not value[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return found

    def held(self) -> int:
        """The size of what was made inside and is still alive."""
        return sum(size for reference, size in self.alive.values() if not reference.expired())

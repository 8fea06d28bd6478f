"""Contrastive losses over the global batch and losses of distillation, exact for any number of ranks.

Features of a rank's batch enter; the loss and its gradients leave. `tiled` and `affinity` compute them without the
whole matrix of logits, `ring` passes rows from rank to rank, and `reference` is the same in a few lines, for tests.
`ClipLoss` and `SigLipLoss` are for training loops of one's own, and are called as open_clip's.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clipstream.losses.modules import ClipLoss as ClipLoss
    from clipstream.losses.modules import SigLipLoss as SigLipLoss

__all__ = ["ClipLoss", "SigLipLoss"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'clipstream.losses' has no attribute {name!r}")
    from clipstream.losses import modules  # imports torch

    return getattr(modules, name)

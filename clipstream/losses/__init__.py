"""Contrastive losses over the global batch and losses of distillation, exact for any number of ranks.

Features of a rank's batch enter; the loss and its gradients leave. `contrastive` and `distillation` compute them by
`tiled`, without the whole matrix of logits; `ring` passes rows from rank to rank. `ClipLoss` and `SigLipLoss` are
modules for custom training loops, called as open_clip's.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clipstream.losses.contrastive import ClipLoss as ClipLoss
    from clipstream.losses.contrastive import SigLipLoss as SigLipLoss

__all__ = ["ClipLoss", "SigLipLoss"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'clipstream.losses' has no attribute {name!r}")
    from clipstream.losses import contrastive  # imports torch

    return getattr(contrastive, name)

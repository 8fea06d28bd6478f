"""`ClipLoss` and `SigLipLoss` for training loops of one's own: features enter, the loss of the global batch leaves.

They are called as open_clip's are. The ranks are those of torch.distributed's default process group, if there is one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from clipstream.distributed.world import World
from clipstream.losses.contrastive import Kind, loss_share
from clipstream.models.towers import Features


class _GlobalLoss(nn.Module):
    """A loss of the global batch, whose gradients are right where the ranks' gradients are averaged."""

    kind: Kind

    def _loss(
        self,
        image_features: torch.Tensor,
        text_features: torch.Tensor,
        logit_scale: torch.Tensor | float,
        logit_bias: torch.Tensor | float | None,
    ) -> torch.Tensor:
        if image_features.ndim != 2 or image_features.shape != text_features.shape:
            shapes = f"{tuple(image_features.shape)} and {tuple(text_features.shape)}"
            raise ValueError(f"image_features and text_features are both [n, D], row i of both a pair, not {shapes}")
        world = World.of_group(str(image_features.device))
        scale = torch.as_tensor(logit_scale, device=image_features.device).sum()
        bias = None if logit_bias is None else torch.as_tensor(logit_bias, device=image_features.device).sum()
        features = Features(image_features, text_features, scale, bias)
        share = loss_share(self.kind, features, torch.ones_like(image_features[:, 0], dtype=torch.float32), world)
        if world.size == 1:
            return share
        scaled = share * world.size
        return world.all_reduce_sum(share.detach().clone()) + (scaled - scaled.detach())


class ClipLoss(_GlobalLoss):
    """CLIP's softmax loss over the global batch, exact on any number of ranks (arXiv:2103.00020, figure 3).

    Takes the place of `open_clip.loss.ClipLoss(local_loss=…, gather_with_grad=…, rank=…, world_size=…)`; there is
    nothing to set. Every rank calls it, each with as many pairs as it has. Texts are gathered on a GPU while they take
    less than 1 GiB, and else go round the ranks in a ring; logits exist a tile at a time, so that memory grows with the
    batch and not with its square. Call `backward` once.

    **What is averaged.** The loss that is returned is the mean over all pairs of all ranks, the same on each rank.
    `backward` gives gradients that are those of this mean when the ranks' gradients are averaged, as DDP and FSDP do.
    Where they are summed instead, divide the loss by the number of ranks.

    Examples:
        >>> import torch
        >>> from clipstream.losses import ClipLoss
        >>> features = torch.nn.functional.normalize(torch.eye(4, 8), dim=-1)
        >>> round(ClipLoss()(features, features, logit_scale=torch.tensor(100.0)).item(), 4)
        0.0
    """

    kind: Kind = "softmax"

    def forward(
        self,
        image_features: torch.Tensor,
        text_features: torch.Tensor,
        logit_scale: torch.Tensor | float,
        logit_bias: torch.Tensor | float | None = None,
        output_dict: bool = False,
    ) -> Any:
        """The loss, a scalar in float32 (float64 if the features are).

        Args:
            image_features: [n, D], rows of length 1, in any floating dtype; row i belongs to text i.
            text_features: [n, D], likewise.
            logit_scale: scalar, already exponentiated, as open_clip's model returns it.
            logit_bias: scalar that is added to the logits, if any.
            output_dict: return `{"contrastive_loss": loss}`.

        Raises ValueError: the features' shapes do not fit.
        """
        loss = self._loss(image_features, text_features, logit_scale, logit_bias)
        return {"contrastive_loss": loss} if output_dict else loss


class SigLipLoss(_GlobalLoss):
    """SigLIP's sigmoid loss over the global batch, exact on any number of ranks (arXiv:2303.15343, algorithm 1).

    Takes the place of `open_clip.loss.SigLipLoss(rank=…, world_size=…, dist_impl=…)`: the sum over all pairs of an
    image and a text of the global batch, divided by its number of samples. On several ranks open_clip's returns the
    part of each rank's images, whose mean is this loss. See `ClipLoss` on ranks, memory and what is averaged.

    Examples:
        >>> import torch
        >>> from clipstream.losses import SigLipLoss
        >>> features = torch.nn.functional.normalize(torch.eye(4, 8), dim=-1)
        >>> round(SigLipLoss()(features, features, torch.tensor(20.0), torch.tensor(-10.0)).item(), 4)
        0.0002
    """

    kind: Kind = "sigmoid"

    def forward(
        self,
        image_features: torch.Tensor,
        text_features: torch.Tensor,
        logit_scale: torch.Tensor | float,
        logit_bias: torch.Tensor | float,
        output_dict: bool = False,
    ) -> Any:
        """The loss, a scalar in float32 (float64 if the features are). Arguments are those of `ClipLoss.forward`.

        Raises ValueError: the features' shapes do not fit.
        """
        loss = self._loss(image_features, text_features, logit_scale, logit_bias)
        return {"contrastive_loss": loss} if output_dict else loss

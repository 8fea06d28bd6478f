"""Image features reduced to their first principal components, for short captions (Long-CLIP, arXiv:2403.15378).

With the weights w_i of the B samples over all ranks, W their sum, and x_i the features of image i:

    m = 1 / W sum_i w_i x_i,    C = 1 / W sum_i w_i (x_i - m)^T (x_i - m),    z_i = m + (x_i - m) P

P is the projector on the K eigenvectors of C of largest eigenvalue. Long-CLIP's code has the same of the samples of one
GPU (`PCA` in model/model_longclip.py, K = 32, by torch.linalg.svd), and likewise with gradient through all of it, m and
P included: nothing is detached, and z is not normalised. Here the components are those of the global batch, on any
number of ranks: m and C are summed over the ranks, D + 1 and D^2 numbers, and so are the gradients that reach them.

P is a smooth function of C as long as the eigenvalues number K and K + 1 differ, and its gradient needs differences of
kept eigenvalues and others alone:

    dL/dC = sym( sum_{a kept, b not} 2 (v_a^T sym(dL/dP) v_b) / (l_a - l_b) v_a v_b^T )

Pairs of equal eigenvalues add nothing: with at most K + 1 samples, z = x.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from clipstream.distributed.world import World

COMPONENTS = 32  # K


def coarse_images(images: torch.Tensor, weights: torch.Tensor, world: World) -> torch.Tensor:
    """z of this rank's images, [n, D] in at least float32, with gradient; collective, in the backward pass too.

    The gradient of an image is that of the loss of all ranks where the gradient with respect to z, which each rank
    gives for its own rows, is.

    Args:
        images: x, [n, D].
        weights: w of this rank's samples, [n]; with weight 0 a sample is absent.
    """
    with torch.autocast(images.device.type, enabled=False):
        dtype = torch.promote_types(images.dtype, torch.float32)
        found: torch.Tensor = _Coarse.apply(images.to(dtype), weights.to(dtype), world)
        return found


class _Coarse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: torch.Tensor, weights: torch.Tensor, world: World) -> torch.Tensor:
        sums = world.all_reduce_sum(torch.cat([weights.sum()[None], weights @ images]))
        total = sums[0].clamp_min(torch.finfo(sums.dtype).tiny)
        mean = sums[1:] / total
        centred = images - mean
        covariance = world.all_reduce_sum((weights[:, None] * centred).T @ centred) / total
        values, vectors = torch.linalg.eigh(covariance)  # ascending
        kept = vectors[:, -COMPONENTS:]
        ctx.save_for_backward(centred, weights / total, values, vectors)
        ctx.world = world
        found: torch.Tensor = centred @ kept @ kept.T + mean
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (g,) = gradients
        centred, shares, values, vectors = ctx.saved_tensors
        rest, kept = vectors[:, :-COMPONENTS], vectors[:, -COMPONENTS:]
        both = ctx.world.all_reduce_sum(torch.cat([centred.T @ g, g.sum(dim=0, keepdim=True)]))
        of_projector, of_sum = both[:-1], both[-1]
        gaps = values[-COMPONENTS:, None] - values[None, :-COMPONENTS]
        inner = kept.T @ (of_projector + of_projector.T) @ rest
        inner = torch.where(gaps > torch.finfo(values.dtype).eps * values[-1], inner / gaps, 0.0)
        half = kept @ inner @ rest.T
        of_mean = of_sum - of_sum @ kept @ kept.T
        # The covariance's 2 w_i (x_i - m) dL/dC; its derivative with respect to m is 0.
        found = g @ kept @ kept.T + shares[:, None] * (centred @ (half + half.T) + of_mean)
        return found, None, None

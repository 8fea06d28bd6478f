"""Batch norm over several ranks: statistics of the whole global batch, on CUDA and on the CPU.

On CUDA it is torch's SyncBatchNorm; torch has none for the CPU, where it is built here from sums over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from clipstream.distributed.world import World
from clipstream.errors import SettingsError

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def synchronize_batch_norm(module: nn.Module, world: World) -> None:
    """Make batch norm use statistics over all ranks, in place, so that features do not depend on their number.

    Raises:
        SettingsError: on the CPU, for a batch norm class other than torch's (some of timm's).
    """
    if world.size == 1:
        return
    if world.device.startswith("cuda"):
        nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
        return
    for name, part in list(module.named_modules()):
        if not isinstance(part, nn.modules.batchnorm._BatchNorm):
            continue
        if type(part) not in _KINDS:
            raise SettingsError(
                f"{type(part).__name__} ({name}) over several ranks needs CUDA: take one rank, or a model with "
                "torch's batch norm or without any (a ViT)"
            )
        parent, _, own = name.rpartition(".")
        setattr(module.get_submodule(parent), own, RankedBatchNorm.like(part))


class RankedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm (arXiv:1502.03167) with the mean and variance of the samples of all ranks.

    Takes and returns [n, C, ...]; n may differ between ranks. Each training pass sums C + 1 and then C numbers over the
    ranks, forward and backward, so all ranks have to take it.
    """

    @classmethod
    def like(cls, norm: nn.modules.batchnorm._BatchNorm) -> RankedBatchNorm:
        """A copy that shares the parameters and buffers of `norm`."""
        made = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        made.weight, made.bias = norm.weight, norm.bias
        made.running_mean, made.running_var = norm.running_mean, norm.running_var
        made.num_batches_tracked = norm.num_batches_tracked
        return made.train(norm.training)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Any number of dimensions from 2 on."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """See torch.nn.BatchNorm2d."""
        if not self.training:
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            x = input if input.dtype == torch.float64 else input.float()
            dims = [0, *range(2, x.ndim)]
            shape = [1, -1, *[1] * (x.ndim - 2)]
            count = x.new_full((1,), x.numel() // x.shape[1])
            sums = _sum_over_ranks(torch.cat([x.sum(dims), count]))
            total = sums[-1]
            mean = sums[:-1] / total
            centred = x - mean.view(shape)
            # Summed apart: the mean of squares minus the squared mean would lose most digits.
            variance = _sum_over_ranks(centred.square().sum(dims)) / total
            self._track(mean.detach(), variance.detach() * total / (total - 1))
            out = centred * (variance + self.eps).rsqrt().view(shape)
            if self.affine:
                out = out * self.weight.view(shape) + self.bias.view(shape)
        given: torch.Tensor = out.to(input.dtype)
        return given

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


class _Sum(torch.autograd.Function):
    """The sum over the ranks; its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        summed = tensor.clone()
        dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _Sum.forward(ctx, gradient)


def batch_statistics(module: nn.Module) -> list[torch.Tensor]:
    """The tensors that a training forward pass changes: running means, variances and their counts."""
    norms = [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    return [tensor for norm in norms for tensor in norm.buffers()]


def _sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    summed: torch.Tensor = _Sum.apply(tensor)
    return summed

"""Owns the contrastive losses over the global batch, exact for any number of ranks, and what a loss is.

Never owns the scale, the bias or a weight of a model (they come with the features), and never clips or steps anything.

**Shares.** With b_r of the B samples on rank r, every rank computes the part of the loss that belongs to its own rows:

    L = (1 / W) sum_i w_i l_i = sum_r L_r,    L_r = (1 / W) sum_(i on r) w_i l_i,    W = sum_i w_i over all ranks

`__call__` returns L_r. Features are gathered with gradient: the backward pass of the gathering sums over the ranks what
each L_r says about every sample, so that one backward() per rank leaves dL/d(own features). A scale, a bias or a weight
of a tower gets dL_r-like parts that sum to the gradient of L: the caller adds them up over ranks, or multiplies its
share by the number of ranks where DDP averages. Nothing assumes that ranks hold equally many samples.

**Weights.** w_i multiplies the loss l_i of sample i. Where w_i is 0, the sample is gone: it is no negative of others
either. All weights 0 give 0.

**Arithmetic.** Logits and their sums are float32 whatever the autocast, float64 where the features are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F

from clipstream.errors import SettingsError
from clipstream.model.settings import ClipLossSettings, LossSettings, SiglipLossSettings
from clipstream.plugins import load_plugin
from clipstream.world import World

if TYPE_CHECKING:
    from clipstream.model.towers import Features


class ContrastiveLoss(Protocol):
    """A loss over the global batch; users' own are constructed with their settings: `Name(settings)`.

    Attributes:
        max_logit_scale: upper limit of exp(logit_scale) that training keeps after every step; None for no limit.
    """

    max_logit_scale: float | None

    def __call__(self, features: Features, weights: torch.Tensor, world: World, global_size: int) -> torch.Tensor:
        """This rank's share of the loss, a scalar; the shares of all ranks sum to the loss of the global batch.

        Collective: every rank calls it, also with no rows of its own.

        Args:
            features: of this rank's n samples, and the scalars of the logits.
            weights: [n], 0 or more.
            world: this rank among the others.
            global_size: samples of the global batch, B.
        """


class ClipLoss:
    """Softmax over the rows and columns of the B x B logits (CLIP, arXiv:2103.00020, figure 3).

    With logits s_ij = scale * <x_i, y_j> (+ bias), over the samples j that are present:

        l_i = 1/2 (logsumexp_j s_ij - s_ii) + 1/2 (logsumexp_j s_ji - s_ii)

    A rank needs its rows of both directions: n x B logits of its images with all texts, and of its texts with all
    images. Memory: 4 n B floats with gradients, and 2 B D of gathered features. Communication: one all-gather of
    B (2 D + 1) numbers forward, one all-reduce of them backward. Arithmetic: 2 n B D multiply-adds forward, 1/N of the
    whole batch's.
    """

    def __init__(self, settings: ClipLossSettings) -> None:
        self.max_logit_scale = settings.max_logit_scale

    def __call__(self, features: Features, weights: torch.Tensor, world: World, global_size: int) -> torch.Tensor:
        """See ContrastiveLoss."""
        with torch.autocast(features.image.device.type, enabled=False):
            image, text, weights = _widen(features.image, features.text, weights)
            width = image.shape[1]
            rows, start = gather_rows(torch.cat([image, text, weights[:, None]], dim=1), world)
            images, texts, all_weights = rows[:, :width], rows[:, width:-1], rows[:, -1].detach()
            absent = (all_weights == 0)[None, :]
            own = torch.arange(start, start + image.shape[0], device=image.device)
            share = image.new_zeros(())
            for mine, others in ((image, texts), (text, images)):
                logits = _logits(features, mine, others)
                # The lowest number and not -inf: where all columns are absent, -inf has no gradient but nan.
                masked = logits.masked_fill(absent, torch.finfo(logits.dtype).min)
                losses = masked.logsumexp(dim=1) - logits.gather(1, own[:, None]).squeeze(1)
                share = share + (weights * losses).sum() / 2
            return share / _total(all_weights)


class SiglipLoss:
    """A sigmoid on every pair of the global batch (SigLIP, arXiv:2303.15343, algorithm 1).

    With logits s_ij = scale * <x_i, y_j> + bias, z_ij = 1 where i = j and -1 elsewhere, over the samples j present:

        l_i = 1/2 sum_j softplus(-z_ij s_ij) + 1/2 sum_j softplus(-z_ji s_ji)

    With all weights 1 that is the paper's sum over all pairs divided by B. Pair (i, j) thus counts (w_i + w_j) / 2, and
    belongs to the rank of image i, which needs all texts but no other images. Memory: 2 n B floats with gradients, and
    B D of gathered features. Communication: one all-gather of B (D + 1) numbers forward, one all-reduce of them
    backward. Arithmetic: n B D multiply-adds forward, 1/N of the whole batch's.
    """

    def __init__(self, settings: SiglipLossSettings) -> None:
        self.max_logit_scale = settings.max_logit_scale

    def __call__(self, features: Features, weights: torch.Tensor, world: World, global_size: int) -> torch.Tensor:
        """See ContrastiveLoss.

        Raises:
            SettingsError: the model has no logit bias.
        """
        if features.logit_bias is None:
            raise SettingsError("the sigmoid loss needs a model with a logit bias: build it with loss_type='siglip'")
        with torch.autocast(features.image.device.type, enabled=False):
            image, text, weights = _widen(features.image, features.text, weights)
            rows, start = gather_rows(torch.cat([text, weights[:, None]], dim=1), world)
            texts, all_weights = rows[:, :-1], rows[:, -1].detach()
            logits = _logits(features, image, texts)
            own = torch.arange(image.shape[0], device=image.device)
            signs = torch.ones_like(logits).index_put((own, own + start), -logits.new_ones(()))
            present = (weights[:, None] > 0) & (all_weights[None, :] > 0)
            pairs = (weights[:, None] + all_weights[None, :]) / 2 * present
            return (pairs * F.softplus(signs * logits)).sum() / _total(all_weights)


def build_loss(settings: LossSettings, towers_loss_type: str) -> ContrastiveLoss:
    """The loss that the settings name; 'auto' is the one that the towers were made for, Towers.loss_type.

    Raises:
        SettingsError: the towers have no parameters for the loss, or a user's class is no ContrastiveLoss.
    """
    if settings.type == "auto":
        settings = (SiglipLossSettings if towers_loss_type == "siglip" else ClipLossSettings).model_validate({})
    if isinstance(settings, ClipLossSettings | SiglipLossSettings):
        if settings.type != towers_loss_type:
            raise SettingsError(
                f"loss.type is {settings.type!r}, but the model was built for {towers_loss_type!r}: leave it at 'auto'"
            )
        return ClipLoss(settings) if isinstance(settings, ClipLossSettings) else SiglipLoss(settings)
    try:
        loss: Any = load_plugin(settings.type)(settings)
    except ValueError as error:
        raise SettingsError(f"loss.type: {error}") from error
    if not callable(loss) or not hasattr(loss, "max_logit_scale"):
        raise SettingsError(
            f"loss.type: {settings.type} needs __call__ and max_logit_scale, as ContrastiveLoss has them"
        )
    return cast(ContrastiveLoss, loss)


def _widen(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """All in one type: float64 where the first is, else float32."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return [tensor.to(dtype) for tensor in tensors]


def _logits(features: Features, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """[n, D] and [m, D] -> scale * rows @ columns.T + bias, [n, m]."""
    logits = features.logit_scale.to(rows.dtype) * rows @ columns.T
    return logits if features.logit_bias is None else logits + features.logit_bias.to(rows.dtype)


def _total(weights: torch.Tensor) -> torch.Tensor:
    """Their sum W, and not 0, so that a batch without weights has a loss of 0."""
    return weights.sum().clamp_min(torch.finfo(weights.dtype).tiny)


def gather_rows(rows: torch.Tensor, world: World) -> tuple[torch.Tensor, int]:
    """Every rank's rows [n_r, K] as one [B, K] in rank order, with gradient, and where this rank's rows start in it."""
    if world.size == 1:
        return rows, 0
    own = torch.tensor([rows.shape[0]], device=rows.device)
    sizes = [torch.empty_like(own) for _ in range(world.size)]
    dist.all_gather(sizes, own)
    counts = [int(size) for size in sizes]
    return cast(torch.Tensor, _Gather.apply(rows, counts, world.rank)), sum(counts[: world.rank])


class _Gather(torch.autograd.Function):
    """All-gather of rows whose backward pass sums the ranks' gradients; rows are padded to the longest rank's."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, counts: list[int], rank: int) -> torch.Tensor:
        ctx.start, ctx.count = sum(counts[:rank]), counts[rank]
        padded = rows.new_zeros((max(counts), rows.shape[1]))
        padded[: rows.shape[0]] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        summed = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed)
        return summed[ctx.start : ctx.start + ctx.count], None, None

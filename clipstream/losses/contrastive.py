"""Contrastive losses over the global batch, exact for any number of ranks, and the protocol of a loss.

Features of this rank's samples, with the scale and bias of the logits, enter; a scalar with gradient leaves.

**Shares.** With b_r of the B samples on rank r, every rank computes a share of the loss; the shares sum to

    L = (1 / W) sum_i w_i l_i,    W = sum_i w_i over all ranks

`__call__` returns the share. One backward() per rank gives dL/d(own features); scale, bias and the weights of the
towers get parts that sum to the gradient of L: the caller sums them over the ranks, or multiplies the share by the
number of ranks if DDP averages. Ranks may hold different numbers of samples.

**Weights.** w_i multiplies the loss l_i of sample i. A sample with w_i = 0 is absent, also as a negative of others. If
all weights are 0, the loss is 0.

**Duplicates.** Two samples with the same caption are negatives of each other, as published. They can be left out of
each other's loss instead, or count as positives: the targets of the softmax are then shared evenly among them (as in
UniCL, arXiv:2204.03610), and the sigmoid takes each as a match.

**Terms within images and within texts** draw the features of positives together, of images or of texts alone: l_i gets
the terms of SupCon (arXiv:2004.11362, L_out) times their weight, or for the sigmoid those of all pairs of two images in
which one has a positive. A sample is no pair with itself; one without a positive adds nothing.

**Short texts** of images that have long captions (`Batch.has_short`) have a loss of their own, of all images that have
one: with image features reduced to their principal components (see `coarse_images`), as Long-CLIP (arXiv:2403.15378).

**Numerics.** Logits and their sums are float32 under any autocast, float64 if the features are. They exist a tile at a
time, and gradients are computed with the value (see `tiled`).

`ClipLoss` and `SigLipLoss` are modules for custom training loops, called as open_clip's. Their ranks are those of
torch.distributed's default process group, if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from clipstream.data.batch import Batch, hash_rows
from clipstream.data.decode.labels import compare_groups
from clipstream.data.decode.sample_profile import warning_of_equal
from clipstream.data.settings import DataSettings
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.losses import tiled
from clipstream.losses.ring import Ring
from clipstream.losses.settings import ClipLossSettings, Duplicates, LossSettings, SiglipLossSettings, group_field
from clipstream.models.towers import Features
from clipstream.text import listed
from clipstream.utils.logs import logger
from clipstream.utils.section import make_part

Leaves = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]  # image, text, scale, bias
Kind = Literal["softmax", "sigmoid"]
Compute = Callable[[Leaves, bool], tiled.TileResult]
FEW_DISTINCT = 0.7  # share of distinct samples in a batch: a data set of 2 batches gives 0.79, of 1 batch 0.63
SHORT = 2  # the role of a short text
COMPONENTS = 32  # of image features that short texts are compared with
ROUNDING = 1e-6  # of a term of the loss that is 0
DOMINATES = 100.0  # times the other terms of the loss: a weight that was meant for another scale


class ContrastiveLoss(Protocol):
    """A loss over the global batch; a user's own is constructed with its settings: `Name(settings)`.

    Attributes:
        max_logit_scale: upper limit of exp(logit_scale), applied after every step; None for no limit. A loss may also
            have `min_logit_scale`, the lower limit, and `parts`, this rank's shares of the losses that the last call
            added up, by name, which the training line shows, and `factors`, the weights of those whose weight is not 1.
    """

    max_logit_scale: float | None

    def __call__(self, features: Features, batch: Batch, world: World) -> torch.Tensor:
        """This rank's share of the loss, a scalar; the shares of all ranks sum to the loss of the global batch.

        Collective: every rank calls it, also with no rows of its own.

        Args:
            features: of this rank's n samples, and the scalars of the logits; texts [n, M D] where `batch.roles` tells
                that samples have M texts, of which the last is a short one where `batch.has_short`.
            batch: the samples: their weights, ids, keys, and how many there are over all ranks.
        """


class _BuiltinLoss:
    kind: Kind
    min_logit_scale: float | None = None

    def __init__(self, settings: ClipLossSettings | SiglipLossSettings) -> None:
        self.max_logit_scale: float | None = settings.max_logit_scale
        self.gather_gib: float | None = settings.gather_gib
        self._settings = settings
        self.groups_by = settings.positives.by  # field with the group of a sample; None for none
        self.parts: dict[str, torch.Tensor] = {}
        terms = {"image_image": settings.image_image, "text_text": settings.text_text}
        self.within = {name: weight for name, weight in terms.items() if weight}
        self._weights = {**self.within, "short": settings.short}
        self.factors = {name: weight for name, weight in self._weights.items() if weight != 1}

    def __call__(self, features: Features, batch: Batch, world: World) -> torch.Tensor:
        """See ContrastiveLoss."""
        duplicates, by = self._settings.treatment
        if by == "groups" and batch.groups is None:
            duplicates = "negatives"  # in evaluation
        labels = None if duplicates == "negatives" else _labels(batch, by)
        short: Features | None = None
        if batch.has_short:
            assert batch.roles is not None
            has = batch.weights * (batch.roles[:, -1] == SHORT)
            features, batch, short = _without_short(features, batch, world)
        total = loss_share(self.kind, features, batch.weights, world, labels, duplicates, self.gather_gib, batch.roles)
        terms: dict[str, torch.Tensor] = {}
        if short is not None:
            terms["short"] = loss_share(self.kind, short, has, world, labels, duplicates, self.gather_gib)
        if labels is not None:
            for name in self.within:
                terms[name] = share_within(name, self.kind, features, batch, world, labels, self.gather_gib)
        self.parts = {name: part.detach() for name, part in {"image_text": total, **terms}.items() if terms}
        for name, part in terms.items():
            total = total + self._weights[name] * part
        return total


def _without_short(features: Features, batch: Batch, world: World) -> tuple[Features, Batch, Features]:
    """The features and the batch without the short texts, and the features of these. Collective."""
    assert batch.roles is not None
    width = features.image.shape[1]
    coarse = coarse_images(features.image, batch.weights, world)
    short = features._replace(image=coarse, text=features.text[:, -width:])
    features = features._replace(text=features.text[:, :-width])
    roles = batch.roles[:, :-1] if batch.roles.shape[1] > 2 else None
    return features, replace(batch, roles=roles, has_short=False), short


def loss_share(
    kind: Kind,
    features: Features,
    weights: torch.Tensor,
    world: World,
    labels: torch.Tensor | None = None,
    duplicates: Duplicates = "negatives",
    gather_gib: float | None = None,
    roles: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's share of a loss. Collective.

    Args:
        weights: of this rank's samples, [n].
        labels: int64 [n], equal for duplicates; None where these are negatives.
        duplicates: 'negatives', 'mask' or 'positives'.
        gather_gib: GiB of all ranks' texts up to which they are gathered; None for 1 on a GPU and 0 on the CPU.
        roles: as `Batch.roles`.
    """
    loss = tiled.softmax if kind == "softmax" else tiled.sigmoid

    def compute(wide: Leaves, gradients: bool) -> tiled.TileResult:
        image, text, scale, bias = wide
        ring = Ring.of(len(image), world, text.shape[1] * text.itemsize, gather_gib)
        texts, present, same, all_roles = ring.collect([text], weights, labels, roles)
        bias = bias if kind == "sigmoid" else None
        pairs = tiled.Pairs(image, texts, scale, bias, present.to(image.dtype), ring, same, duplicates, all_roles)
        return loss(pairs, gradients=gradients)

    return with_gradients(features, compute)


def share_within(
    name: str,
    kind: Kind,
    features: Features,
    batch: Batch,
    world: World,
    labels: torch.Tensor,
    gather_gib: float | None = None,
) -> torch.Tensor:
    """This rank's share of the term within images ('image_image') or texts ('text_text'); see `loss_share`."""
    loss = tiled.softmax if kind == "softmax" else tiled.sigmoid

    weights = batch.weights
    if name == "text_text" and batch.roles is not None:  # of the captions of a sample each counts the same
        captions = batch.roles > 0
        shares = captions / captions.sum(dim=1, keepdim=True).clamp_min(1)
        weights, labels = (weights[:, None] * shares).flatten(), labels.repeat_interleave(batch.roles.shape[1])

    def compute(wide: Leaves, gradients: bool) -> tiled.TileResult:
        image, text, scale, bias = wide
        rows = image if name == "image_image" else text.view(-1, image.shape[1])
        ring = Ring.of(len(rows), world, rows.shape[1] * rows.itemsize, gather_gib)
        columns, present, same = ring.collect([rows], weights, labels)
        bias = bias if kind == "sigmoid" else None
        pairs = tiled.Pairs(rows, columns, scale, bias, present.to(rows.dtype), ring, same, "positives", within=True)
        found = loss(pairs, gradients=gradients)
        if rows is image or found.images is None:
            return found
        return found._replace(images=None, texts=found.images.view(text.shape))

    return with_gradients(features, compute)


class SoftmaxLoss(_BuiltinLoss):
    """Softmax over the rows and columns of the B x B logits (CLIP, arXiv:2103.00020, figure 3).

    With logits s_ij = scale * <x_i, y_j>, over the samples j that are present:

        l_i = 1/2 (logsumexp_j s_ij - s_ii) + 1/2 (logsumexp_j s_ji - s_ii)

    A rank computes the logits of its own n images with all texts, twice; the logsumexp of a text is combined from all
    ranks. Communication per rank: texts once, or twice around the ring, and their gradients once, 2 or 3 B D numbers,
    and a few vectors of B. Arithmetic: 4 n B D multiply-adds. Memory: see `tiled`.
    """

    kind = "softmax"
    min_logit_scale = 1.0


class SigmoidLoss(_BuiltinLoss):
    """A sigmoid on every pair of the global batch (SigLIP, arXiv:2303.15343, algorithm 1).

    With logits s_ij = scale * <x_i, y_j> + bias, z_ij = 1 where i = j and -1 elsewhere, over the samples j present:

        l_i = 1/2 sum_j softplus(-z_ij s_ij) + 1/2 sum_j softplus(-z_ji s_ji)

    With all weights 1 that is the paper's sum over all pairs divided by B. Pair (i, j) thus counts (w_i + w_j) / 2, and
    belongs to the rank of image i. Communication per rank: texts and their gradients once, 2 B D numbers, and a vector
    of B. Arithmetic: 3 n B D multiply-adds. Memory: see `tiled`.
    """

    kind = "sigmoid"

    def __call__(self, features: Features, batch: Batch, world: World) -> torch.Tensor:
        """See ContrastiveLoss. Raises SettingsError: the model has no logit bias."""
        if features.logit_bias is None:
            raise SettingsError("the sigmoid loss requires a model with a logit bias: build it with loss_type='siglip'")
        return super().__call__(features, batch, world)


def build_loss(settings: LossSettings, towers_loss_type: str) -> ContrastiveLoss:
    """The loss that the settings name; with 'auto', the one that the towers were made for (`Towers.loss_type`).

    Raises SettingsError: the towers were made for another loss, or a user's class is not a ContrastiveLoss.
    """
    if settings.type == "auto":
        kind = SiglipLossSettings if towers_loss_type == "siglip" else ClipLossSettings
        settings = kind.model_validate(settings.model_dump(exclude={"type"}))
    if isinstance(settings, ClipLossSettings | SiglipLossSettings):
        if settings.type != towers_loss_type:
            raise SettingsError(
                f"loss.type is {settings.type!r}, but the model was built for {towers_loss_type!r}: leave it at 'auto'"
            )
        return SoftmaxLoss(settings) if isinstance(settings, ClipLossSettings) else SigmoidLoss(settings)
    loss = make_part("loss.type", settings)
    if not callable(loss) or not hasattr(loss, "max_logit_scale"):
        raise SettingsError(
            f"loss.type: {settings.type} requires __call__ and max_logit_scale, as ContrastiveLoss has them"
        )
    return cast(ContrastiveLoss, loss)


def _labels(batch: Batch, by: str) -> torch.Tensor:
    """int64 [n], equal for duplicates."""
    if by == "pictures":
        if batch.checksums is None:
            raise SettingsError("loss.duplicates_by: pictures requires batches with image checksums; use captions")
        return batch.checksums
    if by == "groups":
        assert batch.groups is not None, "see __call__"
        return batch.groups
    return hash_rows(batch.ids)


def warn_of_duplicates(settings: LossSettings, batch: Batch, world: World) -> None:
    """Print a warning if the loss takes duplicates as negatives and the batch has many, or has groups of which the
    batch has few. Collective.

    Raises SettingsError: no sample has a group.
    """
    if (field := group_field(settings)) is not None:
        _check_groups(field, batch, world)
        return
    if getattr(settings, "duplicates", "") != "negatives":
        return
    images = [None] * len(batch) if batch.checksums is None else batch.checksums.tolist()
    captions = hash_rows(batch.ids).tolist()
    named = {(key, image): caption for key, image, caption in zip(batch.keys, images, captions, strict=True) if key}
    seen = {one: caption for part in world.gather_objects(named) for one, caption in part.items()}
    if not world.is_main:
        return
    texts = np.array(list(seen.values()), np.int64)
    files = np.arange(len(seen)) if batch.checksums is None else np.array([image for _, image in seen], np.int64)
    # Masks take one text of a sample.
    if batch.roles is None and (text := warning_of_equal(texts, files, batch.global_size)):
        logger.warning(text)
    elif len(seen) < FEW_DISTINCT * batch.global_size:
        logger.warning(
            f"the first batch of {batch.global_size:,} samples holds only {len(seen):,} different "
            "ones, and copies of a sample are negatives of each other: use a smaller --data.global-batch-size,"
            " or --loss.duplicates mask --loss.duplicates-by pictures"
        )


def _check_groups(field: str, batch: Batch, world: World) -> None:
    """Warn of few groups in the first batch, with `field` as loss.positives.by. Raises SettingsError: it has none."""
    assert batch.groups is not None, "training batches have groups"
    found = [label for part in world.gather_objects(batch.groups[batch.weights > 0].tolist()) for label in part]
    if not found:
        return
    alone, few = compare_groups("loss.positives.by", field, np.array(found, dtype=np.int64), " of the first batch")
    if world.is_main and not alone:
        logger.info(f"groups   {len(set(found)):,} of {len(found):,} samples in the first batch, by {field}")
    if world.is_main and (few or alone):
        more = ", so no sample has a further positive: use a larger batch, or a field with fewer values"
        logger.warning(few or f"{alone}{more}")


def warn_of_texts(settings: DataSettings, batch: Batch, world: World) -> None:
    """Warn of hard negatives and short texts that are configured but missing in the first batch. Collective."""
    own = set() if batch.roles is None else set(batch.roles.flatten().tolist())
    there = set().union(*world.gather_objects(own))
    asked = [
        f"data.sources.{name}.caption.{kind}"
        for kind, role in (("negatives", -1), ("short", SHORT))
        for name, source in settings.sources.items()
        if role not in there and getattr(source.caption, kind, None)
    ]
    if world.is_main and asked:
        logger.warning(
            f"{listed(asked)}: no sample of the first batch has such a text, other than its captions, so the setting "
            "has no effect: check the path (`clipstream check --all` lists fields)"
        )


def warn_of_dominance(loss: ContrastiveLoss, parts: Mapping[str, float]) -> None:
    """Warn where one of the terms of the loss, times their weights, leaves the others without effect.

    Terms that are 0 up to rounding are left out, as distillation from the weights that the model still has.

    Args:
        parts: the terms of a step, by name.
    """
    factors = getattr(loss, "factors", {})
    terms = {name: factors.get(name, 1.0) * part for name, part in parts.items() if abs(part) > ROUNDING}
    largest, *others = sorted(terms, key=lambda name: abs(terms[name]), reverse=True) or [""]
    if others and 0 < DOMINATES * abs(terms[others[0]]) < abs(terms[largest]):
        rest = ", ".join(f"{name} {terms[name]:.3g}" for name in others)
        logger.warning(
            f"the loss: its term {largest} is {terms[largest]:.3g} in the first step, over {DOMINATES:g} times the "
            f"others ({rest}), which have little effect beside it: check the weights of the terms"
        )


def with_gradients(features: Features, compute: Compute) -> torch.Tensor:
    """A rank's share of a loss, computed without autocast, with gradient with respect to the features.

    Args:
        compute: returns the share and its gradients (`tiled.TileResult`) for image, text, scale and bias in at least
            float32; its second argument says whether gradients are needed.
    """
    with torch.autocast(features.image.device.type, enabled=False):
        share: torch.Tensor = _WithGradients.apply(*features, compute)
    return share


class _WithGradients(torch.autograd.Function):
    """A rank's share, whose gradients are computed with it: the backward pass only returns them, once."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        """Args: image, text, scale and bias of the features, then `compute`."""
        features, compute = inputs[:4], inputs[4]
        dtype = torch.promote_types(features[0].dtype, torch.float32)
        wide: Any = tuple(None if like is None else like.to(dtype).contiguous() for like in features)
        found: tiled.TileResult = compute(wide, any(ctx.needs_input_grad))
        ctx.found = [*found[1:4], None if wide[3] is None else found.bias]
        ctx.dtypes = [None if like is None else like.dtype for like in features]
        return found.share

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        (factor,) = gradients
        found, ctx.found = ctx.found, None  # returned without a copy, so only once
        if found is None:
            raise RuntimeError("backward() of a contrastive loss can run once: compute the loss again")
        given = [
            None if gradient is None else gradient.mul_(factor).to(dtype)
            for gradient, dtype in zip(found, ctx.dtypes, strict=True)
        ]
        return *given, None


def gather_rows(rows: torch.Tensor, world: World) -> tuple[torch.Tensor, int]:
    """All ranks' rows [n_r, K] as one [B, K] in rank order, with gradient, and the index of this rank's first row;
    for losses of your own (docs/plugins.md).
    """
    if world.size == 1:
        return rows, 0
    ring = Ring(world, world.gather_counts(len(rows)))
    return cast(torch.Tensor, _Gather.apply(rows, ring)), ring.start


class _Gather(torch.autograd.Function):
    """All-gather of rows whose backward pass sums the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, ring: Ring) -> torch.Tensor:
        ctx.ring = ring
        return ring.world.gather_rows(rows, ring.counts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ring: Ring = ctx.ring
        return ring.world.all_reduce_sum(grads[0].clone(memory_format=torch.contiguous_format))[ring.own], None


class _GlobalLoss(nn.Module):
    """A loss of the global batch, whose gradients are exact where the ranks' gradients are averaged."""

    kind: Kind

    def _loss(
        self, image: torch.Tensor, text: torch.Tensor, *numbers: torch.Tensor | float | None, output_dict: bool
    ) -> Any:
        if image.ndim != 2 or image.shape != text.shape:
            shapes = f"{tuple(image.shape)} and {tuple(text.shape)}"
            raise ValueError(f"expected image_features and text_features of equal shape [n, D], not {shapes}")
        world = World.of_group(str(image.device))
        scale, bias = (None if one is None else torch.as_tensor(one, device=image.device).sum() for one in numbers)
        features = Features(image, text, cast(torch.Tensor, scale), bias)
        loss = loss_share(self.kind, features, torch.ones(len(image), device=image.device), world)
        if world.size > 1:
            scaled = loss * world.size
            loss = world.all_reduce_sum(loss.detach().clone()) + (scaled - scaled.detach())
        return {"contrastive_loss": loss} if output_dict else loss


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
        return self._loss(image_features, text_features, logit_scale, logit_bias, output_dict=output_dict)


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
        return self._loss(image_features, text_features, logit_scale, logit_bias, output_dict=output_dict)


def coarse_images(images: torch.Tensor, weights: torch.Tensor, world: World) -> torch.Tensor:
    """This rank's image features reduced to their first principal components: [n, D], float32 or more, with gradient.

    With the weights w_i of the B samples over all ranks, W their sum, and x_i the features of image i:

        m = 1 / W sum_i w_i x_i,    C = 1 / W sum_i w_i (x_i - m)^T (x_i - m),    z_i = m + (x_i - m) P

    P is the projector on the K = COMPONENTS eigenvectors of C of largest eigenvalue. Long-CLIP's code has the same of
    the samples of one GPU (`PCA` in model/model_longclip.py, by torch.linalg.svd), and likewise with gradient through
    all of it, m and P included: nothing is detached, and z is not normalised. P is a smooth function of C as long as
    the eigenvalues l number K and K + 1 differ; its gradient needs differences of kept eigenvalues and others alone:

        dL/dC = sym( sum_{a kept, b not} 2 (v_a^T sym(dL/dP) v_b) / (l_a - l_b) v_a v_b^T )

    Pairs of equal eigenvalues add nothing: with at most K + 1 samples, z = x. Collective, in the backward pass too:
    m and C are summed over the ranks, and so are the gradients that reach them. Each rank gives the gradient with
    respect to z for its own rows.

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

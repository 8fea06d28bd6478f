"""Distillation: a contrastive loss with losses that draw the features towards those of teachers.

A batch with the features of teachers enters, as `features['NAME.image']` and `features['NAME.text']` for each teacher
NAME: rows as stored (see `features.manifest`) or floats, which are normalised here. A share of the loss leaves,
exact for any number of ranks as that of `contrastive`. With the weights of `DistillSettings`, and means over the
teachers:

    L = contrastive * L_contrastive + weight * L_relational + features * L_features

**Relational losses** compare the softmax of the rows and columns of the student's logits with those of the teacher's;
the widths of the features may differ. With the student's logits s_ij = a <x_i, y_j>, the teacher's t_ij, the softmax Q
of the rows of s and P of the rows of t, Q' and P' of their columns, and r_i = w_i / 2W over the samples present, the
divergence is the mean over rows and columns of the Kullback-Leibler divergence:

    L_relational = sum_ij r_i P_ij (log P_ij - log Q_ij) + r_j P'_ij (log P'_ij - log Q'_ij)
    dL/ds_ij = r_i (Q_ij - P_ij) + r_j (Q'_ij - P'_ij)

The cross entropy leaves out log P and log P', the teacher's negative entropy: another value with the same gradient.

| `type` | L_relational | paper |
|---|---|---|
| `logits` | cross entropy | open_clip's DistillClipLoss, at `contrastive` 1 and `weight` 1 |
| `affinity` | divergence | MobileCLIP (arXiv:2311.17049, L_Distill), at `contrastive` 1 - lambda and `weight` lambda |
| `relational` | divergence | CLIP-KD (arXiv:2307.12732, CRD), at `weight` 1: `ckd_loss` of its code |

`logits` and `affinity` have the same gradients. The student's logits have its learned scale, which then takes part in
the gradient, or 1 / `temperature`; the teacher's its own scale, or 1 / `teacher_temperature`. The bias of a sigmoid
model has no effect on a softmax.

**L_features** is sum_i w_i / (W D) (|x_i - u_i|^2 + |y_i - v_i|^2) of the student's x, y and the teacher's u, v of D
numbers (CLIP-KD, FD, at `features` 2000: `fd_loss` of its code). The widths have to be equal: there is no trained
projection.

The scales are those of CLIP-KD's code (winycg/CLIP-KD, src/open_clip/loss.py), so that its scripts' weights carry over.
The paper's formulas differ by constants: L_CRD = KL_rows + KL_columns is twice `ckd_loss`, and L_FD, the mean of the
squared distances themselves, is D times `fd_loss`.

Samples of weight 0 are absent. Sums are float32 or, if the features are, float64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F

from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.features.manifest import decode_rows
from clipstream.losses import tiled
from clipstream.losses.contrastive import ContrastiveLoss, Leaves, with_gradients
from clipstream.losses.ring import Ring
from clipstream.losses.settings import DistillSettings
from clipstream.losses.tiled import LogSums, Tile, Tiles
from clipstream.models.towers import Features

P, Q = 1, 1  # the buffers of log P, of the teacher's tiles, and log Q, of the student's
G, DIFFERENCE = 2, 3  # buffers of the student's tiles: dL/ds, and the logarithm of the ratio
STUDENT_BUFFERS = 4
BUFFERS = STUDENT_BUFFERS + tiled.BUFFERS  # tiles of student and teacher


class DistilledLoss:
    """A ContrastiveLoss: the given one, and the losses of distillation.

    Args:
        base: the contrastive loss; its limits of the logit scale hold.
        scales: name of each teacher -> scale of its logits, exp(logit_scale).
        add_features: adds the features of a live teacher to a batch; None where the batches have all of them.

    Attributes:
        parts: this rank's share of each loss of the last call, without its weight: `contrastive`, the `type` of the
            relational loss, `features`.
        factors: the weight of each of them.

    Raises SettingsError, when it is called: a width that the loss of features cannot compare.
    """

    def __init__(
        self,
        base: ContrastiveLoss,
        settings: DistillSettings,
        scales: Mapping[str, float],
        add_features: Callable[[Batch], Batch] | None = None,
    ) -> None:
        self.max_logit_scale: float | None = base.max_logit_scale
        self.min_logit_scale: float | None = getattr(base, "min_logit_scale", None)
        self._base, self._settings, self._scales = base, settings, dict(scales)
        self.gather_gib: float | None = getattr(base, "gather_gib", None)
        self.within = getattr(base, "within", ())
        self.buffers = BUFFERS if settings.weight else getattr(base, "buffers", tiled.BUFFERS)
        self._add_features = add_features
        self.parts: dict[str, torch.Tensor] = {}
        self.factors = {
            "contrastive": settings.contrastive,
            settings.type: settings.weight,
            "features": settings.features,
        }

    def __call__(self, features: Features, batch: Batch, world: World) -> torch.Tensor:
        """See ContrastiveLoss."""
        settings, device = self._settings, features.image.device
        dtype = torch.promote_types(features.image.dtype, torch.float32)
        found: dict[str, list[torch.Tensor]] = defaultdict(list)
        if settings.contrastive:
            found["contrastive"].append(self._base(features, batch, world))
        if self._add_features is not None:
            batch = self._add_features(batch)
        with torch.autocast(device.type, enabled=False):
            total = world.all_reduce_sum(batch.weights.to(dtype).sum()) if settings.features else None
            for name, scale in self._scales.items():
                teacher = [_unit(batch.features[f"{name}.{kind}"], dtype) for kind in ("image", "text")]
                if settings.weight:
                    found[settings.type].append(self._relational(features, teacher, scale, batch.weights, world))
                if total is not None:
                    found["features"].append(_distance(name, features, teacher, batch.weights, total))
        parts = {name: torch.stack(shares).mean() for name, shares in found.items()}
        self.parts = {name: part.detach() for name, part in parts.items()}
        return torch.stack([self.factors[name] * part for name, part in parts.items()]).sum()

    def _relational(
        self, features: Features, teacher: list[torch.Tensor], scale: float, weights: torch.Tensor, world: World
    ) -> torch.Tensor:
        """This rank's share of the relational loss."""
        settings = self._settings
        if settings.teacher_temperature is not None:
            scale = 1 / settings.teacher_temperature

        def compute(wide: Leaves, gradients: bool) -> tiled.TileResult:
            image, text, learned, _ = wide
            own = learned if settings.temperature is None else torch.full_like(learned, 1 / settings.temperature)
            row_bytes = (text.shape[1] + teacher[1].shape[1]) * text.itemsize
            ring = Ring.of(len(image), world, row_bytes, self.gather_gib)
            texts, others, present = ring.collect([text, teacher[1]], weights)
            present = present.to(image.dtype)
            student = tiled.Pairs(image, texts, own, None, present, ring)
            other = tiled.Pairs(teacher[0].contiguous(), others, torch.full_like(own, scale), None, present, ring)
            found = affinity(student, other, divergence=settings.type != "logits", gradients=gradients)
            return found if settings.temperature is None else found._replace(scale=torch.zeros_like(learned))

        return with_gradients(features, compute)


def _unit(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Features of length 1 of rows as they are stored, in `dtype`."""
    return F.normalize((rows if rows.dtype == torch.float64 else decode_rows(rows)).to(dtype), dim=-1)


def _distance(
    name: str, features: Features, teacher: list[torch.Tensor], weights: torch.Tensor, total: torch.Tensor
) -> torch.Tensor:
    """This rank's share of the loss of features, with `total`, W. Raises SettingsError: the widths differ."""
    width, other = features.image.shape[1], teacher[0].shape[1]
    if width != other:
        raise SettingsError(
            f"distill.features: the features of teacher {name} have {other} numbers, those of the model {width}: set "
            "it to 0 and use --distill.type logits, affinity or relational, which compare features of any width"
        )
    dtype = teacher[0].dtype
    shares = weights.to(dtype) / total.clamp_min(torch.finfo(dtype).tiny)
    squares = (features.image.to(dtype) - teacher[0]).square() + (features.text.to(dtype) - teacher[1]).square()
    return (shares * squares.mean(dim=1)).sum()


def affinity(student: tiled.Pairs, teacher: tiled.Pairs, *, divergence: bool, gradients: bool) -> tiled.TileResult:
    """This rank's share of a relational loss over tiles of both matrices, and its gradients. Collective.

    As for the softmax of `tiled`, a first pass computes the logsumexp of the rows and columns of both matrices, and a
    second one recomputes each tile: value and gradient. The teacher's texts go with the student's to all ranks. With
    features of D numbers of the student and E of the teacher: 4 n B D + 2 n B E multiply-adds. Memory beside features
    and their gradients: BUFFERS tiles and, on several ranks, the texts of both and the sums, of all ranks or in
    transit (see `ring`).

    Args:
        student: without bias, which no softmax depends on; its weights and ring are used for both.
        teacher: rows of the same samples; may have another width.
        divergence: Kullback-Leibler divergence; else cross entropy.
    """
    tiles, others, ring = Tiles(student, STUDENT_BUFFERS), Tiles(teacher), student.ring
    sums, other_sums = LogSums(tiles), LogSums(others)
    width = student.texts.shape[1]
    texts = torch.cat([student.texts, teacher.texts], dim=1)

    def iterate(start: int, block: torch.Tensor) -> Iterator[tuple[Tile, Tile]]:
        """The same tile of both matrices."""
        return zip(tiles.iterate(start, block[:, :width]), others.iterate(start, block[:, width:]), strict=True)

    def add(start: int, block: torch.Tensor) -> None:
        for tile, other in iterate(start, block):
            sums.add(tile)
            other_sums.add(other)

    ring.around(texts, add)
    sums.reduce()
    other_sums.reduce()
    found = tiles.begin(student.images.new_zeros(()), gradients=gradients)
    halves = tiles.halves

    def carry(start: int, block: torch.Tensor) -> torch.Tensor | None:
        of_texts = torch.zeros_like(block[:, :width]) if gradients else None
        for tile, other in iterate(start, block):
            rows, columns = tile.rows, tile.columns
            by_rows = halves[ring.own][rows, None], sums.rows[rows, None], other_sums.rows[rows, None]
            by_columns = halves[None, columns], sums.columns[None, columns], other_sums.columns[None, columns]
            g = tiles.view(G, tile.s).zero_()
            for half, lse, other_lse in (by_rows, by_columns):
                q = torch.sub(tile.s, lse, out=tiles.view(Q, tile.s))
                p = torch.sub(other.s, other_lse, out=others.view(P, tile.s))
                ratio = torch.sub(p if divergence else torch.zeros_like(lse), q, out=tiles.view(DIFFERENCE, tile.s))
                p.exp_()
                found.share.add_(ratio.mul_(p).mul_(half).sum())
                if of_texts is not None:
                    g.addcmul_(q.exp_().sub_(p), half)
            if of_texts is not None:
                tiles.add(g, tile, block[:, :width], found, of_texts)
        return of_texts

    return tiles.scale_gradients(found, ring.around(texts, carry))

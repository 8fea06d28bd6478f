"""Reference losses on one process, with the whole matrix of logits and autograd.

Logits [B, B] of images (rows) and texts (columns) enter; the loss, a scalar, leaves. `weights` [B] are w, `labels` [B]
are equal for duplicates. Samples of weight 0 are left out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from clipstream.losses.settings import Duplicates


def softmax_loss(
    logits: torch.Tensor, weights: torch.Tensor, labels: torch.Tensor, duplicates: Duplicates = "negatives"
) -> torch.Tensor:
    """Cross entropy over rows and columns (CLIP, arXiv:2103.00020, figure 3)."""
    logits, weights, targets, masked = _present(logits, weights, labels, duplicates)
    share = targets.to(logits.dtype) / targets.sum(dim=1)
    rows, columns = (
        -(share * s.masked_fill(masked, -torch.inf).log_softmax(dim=1).masked_fill(masked, 0)).sum(dim=1)
        for s in (logits, logits.T)
    )
    return (weights * (rows + columns) / 2).sum()


def sigmoid_loss(
    logits: torch.Tensor, weights: torch.Tensor, labels: torch.Tensor, duplicates: Duplicates = "negatives"
) -> torch.Tensor:
    """A binary decision for each pair (SigLIP, arXiv:2303.15343, algorithm 1)."""
    logits, weights, targets, masked = _present(logits, weights, labels, duplicates)
    pairs = -F.logsigmoid(torch.where(targets, logits, -logits)).masked_fill(masked, 0)
    return (weights * (pairs.sum(dim=0) + pairs.sum(dim=1)) / 2).sum()


def within_loss(
    rows: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    weights: torch.Tensor,
    labels: torch.Tensor,
    *,
    softmax: bool,
) -> torch.Tensor:
    """SupCon's L_out (arXiv:2004.11362, equation 2) over samples with a positive, or all their pairs by a sigmoid."""
    keep = weights > 0
    rows, labels, weights = rows[keep], labels[keep], weights[keep].to(rows.dtype) / weights.sum()
    eye = torch.eye(len(rows), dtype=torch.bool)
    same = (labels[:, None] == labels[None]) & ~eye
    weights = weights * same.any(dim=1)
    logits = scale * rows @ rows.T
    if softmax:
        chances = logits.masked_fill(eye, -torch.inf).log_softmax(dim=1).masked_fill(~same, 0)
        return -(weights * chances.sum(dim=1) / same.sum(dim=1).clamp_min(1)).sum()
    pairs = -F.logsigmoid(torch.where(same, logits + bias, -logits - bias)).masked_fill(eye, 0)
    return (weights * (pairs.sum(dim=0) + pairs.sum(dim=1)) / 2).sum()


def several_loss(
    images: torch.Tensor,
    texts: torch.Tensor,
    scalars: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    labels: torch.Tensor,
    roles: torch.Tensor,
    *,
    softmax: bool,
) -> torch.Tensor:
    """The loss of images [B, D] with M texts each, [B, M D], of `roles` [B, M], one by one."""
    keep, (scale, bias) = (weights > 0).nonzero().flatten().tolist(), scalars
    columns = [(i, m) for i in keep for m in range(roles.shape[1]) if roles[i, m]]
    width = images.shape[1]
    rows = torch.stack([texts[i, m * width : (m + 1) * width] for i, m in columns])
    logits = scale * images[keep] @ rows.T + (0 if softmax else bias)
    matches = torch.tensor([[bool(roles[j, m] > 0 and labels[i] == labels[j]) for j, m in columns] for i in keep])
    total, mass = logits.new_zeros(()), weights.sum()
    for row, i in enumerate(keep):
        captions = {j: int((roles[j] > 0).sum()) for j in keep}
        if softmax:
            total = total - weights[i] / 2 * logits[row].log_softmax(0)[matches[row]].mean()
        for column, (j, m) in enumerate(columns):
            if not softmax:
                share = weights[i] * (1 if roles[j, m] < 0 else 1 / captions[j])
                share = share + (weights[j] / captions[j] if roles[j, m] > 0 else 0)
                total = total + share / 2 * F.softplus(logits[row, column] * (1 - 2 * matches[row, column].double()))
            elif row == 0 and roles[j, m] > 0:
                column_loss = logits[:, column].log_softmax(0)[matches[:, column]].mean()
                total = total - weights[j] / captions[j] / 2 * column_loss
    return total / mass


def principal(images: torch.Tensor, weights: torch.Tensor, components: int) -> torch.Tensor:
    """Images of their first principal components, as `PCA` of Long-CLIP's model/model_longclip.py, with weights."""
    shares = weights.to(images.dtype) / weights.sum()
    centred = images - (mean := shares @ images)
    keep = shares > 0
    _, _, axes = torch.linalg.svd(shares[keep, None].sqrt() * centred[keep], full_matrices=False)
    return centred @ axes[:components].T @ axes[:components] + mean


def _present(
    logits: torch.Tensor, weights: torch.Tensor, labels: torch.Tensor, duplicates: Duplicates
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits and weights (summing to 1) of the samples present, their targets, and the pairs that do not count."""
    keep = weights > 0
    same = labels[keep, None] == labels[None, keep]
    eye = torch.eye(len(same), dtype=torch.bool)
    targets, masked = (same if duplicates == "positives" else eye), (same & ~eye) & (duplicates == "mask")
    weights = weights[keep].to(logits.dtype)
    return logits[keep][:, keep], weights / weights.sum(), targets, masked


def relational_loss(
    student: torch.Tensor, teacher: torch.Tensor, weights: torch.Tensor, *, divergence: bool
) -> torch.Tensor:
    """Divergence (MobileCLIP, arXiv:2311.17049, L_Distill) or cross entropy (open_clip) of two matrices of logits."""
    keep = weights > 0
    student, teacher, weights = student[keep][:, keep], teacher[keep][:, keep], weights[keep].to(student.dtype)
    found = [
        F.kl_div(s.log_softmax(dim=1), t.softmax(dim=1), reduction="none").sum(dim=1)
        if divergence
        else F.cross_entropy(s, t.softmax(dim=1), reduction="none")
        for s, t in ((student, teacher), (student.T, teacher.T))
    ]
    return (weights / weights.sum() * (found[0] + found[1]) / 2).sum()


def feature_loss(
    images: torch.Tensor, texts: torch.Tensor, teacher: tuple[torch.Tensor, torch.Tensor], weights: torch.Tensor
) -> torch.Tensor:
    """Mean squared differences of features [B, D] of images and texts from a teacher's (CLIP-KD's fd_loss)."""
    squares = (images - teacher[0]).square().mean(dim=1) + (texts - teacher[1]).square().mean(dim=1)
    return (weights / weights.sum() * squares).sum()

"""Owns mean average precision over classes, of pictures with several labels; never reads data, never runs a model.

A class's average precision is scikit-learn's average_precision_score: the sum over the scores that occur, from the
highest, of the precision so far times what the recall gains. Equal scores count together, so the order of the data does
not matter. A class that no picture has counts 0, as in scikit-learn and CLIP_benchmark.
"""

from __future__ import annotations

import torch

from clipstream.evals.ranking import TIE
from clipstream.world import World

AT_ONCE = 1 << 22  # scores, over all ranks, that are sorted together


def mean_average_precision(images: torch.Tensor, classifier: torch.Tensor, labels: torch.Tensor, world: World) -> float:
    """The mean over the classes of all ranks' pictures. Collective.

    Args:
        images: [n, D], L2-normalised, of this rank.
        classifier: [C, D], L2-normalised.
        labels: bool [n, C].
        world: the ranks.
    """
    counts = world.gather_objects(len(images))
    step = max(1, AT_ONCE // max(1, sum(counts)))
    found = []
    for start in range(0, len(classifier), step):
        some = slice(start, start + step)
        scores = images.double() @ classifier[some].double().T
        there = world.gather_rows(labels[:, some].to(torch.uint8), counts)
        found.append(average_precision(world.gather_rows(scores, counts), there.bool()))
    return float(torch.cat(found).mean())


def average_precision(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Average precision of each class, float64 [C].

    Args:
        scores: float64 [n, C], of -1 to 1; such as differ by less than `TIE` are equal.
        labels: bool [n, C].
    """
    # Below all others, and equal: what is no number would else come first, in the order of the data.
    ranked, order = (scores / TIE).round().nan_to_num(nan=-2 / TIE).sort(dim=0, descending=True, stable=True)
    right = labels.gather(0, order).cumsum(dim=0).double()
    seen = torch.arange(1, len(scores) + 1, device=scores.device, dtype=torch.float64)[:, None]
    last = torch.ones_like(labels)  # of the equal scores: there the precision is read
    last[:-1] = ranked[1:] != ranked[:-1]
    precision = torch.where(last, right / seen, 0.0)
    # What the recall gains from one such place to the next: the right ones up to it, less those up to the one before.
    until = torch.where(last, right, 0.0).cummax(dim=0).values
    before = torch.cat([torch.zeros_like(until[:1]), until[:-1]])
    gain = torch.where(last, right - before, 0.0)
    return (precision * gain).sum(dim=0) / right[-1].clamp(min=1)

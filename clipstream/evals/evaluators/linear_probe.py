"""Logistic regression on frozen features: scikit-learn's LogisticRegression, over all ranks, to its optimum.

It minimises, over weights W [C, D] and intercepts b [C] of the classes in the training data,

    c sum_i (logsumexp_j (W x_i + b)_j - (W x_i + b)_{y_i}) + 1/2 |W|^2

in float64 by L-BFGS, divided by c times the number of samples. Two classes share one row, with logits 0 for the other
class, as in scikit-learn. Each rank sums over its own samples, and all ranks take the same steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from clipstream.distributed.world import World
from clipstream.evals.evaluators.frozen_features import Frozen, Labelled, measure
from clipstream.evals.settings import LinearProbeSettings
from clipstream.utils.logs import logger

AT_ONCE = 8192  # samples per pass
ITERATIONS = 1000  # of L-BFGS, at most
TOLERANCE = 1e-9  # of the largest element of the gradient


class LinearProbe(Frozen):
    """A linear classifier of the features (CLIP, arXiv:2103.00020, section 3.2, uses c = 0.316 for ImageNet)."""

    def __init__(self, settings: LinearProbeSettings) -> None:
        super().__init__(settings)
        self.c = settings.c

    def tally(self, train: Labelled, test: Labelled, classes: int, world: World) -> torch.Tensor:
        here = torch.bincount(train.labels, minlength=classes).double()
        present = world.all_reduce_sum(here).nonzero().squeeze(1)
        places = torch.full((classes,), -1, device=present.device)
        places[present] = torch.arange(len(present), device=present.device)
        fit = Fit(train.features, places[train.labels], len(present), self.c, world)
        if not fit.run(ITERATIONS) and world.is_main:
            logger.warning(f"the linear probe did not converge in {ITERATIONS} iterations: lower c")
        tally = torch.zeros((classes, 3), dtype=torch.float64, device=present.device)
        for rows, labels in _parts(test.features, test.labels):
            scores = rows.new_full((len(rows), classes), -torch.inf, dtype=torch.float64)
            scores[:, present] = fit.logits(rows)
            tally += measure(scores, labels, classes)
        return tally


class Fit:
    """A regression on all ranks' samples. Collective.

    Args:
        features: [n, D] of this rank.
        labels: int64 [n], 0 to classes - 1; each class has a sample on some rank.

    Attributes:
        weights: float64 [C, D + 1], the intercepts last; one row for two classes.
    """

    def __init__(self, features: torch.Tensor, labels: torch.Tensor, classes: int, c: float, world: World) -> None:
        self.features, self.labels, self.classes, self.world = features, labels, classes, world
        total = sum(world.gather_objects(len(labels)))
        self.scale, self.penalty = 1 / total, 1 / (c * total)
        rows = 1 if classes == 2 else classes
        self.weights = torch.zeros((rows, features.shape[1] + 1), dtype=torch.float64, device=features.device)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Features [n, D] -> float64 [n, C]."""
        made = torch.addmm(self.weights[:, -1], features.double(), self.weights[:, :-1].T)
        return torch.cat([torch.zeros_like(made), made], dim=1) if self.classes == 2 else made

    def run(self, iterations: int) -> bool:
        """Minimise; whether the optimum was reached."""
        if self.classes == 1:
            return True
        steps = torch.optim.LBFGS(
            [self.weights],
            max_iter=iterations,
            max_eval=2 * iterations,
            tolerance_grad=TOLERANCE,
            tolerance_change=0,
            history_size=20,
            line_search_fn="strong_wolfe",
        )
        steps.step(self._value)  # type: ignore[no-untyped-call]
        self._value()
        assert self.weights.grad is not None
        return float(self.weights.grad.abs().max()) <= 1000 * TOLERANCE

    def _value(self) -> torch.Tensor:
        """The objective; sets the gradient of the weights."""
        found = torch.zeros(self.weights.numel() + 1, dtype=torch.float64, device=self.weights.device)
        value, gradient = found[0], found[1:].view(self.weights.shape)
        for rows, labels in _parts(self.features, self.labels):
            log_shares = self.logits(rows).log_softmax(dim=1)
            value -= log_shares.gather(1, labels[:, None]).sum()
            error = log_shares.exp_().scatter_add_(1, labels[:, None], -torch.ones_like(log_shares[:, :1]))
            error = error[:, 1:] if self.classes == 2 else error
            gradient[:, :-1].addmm_(error.T, rows.double())
            gradient[:, -1] += error.sum(dim=0)
        found = self.world.all_reduce_sum(found) * self.scale
        value, gradient = found[0], found[1:].view(self.weights.shape)
        gradient[:, :-1] += self.penalty * self.weights[:, :-1]
        self.weights.grad = gradient
        objective: torch.Tensor = value + self.penalty / 2 * self.weights[:, :-1].square().sum()
        return objective


def _parts(features: torch.Tensor, labels: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield from zip(torch.split(features, AT_ONCE), torch.split(labels, AT_ONCE), strict=True)

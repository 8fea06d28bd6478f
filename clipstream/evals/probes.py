"""Evaluators that learn from the frozen features of labelled images: k nearest neighbours, and a linear probe.

Features are L2-normalised, as in CLIP_benchmark's linear probe. Samples stay on the rank that encoded them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from clipstream.data.source_settings import SourceSettings
from clipstream.distributed.world import World
from clipstream.evals.classes import Labelling
from clipstream.evals.context import EvalContext
from clipstream.evals.metrics import accuracies
from clipstream.evals.settings import FrozenSettings, LinearProbeSettings, NeighboursSettings, source_of
from clipstream.utils.logs import logger

BLOCK = 4096  # training images compared at once, over all ranks
ROWS = 1024  # images classified at once
AT_ONCE = 8192  # samples per pass
ITERATIONS = 1000  # of L-BFGS, at most
TEMPERATURE = 0.07  # of the votes of neighbours
TOLERANCE = 1e-9  # of the largest element of the gradient


@dataclass(frozen=True)
class Labelled:
    """This rank's part of a source."""

    features: torch.Tensor  # float32 [n, D], rows of length 1
    labels: torch.Tensor  # int64 [n]


def encode_labelled(
    context: EvalContext, source: SourceSettings, labelling: Labelling, batch_size: int, key: str = "data"
) -> Labelled:
    """Encode the images of a source. Collective.

    Raises DataError: no rank has a usable image, or a label is not a class.
    """
    features, labels = [], [torch.zeros(0, dtype=torch.int64)]
    for batch in labelling.batches(context, source, batch_size, key):
        features.append(context.encode_image(batch.images))
        labels.append(batch.ids[:, 0].long())
    (rows,) = context.stack("image with a label", features)
    return Labelled(rows, torch.cat(labels).to(rows.device))


def measure(scores: torch.Tensor, labels: torch.Tensor, classes: int) -> torch.Tensor:
    """top1, top5 and n by class, float64 [C, 3], of scores [n, C]; ties go to the lower class.

    A class whose score is -inf is not an answer.
    """
    values, found = scores.sort(dim=1, descending=True, stable=True)
    right = (found == labels[:, None]) & (values > -torch.inf)
    hits = torch.stack([right[:, :1].any(dim=1), right[:, :5].any(dim=1), torch.ones_like(labels, dtype=torch.bool)], 1)
    tally = torch.zeros((classes, 3), dtype=torch.float64, device=scores.device)
    return tally.index_add_(0, labels, hits.double())


class Frozen(ABC):
    """Evaluator that learns from one labelled source and tests on another.

    Raises SettingsError: no data are set, or a file of names is missing or invalid.
    """

    def __init__(self, settings: FrozenSettings) -> None:
        self.batch_size, self.train, self.test = settings.batch_size, settings.train, source_of(settings)
        self.labelling = Labelling.of(settings)

    def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
        """Yields top1, top5, mean_per_class_recall, n, chance and n_train.

        Raises DataError: no usable image in one of the sources, or a label outside the classes.
        """
        train = encode_labelled(context, self.train, self.labelling, self.batch_size, "train")
        test = encode_labelled(context, self.test, self.labelling, self.batch_size)
        if self.labelling.classes is not None:
            classes = len(self.labelling.classes)
        else:
            highest = max((int(part.labels.max()) for part in (train, test) if len(part.labels)), default=0)
            classes = 1 + max(context.world.gather_objects(highest))
        tally = context.world.all_reduce_sum(self.tally(train, test, classes, context.world))
        self.labelling.warn_of_unseen(context, tally[:, 2].tolist())
        yield from accuracies(tally)
        yield "n_train", sum(context.world.gather_objects(len(train.labels)))

    @abstractmethod
    def tally(self, train: Labelled, test: Labelled, classes: int, world: World) -> torch.Tensor:
        """top1, top5 and n by class, float64 [C, 3], of this rank's test samples. Collective."""


class Neighbours(Frozen):
    """k-nearest-neighbour classification by cosine, as scikit-learn's KNeighborsClassifier.

    A neighbour's vote weighs exp(cosine / 0.07), as in DINO (arXiv:2104.14294, appendix).
    """

    def __init__(self, settings: NeighboursSettings) -> None:
        super().__init__(settings)
        self.k = settings.k

    def tally(self, train: Labelled, test: Labelled, classes: int, world: World) -> torch.Tensor:
        near, labels = nearest(train, test.features, self.k, world)
        weights = ((near - 1) / TEMPERATURE).exp()
        tally = torch.zeros((classes, 3), dtype=torch.float64, device=near.device)
        for start in range(0, len(near), ROWS):
            some = slice(start, start + ROWS)
            votes = near.new_zeros((len(near[some]), classes)).scatter_add_(1, labels[some], weights[some])
            tally += measure(votes.masked_fill(votes == 0, -torch.inf), test.labels[some], classes)
        return tally


def nearest(train: Labelled, queries: torch.Tensor, k: int, world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines, float64 [n, k], and labels, int64 [n, k], of the k nearest of all ranks' samples. Collective.

    If there are fewer than k samples, all are returned.
    """
    values = torch.full((len(queries), 0), -torch.inf, dtype=torch.float64, device=queries.device)
    labels = torch.zeros((len(queries), 0), dtype=torch.int64, device=queries.device)
    counts = world.gather_objects(len(train.labels))
    share = -(-BLOCK // world.size)
    for start in range(0, max(counts), share):
        held = [max(0, min(count - start, share)) for count in counts]
        some = slice(start, start + share)
        block, of_block = world.gather_rows(train.features[some], held), world.gather_rows(train.labels[some], held)
        parts = []
        for rows, before, of_rows in zip(*(torch.split(of, ROWS) for of in (queries, values, labels)), strict=True):
            scores = torch.cat([before, rows.double() @ block.double().T], dim=1)
            candidates = torch.cat([of_rows, of_block.expand(len(rows), -1)], dim=1)
            best = scores.topk(min(k, scores.shape[1]), dim=1)
            parts.append((best.values, candidates.gather(1, best.indices)))
        values, labels = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    return values, labels


class LinearProbe(Frozen):
    """Logistic regression: scikit-learn's LogisticRegression, over all ranks, to its optimum.

    It minimises, over weights W [C, D] and intercepts b [C] of the classes in the training data,

        c sum_i (logsumexp_j (W x_i + b)_j - (W x_i + b)_{y_i}) + 1/2 |W|^2

    in float64 by L-BFGS, divided by c times the number of samples. Two classes share one row, with logits 0 for the
    other class, as in scikit-learn. Each rank sums over its own samples, and all ranks take the same steps. CLIP
    (arXiv:2103.00020, section 3.2) uses c = 0.316 for ImageNet.
    """

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

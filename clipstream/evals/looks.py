"""Owns what an evaluation shows to people: the first pictures of rank 0's data, with what the model says of them.

Metrics never depend on it. Other ranks keep nothing, but take part where features of all ranks are needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from clipstream.batch import Batch
from clipstream.evals.context import EvalContext
from clipstream.evals.ranking import products, stand
from clipstream.example import Example

KEPT = 512  # pictures; of 224 pixels some 77 MB
GUESSES = 3
AT_ONCE = 1 << 16  # captions whose scores with the kept pictures exist together: 128 MiB


class Kept:
    """The first pictures of this rank's data, if the context wants examples and this is rank 0.

    Attributes:
        pixels: uint8 [3, H, W] each.
        ids: int [T] each.
        keys: of the samples.
    """

    def __init__(self, context: EvalContext) -> None:
        self._room = KEPT if context.examples_wanted and context.world.is_main else 0
        self.pixels: list[torch.Tensor] = []
        self.ids: list[torch.Tensor] = []
        self.keys: list[str] = []

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, batch: Batch) -> bool:
        """Keep copies of what there is room for, as the batch's memory is used again; whether there was room."""
        room = self._room - len(self)
        if room <= 0 or batch.pixels is None:
            return False
        self.pixels += batch.pixels[:room].clone().unbind()
        self.ids += batch.ids[:room].clone().unbind()
        self.keys += batch.keys[:room]
        return True


def show_retrieval(
    context: EvalContext,
    kept: Kept,
    images: torch.Tensor,
    texts: torch.Tensor,
    owners: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    """Show the kept pictures whose own caption is found best, and worst, among all captions.

    Args:
        context: takes the examples. Every rank calls this.
        kept: rank 0's pictures, the first rows of its features.
        images: this rank's features [n, D].
        texts: this rank's features [m, D].
        owners: int64 [m], rows of `images` that the captions belong to.
        ids: int [m, T], this rank's captions.
    """
    world = context.world
    queries = world.gather_rows(images[: len(kept)])
    if not len(queries):
        return
    own = queries.new_full((len(queries),), -torch.inf, dtype=torch.float64)
    mine = owners < len(kept)  # this is rank 0, or none
    own = own.scatter_reduce(0, owners[mine], products(texts[mine], images[owners[mine]]), "amax")
    own = world.broadcast_object(own.cpu()).to(queries.device)
    ahead, level = world.all_reduce_sum(torch.stack(stand(queries, texts, own)))
    parts = [(some @ queries.T).topk(min(GUESSES, len(some)), dim=0) for some in torch.split(texts, AT_ONCE)]
    values = world.gather_rows(torch.cat([part.values for part in parts]))
    found = [AT_ONCE * number + part.indices for number, part in enumerate(parts)]
    captions = world.gather_rows(ids[torch.cat(found)])
    total = sum(world.gather_objects(len(texts)))
    if not len(kept):
        return
    values, best = values.topk(min(GUESSES, len(values)), dim=0)
    order = sorted(range(len(kept)), key=lambda i: (int(ahead[i] + level[i]), -float(own[i])))
    half = min(context.examples_wanted // 2, len(order) // 2)
    for group, chosen in (("best", order[:half]), ("worst", order[::-1][:half])):
        for i in chosen:
            guesses = [
                (context.decode(captions[j, i]), v) for j, v in zip(best[:, i], values[:, i].tolist(), strict=True)
            ]
            first, last = int(ahead[i]) + 1, int(ahead[i] + level[i])
            text = context.decode(kept.ids[i][: context.tokenizer.context_length])
            places = f"{first} to {last} (equal scores)" if last > first else f"{first}"
            note = f"its caption is in place {places} of {total}"
            context.show(Example(kept.pixels[i], text, kept.keys[i], tuple(guesses), group, note))


def show_classes(
    context: EvalContext, kept: Kept, features: Sequence[torch.Tensor], classifier: torch.Tensor, names: Sequence[str]
) -> None:
    """Show kept pictures with the classes that match them best, the right ones and the wrong ones apart.

    Args:
        context: takes the examples.
        kept: rank 0's pictures; their ids are class numbers.
        features: [n, D] each, of this rank's first batches; at least of the kept pictures.
        classifier: [C, D].
        names: of the C classes.
    """
    if not len(kept):
        return
    values, found = (torch.cat(list(features))[: len(kept)] @ classifier.T).topk(min(GUESSES, len(names)))
    labels = [int(ids[0]) for ids in kept.ids]
    guessed = found.tolist()
    half = context.examples_wanted // 2
    for group, chosen in (
        ("right", [i for i, label in enumerate(labels) if guessed[i][0] == label]),
        ("wrong", [i for i, label in enumerate(labels) if guessed[i][0] != label]),
    ):
        for i in chosen[:half]:
            guesses = tuple((names[j], v) for j, v in zip(guessed[i], values[i].tolist(), strict=True))
            context.show(Example(kept.pixels[i], names[labels[i]], kept.keys[i], guesses, group))

"""Owns what an evaluation shows to people: the first pictures of rank 0's data, with what the model says of them.

Metrics never depend on it. Other ranks keep nothing, but take part where features of all ranks are needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from clipstream.batch import Batch
from clipstream.evals.protocol import EvalContext
from clipstream.evals.ranking import place
from clipstream.example import Example

KEPT = 512  # pictures; of 224 pixels some 77 MB
GUESSES = 3


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
    context: EvalContext, kept: Kept, images: torch.Tensor, texts: torch.Tensor, ids: torch.Tensor
) -> None:
    """Show the kept pictures whose own caption is found best, and worst, among all captions.

    Args:
        context: takes the examples. Every rank calls this.
        kept: rank 0's pictures, the first rows of its features.
        images, texts: this rank's features [n, D].
        ids: int [n, T], this rank's captions.
    """
    everyones, captions = context.world.gather_rows(texts), context.world.gather_rows(ids)
    if not len(kept):
        return
    queries, right = images[: len(kept)], torch.arange(len(kept), device=images.device)
    ahead, level = place(queries, everyones, right)
    own = (queries * everyones[: len(kept)]).sum(dim=1)  # this is rank 0: its captions are the first
    order = sorted(range(len(kept)), key=lambda i: (int(ahead[i] + level[i]), -float(own[i])))
    half = min(context.examples_wanted // 2, len(order) // 2)
    best, worst = order[:half], order[::-1][:half]
    for group, chosen in (("best", best), ("worst", worst)):
        for i in chosen:
            values, found = (everyones @ queries[i]).topk(min(GUESSES, len(everyones)))
            guesses = [(context.decode(captions[j]), v) for j, v in zip(found.tolist(), values.tolist(), strict=True)]
            first, last = int(ahead[i]) + 1, int(ahead[i] + level[i])
            places = f"{first} to {last} (equal scores)" if last > first else f"{first}"
            note = f"its caption is in place {places} of {len(everyones)}"
            context.show(
                Example(kept.pixels[i], context.decode(kept.ids[i]), kept.keys[i], tuple(guesses), group, note)
            )


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

"""Owns what an evaluation shows to people: pictures with what the model says of them, and which classes it confuses.

Most are of the first pictures of rank 0's data; other ranks keep nothing, but take part where features of all are
needed. Pictures that match a user's prompts, and confusions, are those of all the data. Metrics never depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from clipstream.batch import Batch
from clipstream.evals.context import EvalContext
from clipstream.evals.ranking import products, stand
from clipstream.example import Example, Table

KEPT = 512  # pictures; of 224 pixels some 77 MB
GUESSES = 3
MATCHES = 4  # pictures shown for a prompt
WORST = 10  # classes
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


class Matches:
    """The pictures of all ranks' data that match prompts of the user's own best. Every rank makes one, and calls all.

    Args:
        context: takes the examples; where it wants none, nothing is kept.
        prompts: texts; none are shown no picture.
    """

    def __init__(self, context: EvalContext, prompts: Sequence[str]) -> None:
        self._context, self._prompts = context, prompts if context.examples_wanted else ()
        self._texts = context.encode_prompts(self._prompts) if self._prompts else None
        self._found: list[list[tuple[float, Example]]] = [[] for _ in self._prompts]

    def add(self, images: torch.Tensor, batch: Batch, say: Callable[[int], str]) -> None:
        """Look at a batch.

        Args:
            images: its features [n, D].
            batch: its pixels and keys.
            say: the words of its i-th picture.
        """
        if self._texts is None or batch.pixels is None or not len(images):
            return
        values, places = (self._texts @ images.T).topk(min(MATCHES, len(images)))
        for number, found in enumerate(self._found):
            for score, i in zip(values[number].tolist(), places[number].tolist(), strict=True):
                if len(found) < MATCHES or score > found[-1][0]:
                    found.append((score, Example(batch.pixels[i].cpu().clone(), say(i), batch.keys[i])))
            found.sort(key=lambda one: (-one[0], one[1].key))
            del found[MATCHES:]

    def show(self) -> None:
        """Show, for each prompt, the best pictures of all ranks."""
        world = self._context.world
        for prompt, found in zip(self._prompts, self._found, strict=True):
            told = [(score, example.key) for score, example in found]
            best = sorted((one for part in world.gather_objects(told) for one in part), key=_order)[:MATCHES]
            mine = [(score, example) for score, example in found if (score, example.key) in best]
            parts = world.gather_objects(mine)  # no more pixels than are shown
            pictures = {(score, example.key): example for part in parts for score, example in part}
            for score, key in best:
                example = pictures[score, key]
                # Beyond examples_wanted: they were asked for by name.
                self._context.examples.append(replace(example, group=f"“{prompt}”", note=f"match {score:.3f}"))


def _order(one: tuple[float, str]) -> tuple[float, str]:
    return -one[0], one[1]


def show_confusions(
    context: EvalContext, labels: Sequence[torch.Tensor], guesses: Sequence[torch.Tensor], names: Sequence[str]
) -> None:
    """Show which classes are recognised worst, and what their pictures are taken for. Every rank calls this.

    Args:
        context: takes the table; where it wants no examples, nothing is shown.
        labels: int64 [n] each, this rank's.
        guesses: int64 [n] each, the classes that match best.
        names: of the C classes.
    """
    if not context.examples_wanted:
        return
    none = torch.zeros(0, dtype=torch.int64, device=context.world.device)
    there, taken = torch.cat([none, *labels]), torch.cat([none, *guesses])
    count = len(names)
    seen = context.world.all_reduce_sum(torch.bincount(there, minlength=count))
    right = context.world.all_reduce_sum(torch.bincount(there[there == taken], minlength=count))
    share = (right.double() / seen).nan_to_num(nan=1.0)  # of a class without pictures nothing is known
    worst = [i for i in share.argsort(stable=True).tolist()[:WORST] if share[i] < 1]
    if not worst:
        return
    confused = torch.stack([torch.bincount(taken[there == i], minlength=count) for i in worst])
    confused = context.world.all_reduce_sum(confused)
    rows = []
    for row, i in zip(confused, worst, strict=True):
        row[i] = 0
        often = [j for j in row.argsort(descending=True, stable=True).tolist()[:GUESSES] if row[j]]
        said = ", ".join(f"{names[j]} ({int(row[j])})" for j in often)
        rows.append((names[i], f"{int(right[i])} of {int(seen[i])}", said))
    context.tables.append(Table("the worst classes", ("class", "right", "taken for"), tuple(rows)))

"""Images and tables that an evaluation shows: best and worst answers, matches of prompts, confused classes.

Best and worst answers are chosen from the first images of rank 0; other ranks take part in collectives only. Matches
of a user's prompts and confusions cover all data. Metrics never depend on this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from typing import NamedTuple

import torch

from clipstream.data.batch import Batch
from clipstream.evals.context import EvalContext, Example, Table
from clipstream.evals.metrics import products, stand

KEPT = 512  # images; 77 MB at 224 pixels
GUESSES = 3
CANDIDATES = 3 * GUESSES  # captions, among which some may be the same
MATCHES = 4  # images per prompt
WORST = 10  # classes
REMEMBERED = 1 << 17  # captions by their ids, about 60 MB
AT_ONCE = 1 << 16  # captions scored against the kept images at once: 128 MiB


class Sample(NamedTuple):
    """An image that may be shown."""

    pixels: torch.Tensor  # uint8 [3, H, W]
    ids: torch.Tensor  # int [T]
    key: str
    caption: str  # '' where it is not known


class Kept(list[Sample]):
    """The first images of rank 0's data; empty on other ranks, and if the context wants no examples."""

    def __init__(self, context: EvalContext) -> None:
        super().__init__()
        self._capacity = KEPT if context.examples_wanted and context.world.is_main else 0

    def take(self, batch: Batch) -> bool:
        """Copy the batch's first samples, as many as still fit (batch memory is reused); whether any did."""
        free = max(0, self._capacity - len(self))
        if not free or batch.pixels is None:
            return False
        captions = batch.captions or [""] * len(batch)
        self += map(Sample, batch.pixels[:free].clone(), batch.ids[:free].clone(), batch.keys[:free], captions)
        return True

    def only(self, chosen: torch.Tensor) -> None:
        """Leave out images. `chosen`, bool: one for each, and more."""
        self[:] = compress(self, chosen[: len(self)].tolist())


class Wording:
    """The captions of this rank by their ids, for those that are shown: as they were written, not as ids decode.

    At most REMEMBERED are kept; later ones, and those of a source that gives none, are decoded.
    """

    def __init__(self, context: EvalContext) -> None:
        self._context = context
        self._texts: dict[bytes, str] = {}

    def add(self, ids: torch.Tensor, captions: Sequence[str]) -> None:
        """Take captions and their ids, int [n, T], on the CPU."""
        if len(self._texts) < REMEMBERED:
            self._texts.update(zip((row.tobytes() for row in ids.numpy()), captions, strict=True))

    def of(self, ids: torch.Tensor) -> list[str]:
        """The captions with these ids, int [n, T], of any rank, with a mark where the context cuts them. Collective."""
        rows = ids.cpu().to(torch.int32)
        mine = {i: text for i, row in enumerate(rows.numpy()) if (text := self._texts.get(row.tobytes())) is not None}
        found = {i: text for part in self._context.world.gather_objects(mine)[::-1] for i, text in part.items()}
        return [self._context.label(found.get(i), row) for i, row in enumerate(rows)]


def show_retrieval(
    context: EvalContext,
    kept: Kept,
    pairs: Sequence[torch.Tensor],
    owners: torch.Tensor,
    ids: torch.Tensor,
    wording: Wording,
) -> None:
    """Show the kept images whose own caption ranks best, and worst, among all captions. Collective.

    Args:
        kept: the images of the first rows of rank 0's `images`.
        pairs: this rank's features of images [n, D] and of texts [m, D].
        owners: int64 [m], the row of `images` for each caption.
        ids: int [m, T], this rank's captions.
    """
    world, (images, texts) = context.world, pairs
    queries = world.gather_rows(images[: len(kept)])
    if not len(queries):
        return
    own = queries.new_full((len(queries),), -torch.inf, dtype=torch.float64)
    mine = owners < len(kept)
    own = own.scatter_reduce(0, owners[mine], products(texts[mine], images[owners[mine]]), "amax")
    own = world.broadcast_object(own.cpu()).to(queries.device)
    ahead, level = world.all_reduce_sum(torch.stack(stand(queries, texts, own)))
    parts = [(some @ queries.T).topk(min(CANDIDATES, len(some)), dim=0) for some in torch.split(texts, AT_ONCE)]
    values = world.gather_rows(torch.cat([part.values for part in parts]))
    found = [AT_ONCE * number + part.indices for number, part in enumerate(parts)]
    captions = world.gather_rows(ids[torch.cat(found)])
    total = sum(world.gather_objects(len(texts)))
    values, best = values.topk(min(CANDIDATES, len(values)), dim=0)
    captions = captions.gather(0, best[..., None].expand(-1, -1, captions.shape[2]))
    said = wording.of(captions.flatten(0, 1))
    if not len(kept):
        return
    order = sorted(range(len(kept)), key=lambda i: (int(ahead[i] + level[i]), -float(own[i])))
    half = min(context.examples_wanted // 2, len(order) // 2)
    right = [i for i in order[:half] if not ahead[i]] or order[:half]
    for group, chosen in (("best", right), ("worst", order[::-1][:half])):
        for i in chosen:
            best_of: dict[str, float] = {}  # the same text once
            for text, score in zip(said[i :: len(queries)], values[:, i].tolist(), strict=True):
                best_of.setdefault(text, score)
            guesses = list(best_of.items())[:GUESSES]
            first, last = int(ahead[i]) + 1, int(ahead[i] + level[i])
            text = context.label(kept[i].caption, kept[i].ids[: context.tokenizer.context_length])
            places = f"{first} to {last} (equal scores)" if last > first else f"{first}"
            note = f"its caption is in place {places} of {total}"
            context.show(Example(kept[i].pixels, text, kept[i].key, tuple(guesses), group, note))


def show_classes(
    context: EvalContext, kept: Kept, features: Sequence[torch.Tensor], classifier: torch.Tensor, names: Sequence[str]
) -> None:
    """Show kept images with the classes that match them best, correct and wrong ones in separate groups.

    Args:
        kept: images whose ids are class numbers; those with -1 are not shown.
        features: [n, D] each, of this rank's first batches, at least of the kept images.
        classifier: [C, D].
    """
    if not len(kept):
        return
    values, found = (torch.cat(list(features))[: len(kept)] @ classifier.T).topk(min(GUESSES, len(names)))
    labels = [int(one.ids[0]) for one in kept]
    guessed = found.tolist()
    half = context.examples_wanted // 2
    for group, chosen in (
        ("right", [i for i, label in enumerate(labels) if guessed[i][0] == label]),
        ("wrong", [i for i, label in enumerate(labels) if label >= 0 and guessed[i][0] != label]),
    ):
        for i in chosen[:half]:
            guesses = tuple((names[j], v) for j, v in zip(guessed[i], values[i].tolist(), strict=True))
            context.show(Example(kept[i].pixels, names[labels[i]], kept[i].key, guesses, group))


class Matches:
    """The images of all ranks' data that match a user's prompts best. Construction and `show` are collective.

    Args:
        context: takes the examples; if it wants none, nothing is kept.
    """

    def __init__(self, context: EvalContext, prompts: Sequence[str]) -> None:
        self._context, self._prompts = context, prompts if context.examples_wanted else ()
        self._texts = context.encode_prompts(self._prompts) if self._prompts else None
        self._found: list[list[tuple[float, Example]]] = [[] for _ in self._prompts]

    def add(self, images: torch.Tensor, batch: Batch, say: Callable[[int], str]) -> None:
        """Take a batch.

        Args:
            images: its features [n, D].
            say: gives the text of its i-th image.
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
        """Show the best images of all ranks for each prompt."""
        world = self._context.world
        for prompt, found in zip(self._prompts, self._found, strict=True):
            parts = world.gather_objects([(score, example.key) for score, example in found])
            candidates = [candidate for part in parts for candidate in part]
            best = sorted(candidates, key=lambda one: (-one[0], one[1]))[:MATCHES]
            mine = [(score, example) for score, example in found if (score, example.key) in best]
            parts = world.gather_objects(mine)  # only the pixels that are shown
            images = {(score, example.key): example for part in parts for score, example in part}
            for score, key in best:
                example = images[score, key]
                # In addition to examples_wanted: the user asked for these.
                self._context.examples.append(replace(example, group=f"“{prompt}”", note=f"match {score:.3f}"))


def show_confusions(
    context: EvalContext, labels: Sequence[torch.Tensor], guesses: Sequence[torch.Tensor], names: Sequence[str]
) -> None:
    """Show the classes with the lowest recall, and what their images are taken for. Collective.

    Args:
        context: takes the table; if it wants no examples, nothing is shown.
        labels: int64 [n] each, of this rank.
        guesses: int64 [n] each, the classes that match best.
    """
    if not context.examples_wanted:
        return
    none = torch.zeros(0, dtype=torch.int64, device=context.world.device)
    there, taken = torch.cat([none, *labels]), torch.cat([none, *guesses])
    count = len(names)
    seen = context.world.all_reduce_sum(torch.bincount(there, minlength=count))
    right = context.world.all_reduce_sum(torch.bincount(there[there == taken], minlength=count))
    share = (right.double() / seen).nan_to_num(nan=1.0)  # classes without images are left out
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

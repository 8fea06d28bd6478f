"""Owns image-text retrieval: R@1, R@5 and R@10 both ways over all pairs of a source, one caption a picture.

Features of all ranks are gathered, the rows of the score matrix stay with the rank that encoded them, and no more than
a tile of it exists at once. Equal captions of different pictures are different answers; ties: see `ranking`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from clipstream.evals.looks import Kept, show_retrieval
from clipstream.evals.protocol import EvalContext, source_of
from clipstream.evals.ranking import hits, place
from clipstream.evals.settings import RetrievalSettings
from clipstream.world import World

KS = (1, 5, 10)


class Retrieval:
    """Yields image_to_text_R@k and text_to_image_R@k for k = 1, 5, 10, then n (pairs) and chance_R@1 (1/n).

    Raises:
        SettingsError: no data are set.
    """

    def __init__(self, settings: RetrievalSettings) -> None:
        self.settings = settings
        self.source = source_of(settings)

    def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
        """Evaluate on all ranks; the values are 0 to 1, but for n.

        Raises:
            DataError: no usable pair.
        """
        settings = self.settings
        images, texts, ids = [], [], []
        kept = Kept(context)
        for batch in context.batches(self.source, settings.batch_size, max_samples=settings.max_samples):
            assert batch.pixels is not None, "an evaluation source gives pixels"
            images.append(context.encode_image(batch.pixels))
            texts.append(context.encode_text(batch.ids))
            kept.add(batch)
            if context.examples_wanted:
                ids.append(batch.ids.clone())
        width = max(context.world.gather_objects(images[0].shape[1] if images else 0))
        if width == 0:
            raise context.unusable("pair")
        nothing = torch.zeros((0, width), device=context.world.device)
        pairs = torch.cat([nothing, *images]), torch.cat([nothing, *texts])
        if context.examples_wanted:
            none = torch.zeros((0, context.tokenizer.context_length), dtype=torch.int32)
            captions = torch.cat([none, *ids]).to(nothing.device)
            show_retrieval(context, kept, *pairs, captions)
        yield from recalls(*pairs, context.world)


def recalls(
    images: torch.Tensor, texts: torch.Tensor, world: World, ks: Sequence[int] = KS
) -> Iterator[tuple[str, float]]:
    """Recalls of all ranks' pairs, from this rank's features.

    Args:
        images: [n, D], L2-normalised; n may differ by rank.
        texts: [n, D], L2-normalised; row i is the caption of picture i.
        world: every rank calls this.
        ks: how many answers are looked at.

    Yields:
        (name, value) as `Retrieval`.
    """
    counts = world.gather_objects(len(images))
    total, first = sum(counts), sum(counts[: world.rank])
    right = torch.arange(first, first + len(images), device=images.device)
    for way, queries, others in (("image_to_text", images, texts), ("text_to_image", texts, images)):
        ahead, level = place(queries, world.gather_rows(others), right)
        found = world.all_reduce_sum(torch.stack([hits(ahead, level, k).sum() for k in ks]))
        for k, value in zip(ks, found.tolist(), strict=True):
            yield f"{way}_R@{k}", value / total
    yield "n", total
    yield "chance_R@1", 1 / total

"""Owns image-text retrieval: R@1, R@5, R@10 and median rank both ways over all pictures and captions of a source.

A picture may have any number of captions, and one of them among the first k is a hit, as CLIP_benchmark counts. The
captions' features stay with the rank that encoded them, the pictures' come by, and no more than a tile of the scores
exists at once. Equal captions of different pictures are different answers; ties: see `ranking`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from clipstream.batch import Batch
from clipstream.data.benchmark import RETRIEVAL, of_source
from clipstream.data.targets import NO_CAPTION, CaptionsEncoder, CaptionsField
from clipstream.evals.context import EvalContext
from clipstream.evals.looks import Kept, Matches, show_retrieval
from clipstream.evals.protocol import source_of
from clipstream.evals.ranking import Places, place_pairs
from clipstream.evals.settings import RetrievalSettings
from clipstream.world import World

KS = (1, 5, 10)


class Retrieval:
    """Yields image_to_text_R@k and text_to_image_R@k for k = 1, 5, 10, image_to_text_median_rank and
    text_to_image_median_rank (from 1), n (pictures), captions and chance_R@1 (1/n, for both ways).

    Raises:
        SettingsError: no data are set, or a data set in CLIP_benchmark's layout is not there.
    """

    def __init__(self, settings: RetrievalSettings) -> None:
        self.settings = settings
        self.source = source_of(settings)
        benchmark = None if settings.captions else of_source(self.source.shards)
        self.all = settings.captions == "all" or (benchmark is not None and benchmark.kind == RETRIEVAL)

    def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
        """Evaluate on all ranks; the values are 0 to 1, but for ranks, n and captions.

        Raises:
            DataError: no usable pair, or a picture with too many captions.
        """
        settings, length = self.settings, context.tokenizer.context_length
        target = CaptionsField(self.source.caption) if self.all else None
        encoder = CaptionsEncoder(context.tokenizer, settings.max_captions) if self.all else None
        images, texts, counts, ids = [], [], [], []
        kept, matches = Kept(context), Matches(context, settings.prompts)
        for batch in context.batches(
            self.source, settings.batch_size, target=target, tokenizer=encoder, max_samples=settings.max_samples
        ):
            assert batch.pixels is not None, "an evaluation source gives pixels"
            captions = batch.ids.view(len(batch), -1, length)
            there = captions[:, :, 0] != NO_CAPTION
            images.append(context.encode_image(batch.pixels))
            texts += [context.encode_text(some) for some in torch.split(captions[there], settings.batch_size)]
            counts.append(there.sum(dim=1))
            kept.add(batch)
            matches.add(images[-1], batch, partial(_first_caption, context, batch))
            if context.examples_wanted:
                ids.append(captions[there])
        width = max(context.world.gather_objects(images[0].shape[1] if images else 0))
        if width == 0:
            raise context.unusable("pair")
        nothing = torch.zeros((0, width), device=context.world.device)
        pairs = torch.cat([nothing, *images]), torch.cat([nothing, *texts])
        of_each = torch.cat([torch.zeros(0, dtype=torch.int64), *counts]).to(nothing.device)
        owners = torch.arange(len(of_each), device=nothing.device).repeat_interleave(of_each)
        if context.examples_wanted:
            none = torch.zeros((0, length), dtype=torch.int32)
            show_retrieval(context, kept, *pairs, owners, torch.cat([none, *ids]).to(nothing.device))
            matches.show()
        yield from recalls(*pairs, context.world, owners=owners)


def _first_caption(context: EvalContext, batch: Batch, i: int) -> str:
    return context.decode(batch.ids[i][: context.tokenizer.context_length])


def recalls(
    images: torch.Tensor,
    texts: torch.Tensor,
    world: World,
    ks: Sequence[int] = KS,
    *,
    owners: torch.Tensor | None = None,
) -> Iterator[tuple[str, float]]:
    """Recalls of all ranks' pictures and captions, from this rank's features.

    Args:
        images: [n, D], L2-normalised; n may differ by rank.
        texts: [m, D], L2-normalised.
        world: every rank calls this.
        ks: how many answers are looked at.
        owners: int64 [m], the picture of each caption, a row of `images`; row i is that of picture i unless given.

    Yields:
        (name, value) as `Retrieval`.
    """
    if owners is None:
        owners = torch.arange(len(texts), device=texts.device)
    pictures, captions = (sum(world.gather_objects(len(rows))) for rows in (images, texts))
    of_images, of_texts = place_pairs(images, texts, owners, world)
    ways = (("image_to_text", of_images, pictures, captions), ("text_to_image", of_texts, captions, pictures))
    for way, places, queries, _ in ways:
        found = world.all_reduce_sum(torch.stack([places.hits(k).sum() for k in ks]))
        for k, value in zip(ks, found.tolist(), strict=True):
            yield f"{way}_R@{k}", value / queries
    for way, places, _, answers in ways:
        yield f"{way}_median_rank", median(places, answers, world)
    yield "n", pictures
    yield "captions", captions
    yield "chance_R@1", 1 / pictures


def median(places: Places, answers: int, world: World) -> float:
    """Of the places of the first right answers, of all ranks' queries; the mean of both middle ones."""
    ranks = world.gather_rows(places.first(answers)).sort().values
    middle = ranks[(len(ranks) - 1) // 2 : len(ranks) // 2 + 1]
    return float(middle.mean())

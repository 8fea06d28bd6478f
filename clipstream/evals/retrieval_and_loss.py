"""Evaluators of pairs: retrieval, and the loss of training on pairs that are held out.

Retrieval is R@1, R@5, R@10 and median rank in both directions over all images and captions of a source. An image may
have any number of captions; one of them among the first k is a hit, as in CLIP_benchmark. Samples with the same image
file are one image with the captions of all, and a caption (the same token ids) that several images have is right for
all of them, but for data sets in CLIP_benchmark's layout, which it evaluates as they are. For ties and memory see
`evals.metrics`.

The validation loss is that of training, in batches of its global size. The batches are fixed: pairs are ordered by a
hash of image and ids, for any number of ranks and packing into shards. A contrastive loss depends on its batch size, so
an incomplete last batch is left out (`left_out` counts its pairs); if there are fewer pairs than one batch, they form a
single smaller batch (`batch_size`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from clipstream.data.batch import Batch, hash_rows
from clipstream.data.decode.labels import NO_CAPTION, CaptionsEncoder, CaptionsField
from clipstream.data.sources.tars import RETRIEVAL, of_source
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.evals.context import EvalContext, of_samples
from clipstream.evals.gallery import Kept, Matches, Wording, show_retrieval
from clipstream.evals.metrics import EqualCaptions, Ranks, place_pairs
from clipstream.evals.settings import LossEvalSettings, RetrievalSettings, source_of
from clipstream.utils.logs import logger

KS = (1, 5, 10)
MOST_CAPTIONS = 64  # of an image


class Retrieval:
    """Yields image_to_text_R@k and text_to_image_R@k for k = 1, 5, 10, image_to_text_median_rank and
    text_to_image_median_rank (from 1), n (images), captions and chance_R@1 (both directions; 1/n if captions differ).

    Raises SettingsError: no data are set, or a data set in CLIP_benchmark's layout is missing.
    """

    def __init__(self, settings: RetrievalSettings) -> None:
        self.settings = settings
        self.source = source_of(settings)
        benchmark = of_source(self.source.shards, self.source.type)
        own = benchmark is not None and not settings.captions and benchmark.kind == RETRIEVAL
        self.all, self.groups = settings.captions == "all" or own, benchmark is None
        self.told = False  # whether the user knows that images or captions are shared

    def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
        """Evaluate. Collective. Raises DataError: no usable pair, or an image with too many captions."""
        settings, length = self.settings, context.tokenizer.context_length
        target = CaptionsField(self.source.caption) if self.all else None
        encoder = CaptionsEncoder(context.tokenizer, MOST_CAPTIONS) if self.all else None
        images, texts, counts, ids, hashes, checksums = [], [], [], [], [], []
        kept, matches, wording = Kept(context), Matches(context, settings.prompts), Wording(context)
        for batch in context.batches(
            self.source, settings.batch_size, target=target, tokenizer=encoder, max_samples=settings.max_samples
        ):
            assert batch.checksums is not None, "an evaluation source gives images"
            checksums.append(batch.checksums.clone())
            captions = batch.ids.view(len(batch), -1, length)
            there = captions[:, :, 0] != NO_CAPTION
            images.append(context.encode_image(batch.images))
            texts += [context.encode_text(some) for some in torch.split(captions[there], settings.batch_size)]
            counts.append(there.sum(dim=1))
            hashes.append(hash_rows(captions[there]))
            kept.take(batch)
            words = batch.captions or [""] * len(batch)
            matches.add(images[-1], batch, lambda i, of=batch.ids, words=words: context.label(words[i], of[i][:length]))  # type: ignore[misc]
            if context.examples_wanted:
                ids.append(captions[there])
            if batch.captions is not None and ids:
                wording.add(ids[-1], [text for one in words for text in (one.split("\n") if self.all else [one])])
        pairs, device, none = context.stack("pair", images, texts), context.world.device, torch.zeros(0).long()
        of_each = torch.cat([none, *counts]).to(device)
        owners = torch.arange(len(of_each), device=device).repeat_interleave(of_each)
        tokens = torch.cat([torch.zeros((0, length), dtype=torch.int32), *ids]).to(device)
        same, equal, said = torch.cat([none, *hashes]).to(device), None, []
        if self.groups:
            files = context.world.gather_rows(torch.cat([none, *checksums]).to(device))
            count = len(torch.unique(files))
            if count < len(files):
                own, here, owners = share_images(owners, len(pairs[0]), files, context.world)
                pairs = [pairs[0][own], context.world.gather_rows(pairs[1])[here]]
                same = context.world.gather_rows(same)[here]
                tokens = context.world.gather_rows(tokens)[here] if context.examples_wanted else tokens
                kept.only(own)
                said.append(
                    f"{len(files):,} samples have {count:,} different images: "
                    "samples with the same image count as one image with several captions"
                )
            if (equal := EqualCaptions.find(same, owners, context.world)) is not None:
                pairs[1] = context.world.gather_rows(pairs[1])[equal.first]  # of copies they differ by rounding
                times = equal.of.bincount()
                said.append(
                    f"{len(equal.of):,} captions have {len(times):,} different texts, one of them "
                    f"{int(times.max()):,} times: a text counts as right for each image that has it"
                )
            for text in said if context.world.is_main and context.AT_MOST is None and not self.told else ():
                logger.info(f"evaluation {context.name!r}: {text}")
                self.told = True
        if context.examples_wanted:
            show_retrieval(context, kept, pairs, owners, tokens, wording)
            matches.show()
        yield from recalls(pairs[0], pairs[1], context.world, owners=owners, equal=equal)


def share_images(
    owners: torch.Tensor, count: int, files: torch.Tensor, world: World
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Leave each image once, on the rank of its first sample, with its captions. Collective.

    Args:
        owners: int64 [m], the image of each caption.
        count: images of this rank, n.
        files: int64 [N], checksums of the image files of all ranks' images, in rank order.

    Returns:
        (bool [n], which images stay; bool [M], which of all ranks' captions are theirs; the new `owners` of these).
    """
    start = sum(world.gather_objects(count)[: world.rank])
    distinct, same = torch.unique(files, return_inverse=True)
    samples = torch.arange(len(files)).to(same)
    first = torch.full_like(distinct, len(files)).scatter_reduce(0, same, samples, "amin")[same]  # with its image
    own = (first == samples)[start : start + count]
    of_texts = world.gather_rows(first[start + owners]) - start
    here = (of_texts >= 0) & (of_texts < count)
    return own, here, (own.cumsum(0) - 1)[of_texts[here]]


def recalls(
    images: torch.Tensor,
    texts: torch.Tensor,
    world: World,
    *,
    owners: torch.Tensor | None = None,
    equal: EqualCaptions | None = None,
) -> Iterator[tuple[str, float]]:
    """Yields (name, value) as `Retrieval`, over all ranks' images and captions. Collective.

    Args:
        images: [n, D], L2-normalised, of this rank.
        texts: [m, D], L2-normalised, of this rank.
        owners: int64 [m], the row of `images` for each caption; by default caption i belongs to image i.
        equal: the captions that several images have, whose features are equal.
    """
    if owners is None:
        owners = torch.arange(len(texts), device=texts.device)
    n, captions = (sum(world.gather_objects(len(rows))) for rows in (images, texts))
    of_images, of_texts = place_pairs(images, texts, owners, world, equal=equal)
    ways = (("image_to_text", of_images, n, captions), ("text_to_image", of_texts, captions, n))
    for way, places, queries, _ in ways:
        found = world.all_reduce_sum(torch.stack([places.hits(k).sum() for k in KS]))
        for k, value in zip(KS, found.tolist(), strict=True):
            yield f"{way}_R@{k}", value / queries
    for way, places, _, answers in ways:
        yield f"{way}_median_rank", median(places, answers, world)
    yield "n", n
    yield "captions", captions
    right = captions if equal is None else int(world.all_reduce_sum(equal.copies.sum()))  # of all pairs
    yield "chance_R@1", right / (n * captions)


def median(places: Ranks, answers: int, world: World) -> float:
    """Median rank of the first right answers of all ranks' queries, of `answers`. Collective."""
    ranks = world.gather_rows(places.first(answers)).sort().values
    middle = ranks[(len(ranks) - 1) // 2 : len(ranks) // 2 + 1]
    return float(middle.mean())


class ValidationLoss:
    """Yields val_loss (mean over batches), n (pairs in them), batch_size, batches and left_out (pairs).

    Raises SettingsError: no data are set.
    """

    def __init__(self, settings: LossEvalSettings) -> None:
        self.settings = settings
        self.source = source_of(settings)

    def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
        """Evaluate. Collective.

        Raises:
            DataError: no usable pair.
            SettingsError: the loss or the batch size is unknown.
        """
        size = self.settings.global_batch_size or context.data.global_batch_size
        if context.loss is None or not size:
            raise SettingsError("requires a training run, or global_batch_size")
        world, images, texts, numbers = context.world, [], [], []
        keys: list[str] = []
        for batch in context.batches(self.source, self.settings.batch_size, max_samples=self.settings.max_samples):
            assert batch.checksums is not None, "an evaluation source gives images"
            images.append(context.encode_image(batch.images))
            texts.append(context.encode_text(batch.ids))
            marks = torch.from_numpy(of_samples(batch)[1].astype(np.int64))
            numbers.append(torch.cat([marks[:, None], batch.checksums[:, None], batch.ids.long()], dim=1))
            keys += batch.keys
        # All ranks' pairs, on every rank.
        all_images, all_texts = map(world.gather_rows, context.stack("pair", images, texts))
        none = torch.zeros((0, 2 + context.tokenizer.context_length), dtype=torch.int64)
        all_numbers = world.gather_rows(torch.cat([none, *numbers]).to(world.device))
        all_keys = [key for some in world.gather_objects(keys) for key in some]
        order = all_numbers[:, 0].sort(stable=True).indices
        total = len(order)
        size = min(size, total)
        count = total // size
        losses = []
        for number in range(count):
            # This rank's part of a batch, as in training.
            first, last = (number * size + size * rank // world.size for rank in (world.rank, world.rank + 1))
            rows = order[first:last]
            batch = Batch(
                pixels=None,
                ids=all_numbers[rows, 2:].int(),
                weights=torch.ones(len(rows), device=rows.device),
                keys=tuple(all_keys[row] for row in rows.tolist()),
                sources=torch.zeros(len(rows), dtype=torch.uint8),
                step=number,
                global_size=size,
                checksums=all_numbers[rows, 1],
            )
            with torch.no_grad():
                share = context.loss(context.with_scalars(all_images[rows], all_texts[rows]), batch, world)
            losses.append(share.detach().double())
        yield "val_loss", float(world.all_reduce_sum(torch.stack(losses)).mean())
        yield "n", count * size
        yield "batch_size", size
        yield "batches", count
        yield "left_out", total - count * size

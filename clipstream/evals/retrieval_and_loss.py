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

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress

import numpy as np
import torch

from clipstream.data.batch import Batch, hash_rows
from clipstream.data.decode.labels import NO_CAPTION, CaptionsEncoder, CaptionsField, LanguagesField
from clipstream.data.sources.tars import RETRIEVAL, of_source
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.evals.context import EvalContext, of_samples
from clipstream.evals.examples import Kept, Matches, Wording, show_retrieval
from clipstream.evals.metrics import EqualCaptions, first_places, place_pairs
from clipstream.evals.settings import LossEvalSettings, RetrievalSettings, source_of
from clipstream.evals.statistics import by_language
from clipstream.utils.logs import logger

KS = (1, 5, 10)
MOST_CAPTIONS = 64  # of an image
MOST_OF_LANGUAGE = 4  # on average, of an image in a language


@dataclass
class Texts:
    """The captions of this rank in one language."""

    features: list[torch.Tensor] = field(default_factory=list)  # [m, D] each
    hashes: list[torch.Tensor] = field(default_factory=list)  # int64 [m] each, equal for equal captions
    tokens: list[torch.Tensor] = field(default_factory=list)  # int [m, T] each, where they may be shown


class Retrieval:
    """Yields image_to_text_R@k and text_to_image_R@k for k = 1, 5, 10, image_to_text_median_rank and
    text_to_image_median_rank (from 1), n (images), captions and chance_R@1 (both directions; 1/n if captions differ).

    With languages it yields what `statistics.by_language` does of these. Images without a caption in a language are
    left out for that language; the images that are shown are those of the first language.

    Raises SettingsError: no data are set, a data set in CLIP_benchmark's layout is missing, or {lang} has no place.
    """

    def __init__(self, settings: RetrievalSettings) -> None:
        self.settings = settings
        self.source = source_of(settings)
        for key, text in settings.conflicts():  # of data that were set later than the settings were read
            raise SettingsError(f"{key}: {text}")
        benchmark = of_source(self.source.shards, self.source.type)
        own = benchmark is not None and not settings.captions and benchmark.kind == RETRIEVAL
        self.languages = settings.languages or [""]
        self.all, self.groups = settings.captions == "all" or own, benchmark is None
        self.target: CaptionsField | LanguagesField | None = CaptionsField(self.source.caption) if self.all else None
        self.most, self.lead = MOST_CAPTIONS if self.all else 1, 0
        if settings.languages:
            self.target = LanguagesField(self.source.caption, settings.languages, every=self.all)
            self.lead = 1  # the number of the language stands before ids
            self.most = max(self.most, len(self.languages) * (MOST_OF_LANGUAGE if self.all else 1))
        self.told = False  # whether the user knows that images or captions are shared

    def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
        """Evaluate. Collective. Raises DataError: no usable pair, or an image with too many captions."""
        settings, lead, number = self.settings, self.lead, len(self.languages)
        width = lead + context.tokenizer.context_length
        encoder = CaptionsEncoder(context.tokenizer, self.most, languages=bool(lead)) if self.target else None
        images, checksums, counts, found = [], [], [], [Texts() for _ in self.languages]
        kept, matches, wording = Kept(context), Matches(context, settings.prompts), Wording(context)
        for batch in context.batches(
            self.source, settings.batch_size, target=self.target, tokenizer=encoder, max_samples=settings.max_samples
        ):
            assert batch.checksums is not None, "an evaluation source gives images"
            checksums.append(batch.checksums.clone())
            slots = batch.ids.view(len(batch), -1, width)
            there = slots[:, :, 0] != NO_CAPTION
            tokens, owners = slots[there][:, lead:], there.nonzero()[:, 0]
            language = slots[there][:, 0].long() if lead else torch.zeros(len(tokens)).long()
            counts.append((owners * number + language).bincount(minlength=len(batch) * number).view(-1, number))
            images.append(context.encode_image(batch.images))
            texts = torch.cat([context.encode_text(some) for some in torch.split(tokens, settings.batch_size)])
            hashes = hash_rows(tokens)
            for i, one in enumerate(found):
                own = language == i
                one.features.append(texts[own.to(texts.device)])
                one.hashes.append(hashes[own])
            if not context.examples_wanted:
                continue
            words = [text for caption in batch.captions or () for text in self._split(caption)] or [""] * len(tokens)
            first = torch.searchsorted(owners, torch.arange(len(batch))).tolist()  # the first caption of each image
            shown = replace(batch, ids=tokens[first], captions=tuple(words[i] for i in first))
            kept.take(shown)
            matches.add(images[-1], batch, lambda i, of=shown: context.label(of.captions[i], of.ids[i]))  # type: ignore[misc]
            found[0].tokens.append(tokens[language == 0])
            if batch.captions is not None:
                wording.add(found[0].tokens[-1], list(compress(words, (language == 0).tolist())))
        pictures, *features = context.stack("pair", images, *(one.features for one in found))
        device, metrics = context.world.device, dict[str, dict[str, float]]()
        files = torch.cat([torch.zeros(0).long(), *checksums]).to(device)
        of_each = torch.cat([torch.zeros(0, number).long(), *counts]).to(device)
        for i, name in enumerate(self.languages):
            has = of_each[:, i] > 0
            there = sum(context.world.gather_objects(int(has.sum())))
            if not there and context.AT_MOST is not None:
                continue  # the few samples of a dry run may lack a language
            if not there:
                raise context.unusable(f"caption in {name}")
            show = (kept, wording) if i == 0 and context.examples_wanted else None
            if i == 0:
                kept.only(has)
            pairs = pictures[has], features[i]
            metrics[name] = dict(self._evaluate(context, pairs, of_each[has, i], files[has], found[i], show))
        matches.show()
        if not lead:
            yield from metrics[""].items()
            return
        total = sum(context.world.gather_objects(len(pictures)))
        context.tell_left_out(metrics, total)
        yield from by_language(metrics, total)

    def _split(self, caption: str) -> list[str]:
        """The captions in a text of a batch."""
        if self.lead:
            return [text for of_language in json.loads(caption) for text in of_language]
        return caption.split("\n") if self.all else [caption]

    def _evaluate(
        self,
        context: EvalContext,
        pairs: Sequence[torch.Tensor],
        of_each: torch.Tensor,
        files: torch.Tensor,
        texts: Texts,
        show: tuple[Kept, Wording] | None,
    ) -> Iterator[tuple[str, float]]:
        """The metrics of one language. Collective.

        Args:
            pairs: features of images [n, D] and of captions [m, D], in the order of the images.
            of_each: int64 [n], number of captions of each image.
            files: int64 [n], checksums of the image files.
            show: to show images, or None.
        """
        world, device = context.world, files.device
        none = torch.zeros(0).long()
        owners = torch.arange(len(of_each), device=device).repeat_interleave(of_each)
        length = context.tokenizer.context_length
        tokens = torch.cat([torch.zeros((0, length), dtype=torch.int32), *texts.tokens]).to(device)
        same, equal, said = torch.cat([none, *texts.hashes]).to(device), None, []
        if self.groups:
            files = world.gather_rows(files)
            count = len(torch.unique(files))
            if count < len(files):
                own, here, owners = share_images(owners, len(pairs[0]), files, world)
                pairs = [pairs[0][own], world.gather_rows(pairs[1])[here]]
                same = world.gather_rows(same)[here]
                if show is not None:
                    tokens = world.gather_rows(tokens)[here]
                    show[0].only(own)
                said.append(
                    f"{len(files):,} samples have {count:,} different images: "
                    "samples with the same image count as one image with several captions"
                )
            if (equal := EqualCaptions.find(same, owners, world)) is not None:
                pairs = [pairs[0], world.gather_rows(pairs[1])[equal.first]]  # of copies they differ by rounding
                times = equal.of.bincount()
                said.append(
                    f"{len(equal.of):,} captions have {len(times):,} different texts, one of them "
                    f"{int(times.max()):,} times: a text counts as right for each image that has it"
                )
            for text in said if world.is_main and context.AT_MOST is None and not self.told else ():
                logger.info(f"evaluation {context.name!r}: {text}")
                self.told = True
        if show is not None:
            show_retrieval(context, show[0], pairs, owners, tokens, show[1])
        yield from recalls(pairs[0], pairs[1], world, owners=owners, equal=equal)


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
    first = first_places(torch.unique(files, return_inverse=True)[1])  # with its image
    own = (first == torch.arange(len(files)).to(first))[start : start + count]
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
        ranks = world.gather_rows(places.first(answers)).sort().values
        yield f"{way}_median_rank", float(ranks[(len(ranks) - 1) // 2 : len(ranks) // 2 + 1].mean())
    yield "n", n
    yield "captions", captions
    right = captions if equal is None else int(world.all_reduce_sum(equal.copies.sum()))  # of all pairs
    yield "chance_R@1", right / (n * captions)


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

"""What a model takes of samples, and how the samples of a source are read for it.

Settings, and what a model needs, enter; a `ReadingRecipe` for each source leaves: its steps are built once, in the main
process, and forked workers share them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from clipstream.data.batch import Batch, ImageSpec
from clipstream.data.decode.captions import (
    CaptionExtractor,
    SampleTransform,
    build_caption,
    build_transform,
    split_keys,
)
from clipstream.data.decode.images import EvalTransform, ImageTransform, OwnImageTransform
from clipstream.data.decode.key_lists import SampleLists, build_filter, check_lists
from clipstream.data.decode.labels import GroupField, SampleProbability
from clipstream.data.decode.tokenizers import Tokenizer
from clipstream.data.decode.train_transform import TrainTransform
from clipstream.data.groups import group_labels, probabilities
from clipstream.data.loader.batch_buffers import BatchBuffer, BufferShape
from clipstream.data.loader.stored import StoredData, StoredSamples
from clipstream.data.settings import MAX_PIXELS, DataSettings
from clipstream.data.source_settings import JsonCaption, SourceSettings
from clipstream.data.sources import Source
from clipstream.data.sources.indexes import count_samples
from clipstream.errors import SettingsError
from clipstream.features.manifest import IDS, IMAGE
from clipstream.storage.download import ShardError


@dataclass(frozen=True)
class ModelInputs:
    """What a model takes: how images and captions are prepared for it.

    Attributes:
        tokenizer: captions to ids.
        image: images to pixels.
        teacher_tokenizer: the same for a live teacher; None where it takes the model's ids.
        teacher_image: the same for a live teacher; None where it takes the model's pixels.
        stores: of features. Batches have them, and no pixels or no ids where features take their place.
        groups: field with the group of a sample (see GroupField), for Batch.groups; None for none.
        text_lengths: the true lengths of texts, from ids on the CPU; None where they are not known.
    """

    tokenizer: Tokenizer
    image: ImageSpec
    teacher_tokenizer: Tokenizer | None = None
    teacher_image: ImageSpec | None = None
    stores: StoredData | None = None
    groups: str | None = None
    text_lengths: Callable[[torch.Tensor], tuple[Any, ...] | None] | None = None
    texts: int = 1  # M, texts of a sample
    has_short: bool = False  # whether the last of them is its short one

    def shape(self, samples: int, views: int = 1) -> BufferShape:
        """Of the buffers of batches of `samples` samples with `views` views of an image."""
        teacher_size = (0, 0) if self.teacher_image is None else self.teacher_image.size
        teacher_width = 0 if self.teacher_tokenizer is None else self.teacher_tokenizer.context_length
        stored = {} if self.stores is None else self.stores.row_bytes()
        size = (0, 0) if IMAGE in stored else self.image.size
        width, roles = self.tokenizer.context_length * self.texts, self.texts if self.texts > 1 else 0
        return BufferShape(samples, *size, width, *teacher_size, teacher_width, tuple(stored.items()), views, roles)

    def lengths(self, ids: torch.Tensor) -> tuple[Any, ...] | None:
        """The true lengths of texts; counted before the copy to the device, where ids would be waited for."""
        return None if self.text_lengths is None else self.text_lengths(ids)

    def batch(
        self,
        buffer: BatchBuffer,
        rows: Any,
        keys: Sequence[str],
        step: int,
        global_size: int,
        captions: tuple[str, ...] | None = None,
    ) -> Batch:
        """The batch in the slots `rows` of a buffer; with stored features, the first slots."""
        stored, ids = self.stores, torch.from_numpy(buffer.ids[rows])

        def pixels(values: np.ndarray[Any, Any]) -> torch.Tensor:
            return torch.from_numpy(values[rows]).flatten(0, -4).permute(0, 3, 1, 2)

        return Batch(
            pixels=None if stored is not None and stored.replaces_loader else pixels(buffer.pixels),
            ids=ids,
            weights=torch.from_numpy(buffer.weights[rows]),
            keys=keys,
            sources=torch.from_numpy(buffer.sources[rows]),
            step=step,
            global_size=global_size,
            features={} if stored is None else stored.view_as_stored(buffer.stored, len(keys)),
            checksums=torch.from_numpy(buffer.checksums[rows]),
            groups=None if self.groups is None else torch.from_numpy(buffer.groups[rows]),
            teacher_pixels=pixels(buffer.teacher_pixels) if self.teacher_image else None,
            teacher_ids=torch.from_numpy(buffer.teacher_ids[rows]) if self.teacher_tokenizer else None,
            lengths=self.lengths(ids),
            captions=captions,
            roles=torch.from_numpy(buffer.roles[rows]) if self.texts > 1 else None,
            has_short=self.has_short,
        )


@dataclass(frozen=True)
class ReadingRecipe:
    """How the samples of a source are read."""

    name: str  # of the source
    image_key: str  # suffixes of the image member
    caption: CaptionExtractor  # gives the caption
    image: ImageTransform  # gives the pixels
    transform: SampleTransform | None  # the user's own, before the caption; or None
    filter: SampleLists | None = None  # says which samples are used; None for all
    teacher_image: ImageTransform | None = None  # gives a live teacher's pixels of the same crop; None for none
    stored: StoredSamples | None = None  # precomputed features of the samples; None for none
    group: GroupField | None = None  # gives the label of a sample's group; None for none
    probability: SampleProbability | None = None  # with which a sample is drawn; None where all are

    @cached_property
    def members(self) -> tuple[str, ...] | None:
        """Suffixes of the members that are read; None for all."""
        if self.transform is not None or self.caption.members is None:
            return None
        return (*split_keys(self.image_key), *self.caption.members, *(self.group.members if self.group else ()))


def build_recipe(
    name: str,
    source: SourceSettings,
    inputs: ModelInputs,
    training: DataSettings | None,
    target: CaptionExtractor | None = None,
    stored: StoredSamples | None = None,
    shards: Source | None = None,
) -> ReadingRecipe:
    """How a source is read; pixels are those of evaluation without `training`.

    Args:
        shards: of the source, for its lists and probabilities; without them, all samples are read.
    """
    upright = source.orientation == "exif" or (source.orientation == "auto" and training is not None)

    def transform(spec: ImageSpec) -> ImageTransform:
        most = MAX_PIXELS if training is None else training.max_image_pixels
        if source.image_transform.type != "default":
            return OwnImageTransform(source.image_transform, spec, source.background, upright, most)
        if training is None or not training.augment.enabled:
            return EvalTransform(spec, source.background, upright, most)
        return TrainTransform(spec, training.augment, source.background, upright, training.decoder, most)

    teacher, where = inputs.teacher_image, source.probability
    exact = training is None or training.sampling.mode == "indexed"  # where the order draws
    return ReadingRecipe(
        name,
        source.image_key,
        build_caption(source.caption) if target is None else target,
        transform(inputs.image),
        build_transform(source.transform),
        None if shards is None else build_filter(source, shards.context.key, shards),
        None if teacher is None else transform(teacher),
        stored,
        None if inputs.groups is None or training is None else GroupField(inputs.groups, name),
        None if where is None or shards is None or exact else SampleProbability(where, shards.context.key, shards),
    )


def check_recipes(recipes: Sequence[ReadingRecipe], *, told: bool) -> None:
    """Compare the lists of a run with its sources, as far as they are known before samples are read."""
    chances = [None if one.probability is None else SampleLists(one.probability.list, None) for one in recipes]
    check_lists([*(one.filter for one in recipes), *chances], told=told)


def join_stores(
    stores: StoredData,
    settings: DataSettings,
    sources: Mapping[str, Source],
    tokenizer: Tokenizer,
    groups: str | None = None,
) -> dict[str, StoredSamples]:
    """The samples of each source in the stores; sets the counts of sources that cannot be counted without.

    Args:
        groups: field with the group of a sample, see ModelInputs.

    Raises SettingsError: the stores lack a source, or have other tokens than the model takes.
    """
    if stores.replaces_loader and settings.trace:
        raise SettingsError("data.trace is not supported with data.image_features: remove it")
    if stores.ids is not None:
        width = stores.ids.manifest.parts[IDS].width
        if width != tokenizer.context_length:
            raise SettingsError(
                f"the feature store {stores.ids.shown} has {width} token ids per caption, but the model takes "
                f"{tokenizer.context_length}: precompute it with the same model and tokenizer"
            )
    found = {}
    for name, source in sources.items():
        section = settings.sources[name]
        weights = section.caption.weights if isinstance(section.caption, JsonCaption) else None
        own = build_filter(section, f"data.sources.{name}", source) if stores.replaces_loader else None
        samples = found[name] = StoredSamples(stores, name, source, weights, own)
        if not stores.replaces_loader:
            continue
        _check_first_shard(source, samples)
        if settings.sampling.mode == "indexed":
            try:
                count_samples(source)
            except SettingsError:  # the shards themselves need not be there
                source.counts = samples.counts.tolist()
                source.empty = {i: samples.fault(i) for i, count in enumerate(source.counts) if not count}
        elif section.probability is not None:
            samples.probabilities = samples.by_number(probabilities(source, settings))
        if groups is not None:
            samples.groups = samples.by_number(group_labels(source, groups, settings, "loss.positives.by"))
    check_lists([samples.filter for samples in found.values()])
    return found


def _check_first_shard(source: Source, samples: StoredSamples) -> None:
    """Compare the keys of the first local shard, if it is there, with those in the stores, as no shard is read later.

    Raises DataError: they differ: the stores are of other shards, whose files have the same names.
    """
    for number, shard in enumerate(source.names):
        if source.types[shard].is_remote(shard) or not samples.counts[number]:
            continue
        try:
            opened = source.open(shard)
        except (ShardError, OSError):
            continue
        try:
            samples.check_keys(number, [ref.key for ref in opened.index.samples])
        finally:
            opened.close()
            source.types[shard].release(shard)
        return

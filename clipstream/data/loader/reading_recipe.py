"""What a model takes of samples, and how those of a source are read for it.

Settings, and what a model needs, enter; a `ReadingRecipe` for each source leaves: its steps are built once, in the main
process, and forked workers share them. `ModelInputs` gives the shape of the buffers, and makes the batch in one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from clipstream.data.loader.batch_buffers import BatchBuffer, BufferShape
from clipstream.data.loader.stored import StoredData, StoredSamples
from clipstream.data.settings import MAX_PIXELS, DataSettings
from clipstream.data.source_settings import LANG, SourceSettings
from clipstream.data.sources import Source
from clipstream.errors import SettingsError
from clipstream.features.manifest import IMAGE


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
        jpegs: whether workers leave JPEGs to be decoded with their batch (see Batch.jpegs).
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
    jpegs: bool = False

    def shape(self, samples: int, views: int = 1) -> BufferShape:
        """Of the buffers of batches of `samples` samples with `views` views of an image."""
        teacher_size = (0, 0) if self.teacher_image is None else self.teacher_image.size
        teacher_width = 0 if self.teacher_tokenizer is None else self.teacher_tokenizer.context_length
        stored = {} if self.stores is None else self.stores.row_bytes()
        size = (0, 0) if IMAGE in stored else self.image.size
        width, roles = self.tokenizer.context_length * self.texts, self.texts if self.texts > 1 else 0
        return BufferShape(
            samples, *size, width, *teacher_size, teacher_width, tuple(stored.items()), views, roles, self.jpegs
        )

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
            # Counted before the copy to the device, where ids would be waited for.
            lengths=None if self.text_lengths is None else self.text_lengths(ids),
            captions=captions,
            roles=torch.from_numpy(buffer.roles[rows]) if self.texts > 1 else None,
            jpegs=torch.from_numpy(buffer.jpegs[rows]) if self.jpegs else None,
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

    @functools.cached_property
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
    listed: Source | None = None,
) -> ReadingRecipe:
    """How a source is read; pixels are those of evaluation without `training`.

    Args:
        listed: the source with its shards, for its lists and probabilities; without them, all samples are read.
    """
    if target is None and LANG in getattr(source.caption, "key", ""):
        raise SettingsError(f"{name}: caption.key: {LANG} requires an evaluator with languages")
    upright = source.orientation == "exif" or (source.orientation == "auto" and training is not None)

    def transform(spec: ImageSpec) -> ImageTransform:
        most = MAX_PIXELS if training is None else training.max_image_pixels
        if source.image_transform.type != "default":
            return OwnImageTransform(source.image_transform, spec, source.background, upright, most)
        if training is None or not training.augment.enabled:
            return EvalTransform(spec, source.background, upright, most)
        decoder = training.decoder
        if decoder == "gpu" and not (inputs.jpegs and spec is inputs.image):
            decoder = "fast"  # pixels of a teacher
        return TrainTransform(spec, training.augment, source.background, upright, decoder, most)

    teacher, where = inputs.teacher_image, source.probability
    exact = training is None or training.sampling.mode == "indexed"  # where the order draws
    return ReadingRecipe(
        name,
        source.image_key,
        build_caption(source.caption) if target is None else target,
        transform(inputs.image),
        build_transform(source.transform),
        None if listed is None else build_filter(source, listed.context.key, listed),
        None if teacher is None else transform(teacher),
        stored,
        None if inputs.groups is None else GroupField(inputs.groups, name),
        None if where is None or listed is None or exact else SampleProbability(where, listed.context.key, listed),
    )


def check_recipes(recipes: Sequence[ReadingRecipe], *, told: bool) -> None:
    """Compare the lists of a run with its sources, as far as they are known before samples are read."""
    chances = [None if one.probability is None else SampleLists(one.probability.list, None) for one in recipes]
    check_lists([*(one.filter for one in recipes), *chances], told=told)

"""webdataset's pipeline as open_clip arranges it, with steps of clipstream's input path added one after the other.

Each of `STEPS` includes the steps before it; clipstream itself also reads by offset and writes into shared buffers.
`input.py --streams` runs them beside clipstream.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import open_clip
import torch
import webdataset as wds
from PIL import Image

IMAGES = ("jpg", "jpeg", "png", "webp")
WHITE = (255, 255, 255)
Pixels = Any  # a picture's tensor or array
Make = Callable[[bytes], Pixels]
Encode = Callable[[list[str]], Any]


def samples(shards: list[str]) -> list[Any]:
    """Stages of webdataset's pipeline, as open_clip's has them: a picture's bytes with its caption, shuffled."""

    def pair(sample: dict[str, Any]) -> tuple[bytes, str]:
        return next(sample[suffix] for suffix in IMAGES if suffix in sample), sample["txt"].decode()

    shuffle = wds.shuffle(5000, initial=1000)
    return [wds.ResampledShards(shards), wds.tarfile_to_samples(), shuffle, wds.map(pair)]


def piped(shards: list[str], batch_size: int, workers: int, make: Make, encode: Encode) -> Iterator[tuple[Any, Any]]:
    """Batches of pictures and ids; `make` and `encode` run in webdataset's workers."""
    data = wds.DataPipeline(
        *samples(shards),
        wds.map(lambda pair: (make(pair[0]), pair[1])),
        wds.batched(batch_size),
        wds.map(lambda batch: (batch[0], encode(batch[1]))),
    )
    yield from wds.WebLoader(data, batch_size=None, num_workers=workers)


@cache
def tokenize() -> Any:
    """The tokenizer of open_clip's small models."""
    return open_clip.get_tokenizer("ViT-B-32")


def _open_clips(size: int) -> tuple[Make, Encode]:
    transform, tokenizer = open_clip.image_transform(size, is_train=True), tokenize()

    def encode(captions: list[str]) -> torch.Tensor:
        return torch.stack([tokenizer([caption])[0] for caption in captions])

    return lambda data: transform(Image.open(io.BytesIO(data))), encode


def _bytes(size: int) -> tuple[Make, Encode]:
    cut, (_, encode) = open_clip.image_transform(size, is_train=True).transforms[0], _open_clips(size)
    return lambda data: np.array(cut(Image.open(io.BytesIO(data))).convert("RGB")), encode


def _batched_ids(size: int) -> tuple[Make, Encode]:
    from clipstream.data.decode.tokenizers import build_tokenizer
    from clipstream.data.settings import TokenizerSettings

    tokenizer = build_tokenizer(TokenizerSettings.model_validate({}), tokenize(), 77)
    return _bytes(size)[0], tokenizer.encode


def _decoded(size: int, *, scaled: bool) -> tuple[Make, Encode]:
    from clipstream.data.decode.images import FACTORS, FILTERS, decode, read_header
    from clipstream.data.decode.train_transform import SPARE, crop_box
    from clipstream.data.order.rng import SampleRNG
    from clipstream.data.settings import AugmentSettings

    draws, augment = SampleRNG(1), AugmentSettings()

    def make(data: bytes) -> Pixels:
        header = read_header(data, upright=False)
        left, top, width, height = crop_box(header.size, augment, draws)
        room = min(width, height) / size
        factor = next((f for f in FACTORS if f * SPARE <= room), 1) if scaled and header.scales else 1
        picture = Image.fromarray(decode(data, header, factor, WHITE)[..., :3])
        right, bottom = min((left + width) / factor, picture.width), min((top + height) / factor, picture.height)
        box = (left / factor, top / factor, right, bottom)
        return np.asarray(picture.resize((size, size), FILTERS["bicubic"], box=box))

    return make, _batched_ids(size)[1]


def _resized(size: int) -> tuple[Make, Encode]:
    from clipstream.data.batch import ImageSpec
    from clipstream.data.decode.train_transform import TrainTransform
    from clipstream.data.order.rng import SampleRNG
    from clipstream.data.settings import AugmentSettings

    draws, transform = SampleRNG(1), TrainTransform(ImageSpec((size, size)), AugmentSettings(), "white", upright=False)
    return lambda data: transform(data, draws), _batched_ids(size)[1]


STEPS: dict[str, Callable[[int], tuple[Make, Encode]]] = {
    "webdataset": _open_clips,
    "+uint8": _bytes,
    "+batched-ids": _batched_ids,
    "+libjpeg-turbo": partial(_decoded, scaled=False),
    "+scaled-decode": partial(_decoded, scaled=True),
    "+torch-resize": _resized,
}

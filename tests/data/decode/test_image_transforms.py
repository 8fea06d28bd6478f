"""Image transforms of a user's own, through both loaders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from clipstream.data.order.rng import SampleRNG
from clipstream.data.source_settings import ImageTransformSettings, SourceSettings
from clipstream.errors import Dropped, SettingsError
from tests.support.loaders import IMAGE, data, digests, evaluation_of, loader
from tests.support.pictures import make_shards, picture
from tests.support.tars import write_tar


class Flat:
    """One level for all pixels: drawn in training; odd pictures are refused in several ways."""

    class Settings(ImageTransformSettings):
        level: int = 0

    def __init__(self, settings: Settings) -> None:
        self.level = settings.level

    def __call__(self, image: Image.Image, size: tuple[int, int], rng: SampleRNG | None) -> Any:
        assert image.mode == "RGB"
        if image.width == 9:
            raise Dropped("too_narrow")
        if image.width == 10:
            raise KeyError("width")
        if image.width == 11:
            return np.zeros((*size, 4), np.uint8)
        return np.full((*size, 3), self.level if rng is None else rng.integer(256), np.uint8)


def own(shards: Any, **keys: Any) -> dict[str, Any]:
    return {"shards": shards, "image_transform": {"type": f"{__name__}:Flat", **keys}}


def test_training_draws_from_the_samples_random_numbers_and_evaluation_draws_nothing(tmp_path: Path) -> None:
    shards = make_shards(tmp_path, [13, 7, 20])
    settings = data(None, sources={"train": own(shards)})
    batch = next(loader(settings))
    assert batch.pixels is not None
    levels = batch.pixels[:, 0, 0, 0]
    assert (batch.pixels == levels[:, None, None, None]).all() and len(set(levels.tolist())) > 6
    assert digests(data(None, sources={"train": own(shards)}, workers=1), 2, 4) == digests(settings, 1, 4)
    with evaluation_of(SourceSettings.model_validate(own(shards, level=7)), 9) as stream:
        batch = next(stream)
    assert batch.pixels is not None and batch.pixels.shape == (9, 3, *IMAGE.size) and (batch.pixels == 7).all()


def test_what_it_refuses_raises_or_returns_wrongly_is_counted(tmp_path: Path) -> None:
    widths = {"good": 16, "narrow": 9, "raises": 10, "wrong": 11}
    samples = [
        {"__key__": f"{name}{n}", "jpg": picture(n, width), "txt": "a"}
        for name, width in widths.items()
        for n in range(3)
    ]
    shard = str(write_tar(tmp_path / "0.tar", samples))
    with loader(data(None, sources={"train": own(shard)}, sampling={"mode": "epoch"}, lanes=1)) as stream:
        for _ in range(2):
            assert all("good" in key for key in next(stream).keys)
        health, details = stream.health.sources["train"], [one.detail for one in stream.health.take_dropped()]
    assert set(health.dropped) == {"too_narrow", "image_transform_error"}
    assert "KeyError('width') at test_image_transforms.py:" in health.examples["image_transform_error"]
    assert any("expected an array uint8 (16, 16, 3), not ndarray uint8 (16, 16, 4)" in detail for detail in details)
    for name, said in (("no_such_module:X", "no_such_module"), (f"{__name__}:Absent", "has no 'Absent'")):
        with pytest.raises((SettingsError, ValueError), match=said):
            loader(data(None, sources={"train": {"shards": shard, "image_transform": {"type": name}}}))

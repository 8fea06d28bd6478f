"""Bad samples of every kind in the training loader: each is dropped and counted by reason, with an example."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from clipstream.data.order.rng import SampleRNG
from clipstream.data.settings import CaptionSettings
from clipstream.errors import DataError
from tests.support.image_files import bomb
from tests.support.loaders import data, loader
from tests.support.pictures import picture
from tests.support.tars import write_tar

GOOD = 40


class Fussy:
    """A user's extractor that knows not all that may come."""

    class Settings(CaptionSettings):
        type: str = f"{__name__}:Fussy"

    def __init__(self, settings: Settings) -> None:
        self.members = ("txt",)

    def __call__(self, sample: Mapping[str, Any], rng: SampleRNG | None) -> str:
        caption: str = sample["txt"].decode("ascii")
        return None if caption == "nothing" else caption[: 100 // (caption != "zero")]  # type: ignore[return-value]


def filtered(sample: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A user's transform."""
    if sample["__key__"] == "raises":
        raise KeyError("width")
    return None if sample["__key__"] == "unwanted" else sample


def strip(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height)).save(out, "PNG")
    return out.getvalue()


JSON = {"caption": {"type": "json", "path": "caption.en"}}
# key -> (members in place of the good ones, reason)
PICTURES: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"jpg": None}, "no_image"),
    "nothing": ({"jpg": b""}, "undecodable_image"),
    "page": ({"jpg": b"<html>403 Forbidden</html>"}, "undecodable_image"),
    "cut": ({"jpg": picture(1, size=300)[:-900]}, "undecodable_image"),
    "zeros": ({"jpg": bytes(5000)}, "undecodable_image"),
    "bomb": ({"jpg": bomb(60_000, 60_000)}, "image_too_large"),
    "tall": ({"jpg": strip(1, 20_000)}, "image_too_thin"),
    "wide": ({"jpg": strip(3000, 10)}, "image_too_thin"),
}
TEXTS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"txt": None}, "no_caption"),
    "empty": ({"txt": b""}, "empty_caption"),
    "blank": ({"txt": b" \n\t\xe2\x80\x83"}, "empty_caption"),
    "latin": ({"txt": "Café".encode("latin-1")}, "caption_not_utf8"),
    "utf16": ({"txt": "a cat".encode("utf-16")}, "caption_not_utf8"),
}
FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"json": None}, "no_caption"),
    "list": ({"json": '["a cat"]'}, "no_caption"),
    "null": ({"json": "null"}, "json_not_object"),
    "cut": ({"json": '{"caption": {"en": "a c'}, "json_invalid"),
    "latin": ({"json": '{"caption": {"en": "Caf\xe9"}}'.encode("latin-1")}, "json_invalid"),
    "deep": ({"json": "[" * 100_000}, "json_invalid"),
    "number": ({"json": '{"caption": {"en": 3}}'}, "no_caption"),
    "empty": ({"json": '{"caption": {"en": ""}}'}, "empty_caption"),
    "half": ({"json": '{"caption": {"en": "\\ud800"}}'}, "caption_not_utf8"),
}
EXTRACTED: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"txt": None}, "extractor_error"),
    "accent": ({"txt": "é"}, "extractor_error"),
    "zero": ({"txt": "zero"}, "extractor_error"),
    "nothing": ({"txt": "nothing"}, "extractor_error"),
}
FILTERED: dict[str, tuple[dict[str, Any], str]] = {
    "raises": ({}, "transform_error"),
    "unwanted": ({}, "transform_none"),
}
TABLES: dict[str, tuple[dict[str, tuple[dict[str, Any], str]], dict[str, Any]]] = {
    "pictures": (PICTURES, {}),
    "texts": (TEXTS, {}),
    "fields": (FIELDS, JSON),
    "extractor": (EXTRACTED, {"caption": {"type": f"{__name__}:Fussy"}}),
    "transform": (FILTERED, {"transform": f"{__name__}:filtered"}),
}


@pytest.fixture
def shard(tmp_path: Path) -> Callable[[str], str]:
    """Writes a shard of good samples with the bad ones of a table among them."""

    def write(name: str) -> str:
        samples: list[dict[str, Any]] = []
        bad = TABLES[name][0]
        for number, key in enumerate([*(f"{i:03d}" for i in range(GOOD)), *bad]):
            sample = {"jpg": picture(number), "txt": "a cat", "json": '{"caption": {"en": "a cat"}}'}
            changed = sample | bad.get(key, ({}, ""))[0]
            samples.append(
                {"__key__": key, **{suffix: value for suffix, value in changed.items() if value is not None}}
            )
        return str(write_tar(tmp_path / f"{name}.tar", samples))

    return write


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("workers", [0, 1])
def test_each_is_dropped_under_its_reason(shard: Callable[[str], str], name: str, workers: int) -> None:
    bad, source = TABLES[name]
    path = shard(name)
    settings = data(None, workers=workers, sources={"train": {"shards": path, **source}})
    with loader(settings) as stream:
        keys = {key.split("/")[1] for _ in range(20) for key in next(stream).keys}
        losses, health = stream.health.take_dropped(), stream.health.sources["train"]
    assert keys == {f"{i:03d}" for i in range(GOOD)}, "the good ones, and no other"
    assert {loss.key: loss.reason for loss in losses} == {key: reason for key, (_, reason) in bad.items()}
    assert health.read == health.used + health.dropped.total()
    for reason in {reason for _, reason in bad.values()}:
        assert any(f"{name}.tar/{key}" in health.examples[reason] for key, (_, why) in bad.items() if why == reason)


def test_too_many_end_the_run(tmp_path: Path) -> None:
    samples = [{"__key__": f"{i}", "jpg": picture(i), "txt": "a cat" if i % 10 else ""} for i in range(50)]
    path = str(write_tar(tmp_path / "a.tar", samples))
    settings = data(path, workers=1, max_sample_failures=0.09)
    said = r"more than --data\.max-sample-failures 0\.09:(.|\n)*empty_caption, e\.g\. a\.tar/\d?0"
    with pytest.raises(DataError, match=said), loader(settings) as stream:
        for _ in range(200):
            next(stream)

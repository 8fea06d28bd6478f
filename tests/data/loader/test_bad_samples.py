"""Bad samples of every kind in the training loader: each is dropped and counted by reason, with an example."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from clipstream.errors import DataError
from tests.support.image_files import bomb, save
from tests.support.loaders import data, loader
from tests.support.pictures import picture
from tests.support.tars import write_tar

GOOD = 40


def filtered(sample: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A user's transform."""
    if sample["__key__"] == "raises":
        raise KeyError("width")
    return None if sample["__key__"] == "unwanted" else sample


# key -> (members in place of the good ones, reason)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no image": ({"jpg": None}, "no_image"),
    "nothing": ({"jpg": b""}, "undecodable_image"),
    "page": ({"jpg": b"<html>403 Forbidden</html>"}, "undecodable_image"),
    "cut": ({"jpg": picture(1, size=300)[:-900]}, "undecodable_image"),
    "zeros": ({"jpg": bytes(5000)}, "undecodable_image"),
    "bomb": ({"jpg": bomb(60_000, 60_000)}, "image_too_large"),
    "tall": ({"jpg": save(Image.new("RGB", (1, 20_000)))}, "image_too_thin"),
    "wide": ({"jpg": save(Image.new("RGB", (3000, 10)))}, "image_too_thin"),
    "no text": ({"txt": None}, "no_caption"),
    "blank": ({"txt": b" \n\t\xe2\x80\x83"}, "empty_caption"),
    "latin": ({"txt": "Café".encode("latin-1")}, "caption_not_utf8"),
    "cut json": ({"json": '{"caption": {"en": "a c'}, "json_invalid"),
    "null": ({"json": "null"}, "json_not_object"),
    "deep": ({"json": "[" * 100_000}, "json_invalid"),
    "raises": ({}, "transform_error"),
    "unwanted": ({}, "transform_none"),
}


@pytest.mark.parametrize("kind", ["txt", "json"])
def test_each_is_dropped_under_its_reason(tmp_path: Path, kind: str) -> None:
    other = {"txt": "json", "json": "txt"}[kind]
    bad = {key: (changed, reason) for key, (changed, reason) in BAD.items() if other not in changed}
    samples = []
    for number, key in enumerate([*(f"{i:03d}" for i in range(GOOD)), *bad]):
        members: dict[str, Any] = {"jpg": picture(number), "txt": "a cat", "json": '{"caption": {"en": "a cat"}}'}
        members |= bad.get(key, ({}, ""))[0]
        samples.append({"__key__": key, **{name: value for name, value in members.items() if value is not None}})
    caption = {"type": "text"} if kind == "txt" else {"type": "json", "path": "caption.en"}
    source: dict[str, Any] = {"shards": str(write_tar(tmp_path / "0.tar", samples)), "caption": caption}
    source["transform"] = f"{__name__}:filtered"
    with loader(data(None, workers=int(kind == "txt"), sources={"train": source})) as stream:
        keys = {key.split("/")[1] for _ in range(20) for key in next(stream).keys}
        losses, health = stream.health.take_dropped(), stream.health.sources["train"]
    assert keys == {f"{i:03d}" for i in range(GOOD)}, "the good ones, and no other"
    assert {loss.key: loss.reason for loss in losses} == {key: reason for key, (_, reason) in bad.items()}
    assert health.read == health.used + health.dropped.total()
    for reason in {reason for _, reason in bad.values()}:
        assert any(f"0.tar/{key}" in health.examples[reason] for key, (_, why) in bad.items() if why == reason)


def test_too_many_end_the_run(tmp_path: Path) -> None:
    samples = [{"__key__": f"{i}", "jpg": picture(i), "txt": "a cat" if i % 10 else ""} for i in range(50)]
    path = str(write_tar(tmp_path / "a.tar", samples))
    settings = data(path, workers=1, max_sample_failures=0.09)
    said = r"more than --data\.max-sample-failures 0\.09:(.|\n)*empty_caption, e\.g\. a\.tar/\d?0"
    with pytest.raises(DataError, match=said), loader(settings) as stream:
        for _ in range(200):
            next(stream)

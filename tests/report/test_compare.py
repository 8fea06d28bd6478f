"""Evaluations: their files and fingerprints, what a resume cuts off, and the verb compare."""

from __future__ import annotations

import csv
import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clipstream.cli.verbs.compare import main as compare
from clipstream.distributed.world import World
from clipstream.evals.context import EvalContext, of_weights
from clipstream.evals.runner import EvalRunner, Listeners
from clipstream.evals.settings import EvalSettings
from clipstream.report.eval_results import FIGURES_FILE, FiguresFile, add, differences, traced
from clipstream.report.html_report import loss_kind, read_run, render
from clipstream.report.sinks import MetricsFile
from tests.support.browser import look_in_frames, needs_browser
from tests.support.evaluating import context_of, tiny_towers
from tests.support.pictures import ByteTokenizer, make_shards
from tests.support.ranks import run_ranks
from tests.support.run_folders import make_run
from tests.support.savers import fill, small_disk


def test_the_fingerprint_of_weights_is_that_of_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.arange(6.0).view(2, 3), torch.tensor(7)
    first = of_weights({"a": a, "b": b})
    alike = [{"b": b, "a": a.clone()}, {"a": a.bfloat16(), "b": b}, {"a": a.double(), "b": b}]
    others = [(a.view(3, 2), b), (a.flip(0), b), (a + 1e-6, b), (a, b + 1)]
    assert len(first) == 16 and {*map(of_weights, alike)} == {first}
    assert len({first, of_weights({"c": a, "b": b}), *(of_weights({"a": x, "b": y}) for x, y in others)}) == 6
    monkeypatch.setattr("clipstream.evals.context.AT_ONCE", 5)  # large tensors are summed in parts
    assert of_weights({"a": a, "b": b}) == first


def evaluate(world: World, folder: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    found: list[Any] = []
    data = {"shards": f"{folder}/*.tar"}
    sections = {
        "val": {"type": "retrieval", "data": data, "batch_size": 4},
        "near": {"type": "knn", "data": data, "train_shards": f"{folder}/*.tar", "k": 3},
    }
    settings = {name: EvalSettings.model_validate(section) for name, section in sections.items()}
    EvalRunner(settings, context_of(world), Listeners(trace=lambda *both: found.append(both)))(3, last=True)
    return found


def test_what_an_evaluation_was_made_with(tmp_path: Path) -> None:
    make_shards(tmp_path, [9, 8])
    (val, about), (_, near) = evaluate(World(), str(tmp_path))
    assert val["eval"] == "val" and about["weights"] == of_weights(tiny_towers().state_dict())
    lost = {"measured": 17, "lost_area": pytest.approx(0.07, abs=0.05)}  # images of 24 x 24 to 24 x 28 pixels
    (data,) = about["data"]
    assert data.items() >= {"shards": f"{tmp_path}/*.tar", "samples": 17, **lost}.items() and about["ranks"] == 1
    assert data["pictures"] != data["pairs"]
    assert about["settings"]["type"] == "retrieval" and about["precision"] == "fp32"
    assert [part["samples"] for part in near["data"]] == [17, 17]
    mine, others = run_ranks(2, evaluate, str(tmp_path))
    assert others == [] and {**mine[0][1], "ranks": 1} == about


def test_weights_are_summed_up_once_for_all_evaluators_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_shards(tmp_path, [5])
    towers, taken, told = tiny_towers(8), [], []
    whole = towers.state_dict
    monkeypatch.setattr(towers, "state_dict", lambda: taken.append(0) or whole())
    kinds = EvalSettings.model_validate({"type": "retrieval", "data": {"shards": f"{tmp_path}/*.tar"}})
    trace = Listeners(trace=lambda _, about: told.append(about["weights"]))
    runner = EvalRunner({"one": kinds, "other": kinds}, EvalContext(towers, ByteTokenizer(), World()), trace)
    for step in (1, 2):
        runner(step, last=True)
        with torch.no_grad():
            next(towers.parameters()).add_(1)
    assert len(taken) == 2 and told[0] == told[1] != told[2] == told[3]


def evaluation(step: int, name: str = "val", **more: Any) -> dict[str, Any]:
    about = {
        "weights": "0123", "precision": "bf16", "ranks": 2,
        "data": [{"shards": "a.tar", "samples": 9, "pictures": "ab", "pairs": "cd"}],
        "settings": {"type": "retrieval", "data": {"shards": "https://me:secret@host/a.tar?token=abc", "folder": None}},
    }  # fmt: skip
    subject = {"run": "mine", "model": {"name": "ViT-B-32", "pretrained": "openai"}, **more}
    return traced({"step": step, "eval": name, "R@1": 0.25, "n": 9, "seconds": 1.5}, about, subject)


def test_a_figure_can_be_traced(tmp_path: Path) -> None:
    for step in (7, 8):
        add(tmp_path / "new" / "figures.csv", evaluation(step))
        add(tmp_path / "figures.md", evaluation(step))
    add(tmp_path / "figures.json", evaluation(7))
    with (tmp_path / "new" / "figures.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["metric"], row["value"]) for row in rows] == [("7", "R@1", "0.25"), ("8", "R@1", "0.25")]
    row, record = rows[0], json.loads((tmp_path / "figures.json").read_text())
    assert (row["run"], row["model"], row["pretrained"], row["n"]) == ("mine", "ViT-B-32", "openai", "9")
    assert (tmp_path / "figures.md").read_text().splitlines()[2:] == [
        f"|  | ViT-B-32 | {step} | val | R@1 | 25.0% |  |  |" for step in (7, 8)
    ]
    assert record["time"].endswith("UTC") and record["weights"] == "0123" and record["data"][0]["pictures"] == "ab"
    assert record["R@1"] == 0.25 and record["data"][0]["samples"] == 9 and record["ranks"] == 2
    for text in (json.dumps(record), json.dumps(rows)):
        assert "secret" not in text and "abc" not in text
    assert "host/a.tar" in json.dumps(record)


def steps(folder: Path) -> list[tuple[int, str]]:
    table = {(int(row["step"]), row["eval"]) for row in csv.DictReader((folder / "evaluations.csv").open())}
    records = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    found = [(record["step"], record["eval"]) for record in records]
    assert table == set(found)
    return found


def test_a_resumed_run_writes_its_figures_once(tmp_path: Path) -> None:
    file = FiguresFile(tmp_path)
    assert not (tmp_path / "evaluations.jsonl").exists()
    for step in (2, 4, 6):
        file.add(evaluation(step))
    add(tmp_path / "evaluations.jsonl", evaluation(6, "later", checkpoint="step_00000006"))
    FiguresFile(tmp_path, 4).add(evaluation(5))
    assert steps(tmp_path) == [(2, "val"), (4, "val"), (6, "later"), (5, "val")]
    FiguresFile(tmp_path, 5, ended=True)
    assert steps(tmp_path) == [(2, "val"), (4, "val"), (6, "later")]
    FiguresFile(tmp_path)
    assert steps(tmp_path) == []


def test_figures_wait_for_room_on_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path, "1m"):
        file = FiguresFile(tmp_path)
        file.add(evaluation(2))
        ballast = fill(tmp_path, 0)
        for step in range(3, 40):
            file.add(evaluation(step))
        assert "evaluations.jsonl is full: its lines wait" in capsys.readouterr().err
        ballast.unlink()
        file.close()
        assert steps(tmp_path) == [(step, "val") for step in range(2, 40)]


class Backwards(ByteTokenizer):
    """Other ids for the same texts."""

    def encode(self, texts: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
        return super().encode([text[::-1] for text in texts])


def evaluated(
    folder: Path, shards: Path, tokenizer: ByteTokenizer | None = None, classes: str = "abc", **more: Any
) -> dict[str, dict[str, Any]]:
    """A run's folder with evaluations of the tiny model on these shards; their traced records by name."""
    folder.mkdir(parents=True)
    towers = tiny_towers()
    data, names = {"shards": f"{shards}/*.tar"}, folder.parent / "names.txt"
    names.write_text("\n".join(classes))  # the same file: its content tells
    sections = {
        "val": {"type": "retrieval", "data": {**data, **more.pop("data", {})}, **more},
        "kinds": {"type": "zero_shot", "data": data, "classes": str(names), "templates": "plain"},
    }
    metrics, figures = MetricsFile(folder), FiguresFile(folder)
    found: dict[str, dict[str, Any]] = {}

    def trace(record: dict[str, Any], about: dict[str, Any]) -> None:
        found[record["eval"]] = one = traced(record, about, {"run": folder.name})
        figures.add(one)

    runner = EvalRunner(
        {name: EvalSettings.model_validate(section) for name, section in sections.items()},
        EvalContext(towers, tokenizer or ByteTokenizer(), World()),
        Listeners(metrics.write, trace=trace),
    )
    assert not [record["error"] for step in (1, 2) for record in runner(step, last=True) if "error" in record]
    for file in (metrics, figures):
        file.close()
    return found


def test_figures_compare_if_the_same_was_evaluated_alike(tmp_path: Path) -> None:
    make_shards(tmp_path / "few", [5, 4])
    make_shards(tmp_path / "packed", [9])
    make_shards(tmp_path / "other", [8])
    make_shards(tmp_path / "said", [9], txt="something else")
    cases = iter(range(99))

    def val(shards: str = "few", tokenizer: ByteTokenizer | None = None, **more: Any) -> dict[str, Any]:
        return evaluated(tmp_path / f"{next(cases)}", tmp_path / shards, tokenizer, **more)["val"]

    first = val()
    alike = {"batch_size": 4, "every": 5, "max_samples": 9, "data": {"image_key": "jpg"}}
    assert not differences(first, val("packed", **alike)), "how and in which shards they lie does not matter"
    assert not differences(first, val("packed", Backwards())), "nor does the model's tokenizer"
    assert differences(first, val("other")) == ["other images (8 samples for 9)"]
    assert differences(first, val(max_samples=4)) == ["other images (4 samples for 9)"]
    assert differences(first, val("said")) == ["other captions or labels"]
    captions = {"caption": {"type": "json", "path": ["n"], "fallback": "txt"}}
    assert differences(first, val("said", Backwards(), data=captions))[0].startswith("another data.caption")
    assert differences(first, val(captions="all")) == ["other captions or labels", "another captions"]
    assert differences(first, val(data={"background": "black"})) == ["another data.background"]
    assert differences(first, None) and not differences(None, None)
    assert differences({**first, "settings": {}}, first) == [], "a key that one lacks is of another version"


def test_figures_of_other_test_sets_are_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_shards(tmp_path / "few", [9])
    make_shards(tmp_path / "other", [8])
    one, two, three, four = (tmp_path / name for name in ("one", "two", "three", "four"))
    for folder, shards, classes in (
        (one, "few", "abc"),
        (two, "other", "abc"),
        (three, "few", "abd"),
        (four, "few", "abc"),
    ):
        evaluated(folder, tmp_path / shards, classes=classes)
    out = tmp_path / "all.html"
    assert compare([*map(str, (one, two, three, four)), "--out", str(out)]) == 0
    told = capsys.readouterr()
    assert told.err.splitlines() == [
        "warning: not comparable: val of two with one: other images (8 samples for 9)",
        "warning: not comparable: kinds of two with one: other images (8 samples for 9)",
        "warning: not comparable: kinds of three with one: other class prompts",
    ]
    page = html.unescape(out.read_text())
    assert page.count("≠1 val, not comparable: two with one: other images") == 2, "below both tables"
    assert page.count("≠2 kinds, not comparable: three with one: other class prompts") == 2
    row = next(line for line in page.splitlines() if ">top1</td>" in line)
    cells = re.findall(r'<td class="number">(.*?)</td>', row)
    assert ["≠1" in cell for cell in cells] == [False, True, False, False]
    assert ["≠2" in cell for cell in cells] == [False, False, True, False]
    assert ["points" in cell for cell in cells] == [False, False, False, True], "differences where there can be some"
    assert 'class="s1 other" data-name="two"' in page and 'class="s3" data-name="four"' in page
    assert compare([str(one), str(four), "--out", str(out)]) == 0
    assert capsys.readouterr().err == "" and "≠" not in out.read_text()
    (four / FIGURES_FILE).unlink()
    assert compare([str(one), str(four), "--out", str(out)]) == 0
    assert "val of four with one: the test set of one of them is not recorded" in capsys.readouterr().err


def test_folders_without_a_run_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run(tmp_path / "logs" / name) for name in ("one", "two")]
    begun, missing, out = tmp_path / "logs" / "begun", tmp_path / "missing", tmp_path / "x.html"
    begun.mkdir()
    (begun / ".lock").touch()
    assert compare([str(begun), *map(str, runs), str(missing), "--out", str(out)]) == 0
    told = capsys.readouterr()
    assert [line.split(" is not a run folder")[0] for line in told.err.splitlines()] == [
        f"warning: {begun}",
        f"warning: {missing}",
    ]
    assert told.out == f"{out}\n" and "<h1>2 runs</h1>" in out.read_text()
    out.unlink()
    assert compare([str(begun), str(missing), "--out", str(out)]) == 2 and not out.exists()
    assert f"error: {begun} is not a run folder" in capsys.readouterr().err


REACH = """
const seen = [...document.querySelectorAll("table")].map(table => {
  const box = table.parentElement, cells = table.rows[0].cells, last = cells[cells.length - 1];
  const cut = table.getBoundingClientRect().right > box.getBoundingClientRect().right + 1;
  box.scrollLeft = 1e6;
  const right = last.getBoundingClientRect().right - box.getBoundingClientRect().right;
  const narrow = [...table.querySelectorAll("td.key + td")].filter(cell => cell.offsetWidth < 90).length;
  return {cut, right, shade: getComputedStyle(box).backgroundImage !== "none", narrow};
});
tell({page: document.documentElement.scrollWidth, height: document.documentElement.scrollHeight, seen});
"""


@needs_browser
def test_every_table_can_be_reached_on_a_phone_and_the_page_is_short(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / f"run{i}", lr=i)) for i in range(1, 7)]
    shown = [(400, render(runs)), (1280, render(runs[:3]))]
    narrow, wide = look_in_frames(tmp_path / "page.html", shown, REACH)
    assert narrow["page"] <= 400 and wide["page"] <= 1280
    assert wide["height"] <= 6000, "three runs"
    assert any(one["cut"] for one in narrow["seen"]), "six runs have no room side by side"
    for one in narrow["seen"]:
        assert one["right"] <= 1 and one["shade"] and not one["narrow"], one


def test_losses_of_different_kinds_have_a_chart_each(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / name, steps=40)) for name in ("clip", "siglip", "taught")]
    runs[1].settings["loss.type"] = "siglip"
    runs[2].curves["loss_distillation"] = runs[2].curves["loss"]
    kinds = ["softmax", "sigmoid", "softmax, distillation"]
    assert [loss_kind(run) for run in runs] == kinds
    page = render(runs)
    assert all(page.count(f"loss ({kind})<output>") == 1 for kind in kinds) and "Losses of different kinds" in page
    assert render([runs[0], runs[0]]).count("<figcaption>loss<output>") == 1
    for run in runs:
        run.evaluations = {"held": {"val_loss": [(40.0, 2.0)]}}
        run.made = {"held": {"data": [], "settings": {}}}
    assert "siglip with clip: another kind of loss" in render(runs)

"""Evaluations: their files and fingerprints, what a resume cuts off, and the verb compare."""

from __future__ import annotations

import csv
import html
import re
from dataclasses import replace
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
from clipstream.evals.statistics import differences
from clipstream.report.html_report import loss_kind, read_run, render
from clipstream.report.records import FORMER_FILE, METRICS_FILE, add, json_line, lines
from clipstream.report.sinks import EvaluationTable, MetricsFile, SinkGroup
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


def evaluate(world: World, folder: str) -> list[dict[str, Any]]:
    found: list[Any] = []
    data = {"shards": f"{folder}/*.tar"}
    sections = {
        "val": {"type": "retrieval", "data": data, "batch_size": 4},
        "near": {"type": "knn", "data": data, "train_shards": f"{folder}/*.tar", "k": 3},
    }
    settings = {name: EvalSettings.model_validate(section) for name, section in sections.items()}
    EvalRunner(settings, context_of(world), Listeners(found.append), subject={"run": "mine"})(3, last=True)
    return found


def test_what_an_evaluation_was_made_with(tmp_path: Path) -> None:
    make_shards(tmp_path, [9, 8])
    about, near = evaluate(World(), str(tmp_path))
    assert about["eval"] == "val" and about["weights"] == of_weights(tiny_towers().state_dict())
    assert about["run"] == "mine" and about["time"].endswith("UTC") and "torch" in about["versions"]
    lost = {"measured": 17, "lost_area": pytest.approx(0.07, abs=0.05)}  # images of 24 x 24 to 24 x 28 pixels
    (data,) = about["data"]
    assert data.items() >= {"shards": f"{tmp_path}/*.tar", "samples": 17, **lost}.items() and about["ranks"] == 1
    assert data["pictures"] != data["pairs"]
    assert about["settings"]["type"] == "retrieval" and about["precision"] == "fp32"
    assert [part["samples"] for part in near["data"]] == [17, 17]
    mine, others = run_ranks(2, evaluate, str(tmp_path))
    changing = ("ranks", "seconds", "time")
    assert others == [] and all(mine[0][key] == about[key] for key in about if key not in changing)
    assert mine[0]["ranks"] == 2


def test_weights_are_summed_up_once_for_all_evaluators_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_shards(tmp_path, [5])
    towers, taken, told = tiny_towers(8), [], []
    whole = towers.state_dict
    monkeypatch.setattr(towers, "state_dict", lambda: taken.append(0) or whole())
    kinds = EvalSettings.model_validate({"type": "retrieval", "data": {"shards": f"{tmp_path}/*.tar"}})
    listeners = Listeners(lambda record: told.append(record["weights"]))
    runner = EvalRunner({"one": kinds, "other": kinds}, EvalContext(towers, ByteTokenizer(), World()), listeners)
    for step in (1, 2):
        runner(step, last=True)
        with torch.no_grad():
            next(towers.parameters()).add_(1)
    assert len(taken) == 2 and told[0] == told[1] != told[2] == told[3]


def evaluation(step: int, name: str = "val", **more: Any) -> dict[str, Any]:
    metrics = {"R@1": 0.25, "n": 9, "seconds": 1.5}
    return {
        "step": step, "eval": name, **metrics, "metrics": [*metrics], "weights": "0123",
        "data": [{"shards": "a.tar", "samples": 9, "pictures": "ab", "pairs": "cd"}], "settings": {"type": "retrieval"},
        "run": "mine", "model": {"name": "ViT-B-32", "pretrained": "openai"}, **more,
    }  # fmt: skip


def test_an_evaluation_is_appended_to_tables_and_lines(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')  # torn by a kill
    for step in (7, 8):
        add(tmp_path / "new" / "metrics.csv", evaluation(step))
        add(tmp_path / "metrics.md", evaluation(step))
        add(tmp_path / "metrics.jsonl", evaluation(step))
    assert [record for _, record in lines(tmp_path / "metrics.jsonl")] == [{"step": 1}, *map(evaluation, (7, 8))]
    with (tmp_path / "new" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["metric"], row["value"]) for row in rows] == [("7", "R@1", "0.25"), ("8", "R@1", "0.25")]
    row = rows[0]
    assert (row["run"], row["model"], row["pretrained"], row["n"]) == ("mine", "ViT-B-32", "openai", "9")
    assert (tmp_path / "metrics.md").read_text().splitlines()[2:] == [
        f"|  | ViT-B-32 | {step} | val | R@1 | 25.0% |  |  |" for step in (7, 8)
    ]


def steps(folder: Path) -> list[tuple[int, str]]:
    table = {(int(row["step"]), row["eval"]) for row in csv.DictReader((folder / "evaluations.csv").open())}
    found = [(record["step"], record["eval"]) for _, record in lines(folder / METRICS_FILE)]
    assert table == set(found)
    return found


def outputs(folder: Path, *done: int, **resumed: bool) -> SinkGroup:
    """What a run writes evaluations with."""
    group = SinkGroup(())
    group.sinks["metrics"] = MetricsFile(folder, *done, **resumed)
    group.sinks["table"] = EvaluationTable(folder)
    return group


def test_a_resumed_run_writes_its_evaluations_once_and_keeps_those_of_later(tmp_path: Path) -> None:
    group = outputs(tmp_path)
    assert not (tmp_path / "evaluations.csv").exists()
    for step in (2, 4, 6):
        group.write(evaluation(step))
    for name in (METRICS_FILE, "evaluations.csv"):
        add(tmp_path / name, evaluation(6, "later", checkpoint="step_00000006"))
    outputs(tmp_path, 4).write(evaluation(5))
    assert steps(tmp_path) == [(2, "val"), (4, "val"), (6, "later"), (5, "val")]
    outputs(tmp_path, 5, ended=True)
    assert steps(tmp_path) == [(2, "val"), (4, "val"), (6, "later")]
    outputs(tmp_path)
    assert not (tmp_path / METRICS_FILE).read_text() and not (tmp_path / "evaluations.csv").exists()


def test_evaluations_wait_for_room_on_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path, "1m"):
        group = outputs(tmp_path)
        group.write(evaluation(2))
        ballast = fill(tmp_path, 0)
        for step in range(3, 200):
            group.write(evaluation(step))
        assert "evaluations.csv is full: its lines wait" in capsys.readouterr().err
        ballast.unlink()
        group.close()
        assert steps(tmp_path) == [(step, "val") for step in range(2, 200)]


def test_a_run_of_an_earlier_version_has_provenance_in_a_file_of_its_own(tmp_path: Path) -> None:
    known = {"step": 4, "eval": "val", "R@1": 0.5, "n": 9}
    folder = make_run(tmp_path / "mine", steps=20)
    add(folder / METRICS_FILE, {**known, "step": 2}, known)
    traced = evaluation(4) | known, evaluation(6), evaluation(3, checkpoint="c"), evaluation(4, checkpoint="d")
    add(folder / FORMER_FILE, *traced)
    found = read_run(folder).evaluated["val"]
    assert found.curves["R@1"] == [(2, 0.5), (3, 0.25), (4, 0.5)] and found.newest == traced[0]
    outputs(folder, 20)
    table = [(row["step"], row["checkpoint"]) for row in csv.DictReader((folder / "evaluations.csv").open())]
    assert table == [("3", "c"), ("4", "d"), ("2", ""), ("4", "")]


class Backwards(ByteTokenizer):
    """Other ids for the same texts."""

    def encode(self, texts: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
        return super().encode([text[::-1] for text in texts])


def evaluated(
    folder: Path, shards: Path, tokenizer: ByteTokenizer | None = None, classes: str = "abc", **more: Any
) -> dict[str, dict[str, Any]]:
    """A run's folder with evaluations of the tiny model on these shards; the newest ones by name."""
    folder.mkdir(parents=True)
    towers = tiny_towers()
    data, names = {"shards": f"{shards}/*.tar"}, folder.parent / "names.txt"
    names.write_text("\n".join(classes))  # the same file: its content tells
    sections = {
        "val": {"type": "retrieval", "data": {**data, **more.pop("data", {})}, **more},
        "kinds": {"type": "zero_shot", "data": data, "classes": str(names), "templates": "plain"},
    }
    metrics = MetricsFile(folder)
    runner = EvalRunner(
        {name: EvalSettings.model_validate(section) for name, section in sections.items()},
        EvalContext(towers, tokenizer or ByteTokenizer(), World()),
        Listeners(metrics.write),
    )
    found = {record["eval"]: record for step in (1, 2) for record in runner(step, last=True)}
    metrics.close()
    assert not any("error" in record for record in found.values())
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
    records = [record for _, record in lines(four / METRICS_FILE)]
    kept = [{key: record[key] for key in ("step", "eval", *record["metrics"])} for record in records]
    (four / METRICS_FILE).write_text("".join(map(json_line, kept)))
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
  const narrow = [...table.querySelectorAll(".keys td.key + td")].filter(cell => cell.offsetWidth < 90).length;
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
    held = {"step": 40, "eval": "held", "val_loss": 2.0, "metrics": ["val_loss"], "data": [], "settings": {}}
    runs = [replace(run, records={("held", 40, False, False): held}) for run in runs]
    assert "siglip with clip: another kind of loss" in render(runs)

"""Traceable results: evaluation files, fingerprints of weights and data, what a resume cuts off."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from clipstream.distributed.world import World
from clipstream.evals.context import EvalContext, of_weights
from clipstream.evals.runner import EvalRunner, Listeners
from clipstream.evals.settings import EvalSettings
from clipstream.report.eval_results import FiguresFile, add, traced
from tests.support.evaluating import context_of, tiny_towers
from tests.support.pictures import ByteTokenizer, make_shards
from tests.support.ranks import run_ranks
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

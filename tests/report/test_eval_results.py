"""Traceable results: evaluation files, fingerprints of weights and data, what a resume cuts off."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from clipstream.data.loader.pipeline import ModelInputs
from clipstream.data.settings import SourceSettings
from clipstream.distributed.world import World
from clipstream.evals.context import EvalContext, Reading, of_weights
from clipstream.evals.runner import EvalRunner, Listeners
from clipstream.evals.settings import EvalSettings
from clipstream.report.eval_results import FiguresFile, add, traced, way_of
from clipstream.report.terminal import evaluation_line
from tests.support.evaluating import context_of, tiny_towers
from tests.support.loaders import evaluation_of
from tests.support.pictures import ByteTokenizer, make_shards
from tests.support.ranks import run_ranks
from tests.support.savers import fill, small_disk


def test_the_fingerprint_of_weights_is_that_of_their_numbers() -> None:
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7)}
    first = of_weights(state)
    assert len(first) == 16 and first == of_weights({"b": torch.tensor(7), "a": state["a"].clone()})
    assert first == of_weights({**state, "a": state["a"].bfloat16()}) == of_weights({**state, "a": state["a"].double()})
    others = [
        {**state, "a": state["a"].view(3, 2)},
        {**state, "a": state["a"].flip(0)},
        {**state, "a": state["a"] + 1e-6},
        {"c": state["a"], "b": state["b"]},
        {**state, "b": torch.tensor(8)},
    ]
    assert len({first, *map(of_weights, others)}) == 6


def test_large_tensors_are_summed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": torch.randn(1000, generator=torch.Generator().manual_seed(0))}
    whole = of_weights(state)
    monkeypatch.setattr("clipstream.evals.context.AT_ONCE", 7)
    assert of_weights(state) == whole


def read(folder: Path, size: int = 4) -> dict[str, Any]:
    source = SourceSettings(shards=f"{folder}/*.tar")
    reading, towers = Reading("x"), tiny_towers()
    loader = evaluation_of(source, size, inputs=ModelInputs(ByteTokenizer(), towers.image))
    with loader:
        for batch in loader:
            reading.add(batch)
    return reading.with_others([reading])


def test_the_fingerprint_of_data_is_that_of_what_was_read(tmp_path: Path) -> None:
    make_shards(tmp_path / "two", [5, 4])
    make_shards(tmp_path / "one", [9])
    make_shards(tmp_path / "other", [9], start=1)
    make_shards(tmp_path / "said", [9], txt="something else")
    two, one, other, said = (read(tmp_path / name) for name in ("two", "one", "other", "said"))
    assert two == one == read(tmp_path / "one", size=9) and one["samples"] == 9
    assert other["pictures"] != one["pictures"] and other["pairs"] != one["pairs"]
    assert said["pictures"] == one["pictures"] and said["pairs"] != one["pairs"]


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
    assert about["data"] == [{**read(tmp_path), "shards": f"{tmp_path}/*.tar", **lost}] and about["ranks"] == 1
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
    context = EvalContext(towers, ByteTokenizer(), World())
    data = {"shards": f"{tmp_path}/*.tar"}
    kinds: dict[str, Any] = {"type": "zero_shot", "data": data, "classes": ["a", "b", "c"], "templates": "plain"}
    sections = {name: EvalSettings.model_validate(kinds) for name in ("one", "other")}
    runner = EvalRunner(sections, context, Listeners(trace=lambda _, about: told.append(about["weights"])))
    for step in (1, 2):
        assert not [record["error"] for record in runner(step, last=True) if "error" in record]
        with torch.no_grad():
            next(towers.parameters()).add_(1)
    assert len(taken) == 2 and told[0] == told[1] != told[2] == told[3]


def test_a_figure_tells_which_words_its_classes_had(tmp_path: Path) -> None:
    make_shards(tmp_path, [5])
    names, told = tmp_path / "names.txt", []
    kinds = {"type": "zero_shot", "classes": str(names), "templates": "plain"}
    sections = {
        "kinds": {**kinds, "data": {"shards": f"{tmp_path}/*.tar"}},
        "near": {"type": "knn", "data": {"shards": f"{tmp_path}/*.tar"}, "train_shards": f"{tmp_path}/*.tar"},
    }
    context = context_of(World())
    for text in ("a\nb\nc\n", "a\nb\nd\n", "a\nb\nc\n"):
        names.write_text(text)
        settings = {name: EvalSettings.model_validate(section) for name, section in sections.items()}
        runner = EvalRunner(settings, context, Listeners(trace=lambda *both: told.append(traced(*both, {}))))
        runner(3, last=True)
    first, near, other, _, again, _ = told
    assert first["texts"] == again["texts"] != other["texts"] and near["texts"] is None
    assert first["settings"] == other["settings"] and first["data"] == other["data"], "nothing else would tell"
    assert way_of(first) == way_of(again) != way_of(other)


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


def test_a_user_metric_is_a_number_and_a_share_a_percentage(tmp_path: Path) -> None:
    shown = evaluation_line({"step": 1, "eval": "own", "ndcg": 0.5, "top1": 0.5, "chance_ndcg": 0.25, "val_loss": 0.5})
    assert "ndcg 0.5 (chance 0.25)" in shown and "top1 50.0%" in shown and "val_loss 0.5" in shown


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

"""Weights between the start and the end of a run, and soups: their figures, the rule, and what is written."""

from __future__ import annotations

import json
import math
import re
import shlex
from itertools import product
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from safetensors.torch import load_file

from clipstream.cli.verbs.evaluate import main as evaluate
from clipstream.cli.verbs.interpolate import main
from clipstream.cli.verbs.train import main as train
from clipstream.errors import ClipstreamError
from clipstream.export.interpolation import Mixing, Point, average, main_figure, mix
from tests.support.forks import ROOT
from tests.support.pictures import picture
from tests.support.ranks import end_ranks
from tests.support.runs import flags, furnish, launched, weights

EVALS = ["--evals.new.type", "retrieval", "--evals.new.data.shards"]
GUARD = ["--evals.old.type", "zero_shot", "--evals.old.classes", "[red,green,dog]", "--evals.old.templates", "plain",
         "--evals.old.role", "guard", "--evals.old.label", "cls", "--evals.old.data.shards"]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that go on from the checkpoint of a first one."""
    folder = furnish(tmp_path_factory.mktemp("interpolate"))
    assert train(flags(folder, "start", "--workers", "0", steps=4)) == 0
    start = ["--pretrained", f"{folder}/runs/start", "--model.allow-mismatch", "true", "--workers", "0"]
    evals = [*EVALS, f"{folder}/val/*.tar", "--evals.old.type", "retrieval", "--evals.old.role", "guard",
             "--evals.old.data.shards", f"{folder}/pairs/00000.tar"]  # fmt: skip
    assert train([*flags(folder, "a", *start, *evals, steps=6), "--lora", "4"]) == 0
    assert train(flags(folder, "b", *start, *evals, "--run.seed", "3", "--lr", "1e-2", steps=6)) == 0
    assert main([f"{folder}/runs/a", "--alphas", "[0.5, 1]", "--guard-kept", "0"]) == 0
    return folder


def figures(folder: Path) -> Any:
    return json.loads((folder / "frontier.json").read_text())


def test_the_best_weights_between_start_and_end_are_chosen(place: Path, capsys: Any) -> None:
    out = place / "runs" / "a" / "interpolated"
    said = figures(out)
    assert [point["weights"] for point in said["points"]] == ["alpha 0", "alpha 0.5", "alpha 1"]
    assert said["guards"] == ["old"] and (out / "frontier.svg").read_text().startswith("<svg xmlns")
    chosen = max(said["points"], key=lambda point: point["new"])
    assert said["chosen"] == chosen["weights"]
    start, end = weights(place, "start", 4), weights(place, "a", 6)
    for name, tensor in load_file(out / "open_clip_model.safetensors").items():
        assert torch.equal(tensor, mix(start, end, float(said["chosen"].split()[1]))[name])
    open_clip.create_model_from_pretrained(f"local-dir:{out}")
    assert evaluate(["--checkpoint", str(out), "--val-data", f"{place}/val/*.tar", "--device", "cpu", "--output",
                     f"{place}/again.jsonl", "--precision", "fp32", "--workers", "0"]) == 0  # fmt: skip
    again = json.loads((place / "again.jsonl").read_text().splitlines()[-1])
    both = [again[f"{way}_R@1"] for way in ("image_to_text", "text_to_image")]
    assert sum(both) / 2 == pytest.approx(chosen["new"])


def test_the_verb_takes_a_start_a_grid_a_target_and_soups(place: Path, tmp_path: Path, capsys: Any) -> None:
    end, other = f"{place}/runs/b", f"{place}/runs/a"
    rule = "--alphas 0:1:0.5 --target new/image_to_text_R@5 --guard-kept 0.5 --out"
    assert main([end, *rule.split(), f"{tmp_path}/a"]) == 0
    said = figures(tmp_path / "a")
    assert [point["weights"] for point in said["points"]] == ["alpha 0", "alpha 0.5", "alpha 1"]
    kept = [point for point in said["points"] if point["old"] >= 0.5 * said["points"][0]["old"]]
    assert max(point["new"] for point in kept) == next(p["new"] for p in kept if p["weights"] == said["chosen"])
    assert main([f"{place}/runs/start", end, "--alphas", "[1]", "--out", f"{tmp_path}/b"]) == 0
    first = figures(tmp_path / "b")["points"][0]
    assert first == {**said["points"][0], "new": first["new"]}
    for kind in ("uniform", "greedy"):
        assert main([end, other, "--soup", kind, "--out", f"{tmp_path}/{kind}"]) == 0
    states = [weights(place, "b", 6), weights(place, "a", 6)]
    uniform = load_file(tmp_path / "uniform" / "open_clip_model.safetensors")
    for name, tensor in uniform.items():
        assert torch.equal(tensor, average(iter(states))[name])
    said = figures(tmp_path / "greedy")
    first = max(said["points"][:2], key=lambda point: point["new"])
    assert said["chosen"] == max(said["points"][2], first, key=lambda point: point["new"])["weights"]


def test_several_ranks_write_what_one_writes(place: Path, tmp_path: Path) -> None:
    argv = [f"{place}/runs/b", "--alphas", "[0.5]", "--train.parallel", "fsdp", "--out"]
    ends = end_ranks(2, launched, main, [*argv, f"{tmp_path}/ranks"])
    assert [end.code for end in ends] == [0, 0], ends[0].stderr
    assert main([*argv, f"{tmp_path}/one"]) == 0
    assert figures(tmp_path / "ranks") == figures(tmp_path / "one")


def test_a_run_with_a_guard_ends_with_the_command(place: Path, capsys: Any) -> None:
    guard = [*EVALS, f"{place}/val/*.tar", *GUARD, f"{place}/val/*.tar"]
    assert train(flags(place, "guarded", *guard, steps=2)) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"clipstream interpolate {place}/runs/guarded")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "missing MODEL: clipstream interpolate MODEL..."),
        (["{place}/runs/b", "--alphas", "0:1"], "--alphas: expected FIRST:LAST:STEP or a list, [0.3, 0.5], not '0:1'"),
        (["{place}/runs/b", "--alphas", "[2]"], "--alphas: expected shares from 0 to 1, not 2"),
        (["{place}/runs/b", "--guard-kept", "97"], "--guard-kept: expected at most 1"),
        (["{place}/runs/b", "--target", "no/R@1"], "the target no/R@1 is of no evaluator"),
        (["{place}/runs/b", "--target", "new/R"], "new has no metric 'R'"),
        (["{place}/runs/b", "--evals.old.role", "target"], "several evaluators, new, old, without role guard"),
        (["{place}/runs/start"], "has no evaluators"),
        (["{place}/runs/b/checkpoints/step_00000006", "--soup", "greedy"], "CHECKPOINT CHECKPOINT"),
        (["{place}/other", "{place}/runs/b"], "is another model than"),
        (["{place}/runs/b", "{place}/runs/b", "--soup", "greedy"], "is named twice"),
        (["{place}/runs/b", "{place}/runs/a", "--soup", "greedy", "--alphas", "[1]"], "--alphas: is not of --soup"),
        (["{place}/runs/b", "--out", "{place}/runs/b/checkpoints/step_00000006"], "not of interpolate: name another"),
        (["{place}/runs/a/interpolated", "{place}/runs/b", "--out", "{place}/runs/a/interpolated"], "one of the mod"),
    ],
)
def test_wrong_commands_are_refused_in_one_sentence(argv: list[str], words: str, place: Path, capsys: Any) -> None:
    if not (place / "other").exists():
        from tests.support.model_files import build, write

        build(write(place)).save_pretrained(place / "other")
    assert main([word.format(place=place) for word in argv]) == 2
    assert words in capsys.readouterr().err


def test_guards_decide_which_weights_may_be_chosen() -> None:
    mixing = Mixing.__new__(Mixing)
    mixing.guards, mixing.guard_kept, mixing.lower = ["old"], 0.9, set()
    start = Point("0", {"old": 0.5, "new": 0.1}, 0.1)
    assert mixing.keeps(Point("1", {"old": 0.45, "new": 0.9}, 0.9), start)
    assert not mixing.keeps(Point("1", {"old": 0.44, "new": 0.9}, 0.9), start)
    figure, lower = main_figure({"eval": "old", "step": 1, "val_loss": 2.0})
    assert (figure, lower) == (2.0, True) and main_figure({"eval": "old", "a_R@1": 0.5, "b_R@1": 1.0}) == (0.75, False)
    for begin, kept, lost, lower in ((2.0, 2.2, 2.3, True), (-2.0, -2.2, -2.3, False), (-2.0, -1.8, -1.7, True)):
        mixing.lower = {"old"} if lower else set()
        first = Point("0", {"old": begin}, 0.0)
        assert mixing.keeps(first, first)
        assert [mixing.keeps(Point("1", {"old": one}, 0.0), first) for one in (kept, lost)] == [True, False]
    with pytest.raises(ClipstreamError, match="the guard old is nan at the start"):
        mixing.keeps(start, Point("0", {"old": math.nan}, 0.0))


@pytest.mark.parametrize("name", ["lora", "full-with-guard", "groups", "class-folders", "small-data", "from-scratch"])
def test_the_command_of_a_recipe_runs(name: str, place: Path) -> None:
    head = (ROOT / f"configs/recipes/{name}.yaml").read_text()
    found = re.search(r"^#\s+clipstream train (.*)$", head, re.M)
    assert found is not None
    classes = {"red kite": 0, "robin": 10}
    for kind, (part, first) in product(classes, (("train", 0), ("heldout", 5))):
        for number in range(first, first + 5):
            path = place / "birds" / part / kind / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(classes[kind] + number))
    (place / "birds/classes.txt").write_text("\n".join(classes))
    folders = name == "class-folders"
    words = {"configs/": f"{ROOT}/configs/", "START": f"{place}/runs/start", "train.csv": f"{place}/pairs/00000.tar",
             "heldout.csv": f"{place}/val/*.tar", "KNOWN": f"{place}/pairs/00001.tar",
             "REPLAY": f"{place}/pairs/00002.tar", "json:FIELD": "cls",
             "TRAIN": f"{place}/birds/train" if folders else f"{place}/pairs/*.tar",
             "HELDOUT": f"{place}/birds/heldout" if folders else f"{place}/val/*.tar",
             "classes.txt": f"{place}/birds/classes.txt"}  # fmt: skip
    words = {"tokens train.csv": f"tokens {words['classes.txt']}"} | words
    argv = shlex.split(re.sub("|".join(words), lambda match: words[match[0]], found[1]))
    less = ["--steps", "2", "--warmup", "0", "--data.global-batch-size", "8", "--device", "cpu", "--run.threads", "1",
            "--workers", "0"]  # fmt: skip
    less += {"lora": ["--model.text.lora.rank", "4"], "from-scratch": ["--stages.small.until", "1"]}.get(name, [])
    assert train([*argv, *less, "--logs", f"{place}/recipes", "--name", name]) == 0
    if name in ("lora", "full-with-guard"):
        assert main([f"{place}/recipes/{name}", "--alphas", "[1]"]) == 0
        said = figures(place / "recipes" / name / "interpolated")
        assert said["guards"] == ["known"] and said["target"] == "val"
    else:
        records = map(json.loads, (place / "recipes" / name / "metrics.jsonl").read_text().splitlines())
        last = [record for record in records if record.get("eval") == "val"][-1]
        assert last["n"] > 0 and ("top1" in last) == folders

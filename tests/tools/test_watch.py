"""`evaluate --watch`: which checkpoints it evaluates during training, after a stop, and when some are deleted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from clipstream.checkpoint.async_writer import AsyncWriter, Content
from clipstream.cli.verbs.compare import main as compare
from clipstream.cli.verbs.evaluate import main
from clipstream.cli.verbs.evaluate_watch import WatchedRun
from clipstream.config.dump import dump
from clipstream.config.settings import Settings
from clipstream.distributed.world import World
from clipstream.report.html_report import read_run
from clipstream.training.settings import CheckpointSettings
from clipstream.training.state import TrainState
from tests.support.evaluating import tiny_towers
from tests.support.forks import ROOT, wait_until
from tests.support.pictures import make_shards
from tests.support.ranks import TIMEOUT, end_ranks, launched
from tests.support.runs import MODEL, flags, lines, start
from tests.support.savers import damage, fill, names, small_disk

END = {"step": 6, "end": {"total_steps": 6}}


def follower(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "clipstream", "evaluate", "--watch", str(folder), *more]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)


def figures(folder: Path) -> list[dict[str, Any]]:
    """The evaluations of the followers of a run."""
    path = folder / "watch" / "evaluations.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def made(folder: Path) -> list[tuple[int, str]]:
    return [(one["step"], one["eval"]) for one in figures(folder)]


def save(folder: Path, step: int, weights: int, keep_last: int = 9) -> Path:
    """Write a checkpoint of a tiny model into a run's folder."""
    towers = tiny_towers(weights)
    settings = CheckpointSettings(keep_last=keep_last)
    optimizer = torch.optim.AdamW(towers.parameters())
    saver = AsyncWriter(folder / "checkpoints", World(), settings, Content(towers, optimizer))
    saver.save(TrainState(step))
    assert saver.finish()
    return folder / "checkpoints" / f"step_{step:08d}"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder as a training leaves it that has ended, with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    data = {"shards": make_shards(folder.parent / "pairs", [9])}
    settings = {
        "run": {"device": "cpu", "threads": 1},
        "data": {"workers": 0},
        "tokenizer": {"type": "tests.tools.test_evaluate:Bytes"},
        "train": {"precision": "fp32"},
        "evals": {
            "val": {"data": data},
            "kinds": {"type": "zero_shot", "data": data, "classes": ["a", "b", "c"], "templates": "plain"},
        },
    }
    for step in (2, 4, 6):
        save(folder, step, weights=step)
    (folder / "config.yaml").write_text(dump(Settings.model_validate(settings)))
    (folder / "metrics.jsonl").write_text(json.dumps(END) + "\n")
    return folder


@pytest.fixture
def run(ended: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(ended, tmp_path / "runs" / "tiny", symlinks=True))


@pytest.mark.slow
def test_beside_a_training_process(tmp_path: Path) -> None:
    """The follower is there first, and figures are those of the run's own evaluations."""
    make_shards(tmp_path / "pairs", [21, 17, 19, 5])
    make_shards(tmp_path / "val", [11, 9], start=100)
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    folder = tmp_path / "runs" / "live"
    watch = follower(folder)
    assert watch.stdout is not None
    first = watch.stdout.readline()
    evals = ["--val-data", f"{tmp_path}/val/*.tar", "--evals.val.every", "4", "--checkpoint.keep-last", "99"]
    (process,) = start(flags(tmp_path, "live", *evals, "--checkpoint.every", "4", steps=22))
    said, error = watch.communicate(timeout=TIMEOUT)
    assert process.wait(TIMEOUT) == 0 and watch.returncode == 0, (said, error)
    steps = [4, 8, 12, 16, 20, 22]
    assert made(folder) == [(step, "val") for step in steps]
    own = {line["step"]: line for line in lines(tmp_path, "live", "eval")}
    assert sorted(own) == steps
    for one in figures(folder):
        assert {k: v for k, v in own[one["step"]].items() if k != "eval"}.items() <= {**one, "eval": 0}.items()
        assert one["checkpoint"] == f"step_{one['step']:08d}" and one["run"] == "live"
    traced = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert [one["weights"] for one in traced] == [one["weights"] for one in figures(folder)]
    assert b"waiting for the first checkpoint" in first and b"val at step 22:" in said and b"has ended" in said
    assert names(folder / "watch") == [
        ".lock", "evaluations.csv", "evaluations.jsonl", "pictures", "report.html"
    ]  # fmt: skip
    assert "Examples of val" in (folder / "watch" / "report.html").read_text()


def test_each_is_evaluated_once_in_order(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = [("val"), ("kinds")]
    assert main(["--watch", str(run)]) == 0
    assert made(run) == [(step, name) for step in (2, 4, 6) for name in both]
    assert len(EventAccumulator(str(run / "watch" / "tensorboard")).Reload().Images("pictures/kinds")) > 0
    before = figures(run)
    assert main(["--watch", str(run)]) == 0
    assert figures(run) == before, "nothing is evaluated again"
    save(run, 8, weights=8)
    save(run, 6, weights=9)  # a later process went back to step 4, and saved other weights
    assert main([f"--watch={run}"]) == 0
    assert made(run)[6:] == [(8, "val"), (8, "kinds"), (6, "val"), (6, "kinds")]
    # File by file: TensorBoard reads files in the order of their names, which is not that of one second and process.
    files = [EventAccumulator(str(path)).Reload() for path in (run / "watch" / "tensorboard").glob("*tfevents*")]
    tag = "eval/val/image_to_text_R@1"
    found = [file.Scalars(tag) for file in files if tag in file.Tags()["scalars"]]
    assert {event.step for events in found for event in events} == {2, 4, 6, 8}
    points = read_run(run).evaluations["val"]["image_to_text_R@1"]
    assert [step for step, _ in points] == [2, 4, 6, 8] and points[2][1] == figures(run)[8]["image_to_text_R@1"]
    assert compare([str(run), "--out", f"{run}/all.html"]) == 0 and "kinds" in (run / "all.html").read_text()
    assert main(["--watch", str(run), "--evals.val", "null", "--evals.kinds.templates", "simple"]) == 0
    assert "holds no" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_stop_ends_it_cleanly_and_the_same_command_goes_on(run: Path) -> None:
    (run / "metrics.jsonl").write_text("")
    process = follower(run)
    wait_until(lambda: len(figures(run)) == 6, process)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 75 and b"stopped by SIGTERM; rerun the same command to continue" in error
    assert b"Traceback" not in error and not (run / "watch" / "held").exists()
    save(run, 8, weights=8)
    again = follower(run)
    wait_until(lambda: len(figures(run)) >= 7, again)
    again.kill()  # between two evaluators of a checkpoint, or after both
    again.communicate()
    (run / "metrics.jsonl").write_text(json.dumps(END) + "\n")
    assert main(["--watch", str(run)]) == 0
    assert made(run)[6:] == [(8, "val"), (8, "kinds")]


def test_a_run_that_lies_still(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "metrics.jsonl").write_text(json.dumps(END) + "\n" + json.dumps({"step": 6, "start": {}}) + "\n")
    assert main(["--watch", str(run), "--idle", "1"]) == 75
    assert "no change in" in capsys.readouterr().err and len(made(run)) == 6
    assert main(["--watch", str(run.parent / "none"), "--idle", "1"]) == 75
    assert not (run.parent / "none").exists(), "a run must find its name free"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--checkpoint", "x"], "--checkpoint and --watch are mutually exclusive"),
        (["--out=x.csv"], "--output and --watch are mutually"),
        (["--idle", "soon"], "--idle: expected seconds, not 'soon'"),
        (["--evals.val", "null", "--evals.kinds", "null"], "no evaluation data"),
        (["--modl", "x"], "did you mean"),
        (["--evals.val.prompts", "[a cat]", "--log.pictures", "0"], "evals.val.prompts: requires log.pictures above 0"),
        (["--evals.kinds.classes", "[a]"], "evals.kinds.classes: expected at least 2, not 1"),
    ],
)
def test_wrong_settings(ended: Path, argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--watch", str(ended), *argv]) == 2
    assert told in capsys.readouterr().err


def test_a_full_disk_is_told_and_the_same_command_goes_on(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, "3m"):
        there = Path(shutil.copytree(run, disk / "tiny"))
        ballast = fill(disk, 0)
        assert main(["--watch", str(there), "--log.tensorboard", "false"]) == 1
        shown = capsys.readouterr().err
        assert f"error: the disk of {there}/watch is full" in shown and "Traceback" not in shown
        ballast.unlink()
        assert main(["--watch", str(there), "--log.tensorboard", "false"]) == 0
        assert made(there) == [(step, name) for step in (2, 4, 6) for name in ("val", "kinds")]


def test_a_checkpoint_that_goes_away_is_told(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run removes step 2 when its turn has come, step 4 before; step 6 is damaged, and step 8 is whole."""
    second = (watched := WatchedRun(run)).found()[1]
    save(run, 4, weights=9)
    assert watched.hold(second) is None, "its weights are others by now"
    damage(save(run, 6, weights=6) / "open_clip_model.safetensors")
    save(run, 8, weights=8)
    hold = WatchedRun.hold

    def removing(self: WatchedRun, found: Any) -> Path | None:
        if found.step == 2:
            shutil.rmtree(run / "checkpoints" / "step_00000002")
            shutil.rmtree(run / "checkpoints" / "step_00000004")
        return hold(self, found)

    monkeypatch.setattr(WatchedRun, "hold", removing)
    assert main(["--watch", str(run), "--log.tensorboard", "false"]) == 0
    assert made(run) == [(8, "val"), (8, "kinds")]
    said = capsys.readouterr().err
    assert "warning: step_00000002 skipped: deleted by the run while it was read" in said
    assert "warning: step_00000004 skipped: deleted by the run before it was evaluated" in said
    assert "warning: step_00000006 skipped: it is damaged" in said


@pytest.mark.slow
def test_two_ranks(run: Path) -> None:
    ends = end_ranks(2, launched, main, ["--watch", str(run), "--evals.kinds", "null"])
    assert [end.code for end in ends] == [0, 0], ends
    assert made(run) == [(step, "val") for step in (2, 4, 6)]
    assert all(one["ranks"] == 2 and one["n"] == 9 for one in figures(run))


def test_a_mean_may_be_of_what_an_earlier_follower_found(run: Path, tmp_path: Path) -> None:
    assert main(["--watch", str(run)]) == 0
    suite = tmp_path / "suite.yaml"
    suite.write_text(yaml.safe_dump({"evals": {"all": {"type": "mean", "of": {"kinds": "top1", "val": "n"}}}}))
    assert main(["--watch", str(run), "--config", str(suite)]) == 0
    assert made(run)[6:] == [(2, "all"), (4, "all"), (6, "all")]
    top1 = [one["top1"] for one in figures(run) if one["eval"] == "kinds"]
    assert [one["mean"] for one in figures(run)[6:]] == [(share + 9) / 2 for share in top1]


def test_a_failing_evaluator_is_told_and_gives_the_exit_code(run: Path, tmp_path: Path) -> None:
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["evals"]["val"]["data"]["shards"] = str(tmp_path / "none.tar")
    (run / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    assert main(["--watch", str(run)]) == 3
    assert made(run) == [(step, name) for step in (2, 4, 6) for name in ("val", "kinds")]
    assert ["error" in one for one in figures(run)] == [True, False] * 3
    assert main(["--watch", str(run)]) == 0, "what failed was evaluated as well"

"""Sinks of `log.sinks`: how they are named, built and called, and what happens when they fail."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from clipstream.cli.verbs.train import main
from clipstream.config.settings import load
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.evals.context import Table
from clipstream.report.outputs import Outputs
from clipstream.report.records import Record
from clipstream.report.settings import SinkSettings
from clipstream.report.sinks import RunInfo, Sink
from tests.support.runs import flags, furnish, lines, same_weights, weights


class Recorder(Sink):
    made: Recorder

    def __init__(self, settings: SinkSettings, run: RunInfo) -> None:
        self.run, self.calls = run, list[Any]()
        Recorder.made = self

    def write(self, record: Record) -> None:
        self.calls.append(record)

    def show(self, step: int, name: str, examples: Any, tables: Any = ()) -> None:
        self.calls.append(("show", step, name, list(tables)))

    def status(self, text: str) -> None:
        self.calls.append(("status", text))

    def close(self) -> None:
        self.calls.append("close")


class Failing(Sink):
    def __init__(self, settings: SinkSettings, run: RunInfo) -> None:
        pass

    def write(self, record: Any) -> None:
        raise ConnectionError("no network")


class Unbuildable(Failing):
    def __init__(self, settings: SinkSettings, run: RunInfo) -> None:
        raise RuntimeError("no login")


class Changing(Failing):
    """Changes what it is given, and cannot take images."""

    def write(self, record: Any) -> None:
        record["step"] = -1

    def show(self) -> None:  # type: ignore[override]
        raise AssertionError


class NoSink:
    def __init__(self, settings: SinkSettings, run: RunInfo) -> None:
        pass


def outputs(folder: Path, *kinds: str) -> Outputs:
    """The outputs of a run with these sinks, named by their kind."""
    flags = [f"--log.sinks.{kind.lower()}.type={__name__}:{kind}" for kind in kinds]
    log = load(["--log.tensorboard=false", "--log.report=false", "--log.progress=none", *flags]).log
    return Outputs(log, World(), RunInfo(folder, total_steps=20))


def test_sinks_get_records_images_and_status_and_one_that_fails_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = outputs(tmp_path, "Changing", "Failing", "Recorder")
    records = [{"step": 3, "loss": 1.5}, {"step": 3, "nonfinite": {"loss": "nan", "grad_norm": "nan", "keys": ["a"]}}]
    table = Table("worst", ("class",), (("cat",),))
    for record in records:
        out.write(record)
    for _ in range(2):
        out.show(10, "val", [], [table])
    out.status("saving")
    out.close()
    shown = ("show", 10, "val", [table])
    assert Recorder.made.calls == [*records, shown, shown, ("status", "saving"), "close"]
    assert Recorder.made.run.folder == tmp_path and Recorder.made.run.total_steps == 20
    told = capsys.readouterr().err
    assert told.count("warning: log.sinks.failing failed, and the run goes on: ConnectionError('no network')") == 1
    assert told.count("log.sinks.changing failed, and the run goes on: TypeError(") == 1
    assert [record["step"] for record in records] == [3, 3], "a sink changes a record for itself"
    for name in ("metrics.jsonl", "nonfinite.jsonl"):
        (line,) = (tmp_path / name).read_text().splitlines()
        assert json.loads(line)["step"] == 3


def test_training_tells_a_sink_that_it_saves(tmp_path: Path) -> None:
    assert main(flags(furnish(tmp_path), "saves", f"--log.sinks.mine.type={__name__}:Recorder", steps=4)) == 0
    told = [call[1] for call in Recorder.made.calls if isinstance(call, tuple) and call[0] == "status"]
    assert told == ["saving", ""] * 2  # --checkpoint.every 2


class Taking(Failing):
    """Takes the run's folder away at the line of step 3, and brings it back at that of step 6, or never."""

    brings_back = True

    def __init__(self, settings: SinkSettings, run: RunInfo) -> None:
        self.folder, self.aside = run.folder, run.folder.with_name("aside")

    def write(self, record: Any) -> None:
        if "loss" in record and record["step"] == 3:
            self.folder.rename(self.aside)
        if "loss" in record and record["step"] == 6 and self.brings_back:
            self.aside.rename(self.folder)


class Copying(Taking):
    """Brings back a copy."""

    def write(self, record: Any) -> None:
        if "loss" in record and record["step"] == 6:
            shutil.copytree(self.aside, copy := self.folder.with_name("copy"))
            shutil.rmtree(self.aside)
            copy.rename(self.aside)
        super().write(record)


def evaluated(place: Path, name: str, *more: str) -> list[str]:
    """The command line of a run with TensorBoard, evaluated every 2 steps."""
    own = ["--log.tensorboard", "true", "--val-data", f"{place}/val/*.tar", "--evals.val.every", "2"]
    return flags(place, name, *own, *more)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an undisturbed run, `still`."""
    place = furnish(tmp_path_factory.mktemp("place"))
    assert main(evaluated(place, "still")) == 0
    return place


@pytest.mark.parametrize("kind", ["Taking", "Copying"])
def test_a_run_folder_that_is_away_for_some_steps_loses_nothing(
    kind: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert main(evaluated(place, kind, f"--log.sinks.mine.type={__name__}:{kind}")) == 0
    said = capsys.readouterr().err
    assert said.count("metrics.jsonl cannot be written (No such file or directory): its lines wait in memory") == 1
    assert "failed at times, and may be incomplete: pictures (" in said.splitlines()[-1]
    folder = place / "runs" / kind
    for key in ("loss", "eval", "start", "end"):
        other = [{**line, key: ""} if key in ("start", "end") else line for line in lines(place, "still", key)]
        own_lines = [{**line, key: ""} if key in ("start", "end") else line for line in lines(place, kind, key)]
        assert own_lines == other, key
    assert same_weights(weights(place, kind, 8), weights(place, "still", 8))
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 9))
    assert [event.step for event in events.Scalars("eval/val/image_to_text_R@1")] == [2, 4, 6, 8]
    assert (folder / "evaluations.csv").read_text().count(",image_to_text_R@1,") == 4
    assert "step 8/8" in (folder / "out.log").read_text()
    assert '<div class="status done">' in (folder / "report.html").read_text()


def test_a_run_folder_that_stays_away_is_made_anew_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Taking, "brings_back", False)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    place = furnish(tmp_path)
    assert main(flags(place, "gone", f"--log.sinks.mine.type={__name__}:Taking")) == 0
    assert weights(place, "gone", 8) and "last checkpoint" not in capsys.readouterr().err
    assert [line["step"] for line in lines(place, "gone")] == [4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("Unbuildable", "no login"),
        ("NoSink", ":NoSink has no write, show, status, close: derive it"),
    ],
)
def test_a_sink_that_cannot_be_built_ends_the_start(tmp_path: Path, kind: str, said: str) -> None:
    with pytest.raises(SettingsError, match=rf"log\.sinks\.{kind.lower()}: .*{said}"):
        outputs(tmp_path, kind)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--log.sinks.mine.type=aim", "type 'aim' is not one of trackio, wandb"),
        ("--log.sinks.mine.type=no_such_module:Sink", "no module 'no_such_module'"),
        ("--log.sinks.metrics.type=wandb", "'metrics' is the name of a built-in sink"),
    ],
)
def test_wrong_sinks_are_errors(flag: str, said: str) -> None:
    with pytest.raises(SettingsError, match=r"log\.sinks") as caught:
        load([flag])
    assert said in str(caught.value)

"""Sinks of `log.sinks`: how they are named, built and called, and what happens when they fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clipstream.cli.verbs.train import main
from clipstream.config.settings import load
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.evals.context import Table
from clipstream.report.outputs import Outputs
from clipstream.report.settings import SinkSettings
from clipstream.report.sinks import Record, RunInfo, Sink
from tests.support.runs import flags, furnish


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
    sink = ("--workers", "0", f"--log.sinks.mine.type={__name__}:Recorder")
    assert main(flags(furnish(tmp_path), "saves", *sink, steps=4)) == 0
    told = [call[1] for call in Recorder.made.calls if isinstance(call, tuple) and call[0] == "status"]
    assert told == ["saving", ""] * 2  # --checkpoint.every 2


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

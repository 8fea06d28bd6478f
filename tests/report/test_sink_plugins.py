"""Sinks of `log.sinks`: how they are named, built and called, and what happens when they fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clipstream import testing
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
    """Keeps what it is called with."""

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
    """Raises whenever it gets a record."""

    def __init__(self, settings: SinkSettings, run: RunInfo) -> None:
        pass

    def write(self, record: Record) -> None:
        raise ConnectionError("no network")


class Unbuildable(Sink):
    """Raises when it is constructed."""

    def __init__(self, settings: SinkSettings, run: RunInfo) -> None:
        raise RuntimeError("no login")


class Changing(Sink):
    """Changes what it is given."""

    def __init__(self, settings: SinkSettings, run: RunInfo) -> None:
        pass

    def write(self, record: Any) -> None:
        record["step"] = -1


def outputs(folder: Path, *flags: str) -> Outputs:
    log = load(["--log.tensorboard=false", "--log.report=false", "--log.progress=none", *flags]).log
    return Outputs(log, World(), RunInfo(folder, total_steps=20))


def test_a_sink_gets_records_pictures_and_status(tmp_path: Path) -> None:
    out = outputs(tmp_path, f"--log.sinks.mine.type={__name__}:Recorder")
    record = {"step": 10, "loss": 1.5}
    out.write(record)
    table = Table("worst", ("class",), (("cat",),))
    out.show(10, "val", [], [table])
    out.status("saving")
    out.close()
    assert Recorder.made.calls == [record, ("show", 10, "val", [table]), ("status", "saving"), "close"]
    assert Recorder.made.run.folder == tmp_path and Recorder.made.run.total_steps == 20


def test_training_tells_a_sink_that_it_saves(tmp_path: Path) -> None:
    assert main(flags(furnish(tmp_path), "saves", f"--log.sinks.mine.type={__name__}:Recorder", steps=4)) == 0
    told = [call[1] for call in Recorder.made.calls if isinstance(call, tuple) and call[0] == "status"]
    assert told == ["saving", ""] * 2  # --checkpoint.every 2


def test_a_sink_that_fails_is_reported_once_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = outputs(tmp_path, f"--log.sinks.mine.type={__name__}:Failing")
    for step in (10, 20):
        out.write({"step": step, "loss": 1.5})
    out.close()
    told = capsys.readouterr().err
    assert told.count("warning: log.sinks.mine failed, and the run goes on: ConnectionError('no network')") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_sink_that_cannot_be_built_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"log\.sinks\.mine: .*no login"):
        outputs(tmp_path, f"--log.sinks.mine.type={__name__}:Unbuildable")


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


def test_a_flag_adds_a_sink() -> None:
    log = load([f"--report-to=tensorboard,{__name__}:Recorder"]).log
    assert log.tensorboard and log.sinks == {"Recorder": SinkSettings(type=f"{__name__}:Recorder")}
    assert not load([f"--report-to={__name__}:Recorder"]).log.tensorboard


def test_the_check_names_what_is_wrong() -> None:
    testing.check_sink(Recorder, SinkSettings(type=f"{__name__}:Recorder"))
    for sink, said in (
        (Failing, "`write` raised ConnectionError"),
        (Unbuildable, "its construction raised RuntimeError"),
        (Changing, "`write` changed the record"),
        (lambda settings, run: object(), "it has no method `write`"),
    ):
        with pytest.raises(AssertionError, match=said):
            testing.check_sink(sink, SinkSettings(type=f"{__name__}:Recorder"))


class NoShow(Changing):
    """Cannot take images."""

    def show(self) -> None:  # type: ignore[override]
        raise AssertionError


def test_a_sink_that_cannot_show_is_named_with_its_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = outputs(tmp_path, f"--log.sinks.mine.type={__name__}:NoShow")
    for step in (1, 2):
        out.show(step, "val", [], [Table("t", ("a",), ())])
    out.close()
    said = capfd.readouterr().err
    assert said.count("log.sinks.mine failed, and the run goes on: TypeError(") == 1, said


def test_a_sink_that_changes_a_record_changes_it_for_itself(tmp_path: Path) -> None:
    records = [{"step": 3, "loss": 1.5}, {"step": 3, "nonfinite": {"loss": "nan", "grad_norm": "nan", "keys": ["a"]}}]
    out = outputs(
        tmp_path,
        f"--log.sinks.mine.type={__name__}:Changing",
        f"--log.sinks.more.type={__name__}:Recorder",
    )
    for record in records:
        out.write(record)
    out.close()
    assert [record["step"] for record in records] == [3, 3] and Recorder.made.calls == [*records, "close"]
    for name in ("metrics.jsonl", "nonfinite.jsonl"):
        (line,) = (tmp_path / name).read_text().splitlines()
        assert json.loads(line)["step"] == 3


class NoWrite:
    """Has no method of a sink."""

    def __init__(self, settings: SinkSettings, run: RunInfo) -> None:
        pass


def test_what_is_no_sink_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"log\.sinks\.mine: .*:NoWrite has no write, show, status, close: derive it"
    ):
        outputs(tmp_path, f"--log.sinks.mine.type={__name__}:NoWrite")

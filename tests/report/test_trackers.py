"""The real packages wandb (offline) and trackio (in a local folder), in whole runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clipstream.config.settings import load
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.report.outputs import Outputs
from clipstream.report.sinks import RunInfo
from tests.support.forks import Fork
from tests.support.runs import flags, furnish


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_missing_package_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    log = load([f"--log.sinks.{package}.type={package}", "--log.report=false"]).log
    with pytest.raises(SettingsError, match=rf"log.sinks.{package}: .*pip install 'clipstream\[{package}\]'"):
        Outputs(log, World(), RunInfo(tmp_path, 1))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 2 steps, resumed to 4, with all trackers; Trackio's own folder is beside it."""
    pytest.importorskip("wandb")
    pytest.importorskip("trackio")
    place = furnish(tmp_path_factory.mktemp("trackers"))
    more = [
        "--val-data", f"{place}/val/{{00000..00001}}.tar", "--evals.val.every", "2",
        "--log.sinks.wandb", "{type: wandb, project: mine, notes: some notes}",
        "--log.sinks.trackio", "{type: trackio, project: mine}",
    ]  # fmt: skip
    for steps, resume in ((2, []), (4, ["--resume", "latest"])):
        argv = ["-m", "clipstream.train", *flags(place, "tracked", *more, *resume, steps=steps)]
        process = Fork(argv, env=os.environ | {"TRACKIO_DIR": str(place / "trackio"), "WANDB_MODE": "offline"})
        _, error = process.communicate()
        assert process.returncode == 0, error
        assert b"log.sinks" not in error and b"skipped metric" not in error, error  # no sink failed
    return place / "runs" / "tracked"


def losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def test_wandb_has_a_resumed_run_under_one_id(run: Path) -> None:
    made = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert [path.stem.removeprefix("run-") for path in made] == [(run / "wandb_id").read_text()] * 2  # one a process
    stored = [_wandb_records(path) for path in made]
    assert [part["config"]["train"]["steps"] for part in stored] == [2, 4]
    history = [row for part in stored for row in part["history"]]
    assert [row["train/loss"] for row in history if "train/loss" in row] == losses(run)
    assert sum("eval/val/image_to_text_R@1" in row for row in history) == 2
    assert any(key.startswith("pictures/") for row in history for key in row)


def _wandb_records(path: Path) -> dict[str, Any]:
    """The history and the settings in a file of wandb's offline mode: protocol buffers in LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    config, history, whole, data, place = {}, [], b"", path.read_bytes(), 7
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:  # the end of a block, filled with zeros
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind not in (1, 4):  # a record's last part, or all of it
            continue
        record, whole = wandb_internal_pb2.Record.FromString(whole), b""
        if record.HasField("run"):
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif record.HasField("history"):
            keys = ((item.key or "/".join(item.nested_key), item.value_json) for item in record.history.item)
            history.append({key: json.loads(value) for key, value in keys})
    return {"config": config, "history": history}


def test_trackio_has_a_resumed_run_under_one_name(run: Path) -> None:
    code = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as S; "
        "print(json.dumps([S.get_runs('mine'), S.get_run_config('mine', 'tracked'), S.get_logs('mine', 'tracked')]))"
    )
    read = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TRACKIO_DIR": str(run.parents[1] / "trackio")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert read.returncode == 0, read.stderr
    runs, config, logs = json.loads(read.stdout.splitlines()[-1])
    assert runs == ["tracked"]
    assert config["train.steps"] == 4
    assert [log["train/loss"] for log in logs if "train/loss" in log] == losses(run)
    shown = [(key, log[key]["_value"]) for log in logs for key in log if key.startswith("pictures/")]
    assert {key for key, _ in shown} >= {"pictures/train"}
    for _, table in shown:
        assert table and all(row["text"] for row in table)
        assert all((run.parents[1] / "trackio" / "media" / row["picture"]["file_path"]).is_file() for row in table)

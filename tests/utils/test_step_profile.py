"""--profile: which steps, the trace, the table, and what goes wrong."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from clipstream.cli.verbs.train import main
from clipstream.report.html_report import read_run, render
from clipstream.report.settings import LogSettings
from clipstream.utils.timing import StepProfiler, StepTimer, dearest, time_part
from tests.support.ranks import end_ranks
from tests.support.runs import flags, lines, train_on


@pytest.mark.parametrize(
    ("given", "done", "total", "steps"),
    [
        ("3", 0, 100, [6, 7, 8]),
        (3, 0, 100, [6, 7, 8]),  # as YAML has it
        ("3", 20, 100, [26, 27, 28]),  # a resumed run warms up again
        ("3", 0, 5, [3, 4, 5]),
        ("3", 98, 100, [99, 100]),
        ("10-12", 0, 100, [10, 11, 12]),
        ("10-12", 11, 100, [12]),
        ("10-12", 12, 100, []),
        (None, 0, 100, []),
    ],
)
def test_the_steps(given: str | int | None, done: int, total: int, steps: list[int]) -> None:
    assert list(LogSettings.model_validate({"profile": given}).steps_to_profile(done, total)) == steps


@pytest.mark.parametrize("text", ["0", "5-2", "0-3", "three", "1:3", "-3", "1-", " ", "101", "1-101", "²", True])
def test_what_names_no_steps_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"expected a number of steps|is limited to"):
        LogSettings.model_validate({"profile": text})


def profiled(folder: Path, steps: range, total: int) -> dict[str, object] | None:
    """The record of a profile of some steps, each with a matrix product within the range of the loss."""
    profiler, timer = StepProfiler(steps, folder, "cpu", records=True), StepTimer("cpu")
    record = None
    with timer.active():
        for step in range(1, total + 1):
            timer.ranges = profiler.begin_step(step)
            with time_part("loss"):
                torch.mm(torch.ones(64, 64), torch.ones(64, 64))
            timer.end_step()
            if profiler.end_step(step):
                timer.ranges = False
                record = profiler.finish()
    return record


@pytest.mark.parametrize("steps", [range(1, 3), range(3, 5)], ids=["without warm-up", "with warm-up"])
def test_a_profile_has_its_steps_alone(tmp_path: Path, steps: range) -> None:
    record = profiled(tmp_path, steps, 6)
    assert record is not None and record["steps"] == [steps[0], steps[-1]]
    operations = {one["name"]: one for one in record["operations"]}  # type: ignore[attr-defined]
    assert operations["aten::mm"]["calls"] == 2 and operations["aten::mm"]["self_cpu"] > 0
    assert not any("clipstream" in name or "ProfilerStep" in name for name in operations)
    trace = json.loads(gzip.decompress((tmp_path / str(record["trace"])).read_bytes()))
    names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    assert names.count("clipstream::loss") == 2
    text = (tmp_path / f"profile/steps_{steps[0]}-{steps[-1]}.txt").read_text()
    assert "aten::mm" in text and "Self CPU" in text


def test_a_profile_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile").write_text("a file")
    with caplog.at_level(logging.WARNING, logger="clipstream"):
        record = profiled(tmp_path, range(2, 3), 3)
    assert record is not None and "trace" not in record and record["operations"]
    assert "the profile could not be written" in caplog.text


def test_operations_are_sorted_by_self_time_on_the_device() -> None:
    def event(key: str, device: float, cpu: float) -> SimpleNamespace:
        return SimpleNamespace(
            key=key, count=1, self_device_time_total=device, device_time_total=2e6, self_cpu_time_total=cpu,
            cpu_time_total=cpu,
        )  # fmt: skip

    found = dearest([event("a", 1e6, 9e6), event("b", 2e6, 1e6), event("clipstream::loss", 8e6, 1e6)])
    assert [(one.name, one.self_device, one.device, one.self_cpu) for one in found] == [("b", 2, 2, 1), ("a", 1, 2, 9)]
    assert [one.name for one in dearest([event("a", 0, 1e6), event("b", 0, 2e6)])] == ["b", "a"]


def test_a_run_on_two_ranks_is_profiled_and_reported(place: Path) -> None:
    more = ("--profile", "2-3", "--log.every", "2")
    assert [end.code for end in end_ranks(2, train_on, flags(place, "two", *more, steps=4))] == [0, 0]
    folder = place / "runs" / "two"
    (line,) = lines(place, "two", "profile")
    assert line["step"] == 3 and line["profile"]["steps"] == [2, 3]
    trace = json.loads(gzip.decompress((folder / line["profile"]["trace"]).read_bytes()))
    names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    parts = ("data", "copy", "image_forward", "text_forward", "loss", "backward", "communication", "optimizer")
    assert {part: names.count(f"clipstream::{part}") >= 2 for part in parts} == dict.fromkeys(parts, True)
    training = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    times = [record["time"] for record in training if "loss" in record]
    assert all(record["tflops"] > 0 for record in training if "loss" in record)
    assert [set(parts) <= set(time) for time in times] == [True, True]
    page = render([read_run(folder)]).replace("<wbr>", "")
    dearest_one = line["profile"]["operations"][0]["name"]
    for said in ("Where the step's time goes", "image forward", 'class="part communication"', dearest_one,
                 "The dearest operations of steps 2 to 3", "profile/steps_2-3.json.gz", "busy processor"):  # fmt: skip
        assert said in page, said


def test_a_profile_beyond_the_end_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags(place, "short", "--profile", "10-14", steps=12)) == 2
    assert "--profile: log.profile: step 14 is never reached: the run has 12" in capsys.readouterr().err

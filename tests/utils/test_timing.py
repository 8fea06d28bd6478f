"""What a step spends its time on, over many ranks, and at what cost; --profile: its steps, trace, table and errors."""

from __future__ import annotations

import gzip
import itertools
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from clipstream.cli.verbs.train import main
from clipstream.distributed.world import World
from clipstream.report.html_report import read_run, render
from clipstream.report.settings import LogSettings
from clipstream.training import trainer
from clipstream.training.settings import TrainSettings
from clipstream.training.step import TrainStep
from clipstream.utils import timing
from clipstream.utils.timing import (
    COMMUNICATION,
    COPY,
    DATA,
    GIB,
    LOSS,
    OTHER,
    StepProfiler,
    StepTimer,
    Usage,
    begin,
    dearest,
    over_ranks,
    time_part,
)
from tests.support import trainer_runs
from tests.support.forks import wait_until
from tests.support.model_files import build, write
from tests.support.ranks import end_ranks, run_ranks
from tests.support.runs import flags, lines, train_on
from tests.support.steps import LOSSES, make_batch, sgd
from tests.support.trainer_runs import Run


class DeviceMark:
    """An event of a device whose queue the test runs."""

    now = 0.0  # s, of the device
    done: float | None = None  # s up to which its queue is done; None for everything

    def record(self, stream: Any) -> None:
        self.at = DeviceMark.now

    def query(self) -> bool:
        return DeviceMark.done is None or self.at <= DeviceMark.done

    def elapsed_time(self, end: DeviceMark) -> float:
        assert end.query(), "an event that is not complete is not read"
        return 1e3 * (end.at - self.at)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> type[DeviceMark]:
    monkeypatch.setattr(DeviceMark, "now", 0.0)
    monkeypatch.setattr(DeviceMark, "done", None)
    return DeviceMark


def take_step(device: type[DeviceMark], timer: StepTimer, seconds: float) -> None:
    """A step with data, copy and, within the loss, another part."""
    for name in (DATA, COPY):
        begin(name)
        device.now += seconds
    with time_part(LOSS):
        device.now += seconds
        with time_part("forward"):
            device.now += 10 * seconds
        device.now += seconds
    timer.end_step()


def test_parts_of_a_step_follow_each_other(device: type[DeviceMark]) -> None:
    timer = StepTimer("cpu")
    timer._make_mark = device
    with timer.active():
        take_step(device, timer, 1.0)
        device.now += 0.5  # training lines
        take_step(device, timer, 1.0)
        with timer.pause():
            device.now += 100
            begin(DATA)  # of an evaluation
            device.now += 100
    parts, steps = timer.take()
    assert steps == 2
    assert parts == {DATA: 2.0, COPY: 2.0, LOSS: 4.0, "forward": 20.0, OTHER: 0.5}
    assert timer.take() == ({}, 0)
    begin(DATA)  # no timer is active


def test_steps_that_the_device_has_not_finished_wait_for_the_next_line(device: type[DeviceMark]) -> None:
    timer = StepTimer("cpu")
    timer._make_mark = device
    device.done = -1.0
    with timer.active():
        take_step(device, timer, 1.0)
        assert timer.take() == ({}, 0)
        device.done = device.now  # the first step
        take_step(device, timer, 3.0)
        assert timer.take() == ({OTHER: 0.0, DATA: 1.0, COPY: 1.0, LOSS: 2.0, "forward": 10.0}, 1)
        device.done = None
        take_step(device, timer, 3.0)
        parts, steps = timer.take()
        assert steps == 2 and parts[DATA] == 6.0 and parts["forward"] == 60.0


def test_marks_are_read_and_used_again_without_training_lines(device: type[DeviceMark]) -> None:
    timer = StepTimer("cpu")
    timer._make_mark = device
    with timer.active():
        for _ in range(5 * timing.UNREAD):
            take_step(device, timer, 1.0)
    assert len(timer._marks) + len(timer._free) < 10 * timing.UNREAD
    assert timer.take()[1] == 5 * timing.UNREAD


def in_turn(world: World, folder: Path) -> list[dict[str, Any]]:
    """The training lines of a run on this rank's part of the data; rank 1 is late by 0.1 s after rank 0 waits."""
    run, steps, begin = Run(world, 6), itertools.count(), StepTimer.begin

    def begin_and_tell(timer: StepTimer, name: str | None) -> None:
        begin(timer, name)
        if name == COMMUNICATION:
            (folder / str(next(steps))).touch()

    def be_late(*_: Any) -> None:
        wait_until((folder / str(next(steps))).exists)
        time.sleep(0.1)

    if world.rank == 1:
        run.model.clip.visual.register_full_backward_hook(be_late)
        return run.go().lines
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepTimer, "begin", begin_and_tell)
        return run.go().lines


def test_training_lines_have_the_parts_and_their_sum_is_the_time_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only goes on while a batch is made, by 10 ms, and when it is read, by 0.1 ms."""
    now = 0.0

    def go_on(seconds: float = 1e-4) -> float:
        nonlocal now
        now += seconds
        return now

    for module in (timing, trainer, trainer_runs):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=go_on, sleep=go_on, process_time=go_on))
    lines = [line for line in Run(World(), 6).go().lines if "loss" in line]
    assert len(lines) == 2
    for line in lines:
        assert list(line["time"]) == ["data", "copy", "forward", "loss", "backward", "optimizer", "other"]
        assert line["time"]["data"] > 0.01, "every batch takes 10 ms"
        assert 0.9 < sum(line["time"].values()) / (10 / line["samples_per_s"]) < 1.0001
        assert line["cpu"]["cores"] > 0
    of_ranks = [{"cores": 1.0, "memory_gib": 2.0}, {"cores": 3.0, "memory_gib": 1.0}]
    assert over_ranks(of_ranks) == {"cores": 2.0, "memory_gib": 2.0}


def test_a_rank_that_waits_for_the_gradients_of_another_counts_communication(tmp_path: Path) -> None:
    first, second = run_ranks(2, in_turn, tmp_path)
    assert not second
    last = [line for line in first if "loss" in line][-1]
    # Rank 0 waits for 0.1 s in each step, rank 1, which is late, need not: half of it is the mean.
    assert last["time"]["communication"] > 0.045
    assert last["time"]["backward"] > 0.045, "what makes rank 1 late"


@pytest.mark.parametrize("chunks", [{}, {"micro_batch_size": 2}], ids=["at once", "gradient caching"])
@pytest.mark.parametrize("locked", [False, True])
def test_both_towers_are_told_apart(tmp_path: Any, chunks: dict[str, Any], locked: bool) -> None:
    towers = build(write(tmp_path), loss_type="clip", text_buckets="auto").train()
    if locked:
        towers.lock_image()
    step = TrainStep(towers, LOSSES["clip"], sgd(towers), World(), TrainSettings(precision="fp32", **chunks))
    for tower, key in ((towers.clip.visual, "image_forward"), (towers.clip.transformer, "text_forward")):
        tower.register_forward_hook(lambda *_, key=key: time.sleep({"image_forward": 0.02, "text_forward": 0.01}[key]))
    batch = make_batch(0)
    pixels = torch.zeros(len(batch), 3, *towers.image.size, dtype=torch.uint8)
    ids = towers.open_clip_tokenizer()(["a b"] * len(batch)).int()
    batch = type(batch)(pixels, ids, batch.weights, batch.keys, batch.sources, 0, len(batch))
    timer = StepTimer("cpu")
    with timer.active():
        step(batch, lr=1e-3)
        timer.end_step()
    found = timer.take()[0]
    passes = 9 if chunks else 1
    image_passes = 5 if chunks and locked else passes  # a frozen tower runs once
    assert found["image_forward"] > 0.02 * image_passes
    assert found["text_forward"] > 0.01 * passes
    parts = {"copy", "image_forward", "text_forward", "forward", "loss", "backward", "optimizer", "other"}
    assert set(found) == parts, "one rank has no communication"


def test_a_compiled_model_is_one_part() -> None:
    class Marked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            begin("image_forward")
            return x + 1

    model, timer = Marked(), StepTimer("cpu")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with timer.active():
        with time_part("forward"):
            compiled(torch.ones(2))
        timer.end_step()
        assert set(timer.take()[0]) == {"forward", "other"}
        with time_part("forward"):
            model(torch.ones(2))
        timer.end_step()
        assert "image_forward" in timer.take()[0]


def test_measuring_costs_less_than_a_hundredth_of_a_step() -> None:
    """A step of 0.3 s in 8 micro-batches has 60 marks; a training line, every 10 steps, reads them.

    Calls and returns are counted, as they take about a microsecond each: a clock would tell of the processor.
    """
    timer, usage, counter = StepTimer("cpu"), Usage("cpu"), itertools.count()
    former = sys.getprofile()
    with timer.active():
        sys.setprofile(lambda *_: next(counter) and None)
        try:
            for _ in range(10):
                for _ in range(15):
                    begin(DATA)
                    with time_part(LOSS):
                        begin(COPY)
                timer.end_step()
            over_ranks([usage.read()])
            timer.take()
        finally:
            sys.setprofile(former)
    assert next(counter) / 10 < 3000


WORK = """
import time
print(flush=True)
input()
end = time.process_time() + 0.2
while time.process_time() < end:
    pass
print(flush=True)
input()
"""


def test_data_workers_count() -> None:
    with subprocess.Popen([sys.executable, "-c", WORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None and worker.stdin is not None
        worker.stdout.readline()
        usages = {"with": Usage("cpu", lambda: [worker.pid, 2**30]), "without": Usage("cpu")}  # no such process
        for usage in usages.values():
            usage.read()
        worker.stdin.write(b"\n")
        worker.stdin.flush()
        worker.stdout.readline()
        found = {name: usage.read() for name, usage in usages.items()}
        worker.stdin.close()
    assert found["with"]["cores"] > found["without"]["cores"] >= 0
    assert 0 < found["with"]["memory_gib"] <= found["with"]["memory_peak_gib"]
    assert 0 < found["with"]["workers_memory_gib"] < found["with"]["memory_gib"]
    assert "workers_memory_gib" not in found["without"]


def test_what_a_gpu_does_not_tell_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def absent(device: Any) -> int:
        asked.append(device)
        raise ModuleNotFoundError("pynvml")

    stats = {"allocated_bytes.all.current": 1, "reserved_bytes.all.current": 4, "allocated_bytes.all.peak": 3}
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 93)
    monkeypatch.setattr(torch.cuda, "power_draw", absent)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {key: n * GIB for key, n in stats.items()})
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    usage = Usage("cuda:0")
    memory = {"memory_allocated_gib": 1.0, "memory_reserved_gib": 4.0, "memory_peak_gib": 3.0}
    assert usage.kind == "gpu"
    assert usage.read() == usage.read() == {"utilization": 0.93, **memory}
    assert len(asked) == 1, "what failed is not asked for again"


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
    for said in ("Where the step's time goes", "image forward", "</i>communication</td>", dearest_one,
                 "The dearest operations of steps 2 to 3", "profile/steps_2-3.json.gz", "busy processor"):  # fmt: skip
        assert said in page, said


def test_a_profile_beyond_the_end_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags(place, "short", "--profile", "10-14", steps=12)) == 2
    assert "--profile: log.profile: step 14 is never reached: the run has 12" in capsys.readouterr().err

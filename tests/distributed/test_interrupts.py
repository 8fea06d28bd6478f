"""Signals and failures while waiting for data: every rank saves its last step and exits with the right code."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clipstream.checkpoint.store import best_of
from clipstream.data.decode.captions import RawSample
from clipstream.data.loader.stage_timing import SLOWEST, Stopwatch
from clipstream.data.settings import DataSettings
from clipstream.errors import DataError
from clipstream.utils import plugins
from tests.support.clocks import START, Clock
from tests.support.forks import ROOT, Fork, wait_until
from tests.support.loaders import data, loader
from tests.support.pictures import make_shards
from tests.support.ranks import TIMEOUT, reserved_port
from tests.support.runs import flags, weights

# Once the file named by HANG is there, the next sample of rank BAD_RANK sleeps, and catches what wakes it; FAIL raises.
OWN = '''
import os, time

def _asked(name):
    return os.path.exists(os.environ.get(name, "")) and os.environ.get("RANK", "0") == os.environ["BAD_RANK"]

def change(sample):
    if _asked("FAIL"):
        raise ZeroDivisionError("of a user")
    while _asked("HANG"):
        open(os.environ["HANG"] + "-on", "w").close()
        try:
            time.sleep(60)
        except Exception:
            pass
    return sample

class Slow:
    """An evaluator that does not end while ENDLESS is set."""

    def __init__(self, settings):
        self.settings = settings

    def __call__(self, context):
        from clipstream.evals.settings import source_of
        for batch in context.batches(source_of(self.settings), 4):
            pass
        while os.environ.get("ENDLESS"):
            for batch in context.batches(source_of(self.settings), 4):
                open(os.environ["EVALUATING"], "w").close()
        yield "figure", 0.0

class Tokens:
    """A tokenizer that takes long to make."""

    def __init__(self, settings):
        open(os.environ["SETTING_UP"], "w").close()
        time.sleep(600)
'''


@pytest.fixture(scope="module", autouse=True)
def _own_parts(place: Path) -> None:
    (place / "own_parts.py").write_text(OWN)


class Running:
    """Training processes, one a rank."""

    def __init__(self, place: Path, name: str, ranks: int, *more: str, **env: str) -> None:
        self.folder = place / "runs" / name
        arguments = flags(place, name, "--checkpoint.every", "1000", *more, steps=100_000)
        shared = {**os.environ, "PYTHONPATH": f"{place}{os.pathsep}{ROOT}", "BAD_RANK": str(ranks - 1), **env}
        self._port = contextlib.ExitStack()
        where: list[dict[str, str]] = [{}]
        if ranks > 1:
            port = str(self._port.enter_context(reserved_port()))
            common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
            where = [
                {**common, "MASTER_PORT": port, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)
            ]
        self.processes = [
            Fork(["-m", "clipstream.train", *arguments], env={**shared, **variables}, merged=True)
            for variables in where
        ]

    def wait_for_step(self, step: int) -> None:
        """Until so many steps are written."""
        self.wait_until(lambda: any(line.get("step", 0) >= step for line in self.lines()))

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Until it is so, or the run ended."""
        wait_until(done, self.processes[0])

    def hang(self, file: Path) -> None:
        """Let `OWN` hang, and give the run the time to use up the batches that it has."""
        file.touch()
        self.wait_until(Path(f"{file}-on").exists)
        time.sleep(0.5)

    def lines(self) -> list[dict[str, object]]:
        """Of metrics.jsonl."""
        path = self.folder / "metrics.jsonl"
        return (
            [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
        )

    def end(self) -> tuple[list[int], str]:
        """The exit code of each rank, and what all of them wrote."""
        output = "".join(process.communicate()[0].decode() for process in self.processes)
        return [process.wait() for process in self.processes], output

    def last(self) -> int:
        """The last step of which a line was written."""
        return max(int(str(line["step"])) for line in self.lines() if "loss" in line)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        """End everything that was started."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._port.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_signal_while_data_are_waited_for_saves_and_ends(place: Path, tmp_path: Path, workers: int) -> None:
    hang = tmp_path / "hang"
    run = Running(
        place, f"signal{workers}", 1, "--data.sources.train.transform", "own_parts:change", "--workers", str(workers),
        HANG=str(hang),
    )  # fmt: skip
    with run:
        run.wait_for_step(3)
        run.hang(hang)
        run.processes[0].send_signal(signal.SIGTERM)
        code, output = run.end()
    assert code == [75], output
    assert "SIGTERM: saving the last completed step" in output
    assert f"step {run.last()} is saved" in output and weights(place, f"signal{workers}", run.last())


def test_a_rank_that_is_signalled_ends_another_that_waits_for_data(place: Path, tmp_path: Path) -> None:
    hang = tmp_path / "hang"
    with Running(place, "signal2", 2, "--data.sources.train.transform", "own_parts:change", HANG=str(hang)) as run:
        run.wait_for_step(3)
        run.hang(hang)  # rank 1, and rank 0 waits for it in a collective
        run.processes[0].send_signal(signal.SIGTERM)
        code, output = run.end()
    assert code == [75, 75], output
    assert output.count("SIGTERM: saving the last completed step") == 1
    assert weights(place, "signal2", run.last())


def test_a_failure_of_the_data_saves_the_last_step(place: Path, tmp_path: Path) -> None:
    fail, name, ranks = tmp_path / "fail", "failure", 2
    more = ("--data.sources.train.transform", "own_parts:change", "--data.max-sample-failures", "0.01")
    with Running(place, name, ranks, *more, FAIL=str(fail)) as run:
        run.wait_for_step(3)
        fail.touch()
        code, output = run.end()
    assert code == [3] * ranks, output
    assert f"step {run.last()} is saved" in output and weights(place, name, run.last())
    assert f"error: rank {ranks - 1}: " in output


def test_an_evaluation_that_a_signal_breaks_off_is_made_up_after_the_resume(place: Path, tmp_path: Path) -> None:
    mark, shards = tmp_path / "evaluating", f"{place}/val/{{00000..00001}}.tar"
    more = [
        "--evals.fast.type", "retrieval", "--evals.fast.every", "2", "--evals.fast.data.shards", shards,
        "--evals.slow.type", "own_parts:Slow", "--evals.slow.every", "2", "--evals.slow.data.shards", shards,
        "--checkpoint.keep-best", "fast/image_to_text_R@1",
    ]  # fmt: skip
    with Running(place, "evaluation", 1, *more, EVALUATING=str(mark), ENDLESS="1") as run:
        run.wait_until(mark.exists)
        run.processes[0].send_signal(signal.SIGINT)
        code, output = run.end()
    assert code == [75], output
    assert "step 2 is saved" in output and weights(place, "evaluation", 2)
    assert [line["eval"] for line in run.lines() if "eval" in line] == ["fast"]
    with Running(place, "evaluation", 1, *more, "--resume", "latest", "--steps", "3") as again:
        code, output = again.end()
    assert code == [0], output
    evaluated = [(line["step"], line["eval"]) for line in again.lines() if "eval" in line]
    assert evaluated == [(2, "fast"), (2, "slow"), (3, "fast"), (3, "slow")]
    recalls = [line["image_to_text_R@1"] for line in again.lines() if line.get("eval") == "fast"]
    best = best_of(again.folder / "checkpoints")
    assert best is not None and best.value == max(recalls) and best.name == f"step_{2 + recalls.index(best.value):08d}"
    ends = [line["end"] for line in again.lines() if "end" in line]
    assert [end["status"] for end in ends] == ["stopped", "done"]  # type: ignore[index]
    figures = (again.folder / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in figures] == [2, 2, 3, 3]


def test_a_signal_before_the_first_step_ends_with_the_code_of_a_stop(place: Path, tmp_path: Path) -> None:
    mark = tmp_path / "setting-up"
    with Running(place, "setup", 1, "--tokenizer.type", "own_parts:Tokens", SETTING_UP=str(mark)) as run:
        run.wait_until(mark.exists)
        run.processes[0].send_signal(signal.SIGTERM)
        code, output = run.end()
    assert code == [75], output
    assert "before the first step" in output


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_trickles_is_a_stall(
    tmp_path: Path, commands: None, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shard,), trickles, clock = make_shards(tmp_path, [9]), tmp_path / "trickles", Clock(monkeypatch)
    slow = f"pipe:head -c 1024 {shard}; touch {trickles}; while sleep 0.05; do head -c 20 {shard}; done"

    def start_clock() -> None:
        wait_until(trickles.exists)
        clock.run()

    starting = threading.Thread(target=start_clock)
    starting.start()
    settings = data([slow], workers=workers, lanes=2, stall_timeout=2.0)
    with pytest.raises(DataError, match=r"--data\.stall-timeout") as caught, loader(settings) as stream:
        next(stream)
    starting.join()
    assert clock.now() - START > 2.0
    assert re.search(r"(worker \d \(pid \d+\)|this process): open pipe:head .*, for \d+ s", str(caught.value))


def test_the_help_names_the_minimum_rate() -> None:
    assert f"{SLOWEST >> 10} KiB/s" in str(DataSettings.model_fields["stall_timeout"].description)


def test_bytes_are_progress_at_a_minimum_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watch = Stopwatch()
    watch.begin("open", "a.tar")
    for second in range(1, 11):
        now = 1000.0 + second
        watch.touch(second * SLOWEST // 2)
    assert watch.doing()[1] == 10 and "bytes came" in watch.doing()[0]
    now += 1
    watch.touch(20 * SLOWEST)  # a burst makes up for it
    assert watch.doing()[1] == 0
    watch.touch(10)  # of another shard
    now += 1
    watch.touch(10 + SLOWEST)
    assert watch.doing()[1] == 0


def divide(sample: RawSample) -> RawSample:
    """A user's transform with a fault."""
    return {**sample, "share": 1 / len(sample["__key__"].strip("0123456789abcdef/"))}


def test_the_first_traceback_of_a_users_part_is_printed_and_each_drop_names_the_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "_printed", bytearray(1))
    sources = {"train": {"shards": make_shards(tmp_path, [9]), "transform": f"{__name__}:divide"}}
    with pytest.raises(DataError, match=r"transform_error"), loader(data([], lanes=1, sources=sources)) as stream:
        next(stream)
    said = capfd.readouterr().err
    line = inspect.getsourcelines(divide)[1] + 2
    assert said.count("Traceback (most recent call last)") == 1
    assert f'test_interrupts.py", line {line}, in divide' in said and "ZeroDivisionError: division by zero" in said
    lost = stream.health.take_dropped()
    assert all(f"at test_interrupts.py:{line}" in loss.detail for loss in lost) and lost


def test_a_process_that_ends_at_once_leaves_the_terminal_in_order() -> None:
    ours, theirs = os.openpty()
    code = "from clipstream.distributed.signals import EndProcess; EndProcess(7, 'ended by {}')(15, None)"
    done = subprocess.run([sys.executable, "-c", code], stderr=theirs, cwd=ROOT, timeout=TIMEOUT)
    os.close(theirs)
    assert (done.returncode, os.read(ours, 100)) == (7, b"\r\x1b[K\x1b[?25hended by SIGTERM\r\n")
    os.close(ours)

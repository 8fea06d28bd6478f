"""Signals and failures while waiting for data: every rank saves its last step and exits with the right code."""

from __future__ import annotations

import contextlib
import csv
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clipstream.checkpoint.store import best_of
from clipstream.data.decode.captions import RawSample
from clipstream.data.loader.stage_timing import SLOWEST, Stopwatch
from clipstream.data.settings import DataSettings
from clipstream.distributed.signals import StopSignals
from clipstream.errors import DataError
from clipstream.utils import plugins
from tests.support.clocks import START, Clock
from tests.support.forks import ROOT, Fork, wait_until
from tests.support.loaders import data, loader
from tests.support.pictures import make_shards
from tests.support.ranks import TIMEOUT, reserved_port
from tests.support.runs import flags, lines, start, wait_for_step, weights

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


@contextlib.contextmanager
def running(place: Path, name: str, ranks: int, *more: str, **env: str) -> Iterator[list[Fork]]:
    """Training processes, one a rank; all that they have started ends with the context."""
    argv = flags(place, name, "--workers", "1", "--checkpoint.every", "1000", *more, steps=100_000)
    own = {"PYTHONPATH": f"{place}{os.pathsep}{ROOT}", "BAD_RANK": str(ranks - 1), **env}
    with reserved_port() as port:
        processes = start(argv, ranks, port, merged=True, **own)
        try:
            yield processes
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def end(processes: list[Fork]) -> tuple[list[int], str]:
    """The exit code of each rank, and what all of them wrote."""
    output = "".join(process.communicate()[0].decode() for process in processes)
    return [process.wait() for process in processes], output


def check_saved(place: Path, name: str, output: str) -> None:
    """The last step of which a line was written is saved."""
    last = lines(place, name)[-1]["step"]
    assert f"step {last} is saved" in output and weights(place, name, last), output


CHANGES = ("--data.sources.train.transform", "own_parts:change")


@pytest.mark.parametrize(
    ("ranks", "workers", "number"), [(1, 0, signal.SIGHUP), (1, 1, signal.SIGTERM), (2, 1, signal.SIGHUP)]
)
def test_a_signal_while_data_are_waited_for_saves_and_ends_all_ranks(
    place: Path, tmp_path: Path, ranks: int, workers: int, number: signal.Signals
) -> None:
    hang, name = tmp_path / "hang", f"signal-{ranks}-{workers}"
    with running(place, name, ranks, *CHANGES, "--workers", str(workers), HANG=str(hang)) as processes:
        wait_for_step(place, name, 3, processes[0])
        hang.touch()  # of the last rank; the other one waits for it in a collective
        wait_until(Path(f"{hang}-on").exists, processes[0])
        time.sleep(0.5)  # the run uses up the batches that it has
        processes[0].send_signal(number)
        codes, output = end(processes)
    assert codes == [75] * ranks, output
    assert output.count(f"{number.name}: saving the last completed step") == 1
    check_saved(place, name, output)


@pytest.mark.parametrize("ignored", [True, False])
def test_a_hangup_that_was_ignored_stays_ignored(ignored: bool) -> None:
    """As nohup leaves it to the command that it starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            if not ignored:
                assert signals.name() == "SIGHUP"
        assert (signals.received is None) == ignored
        assert signal.getsignal(signal.SIGHUP) == (signal.SIG_IGN if ignored else signal.default_int_handler)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_failure_of_the_data_saves_the_last_step(place: Path, tmp_path: Path) -> None:
    fail, name = tmp_path / "fail", "failure"
    with running(place, name, 2, *CHANGES, "--data.max-sample-failures", "0.01", FAIL=str(fail)) as processes:
        wait_for_step(place, name, 3, processes[0])
        fail.touch()
        codes, output = end(processes)
    assert codes == [3, 3], output
    check_saved(place, name, output)
    assert "error: rank 1: " in output


def test_an_evaluation_that_a_signal_breaks_off_is_made_up_after_the_resume(place: Path, tmp_path: Path) -> None:
    mark, shards, folder = tmp_path / "evaluating", f"{place}/val/{{00000..00001}}.tar", place / "runs/evaluation"
    more = [
        "--evals.fast.type", "retrieval", "--evals.fast.every", "2", "--evals.fast.data.shards", shards,
        "--evals.slow.type", "own_parts:Slow", "--evals.slow.every", "2", "--evals.slow.data.shards", shards,
        "--checkpoint.keep-best", "fast/image_to_text_R@1",
    ]  # fmt: skip

    def evaluated() -> list[tuple[int, str]]:
        return [(line["step"], line["eval"]) for line in lines(place, "evaluation", "eval")]

    with running(place, "evaluation", 1, *more, EVALUATING=str(mark), ENDLESS="1") as processes:
        wait_until(mark.exists, processes[0])
        processes[0].send_signal(signal.SIGINT)
        codes, output = end(processes)
    assert codes == [75], output
    check_saved(place, "evaluation", output)
    assert evaluated() == [(2, "fast")]
    (stop,), before = lines(place, "evaluation", "end"), (folder / "out.log").read_text()
    assert "SIGINT" in stop["end"]["error"] and 'class="status stopped"' in (folder / "report.html").read_text()
    with running(place, "evaluation", 1, *more, "--resume", "latest", "--steps", "3") as processes:
        codes, output = end(processes)
    assert codes == [0], output
    assert evaluated() == [(2, "fast"), (2, "slow"), (3, "fast"), (3, "slow")]
    recalls = [line["image_to_text_R@1"] for line in lines(place, "evaluation", "image_to_text_R@1")]
    best = best_of(folder / "checkpoints")
    assert best is not None and best.value == max(recalls) and best.name == f"step_{2 + recalls.index(best.value):08d}"
    assert [line["end"]["status"] for line in lines(place, "evaluation", "end")] == ["stopped", "done"]
    assert [line["step"] for line in lines(place, "evaluation")] == [1, 2, 3]
    rows = csv.DictReader((folder / "evaluations.csv").open())
    assert sorted({(int(row["step"]), row["eval"]) for row in rows}) == evaluated()
    log = (folder / "out.log").read_text()
    assert log.startswith(before) and "step 3/3" in log[len(before) :]


def test_a_signal_before_the_first_step_ends_with_the_code_of_a_stop(place: Path, tmp_path: Path) -> None:
    mark = tmp_path / "setting-up"
    with running(place, "setup", 1, "--tokenizer.type", "own_parts:Tokens", SETTING_UP=str(mark)) as processes:
        wait_until(mark.exists, processes[0])
        processes[0].send_signal(signal.SIGTERM)
        codes, output = end(processes)
    assert codes == [75], output
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


def test_bytes_are_progress_at_a_minimum_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"{SLOWEST >> 10} KiB/s" in str(DataSettings.model_fields["stall_timeout"].description)
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
    return {**sample, "share": 1 / len(sample["__key__"].strip("0123456789abcdef/"))}


def test_the_first_traceback_of_a_users_part_is_printed_and_each_drop_names_the_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "_printed", bytearray(1))
    sources = {"train": {"shards": make_shards(tmp_path, [9]), "transform": f"{__name__}:divide"}}
    with pytest.raises(DataError, match=r"transform_error"), loader(data([], lanes=1, sources=sources)) as stream:
        next(stream)
    said = capfd.readouterr().err
    line = inspect.getsourcelines(divide)[1] + 1
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

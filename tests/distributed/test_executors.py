"""Shards worked off by real clusters of this machine, where Ray or Dask is installed: `make test-cluster`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from clipstream.cli.verbs import index, pack, stage
from clipstream.curation.sample_table import sample_table
from clipstream.data.settings import DataSettings
from clipstream.data.source_settings import SourceSettings
from clipstream.data.sources import Source
from clipstream.errors import DataError
from clipstream.utils import executors
from clipstream.utils.executors import run
from clipstream.utils.processes import TaskFailure
from tests.support.forks import ROOT, wait_until
from tests.support.pictures import make_shards
from tests.support.ranks import reserved_port

CLUSTERS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            importlib.util.find_spec(package) is None, reason=f"no {package}: pip install 'clipstream[{name}]'"
        ),
    )
    for name, package in executors._PACKAGES.items()
]
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",  # else a token is left in the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ADDRESS": "",
    "GRPC_ENABLE_FORK_SUPPORT": "0",  # of Ray's head, which forks while it serves clients: grpcio 1.85 aborts it
}


@contextlib.contextmanager
def started(*argv: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a session of its own, ended with all that it started."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *argv], cwd=ROOT, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def dask_cluster(folder: Path) -> Iterator[list[str]]:
    """A scheduler and two workers of one thread; one that dies is started again."""
    about, workers = folder / "scheduler.json", "--nworkers 2 --nthreads 1"
    to = ["--scheduler-file", str(about), "--no-dashboard"]
    with started("distributed.cli.dask_scheduler", "--port", "0", *to, log=folder / "scheduler.log") as process:
        wait_until(lambda: about.exists() and about.stat().st_size > 0, process)
        here = ["--local-directory", str(folder)]
        with started("distributed.cli.dask_worker", *workers.split(), *here, *to, log=folder / "workers.log"):
            yield [json.loads(about.read_text())["address"].replace("tcp:", "dask:")]


@contextlib.contextmanager
def ray_cluster(folder: Path) -> Iterator[list[str]]:
    """A node of two workers; one that dies is started again."""
    with tempfile.TemporaryDirectory(prefix="ray-") as short, reserved_port() as port:  # names of sockets are short
        flags = "--head --block --num-cpus=2 --port=0 --include-dashboard=false --object-store-memory=100000000"
        start = ["ray.scripts.scripts", "start", *flags.split(), f"--ray-client-server-port={port}"]
        about = Path(short, "ray_current_cluster")
        with (
            started(*start, f"--temp-dir={short}", log=folder / "ray.log") as process,
            pytest.MonkeyPatch.context() as own,
        ):
            wait_until(lambda: about.exists() and about.stat().st_size > 0, process)
            own.setenv("RAY_ADDRESS", about.read_text())
            yield ["ray", f"ray://127.0.0.1:{port}"]
            importlib.import_module("ray").shutdown()  # else Ray ends this process a minute after its cluster


@pytest.fixture(scope="module", params=CLUSTERS)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The executors that name a cluster, which runs while the tests of this module do."""
    make = {"dask": dask_cluster, "ray": ray_cluster}[request.param]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        with make(tmp_path_factory.mktemp(request.param)) as executors:
            yield executors


@dataclass
class Dying:
    """Tasks of which number 3 is killed once with its worker, and leaves half a file."""

    do: Callable[[int], Any]
    folder: Path  # of the output

    def __call__(self, number: int) -> Any:
        died = self.folder.with_name(f"{self.folder.name}-{type(self.do).__name__}")
        if number == 3 and not died.exists():
            died.touch()
            with contextlib.suppress(OSError):
                (self.folder / ".parts" / "half.part").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        return self.do(number)


def test_a_cluster_that_loses_workers_writes_the_same_bytes(
    cluster: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards, made = make_shards(tmp_path / "shards", [9] * 8), {}
    for at, executor in enumerate(["local:1", "local:2", "local:4", *cluster]):
        folders = [tmp_path / str(at) / name for name in ("indexes", "staged", "packed", "table")]
        calls = {
            "indexes": lambda folder, *flags: index.main([*shards, "--into", folder, *flags]),
            "staged": lambda folder, *flags: stage.main([folder, "--train-data", "::".join(shards), *flags]),
            "packed": lambda folder, *flags: pack.main([folder, *shards, "--shard-size=9", "--val-split=0.2", *flags]),
        }
        for folder in folders:
            folder.mkdir(parents=True)
            if at:
                monkeypatch.setattr(executors, "run", lambda do, *more, folder=folder: run(Dying(do, folder), *more))
            if folder.name in calls:
                assert calls[folder.name](str(folder), "--executor", executor) == 0
        source = Source(SourceSettings(shards=shards))
        rows = sample_table(source, DataSettings(), folder=folders[-1], executor=executor)
        deaths = [path.name for path in folders[0].parent.iterdir() if path.is_file()]
        assert len(deaths) == 6 * bool(at), deaths
        files = [path for folder in folders[1:3] for path in folder.rglob("*") if path.suffix in (".tar", ".json", "")]
        files = [path for path in (*folders[0].iterdir(), *files) if path.is_file()]
        made[executor] = {str(path.relative_to(folders[0].parent)): path.read_bytes() for path in files}
        made[executor]["rows"] = rows.read()
    first = made["local:1"]
    assert sum(name.endswith(".tar") for name in first) >= 16
    for executor, found in made.items():
        assert found.keys() == first.keys() and not [name for name in first if found[name] != first[name]], executor


def divide(number: int) -> float:
    return 1 / (number - 2)


def test_an_error_of_code_comes_back_with_its_traceback(cluster: list[str]) -> None:
    for executor in cluster:
        with (
            pytest.raises(RuntimeError, match=r"(?s)in divide\n.*ZeroDivisionError"),
            closing(run(divide, 4, executor)) as ends,
        ):
            list(ends)


def die(number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_task_that_kills_each_of_its_workers_is_an_error(cluster: list[str]) -> None:
    results = dict(event for event in run(die, 1, cluster[0]) if event is not None)
    assert isinstance(results[0], TaskFailure) and "its worker died" in results[0].error


def endless(folder: Path, number: int) -> None:
    part = folder / f"{number}.part"
    try:
        part.touch()
        while True:
            time.sleep(0.05)
    finally:
        part.unlink()


def test_tasks_end_with_the_command_and_clean_up(cluster: list[str], tmp_path: Path) -> None:
    with closing(run(partial(endless, tmp_path), 5000, cluster[0])) as ends:
        wait_until(lambda: next(ends) is None and len(list(tmp_path.iterdir())) == 2)
    assert not list(tmp_path.iterdir())
    assert dict(event for event in run(abs, 3, cluster[0]) if event is not None) == {0: 0, 1: 1, 2: 2}


class Workerless:
    """A cluster of which the last worker has gone, or that does not answer."""

    name, lost = "dask://here:1", ()

    def __init__(self, answers: list[bool]) -> None:
        self.answers, self.ended = answers, 0

    def submit(self, number: int) -> Future[Any]:
        return Future()

    def has_workers(self) -> bool:
        if not self.answers:
            raise OSError("no answer")
        return self.answers.pop(0)

    def end(self, tasks: Sequence[Future[Any]]) -> None:
        self.ended = len(tasks)


@pytest.mark.parametrize(("answers", "seconds"), [([True, False, False], 60), ([], 600)])
def test_a_cluster_without_workers_ends_the_command(
    answers: list[bool], seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a worker was lost within a minute; one that is still to start, as by an autoscaler, has ten."""
    clock = iter(float(second) for second in range(0, 10_000, 3))
    monkeypatch.setattr(executors.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(executors, "PULSE", 0.001)
    cluster = Workerless(answers)
    with pytest.raises(DataError, match=rf"^dask://here:1: no worker for {seconds} s: start workers, and rerun"):
        list(executors._run_on(cluster, 5))
    assert cluster.ended == 0, "nobody is there to end tasks"


def test_a_real_cluster_whose_workers_have_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="no distributed: pip install 'clipstream[dask]'")
    monkeypatch.setattr(executors, "LAST_WORKER", 1.0)
    monkeypatch.setattr(executors, "FIRST_WORKER", 1.0)
    monkeypatch.setattr(executors, "ASK", 0.1)
    about = tmp_path / "scheduler.json"
    to = ["--scheduler-file", str(about), "--no-dashboard", "--port", "0"]
    with started("distributed.cli.dask_scheduler", *to, log=tmp_path / "scheduler.log") as process:
        wait_until(lambda: about.exists() and about.stat().st_size > 0, process)
        address = json.loads(about.read_text())["address"].replace("tcp:", "dask:")
        with pytest.raises(DataError, match="no worker for 1 s"):
            list(run(abs, 3, address))

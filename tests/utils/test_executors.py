"""Executors: what a user may name, and the pool of processes: results, progress, and a process that is killed."""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clipstream import __version__
from clipstream.config.command_line import run_main
from clipstream.data.shard_pass import ShardPass
from clipstream.errors import SettingsError
from clipstream.utils import processes
from clipstream.utils.executors import _work, check_executor, run
from clipstream.utils.processes import TaskFailure, note
from tests.support.ranks import reserved_port


@pytest.mark.parametrize(
    ("executor", "said"),
    [
        ("spark", "expected local, local:N, ray, ray://HOST:10001 or dask://HOST:8786, not 'spark'"),
        ("local:two", "not 'local:two'"),
        ("dask", "not 'dask'"),
        ("dask://host", "not 'dask://host'"),
        ("local:0", "local:0: the number of processes must be 1 or more"),
        ("local:-2", "must be 1 or more"),
    ],
)
def test_other_executors_are_refused(executor: str, said: str) -> None:
    with pytest.raises(SettingsError, match=f"^--executor: .*{said}"):
        check_executor(executor)


@pytest.mark.parametrize(
    ("executor", "package", "extra"), [("ray", "ray", "ray"), ("dask://a:1", "distributed", "dask")]
)
def test_a_package_that_is_missing_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, executor: str, package: str, extra: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=rf"{executor} requires {package}: pip install 'clipstream\[{extra}\]'$"):
        next(run(abs, 1, executor))


def test_an_address_without_a_scheduler_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with reserved_port() as port:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        for executor, at in {"ray": f"127.0.0.1:{port} .RAY_ADDRESS.", "dask": "", "ray:": ""}.items():
            named = executor if at else f"{executor.rstrip(':')}://127.0.0.1:{port}"
            with pytest.raises(SettingsError, match=f"^--executor: no scheduler answers at {at or named}: "):
                next(run(abs, 1, named))


def test_a_worker_with_another_clipstream_says_so() -> None:
    answer = _work("token", pickle.dumps(("0.0.0", "/", b"")), 0)
    assert answer.kind == "unable" and f"it has clipstream {__version__}: install the same version" in answer.value


def test_an_interrupt_is_one_for_callers_and_tells_users_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> Iterator[tuple[int, int]]:
        yield 0, 7
        raise KeyboardInterrupt

    monkeypatch.setattr("clipstream.utils.executors.run", interrupted)
    walk = ShardPass(["a", "b"], abs)
    with pytest.raises(KeyboardInterrupt, match="while packing; 1 of 2 shards are done: rerun the same command"):
        walk.run("packing", "local:1", abs)
    assert run_main(lambda _: len(walk.run("packing", "local:1", abs)), []) == 75
    assert "interrupted while packing; 1 of 2" in capsys.readouterr().err


def test_processes_of_this_machine_are_one_per_core_unless_they_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPSTREAM_CAPABILITIES", "cores=7")
    asked = [(None,), ("local",), (None, 16), ("local", 16), ("local:3", 16)]
    assert [check_executor(*one) for one in asked] == ["local:7", "local:7", "local:16", "local:16", "local:3"]
    assert dict(event for event in run(lambda number: number + 1, 3, "local:2") if event) == {0: 1, 1: 2, 2: 3}


def killed_at(folder: Path, deaths: dict[int, int]) -> Callable[[int], int]:
    """A task whose process is killed as often as `deaths` says of its number."""

    def do(number: int) -> int:
        note(f"shard/{number}")
        before = len(list(folder.glob(f"{number}-*")))
        if before < deaths.get(number, 0):
            (folder / f"{number}-{before}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number * number

    return do


def test_a_task_whose_process_is_killed_is_done_again(tmp_path: Path) -> None:
    results = dict(event for event in processes.run(killed_at(tmp_path, {0: 2, 3: 1}), 7, 2) if event is not None)
    assert results == {number: number * number for number in range(7)} and len(list(tmp_path.iterdir())) == 3


def test_a_process_that_is_killed_costs_its_piece_alone(tmp_path: Path) -> None:
    do = killed_at(tmp_path, {3: 9})
    results = dict(event for event in processes.run(do, 7, 2) if event is not None)
    died = results.pop(3)
    assert results == {number: number * number for number in (0, 1, 2, 4, 5, 6)}
    assert isinstance(died, TaskFailure) and "memory" in died.error and died.error.endswith(", at shard/3")
    assert len(list(tmp_path.iterdir())) == 3

"""Executors (`--executor`): shards are worked off by processes of this machine, or by workers of a Ray or Dask cluster.

A function of a task's number enters, results leave as tasks end. A task is to write its file under a name of its own
and to rename it, as it may run again: a lost worker costs its running tasks, which other workers repeat. Of 10,000
tasks, IN_FLIGHT are with the cluster. Workers need this version of clipstream, and the files under the same paths.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import pickle
import queue
import re
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple, TypeVar

from clipstream import __version__
from clipstream.errors import DataError, SettingsError
from clipstream.text import counted, lines, listed_lines
from clipstream.utils import processes
from clipstream.utils.processes import PATIENCE, PULSE, RETRIES, Ended, TaskFailure, cores

Result = TypeVar("Result")
FLAG = "--executor"
MEANING = (
    "where shards are worked off: local:N processes of this machine, ray (joins or starts a cluster), "
    "ray://HOST:10001 or dask://HOST:8786 (default: local, one process per core)"
)
IN_FLIGHT = 1000  # tasks that are with a cluster at once; autoscalers see as many
SHOWN = 20  # failures that a message lists
CONNECT = 10.0  # s that a scheduler may take to answer
ASK = 5.0  # s between two questions for workers while no task ends
# s without a worker that end the command: the first may have to be started, as by an autoscaler; the last may return
FIRST_WORKER, LAST_WORKER = 600.0, 60.0
_PACKAGES = {"ray": "ray", "dask": "distributed"}


def check_executor(executor: str | None, default: int | None = None) -> str:
    """The executor that a user names (see `MEANING`), with its number of processes if it is local: `default`, or that
    of the cores, unless it is named.

    Raises SettingsError: it is not one of these, or its package is not installed.
    """
    if (local := re.fullmatch(r"local(?::(-?\d+))?", executor or "local")) is not None:
        number = int(local[1]) if local[1] else default or cores()
        if number < 1:
            raise SettingsError(f"{FLAG}: {executor}: the number of processes must be 1 or more")
        return f"local:{number}"
    assert executor is not None
    if re.fullmatch(r"ray|(ray|dask)://[^\s/]+:\d+", executor) is None:
        forms = "local, local:N, ray, ray://HOST:10001 or dask://HOST:8786"
        raise SettingsError(f"{FLAG}: expected {forms}, not {executor!r}")
    extra = executor.partition(":")[0]
    if importlib.util.find_spec(_PACKAGES[extra]) is None:
        raise SettingsError(f"{FLAG}: {executor} requires {_PACKAGES[extra]}: pip install 'clipstream[{extra}]'")
    return executor


def run(do: Callable[[int], Result], count: int, executor: str) -> Generator[tuple[int, Result | TaskFailure] | None]:
    """Do `count` tasks; yields (number, result) as tasks end, in any order, and None from time to time.

    Closing the generator ends the tasks, also in the middle of their work.

    Args:
        do: called with a task's number, from 0. Processes of this machine are forked with it; for a cluster it is
            pickled once, and unpickled once by each process, which it may fill with what cannot be pickled.

    Raises:
        SettingsError: no such executor, no answer at its address, or its workers have another clipstream.
        DataError: the scheduler has gone, or all workers.
        RuntimeError: `do` raised, which is a bug, with the traceback.
    """
    executor = check_executor(executor)
    kind, _, address = executor.partition(":")
    if kind == "local":
        yield from processes.run(do, count, min(int(address), max(count, 1)))
        return
    _require_answer(executor)
    connect = _ray if kind == "ray" else _dask
    with connect(executor, do) as cluster:
        yield from _run_on(cluster, count)


def require_all(label: str, results: Sequence[Result | TaskFailure], advice: str) -> list[Result]:
    """The results. Raises DataError: some tasks failed; the message lists them, and ends with advice."""
    if failures := sorted(one.error for one in results if isinstance(one, TaskFailure)):
        told = f"{label}: {len(failures):,} of {counted(len(results), 'shard', ',')} failed:"
        raise DataError(lines(told, *listed_lines([f"  {one}" for one in failures], SHOWN), advice))
    return [one for one in results if not isinstance(one, TaskFailure)]


def _run_on(cluster: _Dask | _Ray, count: int) -> Generator[tuple[int, Any] | None]:
    numbers, ended = iter(range(count)), queue.SimpleQueue[Future[_Answer]]()
    tasks: dict[Future[_Answer], int] = {}
    limit, alive = FIRST_WORKER, time.monotonic()
    asked = alive
    try:
        while True:
            while len(tasks) < IN_FLIGHT and (number := next(numbers, None)) is not None:
                tasks[task := cluster.submit(number)] = number
                task.add_done_callback(ended.put)
            if not tasks:
                return
            try:
                task = ended.get(timeout=PULSE)
            except queue.Empty:
                yield None
                if time.monotonic() - asked > ASK:
                    with contextlib.suppress(Exception):
                        if cluster.has_workers():
                            limit, alive = LAST_WORKER, time.monotonic()
                    if (asked := time.monotonic()) - alive > limit:
                        tasks.clear()  # nobody is there to end them
                        what = f"{cluster.name}: no worker for {limit:.0f} s"
                        raise DataError(f"{what}: start workers, and rerun the same command") from None
                continue
            limit, alive = LAST_WORKER, time.monotonic()
            yield tasks.pop(task), _result(cluster, task)
    finally:
        if tasks:
            cluster.end(list(tasks))


def _result(cluster: _Dask | _Ray, task: Future[_Answer]) -> Any:
    """The result of a task, or a TaskFailure. Raises as `run` does."""
    try:
        answer = task.result()
    except CancelledError as error:
        raise DataError(f"{cluster.name}: the scheduler has gone: start it, and rerun the same command") from error
    except cluster.lost as error:
        return TaskFailure(f"its worker died, {RETRIES + 1} times: {' '.join(str(error).split())[:300]}")
    except Exception as error:  # as it has no clipstream
        answer = _Answer("unable", f"{type(error).__name__}: {error}")
    if answer.kind == "unable":
        what = " ".join(answer.value.split())[-300:]
        raise SettingsError(f"{cluster.name}: a worker cannot run tasks of clipstream {__version__}: {what}")
    if answer.kind == "bug":
        raise RuntimeError(answer.value)
    return answer.value


def _require_answer(executor: str) -> None:
    """Raises SettingsError: nothing listens at the address, which Ray waits for in silence for minutes."""
    shown = executor
    if executor == "ray" and (variable := os.environ.get("RAY_ADDRESS")):
        executor, shown = variable, f"{variable} (RAY_ADDRESS)"
    if (at := re.fullmatch(r"(?:\w+://)?\[?([^\s/]+?)\]?:(\d+)", executor)) is None:
        return
    try:
        socket.create_connection((at[1], int(at[2])), timeout=CONNECT).close()
    except (OSError, OverflowError) as error:
        raise SettingsError(f"{FLAG}: no scheduler answers at {shown}: {error}") from error


# --- in a worker's process --------------------------------------------------------------------------------------------


class _Answer(NamedTuple):
    kind: str  # 'done', 'bug', 'unable' or 'ended'
    value: Any  # the result, the traceback, or a message


_lock = threading.Lock()
_held: tuple[str, Callable[[int], Any]] | None = None  # the last `do` of this process, and its token
_running: dict[int, str] = {}  # thread -> token


def _pack(do: Callable[[int], Any], dumps: Callable[[Any], bytes]) -> bytes:
    """What workers need of `do`: also the folder that relative paths and plug-ins of the user are in."""
    return pickle.dumps((__version__, os.getcwd(), dumps(do)))


def _work(token: str, packed: Any, number: int) -> _Answer:
    """Do a task; `packed` is bytes, or a list with Ray's reference to them, which is followed once by each process."""
    thread = threading.get_ident()
    try:
        try:
            with _lock:
                _running[thread] = token
                try:
                    do = _unpack(token, packed)
                except Exception as error:
                    return _Answer("unable", f"{socket.gethostname()}: {type(error).__name__}: {error}")
            return _Answer("done", do(number))
        finally:
            with _lock:
                _running.pop(thread, None)
    except Ended:
        return _Answer("ended", "")
    except Exception:
        return _Answer("bug", traceback.format_exc())


def _unpack(token: str, packed: Any) -> Callable[[int], Any]:
    global _held
    if _held is None or _held[0] != token:
        if isinstance(packed, list):
            packed = importlib.import_module("ray").get(packed[0])
        version, folder, dumped = pickle.loads(packed)
        if version != __version__:
            raise ImportError(f"it has clipstream {__version__}: install the same version on all machines")
        with contextlib.suppress(OSError):  # where only this machine has the folder, paths are to be absolute
            os.chdir(folder)
        if folder not in sys.path:
            sys.path.append(folder)
        _held = token, pickle.loads(dumped)
    return _held[1]


def _end(token: str) -> int:
    """Raise Ended in the threads that do a task of `token`; returns their number."""
    with _lock:
        threads = [thread for thread, its in _running.items() if its == token]
        for thread in threads:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Ended))
    return len(threads)


# --- the clusters -----------------------------------------------------------------------------------------------------


class _Dask:
    """A cluster that `do` was given to. `lost`: errors of a task whose workers have died, RETRIES times."""

    def __init__(self, name: str, client: Any, packed: bytes) -> None:
        from distributed.scheduler import KilledWorker

        self.name, self._client, self._token = name, client, secrets.token_hex(8)
        self.lost: tuple[type[Exception], ...] = (KilledWorker,)
        self._executor = client.get_executor(pure=False)
        # A task itself, and not scattered: the scheduler makes it again if the worker that holds it is lost.
        self._packed = client.submit(bytes, packed, pure=False)

    def submit(self, number: int) -> Future[_Answer]:
        """Have a task done by some worker."""
        task: Future[_Answer] = self._executor.submit(_work, self._token, self._packed, number)
        return task

    def has_workers(self) -> bool:
        """Whether the cluster has any. Raises Exception: it does not answer within CONNECT."""
        return bool(self._client.sync(self._client.scheduler.ncores, workers=None, callback_timeout=CONNECT))

    def end(self, tasks: Sequence[Future[_Answer]]) -> None:
        """End tasks that wait or run; returns when their clean-ups are over, or after PATIENCE."""
        self._executor.shutdown(wait=False)  # a task that runs does not notice it
        until = time.monotonic() + PATIENCE
        with contextlib.suppress(OSError):  # the scheduler has gone
            while any(self._client.run(_end, self._token, on_error="ignore").values()) and time.monotonic() < until:
                time.sleep(0.1)


@contextlib.contextmanager
def _dask(executor: str, do: Callable[[int], Any]) -> Iterator[_Dask]:
    import cloudpickle
    from distributed import Client

    try:
        client = Client(executor.replace("dask:", "tcp:"), timeout=CONNECT, set_as_default=False)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{FLAG}: no scheduler of Dask answers at {executor}: {error}") from error
    with client, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sending large graph")
        yield _Dask(executor, client, _pack(do, cloudpickle.dumps))


class _Ray:
    """As `_Dask`."""

    def __init__(self, name: str, packed: bytes) -> None:
        import ray

        names = ("WorkerCrashedError", "NodeDiedError", "OutOfMemoryError", "ObjectLostError")
        self.name, self._ray, self._token = name, ray, secrets.token_hex(8)
        self.lost: tuple[type[Exception], ...] = tuple(getattr(ray.exceptions, name) for name in names)
        self._work, self._packed = ray.remote(num_cpus=1, max_retries=RETRIES)(_work), ray.put(packed)
        self._references: dict[Future[_Answer], Any] = {}

    def submit(self, number: int) -> Future[_Answer]:
        reference = self._work.remote(self._token, [self._packed], number)
        task: Future[_Answer] = reference.future()
        self._references[task] = reference
        task.add_done_callback(self._references.pop)
        return task

    def has_workers(self) -> bool:
        return bool(self._ray.cluster_resources().get("CPU"))  # a head without CPUs takes no tasks

    def end(self, tasks: Sequence[Future[_Answer]]) -> None:
        for force in (False, True):  # KeyboardInterrupt, then the end of the process
            for task in tasks:
                if reference := self._references.get(task):
                    self._ray.cancel(reference, force=force)
            until = time.monotonic() + PATIENCE  # of a thousand tasks, the calls themselves take a while
            while self._references and time.monotonic() < until:
                time.sleep(0.05)


_joined = ""  # the Ray cluster that this process is connected to until it ends: that takes seconds


@contextlib.contextmanager
def _ray(executor: str, do: Callable[[int], Any]) -> Iterator[_Ray]:
    global _joined
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    import ray
    from ray import cloudpickle

    try:
        if _joined != executor or not ray.is_initialized():
            ray.shutdown()
            ray.init(None if executor == "ray" else executor, logging_level="error", include_dashboard=False)
            _joined = executor
    except (OSError, RuntimeError, ValueError) as error:
        what = " ".join(str(error).split())[:300]
        raise SettingsError(f"{FLAG}: cannot connect to {executor}: {what}") from error
    finally:
        for number, handler in handlers.items():  # Ray has its own
            signal.signal(number, handler)
    yield _Ray(executor, _pack(do, cloudpickle.dumps))

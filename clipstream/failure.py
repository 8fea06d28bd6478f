"""Owns the end of a failed run: the first cause is told to all ranks, printed last, and every rank ends with its code.

The cause travels through the process group's key-value store, over a connection of its own, so that it reaches ranks
that sit in a collective and would wait there until the time limit. It never raises, and with one rank it only prints.

A rank that died without a word (SIGKILL, out of memory) is noticed by the others' broken connections; which one it
was is told by the beats that every rank's thread leaves in the store. Under nccl, where a peer's death breaks no
connection, the launcher (torchrun, srun --kill-on-bad-exit) has to end the others.

A rank that waits too long for the others (`run.timeout`) ends all; one that is stuck then prints where.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from clipstream.errors import ClipstreamError, Stopped
from clipstream.world import World

POLL = 0.2  # s between two looks into the store
GRACE = 2.0  # s that a rank's main thread has to end by itself (and to close its files) once a cause is known
SILENCE = 2.0  # s without a beat after which a rank counts as dead, when a connection broke
PATIENCE = 15.0  # s at most that a rank waits for the others to take note
INTERRUPTED = 130  # exit code of Ctrl-C, as shells have it

_CAUSE, _NOTED, _DONE = "clipstream/cause", "clipstream/noted", "clipstream/done"

Cause = dict[str, Any]  # rank, code, message, dead (ranks that ended without a word), stuck (whether one may be)


class FailureWatch:
    """Tells the first cause of a failure to all ranks.

    Use: `start()` after `world.start()`; in the outermost `except`, `sys.exit(watch.report(error))`; at a good end,
    `stop()` before `world.stop()`.

    Args:
        world: this rank among the others.
        debug: print the traceback with a user's error too (with a bug of ours it always is).
    """

    def __init__(self, world: World, *, debug: bool = False) -> None:
        self.world, self.debug = world, debug
        self._store: Any = None
        self._cause: Cause | None = None
        self._cleanups: list[Callable[[], object]] = []
        self._ending = threading.Event()  # the main thread ends by itself
        self._stopped = threading.Event()
        self._once = threading.Lock()
        self._noted = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch; after the process group was made. Nothing with one rank."""
        if self.world.size == 1:
            return
        from torch.distributed import distributed_c10d

        # A clone is a second connection: the thread never waits for, or holds up, the process group's own use.
        self._store = distributed_c10d._get_default_store().clone()
        self._store.set_timeout(timedelta(seconds=PATIENCE))
        self._thread = threading.Thread(target=self._watch, name="failure-watch", daemon=True)
        self._thread.start()

    def on_exit(self, cleanup: Callable[[], object]) -> None:
        """Call `cleanup` before the process is ended from the thread, e.g. to kill data workers."""
        self._cleanups.append(cleanup)

    def report(self, error: BaseException) -> int:
        """End this rank because of `error`: tell it, or take the other rank's cause that came first, and print it.

        The main thread's part of the end: it returns within seconds, and if the process then lingers, the thread ends
        it. `Stopped` is raised on all ranks alike after saving: it is no failure, and is not told.

        Returns:
            The exit code of the first cause.
        """
        self._ending.set()
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, for ranks slower than the first to end
        mine = Cause(
            rank=self.world.rank, code=_code(error), message=_message(error), dead=[], stuck=_is_timeout(error)
        )
        if self.world.size == 1 or self._store is None:
            return self._print(mine, error)
        if isinstance(error, Stopped) and self._cause is None:
            self.stop()
            if self._cause is None:
                return self._print(mine, error)
        threading.Thread(target=self._force, args=(mine["code"],), daemon=True).start()
        self._cause = cause = self._cause or self._tell(mine, error)
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(1)  # its store client may still warn of a broken connection
        code = self._print(cause, error if cause["rank"] == self.world.rank else None)
        self._note(cause)
        return code

    def stop(self) -> None:
        """Stop to watch, at a good end. Rank 0, which may hold the store, waits until all ranks came here."""
        if self._thread is None:
            return
        self._stopped.set()
        self._thread.join()
        if self._cause is None:
            with contextlib.suppress(RuntimeError):
                self._store.add(_DONE, 1)
            if self.world.is_main:
                self._wait_for(_DONE, self.world.size)

    def _watch(self) -> None:
        """The thread: beat, look for a cause; when there is one, end the process if the main thread does not."""
        while not self._stopped.is_set():
            try:
                self._store.add(_beat(self.world.rank), 1)
                if self._store.check([_CAUSE]):
                    self._cause = json.loads(self._store.get(_CAUSE))
                    break
            except RuntimeError:  # the store's host is gone
                if self._ending.wait(GRACE) or self._stopped.is_set() or _launcher_holds_store():
                    return  # the launcher's end is a SIGTERM to its ranks (see `session`), which save first
                self._cause = self._lost_store()
                break
            self._stopped.wait(POLL)
        if self._cause is None or self._ending.wait(GRACE):
            return
        if self._cause.get("stuck"):
            self._say_where()
        self._run_cleanups()
        self._print(self._cause, None)
        self._note(self._cause)
        os._exit(int(self._cause["code"]))

    def _say_where(self) -> None:
        """Print what this rank's main thread is at."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        print(f"rank {self.world.rank} is at:", *traceback.format_stack(frame), sep="\n", file=sys.stderr, flush=True)

    def _force(self, code: int) -> None:
        time.sleep(PATIENCE + GRACE)
        self._run_cleanups()
        os._exit(code if self._cause is None else int(self._cause["code"]))

    def _tell(self, mine: Cause, error: BaseException) -> Cause:
        """Put a cause into the store unless there is one; the one that is there then."""
        try:
            if _is_broken_connection(error):
                mine |= self._who_died(error)
            told = json.dumps(mine)
            found = self._store.compare_set(_CAUSE, "", told)
            return Cause(json.loads(found or told))
        except RuntimeError:
            return self._lost_store() if _is_broken_connection(error) else mine

    def _who_died(self, error: BaseException) -> Cause:
        """What a broken connection means: the ranks without a beat; or a cause that is told meanwhile."""
        others = [rank for rank in range(self.world.size) if rank != self.world.rank]
        before = [self._store.add(_beat(rank), 0) for rank in others]
        limit = time.monotonic() + SILENCE
        while time.monotonic() < limit and not self._store.check([_CAUSE]):
            time.sleep(POLL)
        silent = [r for r, b in zip(others, before, strict=True) if self._store.add(_beat(r), 0) == b]
        if silent:
            return Cause(rank=silent[0], code=1, message=_died(silent), dead=silent)
        return Cause(code=1, message=f"the connection to another rank broke: {_first_line(str(error))}")

    def _lost_store(self) -> Cause:
        """The host of the store is gone: rank 0, or the launcher's agent. Nobody can be told, nor waited for."""
        self._noted = True
        message = "the launcher ended without a word" if _launcher_holds_store() else _died([0])
        return Cause(rank=0, code=1, message=message, dead=[])

    def _wait_for(self, key: str, count: int) -> None:
        limit = time.monotonic() + PATIENCE
        with contextlib.suppress(RuntimeError):
            while self._store.add(key, 0) < count and time.monotonic() < limit:
                time.sleep(POLL / 4)

    def _note(self, cause: Cause) -> None:
        """Count this rank among those that know the cause, as the last use of the store.

        The rank that failed leaves after the others know, as a launcher ends them when it sees the first one end;
        rank 0, which may hold the store, leaves last.
        """
        with self._once:
            if self._noted:
                return
            self._noted = True
            alive = self.world.size - len(cause["dead"])
            if cause["rank"] == self.world.rank:
                self._wait_for(_NOTED, alive - 1)
            with contextlib.suppress(RuntimeError):
                self._store.add(_NOTED, 1)
            if self.world.is_main:
                self._wait_for(_NOTED, alive)

    def _run_cleanups(self) -> None:
        for cleanup in self._cleanups:
            try:
                cleanup()
            except Exception as error:
                print(f"while ending: {error!r}", file=sys.stderr, flush=True)

    def _print(self, cause: Cause, error: BaseException | None) -> int:
        """Print the cause: whole where it arose and on rank 0, its first line elsewhere. Return its code."""
        if error is not None and (self.debug or not isinstance(error, ClipstreamError | KeyboardInterrupt)):
            traceback.print_exception(type(error), error, error.__traceback__)
        message = str(cause["message"])
        if not self.world.is_main and cause["rank"] != self.world.rank:
            message = _first_line(message)
        if cause["code"] != Stopped.exit_code:
            message = f"error: {message}" if self.world.size == 1 else f"error: rank {cause['rank']}: {message}"
        if cause["code"] != Stopped.exit_code or self.world.is_main:
            sys.stdout.flush()
            print(message, file=sys.stderr, flush=True)
        return int(cause["code"])


def _beat(rank: int) -> str:
    return f"clipstream/beat/{rank}"


def _code(error: BaseException) -> int:
    if isinstance(error, ClipstreamError):
        return error.exit_code
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _message(error: BaseException) -> str:
    if isinstance(error, ClipstreamError):
        return str(error)
    if _is_timeout(error):
        return (
            "waited longer than --run.timeout for another rank, which is stuck or at work alone: it says where, above "
            f"or in its own output ({_first_line(str(error))})"
        )
    return "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _died(ranks: list[int]) -> str:
    names = ", ".join(f"rank {rank}" for rank in ranks)
    return f"{names} ended without a word: killed, or out of memory"


def _launcher_holds_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _is_timeout(error: BaseException) -> bool:
    """Whether a collective waited too long; torch has no type of its own for it."""
    return isinstance(error, RuntimeError) and "Timed out waiting" in str(error)


def _is_broken_connection(error: BaseException) -> bool:
    """Whether a collective failed because a peer is gone; torch has no type of its own for it."""
    from torch.distributed import DistBackendError, DistNetworkError

    words = ("Connection closed by peer", "Connection reset", "Broken pipe", "Connection refused")
    return isinstance(error, RuntimeError) and (
        isinstance(error, DistBackendError | DistNetworkError) or any(word in str(error) for word in words)
    )

"""How the failure of one rank reaches the others, and the user: the cause of a run's end, and the watch over all ranks.

The first error of any rank is printed last, and ends all ranks with its exit code. The cause travels
through the process group's key-value store, over a connection of its own, and so reaches ranks that are blocked in a
collective. `FailureWatch` raises nothing; with one rank the error is only printed.

A rank that was killed (SIGKILL, out of memory) is noticed by broken connections, and identified by the heartbeats that
each rank's thread leaves in the store. One that is stopped or has lost its host or network breaks none: each rank looks
at the heartbeats of the next one, and at those of all if they stop. A rank that waits longer than `run.timeout` for the
others ends all of them; a rank that is stuck prints its stack.

Under nccl a peer's death breaks no connection, and a wait raises nothing: its watchdog aborts the process. Therefore
the threads compare how many collectives their ranks have called, and end the run a little earlier than the watchdog.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from clipstream.distributed.shared_keys import SharedKeys
from clipstream.distributed.world import World
from clipstream.errors import INTERRUPTED, ClipstreamError, CopyError, DataError, DivergedError, SettingsError, Stopped
from clipstream.text import printable_lines
from clipstream.utils.atomic_write import try_lock

KILLED = "ended without an error message: killed, or out of memory"
GONE = "gives no sign of life: killed, out of memory or stopped, or its host or network is down"
POLL = 0.2  # s between two looks into the store
GRACE = 2.0  # s for the main thread to end by itself (and to close its files) once a cause is known
SILENCE = 2.0  # s without a heartbeat after which a rank counts as dead, once a connection broke
LONG_SILENCE = 8.0  # the same where several ranks are silent, some of which may only be slow
QUIET = 12.0  # s without a heartbeat of the next rank, after which those of all are looked at
LOOK = 0.5  # s that count at most between two looks: time also passes while this process is suspended
LEFT = 1 << 40  # is added to the heartbeats of a rank that ended well
EARLIER = 0.9  # of NCCL's timeout, after which ranks are compared
PATIENCE = 15.0  # s at most that a rank waits for the others to read the cause
WAIT = 10.0  # s that a rank with an error waits for the others of its node to have the same, before it ends
CLEANUP = 30.0  # s at most for cleanups, as long as torchrun lets a process live after SIGTERM

_CAUSE, _NOTED, _DONE, _STOP = "clipstream/cause", "clipstream/noted", "clipstream/done", "clipstream/stop"
_BEAT, _CALLED = "clipstream/beat/{}", "clipstream/called/{}"


@dataclass(frozen=True)
class Cause:
    """Why a run ends."""

    rank: int  # where the error was raised
    code: int  # the exit code
    message: str  # for the user
    dead: list[int] = field(default_factory=list)  # ranks that ended without an error
    broken: bool = False  # whether a connection broke, and all ranks give signs of life
    stuck: bool = False  # whether another rank may be stuck, and should print its stack
    spare: bool = False  # whether the ranks meet in the spare store, as the first one does not answer

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Cause:
        """The cause that an error on `rank` is, or on the rank that the error names."""
        named = getattr(error, "rank", None)
        rank = rank if named is None else named
        if isinstance(error, ClipstreamError):
            return cls(rank, error.exit_code, str(error))
        if isinstance(error, KeyboardInterrupt):
            return cls(rank, INTERRUPTED, "interrupted")
        if isinstance(error, RuntimeError) and "Timed out waiting" in str(error):  # torch has no type for it
            message = (
                "waited longer than --run.timeout for another rank, which is stuck or busy: see its stack above or in "
                f"its output ({first_line(str(error))})"
            )
            return cls(rank, 1, message, stuck=True)
        return cls(rank, 1, f"{type(error).__name__}: {error}")

    @classmethod
    def of_dead(cls, ranks: list[int], hosts: Sequence[str] = (), why: str = KILLED) -> Cause:
        return cls(ranks[0], 1, f"{name_ranks(ranks, hosts)} {why}", dead=ranks)


def name_ranks(ranks: Iterable[int], hosts: Sequence[str]) -> str:
    """Ranks and their hosts, for messages: 'rank 2, rank 3 on node-b'."""
    by_host: dict[str, list[str]] = {}
    for rank in ranks:
        by_host.setdefault(f" on {hosts[rank]}" if hosts else "", []).append(f"rank {rank}")
    return ", ".join(f"{', '.join(names)}{host}" for host, names in by_host.items())


def first_line(text: str) -> str:
    return text.partition("\n")[0]


class _LookClock:
    """Seconds between two looks, at most LOOK: time also passes while this process is suspended."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def seconds(self) -> float:
        before, self._last = self._last, time.monotonic()
        return min(self._last - before, LOOK)


class FailureWatch:
    """Passes the first failure of any rank to all ranks.

    Call `start()` after `world.start()`; in the outermost `except`, `sys.exit(watch.report(error))`; after success,
    `stop()` before `world.stop()`.

    Args:
        debug: print the traceback of a user's error too; that of a bug is always printed.
        embedded: the process is a user's program: `report` prints nothing, as the caller raises `first_error`.

    Attributes:
        on_end: called as on_end(code, message) after the cause is printed, on rank 0; it must not raise.
        held: contexts to close last, after the cause is printed: a lock, a log file.
        steps: number of steps begun, as `note_step` was told; None before training.
        limit: seconds without a new collective, after which this rank may have waited too long for others.
        rescue_seconds: how long the main thread has, once a cause is known, to save what other ranks lost; collectives
            in progress then raise. 0: it ends.
        owns_group: whether the process group may be aborted, as it is not the program's.
        cause: the first failure of any rank, once it is known.
    """

    def __init__(self, world: World, *, debug: bool = False, embedded: bool = False) -> None:
        self.world, self.debug, self.embedded = world, debug, embedded
        self.on_end: Callable[[int, str], object] | None = None
        self.held = contextlib.ExitStack()
        self.steps: int | None = None
        self.limit = math.inf
        self.rescue_seconds = 0.0
        self.owns_group = True
        self._backend: Any = None
        self._called, self._looks = (-1, 0), 0  # collectives and steps, and looks since this last changed
        self._keys: Any = None  # SharedKeys, once started
        self._store: Any = None  # of the main thread
        self.cause: Cause | None = None
        self._deadline = math.inf  # of the main thread
        self._cleanups: list[Callable[[], object]] = []
        self._on_stop: Callable[[str], object] | None = None
        self._found = threading.Event()  # the main thread knows the cause
        self._ending = threading.Event()  # the main thread ends by itself
        self._stopped = threading.Event()
        self._once, self._taking, self._aborting = threading.Lock(), threading.Lock(), threading.Lock()
        self._aborted = False
        self._noted = False
        self._told = False  # the cause is printed, or left to rank 0, which knows it
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch, once the process group exists; with one rank, do nothing."""
        if self.world.size == 1:
            return
        import torch
        from torch.distributed import distributed_c10d

        if self.world.device.startswith("cuda"):
            self._backend = distributed_c10d._get_default_group()._get_backend(torch.device(self.world.device))
            self.limit = EARLIER * self._backend.options._timeout.total_seconds()
        self._keys = SharedKeys(distributed_c10d._get_default_store())
        self._keys.meet(self.world.rank, self.world.size)
        self._thread = threading.Thread(target=self._watch, name="failure-watch", daemon=True)
        self._thread.start()

    def note_step(self, steps: int) -> None:
        """Note that so many steps have begun."""
        self.steps = steps

    def on_exit(self, cleanup: Callable[[], object]) -> None:
        """Register a function to call before the thread ends the process, e.g. to kill data workers."""
        self._cleanups.append(cleanup)

    def on_stop(self, callback: Callable[[str], object]) -> None:
        """Register a function to call with the signal's name, from the thread, when another rank was asked to stop."""
        self._on_stop = callback

    def broadcast_stop(self, name: str) -> None:
        """Tell the other ranks that this one was asked to stop by the signal `name`."""
        if self._keys is not None:
            with contextlib.suppress(RuntimeError):
                self._keys.set(_STOP, name)

    @property
    def store(self) -> Any:
        """The store where ranks meet once there is a cause, by a connection of the main thread's own.

        Raises RuntimeError: it does not answer.
        """
        if self._store is None and self._keys is not None:
            self._store = self._keys.connect(int(self.cause is not None and self.cause.spare))
        return self._store

    def find_cause(self, error: BaseException) -> Cause:
        """In the main thread: publish `error`, or take an earlier cause, and let all collectives in progress raise.

        From then on the main thread has `rescue_seconds`. A later `report` prints this cause.
        """
        _ignore_sigterm()
        cause = self._first_cause(error)
        self._found.set()
        self._abort()
        self._deadline = min(self._deadline, time.monotonic() + (self.rescue_seconds or GRACE))
        return cause

    def _abort(self) -> None:
        """Let all collectives in progress raise, once: a group that is made after that is the survivors'."""
        with self._aborting:
            if not self._aborted:
                self._aborted = True
                self.world.abort()

    def set_outcome(self, code: int, text: str) -> None:
        """Let `report` return `code`, and append `text` to the cause's message; all survivors call this alike."""
        assert self.cause is not None, "find_cause comes first"
        self.cause = replace(self.cause, code=code, message=f"{self.cause.message}; {text}")

    def run_cleanups(self) -> None:
        """Call the functions registered by `on_exit`, and return within CLEANUP seconds; errors are printed."""
        thread = threading.Thread(target=self._clean_up, daemon=True)
        thread.start()
        thread.join(CLEANUP)  # what waits for the GPU may hang in a kernel of NCCL

    def _clean_up(self) -> None:
        for cleanup in self._cleanups:
            try:
                cleanup()
            except Exception as error:
                print(f"while ending: {error!r}", file=sys.stderr, flush=True)

    def report(self, error: BaseException) -> int:
        """End this rank because of `error`, in the main thread: publish it, or take an earlier cause, and print it.

        Returns within seconds; if the process does not end after that, a thread ends it. `Stopped` is raised on all
        ranks alike after saving: it is no failure, and is not published.

        Returns:
            The exit code of the first cause.
        """
        self._ending.set()
        self._found.set()
        _ignore_sigterm()
        if self._keys is None:
            return self._print(self._first_cause(error), error)
        if isinstance(error, Stopped) and self.cause is None:
            self.stop()
            if self.cause is None:
                return self._print(Cause.of(error, self.world.rank), error)
        threading.Thread(target=self._force_exit, args=(error,), daemon=True).start()
        cause = self._first_cause(error)
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(1)  # its store client may still warn of a broken connection
        return self._tell(cause, error if cause.rank == self.world.rank else None)

    def _first_cause(self, error: BaseException) -> Cause:
        """The cause that is known, or else the one that all ranks take once this rank publishes `error`."""
        if self.cause is None:
            mine = Cause.of(error, self.world.rank)
            self._take(mine if self._keys is None else self._publish(mine, error))
        assert self.cause is not None
        return self.cause

    def _take(self, cause: Cause) -> None:
        with self._taking:
            self.cause = self.cause or cause

    def first_error(self, error: BaseException) -> BaseException:
        """The error to raise after `report(error)`: that of the first rank that failed, which may be `error` itself."""
        cause = self.cause
        if cause is None or isinstance(error, Stopped):
            return error
        if cause.rank == self.world.rank and cause.code != Stopped.exit_code:
            return error
        kinds = {kind.exit_code: kind for kind in (SettingsError, DataError, DivergedError, CopyError, Stopped)}
        return kinds.get(cause.code, ClipstreamError)(f"rank {cause.rank}: {cause.message}")

    def stop(self) -> None:
        """Stop watching after success. Rank 0, which may host the store, waits for all ranks to call this."""
        if self._thread is None:
            return
        self._stopped.set()
        self._thread.join()
        if self.cause is None:
            with contextlib.suppress(RuntimeError):
                self._keys.add(_BEAT.format(self.world.rank), LEFT)
                self._keys.settle()
                if self._keys.server is not None:
                    self._wait_for(_DONE, self.world.size - 1)
                self._keys.add(_DONE, 1)
            if self.world.is_main:
                self._wait_for(_DONE, self.world.size)

    def _watch(self) -> None:
        """The thread: beat, look for a cause; when there is one, end the process if the main thread does not."""
        keys, beat, clock = self._keys, _BEAT.format(self.world.rank), _LookClock()
        ahead, beats, quiet = 1, -1, 0.0  # the next rank that did not leave: how far away, its heartbeats, its silence
        while not self._stopped.is_set() and self.cause is None:
            try:
                keys.add(beat, 1)
                other = (self.world.rank + ahead) % self.world.size
                text, stop = keys.get([_CAUSE, _STOP])
                if text:
                    self._take(Cause(**json.loads(keys.agree(_CAUSE, text))))
                    break
                if self._on_stop is not None and stop:
                    callback, self._on_stop = self._on_stop, None
                    callback(stop)
                now, seconds = keys.add(_BEAT.format(other), 0), clock.seconds()
                beats, quiet = now, quiet + seconds if now == beats else 0.0
                if now >= LEFT:
                    ahead, beats = ahead % (self.world.size - 1) + 1, -1
                elif quiet > QUIET:
                    quiet = 0.0
                    if silent := self._silent_ranks(range(self.world.size), LONG_SILENCE):
                        self._take(self._publish(Cause.of_dead(silent, keys.hosts, GONE)))
                if self._backend is not None and (cause := self._compare()) is not None:
                    self._take(self._publish(cause))
            except RuntimeError as error:  # no store answers
                late = "imeout" in str(error)
                if self._ending.wait(GRACE) or self._stopped.is_set() or (_launcher_holds_store() and not late):
                    return  # a launcher that ends sends its ranks SIGTERM (see `launch`): they save first
                self._take(self._cause_of_lost_store())
            self._stopped.wait(POLL)
        if self.cause is None or self._ending.is_set():
            return
        if self.rescue_seconds:
            self._abort()
        self._deadline = min(self._deadline, time.monotonic() + (self.rescue_seconds or GRACE))
        self._found.wait(GRACE)
        if self.cause.stuck and not self._found.is_set():
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            stack = traceback.format_stack(frame)
            print(f"rank {self.world.rank} is at:", *stack, sep="\n", file=sys.stderr, flush=True)
        while time.monotonic() < self._deadline:
            if self._ending.wait(POLL):
                return
        self.run_cleanups()
        self.embedded = False  # nothing is raised here
        self._tell(self.cause, None)
        os._exit(self.cause.code)

    def _compare(self) -> Cause | None:
        """In the thread: the cause if this rank waits longer than `limit` for ranks that called fewer collectives."""
        called = self._backend._get_sequence_number_for_group(), self.steps or 0
        if called != self._called:
            self._called, self._looks = called, 0
            self._keys.set(_CALLED.format(self.world.rank), f"{called[0]} {called[1]}")
        self._looks += 1
        keys = [_CALLED.format(rank) for rank in range(self.world.size)]
        if self._looks * POLL < self.limit or not all(texts := self._keys.get(keys)):
            return None
        self._looks = 0
        by_rank = [[int(number) for number in text.split()] for text in texts]
        fewest = min(by_rank)[0]
        if fewest >= called[0]:  # a long task of each rank, or a fault of the network, which NCCL reports
            return None
        late = [rank for rank, (count, _) in enumerate(by_rank) if count == fewest]
        if silent := self._silent_ranks(late, LONG_SILENCE):  # no connection broke
            return Cause.of_dead(silent, self._keys.hosts)
        where = [f"{f'step {step}, ' if step else ''}collective {count}" for count, step in (min(by_rank), called)]
        message = (
            f"waited longer than {EARLIER:.0%} of --run.timeout for {name_ranks(late, self._keys.hosts)}, stuck"
            f" or busy after {where[0]} (this rank: {where[1]}): see the stacks above or in the ranks' output"
        )
        return Cause(self.world.rank, 1, message, stuck=True)

    def _force_exit(self, error: BaseException) -> None:
        time.sleep(PATIENCE + GRACE)
        self.run_cleanups()
        cause = self.cause or Cause.of(error, self.world.rank)
        if not self._told:  # the store's host does not answer
            self._print(cause, None)
        os._exit(cause.code)

    def _publish(self, cause: Cause, error: BaseException | None = None) -> Cause:
        """Put the cause into the store unless there is one; return the one that is there then.

        A broken connection is no cause itself: either a rank is dead, or one publishes its cause meanwhile.
        """
        from torch.distributed import DistBackendError, DistNetworkError

        # A peer is gone; torch has no single type for it.
        words = ("Connection closed by peer", "Connection reset", "Broken pipe", "Connection refused")
        broken = isinstance(error, DistBackendError | DistNetworkError)
        broken = broken or (isinstance(error, RuntimeError) and any(word in str(error) for word in words))
        try:
            if broken:
                silent = self._silent_ranks(range(self.world.size))
                message = f"the connection to another rank broke: {first_line(str(error))}"
                cause = replace(cause, code=1, message=message, broken=True)
                cause = Cause.of_dead(silent, self._keys.hosts) if silent else cause
            cause = replace(cause, spare=self._keys.spare)
            return Cause(**json.loads(self._keys.agree(_CAUSE, json.dumps(asdict(cause)))))
        except RuntimeError:
            return self._cause_of_lost_store() if broken else cause

    def _silent_ranks(self, ranks: Iterable[int], silence: float = SILENCE) -> list[int]:
        """Ranks whose heartbeat stopped. Looks are counted: time also passes while this process is suspended.

        Args:
            silence: seconds after which a single rank counts as dead.
        """
        names = {rank: _BEAT.format(rank) for rank in ranks if rank != self.world.rank}
        silent = {rank: str(self._keys.add(name, 0)) for rank, name in names.items()}
        clock, seconds, text = _LookClock(), 0.0, ""
        while not (
            text or seconds > LONG_SILENCE or (len(silent) <= 1 and seconds >= (silence if silent else SILENCE))
        ):
            time.sleep(POLL)
            text, *found = self._keys.get([_CAUSE, *(names[rank] for rank in silent)])
            beats = zip(silent.items(), found, strict=True)
            silent = {rank: now for (rank, before), now in beats if now == before and int(now) < LEFT}
            seconds += clock.seconds()
        return list(silent)

    def _cause_of_lost_store(self) -> Cause:
        """The cause if the store's host is gone (rank 0, or the launcher's agent): no rank can be reached."""
        self._noted = True
        if _launcher_holds_store():
            return Cause(0, 1, "the launcher ended without an error message")
        return Cause.of_dead([0])

    def _wait_for(self, key: str, count: int) -> None:
        """Wait until a number in the store is `count`, for PATIENCE at most."""
        limit = time.monotonic() + PATIENCE
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < limit and self._keys.add(key, 0) < count:
                time.sleep(POLL / 4)

    def _tell(self, cause: Cause, error: BaseException | None) -> int:
        """Print the cause, wait until the other ranks know it, and return its code.

        Wrong settings are printed by rank 0 alone. The failed rank leaves after the others know, because a launcher
        ends them when the first one ends; rank 0, which may host the store, leaves last.
        """
        if cause.code != SettingsError.exit_code or self.world.is_main or self.debug:
            self._print(cause, error)
            self._told = True
        with self._once:
            if not self._noted:
                self._noted, alive, first = True, self.world.size - len(cause.dead), cause.rank == self.world.rank
                self._keys.settle()
                if first or self._keys.server is not None:  # the first rank waits for this one, too
                    self._wait_for(_NOTED, alive - 1 - (not first and cause.rank not in cause.dead))
                with contextlib.suppress(RuntimeError):
                    self._keys.add(_NOTED, 1)
                if self.world.is_main or (self._keys.server is not None and self._keys.spare):
                    self._wait_for(_NOTED, alive)
        self._told = True
        return cause.code

    def _print(self, cause: Cause, error: BaseException | None) -> int:
        """Print the cause, only its first line on ranks other than 0 and its own; return its code."""
        shown = error is not None and (self.debug or not isinstance(error, ClipstreamError | KeyboardInterrupt))
        if error is not None and shown and not self.embedded:
            print(printable_lines("".join(traceback.format_exception(error)), 1 << 20), end="", file=sys.stderr)
        message = cause.message
        if not self.world.is_main and cause.rank != self.world.rank:
            message = first_line(message)
        where = "" if self.world.size == 1 else f"rank {cause.rank}: "
        if cause.code != Stopped.exit_code:
            message = f"{'' if cause.code == INTERRUPTED else 'error: '}{where}{message}"
        speaker = min(set(range(self.world.size)) - set(cause.dead), default=0)
        if not self.embedded and (cause.code != Stopped.exit_code or self.world.rank == speaker):
            sys.stdout.flush()
            print(printable_lines(message), file=sys.stderr, flush=True)
        if self.on_end is not None:
            self.on_end(cause.code, f"{where}{cause.message}")
        return cause.code


def tell_once(world: World, text: str, tell: Callable[[], object]) -> None:
    """Call `tell` on one of the ranks of a node that end with the error `text`, before they are connected.

    The ranks compete for the lock of a file. The winner prints; it then waits until as many ranks have come as the node
    has, for WAIT at most, and the others wait for it: a launcher ends the other ranks once the first one has ended.
    Without MASTER_ADDR, which only a launcher sets, no rank waits.
    """
    if "?" in world.rendezvous:
        tell()
        return
    name = hashlib.sha256(f"{os.getuid()} {world.rendezvous} {text}".encode()).hexdigest()
    path = Path(tempfile.gettempdir()) / f"clipstream-{name[:32]}"
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "ab", buffering=0))
        except OSError:  # no folder for temporary files
            tell()
            return
        alone = try_lock(file.fileno(), fcntl.LOCK_EX)
        if alone is None:
            tell()
        elif not alone:
            file.write(b"1")
            try_lock(file.fileno(), fcntl.LOCK_EX, wait=True)  # until the winner has ended
        else:
            file.truncate(0)
            tell()
            end = time.monotonic() + WAIT
            while os.fstat(file.fileno()).st_size < world.local_size - 1 and time.monotonic() < end:
                time.sleep(POLL / 4)
            path.unlink(missing_ok=True)


def _ignore_sigterm() -> None:
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # launchers send it once the first rank has ended


def _launcher_holds_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

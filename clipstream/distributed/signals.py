"""Signals that ask a run to stop: recorded at once on every rank, acted on between two steps.

SIGTERM, SIGINT, SIGUSR1 and SIGHUP of this process, and those of other ranks, enter; `StopSignals.received` leaves,
which waits for data, evaluations and `clipstream.training.trainer` check, which saves and stops. A thread hears the
signals (`listening`): they are acknowledged and passed on while the main thread is inside a collective. Before there is
anything to save, `EndProcess` ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from clipstream.errors import INTERRUPTED, Interrupted, Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
SETUP_GRACE = 5.0  # s that the main thread has to end before training, where it may be inside a call that waits
_listening = False
# A forked child must not report its signals to the parent's thread.
os.register_at_fork(after_in_child=lambda: _listening and signal.set_wakeup_fd(-1))


class EndProcess:
    """A handler that ends the process at once.

    Args:
        line: printed before; `{}` in it is the signal's name.
    """

    def __init__(self, code: int, line: str = "") -> None:
        self.code, self.line = code, line

    def __call__(self, number: int, frame: FrameType | None) -> None:
        line, self.line = self.line, ""  # the main thread and the one of `listening` may both come here
        with contextlib.suppress(OSError):
            if os.isatty(2):
                os.write(2, b"\r\x1b[K\x1b[?25h")  # no half line and no hidden cursor of a progress bar stays
            if line:
                os.write(2, f"{line.format(signal.Signals(number).name)}\n".encode())
        os._exit(self.code)


@contextlib.contextmanager
def listening(heard: Callable[[int], None]) -> Iterator[None]:
    """Call `heard` in a thread with the number of each signal that has a handler.

    Native code that blocks the main thread does not delay it, if it releases the interpreter's lock, as torch's
    collectives do. Python's own handlers run in the main thread alone, when such code returns.
    """
    global _listening
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    _listening = True

    def listen() -> None:
        while numbers := ours.recv(64):
            for number in numbers:
                heard(number)
        ours.close()

    threading.Thread(target=listen, name="signals", daemon=True).start()
    try:
        yield
    finally:
        _listening = False
        signal.set_wakeup_fd(before)
        theirs.close()  # ends the thread


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """Let Ctrl-C and each `EndProcess` work also while native code blocks the main thread, as torch's rendezvous does.

    In another thread than the main one it does nothing, as Python hands signals to the main thread.
    """

    def end(number: int) -> None:
        handler: Any = signal.getsignal(number)
        if handler is signal.default_int_handler:
            handler = EndProcess(INTERRUPTED, "interrupted")
        if isinstance(handler, EndProcess):
            handler(number, None)

    with listening(end) if threading.current_thread() is threading.main_thread() else contextlib.nullcontext():
        yield


class StopSignals:
    """Context manager: records SIGTERM, SIGINT, SIGUSR1 and SIGHUP instead of ending the process. An ignored SIGHUP, as
    under nohup, stays ignored.

    In another thread than the main one it records nothing, as Python hands signals to the main thread.

    A second SIGINT (Ctrl-C twice) interrupts at once. Data workers must ignore SIGINT themselves, because a terminal
    sends it to them as well.

    Args:
        deferring: whether there is something to save. If not, a signal raises `Interrupted` at once, and ends the
            process with its code if the main thread does not respond within SETUP_GRACE.
        broadcast: called once, from the thread, with the signal's name, to pass it to the other ranks.
        on_exit: called before the thread ends the process; None where the process is not ended, as it is not ours.
        announce: print a line at the first signal.
        ending: what that line says the process does, where it does not defer.

    Attributes:
        received: name of the first signal on any rank; None before.
    """

    def __init__(
        self,
        *,
        deferring: bool = True,
        broadcast: Callable[[str], object] = lambda name: None,
        on_exit: Callable[[], object] | None = lambda: None,
        announce: bool = False,
        ending: str = "stopping before the first step",
    ) -> None:
        self.received: str | None = None
        self.deferring = deferring
        self._broadcast, self._on_exit, self._announce, self._ending = broadcast, on_exit, announce, ending
        self._before: dict[signal.Signals, Any] = {}
        self._noted = self._installed = False
        self._over, self._announced = threading.Event(), threading.Event()

    def is_stopping(self) -> bool:
        """Whether some rank was asked to stop."""
        return self.received is not None

    def __enter__(self) -> StopSignals:
        self._installed = threading.current_thread() is threading.main_thread()
        if not self._installed:
            return self
        self._listening = listening(self._hear)
        self._listening.__enter__()
        some = SIGNALS[:-1] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else SIGNALS
        self._before = {number: signal.signal(number, self._handle) for number in some}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if not self._installed:
            return
        self._listening.__exit__(None, None, None)
        for number, handler in self._before.items():
            # After a failure the launcher's SIGTERM still has to find a process that ends with its own code.
            if error is None or number != signal.SIGTERM:
                signal.signal(number, handler)

    def name(self, seconds: float = 10.0) -> str:
        """The name of the signal, for messages; waits for it, as ranks agree on a stop before its name arrives."""
        if self.received is None:
            self._announced.wait(seconds)
        return self.received or "a signal to another rank"

    def receive(self, name: str) -> None:
        """Record that another rank was asked to stop; from any thread."""
        if not self._noted:
            self._note(name)
            if not self.deferring and self._installed:  # the handler raises in the main thread
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def _hear(self, number: int) -> None:
        """In the thread."""
        if number in SIGNALS and not self._noted:
            name = signal.Signals(number).name
            self._note(name)
            self._broadcast(name)

    def _note(self, name: str) -> None:
        self._noted, self.received = True, self.received or name
        if self._announce:
            what = "saving the last completed step" if self.deferring else self._ending
            with contextlib.suppress(OSError):
                os.write(2, f"{name}: {what}\n".encode())
        self._announced.set()
        if not self.deferring and (on_exit := self._on_exit) is not None:

            def end() -> None:
                if not self._over.is_set() and not self.deferring:
                    on_exit()
                    os._exit(Stopped.exit_code)

            timer = threading.Timer(SETUP_GRACE, end)
            timer.daemon = True
            timer.start()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if not self.deferring:
            self._announced.wait(1)  # so that the line of the thread is printed first
            raise Interrupted

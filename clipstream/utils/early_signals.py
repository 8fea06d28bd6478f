"""Signals before and after a verb's work: one line and an exit code, no traceback.

`guard` is called when the package is imported, before imports that take seconds (torch). It does nothing in a process
that is not a command of this package, and never raises.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

INTERRUPTED = 130  # exit code of Ctrl-C, as shells have it
BEFORE_TRAINING = "stopped by {} before the first step: start the same command again"

_started: str | None = None  # the verb
_training = False
_guarded: list[signal.Signals] = []  # empty where the process is not a command of ours
_code, _line = INTERRUPTED, "interrupted"
_listening = False
# A forked child must not report its signals to the parent's thread.
os.register_at_fork(after_in_child=lambda: _listening and signal.set_wakeup_fd(-1))


def guard() -> None:
    """Let a signal end the process at once: SIGINT, and in training SIGTERM and SIGUSR1."""
    global _training, _started
    verb = _started = _verb()
    if verb is None or _guarded:
        return
    if verb == "train":
        _training = True
        expect(os.EX_TEMPFAIL, BEFORE_TRAINING)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1) if _training else (signal.SIGINT,):
        # A signal that the parent process ignores stays ignored.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end)
            _guarded.append(number)


def expect(code: int, line: str = "") -> None:
    """Set the exit code and the line of a process that a signal ends; `{}` in the line is the signal's name."""
    global _code, _line
    _code, _line = code, line


def begin() -> None:
    """Let Ctrl-C raise KeyboardInterrupt in a verb, so that it can clean up, and SIGTERM SystemExit in those that write
    files by themselves. Training handles signals itself.
    """
    if signal.SIGINT in _guarded and not _training:  # a shell's background jobs ignore it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _started in ("bench", "export", "search") and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _stop)


def end(code: int) -> None:
    """Let a signal end the process silently with the verb's exit code, once the verb has finished.

    SIGUSR1, which asks for a save, is ignored: see `leave`.
    """
    expect(code)
    for number in {*_guarded, signal.SIGTERM} if _guarded else ():
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_IGN if number == signal.SIGUSR1 else _end)


def leave() -> None:
    """Ignore SIGTERM from here on: a launcher sends it once another rank has ended, and the process ends by itself.

    Python gives other handlers up when it finalizes, so that a signal would change the exit code.
    """
    if _guarded:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


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
def watched() -> Iterator[None]:
    """Let signals end the process also while native code blocks the main thread, as torch's rendezvous does."""
    if not _guarded:
        yield
        return
    with listening(lambda number: _end(number, None) if number in _guarded else None):
        yield


def _verb() -> str | None:
    """The verb of `python -m clipstream.VERB …` or `clipstream VERB …`; None in any other process."""
    before = len(sys.orig_argv) - len(sys.argv)
    # A process of a pool has its parent's arguments in sys.argv, but is not a command.
    if not sys.argv or before < 0 or sys.orig_argv[before + 1 :] != sys.argv[1:]:
        return None
    word = sys.orig_argv[before]  # the module or the script, after Python's own options
    if sys.argv[:1] == ["-m"] and word.startswith("clipstream."):  # sys.argv while the package is imported
        return word.removeprefix("clipstream.")
    return " ".join(sys.argv[1:2]) if os.path.basename(word) == "clipstream" else None


def _stop(number: int, frame: FrameType | None) -> None:
    print("stopped by SIGTERM", file=sys.stderr, flush=True)
    raise SystemExit(128 + number)


def _end(number: int, frame: FrameType | None) -> None:
    global _line
    line, _line = _line, ""  # the main thread and the one of `listening` may both come here
    first = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    if line and first:
        with contextlib.suppress(OSError):
            os.write(2, f"{line.format(signal.Signals(number).name)}\n".encode())
    os._exit(_code)

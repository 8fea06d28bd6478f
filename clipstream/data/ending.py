"""Owns the end of a child process: at once at its parent's word, and with its parent, whatever ends that.

What the child had begun is undone on the way (`Ended` goes through its `finally` blocks); a clean-up that hangs is cut
short.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from multiprocessing.process import BaseProcess

_PR_SET_PDEATHSIG = 1
END = signal.SIGUSR2
_LAST_SECONDS = 2  # for a child to clean up


class Ended(BaseException):
    """Raised in a child wherever it is, when it is to end."""


def listen() -> None:
    """To be called in the child: `END` raises `Ended`, and the parent alone answers signals that end a whole run."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(END, _raise)


def end_with(parent: int) -> None:
    """To be called in the child: have `END` sent to it when the process `parent` dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, END)
        if os.getppid() != parent:
            raise Ended  # it died before the request was in force
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def end(process: BaseProcess, patience: float = 0.0) -> None:
    """To be called in the parent: end the child, which may end by itself within `patience` seconds; wait for it."""
    process.join(timeout=patience)
    if process.is_alive() and process.pid is not None:
        os.kill(process.pid, END)
        process.join(timeout=_LAST_SECONDS + 1)
    if process.is_alive():
        process.kill()
        process.join()


def _raise(*_: object) -> None:
    signal.signal(END, signal.SIG_IGN)
    signal.alarm(_LAST_SECONDS)  # whose default is death, should the cleaning hang
    raise Ended


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), END)

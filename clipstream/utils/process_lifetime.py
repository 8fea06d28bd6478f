"""The end of a child process: on its parent's request, and whenever the parent dies.

`Ended` runs the child's `finally` blocks; a clean-up that hangs is cut short.
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
    """Raised in a child, at any place, to end it."""


def listen() -> None:
    """In the child: let `END` raise `Ended`, and leave signals that end a whole run to the parent."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(END, _raise)


def end_with(parent: int) -> None:
    """In the child: request `END` for the time when the process `parent` dies.

    Raises:
        Ended: it has died already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, END)
        if os.getppid() != parent:
            raise Ended  # it died before the request took effect
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def end(process: BaseProcess, patience: float = 0.0) -> None:
    """In the parent: end the child unless it ends by itself within `patience` seconds, and wait for it."""
    process.join(timeout=patience)
    if process.is_alive() and process.pid is not None:
        os.kill(process.pid, END)
        process.join(timeout=_LAST_SECONDS + 1)
    if process.is_alive():
        process.kill()
        process.join()


def _raise(*_: object) -> None:
    signal.signal(END, signal.SIG_IGN)
    signal.alarm(_LAST_SECONDS)  # kills the process if the clean-up hangs
    raise Ended


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), END)

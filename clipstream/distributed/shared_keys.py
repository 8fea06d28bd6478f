"""Keys that all ranks read and write, kept twice: in the rendezvous store, and in a spare one on another host.

Each operation has a time limit, and one host may vanish, whichever it is.

Torch opens the sockets of a process group and of a store, and does not tell them: `open_sockets` finds them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

ANSWER = 5.0  # s for one operation of a store; without an answer, the store is left until the answer arrives
WAITS = 15.0  # s at most for a key that another rank sets
_HOST, _SPARE = "clipstream/host/{}", "clipstream/spare"


class SharedKeys:
    """Writes go to every store that answers; a read takes the newest value of all.

    All operations raise RuntimeError if no store answers.

    Args:
        store: torch's store of the process group.

    Attributes:
        hosts: the name of each rank's host; empty if some rank did not send it.
        server: the spare store, on the rank that holds it.
    """

    def __init__(self, store: Any) -> None:
        self.hosts: list[str] = []
        self.server: Any = None
        self._makes: list[Callable[[], Any]] = [store.clone if hasattr(store, "clone") else lambda: store]
        self._lock = threading.RLock()
        self._address = ""  # of this rank, towards the first store
        self._stores = {0: self._connect(0)}  # those that answer; a connection without a socket is not a TCPStore's
        self._late: dict[int, tuple[Any, Socket | None]] = {}

    def meet(self, rank: int, size: int) -> None:
        """Exchange the names of the hosts, and connect to the spare store; all ranks call this."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        first, limit = self._stores[0][0], timedelta(seconds=ANSWER)
        first.set(_HOST.format(rank), socket.gethostname())
        with contextlib.suppress(RuntimeError):  # a rank died here, or no other port of its host can be reached
            self.hosts = [name.decode() for name in first.multi_get([_HOST.format(other) for other in range(size)])]
            # The last rank that is not on the host of rank 0; else the last one.
            if rank == max(range(size), key=lambda other: (self.hosts[other] != self.hosts[0], other)):
                self.server = TCPStore(self._address, 0, is_master=True, wait_for_workers=False, timeout=limit)
                first.set(_SPARE, f"{self._address} {self.server.port}")
            address, port = first.get(_SPARE).decode().split()
            self._makes.append(lambda: TCPStore(address, int(port), wait_for_workers=False, timeout=limit))
            self._stores[1] = self._connect(1)

    @property
    def spare(self) -> bool:
        """Whether the spare store has to be used, because the first one does not answer."""
        return 0 not in self._stores

    def settle(self) -> None:
        """Use only the first store that answers from now on, so that the host of the other one may end."""
        with self._lock:
            self._stores, self._late = dict(sorted(self._stores.items())[:1]), {}

    def connect(self, number: int) -> Any:
        """A new connection to the first (0) or the spare store (1). Raises RuntimeError: it cannot be reached."""
        return self._connect(number)[0]

    def _connect(self, number: int) -> tuple[Any, Socket | None]:
        before = open_sockets()
        store = self._makes[number]()
        store.set_timeout(timedelta(seconds=WAITS))
        base, mine = store, None
        while hasattr(base, "underlying_store"):
            base = base.underlying_store
        for file in open_sockets() - before:
            with contextlib.suppress(OSError), file.duplicate() as connection:
                if connection.getpeername()[1] == base.port:
                    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(ANSWER), 0))
                    mine, self._address = file, connection.getsockname()[0].removeprefix("::ffff:")
        return store, mine

    def _each(self, operation: Callable[[Any], Any]) -> list[Any]:
        error: Exception | None = None
        end = time.monotonic() + 2 * ANSWER
        with self._lock:
            while time.monotonic() < end and (self._stores or self._late):
                found = []
                for number, (store, connection) in sorted({**self._stores, **self._late}.items()):
                    try:
                        # Without this look, torch would print a stack where the host of a store has ended.
                        arrived = connection.drain() if connection is not None else 0
                        if number in self._late:
                            if not arrived:
                                continue
                            self._stores[number] = self._late.pop(number)
                        found.append(operation(store))
                    except (OSError, RuntimeError) as failure:
                        error = failure
                        lost = self._stores.pop(number, None) or self._late.pop(number)
                        if "imeout" in str(error):
                            self._late[number] = lost
                if found:
                    return found
                time.sleep(0.1)
        raise RuntimeError(f"no store of the ranks answers ({error})")

    def add(self, key: str, number: int) -> int:
        """Add to the integer of a key, 0 at first; return the sum."""
        added: int = max(self._each(lambda store: store.add(key, number)))
        return added

    def set(self, key: str, text: str) -> None:
        self._each(lambda store: store.set(key, text))

    def get(self, keys: Sequence[str]) -> list[str]:
        """The newest text of each key, which is the longest and then the greatest one; '' where there is none."""

        def texts(store: Any) -> list[bytes]:
            if store.check(keys):
                found: list[bytes] = store.multi_get(keys)
                return found
            return [store.get(key) if store.check([key]) else b"" for key in keys]

        found = zip(*self._each(texts), strict=True)
        return [max(of_stores, key=lambda text: (len(text), text)).decode() for of_stores in found]

    def agree(self, key: str, text: str) -> str:
        """Set the text of a key that has none; return what all ranks take, which is the last store's."""

        def put(store: Any) -> str:
            nonlocal text
            text = store.compare_set(key, "", text).decode()
            return text

        agreed: str = self._each(put)[-1]
        return agreed


@dataclass(frozen=True)
class Socket:
    """An open socket of this process: its file descriptor, and the inode, which tells whether it still is the one."""

    number: int
    inode: int

    def duplicate(self) -> socket.socket:
        """The socket, by a descriptor of its own. Raises OSError: it is closed."""
        copy = os.dup(self.number)
        if os.fstat(copy).st_ino != self.inode:
            os.close(copy)
            raise OSError("another file has its number")
        return socket.socket(fileno=copy)

    def drain(self) -> int:
        """Read and drop what has arrived; return the number of bytes. Raises OSError: the connection is closed."""
        size = 0
        with self.duplicate() as connection, contextlib.suppress(BlockingIOError):
            while arrived := connection.recv(1 << 16, socket.MSG_DONTWAIT):
                size += len(arrived)
            raise ConnectionResetError("the host of a store has ended")
        return size


def open_sockets() -> set[Socket]:
    """The sockets that this process has open."""
    found = set()
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add(Socket(int(name), status.st_ino))
    return found


def connections_since(before: set[Socket]) -> set[Socket]:
    """The sockets opened since, without those that a server of before has accepted, such as a store's."""
    served = {_port(file, of_server=True) for file in before} - {None}
    return {file for file in open_sockets() - before if _port(file) not in served}


def _port(file: Socket, *, of_server: bool = False) -> int | None:
    """That of this side; None of a socket without ports or a closed one, or where a server is wanted."""
    with contextlib.suppress(OSError), file.duplicate() as connection:
        if of_server <= bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)):
            name = connection.getsockname()
            return int(name[1]) if isinstance(name, tuple) else None
    return None

"""Keys that all ranks read and write, kept twice: in the rendezvous store, and in a spare one on another host.

Each operation has a time limit, and one host may vanish, whichever it is.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from clipstream.distributed.sockets import Socket, open_sockets

ANSWER = 5.0  # s for one operation of a store; a longer one costs its connection
WAITS = 15.0  # s at most for a key that another rank sets
_HOST, _SPARE = "clipstream/host/{}", "clipstream/spare"


class SharedKeys:
    """Writes go to every store that answers; a read takes the newest value of all.

    A store whose connection times out is left, and used again once a new connection stands (made in a thread: the
    constructor of torch's TCPStore waits for a stopped process without limit, torch 2.15).

    Args:
        store: torch's store of the process group.

    Attributes:
        hosts: the name of each rank's host; empty if some rank did not send it.
    """

    def __init__(self, store: Any) -> None:
        self.hosts: list[str] = []
        self._makes: list[Callable[[], Any]] = [store.clone if hasattr(store, "clone") else lambda: store]
        self._stores: dict[int, Any] = {}
        self._sockets: dict[int, Socket | None] = {}
        self._address = ""  # of this rank, towards the first store
        self._lock = threading.RLock()
        self._error: RuntimeError | None = None  # the last one
        self._until = 0.0  # when a new connection that is being made counts as failed
        self.server: Any = None  # the spare store, on the rank that holds it
        self._add_store(0)

    def meet(self, rank: int, size: int) -> None:
        """Exchange the names of the hosts, and connect to the spare store; all ranks call this."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        first = self._stores[0]
        first.set(_HOST.format(rank), socket.gethostname())
        with contextlib.suppress(RuntimeError):  # a rank died here, or the store has no network
            self.hosts = [name.decode() for name in first.multi_get([_HOST.format(other) for other in range(size)])]
            # The last rank that is not on the host of rank 0; else the last one.
            host = max(range(size), key=lambda other: (self.hosts[other] != self.hosts[0], other))
            limit = timedelta(seconds=ANSWER)
            if rank == host:
                self.server = TCPStore(self._address, 0, is_master=True, wait_for_workers=False, timeout=limit)
                first.set(_SPARE, f"{self._address} {self.server.port}")
            address, port = first.get(_SPARE).decode().split()
            self._makes.append(lambda: TCPStore(address, int(port), wait_for_workers=False, timeout=limit))
            self._reconnect(1).join(ANSWER)

    def settle(self) -> None:
        """Use only the first store that answers from now on, so that the host of the other one may end."""
        with self._lock:
            self._stores = dict(sorted(self._stores.items())[:1])

    @property
    def spare(self) -> bool:
        """Whether the spare store has to be used, because the first one does not answer."""
        return 0 not in self._stores

    def connect(self, number: int) -> tuple[Any, Socket | None]:
        """A new connection to the first (0) or the spare store (1), with limits of time, and its socket.

        Raises RuntimeError: the store does not answer.
        """
        before = open_sockets()
        store = self._makes[number]()
        store.set_timeout(timedelta(seconds=WAITS))
        base = store
        while hasattr(base, "underlying_store"):
            base = base.underlying_store
        mine = None
        for file in open_sockets() - before:
            with contextlib.suppress(OSError), file.opened() as connection:
                if connection.getpeername()[1] == base.port:
                    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(ANSWER), 0))
                    mine, self._address = file, connection.getsockname()[0].removeprefix("::ffff:")
        return store, mine

    def _add_store(self, number: int) -> None:
        self._stores[number], self._sockets[number] = self.connect(number)

    def _reconnect(self, number: int) -> threading.Thread:
        def make() -> None:
            with contextlib.suppress(RuntimeError):
                self._add_store(number)

        self._until = time.monotonic() + 2 * ANSWER
        thread = threading.Thread(target=make, name="store", daemon=True)
        thread.start()
        return thread

    def _each(self, operation: Callable[[Any], Any]) -> list[Any]:
        with self._lock:
            while True:
                found = []
                for number, store in sorted(self._stores.items()):
                    try:
                        if (ours := self._sockets[number]) is not None and ours.ended():  # else torch prints a stack
                            raise RuntimeError("the host of a store has ended")
                        found.append(operation(store))
                    except RuntimeError as error:
                        self._error = error
                        del self._stores[number]
                        if "imeout" in str(error):
                            self._reconnect(number)
                if found:
                    return found
                if time.monotonic() > self._until:
                    raise RuntimeError(f"no store of the ranks answers ({self._error})")
                time.sleep(0.1)

    def add(self, key: str, number: int) -> int:
        """Add to the integer of a key, 0 at first; return the sum. Raises RuntimeError, as all: no store answers."""
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

"""Which sockets this process has open: torch opens those of a process group and of a store, and does not tell them."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from dataclasses import dataclass


@dataclass(frozen=True)
class Socket:
    """An open socket of this process: its file descriptor, and the inode, which tells whether it still is the one."""

    number: int
    inode: int

    def opened(self) -> socket.socket:
        """The socket, by a descriptor of its own. Raises OSError: it is closed."""
        copy = os.dup(self.number)
        if os.fstat(copy).st_ino != self.inode:
            os.close(copy)
            raise OSError("another file has its number")
        return socket.socket(fileno=copy)

    def drain(self) -> int:
        """Read and drop what has arrived; return the number of bytes. Raises OSError: the connection is closed."""
        size = 0
        with self.opened() as connection, contextlib.suppress(BlockingIOError):
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
    with contextlib.suppress(OSError), file.opened() as connection:
        if of_server <= bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)):
            name = connection.getsockname()
            return int(name[1]) if isinstance(name, tuple) else None
    return None

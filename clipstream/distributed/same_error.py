"""An error that all ranks have before they are connected is printed by rank 0 alone.

An error's text enters on each rank that has one; a call on those that have to print it leaves. Wrong settings are found
before torch is imported, so the ranks use plain sockets: rank 0 prints its error and sends a hash of it to all who ask.
Another rank asks for it for WAIT seconds, and prints its own error unless it is the same.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress

from clipstream.distributed.world import ERROR, FIRST_PORT, PORTS, TRIED, World, answers, listen

WAIT = 10.0  # s that rank 0 waits for the other ranks, and they for rank 0


def tell_once(world: World, text: str, tell: Callable[[], object]) -> None:
    """Call `tell` on rank 0, and on another rank unless rank 0 has the same `text`.

    Every rank with an error calls this, and ends afterwards. Ranks that have the same error leave this together, so
    that a launcher, which ends all ranks after the first one, changes the exit code of none. A rank that does not reach
    rank 0 in WAIT seconds calls `tell`; without MASTER_ADDR, which tells where rank 0 is, each rank does at once.
    """
    host, _, port = world.rendezvous.rpartition(":")
    if host == "?":
        tell()
        return
    name = ERROR.format(world.step)
    if world.step:
        first = int(port)
    else:  # the port of the rendezvous is the launcher's own
        run = hashlib.sha256(f"{host} {port} {os.environ.get('TORCHELASTIC_RUN_ID')}".encode()).hexdigest()
        name, first = ERROR.format(run[:16]), FIRST_PORT + int(run[16:24], 16) % PORTS
    ports = range(first, first + TRIED)
    found = hashlib.sha256(text.encode()).hexdigest()[:32]
    if world.is_main:
        tell()
        _answer(ports, f"{name} {found}", world.size - 1)
    else:
        _compare(world, host, ports, name, found, tell)


def _answer(ports: Sequence[int], text: str, count: int) -> None:
    """Send `text` to all who connect, until `count` ranks have confirmed it; for WAIT seconds at most."""
    listener = listen(ports)
    if listener is None:
        return
    end, confirmed = time.monotonic() + WAIT, threading.Semaphore(0)

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection = listener.accept()[0]
                held.append(connection)
                threading.Thread(target=send, args=[connection], daemon=True).start()

    def send(connection: socket.socket) -> None:
        with suppress(OSError):
            connection.settimeout(WAIT)
            connection.sendall(text.encode())
            if connection.recv(1):
                confirmed.release()

    held: list[socket.socket] = []
    threading.Thread(target=serve, daemon=True).start()
    for _ in range(count):
        if not confirmed.acquire(timeout=max(0.0, end - time.monotonic())):
            break
    for one in (listener, *held):
        one.close()


def _compare(world: World, host: str, ports: Sequence[int], name: str, found: str, tell: Callable[[], object]) -> None:
    """Call `tell` unless rank 0 has the same error; in that case, return once rank 0 ends."""
    with closing(answers(host, ports, WAIT)) as every:
        for connection, text in every:
            who, _, theirs = text.partition(" ")
            if world.step and who == world.step:  # rank 0 has no error
                break
            if who == name:
                if theirs != found:
                    tell()  # before rank 0 ends, and a launcher this rank
                with suppress(OSError):
                    connection.sendall(b"1")
                    connection.settimeout(WAIT)
                    if theirs == found:
                        connection.recv(1)  # nothing comes: until rank 0 closes the connection
                return
    tell()

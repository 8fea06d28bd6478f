"""Which sockets of this process count as connections of a process group."""

from __future__ import annotations

import contextlib
import socket

from clipstream.distributed.shared_keys import connections_since, open_sockets


def test_connections_that_a_server_of_before_accepts_are_not_those_of_a_group() -> None:
    """Where rank 0 hosts the store, other ranks connect to it while rank 0 still makes its group."""
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        before = open_sockets()
        client = stack.enter_context(socket.create_connection(store.getsockname()))
        accepted, _ = store.accept()
        stack.enter_context(accepted)
        group = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        pair = stack.enter_context(socket.create_connection(group.getsockname()))
        joined, _ = group.accept()
        stack.enter_context(joined)
        found = {file.number for file in connections_since(before)}
        assert accepted.fileno() not in found
        assert {one.fileno() for one in (client, pair, joined)} <= found

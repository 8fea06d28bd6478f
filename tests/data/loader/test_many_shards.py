"""Thousands of shards: none is opened needlessly, and the memory of workers does not grow."""

from __future__ import annotations

import contextlib
import functools
import http.server
import statistics
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clipstream.data.loader.loader import Loader
from clipstream.data.settings import DataSettings
from tests.support.loaders import data, loader
from tests.support.pictures import picture
from tests.support.tars import tar_bytes
from tests.support.watched import private_bytes

MIB = 1 << 20


class Many(http.server.BaseHTTPRequestHandler):
    """Gives one and the same small shard under as many names as are asked for, and notes the names."""

    def __init__(self, body: bytes, asked: Counter[str], *args: object) -> None:
        self.body, self.asked = body, asked
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self.asked[f"{self.command} {self.path}"] += 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(self.body)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def serving(handler: Any) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def many() -> Iterator[tuple[str, Counter[str]]]:
    body = tar_bytes([{"__key__": f"{i}", "jpg": picture(i), "txt": "x"} for i in range(20)])
    asked: Counter[str] = Counter()
    with serving(functools.partial(Many, body, asked)) as root:
        yield root, asked


def settings(shards: str | list[str], **changes: Any) -> DataSettings:
    return data(shards, **{"workers": 2, "lanes": 8, "global_batch_size": 64, **changes})


@pytest.mark.parametrize("mode", ["resampled", "epoch"])
def test_a_run_of_10000_shards_asks_for_those_it_needs(
    many: tuple[str, Counter[str]], tmp_path: Path, mode: str
) -> None:
    root, asked = many
    with loader(settings(f"{root}/{{00000..09999}}.tar", sampling={"mode": mode}, cache=str(tmp_path))) as stream:
        next(stream)
        # A lane holds two shards, and two more may be on their way.
        assert len(asked) <= 2 * 8 * 2 * 2, "a GET and a HEAD each"
        assert len(stream.health.sources["train"].shards) <= 8 * 2 * 2


def grown(stream: Loader, batches: int) -> int:
    """Bytes by which the workers' own memory grows over some batches."""
    before = [private_bytes(pid) for pid in stream.worker_pids()]
    for _ in range(batches):
        next(stream)
    return max(private_bytes(pid) - first for pid, first in zip(stream.worker_pids(), before, strict=True))


def test_workers_take_no_more_memory_for_10000_shards_than_for_100(many: tuple[str, Counter[str]]) -> None:
    root, _ = many
    sizes = []
    for count in (100, 10_000):
        with loader(settings(f"{root}/{{00000..{count - 1:05d}}}.tar")) as stream:
            for _ in range(30):
                next(stream)
            assert grown(stream, 30) < 3 * MIB
            sizes.append(statistics.mean(private_bytes(pid) for pid in stream.worker_pids()))
    assert sizes[1] - sizes[0] < 8 * MIB, sizes

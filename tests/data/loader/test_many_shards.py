"""Thousands of shards: none is opened needlessly, and the memory of workers does not grow."""

from __future__ import annotations

import contextlib
import functools
import http.server
import random
import statistics
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from clipstream.data.loader.loader import Loader
from clipstream.data.settings import DataSettings
from tests.support.broken import COUNT, broken_shards
from tests.support.loaders import data, loader
from tests.support.pictures import picture
from tests.support.tars import tar_bytes
from tests.support.watched import children, descriptors, private_bytes

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


SOAK = 1000  # shards


class Sizes(NamedTuple):
    """The most that a worker takes."""

    memory: int
    files: int
    children: int

    @classmethod
    def of(cls, pids: list[int]) -> Sizes:
        return cls(*(max(map(ask, pids)) for ask in (private_bytes, descriptors, children)))


class Folder(http.server.SimpleHTTPRequestHandler):
    """Serves a folder."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def soak_shards(folder: Path, root: str) -> tuple[list[str], int, Counter[str]]:
    """1,000 shards, a third each local, by http and by pipe, ten of them broken; samples that are whole; faults."""
    folder.mkdir()
    names, whole, faults = [], 0, Counter[str]()
    draws = random.Random(5)
    kinds = dict.fromkeys(draws.sample(range(SOAK), SOAK // 100))
    wrong = [kind for kind in broken_shards([_sample(0, i) for i in range(COUNT)]) if "zip" not in kind]
    kinds = dict(zip(kinds, draws.sample(wrong, len(kinds)), strict=True))
    for number in range(SOAK):
        samples = [_sample(number, i) for i in range(COUNT)]
        path = folder / f"{number:04d}.tar"
        body: bytes | None = tar_bytes(samples)
        if number in kinds:
            broken = broken_shards(samples)[kinds[number]]
            body = broken.data
            whole += len(broken.whole)
            absent = ["missing", "http_404", "pipe_failed"][number % 3]
            faults[absent if body is None else broken.reason] += 1
        else:
            whole += COUNT
        if body is not None:
            path.write_bytes(body)
        names.append([str(path), f"{root}/{path.name}", f"pipe:cat '{path}'"][number % 3])
    return names, whole, faults


def _sample(shard: int, number: int) -> dict[str, Any]:
    return {"__key__": f"{shard:04d}-{number}", "jpg": picture(number), "txt": "x"}


@pytest.mark.slow
@pytest.mark.usefixtures("commands")
def test_a_soak_of_1000_shards(tmp_path: Path) -> None:
    with serving(functools.partial(Folder, directory=str(tmp_path / "shards"))) as root:
        names, whole, faults = soak_shards(tmp_path / "shards", root)
        epochs = settings(names, sampling={"mode": "epoch"}, prefetch=1, shuffle={"window": 10, "shards": 2})
        seen: Counter[str] = Counter()
        passes: list[list[Sizes]] = []
        with loader(epochs) as stream:
            handed = 0
            for number in (1, 2):
                passes.append([])
                while handed < number * whole:
                    batch = next(stream)
                    handed += len(batch)
                    seen.update(batch.keys)
                    passes[-1].append(Sizes.of(stream.worker_pids()))
            counts = stream.health.summary()["train"]
    assert len(seen) == whole and counts["shards"] == SOAK
    assert Counter(counts["fault_reasons"]) == faults
    assert counts["read"] == counts["used"] == handed, "the counts are those of what was handed out"
    first, second = passes
    assert second[-1].memory - first[-1].memory < 2 * MIB
    assert max(s.files for s in second) <= max(s.files for s in first) + 2
    assert max(s.children for s in second) <= 2, "one that is fetched, and one that is fetched ahead"

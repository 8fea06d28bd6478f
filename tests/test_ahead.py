"""Remote shards come ahead of use, broken ones may end a run: the loader with a server and commands behind it."""

from __future__ import annotations

import functools
import http.server
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clipstream.errors import DataError
from tests.pictures import make_shards
from tests.ranks import command_runs
from tests.test_loader import data, digest, digests, loader


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return make_shards(tmp_path_factory.mktemp("shards"), [13, 7, 20, 1, 16, 9])


class Folder(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, and notes what was asked for."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def served(shards: list[str]) -> Iterator[tuple[list[str], list[str]]]:
    """The shards behind a server on loopback, and its list of what was asked for."""
    handler = type("Asked", (Folder,), {"asked": []})
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=str(Path(shards[0]).parent))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield [f"http://127.0.0.1:{server.server_port}/{Path(shard).name}" for shard in shards], handler.asked
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_broken_shard_may_end_the_run(shards: list[str], tmp_path: Path, workers: int) -> None:
    broken = tmp_path / "cut.tar"
    broken.write_bytes(Path(shards[2]).read_bytes()[:9000])
    settings = data([*shards, str(broken)], workers=workers, on_shard_error="raise")
    with (
        pytest.raises(DataError, match=rf"on-shard-error raise.*\n.*{broken}: truncated_member"),
        loader(settings) as stream,
    ):
        for _ in range(60):
            next(stream)


def test_remote_shards_are_fetched_before_they_are_needed(
    shards: list[str], served: tuple[list[str], list[str]]
) -> None:
    urls, asked = served
    changes: dict[str, Any] = {"lanes": 1, "global_batch_size": 2, "shuffle": {"window": 100, "shards": 1}}
    changes |= {"sampling": {"mode": "epoch"}, "workers": 1, "prefetch": 1}
    kept = [0, 2, 4, 5]  # whose samples last for some batches
    expected = digests(data([shards[i] for i in kept], **changes), 1, 60)
    with loader(data([urls[i] for i in kept], **changes)) as stream:
        folder = stream.plan.on_close.__self__.folder  # type: ignore[attr-defined]
        found = [digest([next(stream)])]
        end = time.monotonic() + 30
        while len(asked) < 2:
            assert time.monotonic() < end, "the next group is not fetched while this one lasts"
            time.sleep(0.02)
        found += [digest([next(stream)]) for _ in range(59)]
        assert len(list(folder.glob("*.tar"))) <= 2, "a shard goes with its last lane"
    assert found == expected


@pytest.mark.usefixtures("commands")
def test_a_command_that_fetches_ahead_ends_with_its_worker(shards: list[str], tmp_path: Path) -> None:
    seconds = f"3600.{os.getpid()}"
    slow = f"pipe:cat {shards[0]}; test -e {tmp_path}/first && sleep {seconds}; touch {tmp_path}/first"
    changes: dict[str, Any] = {
        "lanes": 1,
        "global_batch_size": 2,
        "shuffle": {"window": 100, "shards": 1},
        "workers": 1,
    }
    with loader(data([slow, f"{slow}; true"], sampling={"mode": "epoch"}, **changes)) as stream:
        next(stream)
        end = time.monotonic() + 30
        while not command_runs(seconds):
            assert time.monotonic() < end, "nothing is fetched ahead"
            time.sleep(0.05)
    end = time.monotonic() + 10
    while command_runs(seconds):
        assert time.monotonic() < end, "the command outlives its worker"
        time.sleep(0.05)

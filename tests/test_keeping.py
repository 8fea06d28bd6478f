"""A folder of kept shards: versions, damage, the size limit, several processes; behind a real server."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import http.server
import multiprocessing
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from clipstream.data.remote import ShardError, ShardStore
from clipstream.errors import SettingsError
from tests.ranks import TIMEOUT

SIZE = 40_000
FORK = multiprocessing.get_context("fork")


class Versions(http.server.BaseHTTPRequestHandler):
    """Serves bytes by path, with an ETag; counts what was asked for."""

    def __init__(self, bodies: dict[str, bytes], asked: Counter[str], *args: object) -> None:
        self.bodies, self.asked = bodies, asked
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self.asked[f"{self.command} {self.path}"] += 1
        body = self.bodies[self.path]
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Site:
    """A running server."""

    def __init__(self) -> None:
        self.bodies: dict[str, bytes] = {}
        self.asked: Counter[str] = Counter()
        handler = functools.partial(Versions, self.bodies, self.asked)
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def put(self, name: str, body: bytes) -> str:
        """Serve bytes under a name; its URL."""
        self.bodies[f"/{name}"] = body
        return f"http://127.0.0.1:{self.server.server_port}/{name}"

    def close(self) -> None:
        """Stop."""
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def site() -> Iterator[Site]:
    running = Site()
    yield running
    running.close()


def body(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.tar"))


def read(folder: Path, url: str) -> bytes:
    """What a new process of another run would read."""
    store = ShardStore(str(folder), retries=0)
    try:
        return store.local(url).read_bytes()
    finally:
        store.close()


def test_a_kept_shard_is_fetched_again_only_when_it_has_changed(site: Site, tmp_path: Path) -> None:
    url = site.put("0.tar", body(0))
    assert [read(tmp_path, url) for _ in range(3)] == [body(0)] * 3
    assert site.asked["GET /0.tar"] == 1
    site.put("0.tar", body(1))
    assert read(tmp_path, url) == body(1)
    assert site.asked["GET /0.tar"] == 2 and len(entries(tmp_path)) == 1, "the older version went"


def test_without_a_network_what_is_here_is_used(tmp_path: Path) -> None:
    site = Site()
    url, other = site.put("0.tar", body(0)), site.put("1.tar", body(1))
    assert read(tmp_path, url) == body(0)
    site.close()
    assert read(tmp_path, url) == body(0)
    with pytest.raises(ShardError, match="unreachable"):
        read(tmp_path, other)


@pytest.mark.parametrize("damage", ["flip", "cut", "unsealed"])
def test_a_damaged_entry_is_fetched_again(site: Site, tmp_path: Path, damage: str) -> None:
    url = site.put("0.tar", body(0))
    read(tmp_path, url)
    (entry,) = entries(tmp_path)
    if damage == "unsealed":
        Path(f"{entry}.sum").unlink()
    else:
        flipped = bytes([body(0)[0] ^ 1]) + body(0)[1:]
        entry.write_bytes(flipped if damage == "flip" else body(0)[:-1])
    assert read(tmp_path, url) == body(0)
    assert site.asked["GET /0.tar"] == 2


def test_who_was_not_used_for_longest_goes_and_never_one_in_use(site: Site, tmp_path: Path) -> None:
    urls = [site.put(f"{n}.tar", body(n)) for n in range(5)]
    store = ShardStore(str(tmp_path), limit=3 * SIZE)
    for number in (0, 1, 2):
        store.local(urls[number])
        time.sleep(0.02)
    store.release(urls[1])
    store.release(urls[2])
    store.local(urls[3])  # 0 is older than 1, but in use
    kept = {path.name.rsplit("-", 1)[1] for path in entries(tmp_path)}
    assert kept == {"0.tar", "2.tar", "3.tar"}
    store.local(urls[2])
    with pytest.raises(SettingsError, match=r"cache_gib: .* give at least .*shuffle.shards"):
        store.local(urls[4])
    assert len(entries(tmp_path)) == 3 and not list(tmp_path.glob("*.part")) and not list(tmp_path.glob("*.reserved"))
    store.close()


def test_a_limit_that_is_too_small_is_told_at_the_first_shard(site: Site, tmp_path: Path) -> None:
    url = site.put("0.tar", body(0))
    store = ShardStore(str(tmp_path), limit=10 * SIZE, wanted=11)
    with pytest.raises(SettingsError, match=r"data\.cache_gib"):
        store.local(url)
    assert not entries(tmp_path)
    ShardStore(str(tmp_path), limit=11 * SIZE, wanted=11).local(url)


def use_many(folder: Path, urls: list[str], seed: int) -> None:
    """A process that reads shards in an order of its own."""
    store, draw = ShardStore(str(folder), limit=8 * SIZE), random.Random(seed)
    for _ in range(30):
        number = draw.randrange(len(urls))
        assert store.local(urls[number]).read_bytes() == body(number)
        store.release(urls[number])


def test_processes_share_a_folder_within_its_limit(site: Site, tmp_path: Path) -> None:
    urls = [site.put(f"{n}.tar", body(n)) for n in range(16)]
    processes = [FORK.Process(target=use_many, args=(tmp_path, urls, seed)) for seed in range(6)]
    for process in processes:
        process.start()
    most, end = 0, time.monotonic() + TIMEOUT
    while any(process.is_alive() for process in processes):
        assert time.monotonic() < end
        with open(tmp_path / "room.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # or what goes is counted with what comes for it
            total = 0
            for path in [*tmp_path.glob("*.tar"), *tmp_path.glob("*.part")]:
                with contextlib.suppress(FileNotFoundError):  # became a .tar meanwhile
                    total += path.stat().st_size
        most = max(most, total)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 6
    assert 3 * SIZE < most <= 8 * SIZE + 1000, "a draft of a note of checksums may stand beside"


def test_all_processes_get_a_shard_by_one_download(site: Site, tmp_path: Path) -> None:
    urls = [site.put(f"{n}.tar", body(n)) for n in range(4)]
    processes = [FORK.Process(target=read_all, args=(tmp_path, urls)) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT)
    assert [process.exitcode for process in processes] == [0] * 8
    assert [site.asked[f"GET /{n}.tar"] for n in range(4)] == [1] * 4


def read_all(folder: Path, urls: list[str]) -> None:
    for number, url in enumerate(urls):
        assert read(folder, url) == body(number)

"""Remote shards become complete local files, or a ShardError with its reason: real server, commands, processes."""

from __future__ import annotations

import errno
import fcntl
import gzip
import http.server
import importlib
import multiprocessing
import os
import pickle
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import get_ident

import pytest

from clipstream.errors import SettingsError
from clipstream.storage.pipe import end_commands
from clipstream.storage.shard_cache import ShardCache
from clipstream.storage.transfer import ShardError
from tests.support.forks import TIMEOUT, wait_until
from tests.support.ranks import command_ends, reserved_port
from tests.support.stores import BODY, failure, make_store

FORK = multiprocessing.get_context("fork")


class Handler(http.server.BaseHTTPRequestHandler):
    """The path's first part says how the server behaves; requests are counted by path, with their Range."""

    asked: Counter[str]
    ranges: list[str | None]
    gate: threading.Event  # until it is open, some answers wait or stay away

    def do_GET(self) -> None:
        self.asked[self.path if self.command == "GET" else f"HEAD {self.path}"] += 1
        if self.command == "GET":
            self.ranges.append(self.headers["Range"])
        kind, tries = self.path.split("/")[1], self.asked[self.path]
        if kind == "404" or (kind == "flaky" and tries < 3):
            self.send_error(404 if kind == "404" else 503)
        elif kind == "login" and self.headers["Authorization"] != "Basic dTpwIHc=":
            self.send_error(401)
        elif kind == "elsewhere":
            self.send_response(302)
            self.send_header("Location", "nowhere://there/0.tar?token=HIDDEN")
            self.end_headers()
        elif kind == "cut":
            self.answer(BODY, sent=len(BODY) // 2)
        elif kind == "resume":
            start = int(re.findall(r"\d+", self.headers["Range"] or "0")[0])
            self.answer(BODY, start, sent=start + 70_000, ETag='"1"')
        elif kind == "stall":
            self.answer(BODY, sent=5000)
            self.gate.wait(TIMEOUT)
        elif kind in ("nolength", "nolengthcut"):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(BODY if kind == "nolength" else BODY[:50_000])
        elif kind == "slow":
            self.gate.wait(TIMEOUT)
            self.answer(BODY)
        elif kind == "slow404":
            self.gate.wait(TIMEOUT)
            self.send_error(404)
        elif kind == "mute" and self.command == "HEAD":
            self.gate.wait(TIMEOUT)
        else:
            self.answer(gzip.compress(BODY) if kind == "gz" else BODY)

    do_HEAD = do_GET

    def answer(self, body: bytes, start: int = 0, sent: int | None = None, **headers: str) -> None:
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[start:sent])
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    Handler.asked, Handler.ranges, Handler.gate = Counter(), [], threading.Event()
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield httpd
    Handler.gate.set()
    httpd.shutdown()
    httpd.server_close()


@pytest.fixture
def root(server: http.server.ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def reason_of(store: ShardCache, url: str) -> str:
    with pytest.raises(ShardError) as caught:
        store.local(url)
    return caught.value.reason


@pytest.mark.parametrize("kind", ["plain", "flaky", "nolength", "gz", "resume"])
def test_http_gives_the_whole_file(tmp_path: Path, root: str, kind: str) -> None:
    assert make_store(tmp_path).local(f"{root}/{kind}/0.tar").read_bytes() == BODY
    if kind == "resume":
        assert Handler.ranges[0] is None and Handler.ranges[1:] == [
            f"bytes={n}-" for n in range(70_000, len(BODY), 70_000)
        ]


@pytest.mark.parametrize(
    ("kind", "reason", "tries"), [("404", "http_404", 1), ("cut", "truncated_download", 3),
                                  ("nolengthcut", "truncated_download", 3)]
)  # fmt: skip
def test_http_failures(tmp_path: Path, root: str, kind: str, reason: str, tries: int) -> None:
    error = failure(make_store(tmp_path, retries=2), f"{root}/{kind}/0.tar?token=HIDDEN")
    assert error.reason == reason and "HIDDEN" not in str(error)
    assert Handler.asked[f"/{kind}/0.tar?token=HIDDEN"] == tries


def test_a_stalled_body_ends(tmp_path: Path, root: str) -> None:
    assert failure(make_store(tmp_path, retries=0, timeout=0.3), f"{root}/stall/0.tar").reason == "timeout"


def test_a_dead_server_is_unreachable(tmp_path: Path) -> None:
    with reserved_port() as port:  # nobody listens there
        assert failure(make_store(tmp_path, retries=1), f"http://127.0.0.1:{port}/0.tar").reason == "unreachable"


@pytest.mark.parametrize("path", ["a b/0.tar?token=HIDDEN", "elsewhere/0.tar"])
def test_what_python_says_of_a_url_is_not_shown_with_its_secrets(tmp_path: Path, root: str, path: str) -> None:
    error = failure(make_store(tmp_path, retries=0), f"{root}/{path}")
    assert "HIDDEN" not in str(error) and "token=***" in str(error)


def test_who_never_answers_is_asked_once_whether_a_kept_shard_is_the_newest(tmp_path: Path, root: str) -> None:
    urls = [f"{root}/mute/{number}.tar" for number in range(3)]
    Handler.gate.set()  # the first time, it hangs up
    for options in ({}, {"timeout": 0.3}):
        Handler.asked = Counter()
        store = make_store(tmp_path, **options)
        assert [store.local(url).read_bytes() == BODY for url in urls] == [True] * 3
        Handler.gate.clear()
    assert Handler.asked == {"HEAD /mute/0.tar": 1}


def test_what_is_no_url_is_no_crash(tmp_path: Path) -> None:
    assert failure(make_store(tmp_path), "http://[somewhere/0.tar").reason == "unreachable"


def test_a_login_in_the_url_is_sent_and_not_shown(tmp_path: Path, root: str) -> None:
    url = root.replace("http://", "http://u:p%20w@")
    assert make_store(tmp_path).local(f"{url}/login/0.tar").read_bytes() == BODY
    assert "p%20w" not in str(failure(make_store(tmp_path / "b"), f"{url}/404/0.tar"))


def test_equal_names_of_two_folders_are_two_files(tmp_path: Path, root: str) -> None:
    store = make_store(tmp_path)
    first, second = store.local(f"{root}/a/0.tar"), store.local(f"{root}/b/0.tar")
    assert first != second and first.name.endswith("-0.tar")
    assert make_store(tmp_path).local(f"{root}/a/0.tar") == first
    assert Handler.asked["/a/0.tar"] == 1


def test_one_download_for_all_processes(root: str) -> None:
    store = make_store(retries=0)

    def ask(kind: str) -> int:
        try:
            return store.local(f"{root}/{kind}/0.tar").stat().st_size
        except ShardError:
            return -1

    def in_processes(kind: str) -> list[int | None]:
        workers = [FORK.Process(target=lambda: os._exit(0 if ask(kind) == len(BODY) else 9)) for _ in range(4)]
        for worker in workers:
            worker.start()
        wait_until(lambda: bool(Handler.asked))
        Handler.gate.set()
        for worker in workers:
            worker.join()
        return [worker.exitcode for worker in workers]

    assert in_processes("slow") == [0] * 4
    assert Handler.asked["/slow/0.tar"] == 1
    store.close()
    assert not store.folder.exists()


@pytest.mark.parametrize("processes", [1, 2])
def test_who_looked_at_the_same_moment_need_not_wait_for_the_reader_to_end(
    root: str, tmp_path: Path, processes: int
) -> None:
    store, url = make_store(tmp_path), f"{root}/a/0.tar"
    path = store.local(url)
    store.release(url)
    path.unlink()
    stores = [store, store if processes == 1 else pickle.loads(pickle.dumps(store))]
    readers = [threading.Thread(target=each.local, args=(url,), daemon=True) for each in stores]
    with open(f"{path}.lock") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)  # as one who looks too, while the two find nothing and want it alone
        for reader in readers:
            reader.start()
        time.sleep(0.3)
    for reader in readers:
        reader.join(TIMEOUT)
        assert not reader.is_alive(), "it waits for the one that has it, and goes on reading"
    assert path.read_bytes() == BODY and Handler.asked["/a/0.tar"] == 2


def test_those_who_waited_share_the_failure_and_a_later_call_asks_again(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, url = make_store(), f"{root}/slow404/0.tar"
    waiting: set[int] = set()
    lock = ShardCache._lock
    monkeypatch.setattr(ShardCache, "_lock", lambda *given, **more: waiting.add(get_ident()) or lock(*given, **more))

    def later() -> bool:
        """Whether the clock of files, which lags behind, shows that all four have asked."""
        (tmp_path / "now").touch()
        return (tmp_path / "now").stat().st_mtime > asked

    with ThreadPoolExecutor(4) as pool:
        ends = [pool.submit(reason_of, pickle.loads(pickle.dumps(store)), url) for _ in range(4)]
        wait_until(lambda: len(waiting) == 4)
        asked = time.time()
        wait_until(later)
        Handler.gate.set()
        assert [end.result() for end in ends] == ["http_404"] * 4
    assert Handler.asked["/slow404/0.tar"] == 1
    assert reason_of(store, url) == "http_404" and Handler.asked["/slow404/0.tar"] == 2


def test_pipes(tmp_path: Path) -> None:
    source = tmp_path / "a.tar"
    source.write_bytes(BODY)
    store = make_store(tmp_path / "cache")
    assert store.local(f"pipe:cat '{source}'").read_bytes() == BODY
    assert store.local(f"pipe:gzip -c '{source}' | cat").read_bytes() == BODY


@pytest.mark.parametrize(
    "command",
    ["exit 3", "head -c 9000 {}; exit 141", "head -c 9000 {}; exec >&-; sleep 0.1; exit 1", "cat {} {}.gone",
     "false | cat {}"],
)  # fmt: skip
def test_only_exit_status_0_of_a_pipe_counts(tmp_path: Path, command: str) -> None:
    source = tmp_path / "a.tar"
    source.write_bytes(BODY)
    error = failure(make_store(tmp_path / "cache"), "pipe:" + command.replace("{}", f"'{source}'"))
    assert error.reason == "pipe_failed" and "exit status" in error.detail


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc")
def test_a_silent_pipe_is_killed_with_its_children(tmp_path: Path) -> None:
    mark = f"3607.{os.getpid()}"  # a number of seconds that no other process sleeps
    assert failure(make_store(tmp_path / "cache", timeout=1.0), f"pipe:sh -c 'sleep {mark}' & wait").reason == "timeout"
    command_ends(mark)


def test_a_forked_process_leaves_the_commands_of_its_parent_alone(tmp_path: Path) -> None:
    source, runs, gate = (tmp_path / name for name in ("a.tar", "runs", "gate"))
    source.write_bytes(BODY)
    command = f"pipe:touch '{runs}'; until test -e '{gate}'; do sleep 0.05; done; cat '{source}'"
    with ThreadPoolExecutor(1) as pool:
        path = pool.submit(make_store(tmp_path / "cache", timeout=TIMEOUT).local, command)
        wait_until(runs.exists)
        forked = FORK.Process(target=end_commands)
        forked.start()
        forked.join()
        gate.touch()
        assert path.result().read_bytes() == BODY


def test_local_files(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.tar", tmp_path / "a.tar.gz"
    plain.write_bytes(BODY)
    packed.write_bytes(gzip.compress(BODY))
    store = make_store()
    assert store.local(str(plain)) == plain == store.local(plain.as_uri())
    assert store.local(str(packed)).read_bytes() == BODY
    store.release(str(packed))
    assert failure(store, str(tmp_path / "gone.tar")).reason == "missing"
    assert failure(store, str(tmp_path)).reason == "unreadable"
    packed.write_bytes(gzip.compress(BODY)[:-9])
    assert failure(store, str(packed)).reason == "bad_gzip"


def test_a_spool_goes_with_its_last_user(root: str, tmp_path: Path) -> None:
    store, url = make_store(), f"{root}/a/0.tar"
    path = store.local(url)
    assert store.local(url) == path
    store.release(url)
    assert path.exists()
    other: ShardCache = pickle.loads(pickle.dumps(store))
    assert other.local(url) == path
    store.release(url)
    assert path.exists(), "the other one still reads it"
    other.release(url)
    assert not path.exists()
    other.close()
    assert store.folder.exists(), "a copy must not remove the folder"
    kept = make_store(tmp_path)
    path = kept.local(url)
    kept.release(url)
    kept.close()
    assert path.exists(), "a cache of one's own stays"


def test_releasing_while_others_ask_never_loses_a_shard(root: str) -> None:
    store, url = make_store(), f"{root}/a/0.tar"

    def work(_: int) -> bool:
        mine: ShardCache = pickle.loads(pickle.dumps(store))
        for _ in range(8):
            if mine.local(url).read_bytes() != BODY:
                return False
            mine.release(url)
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_schemes_registered_in_webdataset(tmp_path: Path) -> None:
    gopen = importlib.import_module("webdataset.gopen")  # the package's attribute of that name is a function
    source = tmp_path / "a.tar"
    source.write_bytes(BODY)
    store = make_store(tmp_path / "cache")
    gopen.gopen_schemes["mine"] = lambda url, mode="rb", bufsize=0, **_: open(source, mode)  # noqa: SIM115
    gopen.gopen_schemes["cmd"] = lambda url, *_, **__: gopen.Pipe(
        f"head -c 99 '{source}'; exit 141", mode="rb", shell=True, ignore_status=[141]
    )
    try:
        assert store.local("mine://x/0.tar").read_bytes() == BODY
        assert failure(make_store(tmp_path / "b"), "cmd://x/0.tar").reason == "pipe_failed"
    finally:
        del gopen.gopen_schemes["mine"], gopen.gopen_schemes["cmd"]
    error = failure(make_store(tmp_path / "c"), "nowhere://bucket/0.tar")
    assert error.reason == "unknown_scheme" and "pipe:" in error.detail


def test_zstd(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    half = len(BODY) // 2
    frames = [zstandard.ZstdCompressor().compress(part) for part in (BODY[:half], BODY[half:])]
    (tmp_path / "whole.tar.zst").write_bytes(b"".join(frames))
    (tmp_path / "cut.tar.zst").write_bytes(b"".join(frames)[:-20])
    (tmp_path / "damaged.tar.zst").write_bytes(frames[0][:50] + b"damage" + frames[0][50:])
    store = make_store(tmp_path / "cache")
    assert store.local(str(tmp_path / "whole.tar.zst")).read_bytes() == BODY
    for name in ("cut", "damaged"):
        assert failure(make_store(tmp_path / "b"), str(tmp_path / f"{name}.tar.zst")).reason == "bad_zstd"


def test_a_full_disk_says_what_to_do(tmp_path: Path) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ShardError, match=r"disk: .*No space left.*--data.cache"):
        make_store(tmp_path).get_or_make("x", "x", fill)
    assert not list(tmp_path.glob("*.part"))


def test_a_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"data\.cache"):
        ShardCache(str(tmp_path / "file" / "cache"))

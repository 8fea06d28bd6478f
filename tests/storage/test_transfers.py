"""Transfers that cannot become a shard end at once, and commands with the process that waits for them."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path

import pytest

from clipstream.data import pipeline
from clipstream.errors import ShardError
from clipstream.storage import download
from clipstream.storage.download import Fetcher
from clipstream.storage.shard_cache import ShardCache
from tests.support.forks import ROOT
from tests.support.loaders import data, loader
from tests.support.ranks import TIMEOUT, command_ends
from tests.support.tars import tar_bytes

MIB = 1 << 20
MEMBERS = tar_bytes([{"__key__": "0", "jpg": b"j" * 300_000, "txt": "x"}])[:-10240].rstrip(b"\0")
MEMBERS += bytes(-len(MEMBERS) % 512)  # a tar without its end


@contextlib.contextmanager
def serving(blocks: Iterable[bytes]) -> Iterator[str]:
    """The URL of a server that sends these, and tells no length."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):  # nobody listens any more
                for block in blocks:
                    self.wfile.write(block)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/0.tar"
    server.shutdown()
    server.server_close()


def ended(store: ShardCache, url: str) -> tuple[ShardError, int]:
    """The failure of a transfer that would go on for ever, and the most that its folder held meanwhile, in bytes."""
    most, over = 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not over.wait(0.002):
            with contextlib.suppress(OSError):
                most = max(most, sum(path.stat().st_size for path in store.folder.iterdir()))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        with pytest.raises(ShardError) as caught:
            store.local(url)
    finally:
        over.set()
        watcher.join()
    assert not list(store.folder.glob("*.tar")) and not list(store.folder.glob("*.part"))
    return caught.value, most


def test_content_that_is_no_tar_ends_a_transfer(tmp_path: Path) -> None:
    """Of commands, servers and object stores, and compressed content."""
    import fsspec

    packed, mark = tmp_path / "0.tar.gz", f"3605.{os.getpid()}"
    packed.write_bytes(gzip.compress(b"y\n" * 30 * MIB))
    with fsspec.open("memory://there/0.tar", "wb") as file:
        file.write(b"y" * 50 * MIB)
    with serving(repeat(b"y\n" * 50_000)) as text, serving(repeat(bytes(100_000))) as zeros:
        for number, url in enumerate(
            (text, zeros, str(packed), f"pipe:cat {packed}", "memory://there/0.tar",
             f"pipe:yes clipstream | head -c 20000; sleep {mark}")
        ):  # fmt: skip
            error, most = ended(ShardCache(str(tmp_path / f"{number}"), fetcher=Fetcher(backoff=0.01)), url)
            assert error.reason == "not_a_tar" and most < 20 * MIB, url
    command_ends(mark)


def test_a_tar_without_end_ends_at_the_limit(
    tmp_path: Path, shards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By http, by a command, and packed; with the cache that the settings make."""

    made: list[ShardCache] = []
    monkeypatch.setattr(
        pipeline, "ShardCache", lambda *given, **more: made.append(ShardCache(*given, **more)) or made[0]
    )
    loader(data(shards, cache=str(tmp_path / "cache"), max_shard_gib=4 / 1024))
    members = tmp_path / "members"
    members.write_bytes(MEMBERS)
    packed = tmp_path / "0.tar.gz"
    packed.write_bytes(gzip.compress(MEMBERS * 30))
    mark = f"3606.{os.getpid()}"
    loop = f"pipe:for number in {' '.join('x' * 15)}; do cat {members}; done; sleep {mark}"  # 4.3 MiB
    with serving(repeat(MEMBERS)) as url:
        for one in (url, loop, str(packed), f"file://{packed}"):
            error, most = ended(made[0], one)
            assert error.reason == "too_large" and "--data.max-shard-gib" in str(error)
            assert most < 30 * MIB
    command_ends(mark)


def test_a_told_length_beyond_the_limit_is_not_fetched(tmp_path: Path) -> None:
    whole = tmp_path / "0.tar"
    whole.write_bytes(MEMBERS + bytes(10240))
    bucket = f"local://{whole}"
    assert ShardCache(str(tmp_path / "cache")).local(bucket).stat().st_size == whole.stat().st_size
    error, most = ended(ShardCache(str(tmp_path / "other"), fetcher=Fetcher(most=100_000)), bucket)
    assert error.reason == "too_large" and most < 1000


@pytest.mark.parametrize("content", ["tar", "noise"])
def test_a_fifo_is_a_shard(tmp_path: Path, content: str) -> None:
    fifo = tmp_path / "0.tar"
    os.mkfifo(fifo)

    def write() -> None:
        with contextlib.suppress(BrokenPipeError), open(fifo, "wb") as file:
            for block in [MEMBERS, bytes(10240)] if content == "tar" else repeat(b"y" * 1000):
                file.write(block)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    store = ShardCache(None)
    if content == "tar":
        assert store.local(str(fifo)).read_bytes() == MEMBERS + bytes(10240)
    else:
        assert ended(store, str(fifo))[0].reason == "not_a_tar"
    writer.join(TIMEOUT)
    assert not writer.is_alive()
    store.close()


def test_a_transfer_leaves_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tmp_path / "0.tar"
    whole.write_bytes(MEMBERS + bytes(10240))
    real = os.statvfs

    def nearly_full(path: str | Path) -> os.statvfs_result:
        told = list(real(path)[:10])
        told[1], told[2], told[4] = 4096, 1 << 30, (1 << 30) // 4096 - 1  # f_frsize, f_blocks, f_bavail
        return os.statvfs_result(told)

    monkeypatch.setattr(download.os, "statvfs", nearly_full)
    error, _ = ended(ShardCache(str(tmp_path / "cache")), f"pipe:cat {whole}; sleep {TIMEOUT}")
    assert error.reason == "disk" and "GiB left" in str(error) and "--data.cache" in str(error)


def test_what_is_no_tar_but_a_manifest_comes(tmp_path: Path) -> None:
    with serving([b"url,caption\n" + b"a.jpg,x\n" * 1000]) as url:
        assert ShardCache(str(tmp_path)).local(url, tar=False).read_bytes().startswith(b"url,caption")


TRACED = """
import itertools, os, sys
from pathlib import Path
from types import SimpleNamespace
from clipstream.storage.backends import end_commands, run_pipe

class Ended(BaseException):
    pass

def act_at(number, act):
    events = itertools.count()
    def look(frame, event, argument):
        if next(events) == number:
            act(frame.f_code.co_name)
        return look
    return look

def go_on(function):
    where.append(function)
    raise Ended

def exit(function):
    end_commands()
    os._exit(3 if function == "_wait_while_growing" else 0)

kind, seconds, part = sys.argv[1:]
watch = SimpleNamespace(receive=lambda size: None, expect=lambda size: None)
where = []
if kind == "exit":  # what a first call alone imports is no matter of each child
    run_pipe("true", Path(part), timeout=60.0, monitor=watch)
for number in itertools.count():
    child = os.fork() if kind == "exit" else 0
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 3), code
        where += ["_wait_while_growing"] * (code == 3)
    else:
        sys.settrace(act_at(number, exit if kind == "exit" else go_on))
        try:
            run_pipe("sleep " + seconds, Path(part), timeout=60.0, monitor=watch)
        except Ended:
            sys.settrace(None)
    if where.count("_wait_while_growing") == 3:
        break
"""


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize(("kind", "seconds"), [("exit", 3601), ("raise", 3603)])
def test_a_process_that_exits_or_goes_on_at_any_moment_leaves_no_command(
    tmp_path: Path, kind: str, seconds: int
) -> None:
    """At every line, and behind every call: also before the command is known to the process that started it, and where
    a lock of a class of Python's own is left taken. Nor does that process hang.
    """
    mark = f"{seconds}.{os.getpid()}"
    command = [sys.executable, "-c", TRACED, kind, mark, tmp_path / "part"]
    subprocess.run(command, cwd=ROOT, timeout=TIMEOUT, check=True)
    command_ends(mark)

"""Remote shards become complete local files within the cache's limit: real servers, commands, several processes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import multiprocessing
import os
import pickle
import random
import re
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import get_ident

import pytest

from clipstream.errors import SettingsError, ShardError
from clipstream.storage.backends import end_commands
from clipstream.storage.download import Fetcher
from clipstream.storage.shard_cache import ShardCache
from tests.support.forks import TIMEOUT, wait_until
from tests.support.ranks import command_ends
from tests.support.sites import SIZE, Site, body
from tests.support.stores import BODY, failure, make_store

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def site() -> Iterator[Site]:
    running = Site()
    yield running
    running.close()


def reason_of(store: ShardCache, url: str) -> str:
    with pytest.raises(ShardError) as caught:
        store.local(url)
    return caught.value.reason


def test_who_never_answers_is_asked_once_whether_a_kept_shard_is_the_newest(tmp_path: Path, site: Site) -> None:
    urls = [site.put(f"{number}.tar", BODY) for number in range(3)]
    for store in (make_store(tmp_path), make_store(tmp_path, timeout=0.3)):
        before = Counter(site.asked)
        assert [store.local(url).read_bytes() == BODY for url in urls] == [True] * 3
        site.mute = True
        for number in range(3):
            site.hold(f"{number}.tar")
    assert site.asked - before == {"HEAD 0.tar": 1}


def test_equal_names_of_two_folders_are_two_files(tmp_path: Path, site: Site) -> None:
    store = make_store(tmp_path)
    first, second = (store.local(site.put(f"{name}/0.tar", BODY)) for name in "ab")
    assert first != second and first.name.endswith("-0.tar")
    assert make_store(tmp_path).local(f"{site.root}/a/0.tar") == first
    assert site.asked["GET a/0.tar"] == 1


def test_one_download_for_all_processes(site: Site) -> None:
    store, (url, gate) = make_store(retries=0), site.put_slowly("0.tar", BODY)
    workers = [FORK.Process(target=lambda: os._exit(store.local(url).read_bytes() != BODY)) for _ in range(4)]
    for worker in workers:
        worker.start()
    wait_until(lambda: bool(site.asked))
    gate.set()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert site.asked["GET 0.tar"] == 1
    store.close()
    assert not store.folder.exists()


def test_those_who_waited_share_the_failure_and_a_later_call_asks_again(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, url, gate = make_store(), f"{site.root}/gone.tar", site.hold("gone.tar")
    waiting: set[int] = set()
    lock = ShardCache._lock
    monkeypatch.setattr(ShardCache, "_lock", lambda *given, **more: waiting.add(get_ident()) or lock(*given, **more))

    def later() -> bool:
        (tmp_path / "now").touch()
        return (tmp_path / "now").stat().st_mtime > asked

    with ThreadPoolExecutor(4) as pool:
        ends = [pool.submit(reason_of, pickle.loads(pickle.dumps(store)), url) for _ in range(4)]
        wait_until(lambda: len(waiting) == 4)
        asked = time.time()
        wait_until(later)
        gate.set()
        assert [end.result() for end in ends] == ["http_404"] * 4
    assert site.asked["GET gone.tar"] == 1
    assert reason_of(store, url) == "http_404" and site.asked["GET gone.tar"] == 2


@pytest.mark.usefixtures("commands")
def test_only_exit_status_0_of_a_pipe_counts(tmp_path: Path) -> None:
    source = tmp_path / "a.tar"
    source.write_bytes(BODY)
    store = make_store(tmp_path / "cache")
    for command in ("cat {}", "gzip -c {} | cat"):
        assert store.local("pipe:" + command.replace("{}", f"'{source}'")).read_bytes() == BODY
    for command in (
        "exit 3", "head -c 9000 {}; exit 141", "head -c 9000 {}; exec >&-; sleep 0.1; exit 1", "cat {} {}.gone",
        "false | cat {}",
    ):  # fmt: skip
        error = failure(make_store(tmp_path / "b"), "pipe:" + command.replace("{}", f"'{source}'"))
        assert error.reason == "pipe_failed" and "exit status" in error.detail


@pytest.mark.usefixtures("commands")
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc")
def test_a_silent_pipe_is_killed_with_its_children(tmp_path: Path) -> None:
    mark = f"3607.{os.getpid()}"  # a number of seconds that no other process sleeps
    assert failure(make_store(tmp_path / "cache", timeout=0.3), f"pipe:sh -c 'sleep {mark}' & wait").reason == "timeout"
    command_ends(mark)


@pytest.mark.usefixtures("commands")
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


def test_local_files_and_packed_ones(tmp_path: Path, site: Site) -> None:
    plain, packed = tmp_path / "a.tar", tmp_path / "a.tar.gz"
    plain.write_bytes(BODY)
    packed.write_bytes(gzip.compress(BODY))
    store = make_store()
    assert make_store().local(site.put("0.tar", packed.read_bytes())).read_bytes() == BODY
    assert store.local(str(plain)) == plain == store.local(plain.as_uri())
    assert store.local(str(packed)).read_bytes() == BODY
    store.release(str(packed))
    assert failure(store, str(tmp_path / "gone.tar")).reason == "missing"
    assert failure(store, str(tmp_path)).reason == "unreadable"
    packed.write_bytes(gzip.compress(BODY)[:-9])
    assert failure(store, str(packed)).reason == "bad_gzip"


def test_a_spool_goes_with_its_last_user(site: Site, tmp_path: Path) -> None:
    store, url = make_store(), site.put("0.tar", BODY)
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


def test_releasing_while_others_ask_never_loses_a_shard(site: Site) -> None:
    store, url = make_store(), site.put("0.tar", BODY)

    def work(_: int) -> bool:
        mine: ShardCache = pickle.loads(pickle.dumps(store))
        for _ in range(8):
            if mine.local(url).read_bytes() != BODY:
                return False
            mine.release(url)
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_a_scheme_that_nothing_reads_names_the_way_out(tmp_path: Path) -> None:
    error = failure(make_store(tmp_path), "nowhere://bucket/0.tar")
    assert error.reason == "unknown_scheme" and "pipe:" in error.detail


def test_zstd(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    half, packed = len(BODY) // 2, tmp_path / "0.tar.zst"
    frames = [zstandard.ZstdCompressor().compress(part) for part in (BODY[:half], BODY[half:])]
    packed.write_bytes(b"".join(frames))
    assert make_store(tmp_path / "cache").local(str(packed)).read_bytes() == BODY
    packed.write_bytes(b"".join(frames)[:-20])  # damaged ones: tests/data/loader/test_broken_shards.py
    assert failure(make_store(tmp_path / "b"), str(packed)).reason == "bad_zstd"
    for magic in (0x184D2A50, 0x184D2A5F):  # RFC 8878, 3.1.2: frames that are skipped; pzstd begins with one
        packed.write_bytes(b"".join(struct.pack("<II", magic, 4) + b"size" + frame for frame in frames))
        assert make_store(tmp_path / f"{magic}").local(str(packed)).read_bytes() == BODY
    # 3.1.1: no content size, a window of 2^31 bytes, one raw block.
    packed.write_bytes(b"\x28\xb5\x2f\xfd\x00\xa8" + (512 << 3 | 1).to_bytes(3, "little") + bytes(512))
    assert re.search(
        "bad_zstd: .*write it again with at most --long=27", str(failure(make_store(tmp_path / "c"), str(packed)))
    )


def test_a_full_disk_and_a_cache_that_cannot_be_made(tmp_path: Path) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ShardError, match=r"disk: .*No space left.*--data.cache"):
        make_store(tmp_path).get_or_make("x", "x", fill)
    assert not list(tmp_path.glob("*.part"))
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"data\.cache"):
        ShardCache(str(tmp_path / "file" / "cache"))


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.tar"))


def read(folder: Path, url: str) -> bytes:
    """What a new process of another run would read."""
    store = ShardCache(str(folder), fetcher=Fetcher(retries=0))
    try:
        return store.local(url).read_bytes()
    finally:
        store.close()


def test_a_kept_shard_is_fetched_again_when_it_is_changed_or_damaged(site: Site, tmp_path: Path) -> None:
    url, other = site.put("0.tar", body(0)), site.put("1.tar", body(1))
    assert [read(tmp_path, url) for _ in range(3)] == [body(0)] * 3
    assert site.asked["GET 0.tar"] == 1
    site.put("0.tar", body(2))
    assert read(tmp_path, url) == body(2)
    assert site.asked["GET 0.tar"] == 2 and len(entries(tmp_path)) == 1, "the older version went"
    (entry,) = entries(tmp_path)
    entry.write_bytes(body(2)[:-1])
    assert read(tmp_path, url) == body(2)
    Path(f"{entry}.lock").write_text("")  # a length that a crash of the machine lost
    assert read(tmp_path, url) == body(2)
    assert site.asked["GET 0.tar"] == 4
    site.close()
    assert read(tmp_path, url) == body(2), "without a network, the cached file is used"
    with pytest.raises(ShardError, match="unreachable"):
        read(tmp_path, other)


def test_who_was_not_used_for_longest_goes_and_never_one_in_use(site: Site, tmp_path: Path) -> None:
    urls = [site.put(f"{n}.tar", body(n)) for n in range(5)]
    store = ShardCache(str(tmp_path), limit=3 * SIZE)
    for number in (0, 1, 2):
        store.local(urls[number])
        time.sleep(0.02)
    store.release(urls[1])
    store.release(urls[2])
    store.local(urls[3])  # 0 is older than 1, but in use
    kept = {path.name.rsplit("-", 1)[1] for path in entries(tmp_path)}
    assert kept == {"0.tar", "2.tar", "3.tar"}
    store.local(urls[2])
    with pytest.raises(SettingsError, match=r"cache_gib: .* set at least .*shuffle.shards"):
        store.local(urls[4])
    assert len(entries(tmp_path)) == 3 and not list(tmp_path.glob("*.part")) and not list(tmp_path.glob("*.reserved"))
    store.close()


def test_a_limit_that_is_too_small_is_told_at_the_first_shard(site: Site, tmp_path: Path) -> None:
    url, large = site.put("0.tar", body(0)), site.put("1.tar", body(1) * 5)
    with pytest.raises(SettingsError, match=r"data\.cache_gib"):
        ShardCache(str(tmp_path), limit=10 * SIZE, wanted=11).local(url)
    assert not entries(tmp_path)
    store = ShardCache(str(tmp_path), limit=10 * SIZE, wanted=8)
    store.local(url)
    assert store.local(large).stat().st_size == 5 * SIZE, "a single larger shard needs its own size only"
    store.close()


def test_what_came_ahead_of_its_use_goes_before_what_is_in_use(site: Site, tmp_path: Path) -> None:
    urls = [site.put(f"{n}.tar", body(n)) for n in range(4)]
    early, store = (ShardCache(str(tmp_path), limit=2 * SIZE, wanted=2) for _ in range(2))
    assert not early.prefetch(urls[0]) and not early.prefetch(urls[1])
    for url in urls[2:]:
        store.local(url)
    assert {path.name.rsplit("-", 1)[1] for path in entries(tmp_path)} == {"2.tar", "3.tar"}
    with pytest.raises(SettingsError):
        early.prefetch(urls[0])
    store.close()


def test_who_reads_waits_for_the_room_of_what_comes_ahead(site: Site, tmp_path: Path) -> None:
    (slow, gate), url = site.put_slowly("0.tar", body(0)), site.put("1.tar", body(1))
    early, store = (ShardCache(str(tmp_path), limit=SIZE) for _ in range(2))
    ahead = threading.Thread(target=early.prefetch, args=(slow,))
    ahead.start()
    wait_until(lambda: bool(list(tmp_path.glob("*.reserved"))))
    threading.Timer(0.1, gate.set).start()
    assert store.local(url).read_bytes() == body(1) and gate.is_set()
    ahead.join()
    store.close()


def test_a_killed_download_takes_no_room(site: Site, tmp_path: Path) -> None:
    slow, _ = site.put_slowly("0.tar", body(0))
    other = site.put("1.tar", body(1))
    process = FORK.Process(target=ShardCache(str(tmp_path), limit=SIZE).local, args=(slow,))
    process.start()
    wait_until(lambda: any(path.stat().st_size for path in tmp_path.glob("*.part")))
    process.kill()
    process.join()
    store = ShardCache(str(tmp_path), limit=SIZE)
    store.local(other)
    assert not list(tmp_path.glob("*.part")) and not list(tmp_path.glob("*.reserved"))
    store.close()


def test_files_of_ones_own_in_the_folder_stay(site: Site, tmp_path: Path) -> None:
    own = [tmp_path / name for name in ("mine.tar", "mine.tar.abc.part", "mine.reserved", "mine.part")]
    for path in own:
        path.write_bytes(body(9) * 2)
    store = ShardCache(str(tmp_path), limit=SIZE)
    for number in range(2):
        store.local(url := site.put(f"{number}.tar", body(number)))
        store.release(url)
    assert len(entries(tmp_path)) == 2 and all(path.stat().st_size == 2 * SIZE for path in own)


def test_room_is_not_held_by_what_a_process_forked(site: Site, tmp_path: Path) -> None:
    urls = [site.put(f"{n}.tar", body(n)) for n in range(2)]
    store = ShardCache(str(tmp_path), limit=SIZE)
    store.local(urls[0])
    forked = FORK.Process(target=time.sleep, args=(TIMEOUT,))
    forked.start()
    store.release(urls[0])
    assert store.local(urls[1]).read_bytes() == body(1)
    store.close()
    forked.kill()
    forked.join()


def test_without_locks_a_part_that_another_writes_is_left_alone(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "no locks here")

    url = site.put("0.tar", body(0))
    read(tmp_path, url)
    (entry,) = entries(tmp_path)
    entry.unlink()
    (part := Path(f"{entry}.another.part")).touch()
    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert read(tmp_path, url) == body(0) and part.exists()


def use_many(folder: Path, urls: list[str], seed: int) -> None:
    store, draw = ShardCache(str(folder), limit=8 * SIZE), random.Random(seed)
    for _ in range(30):
        number = draw.randrange(len(urls))
        assert store.local(urls[number]).read_bytes() == body(number)
        store.release(urls[number])


def test_processes_share_a_folder_within_its_limit(site: Site, tmp_path: Path) -> None:
    urls = [site.put(f"{n}.tar", body(n)) for n in range(16)]
    processes = [FORK.Process(target=use_many, args=(tmp_path, urls, seed)) for seed in range(6)]
    for process in processes:
        process.start()
    most, running = 0, True
    while running:
        running = any(process.is_alive() for process in processes)  # once more when they have ended
        with open(tmp_path / "quota.lock", "a") as lock:
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


def test_a_shard_that_has_just_come_is_counted_once(tmp_path: Path) -> None:
    """Between its renaming and the end of its reservation others may count."""
    came, comes = (tmp_path / f"{number:024x}-{number}.tar" for number in range(2))
    room = ShardCache(str(tmp_path), limit=2 * SIZE)
    with open(f"{came}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert room.reserve(came, SIZE)
        came.write_bytes(body(0))
        assert room.reserve(comes, SIZE) and came.exists()
        with pytest.raises(SettingsError):
            room.reserve(comes, SIZE + 1, wait=False)

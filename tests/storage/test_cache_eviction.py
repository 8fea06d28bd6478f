"""The shard cache: versions, damage, size limit, several processes, with a real server."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import multiprocessing
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clipstream.errors import SettingsError
from clipstream.storage import shard_cache
from clipstream.storage.downloader import Fetcher
from clipstream.storage.shard_cache import ShardCache
from clipstream.storage.transfer import ShardError
from tests.support.forks import TIMEOUT, wait_until
from tests.support.sites import SIZE, Site, body

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def site() -> Iterator[Site]:
    running = Site()
    yield running
    running.close()


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.tar"))


def read(folder: Path, url: str) -> bytes:
    """What a new process of another run would read."""
    store = ShardCache(str(folder), fetcher=Fetcher(retries=0))
    try:
        return store.local(url).read_bytes()
    finally:
        store.close()


def test_a_kept_shard_is_fetched_again_only_when_it_has_changed(site: Site, tmp_path: Path) -> None:
    url = site.put("0.tar", body(0))
    assert [read(tmp_path, url) for _ in range(3)] == [body(0)] * 3
    assert site.asked["GET 0.tar"] == 1
    site.put("0.tar", body(1))
    assert read(tmp_path, url) == body(1)
    assert site.asked["GET 0.tar"] == 2 and len(entries(tmp_path)) == 1, "the older version went"


def test_without_a_network_what_is_here_is_used(tmp_path: Path) -> None:
    site = Site()
    url, other = site.put("0.tar", body(0)), site.put("1.tar", body(1))
    assert read(tmp_path, url) == body(0)
    site.close()
    assert read(tmp_path, url) == body(0)
    with pytest.raises(ShardError, match="unreachable"):
        read(tmp_path, other)


@pytest.mark.parametrize("damage", ["cut", "unsealed"])
def test_a_damaged_entry_is_fetched_again(site: Site, tmp_path: Path, damage: str) -> None:
    url = site.put("0.tar", body(0))
    read(tmp_path, url)
    (entry,) = entries(tmp_path)
    if damage == "unsealed":
        Path(f"{entry}.lock").write_text("")
    else:
        entry.write_bytes(body(0)[:-1])
    assert read(tmp_path, url) == body(0)
    assert site.asked["GET 0.tar"] == 2


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
    url = site.put("0.tar", body(0))
    store = ShardCache(str(tmp_path), limit=10 * SIZE, wanted=11)
    with pytest.raises(SettingsError, match=r"data\.cache_gib"):
        store.local(url)
    assert not entries(tmp_path)
    ShardCache(str(tmp_path), limit=11 * SIZE, wanted=11).local(url)


def test_one_large_shard_among_small_ones_has_its_room(site: Site, tmp_path: Path) -> None:
    small, large = site.put("0.tar", body(0)), site.put("1.tar", body(1) * 5)
    store = ShardCache(str(tmp_path), limit=10 * SIZE, wanted=8)
    store.local(small)
    assert store.local(large).stat().st_size == 5 * SIZE
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
    threading.Timer(0.3, gate.set).start()
    assert store.local(url).read_bytes() == body(1) and gate.is_set()
    ahead.join()
    store.close()


def test_who_waits_for_room_does_not_get_on_while_what_takes_it_hangs(site: Site, tmp_path: Path) -> None:
    (slow, gate), url = site.put_slowly("0.tar", body(0)), site.put("1.tar", body(1))
    early, store = (ShardCache(str(tmp_path), limit=SIZE) for _ in range(2))
    told: list[float] = []
    store.alive = lambda size: told.append(time.monotonic())
    (ahead := threading.Thread(target=early.prefetch, args=(slow,))).start()
    wait_until(lambda: any(path.stat().st_size for path in tmp_path.glob("*.part")))
    hung: list[float] = []
    threading.Timer(2.0, lambda: (hung.append(time.monotonic()), gate.set())).start()
    store.local(url)
    ahead.join()
    assert len([when for when in told if when < hung[0]]) <= 4, "or a stall would never be one"


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


def test_quick_commands_stay_within_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_cache, "GROWTH", 1000)
    (tmp_path / "source").write_bytes(body(0))
    store = ShardCache(str(tmp_path / "kept"), limit=2 * SIZE + 1000)
    for number in range(5):
        store.local(url := f"pipe:exec cat '{tmp_path}/source' # {number}")
        store.release(url)
    assert len(entries(tmp_path / "kept")) <= 2


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
    """A process that reads shards in an order of its own."""
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


def test_all_processes_get_a_shard_by_one_download(site: Site, tmp_path: Path) -> None:
    urls = [site.put(f"{n}.tar", body(n)) for n in range(4)]
    assert read_by_processes(8, tmp_path, urls) == [0] * 8
    assert [site.asked[f"GET {n}.tar"] for n in range(4)] == [1] * 4


def read_by_processes(count: int, folder: Path, urls: list[str]) -> list[int | None]:
    """How they ended."""
    processes = [FORK.Process(target=read_all, args=(folder, urls), daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT)
    return [process.exitcode for process in processes]


def read_all(folder: Path, urls: list[str]) -> None:
    for number, url in enumerate(urls):
        assert read(folder, url) == body(number)

"""Broken shards of every kind in the training loader: each is reported, and its intact samples are used."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from clipstream.data.loader.health import Health
from clipstream.data.loader.pipeline import checksum
from clipstream.errors import DataError
from tests.support.broken import COUNT, Broken, Sample, broken_shards
from tests.support.loaders import data, loader
from tests.support.pictures import ByteTokenizer, make_shards, picture
from tests.support.ranks import ROOT, TIMEOUT


def write_broken(folder: Path) -> dict[str, tuple[Path, Broken, list[Sample]]]:
    """One shard of each kind, of samples of its own."""
    found = {}
    for number, kind in enumerate(broken_shards([sample(i) for i in range(COUNT)])):
        samples = [sample(1000 * (number + 1) + i) for i in range(COUNT)]
        broken = broken_shards(samples)[kind]
        path = folder / f"{kind.replace(' ', '_')}.tar"
        if broken.data is not None:
            path.write_bytes(broken.data)
        found[kind] = (path, broken, samples)
    return found


def sample(number: int) -> Sample:
    return {"__key__": f"{number:06d}", "jpg": picture(number), "txt": f"picture {number}"}


@pytest.mark.parametrize("workers", [0, 2])
def test_each_is_counted_and_gives_its_whole_samples(tmp_path: Path, workers: int) -> None:
    kinds = write_broken(tmp_path)
    assert len(kinds) >= 12
    good = make_shards(tmp_path / "good", [COUNT] * 3, start=900_000)
    expected = {
        f"{path.name}/{samples[place]['__key__']}": samples[place]
        for path, broken, samples in kinds.values()
        for place in broken.whole
    }
    settings = data([*good, *(str(path) for path, *_ in kinds.values())], workers=workers, lanes=2,
                    sampling={"mode": "epoch"}, max_shard_failures=1.0)  # fmt: skip
    seen: Counter[str] = Counter()
    with loader(settings) as stream:
        for _ in range(40):
            batch = next(stream)
            assert batch.pictures is not None
            for key, sum_, ids in zip(batch.keys, batch.pictures.tolist(), batch.ids, strict=True):
                if (own := expected.get(key)) is not None:
                    assert sum_ == checksum(own["jpg"]), key
                    assert (ids.numpy() == ByteTokenizer().encode([own["txt"]])[0]).all(), key
            seen.update(key for key in batch.keys if not int(key.split("/")[1]) >= 900_000)
        losses, health = stream.health.take_dropped(), stream.health
    assert set(seen) == set(expected), "exactly the whole samples are used"
    assert {loss.shard: loss.reason for loss in losses} == {str(p): broken.reason for p, broken, _ in kinds.values()}
    assert all(loss.detail for loss in losses)
    check_counts(health, Counter(broken.reason for _, broken, _ in kinds.values()))


def check_counts(health: Health, faults: Counter[str]) -> None:
    counts = health.summary()["train"]
    assert counts["fault_reasons"] == faults and counts["shard_faults"] == faults.total()
    assert counts["read"] == counts["used"] and not counts["dropped"]


def test_a_lane_without_one_readable_shard_ends_the_run(tmp_path: Path) -> None:
    good, *broken = make_shards(tmp_path, [30, 5, 5, 5])
    for path in broken:
        Path(path).write_bytes(b"no tar" * 1000)
    settings = data([good, *broken], lanes=2, sampling={"shards": "split"}, max_shard_failures=1.0)
    with (
        loader(settings) as stream,
        pytest.raises(DataError, match=r"lane \d: no samples in 1,000 consecutive groups of shards.*not_a_tar"),
    ):
        for _ in range(100):
            next(stream)


def test_too_many_open_files_are_no_broken_shards(tmp_path: Path) -> None:
    shards = make_shards(tmp_path, [3] * 60)
    script = (
        "import resource, sys\n"
        "from tests.support.loaders import data, loader\n"
        "stream = loader(data(sys.argv[1:], lanes=60, global_batch_size=60))\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))\n"
        "next(stream)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, *shards], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert "too many open files: raise the limit (ulimit -n)" in run.stderr

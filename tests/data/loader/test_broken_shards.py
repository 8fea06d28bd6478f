"""Broken shards and bad samples of every kind in the training loader: each is reported, and the intact are used."""

from __future__ import annotations

import gzip
import io
import multiprocessing
import random
import resource
import tarfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from clipstream.data.batch import checksum
from clipstream.data.loader.health import merge_counts
from clipstream.errors import DataError
from tests.support.image_files import bomb, save
from tests.support.loaders import data, loader
from tests.support.pictures import ByteTokenizer, make_shards, picture
from tests.support.tars import tar_bytes, write_tar

COUNT, BLOCK = 6, 512  # samples of a shard; bytes
BEFORE, SHOWN, EVERY = [0, 1], [0, 1, 2], [*range(COUNT)]  # sample 2 is whole where sample 3 shows that
Broken = tuple[bytes | None, str, list[int]]  # the shard, what it is counted under, the samples that can be used


def with_field(tar: bytes, header: int, offset: int, value: bytes) -> bytes:
    """The tar with a field of a header replaced, and the header's checksum made right again."""
    block = bytearray(tar[header : header + BLOCK])
    block[offset : offset + len(value)] = value
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return tar[:header] + bytes(block) + tar[header + BLOCK :]


def broken_shards(samples: list[dict[str, Any]]) -> dict[str, Broken]:
    """Kind -> a shard of these six samples with the members jpg and txt; what breaks hits sample 3."""
    tar = tar_bytes(samples, tarfile.GNU_FORMAT)
    with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
        at = {member.name: member.offset for member in opened.getmembers()}
        third, end = at[f"{samples[3]['__key__']}.jpg"], opened.offset
    noise, packed = random.Random(0).randbytes(3 * BLOCK), gzip.compress(tar)
    record = tarfile.TarInfo("pax")  # an extended header whose record claims another length than it has
    record.type, record.size = tarfile.XHDTYPE, 18
    pax = record.tobuf(tarfile.GNU_FORMAT) + b"99 path=somewhere\n".ljust(BLOCK, b"\0")
    twice = [*samples[:3], {**samples[3], "JPG": b"another"}, *samples[4:]]
    return {
        "cut in a header": (tar[: third + 100], "truncated_header", BEFORE),
        "cut in a member": (tar[: third + BLOCK + 88], "truncated_member", SHOWN),
        "cut between samples": (tar[:third], "missing_end", BEFORE),
        "no end blocks": (tar[:end], "missing_end", EVERY[:-1]),
        "one end block": (tar[: end + BLOCK], "missing_end", EVERY),
        "garbage in the middle": (tar[:third] + noise + tar[third + len(noise) :], "bad_checksum", BEFORE),
        "a size that is none": (with_field(tar, third, 124, b"no number!!\0"), "bad_header", BEFORE),
        "a damaged PAX record": (tar[:third] + pax + tar[third:], "bad_header", BEFORE),
        "a member twice": (tar_bytes(twice), "duplicate_member", [0, 1, 2, 4, 5]),
        "a second archive": (tar + tar_bytes(samples[:2]), "trailing_archive", EVERY),
        "zeros only": (bytes(20 * BLOCK), "empty", []),
        "noise": (noise, "not_a_tar", []),
        "not there": (None, "missing", []),
        "a gzip without its sum": (packed[:-8], "bad_gzip", []),
        "a gzip with another sum": (packed[:-8] + bytes(4) + packed[-4:], "bad_gzip", []),
    }


def sample(number: int) -> dict[str, Any]:
    return {"__key__": f"{number:06d}", "jpg": picture(number), "txt": f"picture {number}"}


@pytest.mark.parametrize("workers", [0, 2])
def test_each_is_counted_and_gives_its_whole_samples(tmp_path: Path, workers: int) -> None:
    expected: dict[str, dict[str, Any]] = {}
    reasons: dict[str, str] = {}
    for number, kind in enumerate(broken_shards([sample(i) for i in range(COUNT)])):
        samples = [sample(1000 * (number + 1) + i) for i in range(COUNT)]  # of its own
        content, reason, whole = broken_shards(samples)[kind]
        path = tmp_path / f"{kind.replace(' ', '_')}.tar"
        if content is not None:
            path.write_bytes(content)
        reasons[str(path)] = reason
        expected |= {f"{path.name}/{samples[place]['__key__']}": samples[place] for place in whole}
    good = make_shards(tmp_path / "good", [COUNT] * 3, start=900_000)
    limits = {"sampling": {"mode": "epoch"}, "max_shard_failures": 1.0}
    seen: set[str] = set()
    with loader(data([*good, *reasons], workers=workers, lanes=2, **limits)) as stream:
        for _ in range(40):
            batch = next(stream)
            assert batch.checksums is not None
            for key, sum_, ids in zip(batch.keys, batch.checksums.tolist(), batch.ids, strict=True):
                if (own := expected.get(key)) is not None:
                    assert sum_ == checksum(own["jpg"]), key
                    assert (ids.numpy() == ByteTokenizer().encode([own["txt"]])[0]).all(), key
            seen.update(key for key in batch.keys if int(key.split("/")[1]) < 900_000)
        losses, counts = stream.health.take_dropped(), merge_counts([stream.health.counts()])["train"]
    assert seen == set(expected), "exactly the whole samples are used"
    assert {loss.shard: loss.reason for loss in losses} == reasons and all(loss.detail for loss in losses)
    assert counts["fault_reasons"] == Counter(reasons.values()) and counts["shard_faults"] == len(reasons)
    assert counts["read"] == counts["used"] and not counts["dropped"]


def test_a_lane_without_one_readable_shard_ends_the_run(tmp_path: Path) -> None:
    good, *broken = make_shards(tmp_path, [30, 5, 5, 5])
    for path in broken:
        Path(path).write_bytes(b"no tar" * 1000)
    settings = data([good, *broken], lanes=2, sampling={"shards": "split"}, max_shard_failures=1.0)
    said = r"lane \d: no samples in 1,000 consecutive groups of shards.*not_a_tar"
    with loader(settings) as stream, pytest.raises(DataError, match=said):
        for _ in range(100):
            next(stream)


def without_files(shards: list[str]) -> str:
    """What a run says that may open no more files; in a process of its own."""
    stream = loader(data(shards, lanes=60, global_batch_size=60))
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with pytest.raises(DataError) as caught:
        next(stream)
    return str(caught.value)


def test_too_many_open_files_are_no_broken_shards(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        said = pool.apply(without_files, (make_shards(tmp_path, [3] * 60),))
    assert "too many open files: raise the limit (ulimit -n)" in said


GOOD = 40


def filtered(sample: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A user's transform."""
    if sample["__key__"] == "raises":
        raise KeyError("width")
    return None if sample["__key__"] == "unwanted" else sample


# key -> (members in place of the good ones, reason)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no image": ({"jpg": None}, "no_image"),
    "nothing": ({"jpg": b""}, "undecodable_image"),
    "page": ({"jpg": b"<html>403 Forbidden</html>"}, "undecodable_image"),
    "cut": ({"jpg": picture(1, size=300)[:-900]}, "undecodable_image"),
    "zeros": ({"jpg": bytes(5000)}, "undecodable_image"),
    "bomb": ({"jpg": bomb(60_000, 60_000)}, "image_too_large"),
    "tall": ({"jpg": save(Image.new("RGB", (1, 20_000)))}, "image_too_thin"),
    "wide": ({"jpg": save(Image.new("RGB", (3000, 10)))}, "image_too_thin"),
    "no text": ({"txt": None}, "no_caption"),
    "blank": ({"txt": b" \n\t\xe2\x80\x83"}, "empty_caption"),
    "latin": ({"txt": "Café".encode("latin-1")}, "caption_not_utf8"),
    "cut json": ({"json": '{"caption": {"en": "a c'}, "json_invalid"),
    "null": ({"json": "null"}, "json_not_object"),
    "deep": ({"json": "[" * 100_000}, "json_invalid"),
    "raises": ({}, "transform_error"),
    "unwanted": ({}, "transform_none"),
}


@pytest.mark.parametrize("kind", ["txt", "json"])
def test_each_is_dropped_under_its_reason(tmp_path: Path, kind: str) -> None:
    other = {"txt": "json", "json": "txt"}[kind]
    bad = {key: (changed, reason) for key, (changed, reason) in BAD.items() if other not in changed}
    samples = []
    for number, key in enumerate([*(f"{i:03d}" for i in range(GOOD)), *bad]):
        members: dict[str, Any] = {"jpg": picture(number), "txt": "a cat", "json": '{"caption": {"en": "a cat"}}'}
        members |= bad.get(key, ({}, ""))[0]
        samples.append({"__key__": key, **{name: value for name, value in members.items() if value is not None}})
    caption = {"type": "text"} if kind == "txt" else {"type": "json", "path": "caption.en"}
    source: dict[str, Any] = {"shards": str(write_tar(tmp_path / "0.tar", samples)), "caption": caption}
    source["transform"] = f"{__name__}:filtered"
    with loader(data(None, workers=int(kind == "txt"), sources={"train": source})) as stream:
        keys = {key.split("/")[1] for _ in range(20) for key in next(stream).keys}
        losses, health = stream.health.take_dropped(), stream.health.sources["train"]
    assert keys == {f"{i:03d}" for i in range(GOOD)}, "the good ones, and no other"
    assert {loss.key: loss.reason for loss in losses} == {key: reason for key, (_, reason) in bad.items()}
    assert health.read == health.used + health.dropped.total()
    for reason in {reason for _, reason in bad.values()}:
        assert any(f"0.tar/{key}" in health.examples[reason] for key, (_, why) in bad.items() if why == reason)


def test_too_many_end_the_run(tmp_path: Path) -> None:
    samples = [{"__key__": f"{i}", "jpg": picture(i), "txt": "a cat" if i % 10 else ""} for i in range(50)]
    path = str(write_tar(tmp_path / "a.tar", samples))
    settings = data(path, workers=1, max_sample_failures=0.09)
    said = r"more than --data\.max-sample-failures 0\.09:(.|\n)*empty_caption, e\.g\. a\.tar/\d?0"
    with pytest.raises(DataError, match=said), loader(settings) as stream:
        for _ in range(200):
            next(stream)

"""Side indexes: their format, `clipstream index`, other tools' indexes, and training with them."""

from __future__ import annotations

import gzip
import json
import os
import struct
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipstream.cli.main import main as clipstream
from clipstream.cli.verbs.index import main
from clipstream.config.plan import draft, survey
from clipstream.config.settings import load
from clipstream.config.settings import read as read_settings
from clipstream.config.validate import validate_run
from clipstream.data.source_settings import SourceSettings
from clipstream.data.sources import Source, SourceContext
from clipstream.data.sources.indexes import count_samples, identity_of, open_index, path_of, read, read_head, write
from clipstream.data.sources.tars import TarSource
from clipstream.data.staging import index_shard
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.storage.shard_cache import ShardCache
from clipstream.storage.tar import ShardIndex, scan
from clipstream.utils import atomic_write
from tests.support.json_values import JSON, changed, places
from tests.support.loaders import digests, indexed
from tests.support.pictures import make_shards
from tests.support.sites import Site
from tests.support.tars import tar_bytes, write_tar

SAMPLES = [
    {"__key__": "a/00", "jpg": b"x" * 700, "txt": "one", "json": "{}"},
    {"__key__": "a/01", "txt": "", "jpg": b"y" * 512},
    {"__key__": "é" * 120, "JPG": b"z", "seg.png": b"p" * 2000},
    {"__key__": "a/03", "jpg": b"w" * 1023, "txt": "four", "json": "[1]"},
]


@pytest.fixture
def site() -> Iterator[Site]:
    running = Site()
    yield running
    running.close()


@pytest.fixture
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tar needs an index."""
    monkeypatch.setattr("clipstream.data.sources.indexes.SMALL", 0)


def counts(shards: Any, index: Any = None) -> list[int]:
    """What a run would find."""
    source = SourceSettings(shards=shards, index=index and str(index))
    return count_samples(Source(source, SourceContext(key="data.sources.train")))


def indexes(folder: Path) -> dict[str, int]:
    """The indexes of a folder, by the time they were written."""
    return {path.name: path.stat().st_mtime_ns for path in sorted(folder.glob("*.index"))}


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_an_index_holds_what_a_walk_over_the_headers_finds(tmp_path: Path, format: int) -> None:
    samples = SAMPLES if format != tarfile.USTAR_FORMAT else [SAMPLES[0], SAMPLES[1], SAMPLES[3]]
    shard = write_tar(tmp_path / "a.tar", samples, format)
    for cut in (None, 5000):
        shard.write_bytes(shard.read_bytes()[:cut])
        assert main([str(shard)]) == 0
        found, (head, index) = scan(shard), read(Path(f"{shard}.index"))
        assert (head.samples, head.of) == (len(found.samples), identity_of(shard))
        assert (head.fault is None) == (cut is None) and head.fault == found.fault == index.fault
        assert list(index.samples) == list(found.samples) and head == read_head(Path(f"{shard}.index"))
        assert open_index(str(shard), None) == index
    many = [{"__key__": f"{i:09d}", "jpg": b"x" * (900 + i * 7 % 300), "txt": "t", "json": "{}"} for i in range(2000)]
    write(tmp_path / "i", scan(write_tar(tmp_path / "a.tar", many)), identity_of(shard))
    assert (tmp_path / "i").stat().st_size < 2000 * 12, "an index is small"


def sealed(head: dict[str, Any], body: bytes) -> bytes:
    """An index with this head and body, whose lengths and checksums are right."""
    text = json.dumps({**head, "length": len(body), "crc32": zlib.crc32(body)}).encode()
    return b"clipstream-index 1 %08x %s\n" % (zlib.crc32(text), text) + body


def test_damage_and_other_files_are_no_index(tmp_path: Path) -> None:
    shard = str(write_tar(tmp_path / "a.tar", SAMPLES))
    main([shard])
    place = Path(f"{shard}.index")
    whole = place.read_bytes()
    line, body = whole.split(b"\n", 1)
    bomb = sealed(json.loads(line.split(b" ", 3)[3]), zlib.compress(zlib.decompress(body) + b" " * (1 << 24)))
    cuts = [whole[:cut] for cut in (0, 10, len(line), len(line) + 1, len(whole) - 1)]
    flips = [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in range(0, len(whole), 7)]
    assert open_index(shard, None) is not None
    for damaged in (*cuts, *flips, bomb):
        place.write_bytes(damaged)
        assert open_index(shard, None) is None, damaged
    with pytest.raises(ValueError, match="unpacks to more than"):
        read(place)
    place.write_bytes(whole)
    os.utime(shard, (1, 1))
    assert open_index(shard, None) is None, "the shard is not the one that was indexed"


@pytest.mark.parametrize("value", [1 << 20, 1 << 40, 1 << 49])
@pytest.mark.usefixtures("nothing_is_small")
def test_what_an_index_claims_is_compared_with_the_shard(tmp_path: Path, value: int) -> None:
    """The checksums are right, and the file is of the version that was indexed."""
    shard = write_tar(tmp_path / "0.tar", SAMPLES)
    path = Path(f"{shard}.index")
    for place in ("samples", "offset", "size"):
        write(path, scan(shard), identity_of(shard))
        line, body = path.read_bytes().split(b"\n", 1)
        head, rest = json.loads(line.split(b" ", 3)[3]), json.loads(zlib.decompress(body))
        if place == "samples":
            head["samples"] = value
        else:
            rest["samples"][1][2 + (place == "size")] = value
        path.write_bytes(sealed(head, zlib.compress(json.dumps(rest).encode())))
        assert open_index(str(shard), None) is None
    path.write_bytes(sealed({**head, "samples": value}, b""))
    main([str(shard)])
    assert counts(str(shard)) == [len(SAMPLES)], "it is made anew"
    size = os.path.getsize(shard)
    (tmp_path / "shardindex.json").write_text(
        json.dumps({"shardlist": [{"url": "0.tar", "nsamples": value, "filesize": size}]})
    )
    for index in (sealed({**head, "samples": value}, b""), None):
        path.unlink() if index is None else path.write_bytes(index)
        with pytest.raises(SettingsError, match=f"1 of 1 have no valid index.*claims {value:,} samples"):
            counts(str(shard))


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_value_in_an_index_is_damage_or_an_index(data: st.DataObject) -> None:
    """Its checksums are right."""
    with tempfile.TemporaryDirectory() as folder:
        tar = Path(folder) / "0.tar"
        tar.write_bytes(tar_bytes(SAMPLES))
        path = Path(f"{tar}.index")
        write(path, scan(tar), identity_of(tar))
        line, body = path.read_bytes().split(b"\n", 1)
        head, rest = json.loads(line.split(b" ", 3)[3]), json.loads(zlib.decompress(body))
        values = changed([head, rest], data.draw(st.sampled_from(places([head, rest])[1:])), data.draw(JSON))
        body = zlib.compress(json.dumps(values[1]).encode())
        text = json.dumps(values[0]).encode()
        changed_head = b"clipstream-index 1 %08x %s\n" % (zlib.crc32(text), text) + body
        path.write_bytes(sealed(head, body) if values[0] == head else changed_head)
        index = open_index(str(tar), None)
        assert index is None or len(index.samples) == 4
        assert (found := counts(str(tar))) == [4] or found == [read_head(path).samples]
        (Path(folder) / "sizes.json").write_text(json.dumps(data.draw(JSON | st.dictionaries(st.just("0.tar"), JSON))))
        total = TarSource(SourceSettings(shards=str(tar)), SourceContext(ShardCache(None))).total_samples([str(tar)])
        assert total is None or total >= 0


def test_only_what_is_missing_or_stale_is_indexed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = make_shards(tmp_path, [5, 3, 4])
    spec = str(tmp_path / "{00000..00002}.tar")
    assert main([paths[1]]) == 0
    first = indexes(tmp_path)
    assert list(first) == ["00001.tar.index"] and main(["--executor", "local:2", spec]) == 0
    assert "3 of 3 shards, 12 samples; 2 indexes made" in capsys.readouterr().out
    second = indexes(tmp_path)
    assert len(second) == 3 and second["00001.tar.index"] == first["00001.tar.index"]
    make_shards(tmp_path / "new", [7])
    os.replace(tmp_path / "new/00000.tar", paths[2])
    os.utime(paths[2], (5, 5))
    Path(f"{paths[0]}.index").write_bytes(b"clipstream-index 1 damaged")
    assert clipstream(["index", spec, "--executor=local:1"]) == 0
    third = indexes(tmp_path)
    assert [third[name] > second[name] for name in second] == [True, False, True]
    assert counts(spec) == [5, 3, 7]
    assert main([spec, "--again", "--executor=local:1"]) == 0
    assert all(new > third[name] for name, new in indexes(tmp_path).items())


def test_two_workers_index_one_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, more = atomic_write.write, []
    make_shards(tmp_path, [3])

    def write(path: Path, parts: Any) -> tuple[int, str]:
        found = plain(path, parts)
        if not more:  # before this worker renames its index, another one is done
            more.append(True)
            assert index_shard(f"{tmp_path}/00000.tar", ShardCache(None), None, True).made
        return found

    for name, age in (("0" * 16, 9000), ("1" * 16, 0)):
        (draft := tmp_path / f"00000.tar.index.{name}.part").write_bytes(b"left by a killed call")
        os.utime(draft, (time.time() - age,) * 2)
    monkeypatch.setattr(atomic_write, "write", write)
    assert main([f"{tmp_path}/00000.tar", "--executor=local:1"]) == 0 and counts(f"{tmp_path}/00000.tar") == [3]
    assert {path.name[10:] for path in tmp_path.iterdir()} == {"", "index", f"index.{'1' * 16}.part"}


def test_shards_that_cannot_be_read_are_named_and_the_others_indexed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_shards(tmp_path, [3, 4])
    bad = {"empty.tar": b"", "none.tar": b"no tar", "page.tar": b"<!DOCTYPE html><title>Access denied</title>" * 99}
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    assert main([str(tmp_path / "*.tar"), str(tmp_path / "gone.tar"), "--executor=local:1"]) == 3
    told = capsys.readouterr()
    assert "indexing: 4 of 6 shards failed:" in told.err and "gone.tar does not exist" in told.err
    assert all(f"{name}: " in told.err for name in bad) and "damaged" not in told.out
    assert list(indexes(tmp_path)) == ["00000.tar.index", "00001.tar.index"]


@pytest.mark.parametrize(
    ("shards", "told"),
    [
        ("http://me:secret@localhost/a.tar", "***@localhost/a.tar is remote: set a folder for the indexes with --into"),
        ("pairs.csv", "pairs.csv: only tars can be indexed"),
        ("/no/such/*.tar", "no file matches /no/such/*.tar"),
    ],
)
def test_wrong_shards_are_told(shards: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([shards]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_is_small")
def test_remote_shards_are_indexed_into_a_folder_and_trained_on(tmp_path: Path, site: Site) -> None:
    paths = make_shards(tmp_path / "shards", [13, 7, 20])
    bodies = [Path(path).read_bytes() for path in paths]
    urls = [site.put(f"data/{Path(path).name}", body) for path, body in zip(paths, bodies, strict=True)]
    into = ["--into", str(tmp_path / "i"), "--executor", "local:1"]
    assert main([*urls, *into]) == main([*paths, *into]) == 0
    made = indexes(tmp_path / "i")
    assert len(made) == 6
    assert counts([f"{url}?X-Amz-Expires=9&X-Amz-Signature=ab" for url in urls], tmp_path / "i") == [13, 7, 20]
    here, there = ({"train": {"shards": some, "index": str(tmp_path / "i")}} for some in (paths, urls))
    expected = digests(indexed(None, sources=here), 1, 6)
    assert digests(indexed(None, sources=there, workers=1), 2, 6) == expected
    site.put("data/00001.tar", Path(make_shards(tmp_path / "new", [9])[0]).read_bytes())
    gets = site.asked["GET data/00000.tar"]
    assert main([*urls, *into]) == 0
    after = indexes(tmp_path / "i")
    assert sum(after[name] != made[name] for name in made) == 1 and site.asked["GET data/00000.tar"] == gets
    assert counts(urls, tmp_path / "i") == [13, 9, 20]


def test_indexes_of_a_folder_have_names_of_their_own(tmp_path: Path) -> None:
    urls = ["http://h/a/0.tar", "http://h/b/0.tar", "http://h/get?id=1", "http://h/get?id=2", "pipe:cat 0.tar", "0.tar"]
    places = [path_of(url, "f") for url in urls]
    assert len(set(places)) == len(urls)
    assert places[0] == path_of("http://h/a/0.tar?X-Amz-Date=5&Signature=x", "f")
    assert places[2] == path_of("http://me:word@h/get?id=1&sig=5&se=2026", "f")
    assert path_of("http://h/a/0.tar", None) is None


@pytest.mark.usefixtures("nothing_is_small")
def test_what_an_index_is_used_for(tmp_path: Path) -> None:
    (path,) = make_shards(tmp_path, [9])
    packed = tmp_path / "a.tar.gz"
    packed.write_bytes(gzip.compress(Path(path).read_bytes()))
    assert main([str(packed)]) == 0 and counts(str(packed)) == [9], "it counts the samples of a compressed shard"
    found = scan(path)
    write(Path(f"{path}.index"), ShardIndex(found.samples[2:5], None), identity_of(path))
    shard = Source(SourceSettings(shards=path), SourceContext(ShardCache(None))).open(path)
    assert shard.index.samples == found.samples[2:5], "it opens a local shard without a scan"
    assert shard.load(shard.index.samples[0])["txt"] == b"picture 2"
    shard.close()


@pytest.mark.usefixtures("nothing_is_small")
def test_wids_counts_are_taken_where_the_size_is_right(tmp_path: Path) -> None:
    paths, named, beside = make_shards(tmp_path, [5, 8]), tmp_path / "index.json", tmp_path / "shardindex.json"
    rows = [
        {"url": Path(path).name, "md5sum": "0", "nsamples": n, "filesize": os.path.getsize(path)}
        for path, n in zip(paths, (5, 8), strict=True)
    ]
    told = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": rows}
    named.write_text(json.dumps(told))
    for shards in (paths, ["http://h/00000.tar", "http://h/00001.tar?sig=5"]):
        assert counts(shards, named) == [5, 8]
    named.rename(beside)
    assert counts(paths) == [5, 8], "found beside the shards by its own name"
    rows[1]["filesize"] = 1
    beside.rename(named).write_text(json.dumps(told))
    with pytest.raises(SettingsError, match=r"1 of 2 have no valid index, e\.g\. .*00001\.tar"):
        counts(paths[::-1], named)
    named.write_text("[]")
    with pytest.raises(SettingsError, match=r"train\.index: .*index\.json is not a valid wids index"):
        counts(paths, named)


@pytest.mark.usefixtures("nothing_is_small")
def test_energons_counts_are_taken(tmp_path: Path) -> None:
    one, two, three = (make_shards(tmp_path / name, [5, 8]) for name in ("offsets", "info/parts", "old"))
    for path, samples in zip(one, (5, 8), strict=True):
        with tarfile.open(path) as tar:
            starts = [member.offset for member in tar if member.name.endswith(".jpg")]
            Path(f"{path}.idx").write_bytes(struct.pack(f"<{samples + 1}Q", *starts, tar.offset))
    for place, text in (
        ("info/.nv-meta/.info.json", '{"shard_counts": {"parts/00000.tar": 5, "parts/00001.tar": 8}}'),
        ("old/.nv-meta/.info.yaml", "shard_counts:\n  00000.tar: 5\n  00001.tar: 8\n"),
    ):
        (tmp_path / place).parent.mkdir()
        (tmp_path / place).write_text(text)
    assert counts(one) == counts(two) == counts(three) == [5, 8]
    Path(f"{one[0]}.idx").write_bytes(struct.pack("<3Q", 0, 512, 1024))
    with pytest.raises(SettingsError, match="1 of 2"):
        counts(one)


def test_what_is_no_tar_tells_its_samples_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPSTREAM_CACHE", str(tmp_path))
    (tmp_path / "pairs.csv").write_text("filepath,caption\n" + "a.jpg,x\n" * 7)
    assert (sum(counts(str(tmp_path / "pairs.csv"))), sum(counts("synthetic:64"))) == (7, 100_000)


def test_an_epoch_is_known_from_the_indexes(tmp_path: Path) -> None:
    make_shards(tmp_path, [13, 7, 20])
    flags = [f"--train-data={tmp_path}/*.tar", "--data.sampling.mode=indexed", "--data.global-batch-size=12"]
    for tail, steps in (("drop", 3), ("pad", 4), ("wrap", 4)):
        settings = load([*flags, "--epochs=5", f"--data.sampling.remainder={tail}"])
        assert draft(survey(settings), 1).settings.total_steps == 5 * steps
    with pytest.raises(SettingsError, match="not supported in mode indexed, where the data determine"):
        validate_run(read_settings([*flags, "--epochs=5", "--train-num-samples=40"]), World())

"""The tar reader: truncation is detected and changes no sample; intact tars read as in webdataset."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import random
import re
import subprocess
import tarfile
import tracemalloc
from pathlib import Path

import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from clipstream.data.source_settings import SourceSettings
from clipstream.data.sources import Source, SourceContext, indexes
from clipstream.errors import Dropped
from clipstream.storage.shard_cache import ShardCache
from clipstream.storage.tar import SampleRef, SampleRefs, Shard, ShardChanged, ShardIndex, scan
from clipstream.utils.content import MOST_MEMBER, MOST_TEXT
from tests.support.tars import tar_bytes, write_tar

SAMPLES = [{"__key__": f"{i:04d}", "jpg": bytes([i]) * (300 * i + 1), "txt": f"caption {i}"} for i in range(5)]
LONG = "a folder/" * 20


def scan_bytes(folder: Path, data: bytes) -> tuple[ShardIndex, dict[str, dict[str, bytes]]]:
    path = folder / "x.tar"
    path.write_bytes(data)
    shard = Shard(path)
    loaded = {ref.key: shard.load(ref) for ref in shard.index.samples}
    shard.close()
    return shard.index, loaded


def as_bytes(samples: list[dict[str, bytes | str]]) -> dict[str, dict[str, bytes]]:
    encode = lambda value: value.encode() if isinstance(value, str) else value  # noqa: E731
    return {str(sample["__key__"]): {k: encode(v) for k, v in sample.items() if k != "__key__"} for sample in samples}


def end_of_zero_blocks(data: bytes) -> int:
    """The byte at which the second zero block ends: what follows is padding."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        last = tar.getmembers()[-1]
    return last.offset_data + (last.size + 511) // 512 * 512 + 1024


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("prefix", ["", "./", "é/", LONG + "é"], ids=["plain", "dot", "accent", "long"])
def test_whole_tars_of_every_format(tmp_path: Path, format: int, prefix: str) -> None:
    if prefix.startswith(LONG) and format == tarfile.USTAR_FORMAT:
        prefix = LONG[:150]  # ustar has room for 255 bytes in two parts
    samples = [{**sample, "__key__": prefix + str(sample["__key__"])} for sample in SAMPLES]
    index, loaded = scan_bytes(tmp_path, tar_bytes(samples, format))
    assert index.fault is None
    assert loaded == as_bytes(samples)


def test_small_members_and_large_ones_in_turn(tmp_path: Path) -> None:
    draw = random.Random(0)
    small = [draw.randrange(3000) for _ in range(150)]
    samples: list[dict[str, bytes | str]] = [
        {"__key__": f"{i:04d}", "jpg": draw.randbytes(size), "txt": f"caption {i}"}
        for i, size in enumerate([*small, *[200_000] * 8, *small])
    ]
    index, loaded = scan_bytes(tmp_path, tar_bytes(samples))
    assert index.fault is None and loaded == as_bytes(samples)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(0, 1500), min_size=1, max_size=3), min_size=1, max_size=4),
    long=st.booleans(),
    where=st.floats(0, 1, exclude_max=True),
    format=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_a_cut_is_noticed_and_never_changes_a_sample(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[list[int]], long: bool, where: float, format: int
) -> None:
    key = LONG if long else ""
    samples: list[dict[str, bytes | str]] = [
        {"__key__": f"{key}{i}", **{f"m{j}": bytes([65 + i + j]) * size for j, size in enumerate(row)}}
        for i, row in enumerate(sizes)
    ]
    data = tar_bytes(samples, format)
    folder = tmp_path_factory.mktemp("cut")
    for cut in {int(where * end_of_zero_blocks(data)), int(where * end_of_zero_blocks(data)) // 512 * 512}:
        index, loaded = scan_bytes(folder, data[:cut])
        assert index.fault is not None, f"a cut at byte {cut} of {len(data)} was not noticed"
        assert loaded.items() <= as_bytes(samples).items()
    assert scan_bytes(folder, data[: end_of_zero_blocks(data)])[0].fault is None


def test_what_is_no_tar_is_told(tmp_path: Path) -> None:
    """Other damage: tests/data/loader/test_broken_shards.py."""
    for data, reason, words in (
        (b"", "empty", "no bytes"),
        (tar_bytes([]), "empty", "without one member"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "not_a_tar", "Git LFS pointer.*git lfs pull"),
        (b"<!DOCTYPE html>" + b" " * 999, "not_a_tar", "HTML page"),
        (b"Entry not found", "not_a_tar", "15 bytes: b'Entry not found'"),
        (b"BZh91AY&SY" + bytes(999), "not_a_tar", "bzip2"),
    ):
        index, loaded = scan_bytes(tmp_path, data)
        assert index.fault is not None and index.fault.reason == reason and re.search(words, index.fault.detail)
        assert not loaded


def test_what_is_no_sample_is_passed_over(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind in [("d", "5"), ("__meta__.json", "0"), ("d/._1.jpg", "0"), ("README", "0"), ("d/1.jpg", "0"),
                           ("d/1.jpg", "1"), ("d/1.", "0"), ("d/2.", "0"), ("d/1x", "0"),
                           ("d/1.seg.PNG", "0")]:  # fmt: skip
            member = tarfile.TarInfo(name)
            member.type, member.size, member.linkname = kind.encode(), 3 if kind == "0" else 0, "d/1.jpg"
            tar.addfile(member, io.BytesIO(b"abc") if kind == "0" else None)
    index, loaded = scan_bytes(tmp_path, buffer.getvalue())
    assert index.fault is None
    assert loaded == {"d/1": {"jpg": b"abc", "seg.png": b"abc"}}


LINKS = {  # name of a member -> its bytes, or the kind of a link and what it names
    "./0.jpg": ("2", "../0.jpg"), "./blobs/abc": b"blob", "./a.jpg": b"first", "./a.txt": b"A",
    "./b.jpg": ("1", "./a.jpg"), "./b.txt": ("1", "a.txt"),
    "./c.jpg": ("1", "./b.jpg"), "./c.txt": ("1", "./blobs/abc"),
    "./d.jpg": ("2", "./a.jpg"), "./d.txt": b"D",
    "./e.jpg": ("1", "./f.jpg"), "./e.txt": b"E",
    "./f.jpg": b"later", "./f.txt": ("1", "./none.txt"),
    f"./{LONG}g.jpg": b"long", f"./{LONG}h.jpg": ("1", f"./{LONG}g.jpg"),
}  # fmt: skip


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_hard_links_are_read_and_others_named(tmp_path: Path, format: int) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=format) as tar:
        for name, value in LINKS.items():
            member = tarfile.TarInfo(name)
            if isinstance(value, bytes):
                member.size = len(value)
            else:
                member.type, member.linkname = value[0].encode(), value[1]
            tar.addfile(member, io.BytesIO(value) if isinstance(value, bytes) else None)
    shard = Shard(path)
    assert shard.index.fault is None
    refs = {ref.key.removeprefix("./"): ref for ref in shard.index.samples}
    assert shard.load(refs["a"]) == shard.load(refs["b"]) == {"jpg": b"first", "txt": b"A"}
    assert shard.load(refs["c"]) == {"jpg": b"first", "txt": b"blob"}
    assert shard.load(refs[f"{LONG}h"]) == {"jpg": b"long"}
    for key, suffix, reason, words in (
        ("d", "jpg", "symbolic_link", r"d\.jpg is a symbolic link to \./a\.jpg,.* tar -h"),
        ("e", "jpg", "broken_link", r"e\.jpg is a hard link to \./f\.jpg, which is no member before it"),
        ("f", "txt", "broken_link", r"hard link to \./none\.txt"),
    ):
        with pytest.raises(Dropped, match=words) as dropped:
            shard.load(refs[key], [suffix])
        assert dropped.value.reason == reason
        assert list(shard.look(refs[key])) == list(refs[key].members.keys() - {suffix})
    indexes.write(tmp_path / "x.index", shard.index, indexes.identity_of(path))
    assert indexes.read(tmp_path / "x.index")[1] == shard.index


SPARSE = [("gnu", ""), ("pax", "0.0"), ("pax", "0.1"), ("pax", "1.0")]


@pytest.mark.parametrize(("format", "version"), SPARSE)
def test_sparse_members_are_read_with_their_holes(tmp_path: Path, format: str, version: str) -> None:
    """bsdtar (libarchive 3) writes files with holes in this way without being asked, GNU tar 1.34 with --sparse."""
    holes = b"".join(
        bytes([n]) * 700 + bytes((1 << 16) - 700) for n in range(1, 40)
    )  # more pieces than a header has room for
    files = {"a.jpg": b"plain", "a.txt": b"A", "b.jpg": holes, "b.txt": b"B", f"{LONG}c.jpg": bytes(1 << 18) + b"end",
             f"{LONG}c.txt": bytes(1 << 18), "d.jpg": holes[:5000], "d.txt": b"D"}  # fmt: skip
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        with open(tmp_path / name, "wb") as file:
            for start in range(0, len(data), 4096):
                file.seek(start)
                file.write(part if any(part := data[start : start + 4096]) else b"")
            file.truncate(len(data))
    os.link(tmp_path / "b.jpg", tmp_path / "e.jpg")
    options = [f"--format={format}", *([f"--sparse-version={version}"] if version else [])]
    command = ["tar", "--sparse", "--hole-detection=raw", *options, "-cf", "x.tar", *files, "e.jpg"]
    if subprocess.run(command, cwd=tmp_path, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("tar is not GNU tar")
    with tarfile.open(tmp_path / "x.tar") as tar:
        if sum(member.issparse() for member in tar) < 3:
            pytest.skip("the file system has no holes")
    shard = Shard(tmp_path / "x.tar")
    assert shard.index.fault is None and shard._fd >= 0
    loaded = {f"{ref.key}.{suffix}": data for ref in shard.index.samples for suffix, data in shard.load(ref).items()}
    assert loaded == files | {"e.jpg": holes}
    indexes.write(tmp_path / "x.index", shard.index, indexes.identity_of(tmp_path / "x.tar"))
    assert indexes.read(tmp_path / "x.index")[1] == shard.index
    whole = (tmp_path / "x.tar").read_bytes()
    with open(tmp_path / "x.tar", "r+b", buffering=0) as file:
        for at in range(0, len(whole), 512):  # a damaged block costs no other sample its bytes, and raises nothing else
            os.pwrite(file.fileno(), bytes([whole[at] ^ 1]), at)
            damaged = Shard(tmp_path / "x.tar")
            for ref in damaged.index.samples:
                with contextlib.suppress(Dropped):
                    damaged.load(ref)
            damaged.close()
            os.pwrite(file.fileno(), whole[at : at + 1], at)


def test_compressed_texts_are_read_and_damaged_ones_named(tmp_path: Path) -> None:
    packed = {"txt.gz": gzip.compress(b"a text"), "JSON.gz": gzip.compress(b"{}" * 9000), "nii.gz": gzip.compress(b"n")}
    data = tar_bytes([{"__key__": "a", "jpg": b"J", **packed}, {"__key__": "b", "txt.gz": packed["txt.gz"][:-3]}])
    (tmp_path / "x.tar").write_bytes(data)
    shard = Shard(tmp_path / "x.tar")
    first, second = shard.index.samples
    assert shard.load(first) == {"jpg": b"J", "txt": b"a text", "json": b"{}" * 9000, "nii.gz": packed["nii.gz"]}
    assert shard.load(first, ("jpg", "txt")) == {"jpg": b"J", "txt": b"a text"}
    with pytest.raises(Dropped, match=r"unreadable_member: .*b\.txt: damaged"):
        shard.load(second)


def test_a_file_given_to_tar_twice_is_one_member(tmp_path: Path) -> None:
    for name in ("a.jpg", "a.txt", "b.jpg"):
        (tmp_path / name).write_text(name)
    subprocess.run(["tar", "-cf", "x.tar", "a.jpg", "a.jpg", "a.txt", "b.jpg", "a.txt"], cwd=tmp_path, check=True)
    assert [(ref.key, *ref.members) for ref in scan(tmp_path / "x.tar").samples] == [("a", "jpg", "txt"), ("b", "jpg")]


def test_sizes_in_base_256(tmp_path: Path) -> None:
    data = bytearray(tar_bytes([{"__key__": "a", "jpg": b"x" * 700}], tarfile.GNU_FORMAT))
    data[124:136] = b"\x80" + (700).to_bytes(11, "big")
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    assert scan_bytes(tmp_path, bytes(data))[1] == {"a": {"jpg": b"x" * 700}}


def test_load_reads_what_is_asked_for(tmp_path: Path) -> None:
    sample = {"__key__": "a", "jpg": b"i" * 10, "npy": bytes(200_000), "txt": b"t"}
    path = write_tar(tmp_path / "a.tar", [sample])
    shard = Shard(path)
    assert shard.load(shard.index.samples[0], ("txt", "jpg", "json")) == {"txt": b"t", "jpg": b"i" * 10}
    assert shard.load(shard.index.samples[0], ()) == {}
    other = ShardIndex([SampleRef("a", {"jpg": (path.stat().st_size - 5, 10)})])
    with pytest.raises(Dropped, match="the file ends before it"):
        Shard(path, other).load(other.samples[0])


# How a file becomes another one: by truncation, appending, rewriting in place (`cp`), and renaming (`mv`, `rsync`).
CHANGES = {
    "cut": lambda path, new: os.truncate(path, 2048),
    "appended": lambda path, new: path.open("ab").write(new[:512]),
    "written": lambda path, new: path.write_bytes(new),
    "replaced": lambda path, new: (new_file := path.with_name("new")).write_bytes(new) and new_file.replace(path),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_tar_that_changes_is_an_error_that_names_it(tmp_path: Path, how: str) -> None:
    """One of the same size, too."""
    path, new = write_tar(tmp_path / "a.tar", SAMPLES), tar_bytes([{**one, "txt": "caption x"} for one in SAMPLES])
    os.utime(path, ns=(0, 10**18))
    source = Source(SourceSettings(shards=str(path)), SourceContext(ShardCache(None)))
    before = source.open(source.names[0])
    assert len(new) == path.stat().st_size and before.load(before.index.samples[1])["txt"] == b"caption 1"
    CHANGES[how](path, new)
    with pytest.raises(ShardChanged, match=f"{path} has changed since its samples were listed"):
        source.open(source.names[0])
    with contextlib.nullcontext() if how == "replaced" else pytest.raises(ShardChanged, match=str(path)):
        assert before.load(before.index.samples[1])["txt"] == b"caption 1"  # of the old file, which is still open


def test_an_index_of_a_tar_that_was_written_again_within_a_second_is_not_used(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", SAMPLES)
    indexes.write(tmp_path / f"a.tar{indexes.SUFFIX}", scan(path), indexes.identity_of(path))
    written = os.stat(tmp_path / f"a.tar{indexes.SUFFIX}").st_mtime_ns
    assert indexes.open_index(str(path), None) is not None
    os.utime(path, ns=(written, written // 10**9 * 10**9 + 999_999_999))
    index = tmp_path / f"a.tar{indexes.SUFFIX}"
    indexes.write(index, scan(path), indexes.identity_of(path))
    os.utime(index, ns=(written, written // 10**9 * 10**9 + 999_999_998))
    assert indexes.open_index(str(path), None) is None


def test_shards_read_as_webdataset_reads_them(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [*SAMPLES, {"__key__": "a/b.c", "seg.png": b"1", "JPG": b"2", "json": b"{}"}])
    shard = Shard(path)
    for ref, sample in zip(shard.index.samples, webdataset.WebDataset(str(path), shardshuffle=False), strict=True):
        ours = {"__key__": ref.key, **shard.load(ref)}
        assert ours == {k: v for k, v in sample.items() if k not in ("__url__", "__local_path__")}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.text(st.characters(codec="utf-8")), st.dictionaries(st.sampled_from(["jpg", "txt", "é"]),
       st.tuples(st.integers(0, 2**50), st.integers(0, 2**40))))))  # fmt: skip
def test_a_table_gives_the_references_that_were_put_in(rows: list[tuple[str, dict[str, tuple[int, int]]]]) -> None:
    refs = [SampleRef(*row) for row in rows]
    table = SampleRefs(refs)
    assert len(table) == len(refs) and list(table) == refs == table and table[1:] == refs[1:]
    assert [table[-i] for i in range(1, len(refs) + 1)] == refs[::-1]
    assert [list(table[i].members) for i in range(len(refs))] == [list(ref.members) for ref in refs]
    for beyond in (len(refs), -len(refs) - 1):
        with pytest.raises(IndexError):
            table[beyond]


def test_an_open_shard_takes_little_memory(tmp_path: Path) -> None:
    samples = [{"__key__": f"{i:09d}", "jpg": b"", "txt": b"", "json": b""} for i in range(3000)]
    path = write_tar(tmp_path / "x.tar", samples)
    tracemalloc.start()
    try:
        shard = Shard(path)
        assert tracemalloc.get_traced_memory()[0] < 120 * len(samples)
    finally:
        tracemalloc.stop()
    shard.close()


def test_appended_members_replace_earlier_ones(tmp_path: Path) -> None:
    """As GNU tar 1.34 extracts an archive to which `tar -r` appended members: the last one of a name stays."""
    parts = [("a", "jpg", b"1"), ("a", "txt", b"old"), ("b", "jpg", b"2"), ("b", "txt", b"b"), ("c", "jpg", b"3")]
    for appended, expected in (
        ([("a", "txt", b"new")], {"a": {"jpg": b"1", "txt": b"new"}}),
        ([("a", "txt", b"new"), ("b", "jpg", b"4"), ("a", "txt", b"newer")],
         {"a": {"jpg": b"1", "txt": b"newer"}, "b": {"jpg": b"4", "txt": b"b"}}),
        ([("a", "json", b"{}"), ("a", "txt", b"new")], {"a": {"jpg": b"1", "txt": b"new", "json": b"{}"}}),
    ):  # fmt: skip
        path = tmp_path / "a.tar"
        with tarfile.open(path, "w") as tar:
            for key, suffix, data in (*parts, *appended):
                info = tarfile.TarInfo(f"{key}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        shard = Shard(path)
        found = {ref.key: shard.load(ref) for ref in shard.index.samples}
        assert found == {"b": {"jpg": b"2", "txt": b"b"}, "c": {"jpg": b"3"}, **expected}
        assert [ref.key for ref in shard.index.samples] == ["a", "b", "c"] and shard.index.fault is None
        shard.close()
    # Joined shards, whose keys begin anew: other samples.
    with tarfile.open(path, "w") as tar:
        for key in "abab":
            for suffix in ("jpg", "txt"):
                tar.addfile(tarfile.TarInfo(f"{key}.{suffix}"))
    assert [ref.key for ref in Shard(path).index.samples] == ["a", "b", "a", "b"]


MANY = 30_000


@pytest.mark.parametrize(
    ("names", "samples"),
    [
        ([f"a.m{i}" for i in range(MANY)], 1),
        ([f"{'ab'[i % 2]}.m{i}" for i in range(MANY)], MANY),
        ([*(f"a.m{i}" for i in range(MANY)), *(("b.txt", "a.m1")[i % 2] for i in range(MANY))], MANY // 2 + 1),
    ],
    ids=["of one key", "of keys in turn", "appended in turn"],
)
def test_many_members_take_linear_time(tmp_path: Path, names: list[str], samples: int) -> None:
    header = bytearray(tarfile.TarInfo("x").tobuf(tarfile.USTAR_FORMAT))
    with open(tmp_path / "x.tar", "wb") as file:
        for name in names:
            header[:100] = name.encode().ljust(100, b"\0")
            header[148:156] = b" " * 8
            header[148:156] = b"%06o\0 " % sum(header)
            file.write(header)
        file.write(bytes(1024))
    found = scan(tmp_path / "x.tar").samples
    assert len(found) == samples
    assert len({*found[0].members}) == (1 if samples == MANY else MANY)


def test_extended_headers_of_many_records_take_linear_time(tmp_path: Path) -> None:
    archive = tarfile.open(tmp_path / "x.tar", "w", pax_headers={f"n{i}": "x" for i in range(40_000)})  # noqa: SIM115
    with archive:
        for number in range(3000):
            archive.addfile(tarfile.TarInfo(f"{number}.txt"))
    assert len(scan(tmp_path / "x.tar").samples) == 3000


@pytest.mark.parametrize("name", ["txt", "json", "jpg"])
def test_a_member_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path, name: str) -> None:
    size = (MOST_MEMBER if name == "jpg" else MOST_TEXT) + 1
    large = tarfile.TarInfo(f"a.{name}")
    large.size = size
    rest = io.BytesIO()
    with tarfile.open(fileobj=rest, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.cls"))
    with open(tmp_path / "x.tar", "wb") as file:  # with a hole
        file.write(large.tobuf(tarfile.USTAR_FORMAT))
        file.seek(-(-size // 512) * 512, os.SEEK_CUR)
        file.write(rest.getvalue())
    shard = Shard(tmp_path / "x.tar")
    ref = shard.index.samples[0]
    tracemalloc.start()
    with pytest.raises(Dropped, match=rf"member_too_large: .*x\.tar: a\.{name}: {size:,} bytes, more than [\d,]+ MiB"):
        shard.load(ref)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert shard.load(ref, ["cls"]) == {"cls": b""}
    shard.close()

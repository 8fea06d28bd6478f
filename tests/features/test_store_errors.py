"""Damaged, incomplete and unfitting stores: each is an error that names the file and what to do."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clipstream.errors import ClipstreamError, DataError, SettingsError
from clipstream.features.manifest import PartInfo, _checksum
from clipstream.features.store import FeatureStore
from clipstream.features.stored_rows import StoredRows
from clipstream.features.writer import Chunk, StoreWriter, Texts
from tests.support.features import PARTS, Content, read_all
from tests.support.json_values import JSON, changed, places

SMALL = Content(sizes={"train": [40, 9]})


def files_of(folder: Path) -> dict[str, bytes]:
    """Content of all files by path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "zstd"])
def content(request: pytest.FixtureRequest) -> Content:
    """A small store, plain and compressed."""
    return replace(SMALL, parts={name: replace(part, zstd=request.param) for name, part in PARTS.items()})


@pytest.fixture(scope="module")
def made(content: Content, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    content.make(folder)
    return folder


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_a_flipped_bit_anywhere_is_found_and_written_anew(made: Path, content: Content, data: st.DataObject) -> None:
    """In a chunk file and the manifest any bit is noticed; in a compressed file any bit that changes what is read."""
    whole, wanted = files_of(made), read_all(made)
    name = data.draw(st.sampled_from([name for name in sorted(whole) if name != ".lock"]))
    position = data.draw(st.integers(0, len(whole[name]) - 1))
    damaged = bytearray(whole[name])
    damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    (made / name).write_bytes(damaged)
    try:
        assert read_all(made) == wanted and not name.endswith(".safetensors")
    except (DataError, SettingsError) as error:
        assert name in str(error) and "\n" not in str(error)
        if name != "store.json":
            assert "clipstream precompute" in str(error)
            content.make(made)
            assert files_of(made) == whole
    finally:
        (made / name).write_bytes(whole[name])


def test_files_that_are_missing_or_truncated_are_written_anew(made: Path, content: Content, tmp_path: Path) -> None:
    whole = files_of(made)
    shutil.copytree(made, tmp_path / "store")
    for name, share in itertools.product(whole.keys() - {".lock", "store.json"}, (None, 0.5, 0)):
        path = tmp_path / "store" / name
        path.unlink()
        if share is not None:
            path.write_bytes(whole[name][: int(len(whole[name]) * share)])
        with pytest.raises(ClipstreamError, match=rf"damaged: {re.escape(str(path))}: .*clipstream precompute"):
            read_all(tmp_path / "store")
        content.make(tmp_path / "store")
        assert files_of(tmp_path / "store") == whole


def test_a_file_of_another_chunk_or_store_is_found(tmp_path: Path) -> None:
    """Also where model, source, shard and shape have the same names and sizes."""
    content = replace(SMALL, sizes={"train": [9, 9]})
    parts = {**PARTS, "image": replace(PARTS["image"], fingerprint={"model": "b"})}
    content.make(tmp_path / "own")
    replace(content, parts=parts).make(tmp_path / "other")
    whole = files_of(tmp_path / "own")
    for taken in ("own/image/train/00000-0000.safetensors", "other/image/train/00001-0000.safetensors"):
        shutil.copy(tmp_path / taken, tmp_path / "own/image/train/00001-0000.safetensors")
        with pytest.raises(DataError, match=r"00001-0000\.safetensors: it is a chunk of another store, part or shard"):
            read_all(tmp_path / "own")
        content.make(tmp_path / "own")
        assert files_of(tmp_path / "own") == whole


def test_a_chunk_that_changes_while_it_is_held_or_between_two_uses_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the same content, and one that is replaced by another file, go on; what was mapped stays mapped."""
    SMALL.make(tmp_path)
    source = FeatureStore(tmp_path).source("train")
    path, rows = tmp_path / "image/train/00000-0000.safetensors", np.arange(3)
    whole = path.read_bytes()
    monkeypatch.setattr("clipstream.features.store.LOOKED", 1e12)
    with source.holding(0):
        before = source.gather("image", rows)
        path.write_bytes(whole[:-1] + b"x")
        source.gather("image", rows)  # not yet looked at
        monkeypatch.setattr("clipstream.features.store.LOOKED", 0.0)
        for content, message in ((whole[:-1] + b"x", "its CRC-32 is wrong"), (whole[:-1], "it is truncated")):
            path.write_bytes(content)
            os.utime(path, (1, 1))
            for read in (lambda: source.gather("image", rows), lambda: source.sample_rows(rows)):
                with pytest.raises(DataError, match=rf"damaged: {re.escape(str(path))}: {message}"):
                    read()
        path.write_bytes(whole)
        assert torch.equal(source.gather("image", rows), before)
        path.with_suffix(".tmp").write_bytes(whole[:-1] + b"x")
        path.with_suffix(".tmp").replace(path)
        assert torch.equal(source.gather("image", rows), before)
    with pytest.raises(DataError, match="its CRC-32 is wrong"):
        source.hold(0)


def test_a_compressed_chunk_of_too_many_bytes_is_refused_in_little_memory(tmp_path: Path) -> None:
    content = replace(SMALL, parts={"image": replace(PARTS["image"], zstd=True)})
    content.make(tmp_path)
    path = tmp_path / "image/train/00000-0000.safetensors.zst"
    whole = path.read_bytes()
    with pa.OSFile(str(path), "wb") as file, pa.CompressedOutputStream(file, "zstd") as packed:
        packed.write(pa.CompressedInputStream(pa.py_buffer(whole), "zstd").read())
        for _ in range(1024):
            packed.write(bytes(1 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=rf"{re.escape(str(path))}: it has more than its 1,050,\d+ bytes"):
        read_all(tmp_path)
    content.make(tmp_path)
    assert path.read_bytes() == whole
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"9" * 5000, b"\xff", b'{"version": 1, "sources": {}}'])
def test_a_manifest_of_something_else(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "store.json").write_bytes(content)
    with pytest.raises(SettingsError, match=r"the feature store is damaged: .*store\.json"):
        FeatureStore(tmp_path)


def write_manifest(folder: Path, values: dict[str, Any]) -> None:
    """With a right checksum, as another program may write it."""
    values = {name: value for name, value in values.items() if name != "crc32"}
    (folder / "store.json").write_text(json.dumps({**values, "crc32": _checksum(values)}))


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_a_manifest_of_any_content_is_read_or_an_error_of_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    made = tmp_path_factory.mktemp("changed")
    SMALL.make(made)
    before = json.loads((made / "store.json").read_bytes())
    write_manifest(made, changed(before, data.draw(st.sampled_from(places(before)[1:])), data.draw(JSON)))
    for use in (read_all, lambda path: StoredRows(FeatureStore(path)).names([0]), SMALL.make):
        try:
            use(made)
        except ClipstreamError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("sources", "train", "shards", 0, "samples"), -5),
        (("sources", "train", "shards", 0, "samples"), 5000),
        (("sources", "train", "shards", 0, "captions"), []),
        (("sources", "train", "weights"), [float("nan"), 1.0]),
        (("sources", "train", "paths"), 1),
        (("parts", "image", "width"), 10**30),
        (("parts", "ids", "dtype"), "float16"),
        (("parts", "t.image", "logit_scale"), float("inf")),
        (("chunk_rows",), 1000),
        (("complete",), 1),
    ],
)
def test_counts_types_and_ranges_of_the_manifest(tmp_path: Path, place: tuple[Any, ...], value: Any) -> None:
    SMALL.make(tmp_path)
    write_manifest(tmp_path, changed(json.loads((tmp_path / "store.json").read_bytes()), place, value))
    with pytest.raises(SettingsError, match=r"^the feature store is damaged: .*store\.json: [^\n]*$"):
        FeatureStore(tmp_path)


def write_in_child(path: Path) -> None:
    with pytest.raises(SettingsError, match="another process writes"):
        StoreWriter(path, SMALL.draft())


def test_other_folders_versions_and_names(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"file/draft\.json cannot be written: File exists"):
        StoreWriter(tmp_path / "file", SMALL.draft())
    with pytest.raises(SettingsError, match=r"is not empty and holds no feature store \(it has file\)"):
        StoreWriter(tmp_path, SMALL.draft())
    folder = tmp_path / "store"
    with pytest.raises(SettingsError, match=r"no feature store \(store.json: No such file"):
        FeatureStore(folder)
    with StoreWriter(folder, SMALL.draft()) as writer:
        SMALL.write(writer, "train", 0, 0)
        with pytest.raises(SettingsError, match="incomplete: run the same"):
            FeatureStore(folder)
        with pytest.raises(SettingsError, match=r"incomplete .*texts/train/00001-0000.* is missing"):
            writer.finish()
        assert ends_before(None, write_in_child, folder)
    manifest = SMALL.make(folder)
    store = FeatureStore(folder)
    with pytest.raises(SettingsError, match=r"no source 'trian'.*did you mean 'train'"):
        store.source("trian")
    with pytest.raises(SettingsError, match=r"no part 't2\.image', only image, text, ids, t\.image"):
        store.source("train", ["t2.image"])
    for change, message in (
        ({"version": 2}, "format 2, and this clipstream reads format 1"),
        ({"complete": False}, "is inc"),
    ):
        (folder / "store.json").write_bytes(replace(manifest, **change).to_bytes())
        with pytest.raises(SettingsError, match=message):
            FeatureStore(folder)


def test_another_towers_features_are_refused_and_parts_may_be_added(content: Content, tmp_path: Path) -> None:
    first = replace(content, parts={name: content.parts[name] for name in ("image", "ids")})
    first.make(tmp_path)
    before = read_all(tmp_path)
    other = {**content.parts, "image": replace(content.parts["image"], fingerprint={"model": "b"})}
    with pytest.raises(SettingsError, match=r'parts\.image\.fingerprint\.model: "a" -> "b"'):
        StoreWriter(tmp_path, replace(content, parts=other).draft())
    with pytest.raises(SettingsError, match="views: 2 -> 3"):
        StoreWriter(tmp_path, replace(first, views=3).draft())
    added = replace(content, parts={"text": content.parts["text"]})
    with StoreWriter(tmp_path, added.draft()) as writer:
        assert set(writer.manifest.parts) == {"image", "ids", "text"}
        assert read_all(tmp_path) == before, "the store is in use meanwhile"
        assert writer.missing("train", 0, 0, "text") and writer.shard_samples("train", 0) == 40
        with pytest.raises(SettingsError, match=r"incomplete .*text/train/00000-0000.* is missing"):
            writer.finish()
    added.rows = content.rows  # type: ignore[method-assign]
    added.make(tmp_path)
    assert set(FeatureStore(tmp_path).manifest.parts) == {"image", "ids", "text"}
    assert len(read_all(tmp_path)) > len(before)


def test_parts_with_views_of_another_seed_are_refused(tmp_path: Path) -> None:
    """The keys of views are stored once, for all parts."""
    for name, seed in (("image", 0), ("t.image", 7)):
        part = replace(PARTS[name], fingerprint={"transform": {"views": 2, "seed": seed}})
        content = replace(SMALL, parts={name: part})
        if not seed:
            content.make(tmp_path)
    with pytest.raises(SettingsError, match=r"transform\.seed: 0 -> 7"):
        StoreWriter(tmp_path, content.draft())


def test_the_writer_refuses_what_does_not_fit_and_adds_what_was_missing(tmp_path: Path) -> None:
    def write(name: str, **changed: Any) -> None:
        made = {**SMALL.rows("train", 0, 0), **changed}
        with StoreWriter(tmp_path / name, SMALL.draft()) as writer:
            writer.write(Chunk("train", 0, 0, 40), made, Texts(*made.pop("texts")))

    made = SMALL.rows("train", 0, 0)
    wrong = (("image", made["image"].float()), ("image", made["image"][1:]), ("samples", made["samples"][1:]))
    for part, rows in wrong:
        with pytest.raises(ValueError, match=f"rows of part {part} are"):
            write(f"{part}{rows.dtype}", **{part: rows})
    made["image"][3, 0] = float("nan")
    made["text"][3, -4:] = -1  # the scale is NaN
    for part in ("image", "text"):
        with pytest.raises(DataError, match=f"part {part} are not finite"):
            write(part, **{part: made[part]})
    write("whole")
    content = replace(SMALL, sizes={"train": [9, 0]})  # the second could not be opened, and is added later
    content.make(tmp_path / "added")
    with StoreWriter(tmp_path / "added", content.draft()) as writer:
        later = SMALL.rows("train", 1, 0)
        writer.write(Chunk("train", 1, 0, 9), later, Texts(*later.pop("texts")))
        assert [shard.samples for shard in writer.finish().sources["train"].shards] == [9, 9]
    keys, captions, reasons = made["texts"]
    with pytest.raises(DataError, match=r"00000\.tar has changed since features of it were computed"):
        write("whole", texts=([*keys[1:], "other"], captions, reasons))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_loses_nothing(content: Content, made: Path, tmp_path: Path) -> None:
    content.make(tmp_path / "store")
    for name in files_of(made):
        if name == ".lock":
            continue
        path = tmp_path / "store" / name
        path.rename(path.with_name("draft.json") if name == "store.json" else tmp_path / "away")
        with StoreWriter(tmp_path / "store", content.draft()) as writer:
            path.with_name(f"{path.name}.tmp").symlink_to("/dev/full")
            with pytest.raises(SettingsError, match=rf"{re.escape(str(path))}.*free space on its disk.*rerun the same"):
                content.fill(writer)
        content.make(tmp_path / "store")
        assert files_of(tmp_path / "store") == files_of(made)


def ends_before(flush: int | None, target: Callable[..., object], *args: object) -> bool:
    """Run a function in a process that is killed when it flushes a file or folder for the so manieth time; whether it
    ended before, without an error.
    """

    def run() -> None:
        numbers, fsync = itertools.count(1), os.fsync

        def flush_or_die(handle: int) -> None:
            if next(numbers) == flush:
                os.kill(os.getpid(), signal.SIGKILL)
            fsync(handle)

        os.fsync = flush_or_die
        target(*args)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


def test_a_killed_writer_is_continued_to_the_same_bytes(tmp_path: Path) -> None:
    content = Content({"train": [300, 4500, 0, 20]}, {**PARTS, "image": PartInfo(64, "float16", "view", zstd=True)})
    content.make(tmp_path / "whole")
    flush = next(n for n in itertools.count(1) if ends_before(n, content.make, tmp_path / "killed"))
    assert flush > 5, "it was killed before and after files got their names"
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")
    read_all(tmp_path / "killed")


def test_features_that_are_not_finite_are_found_by_analysis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of an earlier version, or of another program, may hold them."""
    monkeypatch.setattr("clipstream.features.writer.is_finite", lambda rows: True)
    content, rows = replace(SMALL), SMALL.rows
    content.rows = lambda *where: {**(made := rows(*where)), "image": torch.full_like(made["image"], torch.nan)}  # type: ignore[method-assign]
    content.make(tmp_path)
    with pytest.raises(DataError, match=r"features of part image of 00000.tar are not finite"):
        list(StoredRows(FeatureStore(tmp_path)).blocks())

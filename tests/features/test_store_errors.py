"""Damaged, incomplete and unfitting stores: each is an error that names the file and what to do."""

from __future__ import annotations

import json
import multiprocessing
import random
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clipstream.errors import ClipstreamError, DataError, SettingsError
from clipstream.features.manifest import PartInfo
from clipstream.features.store import FeatureStore
from clipstream.features.writer import StoreWriter
from tests.support.features import PARTS, Content, read_all

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
    """In a chunk file any bit is noticed; in a compressed file any bit that changes what is read."""
    whole, wanted = files_of(made), read_all(made)
    name = data.draw(st.sampled_from([n for n in sorted(whole) if "." in n and n not in (".lock", "store.json")]))
    position = data.draw(st.integers(0, len(whole[name]) - 1))
    damaged = bytearray(whole[name])
    damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    (made / name).write_bytes(damaged)
    try:
        try:
            same = read_all(made) == wanted
        except DataError as error:
            assert name in str(error) and "clipstream precompute" in str(error)
            content.make(made)
            assert files_of(made) == whole
        else:
            assert same and not name.endswith(".safetensors")
    finally:
        (made / name).write_bytes(whole[name])


@pytest.mark.parametrize("harm", ["missing", "truncated", "empty"])
def test_files_that_are_missing_or_truncated_are_found_at_the_start(
    made: Path, content: Content, tmp_path: Path, harm: str
) -> None:
    for name in files_of(made):
        if name in (".lock", "store.json"):
            continue
        folder = tmp_path / name.replace("/", "-")
        shutil.copytree(made, folder)
        path = folder / name
        if harm == "missing":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 * (harm == "truncated")])
        with pytest.raises(ClipstreamError, match=rf"{re.escape(str(path))}[: ].*clipstream precompute"):
            read_all(folder)
        content.make(folder)
        assert files_of(folder) == files_of(made)


def test_a_swapped_chunk_is_found(tmp_path: Path) -> None:
    content = replace(SMALL, sizes={"train": [9, 9]})
    content.make(tmp_path)
    shutil.copy(tmp_path / "image/train/00000-0000.safetensors", tmp_path / "image/train/00001-0000.safetensors")
    with pytest.raises(DataError, match=r"00001-0000\.safetensors is chunk 0 of shard 0"):
        read_all(tmp_path)
    content.make(tmp_path)
    read_all(tmp_path)


def test_a_file_of_another_store_is_found(tmp_path: Path) -> None:
    """Also where model, source, shard and shape have the same names and sizes."""
    own, other = tmp_path / "own", tmp_path / "other"
    parts = {**PARTS, "image": replace(PARTS["image"], fingerprint={"model": "b"})}
    SMALL.make(own)
    replace(SMALL, parts=parts).make(other)
    name = "image/train/00000-0000.safetensors"
    shutil.copy(other / name, own / name)
    with pytest.raises(DataError, match=rf"{re.escape(str(own / name))}.* is of another feature store"):
        read_all(own)
    whole = SMALL.make(tmp_path / "whole")
    assert SMALL.make(own) == whole and files_of(own) == files_of(tmp_path / "whole")


def test_parts_with_views_of_another_seed_are_refused(tmp_path: Path) -> None:
    """The keys of views are stored once, for all parts."""
    image, teacher = (
        replace(PARTS[name], fingerprint={"transform": {"views": 2, "seed": seed}})
        for name, seed in (("image", 0), ("t.image", 7))
    )
    replace(SMALL, parts={"image": image}).make(tmp_path)
    with pytest.raises(SettingsError, match=r"transform\.seed: 0 -> 7"):
        StoreWriter(tmp_path, replace(SMALL, parts={"t.image": teacher}).draft())


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    with pytest.raises(SettingsError, match="store is a file: name a folder"):
        StoreWriter(tmp_path / "store", SMALL.draft())


def test_other_folders_and_versions(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no feature store \(store.json is not there\)"):
        FeatureStore.open(tmp_path)
    writer = StoreWriter(tmp_path, SMALL.draft())
    SMALL.write(writer, "train", 0, 0)
    with pytest.raises(SettingsError, match="incomplete: run the same"):
        FeatureStore.open(tmp_path)
    with pytest.raises(SettingsError, match=r"incomplete .*texts/train/00001-0000.* is missing"):
        writer.finish()
    with pytest.raises(SettingsError, match="another process writes"):
        StoreWriter(tmp_path, SMALL.draft())
    writer.close()
    SMALL.make(tmp_path)
    for change, message in (
        ({"version": 2}, "format 2, and this clipstream reads format 1"),
        ({"kind": "tar"}, "of a store of kind tar, made by an earlier version: precompute the features again"),
        ({"parts": 3}, "is not what clipstream wrote"),
        ({"complete": False}, "is incomplete"),
    ):
        path = tmp_path / "store.json"
        before = path.read_bytes()
        path.write_text(json.dumps({**json.loads(before), **change}))
        with pytest.raises(SettingsError, match=message):
            FeatureStore.open(tmp_path)
        path.write_bytes(before)
    (tmp_path / "store.json").write_bytes(before[:-5])
    with pytest.raises(SettingsError, match="is not what clipstream wrote"):
        FeatureStore.open(tmp_path)


def test_names_that_the_store_lacks(tmp_path: Path) -> None:
    SMALL.make(tmp_path)
    store = FeatureStore.open(tmp_path)
    with pytest.raises(SettingsError, match=r"no source 'trian'.*did you mean 'train'"):
        store.source("trian")
    with pytest.raises(SettingsError, match=r"no part 't2\.image', only image, text, ids, t\.image"):
        store.source("train", ["t2.image"])


def test_another_towers_features_are_refused_and_parts_may_be_added(content: Content, tmp_path: Path) -> None:
    first = replace(content, parts={name: content.parts[name] for name in ("image", "ids")})
    first.make(tmp_path)
    before = read_all(tmp_path)
    other = {**content.parts, "image": replace(content.parts["image"], fingerprint={"model": "b"})}
    with pytest.raises(SettingsError, match=r'parts\.image\.fingerprint\.model: "a" -> "b"'):
        StoreWriter(tmp_path, replace(content, parts=other).draft())
    with pytest.raises(SettingsError, match="views: 2 -> 3"):
        StoreWriter(tmp_path, replace(first, views=3).draft())
    added = replace(content, parts={name: content.parts[name] for name in ("text",)})
    writer = StoreWriter(tmp_path, added.draft())
    assert set(writer.manifest.parts) == {"image", "ids", "text"}
    assert read_all(tmp_path) == before, "the store is in use meanwhile"
    assert writer.missing("train", 0, 0, "text") and writer.shard_samples("train", 0) == 40
    with pytest.raises(SettingsError, match=r"incomplete .*text/train/00000-0000.* is missing"):
        writer.finish()
    writer.close()
    added.rows = content.rows  # type: ignore[method-assign]
    added.make(tmp_path)
    found = FeatureStore.open(tmp_path)
    assert set(found.manifest.parts) == {"image", "ids", "text"}
    with found.source("train", ["text"]).holding(1):
        assert len(read_all(tmp_path)) > len(before)


def test_the_writer_refuses_what_does_not_fit(tmp_path: Path) -> None:
    writer, made = StoreWriter(tmp_path, SMALL.draft()), SMALL.rows("train", 0, 0)
    with pytest.raises(ValueError, match=r"tensor \[n, 12\] of type torch.float16"):
        writer.write("image", "train", 0, 0, made["image"].float(), shard_samples=40)
    with pytest.raises(ValueError, match="has 80 rows"):
        writer.write("image", "train", 0, 0, made["image"][1:], shard_samples=40)
    for part, position in (("image", 0), ("text", -1)):
        rows = made[part].clone()
        rows[3, position - 4 * (part == "text") :] = torch.tensor(float("nan")) if part == "image" else -1
        with pytest.raises(DataError, match=f"part {part} are not finite"):
            writer.write(part, "train", 0, 0, rows, shard_samples=40)
    writer.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_loses_nothing(content: Content, made: Path, tmp_path: Path) -> None:
    content.make(tmp_path / "store")
    for name in files_of(made):
        if name == ".lock":
            continue
        path = tmp_path / "store" / name
        path.rename(path.with_name("draft.json") if name == "store.json" else tmp_path / "away")
        with StoreWriter(tmp_path / "store", content.draft()) as writer:  # it removes what killed processes left
            path.with_name(f"{path.name}.tmp").symlink_to("/dev/full")
            with pytest.raises(
                SettingsError, match=rf"{re.escape(str(path))}.*free space on its disk and run the same"
            ):
                content.fill(writer)
        content.make(tmp_path / "store")
        assert files_of(tmp_path / "store") == files_of(made)


def end_at_random(target: Callable[..., object], *args: object, seconds: float) -> bool:
    """Run a function in a process that is killed after some time; whether it ended before."""
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    process.start()
    process.join(seconds)
    ended = process.exitcode is not None
    process.kill()
    process.join()
    return ended and process.exitcode == 0


def test_a_killed_writer_is_continued_to_the_same_bytes(tmp_path: Path) -> None:
    parts = {**PARTS, "image": PartInfo(64, "float16", "view", zstd=True)}
    content = Content(sizes={"train": [300, 4500, 0, 20]}, parts=parts)
    began = time.monotonic()
    content.make(tmp_path / "whole")
    took, random_ = time.monotonic() - began, random.Random(0)
    for _ in range(100):
        if end_at_random(content.make, tmp_path / "killed", seconds=random_.uniform(0.05, 0.6) * took):
            break
    else:
        content.make(tmp_path / "killed")
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")
    read_all(tmp_path / "killed")

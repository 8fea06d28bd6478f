"""Stores whose files say anything: an error of one sentence or what was stored, never another exception."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import struct
import zlib
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
from clipstream.features import chunks
from clipstream.features.analysis.rows import StoredRows, pair_scores
from clipstream.features.analysis.search import duplicates, search
from clipstream.features.manifest import Manifest, PartInfo, ShardInfo, SourceInfo
from clipstream.features.store import FeatureStore
from clipstream.features.writer import StoreWriter
from clipstream.utils.atomic_write import BLOCK
from tests.support.features import PARTS, Content, read_all
from tests.support.json_values import JSON, changed, places

SMALL = Content(sizes={"train": [40, 9, 0]})


def use(path: Path) -> list[Any]:
    """What the verbs read of a store."""
    found: list[Any] = [*read_all(path)]
    store = FeatureStore.open(path)
    for part in ("image", "text"):
        rows = StoredRows(store, part)
        some = rows.find("0/000003") + list(range(min(3, len(rows))))
        best = search(rows, rows.gather(some), 3) if some else None
        found.append((some, rows.identity(), rows.names(best.rows.flatten().tolist() if best else [])))
    return [*found, [pair.scores.tolist() for pair in pair_scores(store)], store.manifest.to_json()]


def one_sentence(error: ClipstreamError) -> None:
    assert isinstance(error, SettingsError | DataError) and "\n" not in str(error)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("hostile")
    SMALL.make(folder)
    return folder, use(folder)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_value_at_any_place_of_the_manifest(made: tuple[Path, list[Any]], data: st.DataObject) -> None:
    """With the file's checksum nothing else is read; without it, and as a draft, there is an error or a store."""
    path, wanted = made[0] / "store.json", made[1]
    before = path.read_bytes()
    values = json.loads(before)
    sealed = data.draw(st.booleans())
    place = data.draw(st.sampled_from(places(values)))
    harmed = changed(values, place, data.draw(JSON))
    if not sealed and isinstance(harmed, dict):
        harmed.pop("crc32", None)
    path.write_text(json.dumps(harmed))
    try:
        try:
            assert use(made[0]) == wanted or not sealed or place == ("crc32",)
        except ClipstreamError as error:
            one_sentence(error)
        draft = made[0].parent / "draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        (draft / "draft.json").write_bytes(path.read_bytes())
        try:
            StoreWriter(draft, SMALL.draft()).close()
        except ClipstreamError as error:
            one_sentence(error)
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize(
    "content", [b"", b"[" * 100_000, b"9" * 5000, b"\xff", b'{"version": 1, "sources": ' + b'{"a":' * 900 + b"1}"]
)
def test_a_manifest_that_is_no_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "store.json").write_bytes(content)
    with pytest.raises(SettingsError, match="is not what clipstream wrote"):
        FeatureStore.open(tmp_path)


@pytest.mark.parametrize(
    ("place", "value"),
    [((0, "samples"), -5), ((0, "samples"), 39), ((0, "samples"), 50), ((0, "captions"), [-1]), ((), [])],
)
def test_counts_that_are_not_those_of_the_chunks(
    made: tuple[Path, list[Any]], place: tuple[Any, ...], value: Any
) -> None:
    path = made[0] / "store.json"
    before = path.read_bytes()
    values = json.loads(before)
    del values["crc32"]
    try:
        path.write_text(json.dumps(changed(values, ("sources", "train", "shards", *place), value)))
        with pytest.raises(ClipstreamError):
            use(made[0])
    finally:
        path.write_bytes(before)


def forge(store: Path, part: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Change the tensors of the first chunk of a part; its CRC-32 is right afterwards."""
    path = store / part / "train/00000-0000.safetensors"
    handle = os.open(path, os.O_RDONLY)
    header = chunks.read_header(handle, path)
    tensors = chunks.read_tensors(handle, header)
    os.close(handle)
    change(tensors)
    more = {name: value for name, value in header.meta.items() if name != chunks.CRC}
    path.write_bytes(b"".join(chunks.render(header.id, tensors, more)))
    return path


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_number_at_any_place_of_a_chunk(made: tuple[Path, list[Any]], data: st.DataObject) -> None:
    part = data.draw(st.sampled_from(["samples", "texts", "text", "image"]))
    path = made[0] / part / "train/00000-0000.safetensors"
    before = path.read_bytes()

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensor = tensors[name := data.draw(st.sampled_from(sorted(tensors)))]
        if data.draw(st.integers(0, 3)) == 0:
            drop = data.draw(st.sampled_from(["all", "last", "shape"]))
            shaped = {"last": tensor[:-1], "shape": tensor.reshape(1, -1)}
            tensors.pop(name) if drop == "all" else tensors.update({name: shaped[drop]})
            return
        raw = tensor.reshape(-1).view(torch.uint8)
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + 8] = torch.tensor(list(data.draw(st.binary(min_size=1, max_size=1))), dtype=torch.uint8)

    forge(made[0], part, change)
    try:
        use(made[0])
    except ClipstreamError as error:
        one_sentence(error)
    finally:
        path.write_bytes(before)


def padded(values: Any) -> bytes:
    text = json.dumps(values, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % BLOCK)
    return struct.pack("<Q", len(text)) + text


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_value_at_any_place_of_a_chunks_header(made: tuple[Path, list[Any]], data: st.DataObject) -> None:
    """Its CRC-32 is right; a writer that continues the store makes the chunk again."""
    path = made[0] / data.draw(st.sampled_from(["samples", "texts", "text"])) / "train/00000-0000.safetensors"
    before = path.read_bytes()
    length = 8 + int.from_bytes(before[:8], "little")
    values = json.loads(before[8:length])
    values = changed(values, data.draw(st.sampled_from(places(values))), data.draw(JSON))
    if isinstance(values, dict) and isinstance(meta := values.get("__metadata__"), dict):
        values["__metadata__"] = {name: value for name, value in meta.items() if name != "crc32"}
        values["__metadata__"]["crc32"] = f"{zlib.crc32(before[length:], zlib.crc32(padded(values))):08x}"
    path.write_bytes(padded(values) + before[length:])
    try:
        try:
            use(made[0])
        except ClipstreamError as error:
            one_sentence(error)
        try:
            SMALL.make(made[0])
        except ClipstreamError as error:
            one_sentence(error)
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_features_that_are_not_finite(tmp_path: Path, value: float) -> None:
    SMALL.make(tmp_path)
    forge(tmp_path, "image", lambda tensors: tensors["rows"][:20, 3].fill_(value))
    rows = StoredRows(FeatureStore.open(tmp_path))
    for act in (lambda: search(rows, torch.ones(1, 12), 3), lambda: duplicates(rows, 0.9)):
        with pytest.raises(DataError, match=r"features of part image of 00000.tar are not finite"):
            act()


def in_child(act: Callable[[], object]) -> int | None:
    """Exit code of a forked process that does something: 0, or -7 after SIGBUS."""
    process = multiprocessing.get_context("fork").Process(target=act)
    process.start()
    process.join(60)
    return process.exitcode


@pytest.mark.parametrize("harm", ["zeros", "truncated", "touched", "replaced"])
def test_a_chunk_that_is_changed_while_it_is_held(tmp_path: Path, harm: str) -> None:
    replace(SMALL, sizes={"train": [4000]}).make(tmp_path)

    def act() -> None:
        source = FeatureStore.open(tmp_path).source("train")
        source.hold(0)
        rows = np.arange(8000)
        whole = source.gather("image", rows)
        path = tmp_path / "image/train/00000-0000.safetensors"
        if harm == "zeros":
            with open(path, "r+b") as file:
                file.seek(4096)
                file.write(bytes(100_000))
        elif harm == "truncated":
            os.truncate(path, 5000)
        elif harm == "touched":
            os.utime(path)
        else:
            (tmp_path / "new").write_bytes(bytes(path.stat().st_size))
            (tmp_path / "new").replace(path)
        source._looked = 0.0  # as a second later: times alone are no event
        if harm in ("touched", "replaced"):
            assert torch.equal(source.gather("image", rows), whole)
            source.release(0)
        for _ in range(2 * (harm != "touched")):  # not once only
            with pytest.raises(DataError, match=r"00000-0000.safetensors is (damaged|truncated)"):
                source.hold(0) if harm == "replaced" else source.gather("image", rows)

    assert in_child(act) == 0


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="inotify is Linux's")
def test_a_change_on_this_machine_is_seen_at_once(tmp_path: Path) -> None:
    SMALL.make(tmp_path)
    source = FeatureStore.open(tmp_path).source("train")
    with source.holding(0):
        source.gather("image", np.arange(80))
        source._looked = float("inf")  # no look because of the time
        with open(tmp_path / "image/train/00000-0000.safetensors", "r+b") as file:
            file.write(b"x")
        with pytest.raises(DataError, match="is damaged"):
            source.sample_rows(np.arange(3))


def test_a_compressed_chunk_has_no_more_bytes_than_the_manifest_says(tmp_path: Path) -> None:
    """Its size decides, before it is unpacked: to open it takes no disk, and a writer makes it again."""
    content = replace(SMALL, parts={name: replace(part, zstd=True) for name, part in PARTS.items()})
    content.make(tmp_path)
    path = tmp_path / "text/train/00000-0000.safetensors.zst"
    before = path.read_bytes()
    path.write_bytes(pa.compress(bytes(64 << 20), codec="zstd", asbytes=True))
    with pytest.raises(DataError, match=r"00000-0000.safetensors.zst has more than its 1,[0-9,]+ bytes"):
        FeatureStore.open(tmp_path).source("train").hold(0)
    content.make(tmp_path)
    assert path.read_bytes() == before


def test_only_the_writers_own_drafts_are_removed(tmp_path: Path) -> None:
    SMALL.make(tmp_path)
    (tmp_path / "notes").mkdir()
    own = [
        "draft.json.tmp",
        "image/train/00000-0000.safetensors.tmp",
        "image/train/00000-0000.safetensors.0a1b2c3d.tmp",
    ]
    others = ["work.tmp", "notes/mine.tmp", "image/train/mine.tmp", "notes/00000-0000.safetensors.tmp"]
    for name in (*own, *others):
        (tmp_path / name).touch()
    SMALL.make(tmp_path)
    assert [name for name in (*own, *others) if (tmp_path / name).exists()] == others


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tmp").touch()
    with pytest.raises(SettingsError, match=r"is not empty and holds no feature store \(it has thesis.tmp\)"):
        StoreWriter(tmp_path, SMALL.draft())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tmp"]


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "../../x", "%2E%2E", "...", "a\x00"])
def test_names_of_sources_stay_in_the_store(tmp_path: Path, name: str) -> None:
    content = Content(sizes={name: [5], "train": [5]})
    content.make(tmp_path / "s")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    assert sorted(path.parent.parent.name for path in (tmp_path / "s").glob("*/*/*.safetensors")) == sorted(
        [*PARTS, "samples", "texts"] * 2
    )
    source = FeatureStore.open(tmp_path / "s").source(name)
    assert len(source.keys(0)) == 5


def test_non_utf8_names_of_shards(tmp_path: Path) -> None:
    source = SourceInfo((ShardInfo("a\udcff.tar", 0),))
    manifest = Manifest({"train": source}, {"image": PartInfo(4, "float16", "view")}, complete=True)
    (tmp_path / "store.json").write_bytes(manifest.to_bytes())
    assert FeatureStore.open(tmp_path).manifest == manifest

"""Tables (CSV, TSV, JSONL, JSON, Parquet) work as tars do; a bad row affects that row only."""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from clipstream.config.settings import load
from clipstream.data.batch import ImageSpec
from clipstream.data.build import training_loader
from clipstream.data.loader.loader import Loader
from clipstream.data.settings import DataSettings, SourceSettings
from clipstream.data.sources import Source, tables
from clipstream.distributed.world import World
from clipstream.errors import DataError
from clipstream.storage.shard_url import table_format
from tests.support.loaders import INPUTS, evaluation_of
from tests.support.pictures import ByteTokenizer, picture
from tests.support.ranks import TIMEOUT

IMAGE = ImageSpec((16, 16))
COUNT = 37
Rows = Sequence[dict[str, Any]]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPSTREAM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    """Rows whose pictures lie beside the manifests, in a folder."""
    (tmp_path / "pictures").mkdir()
    for number in range(COUNT):
        (tmp_path / "pictures" / f"{number}.jpg").write_bytes(picture(number))
    return [{"FilePath": f"pictures/{n}.jpg", "title": f'a "big", red {n}', "n": str(n)} for n in range(COUNT)]


def write_csv(path: Path, rows: Rows, delimiter: str = ",") -> None:
    with open(path, "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def write_jsonl(path: Path, rows: Rows) -> None:
    path.write_text("\n\n".join(json.dumps(row) for row in rows))


def write_jsonl_gz(path: Path, rows: Rows) -> None:
    path.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows).encode()))


def write_json(path: Path, rows: Rows) -> None:
    path.write_text(json.dumps(rows, indent=2))


def write_parquet(path: Path, rows: Rows, **options: Any) -> None:
    parquet.write_table(pa.Table.from_pylist(list(rows)), path, **options)


def write_arrow(path: Path, rows: Rows, new: Any) -> None:
    table = pa.Table.from_pylist(list(rows))
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)


def in_utf16(path: Path, rows: Rows, encoding: str) -> None:
    write_csv(path, rows, "\t")
    path.write_bytes(path.read_text(encoding="utf-8-sig").encode(encoding))


def with_first_line(path: Path, rows: Rows, line: str) -> None:
    write_csv(path, rows, ";")
    path.write_text(line + "\n" + path.read_text(encoding="utf-8-sig"))


def windows(path: str) -> str:
    return str(PureWindowsPath(path))


def in_base64(path: Path, rows: Rows, prefix: str = "") -> Rows:
    names = [path.parent / row["FilePath"] for row in rows]
    texts = [prefix + base64.b64encode(name.read_bytes()).decode() for name in names]
    return [{**row, "FilePath": text} for row, text in zip(rows, texts, strict=True)]


def write_columns(path: Path, rows: Rows, form: str) -> None:
    """As pandas' to_json writes it by orient, or the captions by path."""
    named = {str(n): row for n, row in enumerate(rows)}
    columns = {name: {n: row[name] for n, row in named.items()} for name in rows[0]}
    forms: dict[str, Any] = {
        "columns": columns,
        "index": named,
        "list": {name: [*values.values()] for name, values in columns.items()},
        "split": {"columns": [*columns], "index": [*named], "data": [[*row.values()] for row in rows]},
        "table": {"schema": {"fields": [], "primaryKey": ["n"]}, "data": [*rows]},
        "map": {row["FilePath"]: row["title"] for row in rows},
        "lists": {row["FilePath"]: [row["title"]] for row in rows},
        "rows": {row["FilePath"]: {"title": row["title"]} for row in rows},
    }
    path.write_text(json.dumps(forms[form], indent=1 if form in ("split", "map") else None))


def write_spaced(path: Path, rows: Rows) -> None:
    write_csv(path, rows)
    text = path.read_text(encoding="utf-8-sig")
    path.write_text("\n".join(line.replace(",", " , ", 1) for line in text.splitlines()))


WRITERS: dict[str, Callable[[Path, Rows], None]] = {
    "pairs.csv": write_csv,
    "pairs.tsv": lambda path, rows: write_csv(path, rows, "\t"),
    "semicolon.csv": lambda path, rows: write_csv(path, rows, ";"),
    "pairs.jsonl": write_jsonl,
    "pairs.jsonl.gz": write_jsonl_gz,
    "pairs.json": write_json,
    "pairs.parquet": lambda path, rows: write_parquet(path, rows, row_group_size=5),
    "stream.arrow": lambda path, rows: write_arrow(path, rows, pa.ipc.new_stream),
    "file.arrow": lambda path, rows: write_arrow(path, rows, pa.ipc.new_file),
    "utf16.tsv": lambda path, rows: in_utf16(path, rows, "utf-16"),
    "utf16-le.tsv": lambda path, rows: in_utf16(path, rows, "utf-16-le"),
    "utf16-be.tsv": lambda path, rows: in_utf16(path, rows, "utf-16-be"),
    "sep.csv": lambda path, rows: with_first_line(path, rows, "sep=;"),
    "quoted-sep.csv": lambda path, rows: with_first_line(path, rows, '"sep=;"'),
    "spaced.csv": write_spaced,
    **{
        f"{form}.json": lambda path, rows, form=form: write_columns(path, rows, form)  # type: ignore[misc]
        for form in ("columns", "index", "list", "split", "table", "map", "lists", "rows")
    },
    "windows.csv": lambda path, rows: write_csv(path, [{**r, "FilePath": windows(r["FilePath"])} for r in rows]),
    "base64.csv": lambda path, rows: write_csv(path, in_base64(path, rows)),
    "data-url.jsonl": lambda path, rows: write_jsonl(path, in_base64(path, rows, "data:image/jpeg;base64,")),
    "list.parquet": lambda path, rows: write_parquet(path, [{**r, "FilePath": [r["FilePath"], "other"]} for r in rows]),
    "structs.parquet": lambda path, rows: write_parquet(
        path, [{**r, "FilePath": [{"bytes": (path.parent / r["FilePath"]).read_bytes(), "path": "x"}]} for r in rows]
    ),
}


def source(shards: Any, **changes: Any) -> dict[str, Any]:
    return {"shards": str(shards), "caption": {"type": "text", "key": "title"}, **changes}


def loader(source: dict[str, Any], rank: int = 0, size: int = 1, **changes: Any) -> Loader:
    values = {"global_batch_size": 12, "lanes": 8, "workers": 0, "shuffle": {"window": 10, "shards": 2}, **changes}
    data = DataSettings.model_validate({**values, "sources": {"train": source}})
    world = World(rank=rank, size=size)
    return training_loader(data, INPUTS, world=world, seed=3)


def seen(loaders: Sequence[Loader], steps: int = 6) -> list[str]:
    """Hashes of the global batches: pixels, ids, and the rows that they are of."""
    found = []
    try:
        for _ in range(steps):
            parts = [next(one) for one in loaders]
            digest = hashlib.sha256()
            for name in ("pixels", "ids"):
                digest.update(torch.cat([getattr(part, name) for part in parts]).contiguous().numpy().tobytes())
            digest.update(repr([key.partition("/")[2] for part in parts for key in part.keys]).encode())
            found.append(digest.hexdigest())
    finally:
        for one in loaders:
            one.close()
    return found


def all_of(source: dict[str, Any], **options: Any) -> tuple[dict[str, str], dict[str, int]]:
    """Key -> caption of every usable row, in evaluation, and the drops by reason."""
    settings = SourceSettings.model_validate(source)
    tokenizer, found = ByteTokenizer(), {}
    with evaluation_of(settings, 5, **options) as batches:
        for batch in batches:
            found |= {key: tokenizer.decode(ids.tolist()) for key, ids in zip(batch.keys, batch.ids, strict=True)}
        return found, dict(batches.health.sources["eval"].dropped)


def test_every_kind_gives_the_same_batches_in_every_layout(tmp_path: Path, rows: Rows) -> None:
    expected: list[str] = []
    for name, write in WRITERS.items():
        write(tmp_path / name, rows)
        expected = expected or seen([loader(source(tmp_path / name))])
        assert seen([loader(source(tmp_path / name))]) == expected, name
    assert len(set(expected)) == 6
    for ranks, workers in ((1, 2), (3, 0), (2, 1)):
        parts = [loader(source(tmp_path / "pairs.csv"), rank, ranks, workers=workers) for rank in range(ranks)]
        assert seen(parts) == expected, (ranks, workers)


def test_each_row_once_in_evaluation(tmp_path: Path, rows: Rows) -> None:
    write_csv(tmp_path / "pairs.csv", rows)
    found, dropped = all_of(source(tmp_path / "pairs.csv"))
    assert found == {f"pairs.csv/{n}": f'a "big", red {n}'[:16] for n in range(COUNT)} and not dropped
    table = Source(SourceSettings.model_validate(source(tmp_path / "pairs.csv")))
    assert (table.samples, table.summary()) == (COUNT, f"1 manifest, {COUNT} samples")


def test_manifests_and_tars_are_one_source(tmp_path: Path, rows: Rows) -> None:
    from tests.support.pictures import make_shards

    write_csv(tmp_path / "pairs.csv", [{"txt": row["title"], "filepath": row["FilePath"]} for row in rows])
    tars = make_shards(tmp_path / "tars", [4, 3])
    found, _ = all_of({"shards": [*tars, str(tmp_path / "pairs.csv")], "caption": {"type": "text", "key": "txt"}})
    assert len(found) == 7 + COUNT


def test_broken_rows_cost_themselves_and_are_counted(tmp_path: Path, rows: Rows) -> None:
    (tmp_path / "pictures" / "3.jpg").unlink()
    (tmp_path / "pictures" / "4.jpg").write_bytes(b"no picture")
    lines = ["filepath,title", *(f"pictures/{n}.jpg,caption {n}" for n in range(8))]
    lines[1] = "pictures/0.jpg,one,too,many"
    lines[2] = "pictures/1.jpg, "
    lines[3] = ",no picture"
    text = "\n".join(lines).encode() + b"\nhttps://a.b/c.jpg?token=secret,far\npictures/9.jpg,\xff\xfe\n"
    (tmp_path / "pairs.csv").write_bytes(text)
    found, dropped = all_of(source(tmp_path / "pairs.csv"))
    assert sorted(found) == ["pairs.csv/5", "pairs.csv/6", "pairs.csv/7"]
    expected = {"row_fields": 1, "empty_caption": 1, "no_image": 1, "missing_picture": 2}
    assert {name: count for name, count in dropped.items() if name in expected} == expected
    assert sum(dropped.values()) == 7  # and the one that is no picture; nothing else costs more than itself


def test_rows_of_json_that_are_broken_cost_themselves(tmp_path: Path, rows: Rows) -> None:
    lines = ['{"filepath": "pictures/0.jpg", "title": "fine"}', "[1]", '{"filepath": ', '{"title": "no picture"}']
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    found, dropped = all_of(source(tmp_path / "pairs.jsonl"))
    assert found == {"pairs.jsonl/0": "fine"}
    assert dropped == {"json_not_object": 1, "json_invalid": 1, "no_image": 1}
    (tmp_path / "first.jsonl").write_text("\n".join(['{"filepath": ', *lines[:1]]))
    assert all_of(source(tmp_path / "first.jsonl")) == ({"first.jsonl/1": "fine"}, {"json_invalid": 1})


def test_nested_captions_and_pictures_inside_parquet(tmp_path: Path) -> None:
    table = [
        {"image": {"bytes": picture(n), "path": None}, "caption": {"en": f"nested {n}", "de": None}, "cls": n}
        for n in range(4)
    ]
    write_parquet(tmp_path / "hub.parquet", table)
    caption = {"type": "json", "path": ["caption.de", "caption.en"]}
    found, dropped = all_of({"shards": str(tmp_path / "hub.parquet"), "caption": caption})
    assert found == {f"hub.parquet/{n}": f"nested {n}" for n in range(4)} and not dropped
    table = Source(SourceSettings(shards=str(tmp_path / "hub.parquet")))
    shard = table.open(table.names[0])
    assert shard.load(shard.index.samples[0])["cls"] == b"0"


def test_categories_and_broken_parquet(tmp_path: Path, rows: Rows) -> None:
    table = pa.Table.from_pylist(list(rows))
    table = table.set_column(1, "title", table.column("title").dictionary_encode())
    parquet.write_table(table, tmp_path / "pairs.parquet", row_group_size=3)
    assert len(all_of(source(tmp_path / "pairs.parquet"))[0]) == COUNT
    data = (tmp_path / "pairs.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=r"cut\.parquet: bad_manifest"):
        all_of(source(tmp_path / "cut.parquet"))


def test_values_that_python_cannot_hold_do_no_harm(tmp_path: Path, rows: Rows) -> None:
    titles = pa.array([b"fine", b"\xff\xfe", b"fine, too"]).view(pa.string())
    times = pa.array([0, 1, 2], pa.int64()).cast(pa.timestamp("ns"))
    table = pa.table({"filepath": [f"pictures/{n}.jpg" for n in range(3)], "title": titles, "when": times})
    parquet.write_table(table, tmp_path / "odd.parquet")
    found, dropped = all_of(source(tmp_path / "odd.parquet"))
    assert found == {"odd.parquet/0": "fine", "odd.parquet/2": "fine, too"} and dropped == {"caption_not_utf8": 1}
    nanoseconds = pa.array([1_700_000_000_123_456_789] * 3, pa.timestamp("ns"))
    maps = pa.array([[("en", ["a map"])]] * 3, pa.map_(pa.string(), pa.list_(pa.string())))
    inside = pa.StructArray.from_arrays([maps, nanoseconds], ["texts", "at"])
    parquet.write_table(table.append_column("at", nanoseconds).append_column("in", inside), tmp_path / "odd.parquet")
    for path, expected in (("title", found), ("in.texts.en", {f"odd.parquet/{n}": "a map" for n in range(3)})):
        assert all_of(source(tmp_path / "odd.parquet", caption={"type": "json", "path": path}))[0] == expected


@pytest.mark.parametrize(
    ("table", "flags", "captions"),
    [
        ("filepath\ttitle\n{}\ta\n{}\tb, c\n", "", ["a", "b, c"]),  # open_clip's defaults
        ("filepath,title\n{},a\n{},b\n", "--csv-separator ,", ["a", "b"]),
        ("file;title\n{};a, b\n{};c\td\n", "--csv-separator ; --csv-img-key file", ["a, b", "c\td"]),
        ("filepath\ttitle\tred, green, blue\n{}\ta\t1\n{}\tb\t2\n", "", ["a", "b"]),  # as many commas as tabs
        ("filepath\tcaption\n{}\t1\n{}\t007\n", "--csv-caption-key caption", ["1", "007"]),  # numbers stay as written
        ("filepath\ttitle\n{}\tNA\n{}\t\n", "", ["NA"]),  # which open_clip trains on as "nan", both
        ("filepath\tcaption\n{}\ta\n{}\tb\n", "", ["a", "b"]),  # no column title
        ("path,text\n{},a\n{},b\n", "", ["a", "b"]),
        ("filepath\twords\n{}\ta\n{}\tb\n", "", []),
    ],
)
def test_flags_and_tables_of_open_clips_trainer(tmp_path: Path, table: str, flags: str, captions: list[str]) -> None:
    for name in ("0.jpg", "1.jpg"):
        (tmp_path / name).write_bytes(picture(0))
    (tmp_path / "pairs.csv").write_text(table.format("0.jpg", "1.jpg"))
    data = load(["--train-data=a.tar", f"--val-data={tmp_path}/pairs.csv", *flags.split()]).evals["val"].data
    assert data is not None
    found, dropped = all_of(data.model_dump())
    assert list(found.values()) == captions and sum(dropped.values()) == 2 - len(captions)


@pytest.mark.parametrize("name", ["a.tsv", "a.csv"])
def test_stray_quotes_cost_no_row(tmp_path: Path, name: str) -> None:
    by = "\t" if name == "a.tsv" else ","
    for quoted in (
        {3: '"red', 20: '"blue'},  # two that nothing closes in the row
        {3: '"red', 20: 'blue"'},  # the second looks like the end of the first
        {9: '"red'},
        {29: '"red'},
        dict.fromkeys(range(30), '"red'),
        {3: '"red" and "blue"', 4: '5" tall', 5: '"', 6: 'a ""', 7: '"a'},
        {3: '"one\nline ""two"""', 9: '"a\n\nb"'},
    ):
        lines = [f"i/{n}.jpg{by}{quoted.get(n, f'text {n}')}\n" for n in range(30)]
        (tmp_path / name).write_text(f"filepath{by}title\n{''.join(lines)}")
        tables.to_arrow(tmp_path / name, name, tmp_path / "a.arrow")
        rows = pa.ipc.open_file(pa.OSFile(str(tmp_path / "a.arrow"))).read_all()
        assert rows.column(0).to_pylist() == [f"i/{n}.jpg".encode() for n in range(30)]
    assert rows.column(1)[3].as_py() == b'one\nline "two"' and rows.column(1)[9].as_py() == b"a\n\nb"


def test_quotes_may_be_taken_as_they_stand(tmp_path: Path, rows: Rows) -> None:
    (tmp_path / "a.tsv").write_text('filepath\ttitle\npictures/1.jpg\t"Best" in town\npictures/2.jpg\t5" nails\n')
    found, _ = all_of(source(tmp_path / "a.tsv", quoting=False))
    assert found == {"a.tsv/0": '"Best" in town', "a.tsv/1": '5" nails'}


def test_relative_paths_begin_at_the_list_or_else_where_one_works(
    tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = tmp_path / "lists"
    lists.mkdir()
    write_csv(lists / "pairs.csv", rows)
    write_csv(lists / "absolute.csv", [{**row, "FilePath": str(tmp_path / row["FilePath"])} for row in rows])
    monkeypatch.chdir(tmp_path)
    assert len(all_of(source("lists/pairs.csv"))[0]) == COUNT
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir("/")
    for options in ({"folder": "~"}, {"folder": str(tmp_path)}):
        assert len(all_of(source(lists / "pairs.csv", **options))[0]) == COUNT
    assert len(all_of(source(lists / "absolute.csv"))[0]) == COUNT


def test_lists_of_one_name_are_told_apart(tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, caption in enumerate(("one", "two")):
        home = tmp_path / caption
        home.mkdir()
        (home / "pictures").symlink_to(tmp_path / "pictures")
        (home / "train.csv").write_text(f"filepath,title\npictures/{number}.jpg,{caption}\n")
        os.utime(home / "train.csv", (1, 1))
        monkeypatch.chdir(home)
        assert all_of(source("train.csv"))[0] == {"train.csv/0": caption}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda name: f"gone/{name}", r"missing_picture(.|\n)*--data\.sources\.train\.folder"),
        (lambda name: name[:-4] + ".png", r"the file's name is \d+\.jpg: write that"),
    ],
)
def test_images_that_are_elsewhere_are_told(
    tmp_path: Path, rows: Rows, change: Callable[[str], str], told: str
) -> None:
    write_csv(tmp_path / "pairs.csv", [{**row, "FilePath": change(row["FilePath"])} for row in rows])
    with pytest.raises(DataError, match=told) as caught, loader(source(tmp_path / "pairs.csv")) as one:
        next(one)
    assert "no sample has" not in str(caught.value)


def test_a_list_that_changed_is_read_anew(tmp_path: Path, rows: Rows) -> None:
    import http.server
    import threading
    from functools import partial

    for count in (3, 5):
        write_csv(tmp_path / "pairs.csv", rows[:count])
        assert len(all_of(source(tmp_path / "pairs.csv"))[0]) == count
    (tmp_path / "web").mkdir()
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "web"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/pairs.csv"
        for count in (3, 5):
            write_csv(tmp_path / "web" / "pairs.csv", rows[:count])
            tables._digest.cache_clear()  # as another process would
            tables._downloads.cache_clear()
            assert len(all_of(source(url, folder=str(tmp_path)))[0]) == count
        server.shutdown()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "url,title\nx,y\n", "no column has images.* among url, title .*--image-key"),
        ("a.jsonl", '{"url": "x"}\n', " among url "),
        ("a.csv", "filepath,FILEPATH\nx,y\n", " among filepath.1, filepath.2 "),
        ("a.csv", "filepath,title\n", "bad_manifest: no rows"),
        ("a.csv", 'filepath,title\na,"b,x\nc,d\ne,f\n', "unclosed quote in line 2"),
        ("a.csv", 'filepath,title\na,b\nc,"d,x\n' + "e,f\n" * 500 + 'g,"h"\n', "unclosed quote in line 3"),
        ("a.json", '{"rows": []}', " among rows "),
        ("a.json", '{"images": [{"id": 1, "file_name": "1.jpg"}], "annotations": [{"image_id": 1}]}', "as COCO has it"),
        ("a.json", '{\n "images": [{"id": 1, "file_name": "1.jpg"}],\n "annotations": []}', "as COCO has it"),
        ("a.json", '{\n "rows": []}', "not one object over several lines"),
        ("a.csv", "1.JPG,a dog\n2.JPG,a cat\n", "the header is missing.* among 1.jpg, a dog .the first row of a CSV"),
        ("a.json", '[{"a": 1}, 7]', "expected a list of objects, not '7]'"),
        ("a.json", '[{"a": 1}, {"b"', "bad_manifest"),
        ("a.parquet", "text", "a.parquet: bad_manifest"),
        ("b.csv", None, "b.csv: missing"),
    ],
)
def test_a_manifest_that_gives_nothing_is_told_at_once(tmp_path: Path, name: str, text: str, said: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=said):
        loader(source(tmp_path / name))


def test_a_wrong_caption_column_names_the_right_one(tmp_path: Path, rows: Rows) -> None:
    write_csv(tmp_path / "pairs.csv", rows)
    with pytest.raises(DataError) as raised, loader(source(tmp_path / "pairs.csv", caption={"key": "words"})) as one:
        next(one)
    text = str(raised.value)
    assert "--caption-key title" in text.partition("--caption-json title")[0]


def test_a_json_list_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text('[{"a": "\\ud83d"},\n{"b": {"c": [1]}} ]')
    assert list(tables._json_rows(tmp_path / "a.json")) == [b'{"a": "\\ud83d"}', b'{"b": {"c": [1]}}']
    monkeypatch.setattr(tables, "MOST_JSON", 10)
    with pytest.raises(ValueError, match="write one object per line"):
        list(tables._json_rows(tmp_path / "a.json"))


@given(st.lists(st.tuples(st.text(), st.text()), min_size=1), st.sampled_from(",\t;|"))
@settings(max_examples=60, deadline=None)
def test_csv_fields_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, rows: Any, by: str) -> None:
    # A lone carriage return ends a line for Python's own csv module, unless it is quoted; it always quotes it.
    folder = tmp_path_factory.mktemp("csv")
    kept = [row for row in rows if "\0" not in "".join(row)]
    with open(folder / "a.csv", "w", newline="", encoding="utf-8", errors="surrogatepass") as file:
        csv.writer(file, delimiter=by, quoting=csv.QUOTE_ALL).writerows([("filepath", "title"), *kept])
    if not kept:
        return
    tables.to_arrow(folder / "a.csv", "a.csv", folder / "a.arrow")
    table = pa.ipc.open_file(pa.memory_map(str(folder / "a.arrow"))).read_all()
    expected = [tuple(field.encode("utf-8", "surrogatepass") for field in row) for row in kept]
    assert list(zip(*(table.column(i).to_pylist() for i in range(2)), strict=True)) == expected


def test_names_of_tables_and_a_target_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("filepath\nx\n")
    with pytest.raises(OSError):
        tables.to_arrow(tmp_path / "a.csv", "a.csv", tmp_path / "no folder" / "a.arrow")
    assert table_format("https://a.b/c/pairs.CSV?token=1.tar") == "csv"
    assert table_format("pipe:cat a.csv") is None and table_format("a.csv.d/b.tar") is None


@pytest.mark.slow
def test_many_rows_cost_little_memory(tmp_path: Path) -> None:
    """Two million rows, read by two forked readers: what is their own stays small, whatever the number of rows."""
    (tmp_path / "one.jpg").write_bytes(picture(1))
    with open(tmp_path / "pairs.csv", "w") as file:
        file.write("filepath,title\n")
        for number in range(2_000_000):
            file.write(f"one.jpg,a caption of about sixty characters for picture {number}\n")
    code = """
        import os, sys
        from clipstream.data.sources import Source
        from clipstream.data.settings import SourceSettings
        def private():
            lines = open("/proc/self/smaps_rollup").read().splitlines()
            # Clean pages are the file's, and the system's to take back.
            return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) / 1024
        table = Source(SourceSettings(shards=sys.argv[1]))
        assert table.samples == 2_000_000
        before = private()
        for child in range(2):
            if (pid := os.fork()) == 0:
                for name in table.names:
                    shard = table.open(name)
                    shard.load(shard.index.samples[len(name) % len(shard.index.samples)], ("title",))
                os._exit(private() > 100)
            assert os.waitpid(pid, 0)[1] == 0
        assert before < 400, before  # the interpreter, Arrow, the names of 2,000 blocks
    """
    run = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "pairs.csv")]
    done = subprocess.run(run, env={**os.environ}, capture_output=True, text=True, timeout=10 * TIMEOUT)
    assert done.returncode == 0, done.stderr

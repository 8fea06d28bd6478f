"""Tables (CSV, TSV, JSONL, JSON, Parquet, Arrow) work as tars do; a bad row affects that row only."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import multiprocessing
import os
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path, PureWindowsPath
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from clipstream.config.settings import load
from clipstream.curation.check import check
from clipstream.data.decode.sample_profile import Profile
from clipstream.data.loader.loader import Loader
from clipstream.data.source_settings import SourceSettings
from clipstream.data.sources import Source, table_rows, tables
from clipstream.data.sources.table_rows import to_arrow
from clipstream.errors import DataError, Dropped
from clipstream.storage.shard_url import table_format
from clipstream.utils.content import file_digest
from tests.support import loaders
from tests.support.loaders import data, evaluation_of
from tests.support.pictures import ByteTokenizer, make_shards, picture
from tests.support.sites import Site

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


def csv_of(rows: Rows, delimiter: str = ",") -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def parquet_of(rows: Rows, **options: Any) -> bytes:
    parquet.write_table(pa.Table.from_pylist(list(rows)), sink := io.BytesIO(), **options)
    return sink.getvalue()


def arrow_of(rows: Rows, new: Any) -> bytes:
    table, sink = pa.Table.from_pylist(list(rows)), pa.BufferOutputStream()
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    return bytes(sink.getvalue().to_pybytes())


def with_images(rows: Rows, image: Callable[[int, str], Any]) -> Rows:
    return [{**row, "FilePath": image(n, row["FilePath"])} for n, row in enumerate(rows)]


def forms(rows: Rows) -> dict[str, str | bytes]:
    """The rows as tables of every kind, by file name; JSON also as pandas' to_json writes it by orient."""
    tabs, semicolons, lines = csv_of(rows, "\t"), csv_of(rows, ";"), [json.dumps(row) for row in rows]
    named = {str(n): row for n, row in enumerate(rows)}
    columns = {name: {n: row[name] for n, row in named.items()} for name in rows[0]}
    encoded = with_images(rows, lambda n, _: base64.b64encode(picture(n)).decode())
    urls = with_images(encoded, lambda _, text: f"data:image/jpeg;base64,{text}")
    return {
        "pairs.csv": "\ufeff" + csv_of(rows).replace("\n", "\r\n"),
        "pairs.tsv": tabs,
        "semicolon.csv": semicolons,
        "sep.csv": f"sep=;\n{semicolons}",
        "quoted-sep.csv": f'"sep=;"\n{semicolons}',
        "spaced.csv": "\n".join(line.replace(",", " , ", 1) for line in csv_of(rows).splitlines()),
        **{f"{encoding}.tsv": tabs.encode(encoding) for encoding in ("utf-16", "utf-16-le", "utf-16-be")},
        "windows.csv": csv_of(with_images(rows, lambda _, path: str(PureWindowsPath(path)))),
        "base64.csv": csv_of(encoded),
        "pairs.jsonl": "\n\n".join(lines),
        "pairs.jsonl.gz": gzip.compress("\n".join(lines).encode()),
        "pairs.jsonl.zst": pa.compress("\n".join(lines).encode(), "zstd", asbytes=True),
        "pairs.csv.gz": gzip.compress(csv_of(rows).encode()),
        "pairs.csv.zst": pa.compress(csv_of(rows).encode(), "zstd", asbytes=True),
        "url.jsonl": "\n".join(map(json.dumps, urls)),
        "pairs.json": json.dumps(rows, indent=2),
        "columns.json": json.dumps(columns),
        "index.json": json.dumps(named),
        "list.json": json.dumps({name: [*values.values()] for name, values in columns.items()}),
        "split.json": json.dumps({"columns": [*columns], "data": [[*row.values()] for row in rows]}, indent=1),
        "table.json": json.dumps({"schema": {"fields": [], "primaryKey": ["n"]}, "data": [*rows]}),
        "map.json": json.dumps({row["FilePath"]: row["title"] for row in rows}, indent=1),
        "lists.json": json.dumps({row["FilePath"]: [row["title"]] for row in rows}),
        "rows.json": json.dumps({row["FilePath"]: {"title": row["title"]} for row in rows}),
        "pairs.parquet": parquet_of(rows, row_group_size=5),
        "list.parquet": parquet_of(with_images(rows, lambda _, path: [path, "other"])),
        "structs.parquet": parquet_of(with_images(rows, lambda n, _: [{"bytes": picture(n), "path": "x"}])),
        "signed.parquet": parquet_of(with_images(rows, lambda n, _: [one - 256 * (one > 127) for one in picture(n)])),
        "stream.arrow": arrow_of(rows, pa.ipc.new_stream),
        "file.arrow": arrow_of(rows, pa.ipc.new_file),
    }


def put(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def source(shards: Any, **changes: Any) -> dict[str, Any]:
    return {"shards": str(shards), "caption": {"type": "text", "key": "title"}, **changes}


def loader(source: dict[str, Any], rank: int = 0, size: int = 1, **changes: Any) -> Loader:
    return loaders.loader(data(None, sources={"train": source}, **changes), rank, size)


def seen(parts: Sequence[Loader]) -> list[Any]:
    """Three global batches: pixels, ids, and the rows that they are of."""
    found = []
    for _ in range(3):
        batches = [next(one) for one in parts]
        pixels, ids = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("pixels", "ids"))
        keys = [key.partition("/")[2] for batch in batches for key in batch.keys]
        found.append((pixels.contiguous().numpy().tobytes(), ids.tolist(), keys))
    for one in parts:
        one.close()
    return found


def all_of(source: dict[str, Any]) -> tuple[dict[str, str], dict[str, int]]:
    """Key -> caption of every usable row, in evaluation, and the drops by reason."""
    tokenizer, found = ByteTokenizer(), {}
    with evaluation_of(SourceSettings.model_validate(source), 5) as batches:
        for batch in batches:
            found |= {key: tokenizer.decode(ids.tolist()) for key, ids in zip(batch.keys, batch.ids, strict=True)}
        return found, dict(batches.health.sources["eval"].dropped)


def test_every_kind_gives_the_same_batches_in_every_layout(tmp_path: Path, rows: Rows) -> None:
    for name, content in forms(rows).items():
        put(tmp_path / name, content)
    expected = seen([loader(source(tmp_path / "pairs.csv"))])
    for name in forms(rows):
        assert seen([loader(source(tmp_path / name))]) == expected, name
    for ranks, workers in ((1, 2), (3, 0), (2, 1)):
        parts = [loader(source(tmp_path / "pairs.csv"), rank, ranks, workers=workers) for rank in range(ranks)]
        assert seen(parts) == expected, (ranks, workers)


def test_each_row_once_in_evaluation_also_beside_tars(tmp_path: Path, rows: Rows) -> None:
    path = put(tmp_path / "pairs.csv", csv_of(rows))
    assert all_of(source(path)) == ({f"pairs.csv/{n}": f'a "big", red {n}'[:16] for n in range(COUNT)}, {})
    table = Source(SourceSettings.model_validate(source(path)))
    assert (table.samples, table.summary()) == (COUNT, f"1 manifest, {COUNT} samples")
    put(path, csv_of([{"txt": row["title"], "filepath": row["FilePath"]} for row in rows]))
    shards = [*make_shards(tmp_path / "tars", [4, 3]), str(path)]
    assert len(all_of({"shards": shards, "caption": {"type": "text", "key": "txt"}})[0]) == 7 + COUNT


@pytest.mark.usefixtures("rows")
def test_broken_rows_cost_themselves_and_are_counted(tmp_path: Path) -> None:
    (tmp_path / "pictures" / "3.jpg").unlink()
    (tmp_path / "pictures" / "4.jpg").write_bytes(b"no picture")
    lines = ["filepath,title", *(f"pictures/{n}.jpg,caption {n}" for n in range(8))]
    lines[1:4] = ["pictures/0.jpg,one,too,many", "pictures/1.jpg, ", ",no picture"]
    text = "\n".join(lines).encode() + b"\nhttps://a.b/c.jpg?token=secret,far\npictures/9.jpg,\xff\xfe\n"
    found, dropped = all_of(source(put(tmp_path / "pairs.csv", text)))
    assert sorted(found) == ["pairs.csv/5", "pairs.csv/6", "pairs.csv/7"]
    expected = {"row_fields": 1, "empty_caption": 1, "no_image": 1, "missing_picture": 2}
    assert {name: count for name, count in dropped.items() if name in expected} == expected
    assert sum(dropped.values()) == 7  # and the one that is no picture; nothing else costs more than itself
    lines = ['{"filepath": ', '{"filepath": "pictures/5.jpg", "title": "fine"}', "[1]", '{"title": "no picture"}']
    expected = {"json_not_object": 1, "json_invalid": 1, "no_image": 1}
    assert all_of(source(put(tmp_path / "a.jsonl", "\n".join(lines)))) == ({"a.jsonl/1": "fine"}, expected)


def test_nested_captions_pictures_inside_and_broken_parquet(tmp_path: Path) -> None:
    rows = [
        {"image": {"bytes": picture(n), "path": None}, "caption": {"en": f"nested {n}", "de": None}, "cls": n}
        for n in range(4)
    ]
    path = put(tmp_path / "hub.parquet", parquet_of(rows))
    caption = {"type": "json", "path": ["caption.de", "caption.en"]}
    found = {f"hub.parquet/{n}": f"nested {n}" for n in range(4)}
    assert all_of({"shards": str(path), "caption": caption}) == (found, {})
    table = Source(SourceSettings(shards=str(path)))
    shard = table.open(table.names[0])
    assert shard.load(shard.index.samples[0])["cls"] == b"0"
    put(path, path.read_bytes()[:-50])
    with pytest.raises(DataError, match=r"hub\.parquet: bad_manifest"):
        all_of(source(path))


def test_texts_of_python_values_are_read_as_pandas_and_print_write_them(tmp_path: Path) -> None:
    """`DataFrame.to_csv` of pandas 3.0 writes `str` of each object: of the images of Hugging Face's datasets too."""
    files = [picture(number) for number in range(5)]
    (tmp_path / "3.jpg").write_bytes(files[3])
    images = [
        repr(files[0]), repr({"bytes": files[1], "path": None}), repr({"path": "a/b.jpg", "bytes": files[2]}),
        repr({"bytes": None, "path": "3.jpg"}), repr(bytearray(files[4])), repr(["3.jpg", "4.jpg"]),
        repr(files[0])[:900], "<PIL.JpegImagePlugin.JpegImageFile image mode=RGB size=80x80 at 0x7F>",
        repr([*files[0]]),
    ]  # fmt: skip
    strange = ["{'a': b'x'}", "[...]", "[1j]", "{(1, 2): 'x'}", "{'b', 'a'}", "[nan]", "[" * 300 + "]" * 300, "", "[1]"]
    made = [{"image": i, "title": f"a dog {n}", "tags": strange[n]} for n, i in enumerate(images)]
    for name, text in (("a.csv", csv_of(made)), ("a.parquet", parquet_of(made))):
        path = put(tmp_path / name, text)
        shard = (held := Source(SourceSettings(shards=str(path)))).open(held.names[0])
        found, told, profile = [], [], Profile()
        for opened in (held.open(name) for name in held.names):
            for ref in opened.index.samples:
                try:
                    found.append((members := opened.load(ref))["image"])
                    profile.add({"__key__": ref.key, **members})
                except Dropped as drop:
                    told.append(drop.detail)
        assert found == [*files[:4], files[4], files[3], files[0]]
        assert profile.summary() and all(len(one) < 300 for one in told)
        assert [one.partition(";")[2] or one for one in told][1:] == [tables.VALUE[1:]] and "900 char" in told[0]
        assert shard.index.samples


@pytest.mark.usefixtures("rows")
def test_categories_and_values_that_python_cannot_hold_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "odd.parquet"
    titles = pa.array([b"fine", b"\xff\xfe", b"fine, too"]).view(pa.string())
    times = pa.array([1_700_000_000_123_456_789] * 3, pa.timestamp("ns"))
    maps = pa.array([[("en", ["a map"])]] * 3, pa.map_(pa.string(), pa.list_(pa.string())))
    inside = pa.StructArray.from_arrays([maps, times], ["texts", "at"])
    kinds = pa.array(["one", "two", "one"]).dictionary_encode()
    names = [f"pictures/{n}.jpg" for n in range(3)]
    parquet.write_table(
        pa.table({"filepath": names, "title": titles, "when": times, "in": inside, "kind": kinds}),
        path,
        row_group_size=2,
    )
    found = {"odd.parquet/0": "fine", "odd.parquet/2": "fine, too"}
    assert all_of(source(path)) == (found, {"caption_not_utf8": 1})
    assert [*all_of(source(path, caption={"key": "kind"}))[0].values()] == ["one", "two", "one"]
    for field, expected in (("title", found), ("in.texts.en", {f"odd.parquet/{n}": "a map" for n in range(3)})):
        assert all_of(source(path, caption={"type": "json", "path": field}))[0] == expected


def test_views_in_dictionaries_are_read_and_unreadable_columns_left_out(
    tmp_path: Path, rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    """polars 2.1 writes Categorical and Enum as dictionaries of string views, from which pyarrow 26 takes no values."""
    path, words = tmp_path / "x.arrow", pa.array(["red", "blue"], pa.string_view())
    kinds = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 0], pa.uint32()), words)
    nested = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3, 4], pa.int32()), kinds)
    names = pa.array([f"pictures/{n}.jpg" for n in range(4)], pa.string_view())
    image = pa.array([list(picture(n)) for n in range(4)], pa.list_(pa.uint8()))
    table = pa.table({"filepath": names, "title": kinds, "tags": nested, "bytes": image})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    found = {"x.arrow/0": "red", "x.arrow/1": "blue", "x.arrow/3": "red"}
    assert all_of(source(path)) == (found, {"no_caption": 1})
    assert "ignored columns of types that are not read: tags" in caplog.text
    assert all_of(source(path, image_key="bytes")) == (found, {"no_caption": 1})


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
        ("file,sku,text\n{},7,a\n{},7,b\n", "", ["a", "b"]),
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
        to_arrow(tmp_path / name, name, tmp_path / "a.arrow")
        rows = pa.ipc.open_file(pa.OSFile(str(tmp_path / "a.arrow"))).read_all()
        assert rows.column(0).to_pylist() == [f"i/{n}.jpg".encode() for n in range(30)]
    assert rows.column(1)[3].as_py() == b'one\nline "two"' and rows.column(1)[9].as_py() == b"a\n\nb"


@pytest.mark.usefixtures("rows")
def test_quotes_may_be_taken_as_they_stand(tmp_path: Path) -> None:
    path = put(tmp_path / "a.tsv", 'filepath\ttitle\npictures/1.jpg\t"Best" in town\npictures/2.jpg\t5" nails\n')
    assert all_of(source(path, quoting=False))[0] == {"a.tsv/0": '"Best" in town', "a.tsv/1": '5" nails'}


def test_names_of_files_may_be_composed_or_not(tmp_path: Path) -> None:
    """macOS and its archives write é as e and an accent (NFD), a keyboard as one character (NFC)."""
    for form, other in (("NFC", "NFD"), ("NFD", "NFC")):
        picture_name = unicodedata.normalize(other, f"{form}-é.jpg")
        put(tmp_path / "pictures" / picture_name, picture(1))
        path = put(
            tmp_path / f"{form}.csv", f"filepath,title\npictures/{unicodedata.normalize(form, picture_name)},a\n"
        )
        assert all_of(source(path))[0] == {f"{form}.csv/0": "a"}


def test_relative_paths_begin_at_the_list_or_else_where_one_works(
    tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = put(tmp_path / "lists" / "pairs.csv", csv_of(rows))
    absolute = put(near.with_name("absolute.csv"), csv_of(with_images(rows, lambda _, path: str(tmp_path / path))))
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder, own in (
        (tmp_path, source("lists/pairs.csv")),
        ("/", source(near, folder="~")),
        ("/", source(near, folder=str(tmp_path))),
        ("/", source(absolute)),
    ):
        monkeypatch.chdir(folder)
        assert len(all_of(own)[0]) == COUNT
    for number, caption in enumerate(("one", "two")):  # lists of one name and time are told apart
        home = put(tmp_path / caption / "train.csv", f"filepath,title\n../pictures/{number}.jpg,{caption}\n").parent
        os.utime(home / "train.csv", (1, 1))
        monkeypatch.chdir(home)
        assert all_of(source("train.csv"))[0] == {"train.csv/0": caption}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda name: f"gone/{name}", r"missing_picture(.|\n)*--data\.sources\.train\.folder"),
        (lambda name: name[:-4] + ".png", r"the file's name is \d+\.jpg: write that"),
        (lambda name: name[:-4], r"the file's name is \d+\.jpg: write that"),
        (lambda name: f"{name}; pictures/1.jpg", "2 paths in a cell: write a row for each"),
        (lambda name: f"gone/{name}", r"unpack all\.tar\.gz, which lies in .*, if it has the images"),
    ],
)
def test_images_that_are_elsewhere_are_told(
    tmp_path: Path, rows: Rows, change: Callable[[str], str], told: str
) -> None:
    path = put(tmp_path / "pairs.csv", csv_of(with_images(rows, lambda _, path: change(path))))
    (tmp_path / ("all.tar.gz" if "tar" in told else "all.txt")).touch()
    with pytest.raises(DataError, match=told) as caught, loader(source(path)) as one:
        next(one)
    assert "no sample has" not in str(caught.value)


def test_a_column_without_images_beside_one_with_names_of_images(
    tmp_path: Path, rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    named = [{**row, "FilePath": "train", "filename": row["FilePath"]} for row in rows]  # as Karpathy's splits
    loader(source(put(tmp_path / "pairs.csv", csv_of(named))))
    assert "column filepath has no name of an image, but filename has: set --image-key to it" in caplog.text
    caplog.clear()
    loader(source(put(tmp_path / "good.csv", csv_of([{**row, "filename": row["FilePath"]} for row in rows]))))
    assert "--image-key" not in caplog.text


def test_a_list_that_changed_is_read_anew(tmp_path: Path, rows: Rows) -> None:
    with closing(Site()) as site:
        for count in (3, 5):
            path = put(tmp_path / "pairs.csv", csv_of(rows[:count]))
            assert len(all_of(source(path))[0]) == count
            url = site.put("pairs.csv", path.read_bytes())
            file_digest.cache_clear()  # as another process would
            tables._downloads.cache_clear()
            assert len(all_of(source(url, folder=str(tmp_path)))[0]) == count


def test_a_table_that_is_written_while_it_is_read_is_an_error(
    tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = put(tmp_path / "pairs.csv", csv_of(rows[:5])), tables.to_arrow

    def change(*args: Any, **more: Any) -> None:
        read(*args, **more)
        path.write_bytes(path.read_bytes() + b"\n")

    monkeypatch.setattr(tables, "to_arrow", change)
    with pytest.raises(DataError, match=r"pairs.csv: changed: it was written while it was read"):
        all_of(source(path))
    monkeypatch.undo()
    assert len(all_of(source(path))[0]) == 5


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "url,title\nx,y\n", "no column has images.* among url, title .*--image-key"),
        ("a.jsonl", '{"url": "x"}\n', " among url "),
        ("a.tsv", f"0\t/9j/{'Ab+/' * 900}\n1\t/9j/{'Ab+/' * 900}\n", "joined by image_ids: .{150,600}--image-key$"),
        (
            "a.jsonl",
            '{"text_id": 1, "text": "x", "image_ids": [1]}\n',
            "joined by image_ids: write one with a row for each",
        ),
        ("a.jsonl", '{"image": ["s3://a/x.jpg"]}\n', r"a\.jsonl: the images are addresses \(column image\): download"),
        ("a.csv", "filepath,FILEPATH\nx,y\n", " among filepath.1, filepath.2 "),
        ("a.csv", "filepath,title\n", "bad_manifest: no rows"),
        ("a.csv", 'filepath,title\na,b\nc,"d,x\n' + "e,f\n" * 500 + 'g,"h"\n', "unclosed quote in line 3"),
        ("a.json", '{"rows": []}', " among rows "),
        ("a.json", '{"images": [{"id": 1, "file_name": "1.jpg"}], "annotations": [{"image_id": 1}]}', "as COCO has it"),
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
    path = put(tmp_path / "pairs.csv", csv_of(rows))
    with pytest.raises(DataError) as raised, loader(source(path, caption={"key": "words"})) as one:
        next(one)
    text = str(raised.value)
    assert "--caption-key title" in text.partition("--caption-json title")[0]


def test_a_table_and_its_folder_have_the_same_captions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder := tmp_path / "d").mkdir()

    def captions(name: str, *flags: str) -> list[str]:
        found = check(folder / name, settings=dict(flag.split("=") for flag in flags)).captions
        return [*found.values()]

    (folder / "0.png").write_bytes(picture(0, kind="PNG"))
    for header, row, said in (
        ("file,title,caption", "0.png,a,b", "a"),
        ("file,caption,title", "0.png,b,a", "a"),
        ("file,txt,title", "0.png,b,a", "a"),
        ("file,txt,title", "0.png,b,", None),
        ("file,caption,text", "0.png,b,c", "b"),
    ):
        for name in ("pairs.csv", "pairs.tsv"):
            for other in folder.glob("pairs.*"):
                other.unlink()
            text = f"{header}\n{row}\n"
            (folder / name).write_text(text.replace(",", "\t") if name.endswith("tsv") else text)
            caplog.clear()
            assert captions(name) == captions("") == ([said] if said else []), (header, name)
            both = "caption" in header and "title" in header
            assert caplog.text.count("--caption-key caption") == 2 * both
            if "txt" in header:
                assert captions("", "caption.key=txt") == captions(name, "caption.key=txt") == ["b"]


def test_a_json_list_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text('[{"a": "\\ud83d"},\n{"b": {"c": [1]}} ]')
    assert list(table_rows.json_rows(tmp_path / "a.json")) == [b'{"a": "\\ud83d"}', b'{"b": {"c": [1]}}']
    monkeypatch.setattr(table_rows, "MOST_JSON", 10)
    with pytest.raises(ValueError, match="write one object per line"):
        list(table_rows.json_rows(tmp_path / "a.json"))


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
    to_arrow(folder / "a.csv", "a.csv", folder / "a.arrow")
    table = pa.ipc.open_file(pa.memory_map(str(folder / "a.arrow"))).read_all()
    expected = [tuple(field.encode("utf-8", "surrogatepass") for field in row) for row in kept]
    assert list(zip(*(table.column(i).to_pylist() for i in range(2)), strict=True)) == expected


def test_names_of_tables_and_a_target_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("filepath\nx\n")
    with pytest.raises(OSError):
        to_arrow(tmp_path / "a.csv", "a.csv", tmp_path / "no folder" / "a.arrow")
    assert table_format("https://a.b/c/pairs.CSV?token=1.tar") == "csv"
    assert table_format("a.jsonl.zst") == "json" and table_format("A.tsv.GZ") == "csv"
    assert table_format("pipe:cat a.csv") is None and table_format("a.csv.d/b.tar") is None


def own_bytes(path: Path) -> int:
    """Memory that is the process's own after it has read some of each part; clean pages are the file's."""
    table = Source(SourceSettings(shards=str(path)))
    assert table.samples == 2_000_000
    for name in table.names:
        shard = table.open(name)
        shard.load(shard.index.samples[len(name) % len(shard.index.samples)], ("title",))
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))


@pytest.mark.slow
def test_many_rows_cost_little_memory(tmp_path: Path) -> None:
    """Two million rows: a forked reader takes little of its own, whatever their number."""
    lines = (f"one.jpg,a caption of about sixty characters for picture {n}\n" for n in range(2_000_000))
    path = put(tmp_path / "pairs.csv", "filepath,title\n" + "".join(lines))
    assert Source(SourceSettings(shards=str(path))).samples == 2_000_000  # it is converted here
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(own_bytes, (path,)) < 100 << 20

"""What a file is by its first bytes: real files of each kind, written by the libraries that people use."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import re
import sqlite3
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet
from safetensors.torch import save

from clipstream.data.decode.captions import build_caption
from clipstream.data.source_settings import JsonCaption, TextCaption
from clipstream.errors import Dropped
from clipstream.utils.content import HEAD, describe, kind, to_utf8

TABLE = pa.table({"image": [b"x"], "caption": ["a cat"]})


def written(write: Callable[[io.BytesIO], object]) -> bytes:
    sink = io.BytesIO()
    write(sink)
    return sink.getvalue()


def arrow(file: io.BytesIO, new: Any = pa.ipc.new_file) -> None:
    with new(file, TABLE.schema) as writer:
        writer.write_table(TABLE)


def zipped(name: str) -> bytes:
    def write(file: io.BytesIO) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(name, "x")

    return written(write)


def archive(file: io.BytesIO) -> None:
    with tarfile.open(fileobj=file, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("a.jpg"))


def picture(format: str) -> bytes:
    return written(lambda file: Image.new("RGB", (40, 30)).save(file, format))


NIFTI = b"\x5c\1\0\0" + bytes(340) + b"n+1\0"
COCO = {"info": {"year": 2017}, "images": [{"id": 1, "file_name": "1.jpg"}], "annotations": []}
KARPATHY = {"images": [{"sentids": [0, 1], "filename": "1.jpg"}], "dataset": "flickr30k"}


def samples() -> Iterator[tuple[str | None, bytes]]:
    yield from ((format, picture(format)) for format in ("JPEG", "PNG", "GIF", "WebP", "TIFF", "BMP"))
    yield from (("tar", written(archive)), ("gzip", gzip.compress(b"x", mtime=0)), ("bzip2", bz2.compress(b"x")))
    yield from (("xz", lzma.compress(b"x")), ("zip", zipped("images/1.jpg")), ("office", zipped("xl/workbook.xml")))
    yield "bzip2", bz2.compress(b"")
    yield "zstd", pa.Codec("zstd").compress(b"x" * 99, asbytes=True)
    yield "lfs", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    for page in (b"<!DOCTYPE html><html>404", b"\n<!-- x -->\n<HTML lang='en'>", b"<?xml?><!doctype html>"):
        yield "HTML", page
    for page in (
        b"<?xml version='1.0' encoding='UTF-8'?>\n<Error><Code>NoSuchKey</Code>",
        b"\xef\xbb\xbf<?xml version='1.0'?><Error><Code>BlobNotFound</Code>",
        b'{"error":"Repository not found"}',
    ):
        yield "error", page
    yield "SVG", b"<?xml version='1.0'?>\n<svg xmlns='x'>"
    yield from (("7z", b"7z\xbc\xaf\x27\x1c\0\4"), ("rar", b"Rar!\x1a\x07\1\0"), ("PDF", b"%PDF-1.4"))
    yield from (
        (format, picture(name)) for format, name in (("JPEG2000", "JPEG2000"), ("PPM", "PPM"), ("AVIF", "AVIF"))
    )
    yield from (("JXL", b"\xff\x0a\0"), ("PPM", b"P5\n# GIMP\n40 30\n255\n"), (None, b"P5 is a port"))
    yield from (("DICOM", bytes(128) + b"DICM\2\0\0\0UL"), ("zstd", b"\x5f\x2a\x4d\x18\4\0\0\0"))
    yield "NIfTI", NIFTI
    yield "HEIC", b"\0\0\0\x18ftypheic\0\0\0\0"
    yield "Parquet", written(lambda file: parquet.write_table(TABLE, file))
    yield from (("Arrow", written(arrow)), ("Arrow", written(lambda file: arrow(file, pa.ipc.new_stream))))
    yield "npy", written(lambda file: np.save(file, np.zeros(3)))
    yield "npz", written(lambda file: np.savez(file, a=np.zeros(3)))
    yield "npz", written(lambda file: np.savez_compressed(file, a=np.zeros(3)))
    yield "HDF5", b"\x89HDF\r\n\x1a\n\0"
    yield "torch", written(lambda file: torch.save({"a": torch.zeros(3)}, file))
    yield "pickle", written(lambda file: torch.save({"a": 1}, file, _use_new_zipfile_serialization=False))
    yield from (("pickle", pickle.dumps([1, {"a": 2}], protocol)) for protocol in (2, 3, 4, 5))
    yield "safetensors", save({"a": torch.zeros(3)})
    # tf.train.Example with one feature, framed: length, its CRC, the data, their CRC
    yield "TFRecord", b"\x19\0\0\0\0\0\0\0\xd5\x11\x9f\x41\x0a\x17\x0a\x15\x0a\x05image\x12\x0c\x0a\x0a0123456789"
    yield from (("utf16", "filepath\ttitle".encode(code)) for code in ("utf-16", "utf-16-le", "utf-16-be"))
    yield from (("sep", b"sep=;\r\nfilepath;title\r\n"), ("sep", b'\xef\xbb\xbf"sep=,"\n'))
    yield "wids", json.dumps({"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": []}).encode()
    yield from (("COCO", json.dumps(COCO, indent=1).encode()), ("COCO", json.dumps(KARPATHY).encode()))
    yield "JSON", b'{"file_name": "1.jpg", "text": "a cat"}\n{"file_name": "2.jpg", "text": "a dog"}\n'
    yield "JSON", b'[\n {"image": "1.jpg"}]'
    yield from (("base64", b"/9j/4AAQSkZJRgABAQ=="), ("base64", b"data:image/png;base64,iVBORw0KGgoAAAA"))
    yield "repr", b"{'bytes': b'\\xff\\xd8\\xff"
    yield from (("shards", b"/data/00000.tar\n/data/00001.tar\n"), ("CSV", b"image,caption\n1.jpg,a cat\n"))
    yield from ((None, data) for data in (b"", b"\0" * 512, b"Entry not found", b"a cat, a dog", b"i/3.jpg", b"\x93x"))


@pytest.mark.parametrize(("name", "data"), [*samples()])
def test_kinds_by_their_first_bytes(name: str | None, data: bytes) -> None:
    assert kind(data) == kind(data[:HEAD]) == name
    assert (describe(data) is None) == (name is None)


def test_a_packed_volume_is_named_as_what_it_is() -> None:
    assert "NIfTI" in str(describe(gzip.compress(NIFTI + bytes(9000))[:HEAD]))
    assert "NIfTI" not in str(describe(gzip.compress(b"x" * 9000)[:HEAD]))


def test_sqlite(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "a.db") as base:
        base.execute("create table t (x)")
    base.close()
    assert kind((tmp_path / "a.db").read_bytes()) == "SQLite"


@given(st.binary(max_size=600))
def test_any_bytes_are_answered(data: bytes) -> None:
    assert (kind(data) is None) == (describe(data) is None)


ALONE = ("big5", "cp932", "latin1", "cp1250", "cp1256", "cp874")  # encodings that no other one is taken for
IN_ENCODINGS = [
    *(("gbk", "红色的圆形在墙上"), ("gb18030", "一辆红色的汽车停在路边𠮷"), ("gbk", "iPhone 15 手机壳")),
    *(("big5", "一隻貓坐在桌子上"), ("cp932", "夏の海辺で遊ぶ子供たち"), ("euc_jp", "赤い丸が壁にある")),
    *(
        ("euc_kr", "여름 원피스 신상"),
        ("cp949", "똠방각하 벽에 빨간 원"),
        ("cp1252", "Un chien à côté d’une église"),
        ("latin1", "ein grüner Kreis"),
    ),
    *(("cp1250", "Łódź – piękne miasto"), ("cp1251", "Платье iPhone"), ("koi8_r", "красный круг")),
    *(("cp1253", "κόκκινος κύκλος"), ("cp1255", "כלב אדום על הקיר"), ("cp1256", "قطة على الطاولة")),
    *(
        ("cp874", "แมวบนโต๊ะ"),
        ("cp1254", "kırmızı şık daire"),
        ("iso8859_2", "žlutá kočka na stole"),
        ("cp866", "белый кот"),
    ),
]


@pytest.mark.parametrize(("encoding", "text"), IN_ENCODINGS)
def test_a_text_in_another_encoding_is_shown_as_it_reads(encoding: str, text: str) -> None:
    """The text is shown in the encodings that may be right, never converted: charset-normalizer 3.5.3 takes 40 lines of
    Shift-JIS for Korean, and UTF-16 is its first guess for a line of GBK."""
    for number in (1, 40):
        lines = "\n".join([text] * number)
        said = to_utf8(lines.encode(encoding)).partition("it reads ")[2]
        found = re.findall(r"'(.*?)' in ([\w-]+)", said)
        read = {name: shown.replace("\\n", "\n") for shown, name in found}
        assert lines[:20] in read.values() and (len(read) == 1) == (encoding in ALONE)
        for name, shown in read.items():
            assert lines.encode(encoding).decode(name).startswith(shown)
        assert said.endswith(f"iconv -f {next(iter(read)) if encoding in ALONE else 'ENCODING'} -t utf-8")
    settings = TextCaption(), JsonCaption(path="a")
    for caption, data in zip(settings, (text, json.dumps({"a": text}, ensure_ascii=False)), strict=True):
        member = "txt" if caption.type == "text" else "json"
        with pytest.raises(Dropped, match=r"(caption_not_utf8|json_invalid): no UTF-8: .*iconv -f"):
            build_caption(caption)({"__key__": "0", "__url__": "0", member: data.encode(encoding)}, None)

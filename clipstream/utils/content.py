"""What a file is by its first bytes, for messages on content that was not expected.

The first 512 bytes enter; the name of a kind (`kind`), or words with what to do about it (`describe`), leave.
"""

from __future__ import annotations

import ast
import base64
import codecs
import contextlib
import errno
import hashlib
import itertools
import os
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

from clipstream.errors import Dropped
from clipstream.utils.atomic_write import note_input

UTF8 = "utf-8-sig"  # a byte order mark is left out
SHORTEST_IMAGE = 100  # characters of an image in base64
HEAD = 512  # bytes that are looked at, at most
MOST_TEXT, MOST_MEMBER = 1 << 26, 1 << 30  # bytes of a text of a sample, and of its other members and files
SIDE_TEXTS = ("txt", "text", "caption", "json", "cls", "class")  # suffixes of texts
SNIFFED = 200  # bytes of a text by which encodings are told
IMAGES = ("JPEG", "PNG", "GIF", "WebP", "TIFF", "BMP", "AVIF", "HEIC", "JXL", "JPEG2000", "PPM")  # that are decoded
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".heif", ".jxl",
            ".jp2", ".j2k", ".ppm", ".pgm")  # fmt: skip
IMAGE_NAME = re.compile(rf"(?i)(?:{'|'.join(map(re.escape, SUFFIXES))})\s*$")
STRANGE = ("PSD", "DICOM", "NIfTI", "npy", "npz", "torch", "SVG", "PDF", "video", "gzip")  # in place of an image
TEXTS = ("utf16", "sep", "JSON", "shards", "CSV")  # what a table of text may be
_TEXT = rb"(?i)(?:\xef\xbb\xbf)?\s*"
_XML = _TEXT + rb"(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*"
_ZIP = rb"PK\x03\x04.{26}"  # and the name of the first file in it
_NAME = rb"[\w \"'.#/-]+"  # of a column
_COCO = rb'"(?:image_id|file_name|sentids|coco_url|contributor|date_captured|licenses|annotations)"\s*:'
_BYTES = re.compile(r"""b'[^'\\]*(?:\\.[^'\\]*)*'|b"[^"\\]*(?:\\.[^"\\]*)*\"""")
PRINTED = "the text of bytes, as Python prints them: write Parquet, or files"
_UNPACK = "unpack it and use what it holds"
TABLE = "; a table's name ends in .csv, .tsv, .jsonl, .json, .parquet or .arrow: rename it"
_TO_PNG = "which is not decoded: convert it to PNG"
_EXTRA = "image: install clipstream[{}] to decode it, or convert it to JPEG or PNG"

# Encodings that iconv knows too -> see `_reads_well`. The first level of a standard holds its common characters.
_JAPANESE = ("HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "CJK")
_ENCODINGS: dict[str, tuple[tuple[str, ...], str, int]] = {
    "CP949": (("HANGUL",), "euc_kr", 0xC8),
    "GB18030": (("CJK",), "gb2312", 0xD7),
    "BIG5": (("CJK",), "big5", 0xC6),
    "CP932": (_JAPANESE, "euc_jp", 0xCF),
    "EUC-JP": (_JAPANESE, "euc_jp", 0xCF),
    "CP1252": (("LATIN",), "", 0),
    "CP1250": (("LATIN",), "", 0),
    "CP1254": (("LATIN",), "", 0),
    "ISO-8859-2": (("LATIN",), "", 0),
    "CP1251": (("CYRILLIC",), "", 0),
    "KOI8-R": (("CYRILLIC",), "", 0),
    "CP866": (("CYRILLIC",), "", 0),
    "CP1253": (("GREEK",), "", 0),
    "CP1255": (("HEBREW",), "", 0),
    "CP1256": (("ARABIC",), "", 0),
    "CP874": (("THAI",), "", 0),
}

# Kind, pattern at the start of the file, what it is and what to do. The first that matches counts.
_KINDS = [
    (name, re.compile(pattern, re.DOTALL), words)
    for name, pattern, words in (
        ("JPEG", rb"\xff\xd8\xff", "a JPEG image"),
        ("PNG", rb"\x89PNG\r\n\x1a\n", "a PNG image"),
        ("GIF", rb"GIF8", "a GIF image"),
        ("WebP", rb"RIFF.{4}WEBP", "a WebP image"),
        ("TIFF", rb"II[*+]\0|MM\0[*+]", "a TIFF image"),
        ("BMP", rb"BM.{4}\0{4}", "a BMP image"),
        ("AVIF", rb".{4}ftypavi[fs]", "an AVIF image"),
        ("HEIC", rb".{4}ftyp(?:hei|hev|mif1|msf1)", f"a HEIC {_EXTRA.format('heif')}"),
        ("JXL", rb"\xff\x0a|\0\0\0\x0cJXL ", f"a JPEG XL {_EXTRA.format('jxl')}"),
        ("JPEG2000", rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51", "a JPEG 2000 image"),
        ("PPM", rb"P[1-6]\s+(?:#[^\n]*\s+)*\d+\s+\d+\s", "a PPM image"),
        ("PSD", rb"8BPS", f"a Photoshop image, {_TO_PNG}"),
        ("DICOM", rb".{128}DICM", f"a DICOM file (medical), {_TO_PNG}, in the window of gray values that you need"),
        ("NIfTI", rb"\x5c\x01\0\0.{340}(?:n\+1|ni1)\0|\0\0\x01\x5c.{340}(?:n\+1|ni1)\0",
         "a NIfTI volume (medical): write the slices that you need as PNG"),
        ("video", rb".{4}ftyp|\x1aE\xdf\xa3|RIFF.{4}AVI ", "a video"),
        ("tar", rb".{257}ustar", "a tar archive"),
        ("lfs", _TEXT + rb"version https://(?:git-lfs|hawser)",
         "a Git LFS pointer in place of the file: get the file by 'git lfs pull'"),
        ("HTML", _XML + rb"<(?:!doctype html|html|head|body|title|script)\b",
         "an HTML page in place of the file, of a login, an error or a viewer: check the URL (on Hugging Face it has "
         "/resolve/, not /blob/), and whether it needs a token"),
        ("SVG", _XML + rb"(?:<!doctype[^>]*>\s*)?<svg\b", "an SVG drawing: render it to PNG"),
        ("error", _XML + rb"<(?:\w+:)?error\b|" + rb'\s*\{\s*"(?:error|message|detail|code|status)\w*"\s*:',
         "a server's error message in place of the file: check the URL and the credentials"),
        ("XML", _TEXT + rb"<\?xml\b", "XML"),
        ("npz", _ZIP + rb"[^/\0]{1,200}\.npy", "a NumPy archive (.npz)"),
        ("torch", _ZIP + rb"[^\0]{1,200}/(?:data\.pkl|\.format_version)", "a file of torch.save"),
        ("office", _ZIP + rb"(?:\[Content_Types\]|_rels/|xl/|docProps|mimetype)",
         "an Office document: export the table as CSV in UTF-8"),
        ("zip", rb"PK(?:\x03\x04|\x05\x06|\x07\x08)", f"a zip archive: {_UNPACK}"),
        ("gzip", rb"\x1f\x8b", f"compressed by gzip: {_UNPACK}"),
        ("zstd", rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", f"compressed by zstd: {_UNPACK}"),
        ("bzip2", rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)", f"compressed by bzip2: {_UNPACK}"),
        ("xz", rb"\xfd7zXZ\0", f"compressed by xz: {_UNPACK}"),
        ("lz4", rb"\x04\x22\x4d\x18", f"compressed by lz4: {_UNPACK}"),
        ("7z", rb"7z\xbc\xaf\x27\x1c", f"a 7z archive: {_UNPACK}"),
        ("rar", rb"Rar!\x1a\x07", f"a RAR archive: {_UNPACK}"),
        ("Parquet", rb"PAR[1E]", f"a Parquet table{TABLE}"),
        ("Arrow", rb"ARROW1|FEA1|\xff{4}..\0\0[\x08-\x20]\0\0\0", f"an Arrow table{TABLE}"),
        ("npy", rb"\x93NUMPY", f"a NumPy array (.npy), {_TO_PNG}"),
        ("HDF5", rb"\x89HDF\r\n\x1a\n", "an HDF5 file: convert it to tars, or to files and a table with their paths"),
        ("SQLite", rb"SQLite format 3\0", "an SQLite database: export the table as CSV"),
        ("LMDB", rb".{16}\xde\xc0\xef\xbe", "an LMDB database: convert it to tars"),
        ("PDF", rb"%PDF-", "a PDF document"),
        ("safetensors", rb".{4}\0{4}\{\s*\"", "weights in safetensors"),
        ("TFRecord", rb".{4}\0{4}.{4}(?:\x0a[\x80-\xff]*[\0-\x7f]){2}", "a TFRecord file: convert it to tars"),
        ("RecordIO", rb"\x0a\x23\xd7\xce", "an MXNet RecordIO file: convert it to tars"),
        ("pickle", rb"\x80[\x02-\x05][\x8a\x95\]})(cX]", "a pickle, which is not loaded as it may run code"),
        ("AppleDouble", rb"\0\x05\x16[\0\x07]\0", "what macOS keeps beside a file (AppleDouble): leave it out"),
        ("utf16", rb"\xff\xfe(?!\0\0)|\xfe\xff|(?:[\t\r\n -~]\0){4}|(?:\0[\t\r\n -~]){4}",
         "text in UTF-16: save it in UTF-8"),
        ("sep", _TEXT + rb"\"?sep=.\"?\s*?\n", f"a CSV with Excel's line 'sep='{TABLE}"),
        ("wids", _TEXT + rb"\{.*\"(?:wids_version|shardlist)\"\s*:", "an index of wids: name the shards themselves"),
        ("streaming", _TEXT + rb'\{.*"(?:column_encodings|raw_data|chunk_bytes|chunk_size|data_spec)"\s*:',
         "an index of Mosaic's streaming or of LitData: write tars, or files and a table, by their own reader"),
        ("COCO", _TEXT + rb'\{\s*"(?:images|annotations|info|licenses|categories|dataset)"\s*:\s*[\[{].*' + _COCO,
         "one JSON object for all images and captions, as COCO has it: write a row for each caption, e.g. a CSV with "
         "the columns filepath and title (docs/data.md has the lines of Python)"),
        ("base64", rb"(?:data:[\w/+.-]*;base64,)?(?:/9j/[\w+/-]{12}|iVBORw0KGgo|R0lGODlh|UklGR[\w+/-]{6}XRUJQ)",
         "an image as base64 text"),
        ("repr", rb"(?:\{[^{}]{0,300}?)?(?:bytearray\()?b['\"](?:\\x|GIF8|RIFF|BM|II\*|MM\\x00)",
         PRINTED),
        ("JSON", _TEXT + rb'(?:\[\s*)?\{\s*"', f"JSON{TABLE}"),
        ("shards", rb"\S+\.(?:tar|tgz|tar\.gz)\s*?\n", "a list of shards: name the shards themselves, joined by ::"),
        ("CSV", _TEXT + rb"(?=[^\n]*(?:image|file|path|url|caption|title|text))" + _NAME + rb"(?:[,;\t|]" + _NAME
         + rb")+\r?\n",
         f"a table as CSV or TSV{TABLE}"),
    )
]  # fmt: skip


def kind(head: bytes) -> str | None:
    """The kind of a file that begins with these bytes, e.g. 'JPEG', 'lfs' or 'gzip'; None if it is not known."""
    return next((name for name, pattern, _ in _KINDS if pattern.match(head[:HEAD])), None)


def describe(head: bytes) -> str | None:
    """What a file that begins with these bytes is, in words, and what to do about it; None if it is not known."""
    for name, pattern, words in _KINDS:
        if pattern.match(head[:HEAD]):
            with contextlib.suppress(zlib.error):
                inner = zlib.decompressobj(wbits=31).decompress(head, HEAD) if name == "gzip" else b""
                words = f"compressed by gzip: {describe(inner)}" if kind(inner) == "NIfTI" else words
            return f"{words}. It reads {head[:120]!r}" if name == "error" else words
    return None


def encoding_of(head: bytes) -> str:
    """The encoding of a text that begins with these bytes: UTF-8, or a kind of UTF-16."""
    if kind(head) != "utf16":
        return UTF8
    return "utf-16" if head[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-16-be" if head[0] == 0 else "utf-16-le"


def to_utf8(data: bytes) -> str:
    """What to do about a text that is no UTF-8, with how it reads in the encodings in which it may be."""
    read: dict[str, str] = {}  # text -> encoding
    for encoding, (scripts, han, last) in _ENCODINGS.items():
        with contextlib.suppress(UnicodeDecodeError):
            text = codecs.getincrementaldecoder(encoding)().decode(data[:SNIFFED])  # a character may be cut at the end
            if _reads_well(text, scripts, han, last):
                read.setdefault(text, encoding)
    likely = sorted(read.items(), key=lambda one: one[0].isupper())[:4]
    shown = " or ".join(f"{text[:20]!r} in {encoding}" for text, encoding in likely)
    name = likely[0][1] if len(likely) == 1 else "ENCODING"
    said = f"it reads {shown}: if one is right, convert it from that" if likely else "convert it from its encoding"
    return f"{said}, iconv -f {name} -t utf-8"


def _reads_well(text: str, scripts: Collection[str], han: str, last: int) -> bool:
    """Whether a text has words in these scripts, few signs, and nearly only common ones of Han and Hangul characters:
    up to the lead byte `last` in the encoding `han`, whose lead bytes are in the order of its standard's levels.
    """
    own = [char for char in text if not char.isascii()]
    letters = [char for char in own if char.isalpha()]
    kinds = Counter(unicodedata.category(char)[0] for char in own)
    if not letters or "\0" in text or kinds["C"] or 8 * kinds["S"] > len(letters):
        return False
    if not {unicodedata.name(char, "").split(" ")[0] for char in letters} <= {*scripts}:
        return False
    if "LATIN" in scripts:  # most letters have no accent
        return 2 * len(letters) < sum(map(str.isalpha, text)) + 2
    if han:
        own = [char for char in letters if unicodedata.name(char).startswith(("CJK", "HANGUL"))]
        codes = [char.encode(han, "replace") for char in own]
        return 5 * sum(len(code) == 2 and code[0] <= last for code in codes) >= 4 * len(codes)
    # Words are of one script, without capitals inside.
    words = [word for word in re.findall(r"[^\W\d_]+", text) if not word.isascii()]
    cased = all(word.lower() in (word, word[:1].lower() + word[1:]) or word.isupper() for word in words)
    marked = any(one.isascii() and unicodedata.category(mark)[0] == "M" for one, mark in itertools.pairwise(text))
    return cased and not marked and not any(char.isascii() for char in "".join(words))


def read_text(path: Path) -> str:
    """The text of a file in UTF-8 or UTF-16, without a byte order mark. Raises OSError, also if it is too large."""
    note_input(path)
    if (size := path.stat().st_size) > MOST_MEMBER:
        raise OSError(errno.EFBIG, f"{size:,} bytes, more than {MOST_MEMBER >> 20:,} MiB", str(path))
    data = path.read_bytes()
    encoding = encoding_of(data)
    return data.decode(encoding, "surrogateescape" if encoding == UTF8 else "strict")


def open_text(path: Path) -> TextIO:
    """A file, opened as text in UTF-8 or UTF-16; invalid bytes become surrogates."""
    with open(path, "rb") as file:
        encoding = encoding_of(file.read(HEAD))
    return open(path, newline="", encoding=encoding, errors="surrogateescape" if encoding == UTF8 else "replace")


def rows_of(found: Mapping[str, Any]) -> Iterable[Mapping[str, Any]] | None:
    """The rows of one JSON object that is a table, as pandas or a script writes it; None if it is no number."""
    names, rows, values = found.get("columns"), found.get("data"), list(found.values())
    if isinstance(rows, list) and all(isinstance(row, list if names else dict) for row in rows):  # "split", "table"
        return [dict(zip(map(str, names), row, strict=True)) for row in rows] if names else rows
    if found and all(map(IMAGE_NAME.search, found)):  # by the image's path
        return ({"filepath": k, **(v if isinstance(v, dict) else {"title": v})} for k, v in found.items())
    if len(values) < 2 or len(values[0] if isinstance(values[0], (dict, list)) else ()) < 2:
        return None
    if all(isinstance(v, dict) and [*v] == [*values[0]] for v in values):
        if not all(map(str.isdecimal, found)) and (len(values[0]) > len(values) or "".join(values[0]).isdecimal()):
            return ({name: inner[key] for name, inner in found.items()} for key in values[0])  # orient="columns"
        return values  # orient="index"
    alike = all(isinstance(v, list) and len(v) == len(values[0]) and not isinstance(v[0], dict) for v in values)
    return [dict(zip(found, row, strict=True)) for row in zip(*values, strict=True)] if alike else None  # "list"


def file_state(path: str | os.PathLike[str] | int) -> list[int]:
    """What tells that a file (or its descriptor) or folder has changed: its bytes, and the times of its last change and
    of that of its inode, in ns; [] if it is not there.

    `cp -p`, `rsync -t` and the like set the first time to an older one; the second is the system's own.
    """
    with contextlib.suppress(OSError):
        stat = os.stat(path)
        return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    return []


@lru_cache(maxsize=256)
def file_digest(file: Path) -> str:
    """The SHA-256 of a file that does not change."""
    digest = hashlib.sha256()
    with open(file, "rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_file(path: str) -> bytes:
    """The bytes of a file of a sample. Raises OSError, ValueError: it cannot be read; Dropped: as `check_bytes`."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        check_bytes(size, path)
        return file.read(size or MOST_TEXT)  # a device has no size, and perhaps no end


def check_bytes(size: int, name: str, is_text: bool = False) -> None:
    """Refuse a member or file of a sample by its size, before it is read. Raises Dropped: `member_too_large`."""
    most = MOST_TEXT if is_text or name.rpartition(".")[2].lower() in SIDE_TEXTS else MOST_MEMBER
    if size > most:
        raise Dropped("member_too_large", f"{name}: {size:,} bytes, more than {most >> 20:,} MiB")


def is_base64(text: str) -> bool:
    """Whether a text is an image in base64, also as a data URL."""
    return len(text) > SHORTEST_IMAGE and kind(text[:HEAD].encode(errors="replace")) == "base64"


def from_base64(text: str) -> bytes:
    """The bytes of an image in base64, also as a data URL. Raises Dropped."""
    try:
        return base64.b64decode(text.rpartition(";base64,")[2].replace("-", "+").replace("_", "/"))
    except ValueError as error:
        raise Dropped("undecodable_image", f"base64: {error}") from error


def from_repr(text: str) -> bytes | None:
    """The bytes of an image that Python printed, as `b'...'` or in a dict; None for other texts. Raises Dropped."""
    if kind(text[:HEAD].encode(errors="replace")) != "repr":
        return None
    with contextlib.suppress(ValueError, SyntaxError):
        return bytes(ast.literal_eval(found[0] if (found := _BYTES.search(text)) else "cut off"))
    raise Dropped("undecodable_image", f"{PRINTED} ({len(text):,} characters, which are no whole bytes)")


def plain(value: object) -> str | None:
    """A value that JSON has no type for."""
    if not isinstance(value, bytes):
        return str(value)
    with contextlib.suppress(UnicodeDecodeError):
        return value.decode()
    return None

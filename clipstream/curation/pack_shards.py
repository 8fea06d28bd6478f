"""What `pack` reads and writes: samples of any source, listed and read by number, members of a new shard, and tars.

`Corpus.list_samples` lists the usable samples of the shards of the sources: key, and in a tar where its members are.
Samples are read where they are, in the order in which they are written: a process holds one sample. Remote and
compressed shards are downloaded when they are listed, and stay until the last shard is written.

`SamplePacker` makes key and members that default flags train on. The image transforms give the same pixels of a
re-encoded image as of the original, as far as its size and format allow: the orientation stays in its EXIF tag, and
transparency stays if the format has it. Imports no torch.
"""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import re
import tarfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from PIL import ExifTags, Image

from clipstream.checkpoint.remote_sync import RemoteDir, with_retries
from clipstream.data.decode.captions import (
    RawSample,
    build_caption,
    build_transform,
    candidates,
    image_bytes,
    split_keys,
)
from clipstream.data.decode.images import decode, eight_bits, open_image, orientation_of, read_header
from clipstream.data.json_path import structure
from clipstream.data.order.rng import hash_of
from clipstream.data.settings import DataSettings
from clipstream.data.shard_pass import SamplePass, ShardSamples, spread
from clipstream.data.source_settings import IMAGE_KEY, LabelCaption, SourceSettings
from clipstream.data.sources import OpenShard, SampleRef, ShardIndex, Source, SourceContext, indexes
from clipstream.errors import Dropped, ShardError
from clipstream.storage.shard_url import ShardURL, parts_of, redact, table_format
from clipstream.storage.tar import BLOCK, Shard
from clipstream.utils import atomic_write
from clipstream.utils.content import HEAD, IMAGE_NAME, file_state, kind
from clipstream.utils.executors import require_all
from clipstream.utils.processes import TaskFailure, note

T = TypeVar("T")
MEND = "mend them or leave them out; shards that are done are kept"
OPEN = 128  # shards of the sources that a thread keeps open
MEASURED = 20  # samples of a shard that is no tar, by which the bytes of all are estimated
Format = Literal["keep", "jpg", "webp", "png"]
_NAMES = {"jpg": "JPEG", "webp": "WEBP", "png": "PNG"}
_SAMES = {"MPO": "JPEG"}  # Pillow's name -> format of its first frame
_WRITTEN = frozenset(("JPEG", "PNG", "WEBP", "AVIF", "BMP", "TIFF"))  # not GIF, whose palette would change
_WITHOUT_ALPHA = frozenset(("JPEG", "BMP"))
# Pillow's mode -> the colour space of its profile.
_COLOURS = {"1": "L", "L": "L", "LA": "L", "P": "RGB", "PA": "RGB", "RGB": "RGB", "RGBA": "RGB"}
FINE = 90  # quality from which colour has full resolution: 46 instead of 43 dB at 95, with a quarter more bytes
# A JPEG is decoded at a reduced scale if at least so many times the target's pixels remain: from 2,000 to 3,200 px to
# 512 in a third of the time, with 53 dB to the full decode (42 dB for the most detailed of 6 photographs).
SPARE = 2


@dataclass(frozen=True)
class Recipe:
    """How images are re-encoded."""

    size: int | None  # pixels of the shorter side of larger images; None keeps sizes
    format: Format  # of the result; 'keep' keeps each image's own
    quality: int  # of JPEG, WebP and AVIF, 1 to 100
    background: str = "white"  # colour under transparent pixels, for formats without transparency


def recode(data: bytes, recipe: Recipe) -> tuple[bytes, str]:
    """Re-encode an image file. Only the first frame of an animation is kept, as training uses no other.

    Orientation and colour profile are kept, other metadata is not. Palettes are replaced by RGB; evaluation, which
    resizes palettes without a filter as open_clip does, then has a smoother image. A GIF that is to keep its format is
    returned unchanged.

    Returns:
        (file, 'resized', 'reencoded', 'unchanged' or 'undecodable'); the last two have the original file.
    """
    try:
        image = open_image(data)
        orientation = orientation_of(image)
        have = _SAMES.get(str(image.format), str(image.format))
        want = have if recipe.format == "keep" else _NAMES[recipe.format]
        if have == "TIFF":  # turned by Pillow when it is decoded
            image.load()
        smaller = recipe.size is not None and min(image.size) > recipe.size
        if want not in _WRITTEN or not (smaller or want != have):
            return (data, "unchanged")
        colours, profile = _COLOURS.get(image.mode), image.info.get("icc_profile")
        target = image.size
        if smaller and recipe.size is not None:
            scale = recipe.size / min(image.size)
            width, height = (max(recipe.size, round(side * scale)) for side in image.size)
            target = (width, height)
            if have == "JPEG":
                image.draft(image.mode, (target[0] * SPARE, target[1] * SPARE))
        image = eight_bits(image, recipe.background if want in _WITHOUT_ALPHA else None)
        if image.size != target:
            image = image.resize(target, Image.Resampling.LANCZOS)
        # Always given: else Pillow writes the original profile, which may be of another colour space.
        options: dict[str, object] = {"icc_profile": profile if _COLOURS[image.mode] == colours else None}
        if want in ("JPEG", "WEBP", "AVIF"):
            options["quality"] = recipe.quality
        if want == "JPEG":
            options["subsampling"] = "4:4:4" if recipe.quality >= FINE else "4:2:0"
        elif want == "TIFF":
            options["compression"] = "tiff_lzw"
        if orientation != 1:
            exif = Image.Exif()
            exif[ExifTags.Base.Orientation] = orientation
            options["exif"] = exif.tobytes()
        file = io.BytesIO()
        image.save(file, want, **options)
        return (file.getvalue(), "resized" if smaller else "reencoded")
    except Exception:  # Dropped, or any exception of Pillow's readers and writers; training counts the image
        return (data, "undecodable")


LONGEST = 90  # bytes of a key
OTHER = "other."  # before the suffix of a member that training would take for the image or the caption
LABEL = "cls"
SUFFIXES = {"JPEG": "jpg", "PNG": "png", "GIF": "gif", "WebP": "webp", "TIFF": "tif", "BMP": "bmp", "AVIF": "avif",
            "HEIC": "heic", "JXL": "jxl", "JPEG2000": "jp2", "PPM": "ppm"}  # fmt: skip
_IMAGES = frozenset(IMAGE_KEY.split(";"))
_ODD = re.compile(r"[^\w/-]+")


@dataclass(frozen=True)
class Recording:
    """How samples are written."""

    recipe: Recipe | None = None  # how images are re-encoded; None to copy them
    decode: bool = False  # whether images that cannot be decoded are left out, beside those without a header
    max_pixels: int = 1 << 40  # of an image


def plain_key(key: str) -> str:
    """A key without suffix of an image, and with nothing but letters, digits, `_`, `-` and `/`."""
    plain = re.sub(r"/{2,}", "/", _ODD.sub("_", IMAGE_NAME.sub("", key))).strip("/_") or "sample"
    return plain if len(plain.encode()) <= LONGEST else plain.encode()[-LONGEST:].decode(errors="ignore").strip("/_")


class SamplePacker:
    """Makes the members of a new sample from one of a source, so that training reads them by default flags.

    The image becomes `jpg`, `png`, …, by its content; all captions that training may draw become `txt`, several as a
    JSON list. A member that default flags would take in place of them gets the suffix `other.…`. Of a table, the row
    as `json` and the column `cls` are kept; of other samples, all members.
    """

    def __init__(self, settings: SourceSettings, recording: Recording) -> None:
        self._settings = settings
        self._keys = split_keys(settings.image_key)
        recipe = recording.recipe
        self._recipe = None if recipe is None else replace(recipe, background=settings.background)
        self._recording, self._labelled = recording, isinstance(settings.caption, LabelCaption)
        self._caption = build_caption(
            settings.caption.model_copy(update={"templates": "plain"}) if self._labelled else settings.caption
        )
        self._transform = build_transform(settings.transform)

    def members_needed(self, columns: bool) -> Collection[str] | None:
        """The members that are read; None for all."""
        if not columns or self._transform is not None or self._caption.members is None:
            return None
        return (*self._keys, *self._caption.members, "json", LABEL)

    def __call__(self, sample: RawSample, columns: bool, more: Sequence[str]) -> tuple[dict[str, bytes], str]:
        """The members in order, and the result of `recode`, '' without it.

        Args:
            columns: whether members are columns of a table.
            more: captions to add.

        Raises Dropped: there is no usable image, or neither caption nor label.
        """
        if self._transform is not None:
            sample = self._transform(sample)
        data, what = image_bytes(sample, self._settings.image_key), ""
        head = read_header(data, False, self._recording.max_pixels)
        if self._recipe is not None:
            data, what = recode(data, self._recipe)
            if what == "undecodable":
                raise Dropped("undecodable_image")
        elif self._recording.decode:
            decode(data, head, 1, (255, 255, 255))
        names = {str(name).lower(): name for name in sample if not str(name).startswith("__")}
        chosen = next(key for key in self._keys if key in names)
        suffix = SUFFIXES.get(kind(data[:HEAD]) or "") or chosen.rpartition(".")[2]
        found, texts = {suffix: data}, self._texts(sample, names, more)
        if texts:
            plain = len(texts) == 1 and structure(texts[0]) is None
            found["txt"] = (texts[0] if plain else json.dumps(texts, ensure_ascii=False)).encode()
        for name in sorted(names, key=lambda name: (name != "json", name != LABEL, name)):
            value = sample[names[name]]
            value = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
            if name == chosen or (columns and name not in ("json", LABEL)) or not isinstance(value, bytes):
                continue
            if name == "txt" and texts == [value.decode("utf-8-sig", "replace").strip()]:
                continue
            taken = name in found or name in _IMAGES or (name == "txt" and bool(texts))
            found[f"{OTHER}{name}" if taken else name] = value
        return found, what

    def _texts(self, sample: RawSample, names: Collection[str], more: Sequence[str]) -> list[str]:
        """All captions, each once. Raises Dropped: there is none, and no label."""
        texts: list[str] = []
        try:
            by_path = candidates(self._caption, sample)
            texts = [] if self._labelled else [text for path in by_path for text in path]
            if not by_path:
                raise Dropped("no_caption")
        except Dropped:
            if not more and LABEL not in names:
                raise
        return list(dict.fromkeys([*texts, *more]))


Row = tuple[int, str, Mapping[str, tuple[int, int]], str | None]  # of a `ShardList`


class Packed(NamedTuple):
    """A new shard; one without samples is not written."""

    samples: int
    size: int  # bytes
    sha256: str
    drops: dict[str, int]  # number of samples left out, by reason
    images: dict[str, int]  # number of images, by the result of `recode`
    suffixes: dict[str, int]  # number of members
    merged: int = 0  # samples that got captions of the merged source
    made: bool = False  # whether it was written now


class Out:
    """The folder or the remote storage of the new shards; the latter through fsspec, connected in each process anew.

    Args:
        url: of the storage, or the folder.
        folder: that folder; for a URL one of this machine, for what is not complete.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder, self.is_remote = url, folder, ShardURL(url).path is None

    def names(self) -> list[str]:
        """Names of what is there. Raises ShardError."""
        return self._do(lambda out: out.names()) if self.is_remote else [p.name for p in self.folder.glob("[!.]*")]

    def read(self, name: str) -> bytes | None:
        """A small file; None if it does not exist. Raises ShardError."""
        if self.is_remote:
            return self._do(lambda out: (out / name).read())
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / name).read_bytes()
        return None

    def write(self, name: str, content: str) -> None:
        """Write a small file beside the shards. Raises ShardError, OSError."""
        (path := self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        atomic_write.replace(path, content.encode())
        if self.is_remote:
            self._do(lambda out: (out / name).upload(path))

    def place(self, name: str, shard: Path, index: Path) -> None:
        """Rename or upload a finished shard and its side index. Raises ShardError, OSError."""
        if self.is_remote:  # the index last
            self._do(lambda out: (out / name).upload(shard))
            self._do(lambda out: (out / f"{name}{indexes.SUFFIX}").upload(index))
        else:
            indexes.place(shard, index, self.folder / name)

    def find_packed(self, name: str, digest: str) -> Packed | None:
        """A shard, if it is complete and of the plan of this digest. Raises ShardError."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            if self.is_remote:
                content = self.read(f"{name}{indexes.SUFFIX}") or b""
                head = indexes.parse_head(content[: content.find(b"\n") + 1])
                is_whole = head.size == self._do(lambda out: (out / name).size())
            else:
                head = indexes.read_head(self.folder / f"{name}{indexes.SUFFIX}")
                is_whole = head.of == indexes.identity_of(self.folder / name)
            origin = dict(head.origin or {})
            if origin.pop("pack", None) == digest and is_whole:
                return Packed(**origin)  # type: ignore[arg-type]
        return None

    def _do(self, act: Callable[[RemoteDir], T]) -> T:
        out = RemoteDir(self.url, "OUT")
        try:
            return with_retries(lambda: act(out))
        except Exception as error:  # of fsspec's backends, which have types of their own
            raise ShardError("remote", f"{out.shown}: {redact(str(error)) or type(error).__name__}") from error


class Listed(NamedTuple):
    """The usable samples of a shard of the sources."""

    samples: int
    size: int  # bytes that they take in a tar, in part estimated
    dropped: int  # samples that key lists leave out
    fault: str | None  # of the shard, whose intact samples are used
    path: str | None  # the local file of a tar
    entries: Sequence[Sequence[int]] = ()  # of the source's lists, those of which samples are in the shard
    state: Sequence[int] = ()  # of that file, see `Shard`


def _no_file(path: str) -> bytes:
    """In place of the file of an image that is not needed."""
    return b""


def open_captions(spec: str, context: SourceContext) -> Source:
    """The source of further captions: a table with the columns key and caption, or what training reads.

    Raises as Source.
    """
    tables = all(map(table_format, parts_of(spec)))
    return Source(SourceSettings(shards=spec, **({"image_key": "key"} if tables else {})), context)


class Corpus:
    """All shards of the sources, by number, and the samples that are listed of them, by number. Picklable.

    The folder of the lists is in that of their plan.
    """

    def __init__(self, sources: Sequence[Source], folder: Path) -> None:
        self.sources, self.folder = list(sources), folder
        self.shards = [(number, name) for number, one in enumerate(sources) for name in dict.fromkeys(one.names)]
        # By thread, as those of a worker of Dask share it.
        self._open: dict[int, OrderedDict[int, tuple[ShardList, OpenShard]]] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": {}}

    def source_of(self, shard: int) -> Source:
        """The source of a shard."""
        return self.sources[self.shards[shard][0]]

    def path(self, shard: int) -> Path:
        """The list of a shard."""
        return self.folder / f"{shard:06d}.list"

    @property
    def first_key(self) -> str:
        """The packed key of the first sample."""
        lists = (ShardList(self.path(shard)) for shard in range(len(self.shards)))
        _, key, _, plain = next(held.row(0) for held in lists if held.head.samples)
        return plain or plain_key(key)

    def hashes(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Hashes of the packed keys of all samples, uint64 [n]."""
        lists = range(len(self.shards))
        ends = np.cumsum([0, *(ShardList(self.path(shard)).head.samples for shard in lists)])
        found = np.empty(int(ends[-1]), np.uint64)
        for shard in lists:  # one file is open at a time
            found[ends[shard] : ends[shard + 1]] = ShardList(self.path(shard)).hashes
        return found

    def open(self, shard: int) -> tuple[ShardList, OpenShard]:
        """The list of a shard and the shard, which stay open for a while. Raises ShardError, OSError."""
        kept = self._open.setdefault(threading.get_ident(), OrderedDict())
        if shard in kept:
            kept.move_to_end(shard)
            return kept[shard]
        held = ShardList(self.path(shard))
        path = held.head.path
        source, name = self.source_of(shard), self.shards[shard][1]
        made = source.open(name) if path is None else Shard(path, ShardIndex([]), held.head.state)
        kept[shard] = held, made
        if len(kept) > OPEN:
            kept.popitem(last=False)[1][1].close()
        return held, made

    def load(self, shard: int, row: int, members: Collection[str] | None, *, image: bool = True) -> RawSample:
        """A listed sample with its packed key in `__key__`. Raises Dropped, ShardError, OSError."""
        held, opened_shard = self.open(shard)
        number, key, spans, plain = held.row(row)
        kind_ = self.source_of(shard).types[self.shards[shard][1]]
        ref = SampleRef(key, spans) if held.head.path is not None else opened_shard.index.samples[number]
        note(f"{kind_.title(self.shards[shard][1])}/{key}")
        if kind_.columns and not image:
            found = opened_shard.load(ref, members, _no_file)  # type: ignore[call-arg]
        else:
            found = opened_shard.load(ref, members)
        return {"__key__": plain or plain_key(key), "__url__": kind_.title(self.shards[shard][1]), **found}

    def list_samples(self, label: str, data: DataSettings, executor: str, *, measured: bool) -> list[Listed]:
        """List the samples of all shards that have no list yet, and print which ones are damaged.

        Args:
            measured: whether the bytes of samples are needed.

        Raises DataError: shards cannot be read; the others are listed.
        """
        found: list[Listed | TaskFailure] = []
        for source in self.sources:
            first = len(found)
            walk = SamplePass(source, data, (), partial(self._list, first, measured), self.folder.parents[1])
            heads = [self._head(first + number) for number in walk.numbers]
            walk.numbers = [number for number, head in enumerate(heads) if head is None]
            made = iter(walk.run(label, executor) if walk.numbers else ())
            found += [next(made) if head is None else head for head in heads]
            walk.numbers = list(range(len(heads)))
            walk.tell_damaged(found[first:], "of which intact samples are used")
        return require_all(label, found, MEND)

    def _head(self, shard: int) -> Listed | None:
        """What the list of a shard says, if there is one of its file."""
        with contextlib.suppress(OSError, ValueError):
            head = ShardList(self.path(shard)).head
            if head.path is None or file_state(head.path)[:2] == head.state:
                return head
        return None

    def _list(self, first: int, measured: bool, number: int, samples: ShardSamples) -> Listed:
        """List the samples of a shard of a source. Raises ShardError, OSError."""
        shard, keeps = samples.shard, samples.keeps
        refs, fault = shard.index
        if not len(refs) and fault is not None and fault.reason != "empty":
            raise ShardError(*fault)
        columns = self.source_of(first + number).types[self.shards[first + number][1]].columns
        keyed = columns and len(refs) > 0 and _key_of(shard, refs[0]) is not None
        rows: list[Row] = []
        for at, ref in enumerate(refs):
            if keeps is None or keeps(f"{samples.name}/{ref.key}", ref.key):
                key = _key_of(shard, ref) if keyed else None
                rows.append((at, ref.key, ref.members, None if key is None else plain_key(key)))
        path, state = (os.path.abspath(shard.path), shard.state) if isinstance(shard, Shard) else (None, [])
        if path:
            size = sum(_bytes(row[2]) for row in rows)
        else:  # estimated by some samples, where it is needed
            sizes = []
            for ref in spread(refs, MEASURED) if measured else ():
                with contextlib.suppress(Dropped):
                    sizes.append(_bytes({name: (0, len(data)) for name, data in shard.load(ref).items()}))
            size = len(rows) * sum(sizes) // max(1, len(sizes))
        entries = [] if keeps is None else keeps.entries((f"{samples.name}/{ref.key}", ref.key) for ref in refs)
        head = Listed(len(rows), size, len(refs) - len(rows), fault and str(fault), path, entries, state)
        ShardList.write(self.path(first + number), head, rows)
        return head


class ShardList:
    """The list of a shard: an Arrow file with `Listed`, the rows, both as JSON, and hashes of the packed keys.

    A row is [number in the shard, key, members in a tar, packed key where it is not made of that key].
    """

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            content = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
        table = pa.ipc.open_file(pa.py_buffer(content)).read_all()
        self.head = Listed(*json.loads(table.schema.metadata[b"listed"]))
        self.hashes: np.ndarray[Any, np.dtype[np.uint64]] = table["hash"].to_numpy()
        self._rows = table["row"].combine_chunks()

    def row(self, number: int) -> Row:
        number, key, members, plain = json.loads(self._rows[number].as_py())
        return number, key, members, plain

    @staticmethod
    def write(path: Path, head: Listed, rows: Sequence[Row]) -> None:
        hashes = [hash_of((plain or plain_key(key)).encode()) for _, key, _, plain in rows]
        columns = {"row": pa.array(map(json.dumps, rows), pa.string()), "hash": pa.array(hashes, pa.uint64())}
        table = pa.table(columns, metadata={"listed": json.dumps(head)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write.replace(path, [sink.getvalue()], shared=True)


def _key_of(shard: OpenShard, ref: SampleRef) -> str | None:
    """What a row of a table has in its column `key`."""
    with contextlib.suppress(Dropped, ValueError, AttributeError):
        row = json.loads(shard.load(ref, ("json",), _no_file)["json"])  # type: ignore[call-arg]
        found = next((value for name, value in row.items() if name.lower() == "key"), None)
        return None if found in (None, "") else str(found)
    return None


def _bytes(spans: Mapping[str, tuple[int, int]]) -> int:
    """Bytes that members take in a tar."""
    return sum(BLOCK + -(-size // BLOCK) * BLOCK for _, size in spans.values() if size < 1 << 62)


def add_member(tar: Any, name: str, data: bytes) -> int:
    """Add a file without owner and time to a `tarfile.TarFile` that is written; the offset of its data."""
    made, is_long = tarfile.TarInfo(name), len(name.encode(errors="surrogateescape")) > 100 or len(data) >= 1 << 33
    made.size, tar.format = len(data), tarfile.GNU_FORMAT if is_long else tarfile.USTAR_FORMAT
    tar.addfile(made, io.BytesIO(data))
    tar.members.clear()  # which no one asks for
    return int(tar.offset) - -(-len(data) // BLOCK) * BLOCK


class Merged:
    """Further captions by the keys of samples: those of a corpus that is listed. Picklable."""

    def __init__(self, corpus: Corpus, listed: Sequence[Listed]) -> None:
        self.corpus, self.path = corpus, corpus.folder / "keys.npy"
        self.ends = np.cumsum([one.samples for one in listed], dtype=np.int64)
        hashes = corpus.hashes()
        order = np.argsort(hashes, kind="stable")
        np.save(self.path, np.stack([hashes[order], order.astype(np.uint64)]))

    def matches(self, corpus: Corpus) -> int:
        """How many samples have a key that is here."""
        return int(np.isin(corpus.hashes(), np.load(self.path, mmap_mode="r")[0]).sum())

    def texts(self, key: str) -> list[str]:
        """The captions of a packed key; none where there is no such sample, or it has none."""
        (hashes, numbers), texts = np.load(self.path, mmap_mode="r"), list[str]()
        mark = np.uint64(hash_of(key.encode()))
        first, end = (int(hashes.searchsorted(mark, side)) for side in ("left", "right"))
        for number in numbers[first:end].tolist():
            shard = int(np.searchsorted(self.ends, number, side="right"))
            row = number - (int(self.ends[shard - 1]) if shard else 0)
            caption = build_caption(self.corpus.source_of(shard).settings.caption)
            with contextlib.suppress(Dropped):
                sample = self.corpus.load(shard, row, caption.members, image=False)
                texts += [text for path in candidates(caption, sample) for text in path]
        return texts

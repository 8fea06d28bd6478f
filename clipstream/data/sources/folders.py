"""Folders: what a folder holds (`contents`), and folders of image files as a source type.

Tars and tables in a folder are shards of their own types. Image files with texts of the same name beside them are
samples of image and text, in blocks as those of a table. Other images stand in one folder per class, as in
torchvision's ImageFolder; a class is a shard.

`folder:PATH` gives classes the numbers that are their names, or else numbers in the order of names. `imagenet:PATH`
takes folders named by ImageNet's synsets (n01440764 …), or by numbers as in ImageNet-V2, and labels each with its
number in ImageNet, also if only some of the classes are there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
from collections import Counter, deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import yaml
from braceexpand import braceexpand

from clipstream.data.decode.captions import json_object, split_keys
from clipstream.data.decode.class_names import class_names, fold_name
from clipstream.data.decode.key_lists import storable
from clipstream.data.decode.sample_profile import CAPTION_NAMES
from clipstream.data.source_settings import AUTO, IMAGE_KEY, LabelCaption, SourceSettings
from clipstream.data.sources import OpenShard, Source, SourceContext, SourceType, entries
from clipstream.data.sources.file_names import (
    IMAGE_NAMES,
    SPLIT,
    SPLITS,
    TEST,
    TEXTS,
    TRAIN,
    are_plain,
    image_of,
    pairs_of,
    refuse_texts_elsewhere,
    split_in,
    splits_to_read,
    stem_of,
    suffix_of,
)
from clipstream.errors import Dropped, SettingsError, absent
from clipstream.storage.shard_url import ShardURL, table_format, with_variables
from clipstream.storage.tar import Place, SampleRef, ShardIndex
from clipstream.text import counted, listed, printable
from clipstream.utils import content
from clipstream.utils.atomic_write import note_input
from clipstream.utils.content import open_text, read_file
from clipstream.utils.logs import logger
from clipstream.utils.section import part, with_home

IMAGENET_CLASSES = 1000
# Folders that archivers and file servers leave, beside hidden ones.
JUNK = ("__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "lost+found")
SYNSETS = "data/_info/imagenet_synsets.txt"  # of timm, in ImageNet's order
STRAY = 0.1  # tars and tables per image with a text beside it, up to which these are left out
LOOKED = 20_000  # files by which a folder's layout is decided
BLOCK, BLOCKS = 1000, 192  # most samples of a block, and fewest blocks of as many samples, as of tables
_TAR = re.compile(r"(?i)(.+)\.(?:tar|tgz|tar\.gz|tar\.zst)")
# What tools write beside tables and tars: Hugging Face datasets, wids, img2dataset, open_clip.
_ABOUT = re.compile(r"dataset_(?:infos?|dict)\.json|state\.json|(?:shardindex|sizes|.*_stats)\.json|cache-.*\.arrow")
LAKES = {  # what marks a table of several files -> its name, and the code that reads it
    "_delta_log": ("a Delta table", "deltalake.DeltaTable({}).to_pyarrow_table()"),
    "_versions": ("a Lance data set", "lance.dataset({}).to_table()"),
    "metadata": ("an Iceberg table", "pyiceberg.table.StaticTable.from_metadata(JSON).scan().to_arrow()"),
}
_LAKE = re.compile(
    r"((?:.*/)?)(?:(_delta_log)/[^/]*\.json|(_versions)/[^/]*\.manifest|(metadata)/[^/]*\.metadata\.json)"
)
_FOLDER = re.compile(rf"{SPLIT.pattern}\d*/")  # of the images of a split
# Parts of an archive, as `split` names them.
_PART = re.compile(r"(?i)(.+\.(?:tar|tgz|tar\.\w+|zip|7z|rar|gz|zst))\.(?:part)?(?:\d{1,4}|[a-z]{2})")
LOOKED_INTO = 20  # files by whose bytes a folder without data is described
_ADVICE = (
    "name tars or a table of image paths and captions, put a text of the same name beside each image (cat.jpg, "
    "cat.txt), or sort the images into one folder per class"
)


class Contents(NamedTuple):
    """What a folder holds."""

    kind: str  # 'tars', 'tables', 'pairs' (images with texts beside them) or 'classes'
    files: Sequence[str] = ()  # paths of the tars or tables; of pairs the keys: paths in the folder without suffix
    suffixes: Sequence[tuple[str, ...]] = ()  # of each pair: the ends of the paths of its image and texts
    split: str = ""  # the split that was chosen by name; '' where the folder has none
    what: str = ""  # in words
    images: int = 0  # beside tables


class NoCaptions(SettingsError):
    """A folder has images and nothing else, which no training can read."""


def named_folder(part: str, type: str = AUTO) -> str | None:
    """The path in an entry that names a local folder, `folder:PATH` or PATH, also with `#SPLIT`; None for others."""
    text = with_home(with_variables(part))
    scheme = ShardURL(text).scheme
    if scheme == "folder" or (type == "folder" and scheme is None):
        return text.removeprefix("folder:")
    return text if type == AUTO and scheme is None and os.path.isdir(split_path(text)[0]) else None


def with_split(part: str, type: str, image_key: str) -> str:
    """The entry as training reads it: where the folder that it names has splits, with the name of the one for training.

    Raises SettingsError: as `contents`.
    """
    path = named_folder(part, type)
    split = "" if path is None else contents(path, image_key).split
    return f"folder:{split_path(str(path))[0]}#{split}" if split else part


def split_path(path: str) -> tuple[str, str]:
    """The folder and the split that PATH or PATH#SPLIT names; '' for no split."""
    folder, sign, split = path.rpartition("#")
    return (folder, split) if sign and not os.path.exists(path) else (path, "")


def contents(path: str, image_key: str = IMAGE_KEY, evaluates: bool = False) -> Contents:
    """What a folder holds, of the split that `PATH#SPLIT` names.

    Without such a name, where the names of files or folders tell of several splits, training takes `train`, and
    evaluation `validation`, `test` or else `train`. The layout is decided by the first LOOKED files.

    Raises SettingsError: it holds nothing that can be read, images without captions, or several kinds of data.
    """
    key = os.path.abspath(path), image_key, evaluates
    changed, found = _KNOWN.pop(key, ({}, None))
    if found is None or any(_change_time(folder) != time for folder, time in changed.items()):
        found = _contents(path, split_keys(image_key), evaluates, changed := {})
    _KNOWN[key] = changed, found
    return found


_warn_once = cache(logger.warning)
_KNOWN: dict[tuple[str, str, bool], tuple[dict[str, int], Contents]] = {}  # with the times of change of all folders


def _change_time(folder: str) -> int:
    with contextlib.suppress(OSError):
        return os.stat(folder).st_mtime_ns
    return 0


def _contents(path: str, image_keys: tuple[str, ...], evaluates: bool, seen: dict[str, int]) -> Contents:
    """As `contents`; the folders that it depends on are added to `seen`, with their times of change."""
    folder = split_path(path)[0]
    if not os.path.isdir(folder):
        raise SettingsError(f"folder:{path}: the folder {absent(folder)}")
    try:
        files: list[str] = []
        for names in levels(folder, seen):
            files += names
            if len(files) >= LOOKED:
                break
        _refuse_lakes(folder, files)
        kind = _kind(folder, files, image_keys)
        if kind == "classes":
            _tell_unused(folder, (file for file in files if suffix_of(file) not in image_keys))
            if loose := sum("/" not in file and suffix_of(file) in image_keys for file in files):
                said = f"{counted(loose, 'image', ',')} beside its folders not used, as each folder is a class"
                _warn_once(f"{folder}: {said}: move them into a folder")
            tops = sorted({file.partition("/")[0] for file in files if "/" in file and suffix_of(file) in image_keys})
            what = f"images in folders that are no classes ({listed(tops, 3)})" if are_plain(tops) else ""
            return Contents(kind, what=what or "images in one folder per class")
        if len(files) >= LOOKED:
            files = list(chain.from_iterable(levels(folder, seen)))
    except OSError as error:
        raise SettingsError(f"{error.filename or folder} cannot be read: {error.strerror}") from error
    if kind == "pairs":
        pairs = pairs_of(files, image_keys)
        read = {f"{name}{end}" for name, ends in pairs.items() for end in ends}
        _tell_unused(folder, (file for file in files if file not in read))
        chosen, split = _of_split(path, pairs, kind, evaluates)
        suffixes = [pairs[key] for key in chosen]
        found = Contents(kind, chosen, suffixes, split, f"{counted(len(chosen), 'image', ',')} with texts beside them")
    else:
        shards = _tables(files) if kind == "tables" else filter(_TAR.fullmatch, files)
        chosen, split = _of_split(path, shards, kind, evaluates)
        meta = os.path.join(folder, ".nv-meta")
        seen[meta] = _change_time(meta)
        paths = [os.path.join(folder, file) for file in chosen]
        images = sum(suffix_of(file) in image_keys for file in files) if kind == "tables" else 0
        found = Contents(kind, paths, (), split, counted(len(chosen), kind.removesuffix("s"), ","), images)
    return found._replace(what=f"{found.what} (split {split})") if split else found


def _tell_unused(folder: str, files: Iterable[str]) -> None:
    """Warn of files that are neither images nor texts of images; tables and tars are told of elsewhere."""
    left = Counter(f".{suffix_of(file)}" for file in files if not table_format(file) and not _TAR.fullmatch(file))
    if left:
        ends = ", ".join(f"{count:,} {suffix}" for suffix, count in left.most_common(5))
        _warn_once(f"{folder}: {counted(left.total(), 'file', ',')} not used: {ends}{', …' if len(left) > 5 else ''}")


def tell_images_without_row(source: Source) -> None:
    """Warn of a folder with more images than its tables have rows, where it is all of a source."""
    path = named_folder(source.settings.parts[0], source.settings.type) if len(source.settings.parts) == 1 else None
    if path is None or source.samples is None:
        return
    images = contents(path, source.settings.image_key, source.context.evaluates).images
    if images > source.samples:
        _warn_once(
            f"{path}: {images:,} images, but {counted(source.samples, 'row', ',')} to read in its tables: images "
            "without a row are not used: add rows, or move the tables elsewhere to read the images alone"
        )


def levels(root: str, seen: dict[str, int]) -> Iterator[list[str]]:
    """The files of each folder, relative to the root, one level of folders after the other. Raises OSError."""
    seen.clear()
    waiting = deque([""])
    while waiting:
        where = waiting.popleft()
        if (real := os.path.realpath(os.path.join(root, where))) in seen:  # a link to a folder above
            continue
        seen[real] = _change_time(real)
        names: list[str] = []
        with os.scandir(real) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if not _is_junk(entry.name):
                    (waiting if entry.is_dir() else names).append(os.path.join(where, entry.name))
        yield names


def _kind(folder: str, files: Sequence[str], image_keys: Collection[str]) -> str:
    """The kind of `Contents`, by these files. Raises SettingsError: as `contents`."""
    images = {stem_of(file) for file in files if suffix_of(file) in image_keys}
    texts = {image_of(file, images) for file in files} - {None}
    pairs = 0 < len(images) <= 2 * len(texts)
    tars = {found[1] for found in map(_TAR.fullmatch, files) if found}
    tables = [file for file in _tables(files) if stem_of(file) not in tars and image_of(file, images) is None]
    if tars:
        tables = [file for file in tables if suffix_of(file) != "json"]
    elif pairs:  # img2dataset writes 00000.parquet beside the folder 00000
        tables = [file for file in tables if not os.path.isdir(os.path.join(folder, stem_of(file)))]
    elif images:  # a list of labels may lie beside classes
        tables = [file for file in tables if _names_images(os.path.join(folder, file), image_keys)]
    kinds = {"tars": (len(tars), "tar"), "tables": (len(tables), "table")}
    if pairs or tars:  # the images that a table names are no data of their own
        kinds["pairs"] = len(images), "image"
    there = {kind: counted(*count, ",") for kind, count in kinds.items() if count[0]}
    if pairs:
        there["pairs"] += f" with a text beside {'it' if len(images) == 1 else 'each'}"
    if len(there) == 1:
        return next(iter(there))
    beside = [*filter(_TAR.fullmatch, files), *tables]
    if pairs and len(beside) <= STRAY * len(texts):
        names, more = ", ".join(beside[:3]), f" and {len(beside) - 3:,} more" if len(beside) > 3 else ""
        _warn_once(f"{folder}: {there['pairs']} are read, and not {names}{more}: to read that, name it")
        return "pairs"
    if there:
        raise SettingsError(
            f"{folder} holds {' and '.join(there.values())}: name what is to be read, as '{folder}/*.tar'"
        )
    refuse_texts_elsewhere(folder, images, [file for file in files if suffix_of(file) not in image_keys])
    if any("/" in image for image in images):
        return "classes"
    if images:
        raise NoCaptions(f"{folder} holds {counted(len(images), 'image', ',')} and no captions: {_ADVICE}")
    suffixes = Counter(f".{suffix}" for file in files if (suffix := suffix_of(file)))
    held = ", ".join(f"{count:,} {suffix}" for suffix, count in suffixes.most_common(3)) or "no files"
    raise SettingsError(f"{folder} holds no tar, no table and no image, but {held}{_hint(folder, files)}: {_ADVICE}")


def _refuse_lakes(folder: str, files: Iterable[str]) -> None:
    """Raises SettingsError: the folder, or one in it, is a table of a format whose files have no meaning alone."""
    for file in files:
        if found := _LAKE.fullmatch(file):
            what, code = LAKES[next(filter(None, found.groups()[1:]))]
            where = os.path.join(folder, found[1] or "").rstrip("/")
            raise SettingsError(
                f"{where} is {what}, which is not read: write it as Parquet, e.g. by pyarrow.parquet.write_table("
                f"{code.format(repr(where))}, 'rows.parquet')"
            )


def _hint(folder: str, files: Sequence[str]) -> str:
    """What the first file is whose bytes tell, in words with what to do about it: ` (FILE: …)`, or ''."""
    if part := next((file for file in files if _PART.fullmatch(file)), None):
        whole = os.path.basename(_PART.sub(r"\1", part))
        return f" ({part}: a part of an archive: join the parts, as 'cat {whole}.* > {whole}')"
    for file in files[:LOOKED_INTO]:
        with open(os.path.join(folder, file), "rb") as opened:
            if what := content.describe(opened.read(content.HEAD)):
                return f" ({file}: {what})"
    return ""


def _tables(files: Iterable[str]) -> Iterator[str]:
    return (file for file in files if table_format(file) and not _ABOUT.fullmatch(os.path.basename(file)))


def _names_images(table: str, image_keys: Collection[str]) -> bool:
    """Whether a table has images and a column of captions, by the words in its first lines."""
    if table.endswith((".gz", ".zst")) or table_format(table) in ("parquet", "arrow"):
        return True
    with open_text(Path(table)) as file:
        words = set(re.findall(r"[a-z_]+", file.read(1 << 12).lower()))
    return bool(words & {*image_keys, *IMAGE_NAMES}) and bool(words & {*CAPTION_NAMES})


def _of_split(path: str, names: Iterable[str], kind: str, evaluates: bool) -> tuple[list[str], str]:
    """The names of the split to read, in order, and that split; '' if the names do not tell of several.

    Of images, only the folder at the top tells the split, and only if there is one for training.

    Args:
        path: PATH or PATH#SPLIT.
    """
    folder, asked = split_path(path)
    find = _FOLDER.match if kind == "pairs" else SPLIT.search
    by: dict[str, list[str]] = {}
    known = _energon_splits(folder) if kind == "tars" else {}
    for name in names:
        found = find(f"/{known.get(name, '')}" if known else name)
        by.setdefault(SPLITS[(found.lastindex or 0) if found else 0], []).append(name)
    if known:  # tars that are in no split are excluded
        by.pop("", None)
    if not asked and (len(by) < 2 or by.keys() == {"", TRAIN} or (kind == "pairs" and TRAIN not in by)):
        return sorted(chain(*by.values())), ""
    by[TRAIN] = sorted(by.get(TRAIN, []) + by.pop("", []))
    named = split_in(asked)
    wanted = [named or asked] if asked else splits_to_read(evaluates)
    if split := next((split for split in wanted if by.get(split)), ""):
        return sorted(by[split]), split
    there = ", ".join(sorted(split for split in by if by[split])) or "none"
    raise SettingsError(
        f"{folder} has no split {wanted[0]!r} by the names of its files and folders (there is {there}): name one, as "
        f"'folder:{folder}#{TEST}'"
    )


def _energon_splits(folder: str) -> dict[str, str]:
    """Tar, relative to the folder -> its split, as `energon prepare` wrote them; empty without that file."""
    with contextlib.suppress(OSError, yaml.YAMLError, AttributeError, LookupError, TypeError, ValueError):
        held = yaml.safe_load(Path(folder, ".nv-meta", "split.yaml").read_bytes())
        left = set(held.get("exclude") or ())
        parts = held["split_parts"].items()
        return {
            tar: split for split, names in parts for one in names for tar in braceexpand(one) if tar not in left
        }  # fmt: skip
    return {}


def class_folders(settings: SourceSettings) -> set[str] | None:
    """Names of the folders of a source; None where the source is more than folders of classes.

    Raises SettingsError: as `entries` and `FolderSource.list_shards`.
    """
    found: set[str] = set()
    for name, entry in entries(settings.shards, settings.type, evaluates=True, image_key=settings.image_key):
        path = entry.partition(":")[2]
        if name != "folder" or contents(path, settings.image_key, True).kind != "classes":
            return None
        found |= {*_numbers("folder", Path(path), split_keys(settings.image_key))}
    return found


def check_folders(folders: Iterable[str], classes: Sequence[str]) -> None:
    """Raises SettingsError: a folder has neither the name nor the number of a class."""
    names, wrong = {*map(fold_name, classes)}, []
    for one in sorted(folders):
        if int(one) >= len(classes) if one.isdecimal() else fold_name(one) not in names:
            wrong.append(repr(printable(one, 60)))
    if wrong:
        raise SettingsError(
            f"classes: {len(wrong)} of the folders are none of the {len(classes)} classes: {listed(wrong, 3)}. A "
            "folder is the class of its name, or of its number, from 0: rename the folders or the classes"
        )


@part(SourceSettings, "folder", "imagenet")
class FolderSource(SourceType):
    """The shards of `folder:PATH` or `imagenet:PATH`: `SCHEME:PATH/CLASS`, or blocks `folder:PATH#FIRST-LAST` of images
    with texts beside them.
    """

    has_files = True

    def __init__(self, settings: SourceSettings, context: SourceContext) -> None:
        self._image_key, self._image_keys = settings.image_key, split_keys(settings.image_key)
        self._blocks: dict[str, tuple[str, range, Contents]] = {}
        self._caption = settings.caption

    @classmethod
    def entries(cls, part: str, type: str, evaluates: bool, image_key: str) -> Sequence[tuple[str, str]]:
        """What the folder in an entry holds. Raises as `contents`."""
        if (path := named_folder(part, type)) is None:
            return ()
        held = contents(path, image_key, evaluates)
        kind, named = "folder", [f"{split_path(path)[0]}#{held.split}" if held.split else path]
        if held.kind in ("tars", "tables"):
            kind, named = held.kind.removesuffix("s"), list(held.files)
        for name in named:
            note_input(name)
        return [(kind, f"folder:{name}" if kind == "folder" else name) for name in named]

    def list_shards(self, spec: str) -> Sequence[str]:
        """The classes in the order of their names, or blocks of images in the order of their paths.

        Raises SettingsError: there is no such folder, it holds no folders, one without images, or one that is not a
        class of ImageNet; or as `contents`.
        """
        scheme, _, path = spec.partition(":")
        root = Path(path)
        if scheme == "imagenet":  # the archive of ImageNet-V2 has one folder around the classes
            inner = sorted(path for path in root.glob("[Ii]mage[Nn]et[Vv]2*") if path.is_dir())
            root = inner[0] if len(inner) == 1 else root
        elif (held := contents(path, self._image_key)).kind == "pairs":
            folder, rows = os.path.abspath(split_path(path)[0]), range(len(held.files))
            pairs = zip(held.files, held.suffixes, strict=True)
            note_input(folder, lambda: {f"{name}{end}" for name, ends in pairs for end in ends})
            block = max(1, min(BLOCK, -(-len(rows) // BLOCKS)))
            blocks = [rows[first : first + block] for first in rows[::block]]
            named = {f"folder:{folder}#{block[0]}-{block[-1]}": (folder, block, held) for block in blocks}
            self._blocks |= named
            self.cheap = True
            return list(named)
        if not root.is_dir():
            raise SettingsError(f"{spec}: the folder {absent(root)}")
        numbers = _numbers(scheme, root, self._image_keys)
        if scheme == "folder" and isinstance(self._caption, LabelCaption) and self._caption.classes is not None:
            check_folders({name for name in numbers if name.isdecimal()}, class_names(self._caption.classes))
        return [f"{scheme}:{root / name}" for name in numbers]

    def open(self, shard: str) -> OpenShard:
        if shard in self._blocks:
            folder, block, held = self._blocks[shard]
            return FileShard(folder, {held.files[number]: held.suffixes[number] for number in block})
        scheme, _, path = shard.partition(":")
        numbers, name = _numbers(scheme, Path(path).parent, self._image_keys), Path(path).name
        labels = {} if are_plain(numbers) else {"cls": str(numbers[name]).encode(), "class": name.encode()}
        return FileShard(path, {file: ("",) for file in sorted(_images(Path(path), self._image_keys))}, labels)

    def num_samples(self, shard: str) -> int:
        return len(self._blocks[shard][1]) if shard in self._blocks else len(self.open(shard).index.samples)

    def total_samples(self, shards: Sequence[str]) -> int | None:
        """Unknown of classes: listing all folders may take minutes."""
        return super().total_samples(shards) if all(shard in self._blocks for shard in shards) else None

    def keys(self, shard: str) -> Container[str]:
        if shard in self._blocks:
            return dict.fromkeys(map(storable, self._blocks[shard][2].files))
        return dict.fromkeys(storable(ref.key) for ref in self.open(shard).index.samples)

    def title(self, shard: str) -> str:
        return self._blocks[shard][0] if shard in self._blocks else super().title(shard)


class FileShard(OpenShard):
    """Image files, each with texts beside it or with `labels`. Members: the image, `txt` and `json`, or the labels.

    Members are named by suffix. Without `txt`, it is the first other member, or else the first field of the JSON, that
    has a usual name of captions.

    Args:
        folder: what the keys are relative to.
        samples: key -> what follows it in the paths of the sample's files.
        labels: members that all samples have beside their files.
    """

    def __init__(
        self, folder: str, samples: Mapping[str, tuple[str, ...]], labels: Mapping[str, bytes] | None = None
    ) -> None:
        self._folder, self._ends, self._labels = folder, samples, labels or {}
        self.index = ShardIndex([SampleRef(key) for key in samples])

    def load(self, ref: SampleRef, suffixes: Collection[str] | None = None) -> dict[str, bytes]:
        """See OpenShard. Raises Dropped: `unreadable_member`, `member_too_large`, or as `json_object`."""
        found = {name: data for name, data in self._labels.items() if suffixes is None or name in suffixes}
        members = {suffix_of(file): file for file in reversed(self.files(ref))}  # the shortest path of a suffix
        captioned = suffixes is None or "txt" in suffixes
        for member, file in members.items():
            if suffixes is None or member in suffixes or (captioned and "txt" not in members and member in TEXTS):
                try:
                    found[member] = read_file(file)
                except OSError as error:
                    raise Dropped("unreadable_member", str(error)) from error
        if captioned and "txt" not in found and (name := next((name for name in CAPTION_NAMES if name in found), "")):
            found["txt"] = found[name]
        if captioned and "json" in found and "txt" not in found:
            fields = json_object(found["json"])
            text = next((fields[name] for name in CAPTION_NAMES if fields.get(name)), None)
            if text is not None:
                found["txt"] = (text if isinstance(text, str) else json.dumps(text)).encode("utf-8", "surrogatepass")
        return found

    def place(self, ref: SampleRef, keys: Collection[str]) -> Place | None:
        image = next((file for file in self.files(ref) if suffix_of(file) in keys), None)
        return None if image is None else Place(image)

    def files(self, ref: SampleRef) -> list[str]:
        return [os.path.join(self._folder, f"{ref.key}{end}") for end in self._ends[ref.key]]


def _images(folder: Path, image_keys: Collection[str]) -> Iterator[str]:
    """Paths of the images under a folder, relative to it. Raises OSError if a part cannot be read."""
    return (file for names in levels(str(folder), {}) for file in names if suffix_of(file) in image_keys)


def _is_junk(name: str) -> bool:
    return name.startswith(".") or name in JUNK


@lru_cache(maxsize=64)
def _numbers(scheme: str, root: Path, image_keys: tuple[str, ...]) -> dict[str, int]:
    """Folder of a class -> number of the class, in the order of their names."""
    folders = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not _is_junk(entry.name))
    if not folders:
        raise SettingsError(f"{scheme}:{root}: no class folders in it")
    if empty := [name for name in folders if not any(_images(root / name, image_keys))]:
        said = f"{scheme}:{root}: {len(empty)} of {len(folders)} folders have no images, such as {empty[0]!r}"
        if scheme == "folder":  # as torchvision's ImageFolder; of imagenet:, names have numbers of their own
            raise SettingsError(
                f"{said}: each folder is a class, numbered in the order of names. Remove folders that are not classes "
                f"or have no images, and for a subset of the classes use the evaluator's label 'class' (names) "
                f"instead of numbers"
            )
        logger.warning(said)
    if scheme == "folder":
        if not all(map(str.isdecimal, folders)):
            return {name: number for number, name in enumerate(folders)}
        if len({*map(int, folders)}) < len(folders):
            raise SettingsError(
                f"folder:{root}: two folders have one number, as 1 and 01: each is the class of its number"
            )
        return {name: int(name) for name in folders}
    known = {str(n): n for n in range(IMAGENET_CLASSES)}
    # Read without importing timm, which imports torch.
    spec = importlib.util.find_spec("timm")
    assert spec is not None and spec.submodule_search_locations, "timm is installed with clipstream"
    synsets = (Path(spec.submodule_search_locations[0]) / SYNSETS).read_text().split()
    assert len(synsets) == IMAGENET_CLASSES
    known.update({name: n for n, name in enumerate(synsets)})
    if strange := [name for name in folders if name not in known]:
        raise SettingsError(
            f"imagenet:{root}: {strange[0]!r} is not a class of ImageNet ({len(strange)} of {len(folders)} folders "
            f"are not): expected folders such as n01440764; for other classes use an evaluator of type zero_shot with "
            f"data.shards 'folder:PATH' and classes"
        )
    return {name: known[name] for name in folders}

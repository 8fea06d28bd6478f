"""The model and the data of a search: their settings, the folder of the index of images, single images, and the page.

A call enters; a folder in the cache leaves, named by the weights and the files of the data. Of the page, queries with
their hits enter, and a function that gives the card of a row; HTML leaves, see `report.pages`. Imports no torch.
"""

from __future__ import annotations

import glob
import hashlib
import json
import mmap
import os
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import braceexpand
from pydantic import SerializeAsAny

from clipstream.checkpoint.store import locate, model_at, model_in
from clipstream.config.settings import Settings, Written, load, split
from clipstream.config.short_flags import SOURCE
from clipstream.config.validate import validate_sources
from clipstream.config.value_tree import Node
from clipstream.curation.image_index import ImageRow, ImageSearch, root
from clipstream.data.decode.captions import RawSample, build_caption, candidates, split_keys
from clipstream.data.shard_pass import ImageReader
from clipstream.data.source_settings import CaptionSettings
from clipstream.data.sources import OpenShard, SampleRef, Source
from clipstream.data.sources.folders import NoCaptions, contents, levels, tell_images_without_row
from clipstream.distributed.world import World
from clipstream.errors import Dropped, SettingsError, errors_as
from clipstream.models.model_config import CONFIG_FILE
from clipstream.models.pretrained import fetch, preflight
from clipstream.report.pages import SIDE, SMALL, Thumbnails, fill, thumbnail
from clipstream.storage.shard_cache import ShardCache
from clipstream.storage.shard_url import PATH_SCHEMES, ShardURL, parts_of, with_variables
from clipstream.text import shortened
from clipstream.utils import atomic_write
from clipstream.utils.content import SUFFIXES, file_state
from clipstream.utils.section import with_home

NEAR = 8  # neighbours of each image on a page
NONE = "(no caption)"
NAME = "train"
OWN_NAMES = ("name", "pretrained", "cache_dir", "allow_mismatch")  # of settings; its files tell a model
MANY = 150  # cards of a gallery
LONGEST = 500  # characters of a caption
Hits = Sequence[tuple[int, float]]  # (row, score), best first


class AnyCaptionSettings(CaptionSettings):
    """Settings of AnyCaption."""

    of: SerializeAsAny[CaptionSettings]


class AnyCaption:
    """The captions of another extractor; where it has none, `NONE`, as images are searched without captions too."""

    Settings = AnyCaptionSettings

    def __init__(self, settings: AnyCaptionSettings) -> None:
        self._inner = build_caption(settings.of)
        self.members = self._inner.members

    def candidates(self, sample: RawSample) -> list[str]:
        try:
            return [text for path in candidates(self._inner, sample) for text in path] or [NONE]
        except Dropped:
            return [NONE]

    def __call__(self, sample: RawSample, rng: object) -> str:
        return self.candidates(sample)[0]


@lru_cache(maxsize=1)
def open_call(call: ImageSearch) -> tuple[Settings, Source]:
    """The settings of a call, with the model and with the data as the source `NAME`, and this source.

    Raises ClipstreamError: there is no such model or data.
    """
    argv, model = ["--train-data", _with_list(call.data), *call.flags], Path(call.model).expanduser()
    if model_at(model) is not None:
        subject = locate(str(model))
        assert subject.checkpoint is not None
        configs = [word for file in split(call.flags, [])[0] for word in ("--config", file)]
        run, tree = Settings() if subject.run is None else load(configs, run=subject.run), Node()
        for trained in [*run.data.sources.values()][:1]:
            tree.put_keys(SOURCE, Node.of(trained.reading, ""))
        own = {"model": model_in(subject.checkpoint, run.model, subject.run is not None), "tokenizer": run.tokenizer}
        settings = load(argv, trees=[tree]).model_copy(update=own)
    else:
        settings = load(["--model", call.model, *argv])
        if settings.model.is_fresh:
            raise SettingsError(f"{call.model} names a model without weights: add --pretrained TAG, or name a run")
    section = settings.data.sources[NAME]
    caption = AnyCaptionSettings(type=f"{AnyCaption.__module__}:{AnyCaption.__name__}", of=section.caption)
    upright = {"orientation": "exif"} if section.orientation == "auto" else {}  # as in training, and on the page
    sources = {NAME: section.model_copy(update={"caption": caption, **upright})}
    settings = settings.model_copy(update={"data": settings.data.model_copy(update={"sources": sources}), "evals": {}})
    source = validate_sources(Written(settings, Node())).sources[NAME]
    tell_images_without_row(source)
    source.begin(ShardCache(settings.data.cache, fetcher=settings.data.fetcher))
    return settings, source


def _with_list(data: str) -> str:
    """The data as training reads them; of a folder with images and no captions, a table of their paths in the cache."""
    folder = os.path.abspath(with_home(data).removeprefix("folder:"))
    try:
        if os.path.isdir(folder):
            contents(folder)
        return data
    except NoCaptions:
        names = [name for name in sorted(os.listdir(folder)) if name.lower().endswith(SUFFIXES)]
        rows = "".join(f"{json.dumps({'filepath': os.path.join(folder, name)})}\n" for name in names).encode()
    file = root() / "lists" / f"{hashlib.sha256(rows).hexdigest()[:24]}.jsonl"
    with errors_as(SettingsError, f"the list of {data} cannot be written; set $CLIPSTREAM_CACHE", OSError):
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write.replace(file, rows)
    return str(file)


def index_folder(call: ImageSearch) -> tuple[Path, list[str]]:
    """The folder of a call's index, and the files and folders that it depends on.

    Raises ClipstreamError: model or data are wrong.
    """
    open_call.cache_clear()  # the data may have changed since the last call in this process
    settings, source = open_call(call)
    model, section = settings.model.without_training(), settings.data.sources[NAME]
    preflight(model, settings.tokenizer)
    files = fetch(model, settings.tokenizer, World())
    listed, watched = _files(source)
    with open(str(files.weights), "rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as data:
        digest = hashlib.sha256(data).hexdigest()
    made_of = {
        "form": 2,  # of the files in the index
        "weights": digest,
        "model": [files.model_cfg, files.preprocess_cfg, model.model_dump(mode="json", exclude={*OWN_NAMES})],
        "tokenizer": settings.tokenizer.model_dump(mode="json"),
        "precision": settings.train.precision,
        "reading": section.reading,
        "shards": [ShardURL(name).unsigned for name in source.names],
        "files": [(os.path.abspath(path), file_state(path)) for path in listed],
    }
    folder = root() / hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:24]
    given = Path(call.model).expanduser()  # a run, whose next checkpoint appears in a folder, or a file `best`
    about = [str(given / "checkpoints" if (given / "checkpoints").is_dir() else given), *split(call.flags, [])[0]]
    weights = [str(files.weights), str(Path(str(files.weights)).with_name(CONFIG_FILE))]
    if os.path.isdir(folder_of_data := with_home(call.data).removeprefix("folder:")):
        watched.append(folder_of_data)
    return folder, [os.path.abspath(path) for path in (*weights, *about, *listed, *watched)]


def _files(source: Source) -> tuple[list[str], list[str]]:
    """The local files that a source reads (images, captions, tables, tars), and the folders in which more may be."""
    files: dict[str, None] = {}
    walked = set[str]()  # a folder has many shards
    watched: dict[str, None] = {}
    for part in parts_of(source.settings.shards):
        if part.startswith("pipe:"):
            continue
        text = re.sub(r"^[\w-]+:(?!//)", "", with_home(with_variables(part)))
        watched |= {text: None} if os.path.isdir(text) else {}
        names = [with_home(name) for name in braceexpand.braceexpand(text)] if glob.has_magic(text) else []
        while names := [*dict.fromkeys(os.path.dirname(name) for name in names)]:  # where new files may match
            matching = (found for name in names for found in glob.glob(name or ".", recursive=True))
            watched.update(dict.fromkeys(filter(os.path.isdir, matching)))
            names = [name for name in names if glob.has_magic(name)]
    in_folders = bool(watched)
    for shard in source.names:
        url = ShardURL(shard)
        path = shard.partition(":")[2] if url.scheme in PATH_SCHEMES else url.path or ""
        path = path if os.path.exists(path) else path.rpartition("#")[0]
        if source.types[shard].has_files:
            reader = source.open(shard)
            files |= dict.fromkeys(file for ref in reader.index.samples for file in reader.files(ref))
        if os.path.isfile(path):
            files[path] = None
            watched |= {os.path.dirname(path): None} if in_folders else {}
        if path in walked or not os.path.isdir(path):
            continue
        walked.add(path)
        deque(levels(path, folders := dict[str, int]()), maxlen=0)
        watched |= dict.fromkeys(folders)
    return sorted(files), [*watched]


def image_row(
    source: Source, shard: str, reader: OpenShard | None, ref: SampleRef, captions: Sequence[str]
) -> ImageRow:
    """A sample of a source, whose shard is opened as `reader` unless it is remote."""
    place = None if reader is None else reader.place(ref, split_keys(source.settings.image_key))
    title = source.types[shard].title(shard)
    title = os.path.abspath(title) if ShardURL(shard).path is not None else title
    if place is not None:
        place = place._replace(path=os.path.abspath(place.path))
    name = place.path if place is not None and not place.size else f"{title}/{ref.key}"
    return ImageRow(name, captions[0] if captions and captions[0] != NONE else "", place, (shard, ref.key))


@dataclass(frozen=True)
class Card:
    name: str
    caption: str
    link: str  # URL of its file; '' for none
    image: bytes | None = None  # the image file; None if it cannot be read


def card(image: ImageRow, call: ImageSearch) -> Card:
    """An image of a call on a page; read by the source where only its sample is known."""
    shown = image.display_name(call.data).removeprefix(os.path.join(with_home(call.data), ""))
    if image.place is None:
        return Card(shown, image.caption, "", ImageReader(open_call(call)[1])(*image.sample))
    data, (path, offset, size) = None, image.place
    with suppress(OSError), open(path, "rb") as file:
        file.seek(offset)
        data = file.read(size or -1)
    return Card(shown, image.caption, "" if size else Path(path).as_uri(), data)


def render_gallery(
    queries: Sequence[tuple[tuple[str, bytes | None], Hits]],
    near: Mapping[int, Hits],
    card: Callable[[int], Card],
    about: str = "",
    note: str = "the cosine of each. A click on an image shows those like it.",
) -> str:
    """The page.

    Args:
        queries: ((text, image file of a query that is one), what it found).
        near: of rows that were found, the rows near them, themselves included.
        card: gives the card of a row; called once for each.
        about: the data and the model, in words.
        note: what the number of an image is, and what else there is to say.
    """
    shown = dict.fromkeys(row for _, hits in queries for row, _ in hits)
    order = dict.fromkeys([*shown, *(row for row in shown for row, _ in near.get(row, ()))])
    side, thumbnails, cards = SIDE if len(order) <= MANY else SMALL, Thumbnails(), {}
    for row in order:
        own = card(row)
        src, width, height = thumbnails(own.image, side)
        others = [(other, round(score, 4)) for other, score in near.get(row, ()) if other != row]
        told = {"name": own.name, "caption": shortened(own.caption, LONGEST), "link": own.link, "near": others}
        cards[row] = {**told, "src": src, "width": width, "height": height}
    return fill(
        "search",
        f"{queries[0][0][0] if len(queries) == 1 else f'{len(queries)} queries'} · search",
        queries=[(shortened(text, LONGEST), *thumbnail(image, SMALL), hits) for (text, image), hits in queries],
        cards=cards,
        about=about,
        note=note,
        others=[row for row in order if row not in shown],
        near={row: card["near"] for row, card in cards.items() if card["near"]},
    )

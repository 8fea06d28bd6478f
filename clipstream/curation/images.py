"""`clipstream search RUN DATA QUERY…` and `clipstream.search`: the images of a data set that match a text or an image.
`clipstream label`: the names of all images.

Names of a model and of data, and queries, enter; paths, scores and captions leave. The first call computes the features
of all images into a folder of the cache (`indexing`). Later calls look whether the files of model and data have
changed, and import torch only for a query that is neither in that folder nor a text for `NumpyText`.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clipstream.curation.image_index import (
    ENDS,
    FEATURES,
    IMAGES,
    QUERIES,
    TEXT_MODEL,
    Columns,
    Floats,
    ImageRow,
    ImageSearch,
    NumpyText,
    is_image,
    root,
)  # fmt: skip
from clipstream.errors import SettingsError, each, errors_as
from clipstream.text import frame, printable, shortened
from clipstream.utils import atomic_write
from clipstream.utils.content import SUFFIXES, file_state
from clipstream.utils.logs import loading, logger, on_terminal

if TYPE_CHECKING:
    from clipstream.api.run import Run

LABEL = "label"  # title of the column of classes
ON_PAGE = 600  # labelled images of a page, whose thumbnails fit
_UNSAFE = re.compile(r'[\x00-\x1f\x7f\\/:*?"<>|]+')  # in names of files of Windows, and `/`
KEPT, KEPT_DAYS = 10, 30  # indexes that stay in the cache


def import_compute() -> Any:
    """The module that imports torch."""
    loading.show("loading torch")
    from clipstream.curation import topics

    return topics


def index_of(call: ImageSearch, out: Path | None = None) -> Path:
    """The folder of a call's index, which is made if it is not there, or if model or data have changed.

    Args:
        out: a table that is then written anew.

    Raises ClipstreamError: there is no such model or data, no image is usable, a signal came, or an index has to be
        made and there is a table `out`.
    """
    names = re.findall(r"\$\{(\w+)\}", " ".join([call.model, call.data, *call.flags]))
    variables = [os.environ.get(name) for plain in names for name in (plain, f"WDS_{plain}")]
    given = [*call, os.getcwd(), os.path.expanduser("~"), variables]
    memo = root() / "calls" / f"{_digest(json.dumps(given).encode())}.json"
    with suppress(OSError, ValueError):
        folder, watched = json.loads(memo.read_bytes())  # the index of this call, and the files that it depends on
        if (root() / folder / ENDS).is_file() and all(file_state(path) == seen for path, seen in watched):
            for path, _ in watched:
                atomic_write.note_input(path)
            with suppress(OSError):  # the cache may be read-only
                os.utime(root() / folder)
            return root() / str(folder)
    loading.show("looking for the model and the images")
    from clipstream.curation import indexing

    made, files = indexing.index_folder(call)
    stamps = [(path, file_state(path)) for path in files]
    if not (made / ENDS).is_file():
        if out is not None:
            _keep_corrected(out, b"")
        try:
            made.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            hint = "set $CLIPSTREAM_CACHE to a folder that you can write to"
            raise SettingsError(f"features cannot be kept in {made} ({error.strerror}): {hint}") from error
        import_compute().make_index(call, made)
    with suppress(OSError):  # the cache may be read-only or full, and another process may remove old indexes as well
        memo.parent.mkdir(exist_ok=True)
        atomic_write.replace(memo, json.dumps([made.name, stamps]).encode())
        _remove_old()
    return made


def _remove_old() -> None:
    """Remove the indexes that are not among the `KEPT` that were used last, and were not used for `KEPT_DAYS`."""
    used = {folder: folder.stat().st_mtime for folder in root().iterdir() if (folder / ENDS).is_file()}
    for folder in sorted(used, key=used.__getitem__)[:-KEPT]:
        if time.time() - used[folder] > KEPT_DAYS * 86_400:
            shutil.rmtree(folder, ignore_errors=True)


def encode_queries(call: ImageSearch, queries: Sequence[str], folder: Path) -> Floats:
    """Features of queries, float32 [q, D]. Raises SettingsError: an image cannot be read."""
    files = {query: folder / QUERIES / f"{_digest(_content(query))}.npy" for query in queries}
    found = dict[str, Floats]()
    for query, file in files.items():
        with suppress(OSError, ValueError, EOFError):  # not there, or damaged
            found[query] = np.load(file)
    if missing := [query for query in files if query not in found]:
        try:
            weights, config, seen = json.loads((folder / TEXT_MODEL).read_bytes())
            tower = NumpyText.of(Path(weights), config)
            if tower is None or file_state(weights) != seen or any(map(is_image, missing)):
                raise ValueError("for torch")
            features = [tower.encode(query) for query in missing]
        except (OSError, ValueError):  # torch computes other features
            features = import_compute().encode(call, missing, folder)
        for query, feature in zip(missing, features, strict=True):
            found[query] = feature.astype(np.float32)
            with suppress(OSError):  # the cache may be read-only or full
                files[query].parent.mkdir(exist_ok=True)
                np.save(buffer := io.BytesIO(), found[query])
                atomic_write.replace(files[query], buffer.getvalue())
    return np.stack([found[query] for query in queries])


def _check(query: str) -> None:
    """Warn of a word that names a file or folder. Raises SettingsError: it is the path of one that is no image."""
    path = Path(query).expanduser()
    if is_image(query):
        _content(query)
    elif len(query.encode(errors="replace")) < 256 and path.exists():
        said = f"the query {printable(query)!r} is {'a folder' if path.is_dir() else 'a file'}, not an image"
        if path.suffix or path.name != query:
            raise SettingsError(f"{said}: give words, or the path of an image ({', '.join(SUFFIXES[:3])}, …)")
        logger.warning(f"{said}: images are searched by this word")


def _content(query: str) -> bytes:
    with errors_as(SettingsError, f"the image {query} cannot be read", OSError):
        return Path(query).expanduser().read_bytes() if is_image(query) else query.encode(errors="surrogatepass")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]


@dataclass(frozen=True)
class Match:
    """An image that a search has found."""

    score: float  # its cosine with the query
    path: str  # of its file; SHARD/KEY where it is inside of another file
    caption: str


class SearchResults:
    """The result of `clipstream.search`; in a notebook, a gallery.

    Attributes:
        queries: texts, and paths of images.
        matches: for each query the images that match it best, best first.
    """

    def __init__(self, call: ImageSearch, queries: Sequence[str], k: int) -> None:
        for query in queries:
            _check(query)
        self._call, self._folder = call, index_of(call)
        self._features: Floats = np.load(self._folder / FEATURES, mmap_mode="r")
        self._ends = np.load(self._folder / ENDS, mmap_mode="r")
        self._hits = self._nearest(encode_queries(call, queries, self._folder), k)
        self.queries: list[str] = list(queries)
        self.matches: list[list[Match]] = [
            [Match(score, (image := self._image(row)).display_name(call.data), image.caption) for row, score in hits]
            for hits in self._hits
        ]

    def __repr__(self) -> str:
        return f"SearchResults({len(self.queries)} queries, {sum(map(len, self.matches))} matches)"

    def lines(self, columns: int = 0) -> Iterator[str]:
        """A line for each match: score, path and the beginning of the caption; `columns` wide at most, 0 for any."""
        width = max((len(match.path) for matches in self.matches for match in matches), default=0)
        for query, matches in zip(self.queries, self.matches, strict=True):
            yield from [query] if len(self.queries) > 1 else []
            for m in matches:
                room = max(columns - width - 10, 20) if columns else 100
                yield f"{m.score:.4f}  {m.path:{width}}  {shortened(m.caption, room)}".rstrip()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the gallery, one HTML file that needs no network. Raises OSError: it cannot be written."""
        atomic_write.replace(Path(path), self._page().encode(errors="backslashreplace"))

    def _repr_html_(self) -> str:
        return frame(self._page(), "Images found")

    def _page(self) -> str:
        from clipstream.curation import indexing

        rows = list({row for hits in self._hits for row, _ in hits})
        near = dict(zip(rows, self._nearest(self._features[rows], indexing.NEAR + 1), strict=True))
        heads = [(query, _content(query) if is_image(query) else None) for query in self.queries]
        found = list(zip(heads, self._hits, strict=True))
        about = f"{self._call.data} by {self._call.model}"
        return indexing.render_gallery(found, near, lambda row: indexing.card(self._image(row), self._call), about)

    def _nearest(self, queries: Floats, k: int) -> list[list[tuple[int, float]]]:
        """(row, cosine) of the k best rows for each query, best first."""
        found = []
        for scores in queries @ self._features.T:
            best = np.argpartition(-scores, min(k, len(scores)) - 1)[:k]
            best = best[np.lexsort((best, -scores[best]))]
            found.append([(int(row), float(scores[row])) for row in best])
        return found

    def _image(self, row: int) -> ImageRow:
        with (self._folder / IMAGES).open("rb") as file:
            file.seek(self._ends[row])
            return ImageRow(*json.loads(file.read(self._ends[row + 1] - self._ends[row])))


def search(
    model: Run | str | os.PathLike[str],
    data: str | os.PathLike[str],
    queries: str | Sequence[str],
    k: int = 10,
    **flags: str,
) -> SearchResults:
    """The images of a data set that match texts or images best.

    The first call for a model and data computes the features of all images, which later calls read from the cache.

    Args:
        model: a run or its folder (its newest checkpoint), a checkpoint, or a model's name.
        data: what training reads: a folder, a table, tars.
        queries: a text or several, or paths of images.
        k: matches of each query.
        flags: short flags of the command line, with underscores, on the model and on how the data are read, such as
            `pretrained="openai"` or `caption_key="title"`.

    Raises:
        SettingsError: there is no such model or data, or a query names an image that cannot be read.
        DataError: no image is usable.

    Examples:
        >>> import clipstream
        >>> found = clipstream.search("runs/first", "shards/*.tar", "a red circle", k=3, workers="0")
        >>> len(found.matches[0]), found.matches[0][0].score >= found.matches[0][1].score
        (3, True)
        >>> found.save("found.html")
    """
    texts = [os.fspath(query) for query in each("queries", "a text or several", queries, (str, os.PathLike))]
    given = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    if not texts or k < 1:
        raise SettingsError("give at least one query, and a k of at least 1")
    run: str | os.PathLike[str] = getattr(model, "folder", model)  # type: ignore[arg-type]
    with on_terminal():
        return SearchResults(ImageSearch(os.fspath(run), os.fspath(data), tuple(given)), texts, k)


def _keep_corrected(path: Path, content: bytes) -> None:
    """Raises SettingsError: there is a table with other content."""
    if path.exists() and path.read_bytes() not in (b"", content):
        raise SettingsError(f"{path} exists, perhaps corrected: name another --out, or remove it")


class LabelledImages:
    """The images of a data set with the names that a model gives them, the least certain first.

    Attributes:
        images: in the order of their margins: that of the class, or else the smallest of an attribute.
        columns: title -> the label of each image.
        unreadable: samples without a readable image.
        in_files: whether each image is a file of its own.
    """

    def __init__(self, call: ImageSearch, columns: Columns, out: Path) -> None:
        self._call, self._out, folder = call, out, index_of(call, out)
        loading.show("loading the model")
        found = import_compute().label(call, folder, columns)
        by = [
            [label.margin for label in labels]
            for title, labels in found.items()
            if title == LABEL or LABEL not in found
        ]
        order = np.argsort(np.min(by, axis=0), kind="stable").tolist()
        with (folder / IMAGES).open("rb") as file:
            images = [ImageRow(*json.loads(line)) for line in file]
        self.images, self.unreadable = [images[row] for row in order], images[len(order) :]
        self.columns = {title: [labels[row] for row in order] for title, labels in found.items()}
        self.in_files = all(image.place is not None and not image.place[2] for image in self.images)

    def save(self) -> None:
        """Write the table, with paths that are found from its folder; without a label for unreadable images.

        Raises:
            SettingsError: there is another table, whose labels may have been corrected.
            OSError: it cannot be written.
        """
        here, file = os.path.join(os.path.dirname(os.path.abspath(self._out)), ""), io.StringIO(newline="")
        heads = [
            (one, "score", "margin", "probability") if one == LABEL else (one, f"{one}_margin") for one in self.columns
        ]
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(
            [*(["filepath"] if self.in_files else ["shard", "key"]), *(name for head in heads for name in head)]
        )

        def place(image: ImageRow) -> list[str]:
            below, key = image.name.removeprefix(here), image.sample[1]
            if not self.in_files:
                return [image.name.removesuffix(f"/{key}"), key]
            # One that could be read as a URL, a home folder or JSON is whole.
            return [below if re.match(r"[^:~\[{(<]+$", below) else image.name]

        for image, *labels in zip(self.images, *self.columns.values(), strict=True):
            cells = place(image)
            for title, label in zip(self.columns, labels, strict=True):
                values = [label.score, label.margin, label.probability] if title == LABEL else [label.margin]
                cells += [label.name, *(f"{value:.5f}" for value in values)]
            rows.writerow(cells)
        rows.writerows([*place(image), *[""] * sum(map(len, heads))] for image in self.unreadable)
        content = file.getvalue().encode(errors="surrogateescape")
        _keep_corrected(self._out, content)
        atomic_write.replace(self._out, content)

    def groups(self) -> dict[str, list[tuple[int, float]]]:
        """What a label says -> images that have it, with their margins, the least certain first; large groups first."""
        found = defaultdict[str, list[tuple[int, float]]](list)
        for title, labels in self.columns.items():
            for row, label in enumerate(labels):
                found[label.name if title == LABEL else f"{title}: {label.name}"].append((row, label.margin))
        ranked = sorted(found.items(), key=lambda group: -len(group[1]))
        return {name: sorted(rows, key=lambda one: one[1]) for name, rows in ranked}

    def page(self, most: int) -> str:
        """A page with up to `most` images of each group."""
        from clipstream.curation import indexing

        groups, call = self.groups(), self._call
        most = max(1, min(most, ON_PAGE // len(groups)))
        shown = [((f"{name} ({len(rows):,})", None), rows[:most]) for name, rows in groups.items()]
        note = "the margin of each to the second best name, the least certain first."
        return indexing.render_gallery(
            shown, {}, lambda row: indexing.card(self.images[row], call), f"{call.data} by {call.model}", note
        )

    def link(self, folder: Path) -> None:
        """Make FOLDER/NAME/FILE, links to images by the first column. Raises OSError: the file system refuses."""
        taken: dict[str, int] = {}
        for image, label in zip(self.images, next(iter(self.columns.values())), strict=True):
            inside = _UNSAFE.sub("_", label.name).strip(" .")[:80] or "_"
            stem, suffix = os.path.splitext(os.path.basename(image.name))
            name, number = f"{stem}{suffix}", taken.get(own := f"{inside}/{stem}{suffix}".casefold(), 0)
            while f"{inside}/{name}".casefold() in taken:
                number, name = number + 1, f"{stem}-{number + 2}{suffix}"
            taken[own], taken[f"{inside}/{name}".casefold()] = number, 0
            (folder / inside).mkdir(parents=True, exist_ok=True)
            (folder / inside / name).symlink_to(image.name)

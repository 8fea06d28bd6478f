"""The topics that compare images with the captions of others: `doubt`, and the hard negatives of `neighbours --mine`.

A store and a command line enter; tables are printed, and lists and the page with images are written.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from clipstream.curation.stores.pairs import Doubts, PairRows, doubts, hard_negatives
from clipstream.curation.stores.search import gather, search
from clipstream.errors import SettingsError
from clipstream.features.store import FeatureStore, Numbers
from clipstream.features.stored_rows import Name, StoredRows
from clipstream.precompute.images import StoredImages
from clipstream.report.html_report import Card, render_gallery
from clipstream.storage.shard_cache import ShardCache
from clipstream.text import printable
from clipstream.utils import atomic_write
from clipstream.utils.console import ResultConsole, result_table
from clipstream.utils.logs import logger
from clipstream.utils.table_files import SAMPLE, TableWriter

SHOWN, SHOWN_TEXTS = 25, 10  # pairs, and captions or classes, of a table
NUMBERS = ("doubt", "cosine", "images")  # columns of tables
CELL = 100  # characters of a caption
IMAGES, NEAR = 12, 8  # images of a caption on the page, and those near an image
MANY = 10  # images that match a caption of other samples best, at least, for a table of such captions


Groups = Sequence[tuple[str, Sequence[tuple[int, float]]]]  # heads, and rows with their scores


class Mistaken(NamedTuple):
    """Captions that match images of others better than these images' own captions do."""

    row: int  # a sample that has the captions
    own: int  # where captions are classes, a sample of these images' class; -1 otherwise
    images: int  # how many
    rows: list[int]  # some of them


def doubt(options: argparse.Namespace, store: FeatureStore, device: torch.device) -> None:
    """Print doubtful pairs, captions that match many images, and classes that are confused; write the list and page.

    Raises SettingsError: the store lacks a tower, or the data of the images are not those of the store.
    """
    with stored_images(options, store) as images:
        pairs = PairRows(store)
        found = doubts(pairs, options.k, device=device)
        order = np.argsort(found.scores, kind="stable")
        worst = order[: max(1, round(options.worst * (len(order) if options.worst < 1 else 1)))]
        texts = _mistaken(found)
        rows = [row for text in texts for row in (text.row, text.own, *text.rows) if row >= 0]
        names = names_of(pairs.images, [*rows, *found.rows[worst].tolist(), *found.others[worst].tolist()])
        console, classes = ResultConsole(markup=False), found.are_classes
        table = result_table("Doubtful pairs", ("doubt", "cosine", "sample", "caption", "matches better"), NUMBERS)
        for at in worst[:SHOWN].tolist():
            name, other = names[int(found.rows[at])], names[int(found.others[at])]
            numbers = f"{found.scores[at]:.3f}", f"{found.cosines[at]:.3f}"
            better = _caption(other) if found.mistaken[at] else ""
            table.add_row(*numbers, printable(name.label, CELL), _caption(name), better)
        console.print(table)
        wrong, all_of = int(found.mistaken.sum()), f"{len(order):,} samples with captions"
        print(f"{all_of}: {wrong:,} images ({wrong / len(order):.2%}) match other captions better")
        if texts:
            title = "Classes most confused" if classes else "Captions that match images of others best"
            table = result_table(title, ("images", *(["class"] if classes else []), "matches better"), NUMBERS)
            for text in texts:
                own = [_caption(names[text.own])] if classes else []
                table.add_row(f"{text.images:,}", *own, _caption(names[text.row]))
            console.print(table)
        if options.out:
            _write(Path(options.out), found, worst, names)
            print(f"{options.out}: the {len(worst):,} most doubtful samples")
        if images is not None:
            write_page(options, pairs.images, _groups(found, worst, texts, names), images, device)


def _mistaken(found: Doubts) -> list[Mistaken]:
    """Those that match most images; where captions are classes, the pairs of classes that are confused most."""
    wrong, classes = found.mistaken.nonzero()[0], found.are_classes
    both = np.stack([found.others[wrong], found.captions[wrong] if classes else np.full(len(wrong), -1)])
    unique, of, counts = np.unique(both, axis=1, return_inverse=True, return_counts=True)
    best = np.argsort(-counts, kind="stable")[:SHOWN_TEXTS].tolist()
    return [
        Mistaken(
            int(unique[0, at]),
            int(unique[1, at]),
            int(counts[at]),
            found.rows[wrong[of.reshape(-1) == at][:IMAGES]].tolist(),
        )
        for at in best
        if classes or counts[at] >= MANY
    ]


def names_of(rows: StoredRows, numbers: Iterable[int]) -> dict[int, Name]:
    """The names of rows; those below 0 have none."""
    wanted = sorted({number for number in numbers if number >= 0})
    return dict(zip(wanted, rows.names(wanted), strict=True))


def sample_columns(names: Sequence[Name]) -> dict[str, Any]:
    return {column: [getattr(name, column) for name in names] for column, _ in SAMPLE}


def _caption(name: Name) -> str:
    return printable(name.captions[0], CELL)


def _write(path: Path, found: Doubts, worst: Numbers, names: Mapping[int, Name]) -> None:
    """Write the most doubtful samples, the worst first."""
    own, others = ([names[row] for row in rows[worst].tolist()] for rows in (found.rows, found.others))
    columns = sample_columns(own)
    columns |= {"doubt": found.scores[worst], "cosine": found.cosines[worst], "caption": [of.captions[0] for of in own]}
    columns |= {"other_cosine": found.other_cosines[worst], "other_caption": [of.captions[0] for of in others]}
    floats, texts = ("doubt", "cosine", "other_cosine"), ("caption", "other_caption")
    schema = [*SAMPLE, *((name, pa.float32()) for name in floats), *((name, pa.string()) for name in texts)]
    with TableWriter(path, pa.schema(schema)) as writer:
        writer.write(columns)


def _groups(found: Doubts, worst: Numbers, texts: Sequence[Mistaken], names: Mapping[int, Name]) -> Groups:
    """The doubtful pairs, and images that match captions of others; each with its cosine."""
    groups = [(f"Doubtful pairs: the worst {len(worst):,}", found.rows[worst].tolist())]
    for text in texts:
        head = f"matches {text.images:,} images of others best"
        head = head if text.own < 0 else f"matches {text.images:,} images of {names[text.own].captions[0]} better"
        groups.append((f"{names[text.row].captions[0]}: {head}", text.rows))
    cosines = dict(zip(found.rows.tolist(), found.cosines.tolist(), strict=True))
    return [(head, [(row, cosines[row]) for row in rows]) for head, rows in groups]


@contextlib.contextmanager
def stored_images(options: argparse.Namespace, store: FeatureStore) -> Iterator[StoredImages | None]:
    """The images of a store for --html; None without it. Raises SettingsError: these are not those of the store."""
    if bool(options.html) != bool(options.images):
        raise SettingsError("--html FILE shows images of --images DATA: set both, or none")
    with contextlib.closing(ShardCache(None)) as cache:
        yield StoredImages(store, options.images, cache, options.flags) if options.html else None


def write_page(
    options: argparse.Namespace, rows: StoredRows, groups: Groups, images: StoredImages, device: torch.device
) -> None:
    """Write the page with groups of images, each with the images near it; warns of images that cannot be read."""
    shown = list(dict.fromkeys(row for _, found in groups for row, _ in found))
    near = search(rows, gather(rows, shown), NEAR + 1, device=device)
    hits = {
        row: list(zip(*of, strict=True))
        for row, *of in zip(shown, near.rows.tolist(), near.scores.tolist(), strict=True)
    }
    names, missing = names_of(rows, [*shown, *near.rows.flatten().tolist()]), dict[int, str]()

    def card(row: int) -> Card:
        name = names[row]
        data = images.read(name.source, name.stored, name.key)
        missing.update({row: name.label} if data is None else {})
        return Card(name.label, name.captions[0] if name.captions else "", "", data)

    page = render_gallery([((head, None), found) for head, found in groups], hits, card, rows.store.shown)
    atomic_write.replace(Path(options.html), page.encode(errors="backslashreplace"))
    print(options.html)
    if missing:
        logger.warning(
            f"{len(missing):,} images cannot be read from --images {options.images}, such as "
            f"{printable(next(iter(missing.values())))}: if their paths begin in another folder, set "
            "--data.sources.train.folder as for clipstream precompute"
        )


def mine(options: argparse.Namespace, store: FeatureStore, device: torch.device) -> None:
    """Write the hard negatives of every sample with captions. Raises SettingsError: flags do not go together."""
    if not options.out or Path(options.out).suffix not in (".parquet", ".jsonl"):
        raise SettingsError("--mine writes lists of neighbours: set --out FILE.parquet (or .jsonl)")
    if options.query_image or options.query_text or options.query_key:
        raise SettingsError("--mine searches exactly, for all samples: set neither --query-* nor --index")
    labels: Any = None
    rows = found = 0
    with TableWriter(Path(options.out), pa.schema([*SAMPLE, ("neighbours", pa.list_(pa.string()))])) as writer:
        for source in store.manifest.sources:
            pairs = PairRows(store, source)
            if labels is None:
                images = pairs.images
                shards = [(shard, images.keys_of(number)) for number, shard in enumerate(images.shards)]
                labels = pa.chunked_array(
                    [pa.array([f"{shard.name}/{key}" for key in keys], pa.string()) for shard, keys in shards]
                ).combine_chunks()
            for numbers, others in hard_negatives(pairs, options.mine, options.k, options.max_cosine, device=device):
                of = others[others >= 0]
                ends = np.concatenate([[0], (others >= 0).sum(axis=1).cumsum()])
                names = images.names(numbers.tolist())
                lists = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), labels.take(pa.array(of)))
                writer.write({**sample_columns(names), "neighbours": lists})
                rows, found = rows + len(numbers), found + len(of)
    print(f"{options.out}: {found:,} neighbours of {rows:,} samples ({options.mine})")

"""What searches need torch for: the topics of `clipstream search`, and the features of `images`.

Of a topic, a store and a command line enter; tables are printed, and a file is written. Of a search by `images`, the
features of all images, by the pass of `clipstream precompute`, and those of queries are written into its index.

Queries by image or text are encoded by the model in the store, in float32.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from clipstream.api.model import ImageLabel, Model, load_model, usable_device
from clipstream.config.command_line import CommandLine, output_file
from clipstream.config.plan import survey
from clipstream.config.settings import Settings
from clipstream.curation import stores
from clipstream.curation.image_index import (
    ENDS,
    FEATURES,
    IMAGES,
    TEXT_MODEL,
    Columns,
    Floats,
    ImageRow,
    ImageSearch,
    NumpyText,
    is_image,
)
from clipstream.curation.indexing import Card, image_row, open_call, render_gallery
from clipstream.curation.stores import (
    Doubts,
    PairRows,
    doubts,
    hard_negatives,
    near_duplicates,
    pair_scores,
)
from clipstream.data.decode.images import EvalTransform
from clipstream.data.decode.key_lists import NOT_KEPT
from clipstream.data.sources import SampleRef, Source
from clipstream.distributed.launch import run_embedded
from clipstream.distributed.world import World
from clipstream.errors import DataError, Dropped, SettingsError, errors_as
from clipstream.evals.context import context_for
from clipstream.features import CHUNK_ROWS
from clipstream.features.manifest import IMAGE, MODEL, TEXT
from clipstream.features.store import FeatureStore, Numbers
from clipstream.features.stored_rows import Name, StoredRows
from clipstream.models.pretrained import fetch
from clipstream.precompute import StoreOptions
from clipstream.precompute.images import StoredImages
from clipstream.precompute.run import precompute
from clipstream.storage.shard_cache import ShardCache
from clipstream.text import printable
from clipstream.utils import atomic_write
from clipstream.utils.console import ResultConsole, result_table
from clipstream.utils.content import file_state
from clipstream.utils.logs import loading, logger
from clipstream.utils.table_files import SAMPLE, TableWriter, check_suffix
from clipstream.utils.torch_state import restore_matmul_precision

SHOWN, SHOWN_TEXTS = 25, 10  # rows of a table, and captions or classes
ON_PAGE, NEAR = 12, 8  # images of a caption on the page, and those near an image
MANY = 10  # images that match a caption of other samples best, at least, for a table of such captions
# Columns of tables with numbers.
NUMBERS = ("rank", "score", "samples", "rows", "share", "quantile", "pairs", "cluster", "doubt", "cosine", "images")
CELL = 100  # characters of a caption or query
BATCH = 64  # images of a forward pass
PROBES = ("a red bird", "Two dogs' 12 puppies, on grass")
EXACT = 1e-4  # largest difference of a feature in numpy from torch's
Groups = Sequence[tuple[str, Sequence[tuple[int, float]]]]  # heads, and rows with their scores
QUANTILES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


def search(command: CommandLine[Any]) -> None:
    """Run the topic of a command line.

    Raises:
        SettingsError: an option does not fit the store, or the file cannot be written.
        DataError: the store cannot be read, or has no rows.
    """
    options, topic = command.own, command.verb.rpartition(" ")[2]
    if options.out:
        check_suffix(Path(options.out), "--out")
    output_file(getattr(options, "html", None), "--html")
    store = FeatureStore(options.store, options.cache)
    rows = StoredRows(store, getattr(options, "part", IMAGE))
    if not len(rows):
        raise DataError(f"{store.shown} has no rows in {rows.part}: all samples were dropped")
    if topic == "scores":
        scores(options, rows)
        return
    try:
        device = torch.empty(0, device=usable_device(options.device)).device
    except (RuntimeError, AssertionError, ImportError) as error:  # of a backend that this torch does not have
        raise SettingsError(f"--device {options.device}: {str(error).splitlines()[0]}") from error
    if topic == "doubt":
        doubt(options, command.flags, store, device)
    elif topic == "duplicates":
        duplicates(options, command.flags, rows, device)
    elif topic == "clusters":
        clusters(options, rows, device)
    elif options.mine:
        mine(options, store, device)
    else:
        neighbours(options, rows, device)


def neighbours(options: Any, rows: StoredRows, device: torch.device) -> None:
    """Print, and write, the rows nearest to each query."""
    titles, queries = _queries(options, rows)
    found = stores.search(rows, queries, options.k, device=device)
    k = found.rows.shape[1]
    names = rows.names(found.rows.flatten().tolist())
    written = {
        "query": [title for title in titles for _ in range(k)],
        "rank": [*range(1, k + 1)] * len(titles),
        "score": found.scores.flatten().tolist(),
        **sample_columns(names),
        "caption": [name.captions[0] if name.captions else "" for name in names],
    }
    table = result_table("Neighbours", ("query", "rank", "score", "sample", "caption"), NUMBERS)
    for title, rank, score, name in zip(*(written[of] for of in ("query", "rank", "score")), names, strict=True):
        head = printable(title, CELL) if rank == 1 else ""
        table.add_row(head, str(rank), f"{score:.4f}", printable(name.label, CELL), _caption(name))
    ResultConsole(markup=False).print(table)
    if options.out:
        start, end = (("query", pa.string()), ("rank", pa.int32()), ("score", pa.float32())), ("caption", pa.string())
        with TableWriter(Path(options.out), pa.schema([*start, *SAMPLE, end])) as writer:
            writer.write(written)


def duplicates(options: Any, flags: Sequence[str], rows: StoredRows, device: torch.device) -> None:
    """Print groups of near-duplicates, and write the page and the list, of all samples but one of each group.

    Raises SettingsError: as `open_images`.
    """
    if rows.per_caption:
        raise SettingsError(f"--part {rows.part}: duplicates requires a part of images")
    with open_images(options, flags, rows.store) as images:
        roots = near_duplicates(rows, options.clusters, options.keep_by, device).find_kept(options.threshold)
        first, sizes = np.unique(roots, return_counts=True)
        groups = first[sizes > 1][np.argsort(-sizes[sizes > 1], kind="stable")]
        size_of = dict(zip(first.tolist(), sizes.tolist(), strict=True))
        table, shown = result_table("Largest groups", ("samples", "kept", "others"), NUMBERS), []
        for root in groups[:SHOWN].tolist():
            members = np.flatnonzero(roots == root)
            others = members[members != root].tolist()
            some = others[:3]
            labels = [printable(name.label, CELL) for name in rows.names([root, *some])]
            if images is not None:
                of_group = [root, *others[: ON_PAGE - 1]]
                found = stores.gather(rows, of_group)
                scores = (found @ found[0]).tolist()
                head = f"{size_of[root]:,} near-duplicates; kept: {labels[0]}"
                shown.append((head, list(zip(of_group, scores, strict=True))))
            more = " …" if size_of[root] > 4 else ""
            table.add_row(f"{size_of[root]:,}", labels[0], ", ".join(labels[1:]) + more)
        if len(groups):
            ResultConsole(markup=False).print(table)
        dropped = len(rows) - len(first)
        print(
            f"{len(rows):,} samples: {len(groups):,} groups of a cosine of {options.threshold:g} or more; "
            f"{dropped:,} samples ({dropped / len(rows):.2%}) are near-duplicates of another one"
        )
        if options.out:
            kept = dict(zip(groups.tolist(), (name.label for name in rows.names(groups.tolist())), strict=True))
            with TableWriter(Path(options.out), pa.schema([*SAMPLE, ("duplicate_of", pa.string())])) as writer:
                for names, numbers in _by_shard(rows):
                    drop = (roots[numbers] != numbers).nonzero()[0].tolist()
                    of = [kept[int(roots[numbers[i]])] for i in drop]
                    writer.write({**sample_columns([names[i] for i in drop]), "duplicate_of": of})
            print(options.out)
        if images is not None:
            write_page(options, rows, shown, images, device)


def clusters(options: Any, rows: StoredRows, device: torch.device) -> None:
    """Print sizes and nearest rows of clusters; the file lists the cluster of each row."""
    found = stores.kmeans(rows, options.k, seed=options.seed, device=device)
    near = stores.search(rows, found.centroids, options.nearest, device=device)
    names = names_of(rows, near.rows.flatten().tolist())
    table = result_table("Clusters", ("cluster", "rows", "share", "nearest"), NUMBERS)
    for number in found.sizes.sort(descending=True, stable=True).indices.tolist():
        size, nearest = int(found.sizes[number]), [names[row] for row in near.rows[number].tolist()]
        labels = [printable(": ".join([name.label, *name.captions[:1]]), CELL) for name in nearest]
        table.add_row(str(number), f"{size:,}", f"{size / len(rows):.2%}", "\n".join(labels))
    ResultConsole(markup=False).print(table)
    print(f"mean cosine with the centroid {found.means[-1]:.4f} after {len(found.means) - 1} iterations")
    if options.out:
        schema = [*SAMPLE, ("choice", pa.int32()), ("cluster", pa.int32()), ("score", pa.float32())]
        with TableWriter(Path(options.out), pa.schema(schema)) as writer:
            by_shard, first, held = _by_shard(rows), 0, list[Name]()
            for start, block in rows.blocks():  # each of one shard
                if start == first + len(held):
                    first, (held, _) = start, next(by_shard)
                cosines, numbers = (tensor.cpu() for tensor in found.assign(block.to(device)))
                some = held[start - first : start - first + len(block)]
                of = {"choice": [name.choice for name in some], "cluster": numbers.int().numpy()}
                writer.write({**sample_columns(some), **of, "score": cosines.numpy()})
        print(options.out)


def scores(options: Any, images: StoredRows) -> None:
    """Print quantiles of the cosines of images and captions; the file lists the pairs, or the samples kept."""
    texts = StoredRows(images.store, TEXT)
    every, best = np.empty(len(texts), np.float32), np.full(len(images), np.nan, np.float32)
    pairs = 0
    for some in pair_scores(images.store):
        every[pairs : pairs + len(some.scores)] = some.scores.numpy()
        pairs += len(some.scores)
        np.fmax.at(best, some.rows, some.scores.numpy())
    if not pairs:
        raise DataError(f"{images.store.shown} has no image with a caption")
    of_samples = best[~np.isnan(best)]
    table = result_table("Cosines", ("quantile", "pairs", "best caption of each sample"), NUMBERS)
    for share in QUANTILES:
        table.add_row(f"{share:g}", *(f"{np.quantile(of, share):.4f}" for of in (every, of_samples)))
    ResultConsole(markup=False).print(table)
    print(f"{len(every):,} pairs of {len(of_samples):,} samples, mean {every.mean(dtype=np.float64):.4f}")
    least = options.min_score
    if options.top_fraction is not None:
        count = max(1, round(options.top_fraction * len(of_samples)))
        least = float(np.partition(of_samples, len(of_samples) - count)[len(of_samples) - count])
    if least is not None:
        kept = int((of_samples >= least).sum())
        print(f"{kept:,} samples ({kept / len(of_samples):.2%}) score {least:.4f} or more")
    if options.out:
        rows, values = (texts, every) if least is None else (images, best)
        of_pairs = [("choice", pa.int32()), ("caption", pa.string())] if least is None else []
        with TableWriter(Path(options.out), pa.schema([*SAMPLE, ("score", pa.float32()), *of_pairs])) as writer:
            for names, numbers in _by_shard(rows):
                places = np.flatnonzero(values[numbers] >= (-np.inf if least is None else least))
                own = [names[i] for i in places.tolist()]
                of = {"choice": [name.choice for name in own], "caption": ["".join(name.captions) for name in own]}
                writer.write({**sample_columns(own), **of, "score": values[numbers[places]]})
        print(options.out)


def _queries(options: Any, rows: StoredRows) -> tuple[list[str], torch.Tensor]:
    """(what each query is called, float32 [q, D])."""
    store, part = rows.store, rows.part
    titles, features = [*options.query_image, *options.query_text], torch.empty(0, rows.width)
    if titles:
        folder = Path(store.path) / MODEL
        if part not in (IMAGE, TEXT) or not folder.is_dir():
            raise SettingsError(
                f"--query-image and --query-text require the model of {part}, which is not in {store.shown}: use "
                f"--query-key"
            )
        model = load_model(f"local-dir:{folder}", device="cpu")[0]
        # `precompute` turns images by their EXIF orientation in augmented views alone.
        transform = EvalTransform(model.preprocess.image, "white", upright=store.manifest.views > 0)
        images = [model.encode_image(_pixels(file, transform)) for file in options.query_image]
        features = torch.cat([*images, *([model.encode_text(options.query_text)] if options.query_text else [])])
    numbers: list[int] = []
    for key in options.query_key:
        if not (found := rows.find(key)):
            raise SettingsError(f"--query-key {key}: no such sample in {part} of {store.shown}")
        titles += [name.label for name in rows.names(found)]
        numbers += found
    if not titles:
        raise SettingsError("set --query-image FILE, --query-text TEXT or --query-key KEY")
    return titles, torch.cat([features, stores.gather(rows, numbers)])


def _pixels(query: str, transform: EvalTransform) -> torch.Tensor:
    """uint8 [3, H, W] of a query that is an image file. Raises SettingsError: it cannot be read or decoded."""
    file = Path(query).expanduser()
    with errors_as(SettingsError, f"the image {query}", OSError, Dropped):
        if file.exists() and not file.is_file():  # a FIFO may never be written to
            raise OSError("not a regular file")
        return torch.tensor(transform(file.read_bytes()).transpose(2, 0, 1))


def _by_shard(rows: StoredRows) -> Iterator[tuple[list[Name], np.ndarray[Any, Any]]]:
    """(names, numbers int64) of the rows of each shard that has rows."""
    for number in range(len(rows.shards)):
        first, end = int(rows.firsts[number]), int(rows.firsts[number + 1])
        if end > first:
            yield rows.names_of(number), np.arange(first, end)


def make_index(call: ImageSearch, folder: Path) -> None:
    """Compute the features of all images, and write the index.

    Raises ClipstreamError: no image is usable, the disk is full, or a signal came.
    """
    settings, source = open_call(call)
    images = "the images" if source.samples is None else f"{source.samples:,} images"
    logger.info(f"computing features of {images}, which later searches find in {folder.parent}")
    options = StoreOptions(
        folder=folder / "store", towers=("image",), views=0, dtype="float32", zstd=False, chunk_rows=CHUNK_ROWS,
        random_weights=False, batch_size=BATCH, with_model=False, label="computing features",
    )  # fmt: skip
    loading.show("loading the model")
    run_embedded(settings.run, partial(precompute, survey(settings, count=False), options, {}))
    loading.show("writing the index")
    rows = StoredRows(FeatureStore(options.folder))
    features = np.lib.format.open_memmap(folder / FEATURES, "w+", np.float32, (len(rows), rows.width))
    for first, block in rows.blocks():
        features[first : first + len(block)] = block
    features.flush()
    sizes, unreadable = [0], list[bytes]()
    with (folder / IMAGES).open("wb") as file:
        for has_row, image in _images(rows, source):
            line = json.dumps(image).encode() + b"\n"
            if has_row:
                sizes.append(file.write(line))
            else:
                unreadable.append(line)
        file.writelines(unreadable)
    np.save(folder / f"draft.{ENDS}", np.cumsum(sizes))
    os.replace(folder / f"draft.{ENDS}", folder / ENDS)  # the last file: now the folder is complete
    shutil.rmtree(options.folder)


def _images(rows: StoredRows, source: Source) -> Iterator[tuple[bool, ImageRow]]:
    """The samples in their order, and whether each has a row."""
    for shard in rows.shards:
        name = source.names[shard.number]
        reader = None if source.types[name].is_remote(name) else source.open(name)
        for number, ((key, captions), reason) in enumerate(
            zip(shard.source.texts(shard.number), shard.source.reasons(shard.number), strict=True)
        ):
            if reason == NOT_KEPT:
                continue
            ref = SampleRef(key) if reader is None else reader.index.samples[number]
            yield not reason, image_row(source, name, reader, ref, captions)
        if reader is not None:
            reader.close()


def _model(settings: Settings) -> Model:
    """The model in float32, as the images were encoded."""
    train = settings.train.model_copy(update={"precision": "fp32"})
    sections, world = settings.model_copy(update={"train": train}), World(device=usable_device(settings.run.device))
    with restore_matmul_precision():
        context = context_for(sections, settings.model.without_training(), world)
    return Model(context.towers, context)


def label(call: ImageSearch, folder: Path, columns: Columns) -> dict[str, list[ImageLabel]]:
    """By column the labels of the images in an index."""
    settings, _ = open_call(call)
    model = _model(settings)
    features = torch.from_numpy(np.load(folder / FEATURES))
    return {name: model.label(features, *texts) for name, texts in columns.items()}


def encode(call: ImageSearch, queries: Sequence[str], folder: Path) -> list[Floats]:
    """Features of queries, float32 [D] each, by torch; notes whether numpy computes those of texts alike.

    Raises SettingsError: an image cannot be decoded.
    """
    settings, _ = open_call(call)
    model = _model(settings)
    files = fetch(settings.model.without_training(), settings.tokenizer, World())
    tower = NumpyText.of(files.weights, files.model_cfg)
    with suppress(LookupError):  # tensors of another text tower
        theirs = model.encode_text(PROBES).cpu().numpy()
        if tower is not None and np.abs([tower.encode(text) for text in PROBES] - theirs).max() < EXACT:
            weights = os.path.abspath(str(files.weights))
            about = [weights, files.model_cfg, file_state(weights)]
            with suppress(OSError):  # the cache may be read-only or full
                atomic_write.replace(folder / TEXT_MODEL, json.dumps(about).encode())
    transform, found = EvalTransform(model.preprocess.image, "white", upright=True), []
    for query in queries:
        is_text = not is_image(query)
        feature = model.encode_text(query) if is_text else model.encode_image(_pixels(query, transform))
        found.append(feature[0].cpu().numpy())
    return found


class Mistaken(NamedTuple):
    """Captions that match images of others better than these images' own captions do."""

    row: int  # a sample that has the captions
    own: int  # where captions are classes, a sample of these images' class; -1 otherwise
    images: int  # how many
    rows: list[int]  # some of them


def doubt(options: Any, flags: Sequence[str], store: FeatureStore, device: torch.device) -> None:
    """Print doubtful pairs, captions that match many images, and classes that are confused; write the list and page.

    Raises SettingsError: the store lacks a tower, or the data of the images are not those of the store.
    """
    with open_images(options, flags, store) as images:
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
    best = [at for at in np.argsort(-counts, kind="stable")[:SHOWN_TEXTS] if classes or counts[at] >= MANY]
    rows = [found.rows[wrong[of.reshape(-1) == at][:ON_PAGE]].tolist() for at in best]
    pairs = unique.T.tolist()
    return [Mistaken(pairs[at][0], pairs[at][1], int(counts[at]), some) for at, some in zip(best, rows, strict=True)]


def names_of(rows: StoredRows, numbers: Iterable[int]) -> dict[int, Name]:
    """The names of rows; those below 0 have none."""
    wanted = sorted({number for number in numbers if number >= 0})
    return dict(zip(wanted, rows.names(wanted), strict=True))


def sample_columns(names: Sequence[Name]) -> dict[str, Any]:
    return {column: [getattr(name, column) for name in names] for column, _ in SAMPLE}


def _caption(name: Name) -> str:
    return printable(name.captions[0] if name.captions else "", CELL)


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
def open_images(options: Any, flags: Sequence[str], store: FeatureStore) -> Iterator[StoredImages | None]:
    """The images of a store for --html; None without it. Raises SettingsError: these are not those of the store."""
    if bool(options.html) != bool(options.images):
        raise SettingsError("--html FILE shows images of --images DATA: set both, or none")
    with contextlib.closing(ShardCache(None)) as cache:
        yield StoredImages(store, options.images, cache, flags) if options.html else None


def write_page(options: Any, rows: StoredRows, groups: Groups, images: StoredImages, device: torch.device) -> None:
    """Write the page with groups of images, each with the images near it; warns of images that cannot be read."""
    shown = list(dict.fromkeys(row for _, found in groups for row, _ in found))
    near = stores.search(rows, stores.gather(rows, shown), NEAR + 1, device=device)
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


def mine(options: Any, store: FeatureStore, device: torch.device) -> None:
    """Write the hard negatives of every sample with captions. Raises SettingsError: flags do not go together."""
    if not options.out or Path(options.out).suffix not in (".parquet", ".jsonl"):
        raise SettingsError("--mine writes lists of neighbours: set --out FILE.parquet (or .jsonl)")
    if options.query_image or options.query_text or options.query_key:
        raise SettingsError("--mine searches for all samples: set no --query-*")
    images, rows, found = StoredRows(store), 0, 0
    shards = [(shard, images.keys_of(number)) for number, shard in enumerate(images.shards)]
    labels = pa.array((f"{shard.name}/{key}" for shard, keys in shards for key in keys), pa.string())
    with TableWriter(Path(options.out), pa.schema([*SAMPLE, ("neighbours", pa.list_(pa.string()))])) as writer:
        for source in store.manifest.sources:
            pairs = PairRows(store, source)
            for numbers, others in hard_negatives(pairs, options.mine, options.k, options.max_cosine, device=device):
                of = others[others >= 0]
                ends = np.concatenate([[0], (others >= 0).sum(axis=1).cumsum()])
                names = images.names(numbers.tolist())
                lists = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), labels.take(pa.array(of)))
                writer.write({**sample_columns(names), "neighbours": lists})
                rows, found = rows + len(numbers), found + len(of)
    print(f"{options.out}: {found:,} neighbours of {rows:,} samples ({options.mine})")

"""`clipstream search`: a store of features and a command line enter; tables are printed, and a file is written.

Queries by picture or text are encoded by the model in the store, in float32.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from rich.table import Table

from clipstream.data.decode.images import EvalTransform
from clipstream.data.decode.tokenizers import build_tokenizer
from clipstream.data.settings import ModelTokenizer
from clipstream.errors import DataError, Dropped, SettingsError
from clipstream.features.analysis import clusters as kmeans
from clipstream.features.analysis import faiss_index
from clipstream.features.analysis import search as exact
from clipstream.features.analysis.rows import Name, PairScores, StoredRows, pair_scores
from clipstream.features.analysis.tables import TableWriter, check_suffix
from clipstream.features.manifest import IMAGE, MODEL, TEXT
from clipstream.features.store import FeatureStore
from clipstream.models.build import build_towers
from clipstream.models.settings import ModelSettings
from clipstream.text import printable
from clipstream.utils.console import ResultConsole

SHOWN = 25  # rows of a table
CELL = 100  # characters of a caption or query
QUANTILES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
RECALL_QUERIES = 100  # of which the recall of an index is measured
SAMPLE = (("source", pa.string()), ("shard", pa.string()), ("key", pa.string()))


def neighbours(options: argparse.Namespace) -> None:
    """Print the rows nearest to each query.

    Raises:
        SettingsError: no query, a picture that cannot be read, no such key, no model in the store, or no FAISS.
        DataError: the store cannot be read, or has no rows.
    """
    store, rows = _opened(options)
    titles, queries = _queries(options, store, rows)
    device = _device(options.device)
    if options.index == "exact":
        found = exact.search(rows, queries, options.k, device=device)
    else:
        if "://" in store.shown:
            raise SettingsError(f"--index: an index is kept beside the features: copy {store.shown} to this machine")
        path = Path(store.path) / "faiss" / f"{options.part}.{re.sub(r'[^A-Za-z0-9,]+', '_', options.index)}.index"
        factory = options.index.partition(":")[2]
        index = faiss_index.open_index(rows, factory, path, rows.identity())
        found = index.search(queries, min(options.k, len(rows)))
        reference = exact.search(rows, queries[:RECALL_QUERIES], options.k, device=device)
        share = faiss_index.recall(exact.Found(*(of[:RECALL_QUERIES] for of in found)), reference)
        print(f"index {path} ({index.factory}): recall@{options.k} {share:.4f} of {len(reference.rows)} queries")
    names = dict(zip(wanted := sorted({*found.rows.flatten().tolist()} - {-1}), rows.names(wanted), strict=True))
    table = _table("Neighbours", "query", "rank", "score", "sample", "caption")
    written: list[dict[str, Any]] = []
    for title, scores, numbers in zip(titles, found.scores.tolist(), found.rows.tolist(), strict=True):
        for rank, (score, row) in enumerate(zip(scores, numbers, strict=True), start=1):
            if row < 0:
                continue  # the index found fewer
            name = names[row]
            caption = name.captions[0] if name.captions else ""
            about = {"source": name.source, "shard": name.shard, "key": name.key, "caption": caption}
            written.append({"query": title, "rank": rank, "score": score, **about})
            first = printable(title, CELL) if rank == 1 else ""
            label, text = printable(name.label, CELL), printable(caption, CELL)
            table.add_row(first, str(rank), f"{score:.4f}", label, text)
    ResultConsole(markup=False).print(table)
    if options.out:
        start, end = (("query", pa.string()), ("rank", pa.int32()), ("score", pa.float32())), ("caption", pa.string())
        with TableWriter(Path(options.out), pa.schema([*start, *SAMPLE, end])) as writer:
            writer.write({name: [row[name] for row in written] for name in writer.schema.names})


def duplicates(options: argparse.Namespace) -> None:
    """Print groups of near-duplicates; the file lists the samples to drop.

    Raises:
        SettingsError: the threshold is no cosine, or the part is not one of pictures.
        DataError: the store cannot be read, or has no rows.
    """
    if not -1 <= options.threshold <= 1:
        raise SettingsError(f"--threshold is a cosine, from -1 to 1, not {options.threshold:g}")
    store, rows = _opened(options)
    if store.manifest.per_caption(options.part):
        raise SettingsError(f"--part {options.part}: near-duplicates are images; take a part of images")
    roots = exact.duplicates(rows, options.threshold, device=_device(options.device))
    first, sizes = np.unique(roots, return_counts=True)
    groups = first[sizes > 1][np.argsort(-sizes[sizes > 1], kind="stable")]
    size_of = dict(zip(first.tolist(), sizes.tolist(), strict=True))
    table = _table("Largest groups", "samples", "first", "others")
    for root in groups[:SHOWN].tolist():
        some = np.flatnonzero(roots == root)[1:4].tolist()
        labels = [printable(name.label, CELL) for name in rows.names([root, *some])]
        more = " …" if size_of[root] > 4 else ""
        table.add_row(f"{size_of[root]:,}", labels[0], ", ".join(labels[1:]) + more)
    if len(groups):
        ResultConsole(markup=False).print(table)
    dropped = len(rows) - len(first)
    print(
        f"{len(rows):,} samples: {len(groups):,} groups of a cosine of {options.threshold:g} or more; "
        f"{dropped:,} samples ({dropped / len(rows):.2%}) are near-duplicates of an earlier one"
    )
    if options.out:
        kept: dict[int, str] = {}
        is_first = np.zeros(len(rows), bool)
        is_first[groups] = True
        with TableWriter(Path(options.out), pa.schema([*SAMPLE, ("duplicate_of", pa.string())])) as writer:
            for names, numbers in _by_shard(rows):
                for row in numbers[is_first[numbers]].tolist():
                    kept[row] = names[row - int(numbers[0])].label
                drop = (roots[numbers] != numbers).nonzero()[0].tolist()
                of = [kept[int(roots[numbers[i]])] for i in drop]
                writer.write({**_samples([names[i] for i in drop]), "duplicate_of": of})
        print(options.out)


def clusters(options: argparse.Namespace) -> None:
    """Print sizes and nearest rows of clusters; the file lists the cluster of each row.

    Raises:
        SettingsError: more clusters than rows.
        DataError: the store cannot be read, or has no rows.
    """
    _, rows = _opened(options)
    device = _device(options.device)
    found = kmeans.kmeans(
        rows, options.k, seed=options.seed, init=options.init, iterations=options.iterations, device=device
    )
    near = exact.search(rows, found.centroids, options.nearest, device=device)
    names = dict(zip(wanted := sorted({*near.rows.flatten().tolist()}), rows.names(wanted), strict=True))
    table = _table("Clusters", "cluster", "rows", "share", "nearest")
    for number in found.sizes.sort(descending=True, stable=True).indices.tolist():
        size = int(found.sizes[number])
        labels = []
        for row in near.rows[number].tolist():
            caption = next(iter(names[row].captions), "")
            labels.append(printable(f"{names[row].label}: {caption}" if caption else names[row].label, CELL))
        table.add_row(str(number), f"{size:,}", f"{size / len(rows):.2%}", "\n".join(labels))
    ResultConsole(markup=False).print(table)
    print(f"mean cosine with the centroid {found.means[-1]:.4f} after {len(found.means) - 1} iterations")
    if options.out:
        schema = [*SAMPLE, ("choice", pa.int32()), ("cluster", pa.int32()), ("score", pa.float32())]
        with TableWriter(Path(options.out), pa.schema(schema)) as writer:
            names_by_shard, first = _by_shard(rows), 0
            held: list[Name] = []
            for start, block in rows.blocks():
                while start + len(block) > first + len(held):
                    first += len(held)
                    held, _ = next(names_by_shard)
                cosines, numbers = (tensor.cpu() for tensor in found.assign(block.to(device)))
                some = held[start - first : start - first + len(block)]
                of = {"choice": [name.choice for name in some], "cluster": numbers.int().numpy()}
                writer.write({**_samples(some), **of, "score": cosines.numpy()})
        print(options.out)


def scores(options: argparse.Namespace) -> None:
    """Print quantiles of the cosines of pictures and captions; the file lists the pairs, or the samples kept.

    Raises:
        SettingsError: the store lacks one of the parts, or the share is none.
        DataError: the store cannot be read, or has no pairs.
    """
    if options.top_fraction is not None and not 0 < options.top_fraction <= 1:
        raise SettingsError(f"--top-fraction is a share above 0 and at most 1, not {options.top_fraction:g}")
    if options.out:
        check_suffix(Path(options.out))
    store = FeatureStore.open(options.store, options.cache)
    # Made at once: small arrays that stay between large ones that go would keep the memory of these from reuse.
    every = np.empty(len(StoredRows(store, TEXT)), np.float32)
    of_samples = np.empty(len(StoredRows(store, IMAGE)), np.float32)
    pairs = samples = 0
    for some in pair_scores(store):
        every[pairs : pairs + len(some.scores)] = some.scores.numpy()
        pairs += len(some.scores)
        best = _best(some)[1].numpy()
        of_samples[samples : samples + len(best)] = best
        samples += len(best)
    of_samples = of_samples[:samples]
    if not pairs:
        raise DataError(f"{store.shown} has no image with a caption")
    table = _table("Cosines", "quantile", "pairs", "best caption of each sample")
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
        _write_scores(Path(options.out), pair_scores(store), least)
        print(options.out)


def _write_scores(path: Path, found: Iterator[PairScores], least: float | None) -> None:
    """Write all pairs, or the samples whose best caption scores at least `least`."""
    columns = [*SAMPLE, ("score", pa.float32())]
    if least is None:
        columns += [("choice", pa.int32()), ("caption", pa.string())]
    keys: list[str] = []
    captions: list[list[str]] = []
    before = None
    with TableWriter(path, pa.schema(columns)) as writer:
        for some in found:
            source, number = some.shard.source, some.shard.number
            if before != (source.name, number):
                before = (source.name, number)
                keys, captions = source.keys(number), source.captions(number) if least is None else []
            samples, values = some.samples, some.scores.numpy()
            if least is not None:
                samples, best = _best(some)
                values = best.numpy()
                samples, values = samples[values >= least], values[values >= least]
            count = len(samples)
            of: dict[str, Any] = {"source": [source.name] * count, "shard": [some.shard.name] * count}
            of |= {"key": [keys[i] for i in samples.tolist()], "score": values}
            if least is None:
                of["choice"] = some.choices.astype(np.int32)
                pairs = zip(samples.tolist(), some.choices.tolist(), strict=True)
                of["caption"] = [captions[i][choice] for i, choice in pairs]
            writer.write(of)


def _best(some: PairScores) -> tuple[np.ndarray[Any, Any], torch.Tensor]:
    """The samples that have captions, int64 [n], and the score of each one's best caption, float32 [n]."""
    samples, places = np.unique(some.samples, return_inverse=True)
    best = torch.full((len(samples),), -torch.inf)
    return samples, best.scatter_reduce(0, torch.from_numpy(places), some.scores, "amax")


def _opened(options: argparse.Namespace) -> tuple[FeatureStore, StoredRows]:
    """The store and the rows of the part. Raises SettingsError, DataError."""
    if options.out:
        check_suffix(Path(options.out))
    store = FeatureStore.open(options.store, options.cache)
    rows = StoredRows(store, options.part)
    if not len(rows):
        raise DataError(f"{store.shown} has no rows in {options.part}: all samples were dropped")
    return store, rows


def _queries(options: argparse.Namespace, store: FeatureStore, rows: StoredRows) -> tuple[list[str], torch.Tensor]:
    """(what each query is called, float32 [q, D])."""
    titles: list[str] = []
    features: list[torch.Tensor] = []
    if options.query_image or options.query_text:
        encoded = _encoded(store, options.part, options.query_image, options.query_text)
        titles, features = [*options.query_image, *options.query_text], [encoded]
    numbers: list[int] = []
    for key in options.query_key:
        found = rows.find(key)
        if not found:
            raise SettingsError(f"--query-key {key}: {store.shown} has no such sample in {options.part}")
        titles += [name.label for name in rows.names(found)]
        numbers += found
    if not titles:
        raise SettingsError("give --query-image FILE, --query-text TEXT or --query-key KEY")
    return titles, torch.cat([*features, rows.gather(numbers)]) if numbers else torch.cat(features)


def _encoded(store: FeatureStore, part: str, images: Sequence[str], texts: Sequence[str]) -> torch.Tensor:
    """Features of pictures and texts by the model of the store, float32 [n, D], rows of length 1."""
    folder = Path(store.path) / MODEL
    if part not in (IMAGE, TEXT):
        raise SettingsError(f"--part {part}: a store has no teacher's model; search it by --query-key")
    if not folder.is_dir():
        raise SettingsError(f"{folder} is not there: without the store's model only --query-key can be used")
    towers = build_towers(ModelSettings(name=f"local-dir:{folder}"), seed=0).eval()
    found = []
    with torch.inference_mode():
        # As `precompute` reads pictures by default: turned by their EXIF orientation in augmented views only.
        transform = EvalTransform(towers.image, "white", upright=store.manifest.views > 0)
        for file in images:
            if Path(file).exists() and not Path(file).is_file():  # a FIFO may never be written to
                raise SettingsError(f"--query-image {file}: it is no regular file")
            try:
                pixels = transform(Path(file).read_bytes())
            except OSError as error:
                raise SettingsError(f"--query-image {file}: {error.strerror}") from error
            except Dropped as error:
                raise SettingsError(f"--query-image {file}: {error}") from error
            found.append(towers.encode_image(torch.from_numpy(pixels).permute(2, 0, 1)[None]))
        if texts:
            tokenizer = build_tokenizer(ModelTokenizer(), towers.open_clip_tokenizer(), towers.context_length)
            found.append(towers.encode_text(torch.as_tensor(tokenizer.encode(list(texts)))))
    return torch.cat(found).clone()


def _by_shard(rows: StoredRows) -> Iterator[tuple[list[Name], np.ndarray[Any, Any]]]:
    """(names, numbers int64) of the rows of each shard that has rows."""
    for number in range(len(rows.shards)):
        first, end = int(rows.firsts[number]), int(rows.firsts[number + 1])
        if end > first:
            yield rows.names_of(number), np.arange(first, end)


def _samples(names: Sequence[Name]) -> dict[str, list[str]]:
    """The columns of `SAMPLE`."""
    return {column: [getattr(name, column) for name in names] for column, _ in SAMPLE}


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise SettingsError(f"--device {name}: {str(error).splitlines()[0]}") from error


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        numbers = column in ("rank", "score", "samples", "rows", "share", "quantile", "pairs", "cluster")
        table.add_column(column, justify="right" if numbers else "left", overflow="fold", no_wrap=numbers)
    return table

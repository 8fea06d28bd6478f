"""The verb search: find images by a text or an image; near-duplicates, clusters and scores of precomputed features.

The flags; `images` and `run` do the work.
"""

from __future__ import annotations

import sys
from shutil import get_terminal_size
from typing import Any, Literal

from clipstream.config.command_line import CommandLine, OutPath, Verb, argument, flag, output_file
from clipstream.config.help import READING
from clipstream.curation import images
from clipstream.curation.image_index import ImageSearch
from clipstream.errors import SettingsError
from clipstream.text import printable
from clipstream.utils.logs import loading
from clipstream.utils.section import GIVEN, Conflict, Is, PathText, Section


class SearchFlags(Section):
    """`clipstream search runs/first images "a red bird"` prints the images of a data set that match texts, or images
    given by their paths, best. The topics search a store written by `clipstream precompute`.
    """

    run: PathText = argument("a run or its folder, a checkpoint, or a model's name")
    data: str = argument("what training reads: a folder, a table, tars")
    query: list[str] = argument("texts, or paths of images")
    k: int = flag("matches of each query", 10, ge=1, also="-k")
    html: OutPath | None = flag("write a page with the images to this file", form="FILE")


class StoreFlags(Section):
    store: PathText = argument("folder or URL of the store, written by `clipstream precompute`")
    out: OutPath | None = flag(
        "write the result to this file: .parquet, .csv, .jsonl, or .txt (SHARD/KEY)", form="FILE"
    )
    device: str = flag("cpu, cuda, … (default: a GPU if available)", "auto")
    cache: OutPath | None = flag("folder for downloads of a remote store", form="FOLDER")


class PartFlags(StoreFlags):
    part: str = flag("image, text, or a teacher's NAME.image or NAME.text", "image")


class PageFlags(Section):
    html: OutPath | None = flag("write a page with these images to this file", form="FILE")
    images: PathText | None = flag(
        "data that the store was computed of, for --html; with flags of settings on how they are read", form="DATA"
    )


class NeighbourFlags(PartFlags):
    """Print the rows with the largest cosine to each query."""

    query_image: list[PathText] = flag("images, which the model in STORE/model encodes", [], many=True, form="FILE")
    query_text: list[str] = flag("texts, which it encodes", [], many=True)
    query_key: list[str] = flag("stored samples, KEY or SHARD/KEY", [], many=True, form="KEY")
    k: int = flag("number of neighbours per query", 10, ge=1, also="-k")
    mine: Literal["image-text", "text-text", "image-image"] | None = flag(
        "write the hard negatives of every sample to --out: the others whose texts match its image (or its text) best, "
        "or whose images do, without those with the same captions or with nearly the same image; data.hard_negatives "
        "reads the file"
    )
    max_cosine: float = flag("with --mine: images with this cosine or more count as the same one", 0.95, ge=-1, le=1)


class DuplicateFlags(PageFlags, PartFlags):
    """Find near-duplicates: images with a cosine of at least --threshold to one that is preferred to them (--keep-by).
    --out lists these samples, which are to drop: one of each group stays.
    """

    threshold: float = flag("minimum cosine of a pair", 0.95, ge=-1, le=1)
    clusters: int = flag(
        "compare images of the same one of N clusters alone (SemDeDup), after k-means (default: all pairs)", 0, ge=0
    )
    keep_by: Literal["first", "score", "centroid"] = flag(
        "which image of a group stays: the first, the one with the largest cosine with its caption, or the one "
        "farthest from the centroid of its cluster",
        "first",
    )


class ClusterFlags(PartFlags):
    """Cluster the rows by cosine (spherical k-means). --out lists the cluster of each row."""

    k: int = flag("clusters", 100, ge=1)
    seed: int = flag("seed of the initial centroids", 0)
    nearest: int = flag("rows to show per cluster", 3, ge=1)


class ScoreFlags(StoreFlags):
    """Print quantiles of the cosines of images with their captions. --out lists all pairs, or with --min-score or
    --top-fraction the samples whose best caption scores high enough.
    """

    min_score: float | None = flag("minimum score of samples to keep", ge=-1, le=1)
    top_fraction: float | None = flag("fraction of samples to keep, 0 to 1", gt=0, le=1)

    pairs = (Conflict({"min_score": GIVEN, "top_fraction": GIVEN}, "not supported with --top-fraction"),)


class DoubtFlags(PageFlags, StoreFlags):
    """Print the images that captions of similar images match better than their own, captions that match many images of
    others best, or the classes most confused where captions are labels. --out lists the most doubtful samples, the
    worst first.
    """

    worst: float = flag("samples of the list and the page: a number, or a fraction of all", 100, gt=0)
    k: int = flag("neighbours to compare with", 5, ge=1, also="-k")

    pairs = (
        Conflict(
            {"worst": Is("", lambda value: value > 1 and value % 1)}, "expected a number or a fraction below 1, not {0}"
        ),
    )


def search_images(command: CommandLine[SearchFlags]) -> None:
    own = command.own
    output_file(own.html, "--html")
    found = images.SearchResults(ImageSearch(own.run, own.data, tuple(command.flags)), own.query, own.k)
    loading.end()
    columns = get_terminal_size().columns if sys.stdout.isatty() else 0
    print(*map(printable, found.lines(columns)), sep="\n")
    if own.html:
        found.save(own.html)
        print(own.html)


def search_store(command: CommandLine[Any]) -> None:
    for word in () if getattr(command.own, "images", None) else command.flags[:1]:
        why = (
            "is of the settings that read --images: set --images DATA" if word[0] == "-" else "is one argument too many"
        )
        raise SettingsError(f"{word} {why}")
    images.import_compute().search(command)  # on use: --help imports no torch


_ON_PAGE = ("Captions and images",)
main = Verb(
    "search",
    SearchFlags,
    search_images,
    (*READING, "Model", "Device and precision"),
    (
        Verb("search neighbours", NeighbourFlags, search_store),
        Verb("search duplicates", DuplicateFlags, search_store, _ON_PAGE),
        Verb("search clusters", ClusterFlags, search_store),
        Verb("search scores", ScoreFlags, search_store),
        Verb("search doubt", DoubtFlags, search_store, _ON_PAGE),
    ),
)

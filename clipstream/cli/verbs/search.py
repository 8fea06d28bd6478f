"""The verb `clipstream search TOPIC STORE`: search in precomputed features. The flags; `run` does the work."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from clipstream.config.entry import entry_point
from clipstream.curation.images import search as images
from clipstream.utils.section import own_path, with_home

TOPICS = ("neighbours", "duplicates", "clusters", "scores", "doubt")


@entry_point
def main(argv: list[str]) -> int:
    """Run the verb, and return its exit code: 0, 2 for wrong usage, 3 if the store cannot be read."""
    if argv and argv[0] not in TOPICS and not argv[0].startswith("-"):
        images.main(argv)
        return 0
    parser = build_parser()
    options, flags = parser.parse_known_args(argv)
    options.flags = flags
    if flags and not getattr(options, "images", None):
        hint = "" if flags[0].startswith("-") else ": it takes one store, which `clipstream precompute` writes of data"
        parser.error(f"{options.topic}: unrecognized arguments: {' '.join(flags)}{hint}")
    images.computed().search(options)  # on use: --help imports no torch
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="clipstream search",
        usage="clipstream search RUN DATA QUERY… [-k N] [--html F]\n       clipstream search TOPIC STORE …",
        description='`clipstream search runs/first images "a red bird"` prints the images of a data set that match '
        "texts, or images given by their paths, best. RUN names a model, DATA is what training reads. The topics "
        "search a store written by `clipstream precompute`: neighbours of images and texts, near-duplicates, "
        "clusters, scores of images with their captions, and doubtful captions.",
    )
    topics = parser.add_subparsers(dest="topic", required=True, metavar="TOPIC", prog="clipstream search")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("store", type=with_home, metavar="STORE", help="folder or URL of the store")
    common.add_argument(
        "--out",
        type=own_path,
        metavar="FILE",
        help="write the result to this file: .parquet, .csv, .jsonl, or .txt (SHARD/KEY)",
    )
    common.add_argument("--device", default="auto", help="cpu, cuda, … (default: a GPU if available)")
    common.add_argument("--cache", type=own_path, metavar="FOLDER", help="folder for downloads of a remote store")
    part = argparse.ArgumentParser(add_help=False)
    part.add_argument(
        "--part", default="image", help="image, text, or a teacher's NAME.image or NAME.text (default: image)"
    )

    topic = topics.add_parser(
        "neighbours", parents=[common, part], help="the rows nearest to a query",
        description="Print the rows with the largest cosine to each query.",
    )  # fmt: skip
    query = topic.add_argument_group("queries (the model in STORE/model encodes images and texts)")
    query.add_argument("--query-image", nargs="+", default=[], type=with_home, metavar="FILE", help="images")
    query.add_argument("--query-text", nargs="+", default=[], metavar="TEXT", help="texts")
    query.add_argument("--query-key", nargs="+", default=[], metavar="KEY", help="stored samples, KEY or SHARD/KEY")
    topic.add_argument("-k", type=_count, default=10, metavar="N", help="number of neighbours per query (default: 10)")
    topic.add_argument(
        "--mine", choices=("image-text", "text-text", "image-image"),
        help="write the hard negatives of every sample to --out: the others whose texts match its image (or its text) "
            "best, or whose images do, without those with the same captions or with nearly the same image; "
            "data.hard_negatives reads the file",
    )  # fmt: skip
    topic.add_argument(
        "--max-cosine", type=_cosine, default=0.95, metavar="COSINE",
        help="with --mine: images with this cosine or more count as the same one (default: 0.95)",
    )  # fmt: skip

    topic = topics.add_parser(
        "clusters", parents=[common, part], help="spherical k-means",
        description="Cluster the rows by cosine (k-means). --out lists the cluster of each row.",
    )  # fmt: skip
    topic.add_argument("--k", type=_count, default=100, metavar="N", help="clusters (100)")
    topic.add_argument("--seed", type=int, default=0, help="seed of the initial centroids (default: 0)")
    topic.add_argument(
        "--init", choices=("k-means++", "random"), default="k-means++", help="first centroids (k-means++)"
    )
    topic.add_argument("--iterations", type=_count, default=25, metavar="N", help="most iterations (25)")
    topic.add_argument("--nearest", type=_count, default=3, metavar="N", help="rows to show per cluster (default: 3)")
    _add_lists(topics, common, part)
    _add_doubt(topics, common)
    return parser


def _add_lists(topics: Any, common: argparse.ArgumentParser, part: argparse.ArgumentParser) -> None:
    """The topics whose files are lists of samples to drop or to keep."""
    topic = topics.add_parser(
        "duplicates", parents=[common, part], help="near-duplicate images",
        description="Find images with a cosine of at least --threshold to one that is preferred to them (--keep-by). "
            "--out lists these samples, which are to drop: one of each group stays.",
    )  # fmt: skip
    topic.add_argument(
        "--threshold", type=_cosine, default=0.95, metavar="COSINE", help="minimum cosine of a pair (default: 0.95)"
    )
    topic.add_argument(
        "--clusters", type=_count, default=0, metavar="N",
        help="compare images of the same one of N clusters alone (SemDeDup), after k-means (default: all pairs)",
    )  # fmt: skip
    topic.add_argument(
        "--keep-by", choices=("first", "score", "centroid"), default="first",
        help="which image of a group stays: the first, the one with the largest cosine with its caption, or the one "
            "farthest from the centroid of its cluster (default: first)",
    )  # fmt: skip
    _add_page(topic)

    topic = topics.add_parser(
        "scores", parents=[common], help="cosines of images with their captions",
        description="Print quantiles of the cosines of images with their captions. --out lists all pairs, or with "
        "--min-score or --top-fraction the samples whose best caption scores high enough.",
    )  # fmt: skip
    limit = topic.add_mutually_exclusive_group()
    limit.add_argument("--min-score", type=_cosine, metavar="COSINE", help="minimum score of samples to keep")
    limit.add_argument("--top-fraction", type=_share, metavar="SHARE", help="fraction of samples to keep, 0 to 1")


def _number(parse: Callable[[str], float], holds: Callable[[float], bool], wanted: str) -> Callable[[str], float]:
    """The type of a flag. Raises ArgumentTypeError: not what is `wanted`."""

    def number(text: str) -> float:
        try:
            if holds(value := parse(text)):
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"expected {wanted}, not {text!r}")

    return number


def _add_doubt(topics: Any, common: argparse.ArgumentParser) -> None:
    topic = topics.add_parser(
        "doubt", parents=[common], help="pairs that may be wrong",
        description="Print the images that captions of similar images match better than their own, captions that match "
            "many images of others best, or the classes most confused where captions are labels. --out lists the most "
            "doubtful samples, the worst first.",
    )  # fmt: skip
    topic.add_argument(
        "--worst", type=_count_or_share, default=100, metavar="N|SHARE",
        help="samples of the list and the page: a number, or a fraction of all (default: 100)",
    )  # fmt: skip
    topic.add_argument("-k", type=_count, default=5, metavar="N", help="neighbours to compare with (default: 5)")
    _add_page(topic)


def _add_page(topic: argparse.ArgumentParser) -> None:
    topic.add_argument("--html", type=own_path, metavar="FILE", help="write a page with these images to this file")
    topic.add_argument(
        "--images", type=with_home, metavar="DATA",
        help="data that the store was computed of, for --html; followed by flags of training on how they are read",
    )  # fmt: skip


_count = _number(int, lambda value: value >= 1, "a whole number, at least 1")
_cosine = _number(float, lambda value: -1 <= value <= 1, "a cosine, from -1 to 1")
_count_or_share = _number(
    float, lambda value: 0 < value < 1 or (value >= 1 and value % 1 == 0), "a number or a fraction below 1"
)
_share = _number(float, lambda value: 0 < value <= 1, "a fraction above 0 and at most 1")

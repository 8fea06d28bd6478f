"""The verb `clipstream search TOPIC STORE`: search in precomputed features."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from clipstream.config.entry import run_main
from clipstream.utils.section import own_path, with_home

_OUT = "file for the result: .parquet, .csv, .json, .jsonl, or .txt (lines SHARD/KEY)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb, and return its exit code: 0, 2 for wrong usage, 3 if the store cannot be read."""
    return run_main(_main, argv)


def build_parser() -> argparse.ArgumentParser:
    """The verb's command line."""
    parser = argparse.ArgumentParser(
        prog="clipstream search",
        description="Search in a store of features that `clipstream precompute` wrote: neighbours of images and "
        "texts, near-duplicates, clusters, and scores of images with their captions, for filtering.",
    )
    topics = parser.add_subparsers(dest="topic", required=True, metavar="TOPIC")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("store", type=with_home, metavar="STORE", help="folder or URL of the store")
    common.add_argument("--out", type=own_path, metavar="FILE", help=_OUT)
    common.add_argument("--device", default="auto", help="cpu, cuda, … (auto: a GPU if there is one)")
    common.add_argument("--cache", type=own_path, metavar="FOLDER", help="keeps what is downloaded of a remote store")
    part = argparse.ArgumentParser(add_help=False)
    part.add_argument("--part", default="image", help="image, text, or a teacher's NAME.image or NAME.text (image)")
    _neighbours(topics.add_parser("neighbours", parents=[common, part], help="the rows nearest to a query"))
    _duplicates(topics.add_parser("duplicates", parents=[common, part], help="pictures that are nearly the same"))
    _clusters(topics.add_parser("clusters", parents=[common, part], help="spherical k-means"))
    _scores(topics.add_parser("scores", parents=[common], help="cosines of images with their captions"))
    return parser


def _main(argv: list[str]) -> int:
    options = build_parser().parse_args(argv)
    # Not before, so that --help and wrong usage answer at once.
    from clipstream.tools import search

    topic = getattr(search, options.topic)
    topic(options)
    return 0


def _neighbours(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print the rows with the largest cosine to each query. The search is exact unless --index is set."
    )
    query = parser.add_argument_group("queries (the model in STORE/model encodes images and texts)")
    query.add_argument("--query-image", nargs="+", default=[], type=with_home, metavar="FILE", help="pictures")
    query.add_argument("--query-text", nargs="+", default=[], metavar="TEXT", help="texts")
    query.add_argument(
        "--query-key", nargs="+", default=[], metavar="KEY", help="samples of the store, KEY or SHARD/KEY"
    )
    parser.add_argument("-k", type=_positive, default=10, metavar="N", help="neighbours of each query (10)")
    parser.add_argument(
        "--index",
        default="exact",
        type=_index,
        metavar="exact|faiss[:FACTORY]",
        help="faiss: an index of FAISS, as faiss:IVF1024,PQ64, made once and kept in STORE/faiss; its recall against "
        "the exact search is printed (exact)",
    )


def _duplicates(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Find groups of images that pairs of a cosine of at least --threshold connect. --out lists the samples to "
        "drop: all of a group but the first."
    )
    parser.add_argument("--threshold", type=float, default=0.95, metavar="COSINE", help="least cosine of a pair (0.95)")


def _clusters(parser: argparse.ArgumentParser) -> None:
    parser.description = "Cluster the rows by their directions. --out lists the cluster of each row."
    parser.add_argument("--k", type=_positive, default=100, metavar="N", help="clusters (100)")
    parser.add_argument("--seed", type=int, default=0, help="of the first centroids (0)")
    parser.add_argument(
        "--init", choices=("k-means++", "random"), default="k-means++", help="choice of the first centroids (k-means++)"
    )
    parser.add_argument("--iterations", type=_positive, default=25, metavar="N", help="most iterations (25)")
    parser.add_argument("--nearest", type=_positive, default=3, metavar="N", help="rows shown of each cluster (3)")


def _scores(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print quantiles of the cosines of images with their captions. --out lists all pairs, or with --min-score or "
        "--top-fraction the samples that are kept, those whose best caption scores high enough."
    )
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--min-score", type=_cosine, metavar="COSINE", help="keep samples that score at least this")
    limit.add_argument("--top-fraction", type=float, metavar="SHARE", help="keep this share of the samples, 0 to 1")


def _index(text: str) -> str:
    if text not in ("exact", "faiss") and not text.startswith("faiss:"):
        raise argparse.ArgumentTypeError(f"expected exact, faiss or faiss:FACTORY, not {text!r}")
    return text


def _cosine(text: str) -> float:
    value = float(text)
    if not -1 <= value <= 1:
        raise argparse.ArgumentTypeError(f"a cosine is from -1 to 1, not {text}")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value

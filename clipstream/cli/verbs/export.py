"""The verb `clipstream export features STORE OUT`: precomputed features as Parquet or NumPy files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from clipstream.config.entry import run_main
from clipstream.utils.section import own_path, with_home


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb, and return its exit code: 0, 2 for wrong usage, 3 if the store cannot be read."""
    return run_main(_main, argv)


def build_parser() -> argparse.ArgumentParser:
    """The verb's command line."""
    parser = argparse.ArgumentParser(prog="clipstream export", description="Write files for other programs.")
    topics = parser.add_subparsers(dest="topic", required=True, metavar="TOPIC")
    features = topics.add_parser(
        "features",
        help="features of a store as Parquet or NumPy",
        description="Write the features of a store that `clipstream precompute` wrote: OUT/PART/SOURCE-00000.parquet, "
        "or OUT/PART.npy with OUT/PART.keys.parquet. A row is an image's view or a caption; samples that were dropped "
        "have none.",
    )
    features.add_argument("store", type=with_home, metavar="STORE", help="folder or URL of the store")
    features.add_argument("out", type=own_path, metavar="OUT", help="folder to write into")
    features.add_argument("--format", choices=("parquet", "npy"), default="parquet", help="of the files (parquet)")
    features.add_argument(
        "--part", nargs="+", metavar="PART", help="image, text, or a teacher's NAME.image or NAME.text (all of them)"
    )
    features.add_argument(
        "--dtype",
        choices=("float16", "float32"),
        help="of the features (float16 where stored so, else float32)",
    )
    features.add_argument("--captions", action="store_true", help="also write the captions")
    features.add_argument("--rows", type=int, metavar="N", help="rows of a Parquet file, about (all of a source)")
    features.add_argument("--cache", type=own_path, metavar="FOLDER", help="keeps what is downloaded of a remote store")
    return parser


def _main(argv: list[str]) -> int:
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.rows is not None and options.rows < 1:
        parser.error(f"--rows must be 1 or more, not {options.rows}")
    # Not before, so that --help and wrong usage answer at once.
    from pathlib import Path

    from clipstream.features.analysis.export import export
    from clipstream.features.codec import FEATURE_DTYPES
    from clipstream.features.store import FeatureStore

    store = FeatureStore.open(options.store, options.cache)
    every = [name for name, part in store.manifest.parts.items() if part.dtype in FEATURE_DTYPES]
    for part in options.part or every:
        how = {"dtype": options.dtype, "captions": options.captions, "file_rows": options.rows}
        for path in export(store, part, Path(options.out), options.format, **how):
            print(path)
    return 0

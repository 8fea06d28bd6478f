"""The verb `clipstream export features STORE OUT`: precomputed features as Parquet or NumPy files."""

from __future__ import annotations

import argparse
from pathlib import Path

from clipstream.config.entry import entry_point
from clipstream.errors import SettingsError
from clipstream.utils.section import own_path, with_home


def build_parser() -> argparse.ArgumentParser:
    """The verb's command line."""
    parser = argparse.ArgumentParser(prog="clipstream export", description="Write files for other programs.")
    topics = parser.add_subparsers(dest="topic", required=True, metavar="TOPIC")
    features = topics.add_parser(
        "features",
        help="features of a store as Parquet or NumPy",
        description="Export the features of a store written by `clipstream precompute`: OUT/PART/SOURCE-00000.parquet, "
        "or OUT/PART.npy with OUT/PART.keys.parquet. A row is a view of an image, or a caption.",
    )
    add = features.add_argument
    add("store", type=with_home, metavar="STORE", help="folder or URL of the store")
    add("out", type=own_path, metavar="OUT", help="folder to write into")
    add("--format", choices=("parquet", "npy"), default="parquet", help="file format (default: parquet)")
    add("--part", nargs="+", metavar="PART", help="image, text, or a teacher's NAME.image or NAME.text (default: all)")
    add(
        "--dtype",
        choices=("float16", "float32"),
        help="dtype of the features (default: float16 if stored as float16, else float32)",
    )
    add("--captions", action="store_true", help="also write the captions")
    add(
        "--rows",
        type=int,
        metavar="N",
        help="approximate number of rows per Parquet file (default: all rows of a source)",
    )
    add("--cache", type=own_path, metavar="FOLDER", help="folder for downloads of a remote store")
    return parser


@entry_point
def main(argv: list[str]) -> int:
    """Run the verb, and return its exit code: 0, 2 for wrong usage, 3 if the store cannot be read."""
    options = build_parser().parse_args(argv)
    if options.rows is not None and options.rows < 1:
        raise SettingsError(f"--rows: expected a whole number, at least 1, not {options.rows}")
    from clipstream.features.tables import FeatureStore, export  # on use: --help imports no torch

    store, how = FeatureStore(options.store, options.cache), (options.format, options.dtype, options.captions)
    for part in options.part or store.manifest.feature_parts:
        for path in export(store, part, Path(options.out), *how, file_rows=options.rows):
            print(path)
    return 0

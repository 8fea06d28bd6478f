"""The verb `clipstream export`: a model for transformers, ONNX, open_clip or sentence-transformers, or stored features.

The flags; `run` exports models, `features.tables` features.
"""

from __future__ import annotations

import argparse
from typing import Any

from clipstream.config.entry import entry_point
from clipstream.errors import SettingsError
from clipstream.utils.section import own_path, with_home

TARGETS = ("transformers", "onnx", "open_clip", "sentence-transformers")
ABOUT: dict[str, Any] = {
    "description": "Export a model, and check it: 100 image files and texts go through the exported files in a process "
    "without clipstream, and the features are compared with the model's."
}


@entry_point
def main(argv: list[str]) -> int:
    """Run the verb, and return its exit code: 0, 1 if the files differ, 2 for wrong usage, 3 for unreadable data."""
    of_model = bool(argv) and argv[0] != "features" and not argv[0].startswith("-")
    if of_model:
        parser = argparse.ArgumentParser(prog="clipstream export", **ABOUT)
        _add_model_flags(parser)
        options = parser.parse_intermixed_args(argv[argv[0] == "model" :])
    else:
        options = build_parser().parse_args(argv)
        if options.rows is not None and options.rows < 1:
            raise SettingsError(f"--rows: expected a whole number, at least 1, not {options.rows}")
    from clipstream.export import run  # on use: --help imports no torch

    (run.export_model if of_model else run.export_features)(options)
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="clipstream export",
        usage="clipstream export RUN --to TARGET [OUT] …\n       clipstream export features STORE OUT …",
        description="Write files for other programs: a model, which is checked against clipstream in a process of its "
        "own, or the features of a store. `clipstream export model RUN …` is `clipstream export RUN …`.",
    )
    topics = parser.add_subparsers(dest="topic", required=True, metavar="TOPIC", prog="clipstream export")
    _add_model_flags(topics.add_parser("model", help="a model for transformers, ONNX, open_clip, …", **ABOUT))
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
    add("--images", type=with_home, metavar="DATA", help="also write thumbnails of the images of this data (Parquet)")
    add(
        "--rows",
        type=int,
        metavar="N",
        help="approximate number of rows per Parquet file (default: all rows of a source)",
    )
    add("--cache", type=own_path, metavar="FOLDER", help="folder for downloads of a remote store")
    return parser


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=with_home, metavar="RUN", help="run, checkpoint, ORG/NAME of the Hub, or any name of a model")
    add("out", nargs="?", type=own_path, metavar="OUT", help="folder to write into (default: exports/RUN-TARGET)")
    add("--to", required=True, choices=TARGETS, help="program that reads the files")
    add("--pretrained", type=with_home, metavar="TAG", help="weights of a model that is named by a configuration")
    add("--weights", choices=("trained", "averaged"), default="trained", help="of a checkpoint (default: trained)")
    add("--config", type=with_home, metavar="FILE",
        help="settings over the run's; RUN/config.yaml itself allows its Python code, commands and URLs")  # fmt: skip
    add("--data", type=with_home, metavar="DATA", help="data of the check (default: those of the run, else drawn ones)")
    add("--preprocess", choices=("none", "normalize", "resize"), default="none",
        help="ONNX: what the graph of the image tower does of the preprocessing (default: none)")  # fmt: skip
    add("--int8", action="store_true", help="ONNX: also write graphs with dynamic int8 quantisation")
    add("--license", metavar="ID", help="licence in the model card, an identifier of the Hub such as mit")
    add("--push-to-hub", metavar="ORG/NAME", help="upload the folder, after the check, to this repository of the Hub")
    add("--private", action="store_true", help="make this repository a private one, if it is new")

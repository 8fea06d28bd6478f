"""The evaluation of a checkpoint or a pretrained model outside training, and of suites of data sets.

A command line enters; a table on the terminal, files of figures and a page of pictures leave. A suite is a file of
settings with evaluators only, so that a run takes it with --config. Missing data sets are not downloaded: the message
names the command that does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from clipstream.checkpoint import store
from clipstream.config.dump import print_config, take_flag
from clipstream.config.error_messages import enumerate_words
from clipstream.config.flags import own_flags
from clipstream.config.settings import Settings, load, require_equal
from clipstream.config.validate import validate_evals
from clipstream.data.sources.registry import expand
from clipstream.distributed.failure import FailureWatch
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError, SettingsError
from clipstream.evals.settings import MeanSettings, PromptedSettings, Weights, sources_of
from clipstream.models.model_config import LOCAL
from clipstream.models.pretrained import AVERAGED_FILE, CONFIG_FILE, WEIGHT_FILES, preflight
from clipstream.models.settings import ModelSettings, TowerSettings
from clipstream.report.eval_results import FIGURES_FILE, TABLE_FILE, add, traced
from clipstream.report.html_report import write_evaluations
from clipstream.report.sinks import Page, Record
from clipstream.report.terminal import table
from clipstream.storage.shard_url import ShardURL
from clipstream.utils import atomic_write
from clipstream.utils.logs import announce, logger, set_level

if TYPE_CHECKING:
    from clipstream.evals.context import EvalContext, Example, Table


ROOT = "CLIPSTREAM_EVALS"
SUITE, FOLDER, MISSING = "--suite", "--evals-root", "--missing"
SUITE_FLAGS = {
    SUITE: "a file of evaluators, such as configs/evals/robustness.yaml; may be given several times; evaluators that "
    "are only in the run's own settings are left out",
    FOLDER: f"folder or URL of the suites' data sets, such as hf://datasets/clip-benchmark; ${ROOT} unless given",
    MISSING: "error (the default) or skip, for data sets that do not exist",
}


@dataclass(frozen=True)
class Suites:
    """The suites of a command line: their YAML files, in order, and whether missing data sets are skipped."""

    files: tuple[str, ...]
    skip: bool

    @classmethod
    def of(cls, own: Mapping[str, str]) -> Suites:
        """From a verb's own flags; the data sets' folder is put into the environment, which names of shards refer to.

        Raises SettingsError: a flag has an invalid value, or there is no suite.
        """
        files = tuple(own[SUITE].split("\n")) if SUITE in own else ()
        for flag in (FOLDER, MISSING):
            if flag in own and not files:
                raise SettingsError(f"{flag}: of which suite? Give {SUITE} FILE as well")
        missing = own.get(MISSING, "error")
        if missing not in ("error", "skip"):
            raise SettingsError(f"{MISSING}: expected error or skip, not {missing!r}")
        if (root := own.get(FOLDER)) is not None:
            os.environ[ROOT] = root.rstrip("/") if ShardURL(root).scheme else str(Path(root))
        return cls(files, missing == "skip")

    def load(self, run: Sequence[str], flags: Sequence[str]) -> Settings:
        """The settings, with the suites' evaluators whose data sets exist, and without those of the run itself.

        Args:
            run: the files of the run's own settings.

        Raises:
            SettingsError: they are wrong, the data sets' folder is not known, or some are missing and must not be
                skipped.
        """
        configs = [word for file in (*run, *self.files) for word in ("--config", file)]
        settings = load([*configs, *flags], trains=False)
        set_level(settings.log.level)
        settings.log_notices()
        if not self.files:
            return settings
        places = {name: settings.places.place_of(("evals", name)) for name in settings.evals}
        own = tuple(f"{file}:" for file in run)
        evals = {name: section for name, section in settings.evals.items() if not places[name].startswith(own)}
        sources = {name: list(sources_of(section).values()) for name, section in evals.items()}
        specs = " ".join(str(source.shards) for each in sources.values() for source in each)
        if f"${{{ROOT}}}" in specs and not {ROOT, f"WDS_{ROOT}"} & os.environ.keys():
            raise SettingsError(f"where are the suite's data sets? Give {FOLDER} FOLDER, or set {ROOT}")
        gone: dict[str, str] = {}  # remote shards are taken to be there, as only a download would show it
        for name, each in sources.items():
            for source in each:
                try:
                    shards = expand(source.shards)
                except SettingsError as error:
                    gone.setdefault(name, str(error))
                    continue
                local = [path for shard in shards if (path := ShardURL(shard).path) is not None]
                if lost := [path for path in local if not os.path.exists(path)]:
                    more = " …" * (len(lost) > 1)
                    gone.setdefault(name, f"{len(lost)} of {len(shards)} shards are not there: {lost[0]}{more}")
        if gone and not self.skip:
            root, shown = os.environ.get(ROOT, ""), ""
            for name, text in gone.items():
                fetch = None if ShardURL(root).scheme else (evals[name].fetch or "").replace(f"${{{ROOT}}}", root)
                shown += f"  {name}: {text}\n" + (f"    {fetch}\n" if fetch else "")
            raise SettingsError(
                f"{len(gone)} of {sum(map(bool, sources.values()))} data sets are missing:\n{shown}"
                f"bring them here, or leave them out by {MISSING} skip"
            )
        warnings = [f"{name} is left out: {text}" for name, text in gone.items()]
        for name, section in [*evals.items()]:
            if isinstance(section, MeanSettings) and section.of.keys() & gone.keys():
                of = {part: metric for part, metric in section.of.items() if part not in gone}
                left = f"the mean of {len(of)} of {len(section.of)} sets" if of else "left out"
                warnings.append(f"{name} is {left}")
                evals[name] = section.model_copy(update={"of": of})
                if not of:
                    del evals[name]
        if World.from_env().rank == 0:
            for text in warnings:
                logger.warning(text)
        kept = {name: section for name, section in evals.items() if name not in gone}
        return settings.model_copy(update={"evals": kept})


def check_same(settings: Settings, world: World) -> None:
    """Check that all ranks evaluate the same data sets. Collective.

    Raises SettingsError: they do not, and would wait for each other in vain.
    """
    names = world.gather_objects([*settings.evals])
    if other := [rank for rank, found in enumerate(names) if found != names[0]]:
        raise SettingsError(f"rank {other[0]} finds other data sets than rank 0: is their folder shared?")


OWN_FLAGS = {
    "--checkpoint": "a run's folder (its latest checkpoint), a checkpoint's, or RUN/checkpoints/best; without it, the "
    "model of the settings",
    "--weights": "trained (the default), or averaged: a checkpoint's averaged weights, of a run with train.ema",
    "--output": "file that the figures are appended to: NAME.csv one line per figure, other names one JSON line "
    f"per evaluation; {FIGURES_FILE} and {TABLE_FILE} in the run's folder unless given",
    "--report": "FILE.html that shows the figures, and the pictures of each evaluation",
    **SUITE_FLAGS,
}

NAMING_FLAGS = ("--model", "--model.name", "--pretrained", "--model.pretrained")


@dataclass(frozen=True)
class Subject:
    """The model to evaluate."""

    label: str  # its name in the results
    checkpoint: Path | None = None  # its folder; None for the model that the settings name
    run: Path | None = None  # the folder of its run, if there is one
    step: int = 0  # of the checkpoint; 0 for a pretrained model


def evaluate(argv: Sequence[str]) -> int:
    """Evaluate on all ranks, and return the exit code.

    Raises SettingsError: wrong settings, no such checkpoint, or no evaluators.
    """
    every, argv = take_flag(argv)
    tokens = [re.sub(r"^--out(?==|$)", "--output", token) for token in argv]
    own, flags = own_flags(tokens, OWN_FLAGS, many=(SUITE,))
    suites = Suites.of(own)
    weights = next((kind for kind in get_args(Weights) if kind == own.get("--weights", "trained")), None)
    if weights is None:
        raise SettingsError(f"--weights: expected {' or '.join(get_args(Weights))}, not {own['--weights']!r}")
    subject = locate(own.get("--checkpoint"), flags)
    trained = [] if subject.run is None else [str(subject.run / "config.yaml")]
    settings = suites.load(trained, flags)
    if every is not None:
        return print_config(settings, "evaluate", every)
    named = Path(settings.model.name)
    if subject.checkpoint is None and any((named / part).exists() for part in ("checkpoints", CONFIG_FILE)):
        raise SettingsError(f"--model: {named} is the folder of a run or a checkpoint: give --checkpoint {named}")
    if not settings.evals:
        raise SettingsError(
            "nothing to evaluate on: give --checkpoint RUN, --val-data SHARDS, --suite FILE, or --config with a "
            "section evals"
        )
    report = Path(own["--report"]) if "--report" in own else None
    for name, section in settings.evals.items() if report is None else ():
        place = settings.places.place_of(("evals", name, "prompts"))  # those in a run's own settings are for its report
        if isinstance(section, PromptedSettings) and section.prompts and place.rpartition(":")[0] not in trained:
            raise SettingsError(f"{place}: evals.{name}.prompts show pictures in a page: give --report FILE.html")
    validate_evals(settings, shown=report is not None)
    model = settings.model
    if subject.checkpoint is None:
        if weights == "averaged":
            raise SettingsError("--weights averaged: of which checkpoint? Give --checkpoint RUN as well")
        subject = replace(subject, label=" ".join(part for part in model.label.values() if part))
    else:
        # A run's own tokenizer fits its weights.
        known = bool(trained) and load(["--config", *trained]).tokenizer == settings.tokenizer
        model = model_in(subject.checkpoint, model, known, weights)
    preflight(model, settings.tokenizer, ask=World.from_env().local_rank == 0)
    outputs = [] if subject.run is None else [subject.run / FIGURES_FILE, subject.run / TABLE_FILE]
    if "--output" in own:
        outputs = [Path(own["--output"])]
    about = {
        "run": None if subject.run is None else subject.run.name,
        "checkpoint": subject.label,
        "model": (model if subject.run is None else settings.model).label,
    }
    from clipstream.distributed.launch import run_ranks

    def body(world: World, watch: FailureWatch) -> None:
        check_same(settings, world)
        require_equal(settings, world)
        label = subject.label if subject.run is None else f"{subject.run.name} {subject.label}"
        results = _Results(outputs, report, label, settings.log.pictures)
        if world.is_main:
            results.check()
        context = context_for(settings, model, world, pictures=results.pictures)
        if world.is_main:
            machine = f"{world.size} x {world.device}, {context.precision}"
            announce(f"{subject.label} on {', '.join(settings.evals)}, {machine}")
        from clipstream.evals.runner import EvalRunner

        runner = EvalRunner(
            {name: section.model_copy(update={"weights": weights}) for name, section in settings.evals.items()},
            context,
            lambda record: None,
            results.show,
            weights={weights: nullcontext},
            trace=lambda record, made_with: results.add(traced(record, made_with, about)),
            ends=True,
        )
        records = runner(subject.step, last=True)
        if world.is_main:
            results.close(records)
        if failures := runner.failures:  # at the end, so that they are not lost among figures
            raise failures[0].kind(enumerate_words(failure.message for failure in failures))

    return run_ranks(settings.run, body)


def locate(path: str | None, flags: Sequence[str] = ()) -> Subject:
    """The subject of --checkpoint: a run's folder, one of its checkpoints, or any folder that open_clip reads.

    Raises SettingsError: there is no checkpoint, or `flags` name a model as well.
    """
    if path is None:
        return Subject("")
    named = [flag for flag in flags if flag.partition("=")[0] in NAMING_FLAGS]
    if named:
        raise SettingsError(f"{named[0]} and --checkpoint both name a model: give one of them")
    folder = Path(path)
    if folder.is_file():
        if folder.name not in (store.LATEST, store.BEST):
            raise SettingsError(
                f"--checkpoint: {folder} is a file, which does not say of which model: give --model NAME "
                "--pretrained FILE"
            )
        folder = store.pointed(folder) or folder
    if not folder.is_dir():
        raise SettingsError(f"--checkpoint: there is no folder {folder}")
    if (folder / "checkpoints").is_dir() or folder.name.startswith("step_"):
        # Checked on every rank; the optimizer's moments, which are twice as large, are not needed here.
        read = (*WEIGHT_FILES, AVERAGED_FILE)
        folder = store.find(folder, str(folder), files=read) or folder  # never None where a path is given
    elif not (folder / CONFIG_FILE).is_file():
        raise SettingsError(f"--checkpoint: {folder} is neither a run (checkpoints/) nor a checkpoint ({CONFIG_FILE})")
    run = folder.resolve().parent.parent
    number = folder.name.removeprefix("step_")
    return Subject(
        label=folder.name,
        checkpoint=folder,
        run=run if (run / "config.yaml").is_file() else None,
        step=int(number) if number.isdecimal() else 0,
    )


def model_in(checkpoint: Path, model: ModelSettings, tokenizer_fits: bool, weights: Weights) -> ModelSettings:
    """The settings of a checkpoint's model, without those of training, but with the precision of each tower.

    Args:
        tokenizer_fits: whether the settings' tokenizer is known to be the model's.

    Raises:
        SettingsError: the checkpoint has no averaged weights.
    """
    averaged = checkpoint / AVERAGED_FILE
    if weights == "averaged" and not averaged.is_file():
        raise SettingsError(f"--weights averaged: {checkpoint} has none; train with --train.ema to get them")
    own = {str(tower): TowerSettings(precision=kept) for tower, kept in model.own_precisions.items()}
    return model.not_trained().model_copy(
        update={
            **own,
            "name": f"{LOCAL}{checkpoint}",
            "config": None,
            "pretrained": str(averaged) if weights == "averaged" else None,
            "allow_mismatch": tokenizer_fits or model.allow_mismatch,
        }
    )


class _Results:
    """The files of an evaluation, on rank 0: figures and a page of pictures.

    Args:
        pictures: pictures of each evaluation in the page.
    """

    def __init__(self, outputs: Sequence[Path], report: Path | None, label: str, pictures: int) -> None:
        self.outputs, self.report, self.label = outputs, report, label
        self.pictures = 0 if report is None else pictures
        self._pages: list[Page] = []
        self._lost: dict[Path, str] = {}

    def check(self) -> None:
        """Check that all files can be written, before hours are spent on evaluation.

        Raises SettingsError: one cannot be written.
        """
        for flag, path in (*(("--output", path) for path in self.outputs), ("--report", self.report)):
            if path is None:
                continue
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                atomic_write.probe(path)
            except OSError as error:
                text = f"{path} cannot be written ({error.strerror}): name another file by {flag}"
                raise SettingsError(text) from error

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

    def close(self, records: Sequence[Record]) -> None:
        """Print a table, write the page, and print the files' names.

        Raises ClipstreamError: a file could not be written.
        """
        if succeeded := [record for record in records if "error" not in record]:
            print(table(succeeded), flush=True)
        if self.report is not None:
            try:
                write_evaluations(self.report, self.label, records, self._pages)
            except OSError as error:
                self._lose(self.report, error)
        there = [str(path) for path in (*self.outputs, self.report) if path is not None and path not in self._lost]
        if there:
            announce(f"written to {' and '.join(there)}")
        for path, why in self._lost.items():
            raise ClipstreamError(f"{path} lacks what was evaluated, as it could not be written: {why}")

    def _lose(self, path: Path, error: OSError) -> None:
        self._lost[path] = why = error.strerror or str(error)
        logger.warning(f"{path} could not be written: {why}")


def context_for(settings: Settings, model: ModelSettings, world: World, *, pictures: int = 0) -> EvalContext:
    """A model with its tokenizer and loss, on this rank's device; downloads it if necessary. Collective.

    Its features are computed as in training: in `train.precision`, a tower of its own precision in that one, and with
    `train.tf32` where the device is a GPU.
    """
    from clipstream.data.decode.tokenizers import build_tokenizer
    from clipstream.evals.context import EvalContext
    from clipstream.losses.contrastive import build_loss
    from clipstream.models.build import build_towers
    from clipstream.models.pretrained import fetch
    from clipstream.training.precision import check_device, prepare_towers, resolve_precision

    fetch(model, settings.tokenizer, world)
    precision = resolve_precision(settings.train.precision, world)
    tf32 = settings.train.tf32 and world.device.startswith("cuda")
    check_device(world.device, precision, tf32=tf32)
    towers = build_towers(model, seed=settings.run.seed, tokenizer=settings.tokenizer).to(world.device).eval()
    if model.own_precisions:
        towers.requires_grad_(False)
    prepare_towers(towers, precision, model, world.device, tf32=tf32, keep=False)
    tokenizer = build_tokenizer(
        settings.tokenizer, towers.open_clip_tokenizer(), towers.context_length, cache_dir=model.cache_dir
    )
    loss = build_loss(settings.loss, towers.loss_type)
    return EvalContext(towers, tokenizer, world, settings.data, precision, loss, examples_wanted=pictures)

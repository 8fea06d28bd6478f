"""Owns the evaluation of a checkpoint outside training: where it lies, its settings, the table, the files it leaves.

Never trains, and never changes a checkpoint or the run's own metrics. Torch is imported when the settings are known to
be right.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from clipstream import durable
from clipstream.cli import own_flags
from clipstream.config import Settings, load
from clipstream.contradictions import validate_evals
from clipstream.errors import ClipstreamError, SettingsError
from clipstream.evals.settings import PromptedSettings, Weights
from clipstream.failure import FailureWatch
from clipstream.model.catalogue import LOCAL
from clipstream.model.pretrained import AVERAGED_FILE, CONFIG_FILE, WEIGHT_FILES, preflight
from clipstream.model.settings import ModelSettings
from clipstream.report.album import Page
from clipstream.report.figures import FIGURES_FILE, TABLE_FILE, add, traced
from clipstream.report.page import write_evaluations
from clipstream.report.progress import table
from clipstream.tools import suites
from clipstream.training import shelf
from clipstream.world import World

if TYPE_CHECKING:
    from clipstream.evals.protocol import EvalContext, EvalRunner
    from clipstream.example import Example, Table

OWN_FLAGS = {
    "--checkpoint": "a run's folder (its latest checkpoint), a checkpoint's, or RUN/checkpoints/best; without it, the "
    "model of the settings",
    "--weights": "trained (the default), or averaged: a checkpoint's averaged weights, of a run with train.ema",
    "--output": "file that the figures are added to: NAME.csv a line a figure, any other name a JSON line an "
    f"evaluation; {FIGURES_FILE} and {TABLE_FILE} in the run's folder unless given",
    "--report": "FILE.html that shows the figures, and the pictures of each evaluation",
    **suites.OWN_FLAGS,
}

NAMING_FLAGS = ("--model", "--model.name", "--pretrained", "--model.pretrained")


@dataclass(frozen=True)
class Subject:
    """What is evaluated.

    Attributes:
        label: how it is called in the results.
        checkpoint: its folder, which open_clip reads as local-dir:; None for the model that the settings name.
        run: the run's folder that it belongs to, if there is one.
        step: of the checkpoint; 0 where there is none.
    """

    label: str
    checkpoint: Path | None = None
    run: Path | None = None
    step: int = 0


def evaluate(argv: Sequence[str]) -> int:
    """Evaluate what the command line names, on all ranks; the exit code.

    Raises:
        SettingsError: wrong settings, no such checkpoint, or nothing to evaluate on.
    """
    tokens = [re.sub(r"^--out(?==|$)", "--output", token) for token in argv]
    own, flags = own_flags(tokens, OWN_FLAGS, many=(suites.SUITE,))
    weights, asked = _chosen_weights(own.get("--weights", "trained")), suites.Suites.of(own)
    subject = locate(own.get("--checkpoint"), flags)
    trained = [] if subject.run is None else ["--config", str(subject.run / "config.yaml")]
    settings = asked.chosen(load([*trained, *asked.flags, *flags], trains=False), trained[1:])
    if not settings.evals:
        raise SettingsError(
            "nothing to evaluate on: give --checkpoint RUN, --val-data SHARDS, --suite FILE, or --config with a "
            "section evals"
        )
    report = Path(own["--report"]).expanduser() if "--report" in own else None
    if report is None:
        _check_prompts(settings, trained[1:])
    validate_evals(settings, shown=report is not None)
    model = settings.model
    if subject.checkpoint is None:
        if weights == "averaged":
            raise SettingsError("--weights averaged: of which checkpoint? Give --checkpoint RUN as well")
        subject = replace(subject, label=" ".join(part for part in model.label.values() if part))
    else:
        # A run's own tokenizer fits its weights, whatever it is.
        known = bool(trained) and load(trained).tokenizer == settings.tokenizer
        model = model_in(subject.checkpoint, model, known, weights)
    preflight(model, settings.tokenizer, ask=World.from_env().local_rank == 0)
    outputs = _outputs(own.get("--output"), subject)
    from clipstream.session import run_ranks

    def body(world: World, watch: FailureWatch) -> None:
        suites.check_same(settings, world)
        run = "" if subject.run is None else f"{subject.run.name} "
        results = _Results(outputs, report, run + subject.label, settings.log.pictures)
        if world.is_main:
            results.check()
        runner = _runner(settings, model, subject, world, results, weights)
        records = runner(subject.step, last=True)
        if world.is_main:
            print(table([record for record in records if "error" not in record]), flush=True)
            results.close(records)
        for failure in runner.failures:  # the first: what ends the process must not be lost among figures
            raise failure.kind(failure.message)

    return run_ranks(settings.run, body)


def locate(path: str | None, flags: Sequence[str] = ()) -> Subject:
    """What --checkpoint names: a run's folder, one of its checkpoints, or any folder that open_clip reads.

    Raises:
        SettingsError: there is no checkpoint, or `flags` name another model as well.
    """
    if path is None:
        return Subject("")
    named = [flag for flag in flags if flag.partition("=")[0] in NAMING_FLAGS]
    if named:
        raise SettingsError(f"{named[0]} and --checkpoint both name a model: give one of them")
    folder = Path(path).expanduser()
    if folder.is_file():
        if folder.name not in (shelf.LATEST, shelf.BEST):
            raise SettingsError(
                f"--checkpoint: {folder} is a file, which does not say of which model: give --model NAME "
                "--pretrained FILE"
            )
        folder = shelf.pointed(folder) or folder
    if not folder.is_dir():
        raise SettingsError(f"--checkpoint: there is no folder {folder}")
    if (folder / "checkpoints").is_dir() or folder.name.startswith("step_"):
        # Every rank looks, and the moments, which nobody reads here, are twice as large as the weights.
        read = (*WEIGHT_FILES, AVERAGED_FILE)
        folder = shelf.find(folder, str(folder), files=read) or folder  # never None where a path is given
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


def _chosen_weights(told: str) -> Weights:
    for kind in get_args(Weights):
        if told == kind:
            chosen: Weights = kind
            return chosen
    raise SettingsError(f"--weights: expected {' or '.join(get_args(Weights))}, not {told!r}")


def model_in(checkpoint: Path, model: ModelSettings, tokenizer_fits: bool, weights: Weights) -> ModelSettings:
    """The settings of a checkpoint's model: nothing frozen or recomputed, as nothing is trained.

    Raises:
        SettingsError: it has no averaged weights.
    """
    averaged = checkpoint / AVERAGED_FILE
    if weights == "averaged" and not averaged.is_file():
        raise SettingsError(f"--weights averaged: {checkpoint} has none; train with --train.ema to get them")
    return model.model_copy(
        update={
            "name": f"{LOCAL}{checkpoint}",
            "pretrained": str(averaged) if weights == "averaged" else None,
            "grad_checkpointing": False,
            "lock_image": False,
            "lock_text": False,
            "allow_mismatch": tokenizer_fits or model.allow_mismatch,
        }
    )


def _outputs(told: str | None, subject: Subject) -> list[Path]:
    """The files that get the figures."""
    if told is not None:
        return [Path(told).expanduser()]
    return [] if subject.run is None else [subject.run / FIGURES_FILE, subject.run / TABLE_FILE]


def _check_prompts(settings: Settings, trained: Sequence[str]) -> None:
    """Without a page, prompts are for the report of the run that names them itself.

    Raises:
        SettingsError: nobody would see some.
    """
    for name, section in settings.evals.items():
        place = settings.places.of(("evals", name, "prompts"))
        own = any(place.startswith(f"{file}:") for file in trained)
        if isinstance(section, PromptedSettings) and section.prompts and not own:
            raise SettingsError(f"{place}: evals.{name}.prompts show pictures in a page: give --report FILE.html")


class _Results:
    """What is left behind, on rank 0: figures that are added to files, and a page.

    Args:
        outputs: files of figures.
        report: the page; None for none.
        label: of what is evaluated.
        pictures: that an evaluation shows in the page.
    """

    def __init__(self, outputs: Sequence[Path], report: Path | None, label: str, pictures: int) -> None:
        self.outputs, self.report, self.label = outputs, report, label
        self.pictures = 0 if report is None else pictures
        self._pages: list[Page] = []
        self._lost: dict[Path, str] = {}

    def check(self) -> None:
        """See that all can be written, before hours are spent on it.

        Raises:
            SettingsError: one cannot.
        """
        for flag, path in (*(("--output", path) for path in self.outputs), ("--report", self.report)):
            if path is None:
                continue
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                durable.probe(path)
            except OSError as error:
                text = f"{path} cannot be written ({error.strerror}): name another file by {flag}"
                raise SettingsError(text) from error

    def add(self, evaluation: dict[str, Any]) -> None:
        """Add a traced evaluation to the files; what cannot be written is told, and the others go on."""
        for path in self.outputs:
            try:
                add(path, evaluation)
            except OSError as error:
                self._lose(path, error)

    def show(self, step: int, name: str, examples: Sequence[Example], tables: Sequence[Table]) -> None:
        """Keep the pictures of an evaluation for the page."""
        if self.report is not None:
            self._pages.append(Page.of(step, name, examples, tables))

    def close(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the page, and say what is written.

        Raises:
            ClipstreamError: something could not be written.
        """
        if self.report is not None:
            try:
                write_evaluations(self.report, self.label, records, self._pages)
            except OSError as error:
                self._lose(self.report, error)
        there = [str(path) for path in (*self.outputs, self.report) if path is not None and path not in self._lost]
        if there:
            print(f"written to {' and '.join(there)}")
        for path, why in self._lost.items():
            raise ClipstreamError(f"{path} lacks what was evaluated, as it could not be written: {why}")

    def _lose(self, path: Path, error: OSError) -> None:
        self._lost[path] = why = error.strerror or str(error)
        print(f"warning: {path} could not be written: {why}", file=sys.stderr, flush=True)


def _runner(
    settings: Settings, model: ModelSettings, subject: Subject, world: World, results: _Results, weights: Weights
) -> EvalRunner:
    from clipstream.evals.protocol import EvalRunner
    from clipstream.model.pretrained import fetch

    fetch(model, settings.tokenizer, world)
    context = context_for(settings, model, world)
    context.examples_wanted = results.pictures
    if world.is_main:
        print(f"{subject.label} on {', '.join(settings.evals)}, {world.size} x {world.device}", flush=True)
    about = {
        "run": None if subject.run is None else subject.run.name,
        "checkpoint": subject.label,
        "model": (model if subject.run is None else settings.model).label,
    }

    def trace(record: dict[str, Any], made_with: dict[str, Any]) -> None:
        results.add(traced(record, made_with, about))

    sections = {name: section.model_copy(update={"weights": weights}) for name, section in settings.evals.items()}
    kinds = {weights: nullcontext}
    return EvalRunner(sections, context, lambda record: None, results.show, weights=kinds, trace=trace)


def context_for(settings: Settings, model: ModelSettings, world: World) -> EvalContext:
    from clipstream.data.text import build_tokenizer
    from clipstream.evals.protocol import EvalContext
    from clipstream.model.losses import build_loss
    from clipstream.model.towers import build_towers
    from clipstream.training.precision import check_device, prepare, settle

    # A run's bf16 is that of the machine where it trained.
    precision = settle("auto" if settings.train.precision == "bf16" else settings.train.precision, world)
    check_device(world.device, precision)
    towers = build_towers(model, seed=settings.run.seed, tokenizer=settings.tokenizer).to(world.device).eval()
    prepare(towers, precision)
    tokenizer = build_tokenizer(
        settings.tokenizer, towers.open_clip_tokenizer(), towers.context_length, cache_dir=model.cache_dir
    )
    loss = build_loss(settings.loss, towers.loss_type)
    return EvalContext.for_towers(towers, tokenizer, world, data=settings.data, precision=precision, loss=loss)

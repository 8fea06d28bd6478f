"""The verb interpolate: choose weights between the start and the end of a run, or average checkpoints.

A command line enters; a model in a folder, a table and a plot leave. The evaluators are those of END's run, as in
`clipstream evaluate`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import field_validator

from clipstream.checkpoint.store import Subject, locate, model_at, model_in, resolve_model_name
from clipstream.cli.verbs.evaluate import has_own_tokenizer
from clipstream.config.command_line import CommandLine, OutPath, Verb, argument, flag
from clipstream.config.settings import Settings
from clipstream.config.validate import validate_evals
from clipstream.distributed.failure import FailureWatch
from clipstream.distributed.launch import run_ranks
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.models.model_config import HUB, LOCAL
from clipstream.models.pretrained import preflight
from clipstream.models.settings import ModelSettings
from clipstream.training.settings import check_metric_name
from clipstream.utils.section import SET, Conflict, Section


class InterpolateFlags(Section):
    """Evaluate weights between those that a run started from, or START, and those of END (WiSE-FT), and write the ones
    with the best target whose guards (evaluators with role: guard) keep their figures at the start. With --soup,
    average several checkpoints. Evaluators are those of the run.
    """

    model: list[str] = argument("[START] END, a run or a checkpoint each; with --soup, all checkpoints")
    alphas: str | None = flag("shares of END to evaluate: FIRST:LAST:STEP, or a list, '[0.3, 0.5]' (default: 0:1:0.1)")
    target: str | None = flag(
        "EVALUATOR/METRIC to be best (default: R@1, or the first metric, of the only evaluator without role: guard)"
    )
    guard_kept: float | None = flag("share of the start's figure that each guard must keep (default: 0.97)", ge=0, le=1)
    soup: Literal["uniform", "greedy"] | None = flag(
        "average of all models named, instead: uniform, or greedy (each that makes the target no worse)"
    )
    weights: Literal["trained", "averaged"] = flag(
        "trained (default) or averaged (train.ema) weights of END, or of the checkpoints of a soup", "trained"
    )
    out: OutPath | None = flag("folder to write (default: interpolated, or soup, in END's run)", form="FOLDER")

    _whole = field_validator("target")(check_metric_name)

    pairs = tuple(
        Conflict({key: SET, "soup": SET}, "is not of --soup, which has no start: remove one of them")
        for key in ("alphas", "guard_kept")
    )


def run(command: CommandLine[InterpolateFlags]) -> int:
    own, words, names, kind = command.own, command.flags, command.own.model, command.own.soup
    if (kind and len(names) < 2) or (not kind and len(names) > 2):
        wanted = "--soup greedy CHECKPOINT CHECKPOINT …" if kind else "[START] END, a run or a checkpoint each"
        raise SettingsError(f"expected clipstream interpolate {wanted}")
    subjects = [locate(name) for name in (names if kind else names[-1:])]
    end = subjects[0]
    written = command.load(words, run=end.run)
    settings = written.settings
    if not settings.evals:
        raise SettingsError(f"{names[-1]} has no evaluators: add --val-data SHARDS, or --config with a section evals")
    validate_evals(written, shown=False)
    alphas, kept = _alphas(own.alphas or "0:1:0.1"), 0.97 if own.guard_kept is None else own.guard_kept
    averaged = own.weights == "averaged"
    fits = end.run is not None and has_own_tokenizer(settings, end.run, words)
    labels = [one.label if one.run is None else f"{one.run.name} {one.label}" for one in subjects]
    named_as = [str(subject.checkpoint) if labels.count(label) > 1 else label
                for subject, label in zip(subjects, labels, strict=True)]  # fmt: skip
    models = dict[str, ModelSettings]()
    for name, subject in zip(named_as, subjects, strict=True):
        assert subject.checkpoint is not None
        models[name] = model_in(subject.checkpoint, settings.model, fits, averaged=averaged)
    if len(models) < len(subjects):
        twice = next(name for name in named_as if named_as.count(name) > 1)
        raise SettingsError(f"{twice} is named twice: name each checkpoint once")
    start = _start(names, end, settings) if not kind else None
    for model in filter(None, (*models.values(), start)):
        preflight(model.model_copy(update={"allow_mismatch": True}), ask=World.from_env().local_rank == 0)
    place = Path.cwd() if end.run is None else end.run
    out = Path(own.out) if own.out else place / ("soup" if kind else "interpolated")

    def body(world: World, watch: FailureWatch) -> None:
        from clipstream.export import interpolation

        first = None if kind or len(names) == 1 else model_at(Path(names[0]))
        interpolation.check_out(out, filter(None, (first, *(subject.checkpoint for subject in subjects))))
        if start is None:
            interpolation.soup(settings, models, kind or "uniform", own.target, out, world)
        else:
            end_model = next(iter(models.values()))
            interpolation.interpolate(settings, start, end_model, alphas, own.target, kept, out, world)

    return run_ranks(settings.run, body)


def _start(names: list[str], end: Subject, settings: Settings) -> ModelSettings:
    """The model to begin from: the one that is named, or that of END's run. Raises SettingsError: there is none."""
    model = settings.model.without_training()
    if len(names) == 1:
        if end.run is None:
            raise SettingsError(f"{names[0]} is of no run: name the start, clipstream interpolate START END")
        return model
    name = resolve_model_name(names[0])
    if name.startswith((HUB, LOCAL)):
        return ModelSettings(name=name, image_size=model.image_size, cache_dir=model.cache_dir)
    return model.model_copy(update={"pretrained": name})


def _alphas(text: str) -> list[float]:
    """The shares of END, of FIRST:LAST:STEP or a list. Raises SettingsError: the text is neither."""
    try:
        if ":" in text:
            first, last, step = map(float, text.split(":"))
            found = [round(first + i * step, 6) for i in range(round((last - first) / step) + 1)]
        else:
            found = [float(one) for one in text.strip("[] ").split(",")]
    except (ValueError, ZeroDivisionError) as error:
        raise SettingsError(f"--alphas: expected FIRST:LAST:STEP or a list, [0.3, 0.5], not {text!r}") from error
    wrong = [f"{one:g}" for one in found if not 0 <= one <= 1]
    if wrong or not found:
        raise SettingsError(f"--alphas: expected shares from 0 to 1, not {wrong[0] if wrong else text}")
    return found


main = Verb("interpolate", InterpolateFlags, run, ("Evaluation", "Captions and images", "Device and precision"))

"""Owns what settings, each right by itself, cannot mean together, and what they name that is not there.

Never imports torch, changes no setting and writes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path as FilePath

from clipstream.config import Settings, cadences
from clipstream.data.settings import JsonCaption, SourceSettings
from clipstream.data.shards import expand, scheme_of
from clipstream.errors import SettingsError
from clipstream.evals.prompts import OF_OPEN_CLIP, class_names, class_spec, prompt_templates, template_spec
from clipstream.evals.settings import (
    EvalSettings,
    LabelledSettings,
    PromptedSettings,
    ZeroShotSettings,
    eval_name,
    sources_of,
)
from clipstream.folder import holds_a_run
from clipstream.schema import Path
from clipstream.wording import joined, problem
from clipstream.world import World

Found = list[tuple[Path, str]]


def validate_run(settings: Settings, world: World) -> None:
    """Check what no section can check alone, before torch is imported and before anything of the run is written.

    Every rank looks for an existing run folder: rank 0 must not make it before all of them have been here.

    Raises:
        SettingsError: every contradiction, one line each.
    """
    _refuse(
        settings,
        *_length_problems(settings),
        *_batch_problems(settings, world),
        *_model_problems(settings),
        *_data_problems(settings),
        *_evals_problems(settings),
        *_average_problems(settings),
        *_checkpoint_problems(settings),
        *_early_stop_problems(settings),
        *_folder_problems(settings, world),
    )


def validate_evals(settings: Settings, *, shown: bool) -> None:
    """Check what evaluators need, where nothing is trained: before torch is imported and a model looked for.

    Args:
        settings: of the evaluators.
        shown: whether there is a page for what they show.

    Raises:
        SettingsError: every contradiction, one line each.
    """
    _refuse(settings, *_evals_problems(settings, shown=shown))


def _refuse(settings: Settings, *found: tuple[Path, str]) -> None:
    if found:
        raise SettingsError(joined(problem(settings.places, path, text) for path, text in found))


def _length_problems(settings: Settings) -> Found:
    train = settings.train
    given = [key for key in ("steps", "samples", "epochs") if getattr(train, key) is not None]
    if not given:
        return [(("train",), "nothing says how long to train: give --steps, --train.samples or --epochs")]
    if len(given) > 1:
        return [(("train", given[1]), f"{' and '.join(given)} are all given: keep the one that is meant")]
    if given == ["epochs"] and train.epoch_samples is None:
        text = "how many samples are an epoch? The data do not tell: give --train-num-samples, or --steps"
        return [(("train", "epochs"), text)]
    steps, schedule, lr = settings.total_steps, settings.schedule, settings.optim.lr
    found: Found = []
    if 0 < steps < schedule.warmup:
        text = f"{schedule.warmup} steps of warm-up, but the run has {steps}: lower --warmup"
        found.append((("schedule", "warmup"), text))
    if late := [step for step, _ in settings.data.batch_schedule if step >= steps]:
        found.append((("data", "batch_schedule"), f"step {late[0]} never comes: the run has {steps}"))
    for path, section in cadences(settings):
        if section.every_epochs is None:
            continue
        if "every" in section.model_fields_set:
            found.append(((*path, "every"), "every and every_epochs are both given: keep the one that is meant"))
        elif train.epoch_samples is None:
            found.append(((*path, "every_epochs"), "how many samples are an epoch? Give --train-num-samples"))
        elif settings.data.batch_schedule:
            text = "an epoch has no fixed number of steps under data.batch_schedule: give every, in steps"
            found.append(((*path, "every_epochs"), text))
    if schedule.min_lr > lr:
        found.append((("schedule", "min_lr"), f"{schedule.min_lr:g} is above the peak, optim.lr {lr:g}"))
    return found


def _batch_problems(settings: Settings, world: World) -> Found:
    found: Found = []
    data, micro = settings.data, settings.train.micro_batch_size
    lanes, batch, largest = data.lanes, min(data.batch_sizes), max(data.batch_sizes)
    if batch < world.size:
        key = "global_batch_size" if batch == data.global_batch_size else "batch_schedule"
        found.append((("data", key), f"{batch} samples cannot be shared by {world.size} ranks"))
    if lanes != "auto" and lanes > batch:
        text = f"{lanes} lanes, but a global batch has {batch} samples: a lane needs one each step"
        found.append((("data", "lanes"), text))
    if lanes != "auto" and lanes < world.size:
        found.append((("data", "lanes"), f"{lanes} lanes cannot be shared by {world.size} ranks: one each at least"))
    if isinstance(micro, int) and micro > largest:
        text = f"{micro} is more than the largest global batch, {largest}"
        found.append((("train", "micro_batch_size"), text))
    timeout, stall = settings.run.timeout, data.stall_timeout
    if world.size > 1 and timeout <= stall:
        text = f"{timeout:g} s end the run before data.stall_timeout, {stall:g} s, can say what is wrong: raise it"
        found.append((("run", "timeout"), text))
    return found


def _model_problems(settings: Settings) -> Found:
    model, augment = settings.model, settings.data.augment
    found: Found = []
    for key, lock in (("unlocked_groups", "lock_image"), ("unlocked_layers", "lock_text")):
        if getattr(model, key) and not getattr(model, lock):
            found.append(
                (("model", key), f"nothing is locked: give --{lock.replace('_', '-')} as well, or leave it out")
            )
    loss = settings.loss
    if getattr(loss, "duplicates_by", None) and getattr(loss, "duplicates", None) == "negatives":
        text = "what becomes of duplicates? Give --loss.duplicates mask or positives as well"
        found.append((("loss", "duplicates_by"), text))
    if model.patch_dropout and model.lock_image and not model.unlocked_groups:
        found.append((("model", "patch_dropout"), "a locked image tower drops no patches: leave one of the two out"))
    if augment.color_jitter_prob and augment.color_jitter is None:
        text = "how strong? Give --data.augment.color-jitter '[0.4, 0.4, 0.4, 0.1]' as well"
        found.append((("data", "augment", "color_jitter_prob"), text))
    if augment.color_jitter is not None and not augment.color_jitter_prob:
        text = "how often? Give --data.augment.color-jitter-prob as well, 0 to 1"
        found.append((("data", "augment", "color_jitter"), text))
    return found


def _data_problems(settings: Settings) -> Found:
    found: Found = []
    if not settings.data.sources:
        text = "there is no data: give --train-data SHARDS, or --config configs/quickstart.yaml for a first look"
        found.append((("data", "sources"), text))
    if settings.data.cache_gib is not None and settings.data.cache is None:
        found.append((("data", "cache_gib"), "the limit of which folder? Give --data.cache FOLDER as well"))
    found += _sampling_problems(settings)
    read: list[tuple[Path, SourceSettings, str | None]] = [
        (("data", "sources", name), source, None) for name, source in settings.data.sources.items()
    ]
    for name, evaluator in settings.evals.items():
        read += [(("evals", name, key), source, evaluator.fetch) for key, source in sources_of(evaluator).items()]
    for path, source, fetch in read:
        caption = source.caption
        if "scenes:" not in str(source.shards):  # whose listing makes them
            try:
                expand(source.shards)
            except SettingsError as error:
                found.append(((*path, "shards"), f"{error}; fetch it: {fetch}" if fetch else str(error)))
        if isinstance(caption, JsonCaption) and caption.weights and len(caption.weights) != len(caption.paths):
            text = f"{len(caption.weights)} weights for {len(caption.paths)} paths: give one for each"
            found.append(((*path, "caption", "weights"), text))
    return found


def _evals_problems(settings: Settings, *, shown: bool = True) -> Found:
    found: Found = []
    for name, evaluator in settings.evals.items():
        if evaluator.data is None and evaluator.reads and evaluator.type in EvalSettings.builtin:
            text = f"the evaluator has no data: give --evals.{name}.data.shards, or remove it with --evals.{name} null"
            found.append((("evals", name), text))
        if shown and isinstance(evaluator, PromptedSettings) and evaluator.prompts and not settings.log.pictures:
            text = "log.pictures is 0, so nothing is shown: raise it, or leave the prompts out"
            found.append((("evals", name, "prompts"), text))
        if isinstance(evaluator, LabelledSettings):
            found += _prompt_problems(name, evaluator)
    return found


def _sampling_problems(settings: Settings) -> Found:
    found: Found = []
    sampling, path = settings.data.sampling, ("data", "sampling")
    if not sampling.replacement and sampling.mode != "resampled":
        text = f"only the mode 'resampled' draws with replacement, and the mode is {sampling.mode!r}: leave it out"
        found.append(((*path, "replacement"), text))
    if sampling.tail != "drop" and sampling.mode != "indexed":
        text = f"the mode {sampling.mode!r} has no tail: leave it out, or set --data.sampling.mode indexed"
        found.append(((*path, "tail"), text))
    if settings.data.batch_schedule and sampling.mode == "indexed":
        text = "the mode 'indexed' needs batches of one size: leave it out, or set --data.sampling.mode resampled"
        found.append((("data", "batch_schedule"), text))
    return found


def _average_problems(settings: Settings) -> Found:
    found: Found = []
    train, evals = settings.train, settings.evals
    if train.ema_warmup and train.ema is None:
        found.append((("train", "ema_warmup"), "up to which decay? Give --train.ema as well, as 0.9999"))
    for name in (name for name, section in evals.items() if "averaged" in section.kinds):
        if train.ema is None:
            text = "there are no averaged weights: give --train.ema as well, as 0.9999"
            found.append((("evals", name, "weights"), text))
        if (called := eval_name(name, "averaged")) in evals:
            text = f"the evaluations of {name} with averaged weights are called so: take another name"
            found.append((("evals", called), text))
    return found


def _prompt_problems(name: str, evaluator: LabelledSettings) -> Found:
    found: Found = []

    def read(key: str, spec: Callable[[], str | list[str] | None], make: Callable[..., object]) -> None:
        try:
            given = spec()
            if given is None and isinstance(evaluator, ZeroShotSettings):
                raise SettingsError("missing: the class names: a list, a file with one a line, or imagenet")
            if given is not None and given not in OF_OPEN_CLIP:  # reading these imports torch
                make(given)
        except SettingsError as error:
            text = str(error).removeprefix(f"{key}: ")
            if text not in [told for _, told in found]:  # names and templates may lack the same folder
                found.append((("evals", name, key), text))

    read("classes", partial(class_spec, evaluator), class_names)
    if isinstance(evaluator, ZeroShotSettings):
        read("templates", partial(template_spec, evaluator), prompt_templates)
    return found


def _checkpoint_problems(settings: Settings) -> Found:
    from clipstream.training.place import Place

    found: Found = []
    section = settings.checkpoint
    if (metric := section.best_by) is not None and metric.evaluator not in (evals := _evaluations(settings)):
        found.append((("checkpoint", "keep_best"), _no_evaluator(metric.evaluator, evals)))
    for key in ("remote_sync", "resume"):
        url = getattr(section, key)
        if url is None or (key == "resume" and scheme_of(url) is None):
            continue
        try:
            Place(url, "")
        except SettingsError as error:
            found.append((("checkpoint", key), str(error).removeprefix(": ")))
    return found


def _early_stop_problems(settings: Settings) -> Found:
    found: Found = []
    section, path = settings.train.early_stop, ("train", "early_stop")
    if section.watched is None:
        text = "of which metric? Give --train.early-stop.metric EVALUATOR/METRIC as well"
        usual = type(section)()
        return [
            ((*path, key), text) for key in type(section).model_fields if getattr(section, key) != getattr(usual, key)
        ]
    evals, called = _evaluations(settings), section.watched.evaluator
    if called not in evals:
        found.append(((*path, "metric"), _no_evaluator(called, evals)))
    elif not settings.evals[evals[called]].every and settings.evals[evals[called]].every_epochs is None:
        text = f"{called} is evaluated at the end only: give --evals.{evals[called]}.every as well"
        found.append(((*path, "metric"), text))
    return found


def _evaluations(settings: Settings) -> dict[str, str]:
    """What evaluations are called, with the names of their evaluators."""
    return {eval_name(name, kind): name for name, section in settings.evals.items() for kind in section.kinds}


def _no_evaluator(called: str, evals: Collection[str]) -> str:
    there = ", ".join(evals) or "none"
    return f"there is no evaluator {called!r} (there is {there}): name one of them, as NAME/METRIC"


def _folder_problems(settings: Settings, world: World) -> Found:
    resume, name = settings.checkpoint.resume, settings.run.name
    # Rank 0 finds the checkpoint for all: others may have a disk of their own.
    named = resume if resume not in (None, "latest", "auto") else None
    if named is not None and scheme_of(named) is None and world.is_main and not FilePath(named).exists():
        text = f"there is no {named}: give a checkpoint's folder, latest (with --name) or auto"
        return [(("checkpoint", "resume"), text)]
    if name is None:
        if resume in ("latest", "auto"):
            return [(("checkpoint", "resume"), f"{resume} of which run? Give its --name")]
        return []
    if name in (".", "..") or re.search(r"[/\\]", name) or not name.strip():
        return [(("run", "name"), f"{name!r} is no name for a folder: leave out slashes, and set the place by --logs")]
    folder = settings.run_folder
    if resume is None and holds_a_run(folder):
        text = f"{folder} exists: go on with it by --resume auto, or start another run by another --name"
        return [(("run", "name"), text)]
    return []

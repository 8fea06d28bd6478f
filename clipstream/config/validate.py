"""Rules that span sections of the settings, and checks of the files, folders and addresses that settings name.

Validated settings enter; nothing leaves, or a `SettingsError` with every mistake and where it was written. Rules within
one section are that section's `conflicts`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path as FilePath

from clipstream.checkpoint.remote_sync import RemoteDir
from clipstream.checkpoint.run_lock import holds_a_run
from clipstream.config.error_messages import enumerate_words, format_problem
from clipstream.config.section import Path
from clipstream.config.settings import Settings, cadences
from clipstream.data.shard_url import ShardURL
from clipstream.data.sources.registry import expand
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.evals.classes import repeated, unreadable
from clipstream.evals.settings import EvalSettings, LabelledSettings, PromptedSettings, eval_name, sources_of
from clipstream.losses.settings import DistillSettings
from clipstream.training.optim import ConstCooldown
from clipstream.utils.escape import printable
from clipstream.utils.logs import logger

Problems = Iterator[tuple[Path, str]]


def validate_run(settings: Settings, world: World) -> None:
    """Check the settings of a training run, before torch is imported and anything is written.

    Every rank looks for an existing run folder: rank 0 must not make it before all of them have been here.

    Raises SettingsError: with one line for each mistake.
    """
    parts = _length(settings), _batches(settings, world), _shards(settings), _evals(settings), _distill(settings)
    rest = _features(settings), _compilation(settings), _checkpoints(settings), _folders(settings, world)
    _conclude(settings, world, *parts, *rest)


def validate_evals(settings: Settings, *, shown: bool) -> None:
    """Check the settings of evaluators where nothing is trained, before torch is imported.

    Args:
        shown: whether a page shows pictures.

    Raises SettingsError: with one line for each mistake.
    """
    _conclude(settings, World.from_env(), _evals(settings, shown=shown))


def validate_sources(settings: Settings) -> None:
    """Check the settings of the training data where nothing is trained or evaluated, before torch is imported.

    Raises SettingsError: with one line for each mistake.
    """
    _conclude(settings, World.from_env(), _shards(settings.model_copy(update={"evals": {}})))


def _conclude(settings: Settings, world: World, *parts: Problems) -> None:
    """Raise all problems at once; without any, warn on rank 0 about class names that are given more than once."""
    if found := [format_problem(settings.places, path, text) for problems in parts for path, text in problems]:
        raise SettingsError(enumerate_words(found))
    for name, section in settings.evals.items() if world.is_main else ():
        if isinstance(section, LabelledSettings) and (text := repeated(section)):
            logger.warning(format_problem(settings.places, ("evals", name, "classes"), text))


def _length(settings: Settings) -> Problems:
    """The run's length, and the settings in steps or epochs that depend on it."""
    train, schedule, varies = settings.train, settings.schedule, bool(settings.data.batch_schedule)
    if _evaluates_only(settings):
        return
    if train.steps is train.samples is train.epochs is None:
        yield ("train",), "nothing says how long to train: give --steps, --train.samples or --epochs"
        return
    if train.epochs is not None and train.epoch_samples is None:
        text = "how many samples are an epoch? The data do not tell: give --train-num-samples, or --steps"
        yield ("train", "epochs"), text
        return
    steps = settings.total_steps
    if 0 < steps < schedule.warmup:
        text = f"{schedule.warmup} steps of warm-up, but the run has {steps}: lower --warmup"
        yield ("schedule", "warmup"), text
    for key in ("unlock_image_at", "unlock_text_at"):
        if (at := getattr(settings.model, key)) is not None and at >= steps:
            yield ("model", key), f"step {at} is never reached: the run has {steps}"
    if late := [step for step, _ in settings.data.batch_schedule if step >= steps]:
        yield ("data", "batch_schedule"), f"step {late[0]} is never reached: the run has {steps}"
    if (last := settings.log.profiled_steps) > steps:
        yield ("log", "profile"), f"step {last} is never reached: the run has {steps}"
    in_epochs: list[tuple[Path, str]] = [
        ((*path, "every_epochs"), "every") for path, section in cadences(settings) if section.every_epochs is not None
    ]
    if isinstance(schedule, ConstCooldown.Settings) and schedule.cooldown_epochs is not None:
        in_epochs.append((("schedule", "cooldown_epochs"), "--schedule.cooldown"))
    for path, key in in_epochs:
        if train.epoch_samples is None:
            yield path, "how many samples are an epoch? Give --train-num-samples"
        elif varies:
            yield path, f"an epoch has no fixed number of steps under data.batch_schedule: give {key}, in steps"
    if schedule.min_lr > settings.optim.lr:
        text = f"{schedule.min_lr:g} is above the peak, optim.lr {settings.optim.lr:g}"
        yield ("schedule", "min_lr"), text


def _evaluates_only(settings: Settings) -> bool:
    """Whether there are data to evaluate on, and none to train on."""
    return not settings.data.sources and bool(settings.evals)


def _batches(settings: Settings, world: World) -> Problems:
    """How batches and lanes are divided among ranks."""
    from clipstream.data.order.lanes import lanes_for  # imports numpy, which --help must not wait for

    data, micro = settings.data, settings.train.micro_batch_size
    batch, largest = min(data.batch_sizes), max(data.batch_sizes)
    by_rule = lanes_for(batch)
    lanes = by_rule if data.lanes == "auto" else data.lanes
    if batch < world.size:
        key = "global_batch_size" if batch == data.global_batch_size else "batch_schedule"
        yield ("data", key), f"{batch} samples cannot be shared by {world.size} ranks"
    if data.lanes != "auto" and lanes > batch:
        text = f"{lanes} lanes, but a global batch has {batch} samples: a lane needs one each step"
        yield ("data", "lanes"), text
    if lanes < world.size <= batch:
        text = f"{lanes} lanes cannot be shared by {world.size} ranks: one each at least"
        if data.lanes == "auto":
            text = (
                f"auto is {by_rule} lanes for a global batch of {batch}, which {world.size} ranks cannot share: give "
                f"{world.size} or a multiple of it, or use fewer ranks"
            )
        yield ("data", "lanes"), text
    if isinstance(micro, int) and micro > largest:
        yield ("train", "micro_batch_size"), f"{micro} is more than the largest global batch, {largest}"
    sharded = settings.train.parallel == "fsdp" and world.size > 1
    for tower in ("image", "text"):
        if sharded and getattr(settings.model, tower).cache_gib is not None:
            text = "with fsdp, all ranks take part in each pass of a tower: train with ddp, or leave it out"
            yield ("model", tower, "cache_gib"), text
        policy = settings.model.recomputed(tower)
        if micro == "auto" and isinstance(policy, str) and policy.endswith("iB"):
            text = f"{policy} of how many samples? train.micro_batch_size is auto: give it a number, or a share here"
            own = getattr(settings.model, tower).grad_checkpointing is not None
            yield ("model", tower, "grad_checkpointing") if own else ("model", "grad_checkpointing"), text
    timeout, stall = settings.run.timeout, data.stall_timeout
    if world.size > 1 and timeout <= stall:
        text = f"{timeout:g} s end the run before data.stall_timeout, {stall:g} s, can say what is wrong: raise it"
        yield ("run", "timeout"), text


def _shards(settings: Settings) -> Problems:
    """Shards of training and evaluation that cannot be listed."""
    if not settings.data.sources:
        text = "there is no data: give --train-data SHARDS, or --config configs/quickstart.yaml for a first look"
        if _evaluates_only(settings):
            text = "there is nothing to train on: give --train-data SHARDS, or evaluate without training by "
            text += "`python -m clipstream.evaluate` with the same flags of data and model"
        yield ("data", "sources"), text
    read = [(("data", "sources", name), source, "") for name, source in settings.data.sources.items()]
    for name, evaluator in settings.evals.items():
        fetch = f"; fetch it: {evaluator.fetch}" if evaluator.fetch else ""
        read += [(("evals", name, key), source, fetch) for key, source in sources_of(evaluator).items()]
    for path, source, fetch in read:
        try:
            expand(source.shards, source.type, write=False)
        except SettingsError as error:
            yield (*path, "shards"), f"{error}{fetch}"


def _distill(settings: Settings) -> Problems:
    """Settings of distillation without a teacher, and of a live teacher without its input."""
    data = settings.data
    if settings.distill.model is None and not data.teacher_features and settings.distill != DistillSettings():
        yield ("distill",), "there is no teacher: give --distill-model or --teacher-features as well"
    for store, noun in ((data.image_features, "pictures"), (data.text_features, "captions")):
        if settings.distill.model is not None and store is not None:
            yield (
                ("distill", "model"),
                f"a live teacher needs {noun}, and the features in {store} replace them: precompute the teacher's "
                "features as well, and give --teacher-features",
            )


def _features(settings: Settings) -> Problems:
    """Settings of towers and pictures that have no effect on stored features."""
    data, model = settings.data, settings.model
    for store, key, noun in (
        (data.image_features, "unlocked_groups", "groups of the image tower"),
        (data.text_features, "unlocked_layers", "layers of the text tower"),
    ):
        if store is not None and getattr(model, key):
            yield ("model", key), f"the features in {store} are those of the frozen tower: no {noun} can be trained"
    for tower, store in data.stored_towers.items():
        for key in ("precision", "cache_gib"):
            if getattr(getattr(model, tower), key) is not None:
                text = f"the features in {store} replace the {tower} tower, which does not run: leave it out"
                yield ("model", tower, key), text
    if model.image.cache_gib is not None and data.augment.enabled:
        text = "pictures are augmented, so that their features differ each time: give --data.augment.enabled false"
        yield ("model", "image", "cache_gib"), f"{text}, or leave it out"
    if data.image_features is not None and model.patch_dropout:
        yield ("model", "patch_dropout"), f"the features in {data.image_features} are those of whole pictures"
    if data.image_features is not None and data.trace:
        yield ("data", "trace"), "no picture and no caption is read with data.image_features: leave it out"


def _evals(settings: Settings, *, shown: bool = True) -> Problems:
    """Evaluators without data, and class names and templates that cannot be read."""
    for name, evaluator in settings.evals.items():
        if evaluator.data is None and evaluator.reads and evaluator.type in EvalSettings.builtin:
            text = f"the evaluator has no data: give --evals.{name}.data.shards, or remove it with --evals.{name} null"
            yield ("evals", name), text
        if shown and isinstance(evaluator, PromptedSettings) and evaluator.prompts and not settings.log.pictures:
            text = "log.pictures is 0, so nothing is shown: raise it, or leave the prompts out"
            yield ("evals", name, "prompts"), text
        if isinstance(evaluator, LabelledSettings):
            yield from ((("evals", name, key), text) for key, text in unreadable(evaluator).items())


def _compilation(settings: Settings) -> Problems:
    """Packed texts in towers that are compiled."""
    if settings.model.text_buckets == "packed" and settings.train.compile != "off":
        text = "packed texts are not compiled, as their number of tokens differs from step to step: give auto, which "
        yield ("model", "text_buckets"), text + "takes buckets under train.compile, or --train.compile off"


def _checkpoints(settings: Settings) -> Problems:
    """Metrics that no evaluator has, averaged weights that are not there, and remote addresses."""
    section, stop = settings.checkpoint, settings.train.early_stop
    evals = {eval_name(key, kind): key for key, evaluator in settings.evals.items() for kind in evaluator.kinds}
    stop_path = "train", "early_stop", "metric"
    for path, metric in ((("checkpoint", "keep_best"), section.best_by), (stop_path, stop.watched)):
        if metric is not None and metric.evaluator not in evals:
            there = ", ".join(evals) or "none"
            yield (
                path,
                f"there is no evaluator {metric.evaluator!r} (there is {there}): name one of them, as NAME/METRIC",
            )
    if stop.watched is not None and (watched := evals.get(stop.watched.evaluator)) is not None:
        evaluator = settings.evals[watched]
        if not evaluator.every and evaluator.every_epochs is None:
            text = f"{stop.watched.evaluator} is evaluated at the end only: give --evals.{watched}.every as well"
            yield stop_path, text
    for key in (key for key, evaluator in settings.evals.items() if "averaged" in evaluator.kinds):
        if settings.train.ema is None:
            yield ("evals", key, "weights"), "there are no averaged weights: give --train.ema as well, as 0.9999"
        if (called := eval_name(key, "averaged")) in settings.evals:
            yield ("evals", called), f"the evaluations of {key} with averaged weights are called so: take another name"
    for key, url in (("remote_sync", section.remote_sync), ("resume", section.resume)):
        if url is not None and (key == "remote_sync" or ShardURL(url).scheme is not None):
            try:
                RemoteDir(url, "")
            except SettingsError as error:
                yield ("checkpoint", key), str(error).removeprefix(": ")


def _folders(settings: Settings, world: World) -> Problems:
    """A local checkpoint, the folder of runs, and the run's own folder; rank 0 finds them for all ranks."""
    name, resume, logs = settings.run.name, settings.checkpoint.resume, FilePath(settings.run.logs)
    by_name = resume in ("latest", "auto")
    local = resume is not None and not by_name and ShardURL(resume).scheme is None
    if world.is_main and resume is not None and local and not FilePath(resume).exists():
        text = f"there is no {resume}: give a checkpoint's folder, open_clip's epoch_N.pt, latest (with --name) or auto"
        yield ("checkpoint", "resume"), text
        return
    if world.is_main:
        try:
            there = next(path for path in (logs, *logs.absolute().parents) if path.exists())
        except OSError as error:
            yield ("run", "logs"), f"{printable(logs, 60)} cannot be a folder: {error.strerror}"
            return
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            text = f"the folder {there} cannot be written by this user" if there.is_dir() else f"{there} is no folder"
            yield ("run", "logs"), text
            return
    if name is None and by_name:
        yield ("checkpoint", "resume"), f"{resume} of which run? Give its --name"
    elif name is not None and resume is None and holds_a_run(settings.run_folder):
        text = f"{settings.run_folder} exists: go on with it by --resume auto, or start another run by another --name"
        yield ("run", "name"), text

"""Rules that span sections of the settings, and checks of the files, folders and addresses that settings name.

Validated settings enter; nothing leaves, or a `SettingsError` with every mistake and where it was written. `PAIRS` are
the settings of several sections that do not go together; those of one section are its `pairs`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

from clipstream.checkpoint.remote_sync import RemoteDir
from clipstream.checkpoint.store import holds_a_run
from clipstream.config.plan import Plan, Survey, draft, hold_out, keep_batch, staged, survey
from clipstream.config.settings import Settings, Written
from clipstream.config.value_tree import Node, enumerate_words, format_problem
from clipstream.data.decode.class_names import OF_OPEN_CLIP, class_names, duplicate_names, unreadable_names
from clipstream.data.order import default_lanes
from clipstream.data.source_settings import LabelCaption, SourceSettings
from clipstream.data.sources import expand
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.evals.classes import unreadable
from clipstream.evals.settings import LabelledSettings, eval_name, sources_of
from clipstream.losses.settings import chosen_loss_type
from clipstream.storage.shard_url import ShardURL
from clipstream.text import printable
from clipstream.utils.logs import announce, logger
from clipstream.utils.plugins import is_plugin
from clipstream.utils.section import (
    GIVEN,
    SET,
    UNSET,
    Conflict,
    Is,
    Path,
    Section,
    conflicts_in,
    entries_of,
    other_than,
    section_of,
    types_of,
)

Problems = Iterator[tuple[Path, str]]
_NEVER = "step {0} is never reached: the run has {1}"
NUMBERS = {  # (key, other key) -> record of numbers that do not fit each other, which the functions below compare
    (key, other): Conflict({key: Is(words), other: Is("")}, reason)
    for key, words, other, reason in (
        ("schedule.warmup", "more than", "train.steps", "{0} warm-up steps exceed the {1} steps of the run: lower "
            "--warmup"),
        ("model.unlock_image_at", "at least", "train.steps", _NEVER),
        ("model.unlock_text_at", "at least", "train.steps", _NEVER),
        ("data.batch_schedule", "with a step that is at least", "train.steps", _NEVER),
        ("log.profile", "with a step after", "train.steps", _NEVER),
        ("stages.NAME.until", "at least", "train.steps", "step {0} must be before the last one, {1}: the run ends with "
            "its own settings"),
        ("schedule.min_lr", "above", "optim.lr", "{0:g} is greater than optim.lr {1:g}"),
        ("data.global_batch_size", "less than", "ranks", "{0} samples cannot be divided among {1} ranks"),
        ("data.lanes", "less than", "ranks", "{0} lanes cannot be divided among {1} ranks: each rank requires at least "
            "one lane"),
        ("data.lanes", "more than", "data.global_batch_size",
         "{0} lanes exceed the {1} samples of a global batch: each lane requires at least one sample per step"),
        ("train.micro_batch_size", "more than", "data.global_batch_size",
         "{0} is greater than the largest global batch, {1}"),
        ("run.timeout", "on several ranks at most", "data.stall_timeout",
         "{0:g} s must be greater than data.stall_timeout, {1:g} s, so that a data stall is reported"),
    )
}  # fmt: skip
_RANKS = Is("more than 1", lambda ranks: ranks > 1)
_STORES = {"image": "data.image_features", "text": "data.text_features"}
_MEMORY = Is("in GiB or MiB", lambda policy: str(policy).endswith("iB"))
# Their in-place arithmetic on norms is not that of shards (torch's DTensor), or they take whole matrices (Muon).
_UNSHARDED = Is(
    "one of lamb, mars, novograd, muon, adamp, sgdp or timm's cautious ones (c…)",
    lambda name: bool(re.search(r"^c|_c|lamb|mars|novograd|muon|adamp|sgdp", str(name).lower())),
)
_CHANGED = Is("not empty", lambda section: section != type(section)())
_SEVERAL = (("per_image", Is("above 1", lambda count: count > 1)), ("negatives", SET), ("short", SET))  # texts
INDEXED_EPOCH = Conflict(  # the data give it in this mode afterwards
    {"train.epoch_samples": SET, "data.sampling.mode": Is("indexed")},
    "not supported in mode indexed, where the data determine the length of an epoch: remove it",
)
PROMPTS = Conflict({"evals.NAME.prompts": SET, "log.pictures": 0},
                   "requires log.pictures above 0")  # fmt: skip
_NO_VIEWS = Is("without augmented views", lambda views: views == 0)
AS_EVALUATED = tuple(
    Conflict({f"data.{key}": changed, "the features of images": _NO_VIEWS},
             "has no effect, as data.image_features has features of unaugmented images: remove it",
             notice=True)
    for key, changed in (("augment", _CHANGED), ("decoder", other_than("fast")))
)  # fmt: skip
PAIRS = (
    *(
        Conflict({f"model.{tower}.cache_gib": SET, "train.parallel": "fsdp", "ranks": _RANKS},
                 "not supported with fsdp: use ddp, or remove it")
        for tower in _STORES
    ),
    Conflict({"optim.name": _UNSHARDED, "train.parallel": "fsdp", "ranks": _RANKS},
             "{0} requires unsharded weights, which fsdp does not have: use ddp, or --opt adamw"),
    *(
        Conflict(
            {f"model.{key}": _MEMORY, "train.micro_batch_size": "auto"} | {f"model.{other}": None for other in unset},
            "{0} requires a number as train.micro_batch_size: set one, or use a fraction",
        )
        for key, unset in (
            ("image.grad_checkpointing", ()),
            ("text.grad_checkpointing", ()),
            ("grad_checkpointing", ("image.grad_checkpointing",)),
            ("grad_checkpointing", ("text.grad_checkpointing",)),
        )
    ),
    *(
        Conflict(
            {"distill.model": SET, store: SET},
            f"a live teacher requires {noun}, which the features in {{1}} replace: precompute the teacher's features "
            "and set --teacher-features",
        )
        for store, noun in ((_STORES["image"], "images"), (_STORES["text"], "captions"))
    ),
    *(
        Conflict({f"model.{key}": SET, store: SET},
                 f"not supported with {{1}}, which has features of the frozen tower: no {noun} can be trained")
        for store, key, noun in (
            (_STORES["image"], "unlocked_groups", "groups of the image tower"),
            (_STORES["image"], "unlock_image_at", "weights of the image tower"),
            (_STORES["image"], "image.lora", "adapters of the image tower"),
            (_STORES["text"], "text.lora", "adapters of the text tower"),
            (_STORES["text"], "unlocked_layers", "layers of the text tower"),
            (_STORES["text"], "unlock_text_at", "weights of the text tower"),
        )
    ),
    *(
        Conflict({f"model.{tower}.{key}": SET, store: SET},
                 f"has no effect, as the features in {{1}} replace the {tower} tower: remove it", notice=True)
        for tower, store in _STORES.items()
        for key in ("precision", "cache_gib")
    ),
    Conflict({"model.image.cache_gib": SET, "data.augment.enabled": True, "data.image_features": None},
             "requires --data.augment.enabled false, as the features of augmented images differ in each epoch"),
    *AS_EVALUATED,
    Conflict({"model.patch_dropout": SET, "data.image_features": SET},
             "not supported with {1}, which has features of whole images: remove it"),
    Conflict({"data.trace": SET, "data.image_features": SET},
             "not supported with data.image_features, which replaces images and captions: remove it"),
    PROMPTS,
    Conflict({"evals.NAME.weights": ("averaged", "both"), "train.ema": None},
             "averaged weights require --train.ema, e.g. 0.9999"),
    Conflict({"model.text_buckets": "packed", "train.compile": other_than("off")},
             "packed texts are not supported with train.compile: use auto (buckets), or --train.compile off"),
    *(
        Conflict({every: SET, **other}, reason)
        for every, key in (
            ("checkpoint.every_epochs", "every"),
            ("evals.NAME.every_epochs", "every"),
            ("schedule.cooldown_epochs", "--schedule.cooldown"),
        )
        for other, reason in (
            ({"train.epoch_samples": None}, "requires the length of an epoch: set --train-num-samples"),
            ({"data.batch_schedule": SET}, f"not supported with data.batch_schedule: set {key}, in steps"),
        )
    ),
    *(
        Conflict({"optim.l2_start": SET, f"model.{tower}.lora": GIVEN},
                 "not supported with adapters, which start at 0, so that --wd draws them to the start: remove it")
        for tower in _STORES
    ),
    Conflict({"distill": _CHANGED, "distill.model": None, "data.teacher_features": UNSET},
             "requires a teacher: --distill-model or --teacher-features"),
    *(
        Conflict({f"data.sources.NAME.caption.{key}": several, other: value}, reason)
        for key, several in _SEVERAL
        for other, value, reason in (
            ("data.image_features", SET, "not supported with {1}, which has one text of a sample in a step: remove it"),
            ("data.text_features", SET, "not supported with {1}, which has one text of a sample in a step: remove it"),
            ("data.teacher_features", SET, "not supported with stored teachers, which have one text of a sample in a "
                "step: remove it"),
            ("distill", _CHANGED, "not supported with distillation, which compares one text of a sample: remove it"),
            ("model.text.cache_gib", SET, "not supported with {1}: remove one of them"),
            ("loss.duplicates", "mask", "not supported with loss.duplicates {1}: use negatives or positives"),
        )
    ),
    *(
        Conflict(
            {f"data.sources.NAME.caption.{key}": several, "loss.duplicates": "positives",
             "loss.duplicates_by": (None, "captions")},
            "not supported with duplicates by captions, as a sample has several texts: use "
            "--loss.duplicates-by pictures",
        )
        for key, several in _SEVERAL
    ),
    INDEXED_EPOCH,
    *NUMBERS.values(),
)  # fmt: skip


def prepare_run(written: Written) -> Survey:
    """What a training run is planned from: its settings and data, checked together with the files that they name.

    Raises SettingsError: they are wrong, or files of a model are missing.
    """
    world = World.from_env()
    seen = validate_run(written, world)
    preflight_models(written.settings)
    seen = hold_out(seen, world)
    made = draft(seen, world.size)
    for stage in staged(made)[:-1] if made.settings.stages else ():
        for path, text in conflicts_in(PAIRS, stage.plan.settings, ranks=world.size):
            raise SettingsError(f"stages.{stage.name}.set: {'.'.join(map(str, path))}: {text}")
    for _, _, reason in made.choices if world.is_main else ():
        announce(f"chosen   {reason} sets it")
    return seen


def preflight_models(settings: Settings) -> None:
    """`preflight` of the model and the teacher, which asks the Hub on one rank of each node."""
    from clipstream.models.pretrained import preflight  # imports huggingface_hub

    loss_type, ask = chosen_loss_type(settings.loss), World.from_env().local_rank == 0
    teacher = settings.distill.teacher(settings.model)
    preflight(settings.model, settings.tokenizer, loss_type=loss_type, teacher=teacher, ask=ask)


def validate_run(written: Written, world: World) -> Survey:
    """Check the settings of a training run, before torch is imported and anything is written; what they name leaves.

    Every rank looks for an existing run folder: rank 0 must not make it before all of them have been here.

    Raises SettingsError: with one line for each mistake.
    """
    seen = keep_batch(survey(written), world)
    settings = draft(seen, world.size).settings
    parts = _length(seen, settings), _batches(settings, world), _shards(seen), _val_split(settings), _evals(settings)
    rest = conflicts_in(PAIRS, settings, ranks=world.size), _checkpoints(settings), _folders(settings, world)
    _conclude(Written(settings, seen.places), world, *parts, _short(settings), *rest)
    if seen.error is not None:
        raise seen.error
    tell(seen.places, world, (*_notices(settings), *conflicts_in(PAIRS, settings, notices=True)))
    return seen


def validate_evals(written: Written, *, shown: bool) -> None:
    """Check the settings of evaluators where nothing is trained, before torch is imported. `shown`: a page shows
    images.

    Raises SettingsError: with one line for each mistake.
    """
    settings, world = written.settings, World.from_env()
    _conclude(written, world, _evals(settings), conflicts_in((PROMPTS,) if shown else (), settings))
    tell(written.places, world, _notices(settings.evals, ("evals",)))


def validate_sources(written: Written) -> Survey:
    """Check the settings of the training data where nothing is trained or evaluated; what they name leaves.

    Raises SettingsError: with one line for each mistake.
    """
    world = World.from_env()
    seen = survey(written, count=False)
    alone = written.settings.model_copy(update={"evals": {}})
    _conclude(Written(alone, written.places), world, _shards(replace(seen, settings=alone)), _val_split(alone))
    if seen.error is not None:
        raise seen.error
    return seen


def _conclude(written: Written, world: World, *parts: Problems) -> None:
    """Raise all problems at once; without any, warn on rank 0 about class names that are given more than once."""
    if lines := [format_problem(written.places, path, text) for problems in parts for path, text in problems]:
        raise SettingsError(enumerate_words(lines))
    for name, section in written.settings.evals.items() if world.is_main else ():
        names = section.classes if isinstance(section, LabelledSettings) else None
        if names in (None, *OF_OPEN_CLIP) or getattr(section, "languages", None):
            continue
        if text := duplicate_names(class_names(names)):
            logger.warning(format_problem(written.places, ("evals", name, "classes"), text))


def tell(places: Node, world: World, notices: Iterable[tuple[Path, str]]) -> None:
    for path, text in notices if world.is_main else ():
        logger.info(f"notice: {format_problem(places, path, text)}")


def log_ignored_with_store(plan: Plan, world: World, views: int) -> None:
    """Log the settings that have no effect beside stored features of images, of `views` augmented views, on rank 0."""
    if plan.settings.data.image_features is not None:
        facts = {"the features of images": views}
        tell(plan.survey.places, world, conflicts_in(AS_EVALUATED, plan.settings, notices=True, **facts))


def _notices(section: Any, path: Path = ()) -> Problems:
    """(path, text) for each setting that has no effect beside others of its section, in a section and those below."""
    if isinstance(section, Section):
        yield from (((*path, *key), text) for key, text in conflicts_in(section.pairs, section, notices=True))
    below = section.items() if isinstance(section, Mapping) else section if isinstance(section, Section) else ()
    for name, inner in below:
        yield from _notices(inner, (*path, name))


def records(section: type[Section] = Settings, prefix: str = "") -> Iterator[tuple[str, Conflict]]:
    """(prefix of its keys, record) of all settings that do not go together, as the documentation lists them."""
    for cls in (section, *types_of(section).values()):
        yield from ((prefix, pair) for pair in cls.pairs)
        for name, field in cls.model_fields.items():
            inner, entry = section_of(field.annotation), section_of(entries_of(field.annotation))
            if (below := inner or entry) is not None:
                yield from records(below, f"{prefix}{name}." if inner else f"{prefix}{name}.NAME.")
    if section is Settings:
        yield from (("", pair) for pair in PAIRS)


def _length(seen: Survey, settings: Settings) -> Problems:
    """The run's length, and the settings in steps or epochs that depend on it."""
    train, schedule = settings.train, settings.schedule
    if _evaluates_only(settings):
        return
    if settings.data.sampling.mode == "indexed" and seen.settings.train.epoch_samples is not None:
        yield ("train", "epoch_samples"), INDEXED_EPOCH.text()
    if train.steps is train.samples is train.epochs is None:
        if seen.error is None:
            yield ("train",), "the length of the run is not set: set --steps, --train.samples or --epochs"
        return
    if train.epochs is not None and train.epoch_samples is None:
        if seen.error is not None:
            return
        yield ("train", "epochs"), "the length of an epoch is unknown: set --train-num-samples, or use --steps"
        return
    steps = settings.total_steps
    ends: dict[int, str] = {}
    for name, stage in settings.stages.items():
        if (other := ends.setdefault(stage.until, name)) != name:
            yield ("stages", name, "until"), f"the stage {other} ends at step {stage.until}, too"
        elif stage.until >= steps:
            yield _numbers("stages.NAME.until", "train.steps", stage.until, steps, name=name)
    if 0 < steps < schedule.warmup:
        yield _numbers("schedule.warmup", "train.steps", schedule.warmup, steps)
    for key in ("unlock_image_at", "unlock_text_at"):
        if (at := getattr(settings.model, key)) is not None and at >= steps:
            yield _numbers(f"model.{key}", "train.steps", at, steps)
    if late := [step for step, _ in settings.data.batch_schedule if step >= steps]:
        yield _numbers("data.batch_schedule", "train.steps", late[0], steps)
    if (last := settings.log.profiled_steps) > steps:
        yield _numbers("log.profile", "train.steps", last, steps)
    if schedule.min_lr > settings.optim.lr:
        yield _numbers("schedule.min_lr", "optim.lr", schedule.min_lr, settings.optim.lr)


def _short(settings: Settings) -> Problems:
    """A weight of the loss of short texts, where no source has them."""
    if getattr(settings.loss, "short", 1) != 1 and not settings.data.has_short:
        yield ("loss", "short"), "requires short texts: set the caption's short of a source, e.g. sentence"


def _numbers(key: str, other: str, *values: float, name: str = "") -> tuple[Path, str]:
    return tuple(key.replace("NAME", name).split(".")), NUMBERS[key, other].text(*values)


def _evaluates_only(settings: Settings) -> bool:
    """Whether there are data to evaluate on, and none to train on."""
    return not settings.data.sources and bool(settings.evals)


def _batches(settings: Settings, world: World) -> Problems:
    """How batches and lanes are divided among ranks."""
    data, micro = settings.data, settings.train.micro_batch_size
    batch, largest = min(data.batch_sizes), max(data.batch_sizes)
    by_rule = default_lanes(batch)
    lanes = by_rule if data.lanes == "auto" else data.lanes
    if batch < world.size:
        key = "global_batch_size" if batch == data.global_batch_size else "batch_schedule"
        yield ("data", key), NUMBERS["data.global_batch_size", "ranks"].text(batch, world.size)
    if data.lanes != "auto" and lanes > batch:
        yield _numbers("data.lanes", "data.global_batch_size", lanes, batch)
    if lanes < world.size <= batch:
        text = NUMBERS["data.lanes", "ranks"].text(lanes, world.size)
        if data.lanes == "auto":
            text = (
                f"auto: {by_rule} lanes for a global batch of {batch} cannot be divided among {world.size} ranks: set "
                f"{world.size} or a multiple of it, or use fewer ranks"
            )
        yield ("data", "lanes"), text
    if isinstance(micro, int) and micro > largest:
        yield _numbers("train.micro_batch_size", "data.global_batch_size", micro, largest)
    timeout, stall = settings.run.timeout, data.stall_timeout
    if world.size > 1 and timeout <= stall:
        yield _numbers("run.timeout", "data.stall_timeout", timeout, stall)


def _shards(seen: Survey) -> Problems:
    """Shards of training and evaluation that cannot be listed."""
    settings = seen.settings
    if not settings.data.sources:
        other = "use --config configs/quickstart.yaml for a demo"
        if _evaluates_only(settings):
            other = "evaluate with `clipstream evaluate` and the same flags"
        yield ("data", "sources"), f"no training data: set --train-data SHARDS, or {other}"
    read: list[tuple[Path, SourceSettings, str]] = [
        (("data", "sources", name, "shards"), source, "") for name, source in settings.data.sources.items()
    ]
    for name, evaluator in settings.evals.items():
        fetch = f"; fetch it: {evaluator.download}" if evaluator.download else ""
        read += [(("evals", name, *key.split(".")), source, fetch) for key, source in sources_of(evaluator).items()]
    for path, source, fetch in read:
        if isinstance(source.caption, LabelCaption):
            for key, text in unreadable_names(source.caption.classes, source.caption.templates).items():
                yield (*path[:-1], "caption", key), text
        if path[0] == "data" and path[2] in seen.sources:  # listed already
            continue
        try:
            evaluates = "train_shards" not in path and path[0] == "evals"
            expand(source.shards, source, write=False, evaluates=evaluates)
        except SettingsError as error:
            yield path, f"{error}{fetch}"


def _val_split(settings: Settings) -> Problems:
    """Samples to hold out of several sources or of generated ones, or beside other data of the evaluator."""
    path, data, val = ("data", "val_split"), settings.data, settings.evals.get("val")
    if data.val_split is None or not data.sources:
        return
    if val is None:
        yield path, "requires the evaluator val, which reads these samples: set evals.val to {}, or remove val_split"
    elif val.data is not None:
        yield path, "not supported with data of the evaluator val (--val-data): remove one of them"
    if len(data.sources) > 1:
        yield path, "not supported with several sources: set evals.NAME.data to data of their own"
    for name, source in data.sources.items():
        if source.drop is not None:
            yield path, f"not supported with data.sources.{name}.drop: list the samples to use, as keep"
        if str(source.shards).startswith("synthetic:"):
            yield path, "not supported with synthetic data"


def _evals(settings: Settings) -> Problems:
    """Evaluators without data, and class names and templates that cannot be read."""
    for name, evaluator in settings.evals.items():
        held_out = name == "val" and settings.data.val_split is not None and settings.data.sources
        if evaluator.data is None and evaluator.reads and not held_out and not is_plugin(evaluator.type):
            text = f"the evaluator has no data: set --evals.{name}.data.shards, or remove it with --evals.{name} null"
            yield ("evals", name), text
        if isinstance(evaluator, LabelledSettings):
            yield from ((("evals", name, key), text) for key, text in unreadable(evaluator).items())


def _checkpoints(settings: Settings) -> Problems:
    """Metrics that no evaluator has, averaged weights that are not there, and remote addresses."""
    section, stop = settings.checkpoint, settings.train.early_stop
    evals = {eval_name(key, kind): key for key, evaluator in settings.evals.items() for kind in evaluator.kinds}
    stop_path = "train", "early_stop", "metric"
    for path, metric in ((("checkpoint", "keep_best"), section.best_by), (stop_path, stop.watched)):
        if metric is not None and metric.evaluator not in evals:
            there = ", ".join(evals) or "none"
            yield (path, f"unknown evaluator {metric.evaluator!r}: use NAME/METRIC with one of: {there}")
    if stop.watched is not None and (watched := evals.get(stop.watched.evaluator)) is not None:
        evaluator = settings.evals[watched]
        if not evaluator.every and evaluator.every_epochs is None:
            text = f"{stop.watched.evaluator} is evaluated only at the end: set --evals.{watched}.every"
            yield stop_path, text
    for key in (key for key, evaluator in settings.evals.items() if "averaged" in evaluator.kinds):
        if (called := eval_name(key, "averaged")) in settings.evals:
            yield ("evals", called), f"reserved for the evaluations of {key} with averaged weights: use another name"
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
        text = f"{resume} does not exist: use a checkpoint folder, open_clip's epoch_N.pt, latest (with --name) or auto"
        yield ("checkpoint", "resume"), text
        return
    if world.is_main:
        try:
            there = next(path for path in (logs, *logs.absolute().parents) if path.exists())
        except OSError as error:
            yield ("run", "logs"), f"invalid folder {printable(logs, 60)}: {error.strerror}"
            return
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            text = f"no write permission for the folder {there}" if there.is_dir() else f"{there} is not a folder"
            yield ("run", "logs"), text
            return
    if name is None and by_name:
        yield ("checkpoint", "resume"), f"{resume} requires --name"
    elif name is not None and resume is None and holds_a_run(settings.run_folder):
        text = f"{settings.run_folder} exists: continue it with --resume auto, or choose another --name"
        yield ("run", "name"), text

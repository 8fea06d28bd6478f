"""The recipe of training: settings, model, data, optimizer, step, loop.

A `RankRun`, whose folder is locked, enters; its metrics, checkpoints and report leave. `recipe` is the run from top to
bottom, and the functions below it build what it names. `python -m clipstream.train`, for torchrun, is the verb
`clipstream train`, and `clipstream.train(…)` is `api.run.train`.
"""

from __future__ import annotations

import importlib
import shlex
import sys

if __name__ == "__main__":  # the verb prints help and checks settings before torch is imported below
    sys.exit(importlib.import_module("clipstream.cli.main").main(["train", *sys.argv[1:]], own=True))

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from clipstream.checkpoint import store
from clipstream.checkpoint.async_writer import AsyncWriter, Content
from clipstream.checkpoint.remote_sync import CHECKPOINTS
from clipstream.checkpoint.resume import Resumed, find, load_into
from clipstream.checkpoint.resume import agree as agree_checkpoint
from clipstream.checkpoint.state import CheckpointMeta, Tensors
from clipstream.config.command_line import make_callable
from clipstream.config.config_file import (
    by_key,
    changes,
    format_value,
    redact_settings,
    require_equal,
    settings_of_weights,
    write_config,
)
from clipstream.config.plan import Plan, Stage, Survey, agree, draft, plan, staged, with_value
from clipstream.config.settings import SHIPPED, Settings
from clipstream.config.validate import log_ignored_with_store
from clipstream.data.batch import Batch
from clipstream.data.decode import tokenizers
from clipstream.data.loader.loader import Loader
from clipstream.data.loader.reading_recipe import ModelInputs
from clipstream.data.loader.stored import StoredData
from clipstream.data.pipeline import training_loader
from clipstream.distributed.failure import FailureWatch
from clipstream.distributed.run_record import require_same, software
from clipstream.distributed.signals import StopSignals
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError, Interrupted, SettingsError, Stopped
from clipstream.evals.context import EvalContext
from clipstream.evals.runner import EvalRunner, Listeners
from clipstream.losses.contrastive import build_loss, warn_of_duplicates, warn_of_texts
from clipstream.losses.distillation import DistilledLoss
from clipstream.losses.settings import chosen_loss_type, group_field
from clipstream.models.adapters import WEIGHTS
from clipstream.models.build import build_towers
from clipstream.models.execution.batch_features import NAME, Teacher
from clipstream.models.execution.flops import Throughput, Work, build_throughput, count_flops, estimate_seconds
from clipstream.models.layers import tune_convolutions
from clipstream.models.model_config import ADAPTER, AVERAGED_ADAPTER, AVERAGED_FILE
from clipstream.models.precision import autocast, check_device, prepare, prepare_towers, resolve_precision
from clipstream.models.towers import Towers
from clipstream.report.html_report import REPORT_FILE
from clipstream.report.outputs import Ending, Outputs
from clipstream.report.settings import LogSettings
from clipstream.report.sinks import RunInfo
from clipstream.report.terminal import run_log
from clipstream.storage.shard_url import redact
from clipstream.text import counted, duration
from clipstream.training.optim import rate_change
from clipstream.training.parallel import parallelize, synchronize_batch_norm
from clipstream.training.precision_audit import Audit, audit_step, log_audit, synthetic_batch
from clipstream.training.rescue import Rescue
from clipstream.training.settings import EarlyStop
from clipstream.training.state import TrainState, same_randomness, seed_all
from clipstream.training.step import TrainStep, fit_memory
from clipstream.training.stored_features import check_stores, remove_towers, teacher_scales, with_stores
from clipstream.training.trainer import Hooks, Length, Rollback, Trainer
from clipstream.utils import atomic_write
from clipstream.utils.logs import announce, loading, logger, lossy_output
from clipstream.utils.timing import StepProfiler

FREE_SPACE = 64 << 10  # bytes that a run writes before its first step


@dataclass(frozen=True)
class RankRun:
    """A run on one rank."""

    plan: Plan  # a draft, until the checkpoint is known that the run goes on from
    world: World  # this rank among the others
    folder: Path  # of the run
    signals: StopSignals  # that ask it to stop
    watch: FailureWatch  # ends all ranks where one fails
    ending: Ending | None = None  # writes the end of the process, on rank 0

    @property
    def settings(self) -> Settings:
        """The settings in effect."""
        return self.plan.settings


class Encoders(NamedTuple):
    """The towers, and other sources of features for a batch."""

    towers: Towers  # on the CPU, in the dtype they train in, without those whose features are stored
    tokenizer: tokenizers.Tokenizer
    teacher: Teacher | None  # live, on this rank's device
    stored: StoredData | None  # features of towers and teachers


def recipe(run: RankRun) -> None:
    """Train in a locked folder: settings, model, data, optimizer, step, loop."""
    settings, world = run.settings, run.world

    # Settings: a resumed run keeps what was resolved when it began.
    resumed = find(settings.checkpoint, run.folder, world, run.signals.is_stopping)
    resumed = resumed.with_meta(settings.train, settings.data, world)
    run = replace(run, plan=build_plan(run.plan.survey, world, resumed.state))
    settings = run.settings

    if settings.log.audit_precision:
        found = audit(run.plan, world, resumed)
        if world.is_main:
            log_audit(found, run.folder)

    # Stages, one after the other; each goes on from the checkpoint at the end of the one before.
    failures, stages = dict[str, str](), staged(run.plan)
    if world.is_main and len(stages) > 1:
        stages = with_costs(stages, world)
    for stage in stages:
        if stage.last or resumed.step < stage.end:
            ended, failed = train_stage(replace(run, plan=stage.plan), stage, resumed)
            failures |= failed
            if ended:
                break
            resumed = resumed.at(run.folder / CHECKPOINTS / store.folder_of(stage.end))
    if world.is_main:
        print_end(settings, REPORT_FILE, failures)
    resumed.require_copy(world)


def train_stage(run: RankRun, stage: Stage, resumed: Resumed) -> tuple[bool, dict[str, str]]:
    """Train to the end of a stage; a run without stages is one. Collective.

    Returns:
        Whether the run ends here, and the outputs that failed, with the reason.
    """
    settings, world = run.settings, run.world

    # Model; features may come from stores, in the place of towers or of teachers.
    loading.show(f"loading the model {settings.model.name}")
    model = build_model(run.plan, world)
    arithmetic, peak = settings.train.arithmetic, settings.log.peak_tflops
    throughput = build_throughput(model.towers, settings.model, world, arithmetic, peak)

    # Data, at the position of the checkpoint.
    if world.is_main:
        print_summary(run.plan, world, model.towers, resumed)
    loading.show("loading the data")
    begins = resumed.step == stage.begin > 0
    with build_loader(run.plan, world, model, resumed.state, run.signals.is_stopping, begins=begins) as loader:
        run.watch.on_exit(loader.close)

        # Optimizer, step, loop.
        step = build_step(settings, world, model)
        return fit(run, step, loader, model.tokenizer, throughput, resumed, stage)


def train_rank(found: Survey, world: World, watch: FailureWatch) -> Path:
    """A whole run on this rank; returns the run's folder. Collective.

    Raises ClipstreamError: settings, data or training failed, or a signal stopped the run.
    """
    made = draft(agree(found, world), world.size)
    settings, folder = made.settings, made.settings.run_folder
    require_equal(settings, world, found.split)
    if watch.embedded:
        watch.held.enter_context(same_randomness(world.device))
    on_exit = None if watch.embedded else watch.run_cleanups
    signals = StopSignals(deferring=False, broadcast=watch.broadcast_stop, on_exit=on_exit, announce=world.is_main)
    watch.on_stop(signals.receive)
    try:
        with signals:
            ending = None
            watch.held.enter_context(lossy_output())  # the terminal may go away during a run
            if world.is_main:  # the folder is locked until the process ends
                watch.held.enter_context(store.lock_folder(folder))
                atomic_write.require_space(folder, FREE_SPACE)
                watch.held.enter_context(run_log(folder))
                watch.on_end = ending = Ending(folder, lambda: watch.steps, report=settings.log.report)
            if settings.log.local:
                world.barrier()  # rank 0 has made the folder
                if world.local_rank == 0 and not world.is_main:
                    watch.held.enter_context(run_log(folder, f"out-{world.rank}.log"))
            recipe(RankRun(made, world, folder, signals, watch, ending))
            return folder
    except Interrupted:
        raise Stopped.before_training(signals.received) from None
    except Stopped as stopped:
        stopped.signal = signals.received
        raise
    except OSError as error:
        if not atomic_write.is_full(error):
            raise
        # During training a full disk is a warning; before the first step, nothing can be written later.
        raise ClipstreamError(f"cannot write {error.filename or folder}: the disk is full") from error


def audit_rank(found: Survey, world: World, checkpoints: Path | None) -> Audit:
    """`audit` with the weights of the newest checkpoint in a folder, or with initial ones. Collective."""
    settings, last = found.settings, None
    if checkpoints is not None:
        last = agree_checkpoint(lambda: store.newest(checkpoints), world, checkpoints)
    resumed = Resumed(last, None).with_meta(settings.train, settings.data, world)
    return audit(build_plan(agree(found, world), world, resumed.state), world, resumed)


def audit(plan: Plan, world: World, resumed: Resumed) -> Audit:
    """Audit the precision of a step, on a model of its own: a run trains as without an audit. Collective.

    The batch is the next one of the data; without data, a synthetic one.
    """
    settings, model = plan.settings, build_model(plan, world)
    if settings.data.sources:
        with build_loader(plan, world, model, resumed.state) as loader:
            batch = next(loader).clone()
    else:
        inputs = own_inputs(settings, model)
        batch = synthetic_batch(settings.data.global_batch_size, settings.run.seed, world, inputs)
    step = build_step(settings, world, model)
    step.unlock(0 if resumed.checkpoint is None else load_into(step, resumed.checkpoint, resumed.state).step)
    return audit_step(step, batch)


def build_plan(found: Survey, world: World, state: TrainState | None = None) -> Plan:
    """The plan of a run on the ranks of `world`, with its precision, feature stores and workers. Collective.

    `run.device`, `loss.type` and `log.progress` stay 'auto': they depend on the machine, the model and the terminal.

    Args:
        state: as `plan`; its precision stays, too.

    Raises SettingsError: as `plan`, or a feature store cannot be opened.
    """
    made = plan(found, world.size, state)
    settings = made.settings
    if settings.train.precision == "auto":
        saved: Any = "auto" if state is None else state.train_step.precision
        settings = with_value(settings, "train.precision", resolve_precision(saved, world))
    data, stored = with_stores(settings.data, world) if settings.data.sources else (settings.data, None)
    return replace(made, settings=with_value(settings, "data", data), stored=stored)


def build_model(plan: Plan, world: World) -> Encoders:
    """Towers, tokenizer and teacher, with the weights that the settings name. Collective.

    Raises SettingsError: the tokenizer has more tokens than the model, or a store was made with other settings.
    """
    settings, stored = plan.settings, plan.stored
    model, train, distill = settings.model, settings.train, settings.distill.teacher(settings.model)
    check_device(world.device, train.arithmetic, tf32=train.tf32)
    seed_all(settings.run.seed, world.rank)
    loss_type = chosen_loss_type(settings.loss)
    towers = build_towers(model, seed=settings.run.seed, loss_type=loss_type, tokenizer=settings.tokenizer, world=world)
    tokenizer = tokenizers.build_tokenizer(
        settings.tokenizer, towers.open_clip_tokenizer(), towers.context_length, cache_dir=model.cache_dir
    )
    if tokenizer.vocab_size > towers.vocab_size:
        raise SettingsError(
            f"tokenizer: its ids go up to {tokenizer.vocab_size - 1}, but the model has {towers.vocab_size} tokens: "
            "leave tokenizer.type at 'model', or use a model with text_cfg.vocab_size to match"
        )
    if stored is not None:
        check_stores(stored, settings.data, towers, tokenizer)
        log_ignored_with_store(plan, world, stored.views)
    # Any rank may have to save, where others are lost.
    keep = world.is_main or train.rescue_seconds > 0
    prepare_towers(towers, train.arithmetic, model, world.device, tf32=train.tf32, keep=keep)
    if stored is not None:
        remove_towers(stored, towers)
    teacher = None
    if distill is not None:
        frozen = build_towers(distill, seed=settings.run.seed, world=world)
        prepare(frozen, train.arithmetic)
        teacher = Teacher(frozen, world.device, partial(autocast, world.device, train.arithmetic))
    return Encoders(towers, tokenizer, teacher, stored)


def build_loader(
    plan: Plan,
    world: World,
    model: Encoders,
    state: TrainState | None = None,
    interrupt: Callable[[], bool] = lambda: False,
    *,
    begins: bool = False,
) -> Loader:
    """The loader of this rank's batches, at the position of `state`. Collective.

    Args:
        interrupt: see Loader.
        begins: whether a stage begins there, whose order of the data may be another one.

    Raises SettingsError: the ranks find different shards.
    """
    settings = plan.settings
    loader = training_loader(
        settings.data,
        own_inputs(settings, model),
        sources=plan.survey.sources,
        world=world,
        seed=settings.run.seed,
        start=None if state is None else state.data,
        approximate="stage" if begins else settings.checkpoint.resume_approximate,
        zero_copy=True,
        interrupt=interrupt,
    )

    def own() -> dict[str, object]:
        contents = (source.contents().items() for source in loader.source.sources)
        plugins = software(by_key(settings).values())  # all are loaded now
        return {**loader.fingerprint, **plugins, **dict(chain.from_iterable(contents))}

    with ExitStack() as stack:
        stack.callback(loader.close)
        require_same(
            world, own, "shards or plug-ins", "check that the folder is shared, or copy the shards of one host to all"
        )
        stack.pop_all()
    return loader


def own_inputs(settings: Settings, model: Encoders) -> ModelInputs:
    """What is made of samples; for the teacher pixels and ids of its own where those of the model do not fit it."""
    towers, teacher = model.towers, model.teacher
    inputs = ModelInputs(model.tokenizer, towers.image, stores=model.stored, text_lengths=towers.text_lengths)
    inputs = replace(inputs, groups=group_field(settings.loss), texts=settings.data.texts)
    inputs = replace(inputs, has_short=settings.data.has_short)
    if teacher is not None and teacher.towers.image.size != towers.image.size:
        inputs = replace(inputs, teacher_image=teacher.towers.image)
    if teacher is not None and not (settings.tokenizer.type == "model" and teacher.towers.same_tokenizer(towers)):
        own = tokenizers.wrap(teacher.towers.open_clip_tokenizer(), teacher.towers.context_length)
        inputs = replace(inputs, teacher_tokenizer=own)
    return inputs


def build_step(settings: Settings, world: World, model: Encoders) -> TrainStep:
    """The step that trains the towers, which are moved to this rank's device and may be sharded.

    Raises SettingsError: as TrainStep, `parallelize` and `fit_memory`, or a stored teacher lacks features.
    """
    (towers, _, teacher, stored), train = model, settings.train
    towers.train()
    synchronize_batch_norm(towers, world, towers.frozen)
    layout = parallelize(towers, world, train)
    optimizer = settings.optim.build(towers, settings.model.name)
    tune_convolutions(towers, world.device)
    caches = fit_memory(towers, settings.model, max(settings.data.batch_sizes), world, train)
    loss = build_loss(settings.loss, towers.loss_type)
    scales = {} if stored is None else teacher_scales(stored, settings.distill)
    if teacher is not None:
        scales[NAME] = teacher.scale
    if scales:

        def add_teacher(batch: Batch) -> Batch:
            assert teacher is not None
            return teacher(batch, step.gradcache.size)

        loss = DistilledLoss(loss, settings.distill, scales, add_features=None if teacher is None else add_teacher)
    step = TrainStep(layout, loss, optimizer, world, train, clip_norm=settings.optim.grad_clip_norm, caches=caches)
    return step


def fit(
    run: RankRun,
    step: TrainStep,
    loader: Loader,
    tokenizer: tokenizers.Tokenizer,
    throughput: Throughput | None,
    resumed: Resumed,
    stage: Stage,
) -> tuple[bool, dict[str, str]]:
    """The loop, with weights, moments and random states of the checkpoint, if there is one; see `train_stage`."""
    settings, world, watch = run.settings, run.world, run.watch
    train, total, log = settings.train, settings.total_steps, settings.log
    start = None if resumed.checkpoint is None else load_into(step, resumed.checkpoint, resumed.state)
    state = start or TrainState()
    early_stop = EarlyStop(train.early_stop, state.early_stop)

    # Outputs, evaluators and checkpoints; the names of metrics are known from a dry run.
    done = None if start is None else state.step
    ended = done is not None and (done >= total or early_stop.should_stop)
    shown, ahead = redact_settings(settings), (stage.end, stage.later)
    info = RunInfo(run.folder, total, done, world.size, ended, state.evaluation_pending, shown, *ahead)
    outputs = Outputs(log, world, info, run.ending)
    evals = build_evals(run, step, tokenizer, outputs)
    writer = build_writer(run, step, resumed, outputs)
    acted_on = {
        "train.early_stop.metric": early_stop.metric,
        "checkpoint.keep_best": settings.checkpoint.best_by,
    }
    metrics = evals.dry_run()
    for key, metric in acted_on.items():
        if metric is not None:
            metric.expect(key, metrics)
    outputs.begin()

    def evaluate(done: int, last: bool) -> None:
        records = evals(done, last)
        early_stop.on_eval(records)
        writer.on_eval(records)

    def show(number: int, batch: Batch) -> None:
        if number == 0:
            warn_of_duplicates(settings.loss, batch, world)
            warn_of_texts(settings.data, batch, world)
        outputs.show_batch(number, batch, tokenizer)

    lr = settings.schedule.build(peak=settings.optim.lr, total_steps=total)
    continues = resumed.checkpoint is not None and resumed.checkpoint.is_dir() and not ended
    if world.is_main and continues and (change := rate_change(step.optimizer, lr, state.step)):
        announce(f"changed  {change}")
    rescues = world.size > 1 and train.rescue_seconds > 0 and watch.owns_group
    trainer = Trainer(
        step,
        loader,
        writer,
        Length(stage.end, lr, log.every, train.epoch_samples, ends=stage.last),
        Hooks(outputs.write, evaluate, evals.due, show, watch.note_step, outputs.step),
        run.signals,
        Rollback(train, partial(resumed.restore, writer, step), state.rollback),
        early_stop,
        start,
        rescue=Rescue(watch, step, writer, train.rescue_seconds, settings.run.seed) if rescues else None,
        throughput=throughput,
        profiler=build_profiler(log, info, world),
    )
    watch.on_exit(writer.close)
    watch.note_step(trainer.step)
    if world.is_main:  # only now: a failed resume leaves the run's config.yaml as it was
        write_config(run.plan.repeatable, run.plan.survey.split)
    loading.show("loading the first batch")
    with closing(outputs), writer:
        trainer.run(save_first=resumed.checkpoint is not None and resumed.checkpoint.is_file())
    return trainer.ended, outputs.failures


def build_evals(run: RankRun, step: TrainStep, tokenizer: tokenizers.Tokenizer, outputs: Outputs) -> EvalRunner:
    """The evaluators, with the weights that are trained and their averages."""
    settings, world, full = run.settings, run.world, step.layout.full
    loss = build_loss(settings.loss, full.loss_type)
    examples = settings.log.pictures
    context = EvalContext(
        full, tokenizer, world, settings.data, settings.train.arithmetic, loss, examples,
        interrupt=run.signals.is_stopping,
    )  # fmt: skip
    weights: dict[Any, Any] = {"trained": step.whole_weights}
    if step.averages is not None:
        weights["averaged"] = partial(step.whole_weights, step.averages.tensors)
    listeners = Listeners(outputs.write, outputs.show, outputs.status)
    subject = {"run": settings.run.name, "model": settings.model.label}
    return EvalRunner(settings.evals, context, listeners, weights, subject=subject)


def build_profiler(settings: LogSettings, run: RunInfo, world: World) -> StepProfiler | None:
    """The profiler of the steps that `log.profile` names; None if this process trains none of them."""
    done = run.resume_step or 0
    steps = settings.steps_to_profile(done, run.total_steps)
    if world.is_main and settings.profile is not None and not steps and done < run.total_steps:
        logger.info(f"log.profile: no step of {settings.profile} is left after step {done}")
    return StepProfiler(steps, run.folder, world.device, records=world.is_main) if steps else None


def build_writer(run: RankRun, step: TrainStep, resumed: Resumed, outputs: Outputs) -> AsyncWriter:
    """The writer of checkpoints, with averaged weights and adapters as further files."""
    averages, towers = step.averages, step.towers
    tensors: dict[str, Callable[[], Tensors]] = {}
    if averages is not None:
        tensors[AVERAGED_FILE] = partial(towers.saved_tensors, averages.tensors)
    files: dict[str, bytes] = {}
    if (adapters := towers.adapters) is not None:
        for folder, own in ((ADAPTER, None), (AVERAGED_ADAPTER, None if averages is None else averages.tensors)):
            if folder == ADAPTER or own is not None:
                tensors[f"{folder}/{WEIGHTS}"] = partial(adapters.tensors, towers.clip, own)
                files |= {f"{folder}/{name}": content for name, content in adapters.files().items()}
    return AsyncWriter(
        run.folder / "checkpoints",
        run.world,
        run.settings.checkpoint,
        Content(towers, step.optimizer, settings_of_weights(run.plan.recorded), tensors, files),
        sync=resumed.remote_sync,
        status=outputs.status,
    )


def print_summary(plan: Plan, world: World, towers: Towers, resumed: Resumed) -> None:
    """Print sources, model, optimizer, batch, evaluators and length of the run."""
    settings, meta = plan.settings, resumed.meta or CheckpointMeta(TrainState())
    data, optim, stop, distill = settings.data, settings.optim, settings.train.early_stop, settings.distill
    for name, source in plan.survey.sources.items():
        factors = "::".join(f"{factor:g}" for factor in data.sources[name].upsampling_factors or ())
        drawn = f", shards drawn {factors}" if factors else ""
        announce(f"source   {name}: {source.summary()}, weight {data.sources[name].weight:g}{drawn}")
    if plan.epochs is not None:
        announce(f"epoch    {plan.epochs.summary()}")
    trained = sum(parameter.numel() for parameter in towers.parameters() if parameter.requires_grad)
    count = f"{towers.n_parameters:,} parameters"
    count += "" if trained == towers.n_parameters else f", {trained:,} of them trained"
    for tower, until in (("image", settings.model.unlock_image_at), ("text", settings.model.unlock_text_at)):
        count += "" if until is None else f", the {tower} tower from step {until}"
    model = settings.model.name
    model = Path(model).stem if model.startswith(SHIPPED) else model
    announce(f"model    {model}, {count}, {towers.loss_type} loss")
    for tower, folder in data.stored_towers.items():
        announce(f"features {redact(folder)}, instead of the {tower} tower")
    teachers = [redact(folder) for folder in data.teacher_features]
    if distill.model is not None:
        teachers.append(f"{distill.model}{f', {distill.pretrained}' if distill.pretrained else ''}")
    if teachers:
        weights = f"contrastive {distill.contrastive:g}, {distill.type} {distill.weight:g}"
        weights += f", features {distill.features:g}" * bool(distill.features)
        announce(f"teacher  {'; '.join(teachers)}: {weights}")
    announce(f"optim    {optim.type}, lr {optim.lr:g}, wd {optim.wd:g}{optim.summary(settings.model.name)}")
    sizes = "".join(f", {size} from step {step}" for step, size in data.batch_schedule)
    announce(
        f"batch    {data.global_batch_size}{sizes} on {world.size} x {world.device}"
        f"{', fsdp' if settings.train.parallel == 'fsdp' and world.size > 1 else ''}, "
        f"{counted(int(data.workers), 'worker')} a rank, {data.lanes} lanes, {data.sampling.mode}, "
        f"{settings.train.precision}"
    )
    for name, section in settings.evals.items():
        when = f"every {section.every} steps" if section.every else "at the end"
        announce(f"evals    {name}: {section.type}, {when}, {' and '.join(section.kinds)} weights")
    went_on = "" if resumed.checkpoint is None else f", continuing from {resumed.checkpoint}"
    announce(f"steps    {settings.total_steps}{went_on}")
    if resumed.checkpoint is not None and (done := meta.train.step) >= settings.total_steps:
        announce(f"         which is at step {done}: nothing left to train (raise --steps), only to evaluate")
    for number, change in enumerate(changes(plan.recorded, meta.settings or {})):
        announce(f"{'changed' if number == 0 else '':8} {change}")
    if stop.metric is not None:
        by = f" by more than {stop.min_delta:g}" * (stop.min_delta > 0)
        announce(f"         or until {stop.metric} is no better{by} in {stop.patience} evaluations in a row")
    announce(f"folder   {settings.run_folder}")


def with_costs(stages: Sequence[Stage], world: World) -> list[Stage]:
    """The stages with what is `later`. Prints each with its FLOPs, with texts as long as the context, and its time."""
    counted = []
    for stage in stages:
        settings = stage.plan.settings
        model = settings.model.model_copy(update={"pretrained": None, "image_pretrained": None})
        kind = chosen_loss_type(settings.loss)
        with torch.device("meta"):
            towers = build_towers(model, seed=0, loss_type=kind, tokenizer=settings.tokenizer)
        flops, length = count_flops(towers), towers.context_length
        counted.append(0.0 if flops is None else Work(1, 1, length, length**2).flops(flops, ()))
    before = stages[0].plan.settings.data.samples_before
    costs = counted if all(counted) else [1.0] * len(stages)
    works = [cost * (before(one.end) - before(one.begin)) for one, cost in zip(stages, costs, strict=True)]
    for stage, cost, work in zip(stages, costs, works, strict=True):
        settings = stage.plan.settings
        changed = settings.stages[stage.name].set if stage.name else {}
        what = ", ".join(f"{key} {format_value(value)}" for key, value in changed.items()) or "the run's own settings"
        if all(counted):
            took = estimate_seconds(work, world, settings.train.arithmetic, settings.log.peak_tflops)
            what += f", {cost / 1e9:.2g} GFLOPs a sample, {work / sum(works):.0%} of the run's, about {duration(took)}"
        announce(f"stage    {stage.name or 'last'}, to step {stage.end}: {what}")
    return [stage._replace(later=sum(works[number + 1 :]) / costs[number]) for number, stage in enumerate(stages)]


def print_end(settings: Settings, report: str, failures: Mapping[str, str]) -> None:
    """Print the file `report`, a command that searches the first shard, the best checkpoint, if the settings name a
    metric for it, and which outputs failed, by name with the reason.
    """
    if settings.log.report:
        announce(f"report   {settings.run_folder / report}")
    parts = (part for _, source in sorted(settings.data.sources.items()) for part in source.typed_parts)
    if (first := next(parts, None)) is not None:
        command = shlex.join(["clipstream", "search", str(settings.run_folder), redact(first)])
        announce(f'next     {command} "a text of your own"', whole=True)
    best = store.best_of(settings.run_folder / "checkpoints")
    if best is not None and best.metric == settings.checkpoint.keep_best:
        path = settings.run_folder / "checkpoints" / best.name
        announce(f"best at step {int(best.name[5:])}: {best.metric} {best.value:.4g}, {path}", whole=True)
    if any(evaluator.role == "guard" for evaluator in settings.evals.values()):
        announce(f"then     clipstream interpolate {shlex.quote(str(settings.run_folder))}", whole=True)
    if failures:
        told = "; ".join(f"{name} ({why})" for name, why in failures.items())
        logger.warning(f"failed at times, and may be incomplete: {told}")


make_callable(__name__, "clipstream.api.run:train")

"""A training run on one rank: validated settings enter, the run's folder leaves.

`train_rank` prepares the run's folder; `run` and `fit` are the recipe: settings, model, data, optimizer, step, loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipstream.checkpoint.run_lock import occupied
from clipstream.config.dump import redacted, write_config
from clipstream.config.settings import Settings, require_equal, resolve
from clipstream.distributed.failure import FailureWatch
from clipstream.distributed.signals import StopSignals
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError, Interrupted, SettingsError, Stopped
from clipstream.losses.settings import chosen_loss_type
from clipstream.report.sinks import RunInfo
from clipstream.storage.shard_cache import cache_root
from clipstream.training.early_stop import EarlyStop
from clipstream.training.optim import build_optimizer, build_schedule
from clipstream.utils import atomic_write
from clipstream.utils.logs import announce, logger, lossy_output

if TYPE_CHECKING:
    import torch

    from clipstream.checkpoint.async_writer import AsyncWriter
    from clipstream.checkpoint.remote_sync import RemoteSync
    from clipstream.data.batch import Batch
    from clipstream.data.decode.tokenizers import Tokenizer
    from clipstream.data.loader.loader import Loader
    from clipstream.data.loader.stored import StoredData
    from clipstream.evals.runner import EvalRunner
    from clipstream.evals.settings import Weights
    from clipstream.models.execution.batch_features import FeatureCache, Teacher
    from clipstream.models.execution.compile import Compilation
    from clipstream.models.execution.flops import Throughput
    from clipstream.models.towers import Towers
    from clipstream.report.outputs import Ending, Outputs
    from clipstream.training.parallel import FullTowers, ShardedTowers
    from clipstream.training.state import TrainState
    from clipstream.training.step import TrainStep
    from clipstream.utils.timing.step_profile import StepProfiler

FREE_SPACE = 64 << 10  # bytes that a run writes before its first step


def train_rank(settings: Settings, world: World, watch: FailureWatch) -> Path:
    """A whole run on this rank; returns the run's folder.

    Raises ClipstreamError: settings, data or training failed, or a signal stopped the run.
    """
    from clipstream.report.outputs import Ending
    from clipstream.report.terminal import run_log

    require_equal(settings, world)
    signals = StopSignals(
        deferring=False,
        broadcast=watch.broadcast_stop,
        on_exit=None if watch.embedded else watch.run_cleanups,
        announce=world.is_main,
    )
    watch.on_stop(signals.receive)
    own_lanes, ending = settings.data.lanes != "auto", None
    try:
        with signals:
            settings = resolve(settings, world)
            watch.held.enter_context(lossy_output())  # nobody has to look on while a run trains
            if world.is_main:  # the folder is locked until the process ends
                watch.held.enter_context(occupied(settings.run_folder))
                atomic_write.require_space(settings.run_folder, FREE_SPACE)
                watch.held.enter_context(run_log(settings.run_folder))
                ending = watch.on_end = Ending(settings.run_folder, report=settings.log.report)
            if settings.log.local:
                world.barrier()  # rank 0 has made the folder
                if world.local_rank == 0 and not world.is_main:
                    watch.held.enter_context(run_log(settings.run_folder, f"out-{world.rank}.log"))
            run(settings, world, watch, signals, ending, own_lanes=own_lanes)
            return settings.run_folder
    except Interrupted:
        raise Stopped.before_training(signals.received) from None
    except Stopped as stopped:
        stopped.signal = signals.received
        raise
    except OSError as error:
        if not atomic_write.is_full(error):
            raise
        # During training a full disk is a warning; before the first step, nothing can be written later.
        text = f"{error.filename or settings.run_folder} cannot be written, as its disk is full: free some space"
        raise ClipstreamError(text) from error


def run(
    settings: Settings,
    world: World,
    watch: FailureWatch,
    signals: StopSignals,
    ending: Ending | None,
    *,
    own_lanes: bool,
) -> None:
    """Settings, model and data of a run whose folder is locked; then `fit`.

    Args:
        ending: on rank 0, the record of how the run ends.
        own_lanes: whether the user set data.lanes.
    """
    from clipstream.tools import resume
    from clipstream.tools.feature_stores import open_stores
    from clipstream.tools.run_summary import print_best, print_summary

    # Settings: a resumed run keeps what was resolved when it began.
    remote_sync = resume.build_remote_sync(settings, world)
    found = resume.find(settings, world, remote_sync)
    meta = None if found is None else resume.meta_of(found, settings, world)
    state = None if meta is None else meta.train
    settings = resume.carried_over(settings, state, world, own_lanes=own_lanes)

    # Model and data; features may come from stores, in the place of towers or of teachers.
    stored = open_stores(settings)
    towers, tokenizer = build_model(settings, world, stored)
    teacher = build_teacher(settings, world)
    settings = with_workers(settings, world, stored)
    if world.is_main:
        print_summary(settings, world, towers, found, meta)
    with build_loader(settings, world, towers, tokenizer, state, teacher, stored) as loader:
        watch.on_exit(loader.close)

        # Optimizer, step, loop.
        throughput = build_throughput(settings, world, towers)  # before the towers are sharded or compiled
        layout, step = build_step(settings, world, towers, teacher, stored)
        fit(
            settings,
            world,
            layout,
            step,
            tokenizer,
            loader,
            throughput,
            watch,
            signals,
            ending,
            found,
            remote_sync,
            state,
        )
        if world.is_main:
            print_best(settings)


def fit(
    settings: Settings,
    world: World,
    layout: FullTowers | ShardedTowers,
    step: TrainStep,
    tokenizer: Tokenizer,
    loader: Loader,
    throughput: Throughput | None,
    watch: FailureWatch,
    signals: StopSignals,
    ending: Ending | None,
    found: Path | None,
    remote_sync: RemoteSync | None,
    start: TrainState | None,
) -> None:
    """The loop, with weights, moments and random states of the checkpoint `found`, if any."""
    from clipstream.data.decode.tokenizers import readable
    from clipstream.losses.contrastive import warn_of_duplicates
    from clipstream.report.outputs import Outputs
    from clipstream.training.rollback import Rollback
    from clipstream.training.state import TrainState
    from clipstream.training.trainer import Trainer

    resumed = None if found is None else load_checkpoint(found, step, start)
    state = resumed or TrainState()
    # Outputs and evaluators; their metrics' names are known from a dry run.
    train, total, log = settings.train, settings.total_steps, settings.log
    early_stop = EarlyStop(train.early_stop, state.early_stop)
    done = None if resumed is None else state.step
    ended = done is not None and (done >= total or early_stop.should_stop)
    info = RunInfo(settings.run_folder, total, done, world.size, ended, state.evaluation_pending, redacted(settings))
    outputs = Outputs(log, world, info, subject={"run": settings.run.name, "model": settings.model.label})
    run_evals = build_evals(settings, world, layout, step, tokenizer, outputs)
    run_evals.context.interrupt = lambda: signals.received is not None
    writer = build_writer(settings, world, step, remote_sync, outputs.status)
    early_stop.expect(metrics := run_evals.dry_run())
    writer.expect(metrics)
    outputs.begin()

    def evaluate(done: int, last: bool) -> None:
        records = run_evals(done, last)
        early_stop.on_eval(records)
        writer.on_eval(records)

    def show(number: int, batch: Batch) -> None:
        if number == 0:
            warn_of_duplicates(settings.loss, batch, world)
        outputs.show_batch(number, batch, decode=partial(readable, tokenizer))

    trainer = Trainer(
        step,
        loader,
        lr=build_schedule(settings.schedule, peak=settings.optim.lr, total_steps=total),
        world=world,
        total_steps=total,
        log_every=log.every,
        write=outputs.write,
        evaluate=evaluate,
        evaluation_due=run_evals.due,
        writer=writer,
        signals=signals,
        rollback=Rollback(train, partial(restore_checkpoint, writer, step, found), state.rollback),
        state=resumed,
        epoch_samples=train.epoch_samples,
        show=show,
        early_stop=early_stop,
        throughput=throughput,
        profiler=build_profiler(settings, world, state.step),
        first=partial(audit_first, settings, step) if log.audit_precision else None,
    )
    watch.on_exit(writer.close)
    watch.step = lambda: trainer.step
    if ending is not None:
        outputs.ending, ending.step = ending, lambda: trainer.step
    if world.is_main:  # only now: a failed resume leaves the run's config.yaml as it was
        write_config(settings)
    with closing(outputs), writer:
        trainer.run(save_first=found is not None and found.is_file())


def audit_first(settings: Settings, step: TrainStep, batch: Batch) -> None:
    """Audit the precision of a step on the first batch; see `report.precision_audit`."""
    from clipstream.models.execution.compile import eagerly
    from clipstream.report.precision_audit import audit_run

    with eagerly(step.compilation):
        audit_run(settings.run_folder, step, batch)


def build_model(settings: Settings, world: World, stored: StoredData | None) -> tuple[Towers, Tokenizer]:
    """The towers, on the CPU and in the dtype they train in, and the tokenizer; towers of stored features are absent.

    Raises SettingsError: the tokenizer has more tokens than the model, or a store was made with other settings.
    """
    from clipstream.data.decode.tokenizers import build_tokenizer
    from clipstream.models.build import build_towers
    from clipstream.tools.feature_stores import check_stores, remove_towers
    from clipstream.training.precision import check_device, prepare_towers, seed_all

    model, seed = settings.model, settings.run.seed
    precision, tf32 = settings.train.arithmetic, settings.train.tf32
    check_device(world.device, precision, tf32=tf32)
    seed_all(seed, world.rank)
    towers = build_towers(
        model, seed=seed, loss_type=chosen_loss_type(settings.loss), tokenizer=settings.tokenizer, world=world
    )
    tokenizer = build_tokenizer(
        settings.tokenizer, towers.open_clip_tokenizer(), towers.context_length, cache_dir=model.cache_dir
    )
    if tokenizer.vocab_size > towers.vocab_size:
        raise SettingsError(
            f"tokenizer: its ids go up to {tokenizer.vocab_size - 1}, but the model knows {towers.vocab_size} tokens: "
            "leave tokenizer.type at 'model', or take a model with text_cfg.vocab_size to match"
        )
    if stored is not None:
        check_stores(stored, settings, towers, tokenizer)
    prepare_towers(towers, precision, model, world.device, tf32=tf32, keep=world.is_main)
    if stored is not None:
        remove_towers(stored, towers)
    return towers, tokenizer


def build_throughput(settings: Settings, world: World, towers: Towers) -> Throughput | None:
    """What adds TFLOP/s and MFU to training lines; None where the model's FLOPs cannot be counted. Collective.

    Those of towers whose features are cached are not counted, as they run less and less often.
    """
    from dataclasses import replace

    from clipstream.models.execution.flops import Flops, Throughput, count_flops, peak_tflops

    # A second of work for a processor, which all ranks of a node would do at once.
    flops = world.broadcast_object(count_flops(towers) if world.is_main else None)
    if flops is not None and settings.model.image.cache_gib is not None:
        flops = replace(flops, image=Flops())
    if flops is not None and settings.model.text.cache_gib is not None:
        flops = replace(flops, text=(Flops(), Flops(), Flops()))
    peak = settings.log.peak_tflops or peak_tflops(world.device, settings.train.arithmetic)
    return None if flops is None else Throughput(flops, peak)


def build_profiler(settings: Settings, world: World, done: int) -> StepProfiler | None:
    """The profiler of some of the steps after `done`; None without any."""
    from clipstream.utils.timing.step_profile import StepProfiler

    steps = settings.log.profiled(done, settings.total_steps)
    if world.is_main and settings.log.profile is not None and not steps and done < settings.total_steps:
        logger.info(f"log.profile: no step of {settings.log.profile} is left after step {done}")
    return StepProfiler(steps, settings.run_folder, world.device, records=world.is_main) if steps else None


def build_teacher(settings: Settings, world: World) -> Teacher | None:
    """The live teacher on this rank's device, in the arithmetic of training; None where the settings name none."""
    from clipstream.models.build import build_towers
    from clipstream.models.execution.batch_features import Teacher
    from clipstream.training.precision import autocast, prepare

    model, precision = settings.distill.teacher(settings.model.cache_dir), settings.train.arithmetic
    if model is None:
        return None
    towers = build_towers(model, seed=settings.run.seed, world=world)
    prepare(towers, precision)
    return Teacher(towers, world.device, partial(autocast, world.device, precision))


def with_workers(settings: Settings, world: World, stored: StoredData | None = None) -> Settings:
    """The settings with `data.workers` resolved, and no more workers than lanes; none where no shard is read."""
    data, most = settings.data, int(settings.data.lanes) // world.size
    if stored is not None and stored.replaces_loader:
        workers, why = 0, "a thread gathers the features"
    elif data.workers == "auto":
        from clipstream.data.loader.workers import resolve_workers

        workers, why = resolve_workers(data, world)
    elif data.workers > most:
        workers, why = most, f"there are {data.lanes} lanes for {data.workers} workers on each of {world.size} ranks "
        why += "(more by --data.lanes, which changes the order of samples)"
    else:
        return settings
    if world.is_main:
        announce(f"workers  {workers} a rank: {why}")
    return settings.model_copy(update={"data": data.model_copy(update={"workers": workers})})


def build_loader(
    settings: Settings,
    world: World,
    towers: Towers,
    tokenizer: Tokenizer,
    state: TrainState | None,
    teacher: Teacher | None = None,
    stored: StoredData | None = None,
) -> Loader:
    """The loader of this rank's batches, at the position of `state`. Collective.

    Raises SettingsError: the ranks find different shards.
    """
    from dataclasses import replace

    from clipstream.data.build import training_loader
    from clipstream.data.decode.tokenizers import wrap
    from clipstream.data.loader.pipeline import ModelInputs

    inputs = ModelInputs(tokenizer, towers.image, features=stored, text_lengths=towers.text_lengths)
    # The teacher gets pixels and ids of its own where those of the model do not fit it.
    if teacher is not None and teacher.towers.image.size != towers.image.size:
        inputs = replace(inputs, teacher_image=teacher.towers.image)
    if teacher is not None and not (settings.tokenizer.type == "model" and teacher.towers.same_tokenizer(towers)):
        own = wrap(teacher.towers.open_clip_tokenizer(), teacher.towers.context_length)
        inputs = replace(inputs, teacher_tokenizer=own)
    loader = training_loader(
        settings.data,
        inputs,
        world=world,
        seed=settings.run.seed,
        start=None if state is None else state.data,
        approximate=settings.checkpoint.resume_approximate,
        views=True,
    )
    orders = world.gather_objects(loader.fingerprint)
    if other := [rank for rank, order in enumerate(orders) if order != orders[0]]:
        loader.close()
        raise SettingsError(f"data.sources: rank {other[0]} finds other shards than rank 0: is the folder shared?")
    return loader


def build_step(
    settings: Settings,
    world: World,
    towers: Towers,
    teacher: Teacher | None = None,
    stored: StoredData | None = None,
) -> tuple[FullTowers | ShardedTowers, TrainStep]:
    """The towers on this rank's device, sharded with fsdp, and the step that trains them.

    Raises SettingsError: micro_batch_size or kept_micro_batches is auto on the CPU, or a stored teacher lacks features
    of pictures or texts.
    """
    from clipstream.losses.contrastive import build_loss
    from clipstream.losses.distillation import DistilledLoss
    from clipstream.models.execution.batch_features import NAME
    from clipstream.models.execution.channels_last import tune_convolutions
    from clipstream.models.execution.compile import compile_towers
    from clipstream.tools.feature_stores import teacher_scales
    from clipstream.training.ema import WeightAverages
    from clipstream.training.parallel import parallelize, synchronize_batch_norm, wrap
    from clipstream.training.settings import AUTO_ON_CPU
    from clipstream.training.step import TrainStep

    train = settings.train
    towers.train()
    synchronize_batch_norm(towers, world, towers.frozen)
    layout = parallelize(
        towers,
        world,
        parallel=train.parallel,
        precision=train.arithmetic,
        reshard_after_forward=train.reshard_after_forward,
    )
    optimizer = build_optimizer(towers, settings.optim, settings.model.name)
    auto = [key for key in ("micro_batch_size", "kept_micro_batches") if getattr(train, key) == "auto"]
    if auto and not world.device.startswith("cuda"):
        raise AUTO_ON_CPU.error(f"train.{auto[0]}")
    tune_convolutions(towers, world.device)
    caches = fit_memory(settings, world, towers)
    compilation = None
    if train.compile != "off":
        cache = cache_root() / "inductor"
        compilation = compile_towers(towers, train.compile, train.compile_backend, train.compile_mode, cache=cache)
    loss = build_loss(settings.loss, towers.loss_type)
    scales = {} if stored is None else teacher_scales(stored, settings.distill)
    if teacher is not None:
        scales[NAME] = teacher.scale
    if scales:
        loss = DistilledLoss(loss, settings.distill, scales, add_features=teacher)
    step = TrainStep(
        towers,
        loss,
        optimizer,
        world,
        precision=train.arithmetic,
        micro_batch_size=train.micro_batch_size,
        kept=train.kept_micro_batches,
        clip_norm=settings.optim.grad_clip_norm,
        max_logit_scale=loss.max_logit_scale,
        min_logit_scale=getattr(loss, "min_logit_scale", None),
        averages=None if train.ema is None else WeightAverages(towers, train.ema, warmup=train.ema_warmup),
        caches=caches,
        compilation=compilation,
        ddp=partial(wrap, bucket_mib=train.ddp_bucket_mib, bf16=train.ddp_hook == "bf16"),
    )
    if teacher is not None:
        teacher.chunk = lambda: step.gradcache.size
    return layout, step


def fit_memory(settings: Settings, world: World, towers: Towers) -> list[FeatureCache]:
    """The caches of features of frozen towers, and activations within the budgets of `model.grad_checkpointing`.

    Args:
        towers: on their device.

    Raises SettingsError: a budget is too little, or a tower with a cache has weights that are trained.
    """
    from clipstream.models.execution.batch_features import caches_of
    from clipstream.models.execution.checkpointing import fit_budgets
    from clipstream.training.parallel import reshard
    from clipstream.training.precision import autocast, same_randomness

    micro, samples = settings.train.micro_batch_size, -(-max(settings.data.batch_sizes) // world.size)
    if isinstance(micro, int):
        samples = min(samples, micro)
    context = partial(autocast, world.device, settings.train.arithmetic)
    with same_randomness(world.device):
        lines = fit_budgets(towers, settings.model, samples, context)
    reshard(towers)
    caches = caches_of(towers, settings.model, world, context)
    for line in [*lines, *(cache.summary() for cache in caches)] if world.is_main else ():
        announce(f"memory   {line}")
    return caches


def build_evals(
    settings: Settings,
    world: World,
    layout: FullTowers | ShardedTowers,
    step: TrainStep,
    tokenizer: Tokenizer,
    outputs: Outputs,
) -> EvalRunner:
    """The evaluators, with the weights that are trained and their averages."""
    from clipstream.evals.context import EvalContext
    from clipstream.evals.runner import EvalRunner, Listeners
    from clipstream.losses.contrastive import build_loss

    loss = build_loss(settings.loss, layout.full.loss_type)
    context = EvalContext(
        layout.full, tokenizer, world, settings.data, settings.train.arithmetic, loss, settings.log.pictures
    )
    weights: dict[Weights, Any] = {"trained": partial(whole_weights, layout, world.device, step.compilation)}
    if step.averages is not None:
        weights["averaged"] = partial(whole_weights, layout, world.device, step.compilation, step.averages.tensors)
    listeners = Listeners(outputs.write, outputs.show, outputs.trace, outputs.status)
    return EvalRunner(settings.evals, context, listeners, weights)


@contextmanager
def whole_weights(
    layout: FullTowers | ShardedTowers,
    device: str,
    compilation: Compilation | None = None,
    instead: Mapping[str, torch.Tensor] | None = None,
) -> Iterator[Towers]:
    """A context with the whole model on a device: shards are gathered, and stored towers are loaded. Collective.

    Compiled towers run eagerly, with the text setting of eager ones: evaluations have many shapes, and figures must
    be those of `clipstream evaluate`.
    """
    from clipstream.models.execution.compile import eagerly

    with layout.full_weights(device, instead=instead) as towers, towers.whole(device), eagerly(compilation):
        compiled = towers.text_buckets
        if compilation is not None and compiled is not None:
            towers.text_buckets = compilation.text_buckets
        try:
            yield towers
        finally:
            towers.text_buckets = compiled


def build_writer(
    settings: Settings,
    world: World,
    step: TrainStep,
    remote_sync: RemoteSync | None,
    status: Callable[[str], None],
) -> AsyncWriter:
    """The writer of checkpoints, with averaged weights as a further file."""
    from clipstream.checkpoint.async_writer import AsyncWriter
    from clipstream.models.pretrained import AVERAGED_FILE
    from clipstream.tools.resume import noted

    averages, towers = step.averages, step.towers
    return AsyncWriter(
        settings.run_folder / "checkpoints",
        world,
        settings.checkpoint,
        towers=towers,
        optimizer=step.optimizer,
        recorded=noted(settings),
        tensors=None if averages is None else {AVERAGED_FILE: lambda: averages.among(towers.saved_tensors())},
        sync=remote_sync,
        status=status,
    )


def load_checkpoint(checkpoint: Path, step: TrainStep, start: TrainState | None = None) -> TrainState:
    """Load weights, moments, averages, loss scale and random states; returns the position of the run.

    Args:
        start: that position, for a checkpoint of open_clip.
    """
    from clipstream.checkpoint.state import load
    from clipstream.models.pretrained import AVERAGED_FILE
    from clipstream.training.parallel import reshard

    reshard(step.towers)
    state = load(checkpoint, towers=step.towers, optimizer=step.optimizer, world=step.world, start=start)
    step.load_state(state.train_step)
    if step.averages is not None:
        step.averages.load(checkpoint / AVERAGED_FILE, state.train_step.ema_updates)
    return state


def restore_checkpoint(writer: AsyncWriter, step: TrainStep, found: Path | None, good: Sequence[int]) -> int | None:
    """Load the newest undamaged checkpoint with one of the steps `good`; returns its step.

    Args:
        found: the checkpoint that the run was resumed from, which may be in another folder.
    """
    chosen = writer.whole(sorted(good, reverse=True), instead=found)
    return None if chosen is None else load_checkpoint(chosen, step).step

"""Wires a training run: settings to parts, parts to a Trainer. The way of a run, read top to bottom.

    python -m clipstream.train --config configs/quickstart.yaml

Settings are checked, and missing weights found, before torch is imported. It computes nothing itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipstream import durable
from clipstream.cli import load_or_help, run_main
from clipstream.config import LANES, Settings, dump, openers, resolve, with_known_epoch
from clipstream.contradictions import validate_run
from clipstream.errors import ClipstreamError, SettingsError
from clipstream.failure import FailureWatch
from clipstream.folder import occupied
from clipstream.model.settings import chosen_loss_type
from clipstream.world import World

if TYPE_CHECKING:
    from clipstream.data.loader import Loader
    from clipstream.data.text import Tokenizer
    from clipstream.evals.protocol import EvalRunner
    from clipstream.evals.settings import Weights
    from clipstream.model.towers import Towers
    from clipstream.report.outputs import Outputs
    from clipstream.training.early_stop import EarlyStop
    from clipstream.training.loop import Trainer
    from clipstream.training.mirror import Mirror
    from clipstream.training.saving import Saver
    from clipstream.training.sharding import FullTowers, ShardedTowers
    from clipstream.training.step import TrainStep
    from clipstream.training.stopping import StopSignals


def main(argv: Sequence[str] | None = None) -> int:
    """The verb: the exit code of this process."""
    return run_main(_main, argv)


def _main(argv: list[str]) -> int:
    settings = load_or_help("train", argv)
    if settings is None:
        return 0
    settings = with_known_epoch(settings)
    validate_run(settings, World.from_env())
    from clipstream.model.pretrained import preflight

    preflight(
        settings.model,
        settings.tokenizer,
        loss_type=chosen_loss_type(settings.loss),
        ask=World.from_env().local_rank == 0,
    )
    from clipstream.session import run_ranks

    return run_ranks(settings.run, partial(train, settings))


def train(settings: Settings, world: World, watch: FailureWatch) -> None:
    """A whole run on this rank.

    Raises:
        ClipstreamError: as its parts do.
    """
    lanes = settings.data.lanes
    settings = resolve(settings, world)
    try:
        with occupied(settings.run_folder) if world.is_main else nullcontext():
            _train(settings, world, watch, lanes)
    except OSError as error:
        if not durable.is_full(error):
            raise
        # Once it trains, a full disk does not end it; what it writes before that cannot wait.
        text = f"{error.filename or settings.run_folder} cannot be written, as its disk is full: free some space"
        raise ClipstreamError(text) from error


def _train(settings: Settings, world: World, watch: FailureWatch, lanes: int | str) -> None:
    """In a folder that is ours."""
    from clipstream import resuming
    from clipstream.training import checkpoint
    from clipstream.training.stopping import StopSignals

    mirror = resuming.mirror_of(settings, world)
    found = resuming.find(settings, world, mirror)
    state = None if found is None else checkpoint.read_state(found)
    settings = resuming.carried_over(settings, state, world, own_lanes=lanes != "auto")
    towers, tokenizer = _model(settings, world)
    if settings.data.workers == "auto":
        settings = _with_crew(settings, world, towers, tokenizer)
    if world.is_main:
        _say_what(settings, world, towers)
        _say_steps(settings, found, 0 if state is None else int(state["step"]))
    with StopSignals() as signals, _loader(settings, world, towers, tokenizer, state) as loader:
        watch.on_exit(loader.close)
        trainer, outputs, saver = _trainer(settings, world, towers, tokenizer, loader, signals, found, mirror)
        watch.on_exit(saver.close)
        if world.is_main:  # not before: a resume that fails leaves the run's settings as they were
            _write_config(settings)
        try:
            with saver:
                trainer.run()
            if world.is_main:
                _say_best(settings)
        finally:
            outputs.close()


def _model(settings: Settings, world: World) -> tuple[Towers, Tokenizer]:
    """The towers on this rank's device, in their final type, and what makes their ids."""
    from clipstream.data.text import build_tokenizer
    from clipstream.model.pretrained import fetch
    from clipstream.model.towers import build_towers
    from clipstream.training.precision import check_device, prepare, seed_all

    check_device(world.device, settings.train.arithmetic)
    fetch(settings.model, settings.tokenizer, world)
    seed_all(settings.run.seed, world.rank)
    towers = build_towers(
        settings.model, seed=settings.run.seed, loss_type=chosen_loss_type(settings.loss), tokenizer=settings.tokenizer
    )
    tokenizer = build_tokenizer(
        settings.tokenizer, towers.open_clip_tokenizer(), towers.context_length, cache_dir=settings.model.cache_dir
    )
    if tokenizer.vocab_size > towers.vocab_size:
        raise SettingsError(
            f"tokenizer: its ids go up to {tokenizer.vocab_size - 1}, but the model knows {towers.vocab_size} tokens: "
            "leave tokenizer.type at 'model', or take a model with text_cfg.vocab_size to match"
        )
    prepare(towers, settings.train.arithmetic)
    return towers, tokenizer


def _with_crew(settings: Settings, world: World, towers: Towers, tokenizer: Tokenizer) -> Settings:
    """The settings with a number of workers."""
    from clipstream.data.crew import settle

    crew = settle(settings.data, world, tokenizer, towers.image)
    if world.is_main:
        print(f"workers  {crew.workers} a rank: {crew.why}")
    return settings.model_copy(update={"data": settings.data.model_copy(update={"workers": crew.workers})})


def _loader(
    settings: Settings, world: World, towers: Towers, tokenizer: Tokenizer, state: dict[str, Any] | None
) -> Loader:
    from clipstream.data.sources import training_loader

    loader = training_loader(
        settings.data,
        world=world,
        seed=settings.run.seed,
        tokenizer=tokenizer,
        image=towers.image,
        start=None if state is None else state["data"],
        approximate=settings.checkpoint.resume_approximate,
    )
    orders = world.gather_objects(loader.plan.order)
    if other := [rank for rank, order in enumerate(orders) if order != orders[0]]:
        loader.close()
        raise SettingsError(f"data.sources: rank {other[0]} finds other shards than rank 0: is the folder shared?")
    return loader


def _trainer(
    settings: Settings,
    world: World,
    towers: Towers,
    tokenizer: Tokenizer,
    loader: Loader,
    signals: StopSignals,
    found: Path | None,
    mirror: Mirror | None,
) -> tuple[Trainer, Outputs, Saver]:
    """The trainer, at the checkpoint's position if there is one, and what is written for people."""
    from clipstream.data.text import readable
    from clipstream.report.outputs import Outputs
    from clipstream.training.batch_norm import synchronize_batch_norm
    from clipstream.training.early_stop import EarlyStop
    from clipstream.training.loop import Trainer
    from clipstream.training.optim import build_optimizer, lr_at
    from clipstream.training.recovery import Recovery
    from clipstream.training.sharding import parallelize

    train, total = settings.train, settings.total_steps
    towers.train()
    synchronize_batch_norm(towers, world)
    layout = parallelize(towers, world, parallel=train.parallel, precision=train.arithmetic)
    optimizer = build_optimizer(towers, settings.optim, batch_norm=towers.has_batch_norm)
    step = _step(settings, world, towers, optimizer)
    state = None if found is None else _load(found, step)
    log, done = settings.log, None if state is None else int(state["step"])
    early_stop = EarlyStop(train.early_stop, None if state is None else state.get("early_stop"))
    subject = {"run": settings.run.name, "model": settings.model.label}
    ended = done is not None and (done >= total or early_stop.over)
    outputs = Outputs(settings.run_folder, log, world, total=total, done=done, ended=ended, subject=subject)
    evaluate = _evaluate(settings, world, layout, step, tokenizer, outputs)
    saver = _saver(settings, world, towers, step, mirror)
    evaluated = _heard(evaluate, early_stop, saver)
    outputs.begin()
    trainer = Trainer(
        step,
        loader,
        lr=partial(lr_at, peak=settings.optim.lr, schedule=settings.schedule, total_steps=total),
        world=world,
        total_steps=total,
        log_every=settings.log.every,
        sinks=[outputs],
        evaluate=evaluated,
        saves=saver,
        signals=signals,
        recovery=Recovery(
            train, partial(_restore, saver, step, found), None if state is None else state.get("recovery")
        ),
        state=state,
        epoch_samples=train.epoch_samples,
        show=partial(outputs.show_batch, decode=partial(readable, tokenizer)),
        show_every=log.pictures_every,
        early_stop=early_stop,
    )
    return trainer, outputs, saver


def _evaluate(
    settings: Settings,
    world: World,
    layout: FullTowers | ShardedTowers,
    step: TrainStep,
    tokenizer: Tokenizer,
    outputs: Outputs,
) -> EvalRunner:
    """The evaluators, at work on the towers that train."""
    from clipstream.evals.protocol import EvalContext, EvalRunner
    from clipstream.model.losses import build_loss

    context = EvalContext.for_towers(
        layout.full,
        tokenizer,
        world,
        data=settings.data,
        precision=settings.train.arithmetic,
        loss=build_loss(settings.loss, layout.full.loss_type),
        examples=settings.log.pictures,
    )
    weights: dict[Weights, Any] = {"trained": partial(layout.full_weights, world.device)}
    if step.averages is not None:
        weights["averaged"] = partial(layout.full_weights, world.device, instead=step.averages.tensors)
    return EvalRunner(settings.evals, context, outputs.write, outputs.show, weights, outputs.trace)


def _heard(evaluate: EvalRunner, *hearers: Saver | EarlyStop) -> Callable[[int, bool], None]:
    """Evaluates what is due, for those who act on it; they have heard of its metrics in a rehearsal."""
    metrics = evaluate.rehearse()
    for hearer in hearers:
        hearer.expect(metrics)

    def evaluated(done: int, last: bool) -> None:
        records = evaluate(done, last)
        for hearer in hearers:
            hearer.hear(records)

    return evaluated


def _step(settings: Settings, world: World, towers: Towers, optimizer: Any) -> TrainStep:
    from clipstream.model.losses import build_loss
    from clipstream.training.averaging import Averages
    from clipstream.training.step import TrainStep

    train = settings.train
    if train.micro_batch_size == "auto" and not world.device.startswith("cuda"):
        raise SettingsError(
            "train.micro_batch_size: auto finds out when a GPU's memory is full; on the CPU the system ends the run "
            "instead: give a number"
        )
    if train.compile:
        towers.compile()
    loss = build_loss(settings.loss, towers.loss_type)
    return TrainStep(
        towers,
        loss,
        optimizer,
        world,
        precision=train.arithmetic,
        micro_batch_size=train.micro_batch_size,
        clip_norm=settings.optim.grad_clip_norm,
        max_logit_scale=loss.max_logit_scale,
        averages=None if train.ema is None else Averages(towers, train.ema, warmup=train.ema_warmup),
    )


def _saver(settings: Settings, world: World, towers: Towers, step: TrainStep, mirror: Mirror | None) -> Saver:
    from clipstream.model.pretrained import AVERAGED_FILE
    from clipstream.training.saving import Saver

    averages = step.averages
    return Saver(
        settings.run_folder / "checkpoints",
        world,
        settings.checkpoint,
        towers=towers,
        optimizer=step.optimizer,
        state=step.state,
        tensors=None if averages is None else {AVERAGED_FILE: lambda: averages.among(towers.clip.state_dict())},
        mirror=mirror,
    )


def _load(found: Path, step: TrainStep) -> dict[str, Any]:
    """Put back what a step changes, from a checkpoint; its state."""
    from clipstream.model.pretrained import AVERAGED_FILE
    from clipstream.training import checkpoint
    from clipstream.training.sharding import reshard

    reshard(step.towers)
    state = checkpoint.load(found, towers=step.towers, optimizer=step.optimizer, world=step.world)
    step.load_state(state)
    if step.averages is not None:
        step.averages.load(found / AVERAGED_FILE, state.get("averages"))
    return state


def _restore(saver: Saver, step: TrainStep, found: Path | None, good: Sequence[int]) -> int | None:
    """Put back what a step changes, from the newest good checkpoint that is whole; its step.

    Args:
        found: the one that the run was resumed from, which may lie elsewhere.
        good: steps of good checkpoints.
    """
    chosen = saver.whole(sorted(good, reverse=True), instead=found)
    return None if chosen is None else int(_load(chosen, step)["step"])


def _write_config(settings: Settings) -> None:
    durable.replace(settings.run_folder / "config.yaml", dump(settings).encode())


def _say_what(settings: Settings, world: World, towers: Towers) -> None:
    """What will be trained on what, in a few lines."""
    data = settings.data
    for name, opener in openers(settings).items():
        print(f"source   {name}: {opener.summary()}, weight {data.sources[name].weight:g}")
        if data.sampling.deals_shards and data.lanes == len(opener.names) < LANES:
            print(f"lanes    {data.lanes}, as {name} has no more shards: in {data.sampling.words} each lane needs one")
    if settings.epochs is not None:
        print(f"epoch    {settings.epochs.summary()}")
    trained = sum(parameter.numel() for parameter in towers.parameters() if parameter.requires_grad)
    count = f"{towers.n_parameters:,} parameters"
    count += "" if trained == towers.n_parameters else f", {trained:,} of them trained"
    print(f"model    {settings.model.name}, {count}, {towers.loss_type} loss")
    count_of_workers = min(data.most_workers, -(-int(data.lanes) // world.size))
    workers = f"{count_of_workers} worker{'s' * (count_of_workers != 1)}"
    sizes = "".join(f", {size} from step {step}" for step, size in data.batch_schedule)
    print(
        f"batch    {data.global_batch_size}{sizes} on {world.size} x {world.device}"
        f"{', fsdp' if settings.train.parallel == 'fsdp' and world.size > 1 else ''}, {workers} a rank, "
        f"{data.lanes} lanes, {data.sampling.mode}, {settings.train.precision}"
    )
    for name, section in settings.evals.items():
        when = f"every {section.every} steps" if section.every else "at the end"
        print(f"evals    {name}: {section.type}, {when}, {' and '.join(section.kinds)} weights")


def _say_steps(settings: Settings, found: Path | None, step: int) -> None:
    """How long will be trained, from which checkpoint on, and where the run's files are."""
    print(f"steps    {settings.total_steps}" + ("" if found is None else f", going on from {found}"))
    if step >= settings.total_steps:
        print(f"         which is at step {step}: nothing is left to train, only to evaluate (more: --steps)")
    stop = settings.train.early_stop
    if stop.metric is not None:
        by = f" by more than {stop.min_delta:g}" * (stop.min_delta > 0)
        print(f"         or until {stop.metric} is no better{by} in {stop.patience} evaluations in a row")
    print(f"folder   {settings.run_folder}", flush=True)


def _say_best(settings: Settings) -> None:
    """Which checkpoint is the best one, where the settings say by what."""
    from clipstream.training import shelf

    best = shelf.best_of(settings.run_folder / "checkpoints")
    if best is not None and best.metric == settings.checkpoint.keep_best:
        print(f"best     {settings.run_folder / 'checkpoints' / best.name}: {best.metric} {best.value:.4g}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

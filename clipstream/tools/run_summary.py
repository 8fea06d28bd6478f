"""The lines that a training run prints before its first step and after its last one."""

from __future__ import annotations

from pathlib import Path

from clipstream.checkpoint import store
from clipstream.checkpoint.state import CheckpointMeta
from clipstream.config.settings import Settings, open_sources
from clipstream.distributed.world import World
from clipstream.models.towers import Towers
from clipstream.storage.shard_url import redact
from clipstream.text import counted
from clipstream.tools.resume import changes
from clipstream.utils.logs import announce


def print_summary(
    settings: Settings, world: World, towers: Towers, checkpoint: Path | None, meta: CheckpointMeta | None
) -> None:
    """Print sources, model, optimizer, batch, evaluators and length of the run.

    Args:
        settings: with every `auto` resolved.
        checkpoint: the one that the run is resumed from.
    """
    data, optim, stop, distill = settings.data, settings.optim, settings.train.early_stop, settings.distill
    for name, source in open_sources(settings).items():
        factors = "::".join(f"{factor:g}" for factor in data.sources[name].upsampling_factors or ())
        drawn = f", shards drawn {factors}" if factors else ""
        announce(f"source   {name}: {source.summary()}, weight {data.sources[name].weight:g}{drawn}")
    if settings.epochs is not None:
        announce(f"epoch    {settings.epochs.summary()}")
    trained = sum(parameter.numel() for parameter in towers.parameters() if parameter.requires_grad)
    count = f"{towers.n_parameters:,} parameters"
    count += "" if trained == towers.n_parameters else f", {trained:,} of them trained"
    for tower, until in (("image", settings.model.unlock_image_at), ("text", settings.model.unlock_text_at)):
        count += "" if until is None else f", the {tower} tower from step {until}"
    announce(f"model    {settings.model.name}, {count}, {towers.loss_type} loss")
    for tower, folder in data.stored_towers.items():
        announce(f"features {redact(folder)}, in place of the {tower} tower")
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
    announce(f"steps    {settings.total_steps}" + ("" if checkpoint is None else f", going on from {checkpoint}"))
    if meta is not None and meta.train.step >= settings.total_steps:
        done = meta.train.step
        announce(f"         which is at step {done}: nothing is left to train, only to evaluate (more: --steps)")
    for number, change in enumerate(changes(settings, {} if meta is None else meta.settings)):
        announce(f"{'changed' if number == 0 else '':8} {change}")
    if stop.metric is not None:
        by = f" by more than {stop.min_delta:g}" * (stop.min_delta > 0)
        announce(f"         or until {stop.metric} is no better{by} in {stop.patience} evaluations in a row")
    announce(f"folder   {settings.run_folder}")


def print_best(settings: Settings) -> None:
    """Print the best checkpoint, if the settings name a metric for it."""
    best = store.best_of(settings.run_folder / "checkpoints")
    if best is not None and best.metric == settings.checkpoint.keep_best:
        announce(f"best     {settings.run_folder / 'checkpoints' / best.name}: {best.metric} {best.value:.4g}")

"""What a process takes over from earlier processes of its run: the checkpoint and the settings that belong to it.

Resolved settings enter; the folder of a checkpoint, downloaded from the run's remote copy if that is newer, and the
settings to go on with leave. Loads no weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from clipstream.checkpoint import store
from clipstream.checkpoint.open_clip import OpenClipCheckpoint
from clipstream.checkpoint.remote_sync import (
    CHECKPOINTS,
    METRICS,
    RemoteDir,
    RemoteSync,
    download,
    message_of,
    with_retries,
)
from clipstream.checkpoint.state import CheckpointMeta, read_meta
from clipstream.config.dump import portable
from clipstream.config.settings import Settings, by_key, shown
from clipstream.data.order.lanes import DataState
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.storage.shard_url import ShardURL, redact_value
from clipstream.training.precision import Precision, resolve_precision
from clipstream.training.state import StepState, TrainState
from clipstream.utils import atomic_write
from clipstream.utils.logs import announce, logger

TRAINS = re.compile(r"(model|tokenizer|data|loss|distill|optim|schedule|train)\.|run\.(seed|deterministic)$")
BESIDES = re.compile(
    r"model\.cache_dir|data\.(cache|cache_gib|workers|trace|\w+_timeout|max_\w+_failures)"
    r"|data\.sources\..*\.(shards|folder)"
)


def build_remote_sync(settings: Settings, world: World) -> RemoteSync | None:
    """The run's remote copy, on rank 0, if `checkpoint.remote_sync` is set."""
    url = settings.checkpoint.remote_sync
    if url is None or not world.is_main:
        return None
    remote = RemoteDir(url, "--remote-sync") / str(settings.run.name)
    return RemoteSync(remote, settings.run_folder, settings.checkpoint)


def find(settings: Settings, world: World, remote_sync: RemoteSync | None) -> Path | None:
    """The checkpoint that `--resume` names, on a local disk; None for a new run. Collective.

    Raises:
        SettingsError: there is none, it is damaged, or some rank does not see it; the remote copy cannot be read, or
            holds a run, and this is a new one.
    """
    resume, folder = settings.checkpoint.resume, settings.run_folder / CHECKPOINTS

    def on_main() -> Path | None:
        if remote_sync is not None:
            remote = remote_sync.remote
            try:
                whole = with_retries((remote / CHECKPOINTS).whole)
            except Exception as error:  # every backend has errors of its own
                text = f"--remote-sync: {remote.shown} cannot be read: {message_of(error)}"
                raise SettingsError(text) from error
            if whole and resume is None:
                raise SettingsError(
                    f"--remote-sync: {remote.shown} holds a run: continue it with --resume auto, or start another run "
                    "by another --name"
                )
            remote_sync.last_serial = max((marker.serial for marker in whole.values()), default=0)
        if resume is not None and ShardURL(resume).scheme is not None:
            found = download(RemoteDir(resume, "--resume"), folder)
            if found is None:
                raise SettingsError(f"--resume: there is no whole checkpoint in {RemoteDir(resume, '').shown}")
            return found
        if remote_sync is not None and resume in ("latest", "auto"):
            download_newer(remote_sync, settings.run_folder)
        return store.find(folder, resume)

    return store.agree(on_main, world)


def meta_of(checkpoint: Path, settings: Settings, world: World) -> CheckpointMeta:
    """What a checkpoint says of its run; of one of open_clip, its step by epochs of the present settings.

    Raises SettingsError: it cannot be read, or the epochs of open_clip's have no known length.
    """
    if not checkpoint.is_file():
        return read_meta(checkpoint)
    theirs = OpenClipCheckpoint.read(checkpoint)
    step = theirs.step
    if step is None:
        if settings.train.epoch_samples is None:
            raise SettingsError(f"--resume {checkpoint}: the length of its epochs is unknown: give --train-num-samples")
        step = settings.data.steps_for(theirs.epoch * settings.train.epoch_samples)
    if world.is_main:
        announce(f"resume   {checkpoint} of open_clip: epoch {theirs.epoch}, step {step}; the data order begins anew")
    train = StepState(scaler=theirs.scaler if settings.train.precision == "fp16" else {})
    samples = settings.data.samples_before(step)
    return CheckpointMeta(TrainState(step=step, samples=samples, data=DataState(step=step), train_step=train))


def download_newer(remote_sync: RemoteSync, run_folder: Path) -> None:
    """Download the newest remote checkpoint if it is newer than all intact ones here.

    Raises SettingsError: the download fails, and there is no intact checkpoint here.
    """
    remote, folder = remote_sync.remote, run_folder / CHECKPOINTS
    found = next((path for path in store.whole(folder) if store.fault(path) is None), None)
    marker = None if found is None else store.marker_of(found)
    if remote_sync.last_serial <= (0 if marker is None else marker.serial):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The run appends to these files. They are downloaded before the checkpoint: a process that is killed in between
        # still finds the remote checkpoint newer, and downloads both again.
        for name in (METRICS, f"{CHECKPOINTS}/{store.BEST}"):
            try:
                if (content := with_retries((remote / name).read)) is not None:
                    atomic_write.replace(run_folder / name, content)
            except Exception as error:  # every backend has errors of its own
                text = f"--remote-sync: {remote.shown} cannot be copied: {message_of(error)}"
                raise SettingsError(text) from error
        download(remote, folder)
    except SettingsError as error:
        if found is None:
            raise
        logger.warning(f"{error}; the newest one here is used")


def carried_over(settings: Settings, state: TrainState | None, world: World, *, own_lanes: bool) -> Settings:
    """The settings of a resumed run, with the values that were resolved when it began. Collective.

    Args:
        settings: resolved for these ranks and workers, this machine.
        state: of the checkpoint; None for a new run.
        own_lanes: whether the user set data.lanes.
    """
    lanes = None if state is None or own_lanes else state.data.lanes_total
    if state is not None and lanes is not None and world.size <= lanes <= min(settings.data.batch_sizes):
        settings = _with(settings, "data", lanes=lanes)
        shards = state.data.fingerprint.get("data.shuffle.shards")
        if settings.data.shuffle.open_shards is None and isinstance(shards, int) and shards > 0:
            shuffle = settings.data.shuffle.model_copy(update={"shards": shards})
            settings = _with(settings, "data", shuffle=shuffle)
    if settings.train.precision == "auto":
        saved = cast(Precision, "auto" if state is None else state.train_step.precision)
        settings = _with(settings, "train", precision=resolve_precision(saved, world))
    return settings


def noted(settings: Settings) -> dict[str, object]:
    """The settings that determine the weights, by dotted key, for a checkpoint's state."""
    values = by_key(portable(settings))
    return {
        key: redact_value(value) if isinstance(value, str) else value
        for key, value in values.items()
        if TRAINS.match(key) and not BESIDES.fullmatch(key)
    }


def changes(settings: Settings, before: Mapping[str, object]) -> list[str]:
    """Differences between `noted(settings)` and a checkpoint's: 'KEY OLD -> NEW'; keys that it lacks are left out."""
    return [
        f"{key} {shown(before[key])} -> {shown(value)}"
        for key, value in noted(settings).items()
        if key in before and before[key] != value
    ]


def _with(settings: Settings, section: str, **values: Any) -> Settings:
    return settings.model_copy(update={section: getattr(settings, section).model_copy(update=values)})

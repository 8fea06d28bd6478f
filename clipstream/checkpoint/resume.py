"""What a process takes over from earlier processes of its run: the checkpoint, downloaded if the remote copy is newer.

The settings of checkpoints and the run's folder enter; a `Resumed` leaves, which loads the checkpoint into a step.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clipstream.checkpoint import store
from clipstream.checkpoint.async_writer import AsyncWriter
from clipstream.checkpoint.remote_sync import (
    CHECKPOINTS,
    METRICS,
    RemoteDir,
    RemoteSync,
    as_settings_error,
    download,
    with_retries,
)
from clipstream.checkpoint.state import CheckpointMeta, OpenClipCheckpoint, load, read_meta
from clipstream.data.order.lanes import DataState
from clipstream.data.settings import DataSettings
from clipstream.distributed.world import World
from clipstream.errors import CopyError, SettingsError, errors_as
from clipstream.models.model_config import AVERAGED_ADAPTER, AVERAGED_FILE
from clipstream.storage.shard_url import ShardURL
from clipstream.training.parallel import reshard
from clipstream.training.settings import CheckpointSettings, TrainSettings
from clipstream.training.state import StepState, TrainState
from clipstream.training.step import TrainStep
from clipstream.utils import atomic_write
from clipstream.utils.logs import announce, logger

UNREADABLE = "mend the disk or its connection, or move the checkpoint away to go on from an older one"


@dataclass(frozen=True)
class Resumed:
    """Where a process goes on; the same on every rank, but for `remote_sync`."""

    checkpoint: Path | None  # local folder, or a file of open_clip; None for a new run
    remote_sync: RemoteSync | None  # of the run, on rank 0, if `checkpoint.remote_sync` is set
    meta: CheckpointMeta | None = None  # of the checkpoint, once it is read

    @property
    def state(self) -> TrainState | None:
        """The position of the run; None for a new one."""
        return None if self.meta is None else self.meta.train

    @property
    def step(self) -> int:
        """Steps done."""
        return 0 if self.state is None else self.state.step

    def at(self, checkpoint: Path) -> Resumed:
        """Where the run goes on that has saved this checkpoint."""
        return replace(self, checkpoint=checkpoint, meta=read_meta(checkpoint))

    def with_meta(self, train: TrainSettings, data: DataSettings, world: World) -> Resumed:
        """Read what the checkpoint says of its run; of one of open_clip, its step by epochs of the present settings.

        Raises SettingsError: it cannot be read, or the epochs of open_clip's have no known length.
        """
        if self.checkpoint is None:
            return self
        if not self.checkpoint.is_file():
            return replace(self, meta=read_meta(self.checkpoint))
        theirs = OpenClipCheckpoint.read(self.checkpoint)
        step = theirs.global_step
        if step is None:
            if train.epoch_samples is None:
                raise SettingsError(f"--resume {self.checkpoint}: requires --train-num-samples")
            step = data.steps_for(theirs.epoch * train.epoch_samples)
        if world.is_main:
            name = f"{self.checkpoint} of open_clip: epoch {theirs.epoch}, step {step}"
            announce(f"resume   {name}; the data and the moments of the optimizer start anew")
        scaler = StepState(scaler=theirs.scaler or {} if train.precision == "fp16" else {})
        samples = data.samples_before(step)
        start = TrainState(step=step, samples=samples, data=DataState(step=step), train_step=scaler)
        return replace(self, meta=CheckpointMeta(start))

    def require_copy(self, world: World) -> None:
        """Check at the end that the run is copied. Collective. Raises CopyError: the remote copy is behind."""
        if behind := world.on_main(lambda: None if self.remote_sync is None else self.remote_sync.behind()):
            raise CopyError(f"the run is complete, but {behind}; --resume latest copies the rest")

    def restore(self, writer: AsyncWriter, step: TrainStep, good: Sequence[int]) -> int | None:
        """Load the newest undamaged checkpoint with one of the steps `good`, and return its step. Collective."""
        chosen = writer.whole(sorted(good, reverse=True), instead=self.checkpoint)
        return None if chosen is None else load_into(step, chosen).step


def load_into(step: TrainStep, checkpoint: Path, start: TrainState | None = None) -> TrainState:
    """Load weights, moments, averages, loss scale and random states; returns the position of the run, of a checkpoint
    of open_clip `start`. Collective.

    Raises SettingsError: as `checkpoint.state.load`.
    """
    reshard(step.towers)
    state = load(checkpoint, towers=step.towers, optimizer=step.optimizer, world=step.world, start=start)
    step.load_state(state.train_step)
    if step.averages is not None:
        updates, adapters, clip = state.train_step.ema_updates, step.towers.adapters, step.towers.clip
        own = None if adapters is None or updates is None else adapters.read(checkpoint / AVERAGED_ADAPTER, clip)
        step.averages.load(checkpoint / AVERAGED_FILE, updates, clip, own)
    return state


def find(
    settings: CheckpointSettings, run_folder: Path, world: World, is_stopping: Callable[[], bool] = lambda: False
) -> Resumed:
    """The checkpoint that `--resume` names, on a local disk, and the run's remote copy. Collective.

    Raises SettingsError: there is none, it is damaged, or some rank does not see it; the remote copy cannot be read, or
    holds a run, and this is a new one.
    """
    resume, folder, remote_sync = settings.resume, run_folder / CHECKPOINTS, None
    if settings.remote_sync is not None and world.is_main:
        remote = RemoteDir(settings.remote_sync, "--remote-sync") / run_folder.name
        remote_sync = RemoteSync(remote, run_folder, settings, is_stopping)

    def on_main() -> Path | None:
        if remote_sync is not None:
            remote = remote_sync.remote
            with as_settings_error(remote, "read"):
                whole = with_retries((remote / CHECKPOINTS).whole)
            if whole and resume is None:
                advice = "continue it with --resume auto, or choose another --name"
                raise SettingsError(f"--remote-sync: {remote.shown} has a run: {advice}")
            remote_sync.begin(whole)
            if not whole:
                logger.info(f"--remote-sync: {remote.shown} has no complete checkpoint yet")
        if resume is not None and ShardURL(resume).scheme is not None:
            found = download(RemoteDir(resume, "--resume"), folder)
            if found is None:
                raise SettingsError(f"--resume: no complete checkpoint in {RemoteDir(resume, '').shown}")
            return found
        intact = None
        if remote_sync is not None and resume in ("latest", "auto"):
            intact = newest_intact(remote_sync, run_folder)
        return store.find(folder, resume, intact=intact)

    return Resumed(agree(on_main, world, folder if resume in ("latest", "auto") else None), remote_sync)


def agree(find: Callable[[], Path | None], world: World, folder: Path | None = None) -> Path | None:
    """The checkpoint that rank 0 finds, checked to be the same on every rank; every rank calls this. In the folder in
    which the newest one is searched, no rank may see one as new that rank 0 does not.

    Raises SettingsError: as `find`, or a rank sees other checkpoints than rank 0.
    """

    def look() -> Path | SettingsError | None:
        try:
            with errors_as(SettingsError, "--resume", OSError, advice=UNREADABLE):
                return find()
        except SettingsError as error:
            return error  # raised below, unless another rank has what this one lacks

    answer = world.on_main(look)
    found: Path | None = None if isinstance(answer, SettingsError) else answer
    with errors_as(SettingsError, "--resume", OSError, advice=UNREADABLE):
        mine = found if found is None else found.stat().st_size if found.is_file() else store.marker_of(found)
        here = {} if folder is None else {name: marker.serial for name, marker in store.markers(folder).items()}
    ranks = world.gather_objects((socket.gethostname(), mine, here))
    main, theirs, there = ranks[0]
    serial = theirs.serial if isinstance(theirs, store.Marker) else 0
    for rank, (host, sees, names) in enumerate(ranks):
        newer = [name for name, number in names.items() if number >= serial and name not in there]
        fault = (
            f"has {newer[0]} in {folder}, which rank 0 ({main}) does not see" if newer
            else f"does not see {found}, which rank 0 ({main}) found" if found is not None and sees is None
            else f"has another {found} than rank 0 ({main})" if sees != theirs else ""
        )  # fmt: skip
        if fault:
            advice = "the folder of the runs (--logs) must be shared by all nodes"
            raise SettingsError(f"--resume: rank {rank} ({host}) {fault}: {advice}")
    if isinstance(answer, SettingsError):
        raise answer
    return found


def newest_intact(remote_sync: RemoteSync, run_folder: Path) -> Path | None:
    """The newest intact checkpoint here, once the newest remote one is downloaded if that is newer; None without one.

    Raises SettingsError: the download fails, and there is no intact checkpoint here.
    """
    remote, folder = remote_sync.remote, run_folder / CHECKPOINTS
    found = next((path for path in store.whole(folder) if store.fault(path) is None), None)
    marker = None if found is None else store.marker_of(found)
    if remote_sync.last_serial <= (0 if marker is None else marker.serial):
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The run appends to these files. They are downloaded before the checkpoint: a process that is killed in between
        # still finds the remote checkpoint newer, and downloads both again.
        for name in (METRICS, f"{CHECKPOINTS}/{store.BEST}"):
            with as_settings_error(remote, "copy"):
                if (content := with_retries((remote / name).read)) is not None:
                    atomic_write.replace(run_folder / name, content)
        return download(remote, folder) or found
    except SettingsError as error:
        if found is None:
            raise
        logger.warning(f"{error}; the newest local checkpoint is used")
        return found

"""Owns what a process takes over from earlier ones of its run: the checkpoint, from here or from its remote copy, and
the settings that go with it.

It loads no weights, and decides nothing about the data's order (see `data.sources`).
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from clipstream import durable
from clipstream.config import Settings, openers
from clipstream.data.shards import scheme_of
from clipstream.errors import SettingsError
from clipstream.training import place, shelf
from clipstream.training.mirror import Mirror
from clipstream.training.place import CHECKPOINTS, METRICS, Place, patiently
from clipstream.training.precision import settle
from clipstream.world import World


def mirror_of(settings: Settings, world: World) -> Mirror | None:
    """The run's remote copy, on rank 0, if it is to have one."""
    url = settings.checkpoint.remote_sync
    if url is None or not world.is_main:
        return None
    return Mirror(Place(url, "--remote-sync") / str(settings.run.name), settings.run_folder, settings.checkpoint)


def find(settings: Settings, world: World, mirror: Mirror | None) -> Path | None:
    """The checkpoint that `--resume` means, in the run's folder or in another one here. Every rank calls this.

    Raises:
        SettingsError: there is none where there must be one, it is damaged, or a rank does not see it.
    """
    return shelf.agree(partial(_look, settings, mirror), world)


def _look(settings: Settings, mirror: Mirror | None) -> Path | None:
    """On rank 0."""
    resume, folder = settings.checkpoint.resume, settings.run_folder / CHECKPOINTS
    if mirror is not None:
        _look_there(mirror, new=resume is None)
    if resume is not None and scheme_of(resume) is not None:
        found = place.find(Place(resume, "--resume"), folder)
        if found is None:
            raise SettingsError(f"--resume: there is no whole checkpoint in {Place(resume, '').shown}")
        return found
    if mirror is not None and resume in ("latest", "auto"):
        _catch_up(mirror, settings.run_folder)
    return shelf.find(folder, resume)


def _look_there(mirror: Mirror, *, new: bool) -> None:
    """What the copy's place holds of earlier processes.

    Raises:
        SettingsError: it cannot be read; or another run's checkpoints are there, and this is a new one.
    """
    try:
        whole = patiently((mirror.place / CHECKPOINTS).whole)
    except Exception as error:  # every backend has errors of its own
        raise SettingsError(f"--remote-sync: {mirror.place.shown} cannot be read: {place.said(error)}") from error
    if whole and new:
        raise SettingsError(
            f"--remote-sync: {mirror.place.shown} holds a run: go on with it by --resume auto, or start another run by "
            "another --name"
        )
    mirror.last_serial = max((marker.serial for marker in whole.values()), default=0)


def _catch_up(mirror: Mirror, run_folder: Path) -> None:
    """Fetch the copy's newest checkpoint where it is newer than all whole ones here: the run has been on another
    machine, or those here are damaged.

    Raises:
        SettingsError: nothing is here, and what is there cannot be had.
    """
    folder = run_folder / CHECKPOINTS
    found = next((path for path in shelf.whole(folder) if shelf.fault(path) is None), None)
    marker = None if found is None else shelf.marker_of(found)
    if mirror.last_serial <= (0 if marker is None else marker.serial):
        return
    try:
        _fetch_beside(mirror.place, run_folder)
        place.find(mirror.place, folder)
    except SettingsError as error:
        if found is None:
            raise
        print(f"warning: {error}; the newest one here is used", file=sys.stderr, flush=True)


def _fetch_beside(remote: Place, folder: Path) -> None:
    """What the run goes on writing, and would be lost there with the next copy: its metrics, which step is best.

    Before the checkpoint: a start that is killed in between then finds the copy newer, and fetches both again.

    Raises:
        SettingsError: it cannot be read there, or written here.
    """
    (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    for name in (METRICS, f"{CHECKPOINTS}/{shelf.BEST}"):
        try:
            content = patiently((remote / name).read)
            if content is not None:
                durable.replace(folder / name, content)
        except Exception as error:  # every backend has errors of its own
            raise SettingsError(f"--remote-sync: {remote.shown} cannot be copied: {place.said(error)}") from error


def carried_over(settings: Settings, state: dict[str, Any] | None, world: World, *, own_lanes: bool) -> Settings:
    """The settings of a run that goes on, with what was resolved when it began. Collective.

    Args:
        settings: resolved for these ranks and workers, this machine.
        state: the checkpoint's; None for a new run.
        own_lanes: whether the user set data.lanes.
    """
    if state is not None and not own_lanes and _could_have(settings, int(state["data"]["lanes_total"]), world):
        settings = _with(settings, "data", lanes=state["data"]["lanes_total"])
    if settings.train.precision == "auto":
        settings = _with(settings, "train", precision=settle((state or {}).get("precision", "auto"), world))
    return settings


def _could_have(settings: Settings, lanes: int, world: World) -> bool:
    """Whether so many lanes go with the settings, where only the order's other settings can have changed."""
    if not world.size <= lanes <= min(settings.data.batch_sizes):
        return False
    if not settings.data.sampling.deals_shards:
        return True
    return all(len(opener.names) >= lanes for opener in openers(settings).values())


def _with(settings: Settings, section: str, **values: Any) -> Settings:
    return settings.model_copy(update={section: getattr(settings, section).model_copy(update=values)})

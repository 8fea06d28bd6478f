"""Owns checkpoints: a folder that is whole or does not count, and the choice of the one to go on from.

    checkpoints/step_00000100/   open_clip_model.safetensors, open_clip_config.json, tokenizer files (the model)
                                 averaged.safetensors (the model with averaged weights, where there are any)
                                 optimizer.pt, rng.pt (all ranks' random states), state.json (step, samples, data, …)
                                 COMPLETE (sizes of all files, and the save's number)
    checkpoints/latest           the newest one's name

A save is written beside, under a name that ends in `.tmp`, flushed to disk, marked COMPLETE and then renamed. Wherever
a crash hits, what was whole before stays, until the next one is. It never decides when to save, and never uploads.
"""

from __future__ import annotations

import contextlib
import errno
import json
import pickle
import re
import shutil
import sys
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from clipstream import durable
from clipstream.data.loader import merge_states
from clipstream.errors import SettingsError
from clipstream.model.pretrained import AVERAGED_FILE
from clipstream.training.precision import random_state, set_random_state
from clipstream.training.sharding import full_state, shard_like, shard_state
from clipstream.versions import versions
from clipstream.world import World

MARKER, WEIGHTS, OPTIMIZER, RANDOM, STATE, LATEST = (
    "COMPLETE",
    "open_clip_model.safetensors",
    "optimizer.pt",
    "rng.pt",
    "state.json",
    "latest",
)
_NAME = re.compile(r"step_\d{8}(\.old)?")  # .old: moved aside for a new save of the same step
TOLD = 300  # characters of a mismatch that a message repeats
_FULL = (errno.ENOSPC, errno.EDQUOT)

State = dict[str, Any]


class SavedTowers(Protocol):
    """What a checkpoint needs of the towers."""

    clip: Any

    def save_pretrained(self, folder: Path) -> None:
        """Write weights, configuration and tokenizer."""


def save(
    folder: Path,
    step: int,
    *,
    towers: SavedTowers,
    optimizer: torch.optim.Optimizer,
    state: State,
    world: World,
    keep_last: int,
    averaged: dict[str, torch.Tensor] | None = None,
) -> Path | None:
    """Write a checkpoint; every rank calls this, rank 0 writes, and all return when it is done.

    Args:
        folder: LOGS/NAME/checkpoints.
        step: steps done.
        towers: the model, without wrappers, whole at least on rank 0.
        state: this rank's; JSON-able. `state["data"]` is the rank's part of the data's state, the ranks' parts are
            saved as one. The rest is taken from rank 0.
        keep_last: so many of the newest stay.
        averaged: the model's tensors with averaged weights, by name, on rank 0; None for none.

    Returns:
        The checkpoint's folder; None where the disk is full: that is said on stderr, and the older ones are kept.

    Raises:
        OSError: the folder cannot be written for another reason.
    """
    told = world.gather_objects((state.get("data"), random_state(world.device)))
    moments = full_state(optimizer, kept=world.is_main)
    written: Path | None = None
    if world.is_main:
        data = [part for part, _ in told if part is not None]
        merged = {**state, "step": step, "versions": versions()}
        if data:
            merged["data"] = merge_states(data)
        try:
            written = _write(folder, step, towers, moments, merged, [random for _, random in told], averaged)
        except Exception as error:
            if not _disk_is_full(error, folder):
                raise
            _clear(folder)
            print(
                f"warning: the disk of {folder} is full: step {step} is not saved; {_kept(folder)}",
                file=sys.stderr,
                flush=True,
            )
        else:
            _keep(folder, keep_last)
    result: Path | None = world.broadcast_object(written)
    return result


def agree(folder: Path, resume: str | None, world: World) -> Path | None:
    """The checkpoint that rank 0 finds, as `find`; every rank calls this, and has to see it.

    Raises:
        SettingsError: as `find`, or a rank does not see rank 0's checkpoint.
    """
    found: Path | None = world.broadcast_object(find(folder, resume) if world.is_main else None)
    sees = world.gather_objects(found is None or _serial(found) is not None)
    if not all(sees):
        raise SettingsError(
            f"--resume: rank {sees.index(False)} does not see {found}, which rank 0 found: "
            "the folder of the runs (--logs) must be shared by all nodes"
        )
    return found


def find(folder: Path, resume: str | None) -> Path | None:
    """The checkpoint to go on from.

    Args:
        folder: LOGS/NAME/checkpoints; it need not be there.
        resume: 'latest' (there must be one), 'auto' (if there is one), the path of a checkpoint or of a run's folder
            (its newest), or None.

    Raises:
        SettingsError: there is none, or the one that is named is not whole.
    """
    if resume is None:
        return None
    if resume not in ("latest", "auto"):
        path = Path(resume)
        if _serial(path) is not None:
            return path
        if path.is_dir() and not _NAME.fullmatch(path.name):
            inner = path / "checkpoints" if (path / "checkpoints").is_dir() else path
            if newest := _newest(inner):
                return newest
        raise SettingsError(f"--resume {resume}: no whole checkpoint there (a whole one has a file {MARKER})")
    newest = _newest(folder)
    if newest is None and resume == "latest":
        raise SettingsError(f"--resume latest: no whole checkpoint in {folder}; --resume auto starts without one")
    if newest is None and (damaged := _candidates(folder)):
        raise SettingsError(
            f"--resume auto: none of the checkpoints in {folder} is whole ({', '.join(p.name for p in damaged)}); "
            "move them away to start anew"
        )
    return newest


def of_step(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies in LOGS/NAME/checkpoints."""
    return folder / f"step_{step:08d}"


def is_whole(checkpoint: Path) -> bool:
    """Whether it is there, and complete."""
    return _serial(checkpoint) is not None


def read_state(checkpoint: Path) -> State:
    """The checkpoint's state.json: step, samples, data, versions and what else was given to `save`."""
    state: State = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    return state


def load(checkpoint: Path, *, towers: SavedTowers, optimizer: torch.optim.Optimizer, world: World) -> State:
    """Put weights, optimiser and random states back, on every rank; the state.

    The optimiser's own numbers (betas, weight decay, …) stay those of the present settings. Random states are put back
    on ranks that the saving run had; others keep theirs. Nothing random may happen between this and the first step.

    Raises:
        SettingsError: the checkpoint is of another model, or of another choice of trainable parameters.
    """
    try:
        present = towers.clip.state_dict()
        weights = load_file(checkpoint / WEIGHTS)
        towers.clip.load_state_dict({name: shard_like(weight, present.get(name)) for name, weight in weights.items()})
        # Of what is to be sharded each rank reads only its part.
        sharded = any(isinstance(tensor, DTensor) for tensor in present.values())
        saved = torch.load(checkpoint / OPTIMIZER, map_location="cpu", weights_only=True, mmap=sharded)
        numbers = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        optimizer.load_state_dict(shard_state(saved, optimizer))
        for group, own in zip(optimizer.param_groups, numbers, strict=True):
            group.update(own)
        states = torch.load(checkpoint / RANDOM, map_location="cpu", weights_only=True)
    except OSError as error:
        raise SettingsError(f"{checkpoint} cannot be read: {error}") from error
    except (RuntimeError, ValueError, KeyError, SafetensorError, pickle.UnpicklingError) as error:
        said = " ".join(str(error).split())
        raise SettingsError(
            f"{checkpoint} does not fit this run's model and optimiser: {said[:TOLD]}{' …' * (len(said) > TOLD)}"
        ) from error
    if world.rank < len(states):
        set_random_state(states[world.rank], world.device)
    return read_state(checkpoint)


def _write(
    folder: Path,
    step: int,
    towers: SavedTowers,
    moments: dict[str, Any],
    state: State,
    random_states: list[Any],
    averaged: dict[str, torch.Tensor] | None,
) -> Path:
    """Write all files beside, flush, mark, rename."""
    folder.mkdir(parents=True, exist_ok=True)
    _clear(folder)
    final = of_step(folder, step)
    draft = folder / f"{final.name}.tmp"
    draft.mkdir()
    towers.save_pretrained(draft)
    if averaged is not None:
        save_file(averaged, draft / AVERAGED_FILE, metadata={"format": "pt"})
    torch.save(moments, draft / OPTIMIZER)
    torch.save(random_states, draft / RANDOM)
    (draft / STATE).write_text(json.dumps(state, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    files = sorted(path for path in draft.rglob("*") if path.is_file())
    for path in files:
        durable.flush(path)
    serial = max((_serial(path) or 0 for path in _candidates(folder)), default=0) + 1
    sizes = {str(path.relative_to(draft)): path.stat().st_size for path in files}
    (draft / MARKER).write_text(json.dumps({"serial": serial, "step": step, "files": sizes}), encoding="utf-8")
    for path in (draft / MARKER, *(p for p in draft.rglob("*") if p.is_dir()), draft):
        durable.flush(path)
    aside = folder / f"{final.name}.old"
    if final.exists():
        _remove(aside)
        final.rename(aside)
    draft.rename(final)
    durable.flush(folder)
    durable.replace(folder / LATEST, f"{final.name}\n".encode())
    _remove(aside)
    return final


def _candidates(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []


def _serial(checkpoint: Path) -> int | None:
    """The save's number in its folder of checkpoints; None where the checkpoint is not whole.

    A number of its own, as steps do not tell the newest: a run that goes on from an older checkpoint counts steps
    again.
    """
    try:
        marker = json.loads((checkpoint / MARKER).read_text(encoding="utf-8"))
        whole = all((checkpoint / name).stat().st_size == size for name, size in marker["files"].items())
        return int(marker["serial"]) if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _whole(folder: Path) -> list[Path]:
    """The whole checkpoints, newest first."""
    found = [(serial, path) for path in _candidates(folder) if (serial := _serial(path)) is not None]
    return [path for _, path in sorted(found, reverse=True)]


def _newest(folder: Path) -> Path | None:
    """The newest whole checkpoint; a damaged one that should have been it is named on stderr."""
    whole = _whole(folder)
    with contextlib.suppress(OSError):
        pointed = folder / (folder / LATEST).read_text(encoding="utf-8").strip()
        if pointed not in whole and not (whole and whole[0].name == f"{pointed.name}.old"):
            instead = whole[0].name if whole else "none"
            print(f"warning: checkpoint {pointed} is damaged; the one before is used: {instead}", file=sys.stderr)
    return whole[0] if whole else None


def _kept(folder: Path) -> str:
    whole = _whole(folder)
    if not whole:
        return "there is no checkpoint yet: free some space"
    return f"the newest checkpoint is {whole[0].name}: free some space, or lower checkpoint.keep_last"


def _keep(folder: Path, keep_last: int) -> None:
    """Remove all but the newest whole ones, and what is not whole."""
    kept = _whole(folder)[:keep_last]
    for path in _candidates(folder):
        if path not in kept:
            _remove(path)


def _clear(folder: Path) -> None:
    """Remove what dead saves left."""
    for path in folder.glob("*.tmp"):
        _remove(path)


def _remove(path: Path) -> None:
    """Delete a checkpoint; its marker first, so that a half deleted one does not count."""
    if path.is_dir():
        with contextlib.suppress(FileNotFoundError):
            (path / MARKER).unlink()
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _disk_is_full(error: BaseException, folder: Path) -> bool:
    """Whether a write failed for want of space; torch's and safetensors' own errors carry no errno."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return True
        if "No space left" in str(cause) or "os error 28" in str(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    # torch's zip writer says it in many ways; all are RuntimeErrors on a disk without room.
    return isinstance(error, RuntimeError) and folder.is_dir() and shutil.disk_usage(folder).free < 1 << 20

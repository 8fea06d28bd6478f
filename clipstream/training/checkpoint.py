"""Owns what is in a checkpoint, and the way back from it into a run.

    step_00000100/   open_clip_model.safetensors, open_clip_config.json, tokenizer files (the model)
                     averaged.safetensors (the model with averaged weights, where there are any)
                     optimizer.safetensors (moments), rng.pt (all ranks' random states)
                     state.json (step, samples, data, …), COMPLETE (sizes and checksums of all files, the save's number)

Which checkpoints there are, and which stay, is `shelf`'s; when and how they are written, `saving`'s.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.tensor import DTensor

from clipstream import durable
from clipstream.errors import SettingsError
from clipstream.training import shelf
from clipstream.training.precision import set_random_state
from clipstream.training.sharding import shard_like, shard_state
from clipstream.training.tensors import TensorFile, metadata, read
from clipstream.world import World

WEIGHTS, OPTIMIZER, RANDOM, STATE = "open_clip_model.safetensors", "optimizer.safetensors", "rng.pt", "state.json"
FORMER_OPTIMIZER = "optimizer.pt"  # of checkpoints without checksums
GROUPS = "groups"
TOLD = 300  # characters of a mismatch that a message repeats

State = dict[str, Any]
Tensors = Mapping[str, torch.Tensor]


class SavedTowers(Protocol):
    """What a checkpoint needs of the towers."""

    clip: Any

    def modules(self) -> Iterator[nn.Module]:
        """All modules, as nn.Module has it."""

    def description(self) -> dict[str, bytes]:
        """The files beside the weights, by name: configuration and tokenizer."""


def moments(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimiser's state as tensors by name: `PARAMETER'S NUMBER.NAME`."""
    state: dict[int, dict[str, torch.Tensor]] = optimizer.state_dict()["state"]
    return {f"{index}.{name}": value for index, values in state.items() for name, value in values.items()}


def groups(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The optimiser's groups, as a file of tensors has them in its header."""
    return {GROUPS: json.dumps(optimizer.state_dict()["param_groups"])}


def packed(value: Any) -> bytes:
    """A value as torch.save writes it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def write(
    folder: Path,
    step: int,
    tensors: Mapping[str, TensorFile],
    described: Mapping[str, Mapping[str, str]],
    others: Mapping[str, bytes],
    after: int = 0,
) -> Path:
    """Write all files beside, flush, mark, rename; the checkpoint.

    Args:
        folder: of checkpoints.
        step: steps done.
        tensors: file -> its tensors.
        described: file -> the texts of its header.
        others: file -> its content.
        after: a number that saves have had elsewhere; this one's is larger.

    Raises:
        OSError: what was there stays as it is.
    """
    draft = shelf.begin(folder, shelf.folder_of(step), sum(file.nbytes() for file in tensors.values()))
    content = {name: file.parts(described.get(name, {})) for name, file in tensors.items()}
    content |= {name: [data] for name, data in others.items()}
    sizes, checksums = {}, {}
    for name, parts in content.items():
        path = draft / name
        path.parent.mkdir(parents=True, exist_ok=True)
        sizes[name], checksums[name] = durable.write(path, parts)
    return shelf.put(draft, shelf.Marker(shelf.next_serial(folder, after), step, sizes, checksums))


def read_state(checkpoint: Path) -> State:
    """The checkpoint's state.json: step, samples, data, versions and what else was saved in it."""
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
        # Of what is to be sharded each rank keeps only its part.
        weights = {name: shard_like(weight, present.get(name)) for name, weight in read(checkpoint / WEIGHTS)}
        towers.clip.load_state_dict(weights)
        numbers = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        optimizer.load_state_dict(_saved_moments(checkpoint, optimizer))
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


def _saved_moments(checkpoint: Path, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The saved state of the optimiser, cut as its parameters are."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    former = checkpoint / FORMER_OPTIMIZER
    if former.exists():
        sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
        return shard_state(torch.load(former, map_location="cpu", weights_only=True, mmap=sharded), optimizer)
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in read(checkpoint / OPTIMIZER):
        number, _, name = key.partition(".")
        index = int(number)
        like = parameters[index] if value.ndim and index < len(parameters) else None
        part = shard_like(value, like)
        # What is read lies in the file, which would take its room on the disk as long as the run lasts.
        state.setdefault(index, {})[name] = part.clone() if part is value else part
    return {"state": state, "param_groups": json.loads(metadata(checkpoint / OPTIMIZER)[GROUPS])}

"""The files of a checkpoint: how they are written, and how they are loaded into a run.

    step_00000100/   open_clip_model.safetensors, open_clip_config.json, tokenizer files (the model)
                     averaged.safetensors (the model with averaged weights, if the run has them)
                     optimizer.safetensors (moments), rng.pt (random states of all ranks)
                     state.json (CheckpointMeta), COMPLETE (sizes and checksums of all files, serial of the save)

`store` decides which checkpoints count and which are kept, `async_writer` when they are written.

Of a checkpoint of open_clip's trainer (`epoch_N.pt`), weights, loss scale and epoch are read. It has no position in the
data and no random states: both start anew, and so do the optimizer's moments.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pydantic
import torch
from pydantic import BeforeValidator
from safetensors import SafetensorError, safe_open

from clipstream.checkpoint import store
from clipstream.distributed.run_record import versions
from clipstream.distributed.world import World
from clipstream.errors import SettingsError, errors_as
from clipstream.models.model_config import ADAPTER
from clipstream.models.towers import Towers
from clipstream.models.weights import (
    check_finite,
    fit_positions,
    named_tensors,
    of_clip,
    plain,
    read_object,
    without_prefix,
)
from clipstream.text import shortened
from clipstream.training.optimizer_state import groups_from_json
from clipstream.training.parallel import shard_like
from clipstream.training.state import RandomState, TrainState, set_random_state
from clipstream.utils import atomic_write
from clipstream.utils.atomic_write import tensors_header
from clipstream.utils.section import OBJECTS, Count, parse_as
from clipstream.utils.torch_state import page_lock, page_unlock

WEIGHTS, OPTIMIZER, RANDOM, STATE = "open_clip_model.safetensors", "optimizer.safetensors", "rng.pt", "state.json"
VERSION = 1  # of state.json
GROUPS = "groups"
NUMBERS: dict[str, type[float]] = {"int": int, "float": float, "bool": bool}  # in an optimizer's state

Tensors = Mapping[str, torch.Tensor]
_Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class CheckpointMeta:
    """Content of state.json."""

    train: TrainState  # position of the run
    settings: dict[str, object] = field(default_factory=dict)  # the settings that the weights depend on, by dotted key
    versions: dict[str, str] = field(default_factory=versions)  # installed version by package

    def to_json(self) -> dict[str, object]:
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, text: bytes, path: Path) -> CheckpointMeta:
        """The content that `to_json` wrote, as the checkpoint `path` has it.

        Raises SettingsError: it has another format version, or a value of another type.
        """
        with errors_as(SettingsError, f"{path / STATE} is invalid", ValueError):
            values = parse_as(dict[str, Any], text)
            version = values.pop("version", 0)
            found = parse_as(cls, values) if version == VERSION else None
        if found is None:
            raise SettingsError(
                f"{path} has checkpoint format {version}, but this version reads {VERSION}: resume it with the version "
                f"that wrote it, or start a new run from its weights with --pretrained local-dir:{path}"
            )
        return found


class TensorFile:
    """The content of a file: memory for tensors of these names, types and (of sharded ones full) shapes, as `views` of
    the file's body by name, to be filled. With `pin`, a GPU that copies into it asynchronously, it is page-locked, if
    that is possible.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, pin: str | None = None) -> None:
        # Wide types first, as in safetensors: every tensor is aligned to its item size.
        self._layout = dict(sorted(_layout(tensors).items(), key=lambda one: (-one[1][0].itemsize, one[0])))
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in self._layout.items()}
        end = sum(sizes.values())
        if pin is None:
            memory = torch.empty(end, dtype=torch.uint8)
        else:  # shared with forked processes: of private pages the GPU might keep those of before the fork
            memory = torch.frombuffer(mmap.mmap(-1, max(end, 1)), dtype=torch.uint8)
        if pin is not None and page_lock(memory, pin):
            with contextlib.suppress(RuntimeError):  # not enough page-locked memory
                # torch allocates it in powers of two: up to twice the size.
                memory = torch.empty(end, dtype=torch.uint8, pin_memory=True)
        elif pin is not None:
            weakref.finalize(self, page_unlock, memory.data_ptr(), pin).atexit = False
        self._body = memory[:end]
        parts = torch.split(self._body, [*sizes.values()])
        self.views = {
            name: part.view(dtype).view(shape)
            for part, (name, (dtype, shape)) in zip(parts, self._layout.items(), strict=True)
        }

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether these have the same names, types and shapes."""
        return self._layout == _layout(tensors)

    def parts(self, metadata: Mapping[str, str]) -> list[Any]:
        """Header and body of the file, as buffers; the body is no copy."""
        return [tensors_header(metadata, self._layout), self._body.numpy()]

    def nbytes(self) -> int:
        """Size of the body in bytes."""
        return self._body.numel()


def read(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file with their names, on the CPU, one at a time.

    Raises OSError, SafetensorError: the file does not exist, or is no safetensors file.
    """
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            yield name, file.get_tensor(name)


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


def _layout(tensors: Mapping[str, torch.Tensor]) -> _Layout:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def moments(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state as tensors, named `INDEX OF THE PARAMETER.NAME`; of a number also with its type."""
    found: dict[str, torch.Tensor] = {}
    for index, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                found[f"{index}.{name}"] = value
            else:
                dtype = torch.float64 if isinstance(value, float) else torch.int64
                found[f"{index}.{name}:{type(value).__name__}"] = torch.tensor(value, dtype=dtype)
    return found


def write(
    folder: Path,
    step: int,
    tensors: Mapping[str, TensorFile],
    headers: Mapping[str, Mapping[str, str]],
    others: Mapping[str, bytes],
    after: int = 0,
) -> Path:
    """Write a checkpoint as a draft, flush it, and rename it; return its path.

    Args:
        headers: metadata of the header by file.
        others: content by file.
        after: a serial used in a remote copy; this save's is larger.

    Raises OSError: a file could not be written; the existing checkpoints are unchanged.
    """
    draft = store.begin(folder, store.folder_of(step), sum(file.nbytes() for file in tensors.values()))
    content = {name: file.parts(headers.get(name, {})) for name, file in tensors.items()}
    content |= {name: [data] for name, data in others.items()}
    sizes, checksums = {}, {}
    for name, parts in content.items():
        path = draft / name
        if path.parent != draft:  # which may be away, and is not made anew
            path.parent.mkdir(exist_ok=True)
        sizes[name], checksums[name] = atomic_write.write(path, parts)
    return store.commit(draft, store.Marker(store.next_serial(folder, after), step, sizes, checksums))


def read_meta(checkpoint: Path) -> CheckpointMeta:
    """The checkpoint's state.json. Raises SettingsError: it cannot be read, or has another format version."""
    with errors_as(SettingsError, f"cannot read {checkpoint / STATE}", OSError):
        text = (checkpoint / STATE).read_bytes()
    return CheckpointMeta.from_json(text, checkpoint)


def load(
    checkpoint: Path, *, towers: Towers, optimizer: torch.optim.Optimizer, world: World, start: TrainState | None = None
) -> TrainState:
    """Load weights, optimizer and random states, on every rank; return the position of the run.

    The optimizer's hyperparameters (betas, weight decay, …) stay those of the present settings, but for those that its
    steps changed. Random states are set on ranks that the saving run had. No random numbers may be drawn between this
    and the first step. For a checkpoint of open_clip, a file without a position, `start` is returned.

    Raises SettingsError: the checkpoint has another model, other trainable parameters, weights that are not finite, or
    another format version.
    """
    if checkpoint.is_file():
        assert start is not None, "a run saves what it loaded of open_clip before any rollback"
        OpenClipCheckpoint.read(checkpoint).load(towers)
        return start
    state = read_meta(checkpoint).train
    try:
        present = {**towers.clip.state_dict(), **dict(towers.clip.named_parameters())}
        # Each rank keeps only its part of sharded weights.
        saved = towers.skip_stored(check_finite(read(checkpoint / WEIGHTS), checkpoint / WEIGHTS))
        if (adapters := towers.adapters) is not None:
            saved = adapters.in_place_of(saved, checkpoint / ADAPTER, towers.clip)
        weights = {name: _part(name, weight, present.get(name), towers) for name, weight in saved}
        towers.clip.load_state_dict(weights)
        saved_moments = _saved_moments(checkpoint, optimizer, towers)
        optimizer.load_state_dict(saved_moments)
        _keep_dtypes(optimizer, saved_moments["state"])
    except OSError as error:
        raise SettingsError(f"cannot read {checkpoint}: {error}") from error
    except (RuntimeError, ValueError, LookupError, TypeError, SafetensorError) as error:
        what = f"{checkpoint} does not match the model and optimizer of this run"
        raise SettingsError(f"{what}: {short(error)}") from error
    set_random_state_of(checkpoint / RANDOM, world)
    return state


def set_random_state_of(path: Path, world: World) -> None:
    """Set this rank's random states, read from a file of all ranks'. Raises SettingsError: it does not hold them."""
    try:
        if not (states := parse_as(list[RandomState], read_object(path))):
            raise ValueError("an empty list")
        if world.rank < len(states):
            set_random_state(states[world.rank], world.device)
    except (OSError, RuntimeError, TypeError, ValueError) as error:  # of torch: bytes, or numbers, that are no state
        text = f"{RANDOM} in {path.parent} is invalid: use another checkpoint"
        raise SettingsError(f"{text} ({short(error)})") from error


def _keep_dtypes(optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, torch.Tensor | float]]) -> None:
    """Undo torch's cast to the dtype of the parameter, as of NAdam's product of momenta to bfloat16."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in state.items():
        loaded = optimizer.state[parameters[index]]
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and (not value.ndim or loaded[name].dtype != value.dtype):
                loaded[name] = value.to(loaded[name].device)


def _part(name: str, tensor: torch.Tensor, like: torch.Tensor | None, towers: Towers) -> torch.Tensor:
    """This rank's part of a tensor that a checkpoint has for a parameter; positions of other sizes are resampled."""
    return shard_like(fit_positions(name, tensor, like, towers.clip), like)


def _saved_moments(checkpoint: Path, optimizer: torch.optim.Optimizer, towers: Towers) -> dict[str, Any]:
    """The saved state of the optimizer, sharded as its parameters are, with the present hyperparameters.

    These decide where load_state_dict puts the tensors: the fused AdamW wants its step counts on the device.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    names = {id(p): name for name, p in towers.clip.named_parameters()}
    state: dict[int, dict[str, torch.Tensor | float]] = {}
    for key, value in read(checkpoint / OPTIMIZER):
        number, _, name = key.partition(".")
        index, (name, _, kind) = int(number), name.partition(":")
        if kind:
            state.setdefault(index, {})[name] = NUMBERS[kind](value.item())
            continue
        like = parameters[index] if value.ndim and index < len(parameters) else None
        part = value if like is None else _part(names.get(id(like), ""), value, like, towers)
        if name.endswith("_sq") and like is not None and value.shape != like.shape:
            part = part.clamp(min=0)  # bicubic, which overshoots
        # Not the tensor that is read, which maps its file, whose disk space would stay in use until the run ends; with
        # the strides of the parameter, as torch's fused optimizers pair both by their place in memory.
        if part is value:
            memory = like if like is not None and like.shape == value.shape else value
            part = torch.empty_like(memory, dtype=value.dtype, device=value.device).copy_(value)
        state.setdefault(index, {})[name] = part
    return {"state": state, "param_groups": groups_from_json(metadata(checkpoint / OPTIMIZER)[GROUPS], optimizer)}


SHOWN = 300  # characters of a mismatch that a message repeats


def _number(value: Any) -> Any:
    """A value of Python in place of a number of NumPy, or of a tensor with one number."""
    value = plain(value)
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


@pydantic.dataclasses.dataclass(config=OBJECTS)
class OpenClipCheckpoint:
    """Content of a file that open_clip's trainer wrote."""

    epoch: Annotated[Count, BeforeValidator(_number)]
    scaler: dict[str, Annotated[int | float, BeforeValidator(_number)]] | None  # of torch's GradScaler, with float16
    # optimizer steps done, which open_clip's main branch saves; None in 3.3.0
    global_step: Annotated[Count | None, BeforeValidator(_number)]
    path: Path
    weights: dict[str, torch.Tensor]  # tensors by open_clip's name

    @classmethod
    def read(cls, path: Path) -> OpenClipCheckpoint:
        """The content of a file; tensors stay on the disk until they are used. No code in it is run.

        Raises SettingsError: it is no checkpoint of open_clip's trainer.
        """
        try:
            found = read_object(path)
        except (OSError, ValueError) as error:
            text = f"--resume {path}: not a checkpoint of clipstream or of open_clip's trainer: {short(error)}"
            raise SettingsError(text) from error
        if not isinstance(found, dict) or not isinstance(found.get("state_dict"), dict) or "epoch" not in found:
            advice = f"start a new run from its weights with --pretrained {path}"
            raise SettingsError(f"--resume {path}: no epoch in it; {advice}")
        try:
            weights = without_prefix(dict(named_tensors(found["state_dict"])), of_clip, path)
            values = {key: found.get(key) for key in ("epoch", "scaler", "global_step")}
            return parse_as(cls, {**values, "path": path, "weights": weights})
        except ValueError as error:
            text = f"--resume {path}: not a checkpoint of open_clip's trainer: {short(error)}"
            raise SettingsError(text) from error

    def load(self, towers: Towers) -> None:
        """Load the weights, on every rank. Raises SettingsError: they are of another model."""
        if towers.adapters is not None:
            advice = f"start from its weights, --pretrained {self.path}"
            raise SettingsError(f"--resume {self.path}: has no adapters: {advice}")
        try:
            present = towers.clip.state_dict()
            saved = towers.skip_stored(check_finite(self.weights.items(), self.path))
            towers.clip.load_state_dict({name: shard_like(tensor, present.get(name)) for name, tensor in saved})
        except RuntimeError as error:
            raise SettingsError(f"--resume {self.path}: weights do not match the model: {short(error)}") from error


def short(error: Exception) -> str:
    return shortened(str(error), SHOWN) or type(error).__name__

"""Weights in files: read without running code in them, checked, and loaded into a model or its image tower.

A path enters; tensors by name leave, or a `SettingsError` that names what does not fit.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from open_clip.factory import (
    convert_state_dict,
    convert_to_custom_text_state_dict,
    resize_pos_embed,
    resize_text_pos_embed,
)
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed

from clipstream.errors import SettingsError
from clipstream.models.pretrained import ModelFiles

SHOWN = 4  # names in a message
TIMM_POSITIONS = "visual.trunk.pos_embed"


def finite(tensors: Iterable[tuple[str, torch.Tensor]], where: Path | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, and check each.

    Raises SettingsError: after the last one, if some are NaN or infinite; names the first of them.
    """
    broken = []
    for name, tensor in tensors:
        if not tensor.isfinite().all():
            broken.append(name)
        yield name, tensor
    if broken:
        listed = ", ".join(broken[:SHOWN]) + f" and {len(broken) - SHOWN} more" * (len(broken) > SHOWN)
        raise SettingsError(
            f"{where} holds weights that are NaN or infinite: {listed}; take other weights, as of an earlier checkpoint"
        )


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors by name, without the prefix of DDP.

    Raises SettingsError: the file is not a checkpoint of a model.
    """
    try:
        found: Any = load_file(path) if path.suffix == ".safetensors" else _unpickled(path)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise SettingsError(f"cannot read weights from {path}: {error}") from error
    found = found.get("state_dict", found) if isinstance(found, dict) else found
    if not isinstance(found, dict) or not found or not all(map(torch.is_tensor, found.values())):
        raise SettingsError(f"{path} is no checkpoint of a model: it does not hold tensors by name")
    # OpenAI's archives hold three numbers beside the weights.
    numbers = ("input_resolution", "context_length", "vocab_size")
    return {name.removeprefix("module."): tensor for name, tensor in found.items() if name not in numbers}


def _unpickled(path: Path) -> Any:
    """The content of a file of torch.save or TorchScript, read without running code that it names."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the pickle protocol and TorchScript
            try:
                return torch.load(path, map_location="cpu", weights_only=True)
            except RuntimeError:  # OpenAI's own files are TorchScript archives
                return dict(torch.jit.load(path, map_location="cpu").state_dict())  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError):
        raise
    except Exception as error:  # the unpickler may raise anything for a file that is not a pickle
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"a pickle that holds {named[1]} besides tensors" if named else "not a file of tensors"
        text = f"{path} is {what}; nothing in it was run: ask its maker for the weights as .safetensors"
        raise SettingsError(text) from error


def load_weights(clip: Any, state: dict[str, torch.Tensor], source: ModelFiles) -> None:
    """Load a checkpoint's tensors into the model; position embeddings are resampled to its picture and text size.

    Raises SettingsError: names or shapes differ; names the first of them.
    """
    state = convert_state_dict(clip, state)
    own = clip.state_dict()
    if "positional_embedding" in state and "positional_embedding" not in own:
        state = convert_to_custom_text_state_dict(state)
    # transformers kept a buffer of positions in its checkpoints until 4.31.
    if "text.transformer.embeddings.position_ids" not in own:
        state.pop("text.transformer.embeddings.position_ids", None)
    for name in ("logit_scale", "logit_bias"):
        if name in state and name in own:
            state[name] = state[name].reshape(own[name].shape)
    problems = _differences(own, state, shapes=False)
    if not problems:
        try:
            resize_pos_embed(state, clip)
            if not hasattr(clip, "text") or hasattr(clip.text, "positional_embedding"):
                resize_text_pos_embed(state, clip)
            old, new = state.get(TIMM_POSITIONS), own.get(TIMM_POSITIONS)
            if old is not None and new is not None and old.shape != new.shape:
                trunk = clip.visual.trunk
                state[TIMM_POSITIONS] = resample_abs_pos_embed(
                    old, list(trunk.patch_embed.grid_size), num_prefix_tokens=trunk.num_prefix_tokens
                )
        except (RuntimeError, AssertionError) as error:
            problems.append(f"position embeddings do not fit ({error})")
        problems += _differences(own, state)
    _refuse(problems, source.weights, source.label)
    clip.load_state_dict(dict(finite(state.items(), source.weights)))


def load_image_weights(trunk: Any, path: Path) -> None:
    """Load a file of timm's names into a timm tower, as timm does: the classifier is left out, and position embeddings
    are resampled.

    Raises SettingsError: names or shapes differ; names the first of them.
    """
    own, state = trunk.state_dict(), read_weights(path)
    convert = getattr(sys.modules[type(trunk).__module__], "checkpoint_filter_fn", None)
    if convert is not None and _differences(own, state):
        try:
            state = convert(state, trunk)
        except (KeyError, RuntimeError, AttributeError, TypeError, AssertionError):
            state = dict(state)  # of another tower: the differences are reported below
    heads = trunk.pretrained_cfg.get("classifier") or ()
    heads = (heads,) if isinstance(heads, str) else heads
    state = {name: tensor for name, tensor in state.items() if name in own or name.rpartition(".")[0] not in heads}
    # Files of early versions of torch lack these counts, which only a batch norm without momentum reads.
    state |= {name: own[name] for name in own if name.endswith(".num_batches_tracked") and name not in state}
    _refuse(_differences(own, state), path, f"timm's {trunk.pretrained_cfg.get('architecture')}")
    trunk.load_state_dict(dict(finite(state.items(), path)))


def _differences(own: dict[str, torch.Tensor], state: dict[str, torch.Tensor], *, shapes: bool = True) -> list[str]:
    """Names, and with `shapes` shapes, in which a file's tensors differ from the model's."""
    problems = [f"{name} is missing" for name in own if name not in state]
    problems += [f"{name} is not in the model" for name in state if name not in own]
    return problems + [
        f"{name} is {list(state[name].shape)} in the file and {list(own[name].shape)} in the model"
        for name in own
        if shapes and name in state and state[name].shape != own[name].shape
    ]


def _refuse(problems: list[str], path: Path | None, label: str) -> None:
    """Raise for a file that does not fit the model, with the first of the problems."""
    if problems:
        more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise SettingsError(f"{path} does not hold the weights of {label}:\n  " + "\n  ".join(problems[:SHOWN]) + more)

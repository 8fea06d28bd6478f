"""Loads a checkpoint's tensors into a model of open_clip, and refuses files and weights that do not fit."""

from __future__ import annotations

import re
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
from timm.layers.pos_embed import resample_abs_pos_embed

from clipstream.errors import SettingsError
from clipstream.models.pretrained import ModelFiles

SHOWN = 4  # names in a message


def refuse_nonfinite(tensors: Iterable[tuple[str, torch.Tensor]], where: Path | None) -> None:
    """Check all tensors.

    Raises:
        SettingsError: some are NaN or infinite; names the first of them.
    """
    for _ in finite(tensors, where):
        pass


def finite(tensors: Iterable[tuple[str, torch.Tensor]], where: Path | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, and check each; raises as `refuse_nonfinite` after the last one."""
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


TIMM_POSITIONS = "visual.trunk.pos_embed"


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors by name, without the prefix of DDP.

    Raises:
        SettingsError: the file is not a checkpoint of a model.
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

    Raises:
        SettingsError: names or shapes differ; names the first of them.
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
    problems = [f"{name} is missing" for name in own if name not in state]
    problems += [f"{name} is not in the model" for name in state if name not in own]
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
        problems += [
            f"{name} is {list(state[name].shape)} in the file and {list(own[name].shape)} in the model"
            for name in own
            if state[name].shape != own[name].shape
        ]
    if problems:
        more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise SettingsError(
            f"{source.weights} does not hold the weights of {source.label}:\n  " + "\n  ".join(problems[:SHOWN]) + more
        )
    refuse_nonfinite(state.items(), source.weights)
    clip.load_state_dict(state)

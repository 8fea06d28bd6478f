"""Weights in files: read without running code in them, checked, and loaded into a model or its image tower.

A path enters; tensors by name leave, or a `SettingsError` that names what does not fit.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from open_clip.factory import (
    convert_state_dict,
    convert_to_custom_text_state_dict,
    resize_pos_embed,
    resize_text_pos_embed,
)
from timm.layers import resample_abs_pos_embed

from clipstream.errors import SettingsError
from clipstream.models.model_config import CONFIG_FILE, HUB
from clipstream.models.pickles import named_tensors, read_object
from clipstream.models.pretrained import ModelFiles
from clipstream.utils.logs import logger

T = TypeVar("T")
SHOWN = 4  # names in a message
# First parts of the names in open_clip's models.
CLIP = {"visual", "text", "transformer", "token_embedding", "positional_embedding", "ln_final", "text_projection"}
CLIP |= {"logit_scale", "logit_bias"}
# Tensors that files hold beside the weights: three of OpenAI's, a mask, and the count of torch's AveragedModel.
NOT_WEIGHTS = {"input_resolution", "context_length", "vocab_size", "attn_mask", "n_averaged"}
# What torch puts into names at any place: compilation, FSDP and checkpointing.
WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
TRANSFORMERS = re.compile(r"(?:vision|text)_model\..*encoder\.layers\.")  # of its CLIPModel and SiglipModel
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


def of_clip(name: str) -> bool:
    """Whether a model of open_clip has parameters whose names begin as this one does."""
    return name.partition(".")[0] in CLIP


def read_weights(path: Path, fits: Callable[[str], bool] = of_clip) -> dict[str, torch.Tensor]:
    """The tensors in a file by the model's names, wherever in the file they are (see `without_prefix`).

    Args:
        fits: whether a name may be one of the model's.

    Raises SettingsError: the file is not a checkpoint of a model of open_clip or timm.
    """
    try:
        found = dict(named_tensors(read_object(path)))
    except (OSError, ValueError) as error:
        raise SettingsError(f"cannot read weights from {path}: {error}") from error
    if not found:
        raise SettingsError(f"{path} is no checkpoint of a model: it does not hold tensors by name")
    if theirs := next((name for name in found if TRANSFORMERS.search(name)), None):
        kind = "SiglipModel" if any(name.endswith(("logit_bias", "head.probe")) for name in found) else "CLIPModel"
        raise SettingsError(
            f"{path} holds the weights of transformers' {kind} (it has {theirs}), whose conversion is not supported "
            "yet: take the weights of this model for open_clip, by --model NAME --pretrained TAG, or by --model "
            f"{HUB}ORG/NAME of a repository with {CONFIG_FILE}"
        )
    taken = without_prefix(found, fits, path)
    return {name: tensor for name, tensor in taken.items() if name not in NOT_WEIGHTS}


def without_prefix(found: Mapping[str, T], fits: Callable[[str], bool], path: Path) -> dict[str, T]:
    """The values by name below the prefix after which most names fit, such as `state_dict.module.`, without this
    prefix; below the prefix of all if no name fits. Prefixes of weights without averaging go first.
    """
    names = {WRAPPERS.sub("", name): name for name in found}
    fitting, total = Counter[str](), Counter[str]()
    for name in names:
        for start in (0, *(dot.end() for dot in re.finditer(r"\.", name))):
            total[name[:start]] += 1
            fitting[name[:start]] += fits(name[start:])
    good = [prefix for prefix, count in fitting.items() if count and 2 * count >= total[prefix]]
    most = max((fitting[prefix] for prefix in good), default=0)
    best = sorted((prefix for prefix in good if fitting[prefix] == most), key=lambda prefix: "ema" in prefix.lower())
    common = os.path.commonprefix(list(names))  # noqa: RUF071 (no paths)
    prefix = best[0] if best else common[: common.rfind(".") + 1]
    if left := [name for name in names if not name.startswith(prefix)]:
        logger.warning(f"{path}: the weights are those below {prefix}; {len(left)} others, as {left[0]}, are left out")
    return {name.removeprefix(prefix): found[old] for name, old in names.items() if name.startswith(prefix)}


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
    own = trunk.state_dict()
    state = read_weights(path, own.__contains__)
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

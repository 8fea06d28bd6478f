"""Checkpoints of open_clip's trainer (`epoch_N.pt`): weights, loss scale and epoch.

The path of such a file enters; what it says of the run's position leaves, or its weights are loaded into a model.
open_clip saves no position in the data and no random states: both start anew, and so do the optimizer's moments.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pydantic
import torch
from pydantic import BeforeValidator

from clipstream.errors import SettingsError
from clipstream.models.towers import Towers
from clipstream.models.weights import finite, named_tensors, of_clip, plain, read_object, without_prefix
from clipstream.text import shortened
from clipstream.training.parallel import shard_like
from clipstream.utils.section import OBJECTS, Count, checked

SHOWN = 300  # characters of a mismatch that a message repeats


def _number(value: Any) -> Any:
    """A value of Python in place of a number of NumPy, or of a tensor with one number."""
    value = plain(value)
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


@pydantic.dataclasses.dataclass(config=OBJECTS)
class OpenClipCheckpoint:
    """Content of a file that open_clip's trainer wrote.

    Attributes:
        scaler: state of torch's GradScaler; None without float16.
        global_step: optimizer steps done, which open_clip's main branch saves; None in 3.3.0.
        weights: tensors by open_clip's name.
    """

    epoch: Annotated[Count, BeforeValidator(_number)]
    scaler: dict[str, Annotated[int | float, BeforeValidator(_number)]] | None
    global_step: Annotated[Count | None, BeforeValidator(_number)]
    path: Path
    weights: dict[str, torch.Tensor]

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
            raise SettingsError(
                f"--resume {path}: no epoch in it; start a new run from its weights with --pretrained {path}"
            )
        try:
            weights = without_prefix(dict(named_tensors(found["state_dict"])), of_clip, path)
            values = {key: found.get(key) for key in ("epoch", "scaler", "global_step")}
            return checked(cls, {**values, "path": path, "weights": weights})
        except ValueError as error:
            text = f"--resume {path}: not a checkpoint of open_clip's trainer: {short(error)}"
            raise SettingsError(text) from error

    def load(self, towers: Towers) -> None:
        """Load the weights, on every rank. Raises SettingsError: they are of another model."""
        if towers.adapters is not None:
            raise SettingsError(
                f"--resume {self.path}: has no adapters: start from its weights, --pretrained {self.path}"
            )
        try:
            present = towers.clip.state_dict()
            saved = towers.not_stored(finite(self.weights.items(), self.path))
            towers.clip.load_state_dict({name: shard_like(tensor, present.get(name)) for name, tensor in saved})
        except RuntimeError as error:
            raise SettingsError(f"--resume {self.path}: weights do not match the model: {short(error)}") from error


def short(error: Exception) -> str:
    return shortened(str(error), SHOWN) or type(error).__name__

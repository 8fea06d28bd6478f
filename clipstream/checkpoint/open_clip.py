"""Checkpoints of open_clip's trainer (`epoch_N.pt`): weights, optimizer, loss scale and epoch.

The path of such a file enters; what it says of the run's position leaves, or it is loaded into a model and an
optimizer. open_clip saves no position in the data and no random states: both begin anew.

An optimizer's state is saved by number, in the order of its parameter groups: parameters without weight decay and the
others, each in the model's order. The groups are formed again by the rules of open_clip 3.3.0 and of its main branch,
and the shapes of all moments are compared with those of the parameters. Groups of learning rates per layer are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import pydantic
import torch
from pydantic import BeforeValidator, with_config
from torch import nn
from typing_extensions import TypedDict

from clipstream.errors import SettingsError
from clipstream.models.towers import Towers
from clipstream.models.weights import finite, named_tensors, of_clip, plain, read_object, without_prefix
from clipstream.text import shortened
from clipstream.training.optim import UNDECAYED, exempt_patterns
from clipstream.training.parallel import shard_like
from clipstream.utils.section import OBJECTS, Count, checked

SHOWN = 300  # characters of a mismatch that a message repeats


def _number(value: Any) -> Any:
    """A value of Python in place of a number of NumPy, or of a tensor with one number."""
    value = plain(value)
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


_State = dict[str, Annotated[torch.Tensor | float | None, BeforeValidator(plain)]]


class _Group(TypedDict):
    """A group of parameters of an optimizer; its hyperparameters are not read."""

    params: list[int | str]


@with_config(OBJECTS)
class _Optimizer(TypedDict):
    """state_dict of an optimizer."""

    state: dict[int | str, _State]
    param_groups: list[_Group]


@pydantic.dataclasses.dataclass(config=OBJECTS)
class OpenClipCheckpoint:
    """Content of a file that open_clip's trainer wrote.

    Attributes:
        optimizer: state_dict of the optimizer, by number or by name; None for weights alone.
        scaler: state of torch's GradScaler; None without float16.
        global_step: optimizer steps done, which open_clip's main branch saves; None in 3.3.0.
        weights: tensors by open_clip's name.
    """

    epoch: Annotated[Count, BeforeValidator(_number)]
    optimizer: _Optimizer | None
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
                f"--resume {path}: no epoch and optimizer state in it; start a new run from its weights with "
                f"--pretrained {path}"
            )
        try:
            weights = without_prefix(dict(named_tensors(found["state_dict"])), of_clip, path)
            values = {key: found.get(key) for key in ("epoch", "optimizer", "scaler", "global_step")}
            return checked(cls, {**values, "path": path, "weights": weights})
        except ValueError as error:
            text = f"--resume {path}: not a checkpoint of open_clip's trainer: {short(error)}"
            raise SettingsError(text) from error

    def load(self, towers: Towers, optimizer: torch.optim.Optimizer) -> None:
        """Load weights and moments, on every rank; the optimizer's hyperparameters stay those of the settings.

        Raises SettingsError: they are of another model, optimizer, or choice of trained parameters.
        """
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
        if self.optimizer is None:
            raise SettingsError(f"--resume {self.path}: no optimizer state in it: use --pretrained {self.path}")
        names = {id(parameter): name.removeprefix("clip.") for name, parameter in towers.named_parameters()}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        by_name = self._states([name for name in names.values() if name in self.weights], towers)
        state: dict[int, dict[str, Any]] = {}
        for number, parameter in enumerate(parameters):
            values = by_name.pop(names[id(parameter)], None)
            if values is not None:
                state[number] = {key: _fitted(value, parameter) for key, value in values.items()}
        if by_name:
            raise SettingsError(
                f"--resume {self.path}: optimizer state of {len(by_name)} parameters that this run does not train, "
                f"such as {next(iter(by_name))}: lock the same towers"
            )
        try:
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        except (RuntimeError, ValueError, KeyError) as error:
            raise SettingsError(f"--resume {self.path}: the optimizer differs: {short(error)}") from error

    def _states(self, names: Sequence[str], towers: Towers) -> dict[str, dict[str, Any]]:
        """The state of each trained parameter by its name.

        Args:
            names: of the model's parameters, in order, trained or not.
        """
        assert self.optimizer is not None
        state, groups = self.optimizer["state"], self.optimizer["param_groups"]
        if any(isinstance(key, str) for key in state):  # of FSDP
            named = without_prefix({str(name): values for name, values in state.items()}, of_clip, self.path)
            if all(name in self.weights and self._fits(values, name) for name, values in named.items()):
                return named
        trainable = {
            name.removeprefix("clip.") for name, parameter in towers.named_parameters() if parameter.requires_grad
        }
        own = [name for name in names if name in trainable]
        for layout in self._layouts(own, towers):
            pairs = zip(groups, layout, strict=False)
            numbered: dict[int | str, str] = {
                n: name for group, part in pairs for n, name in zip(group["params"], part, strict=False)
            }
            sizes = [len(group["params"]) for group in groups] == [len(part) for part in layout]
            known = sizes and state.keys() <= numbered.keys()
            if known and all(self._fits(values, numbered[number]) for number, values in state.items()):
                return {numbered[number]: values for number, values in state.items()}
        counted = sum(len(group["params"]) for group in groups)
        raise SettingsError(
            f"--resume {self.path}: the optimizer has {counted} parameters in {len(groups)} groups, but this run "
            f"trains {len(own)}: lock the same towers (layer-wise learning rates are not supported), or start a new "
            f"run from the weights with --pretrained {self.path}"
        )

    def _layouts(self, names: Sequence[str], towers: Towers) -> Iterator[list[list[str]]]:
        """The groups of parameters by each rule of open_clip, in the orders that it makes them."""
        patterns, flat = exempt_patterns(towers.clip), {name for name in names if self.weights[name].ndim < 2}
        released = [name for name in names if name in flat or any(part in name for part in UNDECAYED)]
        main = [name for name in names if name in flat or any(fnmatchcase(name, pattern) for pattern in patterns)]
        for exempt in (released, main):
            groups = [exempt, [name for name in names if name not in set(exempt)]]
            groups = [group for group in groups if group]
            yield groups
            yield sorted(groups, key=lambda group: names.index(group[0]))  # as they come first

    def _fits(self, values: dict[str, Any], name: str) -> bool:
        """Whether the moments of a parameter have its shape."""
        shape = self.weights[name].shape
        return all(
            not isinstance(value, torch.Tensor) or value.ndim == 0 or value.shape == shape for value in values.values()
        )


def _fitted(value: Any, parameter: nn.Parameter) -> Any:
    """A value of an optimizer's state in memory, sharded as its parameter is; a count as torch's Adam has it."""
    if not isinstance(value, torch.Tensor):
        return torch.tensor(float(value)) if isinstance(value, (int, float)) else value
    return shard_like(value, parameter).clone() if value.ndim else value.clone()


def short(error: Exception) -> str:
    return shortened(str(error), SHOWN) or type(error).__name__

"""Optimizers and learning-rate schedules.

Settings and towers enter; a torch optimizer and the learning rate as a function of the step leave. Built-in ones are
entries of `OPTIMIZERS` and `SCHEDULES`; a user's own is named `module:Name`. Importing this does not import torch.

Schedules give the rate after the warm-up, from `peak` towards `min_lr` at step `total_steps`. With min_lr = 0, cosine
and constant equal open_clip's; const-cooldown equals it for every `min_lr`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import Field, field_validator

from clipstream.config.plugins import make_plugin, raised
from clipstream.config.section import PluginSection
from clipstream.errors import ClipstreamError, SettingsError

if TYPE_CHECKING:
    import torch
    from torch import nn

UNDECAYED = ("bn", "ln", "bias", "logit_scale")  # parts of names, from open_clip_train.main
Betas = tuple[float | None, float | None]  # None: the model's default


class OptimSettings(PluginSection):
    """The optimizer. `type` may be a user's own `package.module:Name`."""

    type: str = Field("adamw", description="adamw, or package.module:Name")
    lr: float = Field(5e-4, ge=0, description="peak learning rate")
    wd: float = Field(0.2, ge=0, description="weight decay")
    grad_clip_norm: float | None = Field(
        None, gt=0, allow_inf_nan=True, description="gradients with a larger norm are scaled down to it"
    )

    def summary(self, model: str) -> str:
        """Further values for the line at the start of a run, each after a comma."""
        return ""


class ScheduleSettings(PluginSection):
    """The learning rate over the steps. `type` may be a user's own `package.module:Name`."""

    type: str = Field(
        "cosine",
        description="course after the warm-up: cosine, constant, linear, const-cooldown, or package.module:Name",
    )
    warmup: int = Field(0, ge=0, description="steps of linear warm-up")
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end of cosine, linear and const-cooldown")


class Optimizer(Protocol):
    """Builds a torch optimizer; constructed with its settings, `Name(settings)`.

    `Name.Settings` (a subclass of `OptimSettings`) declares further keys.
    """

    def __call__(self, towers: nn.Module, model: str) -> torch.optim.Optimizer:
        """A torch optimizer over all trainable parameters of the towers, each exactly once.

        Training sets `lr` of every parameter group before each step. The optimizer's state must consist of tensors,
        which checkpoints store by parameter.

        Args:
            towers: on their device and in their final dtype; parameters may be sharded (DTensor).
            model: the model's name.
        """


class Schedule(Protocol):
    """The learning rate over the steps; constructed with its settings, `Name(settings)`.

    `Name.Settings` (a subclass of `ScheduleSettings`) declares further keys.
    """

    def __call__(self, step: int, *, peak: float, total_steps: int) -> float:
        """The learning rate of step `step` (from 0): a function of the step alone, so a resume needs no state.

        Only called after the warm-up, for steps from `settings.warmup` on.

        Args:
            peak: `optim.lr`.
            total_steps: of the whole run.
        """


def parameter_groups(module: nn.Module, wd: float) -> list[dict[str, Any]]:
    """The trainable parameters in up to three groups, as torch optimizers take them.

    The first has weight decay `wd` (by the rule of open_clip_train.main); the second has none; the third holds single
    numbers, which have none either, and which FSDP never shards. Empty groups are left out.
    """

    def decays(name: str, parameter: nn.Parameter) -> bool:
        return parameter.ndim >= 2 and not any(part in name for part in UNDECAYED)

    trainable = [(decays(name, p), p) for name, p in module.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for decayed, p in trainable if decayed], "weight_decay": wd},
        {"params": [p for decayed, p in trainable if not decayed and p.numel() > 1], "weight_decay": 0.0},
        {"params": [p for decayed, p in trainable if not decayed and p.numel() == 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class AdamW:
    """AdamW (arXiv:1711.05101) with open_clip's defaults: torch.optim.AdamW, fused unless set otherwise."""

    class Settings(OptimSettings):
        """AdamW. Gains, biases and scales have no weight decay, as in open_clip."""

        type: Literal["adamw"] = "adamw"
        betas: Betas | None = Field(
            None, description="0.9 0.98 if the model's name contains vit, else 0.9 0.999, unless set, both or one"
        )
        eps: float | None = Field(
            None, gt=0, description="1e-6 if the model's name contains vit, else 1e-8, unless set"
        )
        fused: bool = Field(True, description="update all parameters in torch's fused kernel, not one after the other")

        @field_validator("betas")
        @classmethod
        def _betas_in_range(cls, value: Betas | None) -> Betas | None:
            if value is not None and not all(beta is None or 0 <= beta < 1 for beta in value):
                raise ValueError("each beta must be at least 0 and below 1")
            return value

        def defaults(self, model: str) -> tuple[tuple[float, float], float]:
            """Betas and eps; those that are not set follow open_clip's rule (open_clip_train.params).

            Args:
                model: the model's name. A configuration file counts by its stem, as in open_clip.add_model_config.
            """
            name = Path(model).stem if model.endswith(".json") else model
            usual, eps = ((0.9, 0.98), 1e-6) if "vit" in name.lower() else ((0.9, 0.999), 1e-8)
            beta1, beta2 = (
                own if given is None else given for given, own in zip(self.betas or usual, usual, strict=True)
            )
            return (beta1, beta2), self.eps or eps

        def summary(self, model: str) -> str:
            """Betas and eps, for the lines at the start of a run."""
            (beta1, beta2), eps = self.defaults(model)
            return f", betas {beta1:g} {beta2:g}, eps {eps:g}"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __call__(self, towers: nn.Module, model: str) -> torch.optim.Optimizer:
        from torch.optim import AdamW as TorchAdamW

        betas, eps = self.settings.defaults(model)
        groups = parameter_groups(towers, self.settings.wd)
        return TorchAdamW(groups, lr=self.settings.lr, betas=betas, eps=eps, fused=self.settings.fused)


class Constant:
    """The peak throughout."""

    class Settings(ScheduleSettings):
        """The peak learning rate throughout."""

        type: Literal["constant"] = "constant"

    def __init__(self, settings: ScheduleSettings) -> None:
        self.warmup, self.min_lr = settings.warmup, settings.min_lr

    def __call__(self, step: int, *, peak: float, total_steps: int) -> float:
        return peak


class Cosine(Constant):
    """Half a cosine wave."""

    class Settings(ScheduleSettings):
        """Half a cosine wave down to min_lr."""

        type: Literal["cosine"] = "cosine"

    def __call__(self, step: int, *, peak: float, total_steps: int) -> float:
        done = (step - self.warmup) / max(1, total_steps - self.warmup)
        return self.min_lr + (peak - self.min_lr) * 0.5 * (1 + math.cos(math.pi * done))


class Linear(Constant):
    """A straight line."""

    class Settings(ScheduleSettings):
        """A straight line down to min_lr."""

        type: Literal["linear"] = "linear"

    def __call__(self, step: int, *, peak: float, total_steps: int) -> float:
        done = (step - self.warmup) / max(1, total_steps - self.warmup)
        return self.min_lr + (peak - self.min_lr) * (1 - done)


class ConstCooldown:
    """The peak, and a polynomial decay at the end."""

    class Settings(ScheduleSettings):
        """The peak learning rate, and at the end a polynomial decay to min_lr."""

        type: Literal["const-cooldown"] = "const-cooldown"
        cooldown_power: float = Field(1.0, gt=0, description="of the decay in const-cooldown; 1 is linear")
        cooldown: int | None = Field(None, ge=0, description="last steps of const-cooldown, in which the rate decays")
        cooldown_epochs: float | None = Field(None, ge=0, description="the same in epochs, in place of cooldown")

        def conflicts(self) -> Iterator[tuple[str, str]]:
            """No length, or two."""
            given = [value for value in (self.cooldown, self.cooldown_epochs) if value is not None]
            if not given:
                text = "how long is the cooldown? Give --epochs-cooldown, or --schedule.cooldown in steps"
                yield "cooldown_epochs", text
            elif len(given) > 1:
                yield "cooldown_epochs", "cooldown and cooldown_epochs are both given: keep the one that is meant"

    def __init__(self, settings: Settings) -> None:
        assert settings.cooldown is not None, "config.resolve turns epochs into steps"
        self.cooldown, self.power, self.min_lr = settings.cooldown, settings.cooldown_power, settings.min_lr

    def __call__(self, step: int, *, peak: float, total_steps: int) -> float:
        start = total_steps - self.cooldown
        if step < start:
            return peak
        left: float = (1 - (step - start) / self.cooldown) ** self.power
        return self.min_lr + (peak - self.min_lr) * left


OPTIMIZERS = {"adamw": AdamW}
SCHEDULES = {"cosine": Cosine, "constant": Constant, "linear": Linear, "const-cooldown": ConstCooldown}
OptimSettings.builtin = {name: cls.Settings for name, cls in OPTIMIZERS.items()}
ScheduleSettings.builtin = {name: cls.Settings for name, cls in SCHEDULES.items()}  # type: ignore[attr-defined]


def build_optimizer(towers: nn.Module, settings: OptimSettings, model: str) -> torch.optim.Optimizer:
    """The optimizer that the settings name; see `Optimizer`.

    Raises SettingsError: nothing is trainable, or a user's optimizer failed.
    """
    import torch

    if not any(p.requires_grad for p in towers.parameters()):
        raise SettingsError("nothing is left to train: unset model.lock_image or model.lock_text")
    optimizer = _build("optim.type", OPTIMIZERS, settings)(towers, model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SettingsError(f"optim.type: {settings.type} gave {type(optimizer).__name__}, not a torch.optim.Optimizer")
    if settings.type not in OPTIMIZERS:
        _check_parameters(towers, optimizer, settings.type)
        _check_state(optimizer, settings.type)
    return optimizer


def _check_parameters(towers: nn.Module, optimizer: torch.optim.Optimizer, type: str) -> None:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if left := [name for name, p in towers.named_parameters() if p.requires_grad and id(p) not in held]:
        raise SettingsError(
            f"optim.type: {type} leaves out {len(left)} of the trainable parameters, such as {left[0]}: use "
            "parameter_groups(towers, wd), and the settings model.lock_image and model.lock_text to train less"
        )


def _check_state(optimizer: torch.optim.Optimizer, type: str) -> None:
    """Raise at the step that makes a state which no checkpoint can store, not at the first save."""
    import torch

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for name, value in (item for state in optimizer.state.values() for item in state.items()):
            if not isinstance(value, torch.Tensor):
                raise SettingsError(
                    f"optim.type: the state {name!r} of {type} is {value.__class__.__name__}, and checkpoints store "
                    "tensors only: do without it, or make it a tensor"
                )
        try:
            for group in optimizer.param_groups:
                json.dumps({key: value for key, value in group.items() if key != "params"})
        except (TypeError, ValueError) as error:
            raise SettingsError(
                f"optim.type: the parameter groups of {type} cannot be stored in a checkpoint, as JSON: {error}"
            ) from error

    optimizer.register_step_post_hook(check)


def build_schedule(settings: ScheduleSettings, *, peak: float, total_steps: int) -> Callable[[int], float]:
    """The learning rate of a step (from 0): peak * (step + 1) / warmup during the warm-up, then as `Schedule`.

    Raises SettingsError: a user's schedule failed.
    """
    after_warmup = _build("schedule.type", SCHEDULES, settings)

    def lr(step: int) -> float:
        if step < settings.warmup:
            return peak * (step + 1) / settings.warmup
        return float(after_warmup(step, peak=peak, total_steps=total_steps))

    return lr


def _build(
    key: str, builtin: Mapping[str, Callable[..., Any]], settings: OptimSettings | ScheduleSettings
) -> Callable[..., Any]:
    """The part that `settings.type` names, whose own errors are raised as SettingsError."""
    if settings.type in builtin:
        part = builtin[settings.type](settings)
    else:
        try:
            part = make_plugin(settings.type, settings)
        except (ClipstreamError, ValueError) as error:
            raise SettingsError(f"{key}: {error}") from error

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return part(*args, **kwargs)
        except ClipstreamError:
            raise
        except Exception as error:  # whatever a user's part raises
            raise SettingsError(f"{key}: {raised(settings.type, error)}") from error

    return call

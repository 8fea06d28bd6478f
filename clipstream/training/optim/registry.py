"""The tables of built-in optimizers and schedules, and how either is built from settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from clipstream.config.plugins import make_plugin, raised
from clipstream.errors import ClipstreamError, SettingsError
from clipstream.training.optim.adamw import AdamW
from clipstream.training.optim.schedules import Constant, ConstCooldown, Cosine, Linear
from clipstream.training.optim.settings import OptimSettings, ScheduleSettings

if TYPE_CHECKING:
    import torch
    from torch import nn


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


OPTIMIZERS: dict[str, Any] = {"adamw": AdamW}
SCHEDULES: dict[str, Any] = {
    "cosine": Cosine,
    "constant": Constant,
    "linear": Linear,
    "const-cooldown": ConstCooldown,
}
OptimSettings.builtin = {name: cls.Settings for name, cls in OPTIMIZERS.items()}
ScheduleSettings.builtin = {name: cls.Settings for name, cls in SCHEDULES.items()}


def build_optimizer(towers: nn.Module, settings: OptimSettings, model: str) -> torch.optim.Optimizer:
    """The optimizer that the settings name; see `Optimizer`.

    Raises:
        SettingsError: nothing is trainable, or a user's optimizer failed.
    """
    import torch

    if not any(p.requires_grad for p in towers.parameters()):
        raise SettingsError("nothing is left to train: unset model.lock_image or model.lock_text")
    optimizer = _guarded("optim.type", settings.type, _make("optim.type", OPTIMIZERS, settings))(towers, model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SettingsError(f"optim.type: {settings.type} gave {type(optimizer).__name__}, not a torch.optim.Optimizer")
    return optimizer


def build_schedule(settings: ScheduleSettings, *, peak: float, total_steps: int) -> Callable[[int], float]:
    """The learning rate of a step (from 0): peak * (step + 1) / warmup during the warm-up, then as `Schedule`.

    Raises:
        SettingsError: a user's schedule failed.
    """
    after_warmup = _guarded("schedule.type", settings.type, _make("schedule.type", SCHEDULES, settings))

    def lr(step: int) -> float:
        if step < settings.warmup:
            return peak * (step + 1) / settings.warmup
        return float(after_warmup(step, peak=peak, total_steps=total_steps))

    return lr


def _make(key: str, builtin: dict[str, Any], settings: OptimSettings | ScheduleSettings) -> Any:
    if settings.type in builtin:
        return builtin[settings.type](settings)
    try:
        return make_plugin(settings.type, settings)
    except (ClipstreamError, ValueError) as error:
        raise SettingsError(f"{key}: {error}") from error


def _guarded(key: str, name: str, part: Callable[..., Any]) -> Callable[..., Any]:
    """The part, with its own errors raised as SettingsError."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return part(*args, **kwargs)
        except ClipstreamError:
            raise
        except Exception as error:  # whatever a user's part raises
            raise SettingsError(f"{key}: {raised(name, error)}") from error

    return call

"""Built-in learning-rate schedules: the rate after the warm-up, from `peak` towards `min_lr` at step `total_steps`.

With min_lr = 0, cosine and constant equal open_clip's; const-cooldown equals it for every `min_lr`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from clipstream.training.optim.settings import ScheduleSettings


class Cosine:
    """Half a cosine wave."""

    class Settings(ScheduleSettings):
        """Half a cosine wave down to min_lr."""

        type: Literal["cosine"] = "cosine"

    def __init__(self, settings: ScheduleSettings) -> None:
        self.warmup, self.min_lr = settings.warmup, settings.min_lr

    def __call__(self, step: int, *, peak: float, total_steps: int) -> float:
        """See `Schedule`."""
        done = (step - self.warmup) / max(1, total_steps - self.warmup)
        return self.min_lr + (peak - self.min_lr) * 0.5 * (1 + math.cos(math.pi * done))


class Linear:
    """A straight line."""

    class Settings(ScheduleSettings):
        """A straight line down to min_lr."""

        type: Literal["linear"] = "linear"

    def __init__(self, settings: ScheduleSettings) -> None:
        self.warmup, self.min_lr = settings.warmup, settings.min_lr

    def __call__(self, step: int, *, peak: float, total_steps: int) -> float:
        """See `Schedule`."""
        done = (step - self.warmup) / max(1, total_steps - self.warmup)
        return self.min_lr + (peak - self.min_lr) * (1 - done)


class Constant:
    """The peak throughout."""

    class Settings(ScheduleSettings):
        """The peak learning rate throughout."""

        type: Literal["constant"] = "constant"

    def __init__(self, settings: ScheduleSettings) -> None:
        pass

    def __call__(self, step: int, *, peak: float, total_steps: int) -> float:
        """See `Schedule`."""
        return peak


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
        """See `Schedule`."""
        start = total_steps - self.cooldown
        if step < start:
            return peak
        left: float = (1 - (step - start) / self.cooldown) ** self.power
        return self.min_lr + (peak - self.min_lr) * left

"""Settings that every optimizer and every schedule has."""

from __future__ import annotations

from pydantic import Field

from clipstream.config.section import PluginSection


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

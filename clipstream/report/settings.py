"""Settings of logging: sinks, images, the report and the terminal. Imports no torch."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, SerializeAsAny, field_validator

from clipstream.utils.section import PluginSection, Section, part

MOST_PROFILED = 100  # steps
WARM_UP = 5  # steps of a process before a number of profiled ones: compilation, allocation, the choice of kernels


def _profile_steps(text: str) -> tuple[int | None, int]:
    """First and last step, or no first step and their number. Raises ValueError: it is neither."""
    if found := re.fullmatch(r"(?:([1-9][0-9]{0,11})-)?([1-9][0-9]{0,11})", text):
        first, last = None if found[1] is None else int(found[1]), int(found[2])
        if first is None or first <= last:
            return first, last
    raise ValueError(f"expected a number of steps, as 3, or the first and the last, as 10-14, not {text!r}")


class SinkSettings(PluginSection):
    """A destination of the run's records. `type` may be a user's own `package.module:Name`."""

    type: str = Field(description="package.module:Name")


@part(SinkSettings, "wandb")
class WandbSettings(SinkSettings):
    """Weights & Biases (pip install 'clipstream[wandb]'). WANDB_ENTITY, WANDB_MODE and other variables hold as well."""

    type: Literal["wandb"] = "wandb"
    project: str = Field("clipstream", min_length=1, description="project of the run")
    notes: str | None = Field(None, description="notes on the run")


@part(SinkSettings, "trackio")
class TrackioSettings(SinkSettings):
    """Trackio, which stores runs on this machine or in a Hugging Face Space (pip install 'clipstream[trackio]')."""

    type: Literal["trackio"] = "trackio"
    project: str = Field("clipstream", min_length=1, description="project of the run")
    space: str | None = Field(None, description="Hugging Face Space that receives the metrics, as ORG/NAME")


class LogSettings(Section):
    """Metrics, TensorBoard and the terminal."""

    every: int = Field(
        10, ge=1, description="steps between training lines in metrics.jsonl, TensorBoard and the terminal"
    )
    tensorboard: bool = Field(True, description="write TensorBoard events")
    sinks: dict[str, SerializeAsAny[SinkSettings]] = Field(
        default_factory=dict,
        description="additional sinks by name",
    )
    pictures: int = Field(
        16, ge=0, description="number of images to show from every 1,000th training batch and each evaluation; 0: none"
    )
    report: bool = Field(True, description="write report.html after evaluations and at the end")
    audit_precision: bool = Field(
        False,
        description="before the first step, audit a step of a copy of the model: write its casts, float32 operations "
        "and fp16 underflow to precision_audit.json and the log",
    )
    peak_tflops: float | None = Field(
        None, gt=0, description="peak dense TFLOP/s of a device, for MFU; default: known for common GPUs"
    )
    profile: str | None = Field(
        None,
        description="steps to record with torch's profiler: a number of steps, after warm-up, or a range such as 10-14",
    )
    progress: Literal["auto", "bar", "lines", "none"] = Field(
        "auto", description="progress display; auto: a bar in a terminal or notebook, lines elsewhere"
    )
    terminal_every: int = Field(1, ge=1, description="minimum number of steps between training lines in the terminal")
    loss_ema_samples: int = Field(
        0,
        ge=0,
        description="horizon, in samples, of the exponential moving average of the loss shown in brackets in the "
        "terminal, as in open_clip; 0: none",
    )
    local: bool = Field(False, description="write the messages of the first rank of each other node to out-RANK.log")
    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="minimum level of messages in the terminal; out.log always has info and above"
    )

    @field_validator("sinks")
    @classmethod
    def _have_names_of_their_own(cls, value: dict[str, SinkSettings]) -> dict[str, SinkSettings]:
        if taken := {"metrics", "tensorboard", "terminal"} & value.keys():
            raise ValueError(f"{min(taken)!r} is the name of a built-in sink: use another name")
        return value

    @field_validator("profile", mode="before")
    @classmethod
    def _check_steps(cls, value: object) -> object:
        if value is None:
            return value
        first, last = _profile_steps(str(value))
        if last - (first or 1) >= MOST_PROFILED:
            raise ValueError(f"a profile is limited to {MOST_PROFILED} steps")
        return str(value)

    @property
    def profiled_steps(self) -> int:
        """Steps that a run needs for its profile; 0 without one."""
        return 0 if self.profile is None else _profile_steps(self.profile)[1]

    def steps_to_profile(self, done: int, total: int) -> range:
        """The steps to profile, from 1, in a process that begins after `done` of `total` steps; empty if none are left.

        A number of steps begins after the `WARM_UP` first ones, or earlier if the run is shorter.
        """
        if self.profile is None:
            return range(0)
        first, last = _profile_steps(self.profile)
        if first is None:
            first = done + 1 + max(0, min(WARM_UP, total - done - last))
            last += first - 1
        return range(max(first, done + 1), min(last, total) + 1)

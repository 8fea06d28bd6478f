"""Settings of logging: sinks, pictures, the report and warnings. Imports no torch."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, SerializeAsAny, field_validator

from clipstream.utils.plugins import is_plugin, load_function
from clipstream.utils.section import PathText, PluginSection, Section

Progress = Literal["auto", "bar", "lines", "none"]


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

    type: str = Field("jsonl", description="jsonl, tensorboard, wandb, trackio, terminal, or package.module:Name")


class JsonLinesSettings(SinkSettings):
    """A JSON object per record, as in metrics.jsonl."""

    type: Literal["jsonl"] = "jsonl"
    file: PathText = Field("metrics.jsonl", min_length=1, description="its path, relative to the run's folder")


class TensorBoardSettings(SinkSettings):
    """TensorBoard events: scalars, pictures and tables."""

    type: Literal["tensorboard"] = "tensorboard"
    folder: PathText = Field(
        "tensorboard", min_length=1, description="where they are written; relative to the run's folder"
    )


class TrackerSettings(SinkSettings):
    """An experiment tracker."""

    project: str = Field("clipstream", min_length=1, description="the project that the run appears in")
    group: str | None = Field(None, description="group of runs within the project")
    name: str | None = Field(None, description="the run's name there; run.name unless set")


class WandbSettings(TrackerSettings):
    """Weights & Biases (pip install 'clipstream[wandb]')."""

    type: Literal["wandb"] = "wandb"
    entity: str | None = Field(None, description="user or team; the account's default unless set")
    notes: str | None = Field(None, description="notes on the run")
    tags: list[str] = Field(default_factory=list, description="tags of the run")
    mode: Literal["online", "offline", "disabled"] | None = Field(
        None, description="offline writes to the run's folder, for `wandb sync`; WANDB_MODE, or online, unless set"
    )


class TrackioSettings(TrackerSettings):
    """Trackio, which stores runs on this machine or in a Hugging Face Space (pip install 'clipstream[trackio]')."""

    type: Literal["trackio"] = "trackio"
    space: str | None = Field(
        None, description="Hugging Face Space that gets the figures, as ORG/NAME; none unless set"
    )


class TerminalSettings(SinkSettings):
    """Training lines, evaluations and warnings on standard output."""

    type: Literal["terminal"] = "terminal"
    progress: Progress = Field("auto", description="auto: a bar on a terminal or in a notebook, lines elsewhere")
    every: int = Field(1, ge=1, description="steps between training lines, where log.every is less")
    loss_ema_samples: int = Field(0, ge=0, description="see log.loss_ema_samples")


SinkSettings.builtin = {
    "jsonl": JsonLinesSettings,
    "tensorboard": TensorBoardSettings,
    "wandb": WandbSettings,
    "trackio": TrackioSettings,
    "terminal": TerminalSettings,
}


class LogSettings(Section):
    """Metrics, TensorBoard and the terminal."""

    every: int = Field(
        10, ge=1, description="steps between training lines in metrics.jsonl, TensorBoard and the terminal"
    )
    tensorboard: bool = Field(True, description="write TensorBoard events")
    sinks: dict[str, SerializeAsAny[SinkSettings]] = Field(
        default_factory=dict,
        description="further destinations of records, by name, beside metrics.jsonl, TensorBoard and the terminal",
    )
    pictures: int = Field(16, ge=0, description="pictures shown of a training batch and of each evaluation; 0 for none")
    pictures_every: int = Field(1000, ge=1, description="steps between training batches that are shown")
    report: bool = Field(True, description="write report.html after evaluations and at the end")
    data_stall_warning: float = Field(
        0.2, ge=0, le=1, description="share of time waiting for data above which a warning names the slow stage"
    )
    alert: str | None = Field(
        None, description="called with that warning: module:function, or a shell command ($CLIPSTREAM_ALERT)"
    )
    audit_precision: bool = Field(
        False,
        description="before the first step, write which casts and float32 operations a step has, and what fp16 would "
        "lose, to precision_audit.json and the log; takes about as long as three steps",
    )
    peak_tflops: float | None = Field(
        None, gt=0, description="a device's dense TFLOP/s, for MFU; of known GPUs from a table unless set"
    )
    profile: str | None = Field(
        None,
        description="steps that torch's profiler records into the run's folder: a number of them, after warm-up, or "
        "the first and the last, as 10-14",
    )
    progress: Progress = Field("auto", description="auto: a bar on a terminal or in a notebook, lines elsewhere")
    terminal_every: int = Field(
        1, ge=1, description="steps between training lines in the terminal, where every is less; a bar shows all"
    )
    loss_ema_samples: int = Field(
        0,
        ge=0,
        description="samples of the horizon over which the loss in brackets in the terminal is averaged "
        "(exponentially), as in open_clip; 0 for none",
    )
    local: bool = Field(
        False, description="the first rank of each further node logs its own messages, into out-RANK.log of the run"
    )
    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="messages of this level and above are shown; out.log has info and above in any case"
    )

    @property
    def all_sinks(self) -> dict[str, SinkSettings]:
        """The built-in sinks that are on, and those of `sinks`, by name; an entry of `sinks` wins over a built-in."""
        board = {"tensorboard": TensorBoardSettings()} if self.tensorboard else {}
        terminal = TerminalSettings(
            progress=self.progress, every=self.terminal_every, loss_ema_samples=self.loss_ema_samples
        )
        return {"metrics": JsonLinesSettings(), **board, "terminal": terminal, **self.sinks}

    @field_validator("sinks")
    @classmethod
    def _write_files_of_their_own(cls, value: dict[str, SinkSettings]) -> dict[str, SinkSettings]:
        if "metrics" in value:
            raise ValueError("'metrics' is the name of metrics.jsonl, which is always written: choose another name")
        for name, sink in value.items():
            if isinstance(sink, JsonLinesSettings) and sink.file == "metrics.jsonl":
                raise ValueError(f"{name}: metrics.jsonl is always written: give another file")
        return value

    @field_validator("profile", mode="before")
    @classmethod
    def _check_steps(cls, value: object) -> object:
        if value is None:
            return value
        first, last = _profile_steps(str(value))
        if last - (first or 1) >= MOST_PROFILED:
            raise ValueError(f"more than {MOST_PROFILED} steps do not fit into the memory of a profile")
        return str(value)

    @property
    def profiled_steps(self) -> int:
        """Steps that a run needs for its profile; 0 without one."""
        return 0 if self.profile is None else _profile_steps(self.profile)[1]

    def profiled(self, done: int, total: int) -> range:
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

    @field_validator("alert")
    @classmethod
    def _check_that_it_loads(cls, value: str | None) -> str | None:
        if value is not None and is_plugin(value):
            load_function(value)
        return value

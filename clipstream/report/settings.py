"""Owns the settings of what a run shows of itself; imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from clipstream.plugins import is_plugin, load_function
from clipstream.section import Section


class LogSettings(Section):
    """Metrics, TensorBoard and the terminal."""

    every: int = Field(
        10, ge=1, description="steps between training lines in metrics.jsonl, TensorBoard and the terminal"
    )
    tensorboard: bool = Field(True, description="write TensorBoard events")
    pictures: int = Field(16, ge=0, description="pictures shown of a training batch and of each evaluation; 0 for none")
    pictures_every: int = Field(1000, ge=1, description="steps between training batches that are shown")
    report: bool = Field(True, description="write report.html after evaluations and at the end")
    starving: float = Field(
        0.2, ge=0, le=1, description="share of the time waited for data above which a warning names the slow stage"
    )
    alert: str | None = Field(
        None, description="called with that warning: module:function, or a shell command ($CLIPSTREAM_ALERT)"
    )
    progress: Literal["auto", "bar", "lines", "none"] = Field(
        "auto", description="auto: a bar on a terminal, lines elsewhere"
    )

    @field_validator("alert")
    @classmethod
    def _a_function_that_is_there(cls, value: str | None) -> str | None:
        if value is not None and is_plugin(value):
            load_function(value)
        return value

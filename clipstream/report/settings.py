"""Owns the settings of what a run shows of itself; imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

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
    progress: Literal["auto", "bar", "lines", "none"] = Field(
        "auto", description="auto: a bar on a terminal, lines elsewhere"
    )

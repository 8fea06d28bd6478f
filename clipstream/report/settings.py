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
    progress: Literal["auto", "bar", "lines", "none"] = Field(
        "auto", description="auto: a bar on a terminal, lines elsewhere"
    )

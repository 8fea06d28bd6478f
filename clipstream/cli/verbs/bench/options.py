"""What `clipstream bench train` is asked to measure, besides the settings. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from clipstream.cli.verbs.bench.rungs import SPEED, VARIANTS

NAMES = (*SPEED, *VARIANTS)


@dataclass(frozen=True)
class Options:
    """What is measured, and where it is written."""

    rungs: tuple[str, ...] = NAMES
    rounds: int = 3
    steps: int = 5
    warmup_steps: int = 2
    loss_steps: int = 20
    loss_tolerance: float = 0.01
    open_clip: bool = False
    csv: Path | None = None
    plot: Path | None = None
    yaml: Path | None = None
    shards: bool = True  # whether the user gave data

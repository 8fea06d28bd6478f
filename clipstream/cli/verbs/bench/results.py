"""The results of `clipstream bench train`: rows enter; tables, a CSV file, a plot and the settings to use leave."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from clipstream.cli.verbs.bench.rungs import BASELINE, CHOSEN, Changes, Rung, nested
from clipstream.config.config_sources import to_yaml
from clipstream.text import duration
from clipstream.utils.console import ResultConsole
from clipstream.utils.logs import logger

GIB = 1 << 30
LONG_FIRST_STEP = 5.0  # times a later step, from which on the first step is told
COLUMNS = (
    "table", "rung", "settings", "samples_per_s", "lowest", "highest", "to_before", "to_baseline", "memory_bytes",
    "tflops", "mfu", "loss", "loss_difference", "first_step_s", "input_ms_per_sample", "note",
)  # fmt: skip


@dataclass
class Row:
    """A rung and its measurements.

    Attributes:
        changes: of the user's settings.
        table: 1 for the chain of settings, 2 for what is added to the settings to use.
        before: the row that this one adds a change to; None for the baseline.
        base: the baseline of its table; None for the baseline itself.
        tolerance: share of the baseline's loss by which the loss may differ.
        batch: samples of a global batch.
        rates: samples/s in each round.
        memory: bytes; see `Turn`.
        loss: at the last of the steps after which losses are compared, before its update.
        reason: why there are no measurements.
    """

    rung: Rung
    changes: Changes
    table: int
    before: Row | None = None
    base: Row | None = None
    tolerance: float = 0.0
    batch: int = 1
    rates: list[float] = field(default_factory=list)
    memory: int = 0
    loss: float | None = None
    first_step: float = 0.0
    input_ms: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    reason: str | None = None

    @property
    def rate(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.rates)

    def gain(self, other: Row | None) -> float | None:
        """Median over the rounds of this row's rate divided by another's; None where either was not measured."""
        if other is None or not self.rates or not other.rates:
            return None
        return statistics.median(own / theirs for own, theirs in zip(self.rates, other.rates, strict=False))

    @property
    def loss_difference(self) -> float | None:
        """Difference to the baseline's loss, as a share of it; None for the baseline."""
        if self.base is None or self.loss is None or not self.base.loss:
            return None
        return self.loss / self.base.loss - 1

    @property
    def flagged(self) -> bool:
        """Whether the loss is that of another result."""
        difference = self.loss_difference
        return self.rung.same_loss and difference is not None and not abs(difference) <= self.tolerance

    def note(self) -> str:
        """What else is to be told."""
        if self.reason is not None:
            return f"not run: {self.reason}"
        found = []
        if self.flagged:
            found.append(f"LOSS DIFFERS by more than {self.tolerance:.2%}")
        if "model.patch_dropout" in self.rung.changes:
            found.append("another objective: some patches are not seen")
        if self.rates and self.first_step > LONG_FIRST_STEP * self.batch / self.rate:
            found.append(f"first step {duration(self.first_step)}")
        if self.input_ms is not None:
            found.append(f"a worker takes {self.input_ms:.1f} ms a sample, a step {1e3 / self.rate:.1f} ms")
        return "; ".join(found)

    def record(self) -> dict[str, Any]:
        """The row of the CSV file."""
        measured: dict[str, Any] = {}
        if self.rates:
            measured = {
                "samples_per_s": self.rate,
                "lowest": min(self.rates),
                "highest": max(self.rates),
                "to_before": self.gain(self.before),
                "to_baseline": self.gain(self.base),
                "memory_bytes": self.memory,
                "tflops": self.tflops,
                "mfu": self.mfu,
                "loss": self.loss,
                "loss_difference": self.loss_difference,
                "first_step_s": self.first_step,
                "input_ms_per_sample": self.input_ms,
            }
        changes = " ".join(f"{key}={value}" for key, value in self.rung.changes.items())
        found = {"table": self.table, "rung": self.rung.name, "settings": changes, **measured, "note": self.note()}
        return {column: found.get(column) for column in COLUMNS}


def tables(rows: Sequence[Row], loss_steps: int) -> list[Table]:
    """One table for each part of the rows."""
    titles = {1: "Each setting added to those above it", 2: f"Each added alone to the {CHOSEN}"}
    found = []
    for number, title in titles.items():
        part = [row for row in rows if row.table == number]
        if not part:
            continue
        table = Table(title=f"{title} (batch {part[0].batch})", title_justify="left")
        for column in ("", "samples/s", "range", "x before", "x baseline", "GiB", "TFLOP/s", "MFU"):
            table.add_column(column, justify="right" if column else "left", no_wrap=True)
        table.add_column(f"loss at {loss_steps}", justify="right", no_wrap=True)
        table.add_column("", justify="left", overflow="fold")
        for row in part:
            cells = [""] * 8
            if row.rates:
                cells = [
                    _figure(row.rate),
                    f"{_figure(min(row.rates))}-{_figure(max(row.rates))}",
                    *("" if gain is None else f"{gain:.2f}" for gain in (row.gain(row.before), row.gain(row.base))),
                    f"{row.memory / GIB:.2f}",
                    "" if row.tflops is None else f"{row.tflops:.3g}",
                    "" if row.mfu is None else f"{row.mfu:.1%}",
                    "" if row.loss is None else f"{row.loss:.5f}",
                ]
            table.add_row(row.rung.name, *cells, row.note())
        found.append(table)
    return found


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def settings_to_use(rows: Sequence[Row], chosen: Changes) -> str:
    """YAML for `--config`: the settings of the chain's rungs that ran, as they are best; with a comment."""
    keys = [key for row in rows if row.table == 1 and row.reason is None for key in row.rung.changes]
    best = next((row for row in rows if row.rung.name == CHOSEN and row.rates), None)
    gain = None if best is None else best.gain(best.base)
    times = "as fast as the baseline" if gain is None else f"{gain:.2f} times the baseline's samples/s"
    head = f"# {CHOSEN.capitalize()} ({times}), for --config:\n"
    return head + (
        to_yaml(nested({key: chosen[key] for key in keys if key in chosen})) if keys else "# no setting was measured\n"
    )


def show(rows: Sequence[Row], chosen: Changes, loss_steps: int) -> None:
    """Print the tables and the settings to use."""
    console = ResultConsole(150, markup=False)
    for table in tables(rows, loss_steps):
        console.print(table)
    console.print(settings_to_use(rows, chosen), end="", soft_wrap=True)


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """A line for each row."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        table.writerows(row.record() for row in rows)


def write_yaml(rows: Sequence[Row], chosen: Changes, path: Path) -> None:
    """The settings to use."""
    path.write_text(settings_to_use(rows, chosen), encoding="utf-8")


def plot(rows: Sequence[Row], path: Path) -> None:
    """Bars of samples/s, with the range of the rounds, and of memory; skipped with a warning without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        logger.warning("--plot is skipped, as matplotlib is not installed: pip install 'clipstream[bench]'")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row.rates and not (row.table == 2 and row.rung.name == BASELINE)][::-1]
    names = [row.rung.name for row in shown]
    figure, axes = pyplot.subplots(
        1, 2, figsize=(10, 1.2 + 0.35 * len(shown)), sharey=True, layout="constrained", width_ratios=(2, 1)
    )
    colours = ["tab:blue" if row.table == 1 else "tab:orange" for row in shown]
    places = range(len(shown))
    ranges = [[row.rate - min(row.rates) for row in shown], [max(row.rates) - row.rate for row in shown]]
    axes[0].barh(places, [row.rate for row in shown], xerr=ranges, color=colours)
    axes[0].set(xlabel="samples/s", yticks=places, yticklabels=names)
    axes[1].barh(places, [row.memory / GIB for row in shown], color=colours)
    axes[1].set(xlabel="peak memory, GiB")
    for axis in axes:
        axis.grid(alpha=0.3, axis="x")
    figure.savefig(path)
    pyplot.close(figure)

"""The text of a precision audit: tables for a terminal and a log, and its file in a run's folder."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clipstream.performance.precision.gradients import HIGHEST, LOWEST
from clipstream.report.terminal import BLOCKS, OFF_TERMINAL, milliseconds, percent
from clipstream.utils import atomic_write
from clipstream.utils.words import counted

if TYPE_CHECKING:
    from clipstream.performance.precision.audit import Audit, ScaleRecord
    from clipstream.performance.precision.gradients import GradientGroup

ROWS = 12  # of a table, unless set
COLOURS = {"error": "red", "warning": "yellow", "meant": "green"}


def show_audit(audit: Audit, console: Console, rows: int = ROWS) -> None:
    """Print all tables.

    Args:
        rows: most rows of the tables of casts, modules and costs.
    """
    console.print(f"Precision of a step: {audit.precision} on {audit.device}, {audit.samples} samples")
    console.print(f"{audit.total.count:,} operators, {size(audit.total.bytes)}, {milliseconds(audit.total.seconds)}")
    console.print(_findings(audit))
    for text in _advice(audit):
        console.print(text, markup=False)
    console.print(_costs(audit, rows))
    console.print(_casts(audit, rows))
    console.print(_modules(audit, rows))
    console.print(_gradients(audit))
    for called, history in (("run", audit.history), ("audited steps", audit.own_history)):
        if history:
            console.print(f"Loss scale of the {called}: {scale_line(history)}", markup=False)
    console.print(verdict(audit), markup=False)


def audit_text(audit: Audit, rows: int = ROWS) -> str:
    """The tables as plain text."""
    out = io.StringIO()
    show_audit(audit, Console(file=out, width=OFF_TERMINAL, highlight=False, emoji=False), rows)
    return out.getvalue().rstrip()


def verdict(audit: Audit) -> str:
    """The number of errors and warnings in a line."""
    errors, warnings = len(audit.of("error")), len(audit.of("warning"))
    if not errors and not warnings:
        return "No finding: what has to be float32 is, and no cast or product is wider than it has to be."
    return f"{counted(errors, 'error')}, {counted(warnings, 'warning')}"


def write_audit(audit: Audit, path: Path) -> None:
    """Write everything as JSON.

    Raises OSError: the file cannot be written.
    """
    atomic_write.replace(path, (json.dumps(audit.to_json(), indent=2) + "\n").encode())


def scale_line(history: list[ScaleRecord]) -> str:
    """A course of the loss scale: its ends, its extremes and the overflows."""
    scales = [record.scale for record in history]
    late = [record for record in history if record.overflows]
    overflowed = f"overflows before {len(late)} of {len(history)} records" if late else "no overflow"
    last = f", last at step {late[-1].step}" if late else ""
    return f"{scales[0]:g} to {scales[-1]:g} (from {min(scales):g} to {max(scales):g}), {overflowed}{last}"


def size(count: float) -> str:
    """Bytes as 12 kB, 3.4 MB or 1.2 GB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def _table(title: str, *columns: str, right: int = 0) -> Table:
    """A table whose last `right` columns are numbers."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number >= len(columns) - right else "left", overflow="fold")
    return table


def _findings(audit: Audit) -> Table:
    table = _table("Findings", "", "where", "what", "times", "bytes", "time", right=3)
    for finding in (*audit.of("error"), *audit.of("warning")):
        colour = COLOURS[finding.severity]
        table.add_row(
            f"[{colour}]{finding.severity}[/]", escape(finding.shown), escape(finding.what), f"{finding.count:,}",
            size(finding.bytes), milliseconds(finding.seconds),
        )  # fmt: skip
    if not table.rows:
        table.add_row("[green]none[/]", "", "", "", "", "")
    return table


def _advice(audit: Audit) -> list[str]:
    """What to do about errors and warnings, each advice once, with the code that it is about."""
    code: dict[tuple[str, str, str], set[str]] = {}
    for finding in (*audit.of("error"), *audit.of("warning")):
        code.setdefault((finding.severity, finding.what, finding.advice), set()).update(finding.lines)
    return [
        f"{severity}: {what}{' in ' * bool(lines)}{', '.join(sorted(lines))}: {advice}"
        for (severity, what, advice), lines in code.items()
    ]


def _costs(audit: Audit, rows: int) -> Table:
    table = _table("Meant, by cost", "what", "reason", "bytes", "share", "time", right=3)
    for finding in audit.of("meant")[:rows]:
        what = f"{finding.shown}: {finding.what}" if finding.where else f"{finding.kind}: {finding.what}"
        share = percent(finding.bytes / max(audit.total.bytes, 1))
        table.add_row(
            escape(what), escape(finding.advice), size(finding.bytes), share, milliseconds(finding.seconds)
        )  # fmt: skip
    return table


def _casts(audit: Audit, rows: int) -> Table:
    table = _table("Casts", "where", "phase", "from", "to", "times", "bytes", "time", right=3)
    for cast in audit.casts[:rows]:
        total = cast.total
        table.add_row(
            escape(cast.module), cast.phase, cast.source, cast.target, f"{total.count:,}", size(total.bytes),
            milliseconds(total.seconds),
        )  # fmt: skip
    return table


def _modules(audit: Audit, rows: int) -> Table:
    title = f"Operations, and those wider than {audit.precision}"
    table = _table(title, "where", "bytes", "share", "time", "share", "wider: bytes", "time", right=6)
    for one in audit.modules[:rows]:
        table.add_row(
            escape(one.module), size(one.total.bytes), percent(one.total.bytes / max(audit.total.bytes, 1)),
            milliseconds(one.total.seconds), percent(one.total.seconds / max(audit.total.seconds, 1e-12)),
            percent(one.wide.bytes / max(one.total.bytes, 1)),
            percent(one.wide.seconds / max(one.total.seconds, 1e-12)),
        )  # fmt: skip
    return table


def _gradients(audit: Audit) -> Table:
    if audit.precision == "fp16":
        title = f"Gradients in fp16, at loss scale {audit.scale:g}"
    else:
        title = f"Gradients if they were fp16, at loss scale {audit.scale:g}"
    histogram = f"log2 |g|, {LOWEST} to {HIGHEST}"
    columns = ("group", histogram, "median", "zero", "underflow", "subnormal", "overflow", "bf16 subn.")
    table = _table(title, *columns, right=6)
    table.columns[1].no_wrap = True
    for group in audit.gradients:
        counts = (group.underflow, group.subnormal, group.overflow, group.bf16_subnormal)
        median = f"2^{group.median:.0f}" if group.median == group.median else ""
        zeros = percent(group.zeros / max(group.n, 1))
        table.add_row(escape(group.name), _drawn(group), median, zeros, *(percent(group.share(n)) for n in counts))
    return table


def _drawn(group: GradientGroup) -> str:
    """The histogram as blocks; a dot for an empty bin."""
    most = max(group.histogram)
    return "".join(
        "·" if not count else BLOCKS[min(len(BLOCKS) - 1, count * len(BLOCKS) // (most + 1))]
        for count in group.histogram
    )

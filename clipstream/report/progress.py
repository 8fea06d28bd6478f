"""Owns what a run says on the terminal while it runs: a bar on a terminal, plain lines elsewhere; writes no file.

It is a sink like the others and takes the same records, on rank 0 only.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress

from clipstream.report.sinks import NONFINITE_FILE, Record, flat

RECENT = 10  # training lines whose speed makes the time left
SHOWN_KEYS = 4  # samples of a step that was left out


class Progress:
    """Says training lines, evaluations and what is wrong with the data.

    Args:
        total: steps of the whole run.
        start: step at which this process begins.
        mode: 'auto' (a bar where `stream` is a terminal, lines elsewhere), 'bar', 'lines' or 'none' (evaluations and
            notes only).
        stream: where to; standard output unless given.
    """

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        mode: Literal["auto", "bar", "lines", "none"] = "auto",
        stream: TextIO | None = None,
    ) -> None:
        self.total = total
        self.stream = sys.stdout if stream is None else stream
        self.mode = ("bar" if self.stream.isatty() else "lines") if mode == "auto" else mode
        self._speeds: deque[float] = deque(maxlen=RECENT)
        self._troubles: dict[str, Any] = {}
        self._bar: RichProgress | None = None
        if self.mode == "bar":
            self._bar = RichProgress(
                TextColumn("step"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                console=Console(file=self.stream, force_terminal=True),
                auto_refresh=False,  # its thread would not survive a fork of data workers
            )
            self._task = self._bar.add_task("", total=total, completed=start)
            self._bar.start()

    def write(self, record: Record) -> None:
        """Show a record."""
        if "eval" in record:
            self.say(evaluation_line(record))
        elif "health" in record:
            self._health(record)
        elif "nonfinite" in record:
            self.say(nonfinite_line(record))
        elif "rollback" in record:
            skipped, to = record["rollback"]["skipped"], record["rollback"]["to"]
            self.say(f"warning: {skipped} steps in a row were left out: back to the weights of step {to}")
        elif "end" in record:
            if "early_stop" in record["end"]:
                self.say(f"ended at step {record['step']}: {early_stop_line(record['end']['early_stop'])}")
        elif "loss" in record:
            self._training(record)

    def say(self, text: str) -> None:
        """A line of its own, above the bar where there is one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self.stream, flush=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()

    def _training(self, record: Record) -> None:
        step = int(record["step"])
        speed = float(record.get("samples_per_s") or 0.0)
        if speed > 0:
            self._speeds.append(speed)
        parts = [f"loss {_number(record['loss'], '.4g')}", f"{speed:.0f} samples/s"]
        if "data_wait" in record:
            slow = record.get("bottleneck", "training")
            parts.append(f"data wait {record['data_wait']:.0%}{'' if slow == 'training' else f' ({slow})'}")
        if self._speeds and step and record.get("samples"):
            samples_left = (self.total - step) * record["samples"] / step
            parts.append(f"eta {duration(samples_left * len(self._speeds) / sum(self._speeds))}")
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description="  ".join(parts), refresh=True)
        elif self.mode == "lines":
            if "lr" in record:
                parts.insert(1, f"lr {record['lr']:.1e}")
            self.say("  ".join([f"step {step}/{self.total}", *parts]))

    def _health(self, record: Record) -> None:
        """Say the counts of what went wrong, when they have changed."""
        troubles = {
            path: count
            for path, count in flat(record["health"]).items()
            if count and path.rpartition("/")[2] not in ("read", "used", "shards") and isinstance(count, int)
        }
        if troubles != self._troubles:
            self._troubles = troubles
            said = ", ".join(f"{path.replace('/', ' ')} {count}" for path, count in troubles.items())
            self.say(f"data at step {record['step']}: {said or 'nothing dropped'}")


def evaluation_line(record: Record) -> str:
    """An evaluation for reading: shares in percent, with the level of chance beside the metrics that have one."""
    if "error" in record:
        return f"eval {record['eval']} at step {record['step']}: failed: {str(record['error']).splitlines()[0]}"
    skipped = ("step", "eval", "seconds", "n", "dropped")
    parts = []
    for name, value in record.items():
        if name in skipped or name.startswith("chance"):
            continue
        chance = chance_of(record, name)
        beside = "" if chance is None else f" (chance {percent(chance)})"
        parts.append(f"{name} {percent(value) if is_share(name, value) else _number(value, '.4g')}{beside}")
    if "n" in record:
        parts.append(f"n {record['n']}")
    if record.get("dropped"):
        parts.append(f"dropped {record['dropped']}")
    if "seconds" in record:
        parts.append(duration(record["seconds"]))
    return "  ".join([f"eval {record['eval']} at step {record['step']}:", *parts])


def nonfinite_line(record: Record) -> str:
    """A step that was left out, for reading."""
    told = record["nonfinite"]
    keys = told["keys"]
    more = f" and {len(keys) - SHOWN_KEYS} more in {NONFINITE_FILE}" if len(keys) > SHOWN_KEYS else ""
    return (
        f"warning: step {record['step']} is left out: loss {told['loss']}, norm of the gradients {told['grad_norm']}; "
        f"its samples: {', '.join(keys[:SHOWN_KEYS])}{more}"
    )


def early_stop_line(told: Mapping[str, Any]) -> str:
    """Why a run ended before its last step, for reading."""
    since = "" if told["best_step"] is None else f" since step {told['best_step']:g} ({_number(told['best'], '.4g')})"
    evaluations = f"{told['evaluations']} evaluation{'s' * (told['evaluations'] > 1)}"
    return f"{told['metric']} has not improved{since}, in {evaluations}"


def table(records: Sequence[Record]) -> str:
    """Evaluations for reading: a line a metric, with what guessing gives beside it."""
    rows = [("evaluation", "metric", "value", "chance")]
    for record in records:
        for name, value in record.items():
            if name in ("step", "eval") or name.startswith("chance"):
                continue
            chance = chance_of(record, name)
            number = percent(value) if is_share(name, value) else f"{value:g}"
            shown = duration(value) if name == "seconds" else number
            rows.append((record["eval"], name, shown, "" if chance is None else percent(chance)))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}" for a, b, c, d in rows]
    return "\n".join(line.rstrip() for line in lines)


def is_share(metric: str, value: Any) -> bool:
    """Whether a metric is shown in percent: a number from 0 to 1 that is no count, no loss and no place."""
    return isinstance(value, float) and 0 <= value <= 1 and not metric.endswith(("loss", "rank"))


def chance_of(record: Mapping[str, Any], metric: str) -> float | None:
    """What guessing gives for a metric: `chance_X` belongs to the metrics that end in X, `chance` to top1."""
    for name, value in record.items():
        if name.startswith("chance_") and metric.endswith(name.removeprefix("chance_")):
            return float(value)
    return float(record["chance"]) if metric == "top1" and "chance" in record else None


def percent(share: float) -> str:
    """A share as percent with the digits that tell something."""
    value = 100 * share
    return f"{value:.2g}%" if 0 < value < 1 else f"{value:.1f}%"


def duration(seconds: float) -> str:
    """Seconds as 3.2s, 42s, 4m10s or 2h05m."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def milliseconds(seconds: float) -> str:
    """A short time as 0.31 ms or 42 ms; a longer one as `duration`."""
    if seconds >= 1:
        return duration(seconds)
    return f"{seconds * 1e3:.2g} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"


def _number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, (int, float)) else str(value)

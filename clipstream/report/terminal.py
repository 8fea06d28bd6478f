"""What a run shows, and its copy in RUN/out.log: a progress bar on a terminal and in a notebook, plain lines elsewhere.

Records enter; lines leave.
`run_log` writes the lines of rank 0 with time and level, as open_clip does: the messages of the logger `clipstream`
and, line by line, what else is printed meanwhile (`Tee`). Redraws of progress bars and terminal escapes are left out,
credentials in URLs are masked, and a full disk loses lines but never ends a run.
"""

from __future__ import annotations

import logging
import math
import re
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any, Literal, TextIO

from rich import get_console
from rich.console import Console
from rich.file_proxy import FileProxy
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from clipstream.data.decode.key_lists import LEFT_OUT
from clipstream.evals.statistics import (
    format_chance,
    format_value,
    interval,
    is_count_of_part,
    is_minor,
    metrics_of,
)
from clipstream.report.records import Record
from clipstream.report.sinks import NONFINITE_FILE, Sink
from clipstream.storage.shard_url import redact
from clipstream.text import counted, duration, listed, percent, printable_lines
from clipstream.utils.logs import Tee, below, loading, log_displayed, logger
from clipstream.utils.section import flat

RECENT = 10  # training lines whose mean speed gives the time left
SHOWN_KEYS = 4  # samples shown of a skipped step
REDRAWN = 0.1  # s between two states of the bar of steps, and of one in a notebook, a message to the browser each
WIDEST = 30  # columns of the bar, which gives way to the text beside it
LOG_FILE = "out.log"
COUNTS = ("seconds", "n", "dropped")  # of an evaluation, which are in the table alone
_URL = re.compile(r"\S+://\S+")


class ProgressDisplay(Sink):
    """Shows training lines, evaluations and data health.

    Args:
        total: steps of the whole run.
        start: step at which this process begins.
        stage_end: step at which the stage ends; by default `total`.
        later: samples of later stages, in those of this stage that take as long.
        mode: 'auto' (a bar if `stream` is a terminal or a notebook's, else lines), 'bar', 'lines' or 'none'
            (evaluations and notes only).
        every: steps between lines.
        ema_samples: horizon, in samples, of the averaged loss in brackets; 0 for none.
        stream: where to write; standard output by default, which in a notebook shows the bar above its lines.
    """

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        stage_end: int | None = None,
        later: float = 0.0,
        mode: Literal["auto", "bar", "lines", "none"] = "auto",
        every: int = 1,
        ema_samples: int = 0,
        stream: TextIO | None = None,
    ) -> None:
        self.total, self.every, self.ema_samples = total, every, ema_samples
        self._stage_end, self._later = total if stage_end is None else stage_end, later
        self._next, self._ema, self._samples = start + 1, math.nan, 0
        self.stream = sys.stdout if stream is None else stream
        in_notebook = stream is None and get_console().is_jupyter
        self.mode = ("bar" if in_notebook or self.stream.isatty() else "lines") if mode == "auto" else mode
        self._speeds: deque[float] = deque(maxlen=RECENT)
        self._parts: list[str] = []  # parts of the last training line
        self._status = ""
        self._problems: Record = {}  # as they were said last
        self._evaluations: dict[str, Record] = {}  # the newest ones
        self._bar: Progress | None = None
        self._above = ExitStack()
        self._notebook: Any = None  # an output of a notebook's cell
        self._drawn = -math.inf  # when the bar was drawn last
        if self.mode == "bar":
            console = get_console() if in_notebook else Console(file=below(self.stream), force_terminal=True)
            logged = isinstance(self.stream, Tee)
            text = "{task.completed}/{task.total} {task.description}"
            self._bar = Progress(
                BarColumn(None, table_column=Column(max_width=WIDEST)),
                TextColumn(text, table_column=Column(no_wrap=True, overflow="ellipsis"), markup=False),
                console=console,
                auto_refresh=False,  # its thread would not survive a fork of data workers
                redirect_stdout=not logged,
                redirect_stderr=not logged,
            )
            self._task = self._bar.add_task("", total=total, completed=start)
            if in_notebook:
                from IPython.display import display

                # rich's own display needs ipywidgets, and leaves nothing in the saved notebook.
                self._notebook, self._drawn = display(self._bar, display_id=True), time.monotonic()  # type: ignore[no-untyped-call]

    def step(self, done: int) -> None:
        """Show the number of steps done, in the bar."""
        loading.end()
        if self._bar is not None and time.monotonic() - self._drawn >= REDRAWN:
            self._bar.update(self._task, completed=done)
            self._draw()

    def write(self, record: Record) -> None:
        if "eval" in record:
            self._evaluations[record["eval"]] = record
            self.say(evaluation_line(record))
        elif "health" in record:
            found = {name: problems(counts) for name, counts in record["health"].items()}
            worse = [value > 2 * self._problems.get(what, 0) for what, value in flat(found).items()]
            if any(worse):
                self._problems = flat(found)
                text = "; ".join(f"{name}: {', '.join(describe_problems(one))}" for name, one in found.items() if one)
                self.say(f"data at step {record['step']}: {text}")
        elif "nonfinite" in record:
            self.say(nonfinite_line(record))
        elif "rollback" in record:
            skipped, to = record["rollback"]["skipped"], record["rollback"]["to"]
            self.say(f"warning: {skipped} steps in a row were left out: back to the weights of step {to}")
        elif "profile" in record:
            first, last = record["profile"]["steps"]
            self.say(f"profile of steps {first} to {last}: {record['profile'].get('trace', 'not written')}")
        elif "end" in record:
            newest = [last for last in self._evaluations.values() if "error" not in last]
            if any(len(_metrics(last)) > len(_main_metrics(last)) for last in newest):
                self.say(table(newest))
            if "early_stop" in record["end"]:
                self.say(f"ended at step {record['step']}: {early_stop_line(record['end']['early_stop'])}")
        elif "loss" in record:
            self._training(record)

    def status(self, text: str) -> None:
        """Show in the bar what the run does besides training; '' when it is over."""
        self._status = text
        self._draw()

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one, and log it."""
        text = printable_lines(text)
        loading.erase()
        if self._bar is None or self._notebook is not None:
            print(text, file=self.stream, flush=True)
            return
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=not self.stream.isatty())
        for line in text.splitlines():
            log_displayed(line)

    def close(self) -> None:
        self._above.close()
        if self._notebook is not None:
            self._notebook.update(self._bar)
        elif self._bar is not None:
            self._bar.stop()

    def _training(self, record: Record) -> None:
        step = int(record["step"])
        speed = float(record.get("samples_per_s") or 0.0)
        if speed > 0:
            self._speeds.append(speed)
        loss = f"loss {_number(record['loss'], '.4g')}"
        if self.ema_samples:
            loss += f" ({self._average(record):.4g})"
        parts = [loss, f"{speed:.0f} samples/s"]
        if "data_wait" in record:
            slow = record.get("bottleneck", "training")
            parts.append(f"data wait {record['data_wait']:.0%}{'' if slow == 'training' else f' ({slow})'}")
        if "mfu" in record:
            parts.append(f"MFU {record['mfu']:.0%}")
        if "memory_peak_gib" in record.get("gpu", {}):
            parts.append(f"{record['gpu']['memory_peak_gib']:.1f} GiB")
        if self._speeds and step and record.get("samples"):
            samples_left = (self._stage_end - step) * record["samples"] / step + self._later
            parts.append(f"eta {duration(samples_left * len(self._speeds) / sum(self._speeds))}")
        line = [f"step {step}/{self.total}", *parts]
        if "lr" in record:
            line.insert(2, f"lr {record['lr']:.1e}")
        if self._bar is not None:
            self._parts = parts
            self._bar.update(self._task, completed=step)
            self._draw()
            log_displayed("  ".join(line))
        elif self.mode == "lines" and (step >= self._next or step == self.total):
            self._next = step - step % self.every + self.every if self.every > 1 else step + 1
            self.say("  ".join(line))

    def _average(self, record: Record) -> float:
        """The exponential average of the loss, with a decay of exp(-n / ema_samples) over n samples."""
        loss, samples = record["loss"], int(record.get("samples") or 0)
        if isinstance(loss, float) and math.isfinite(loss):
            decay = math.exp(-(samples - self._samples) / self.ema_samples)
            self._ema = loss if math.isnan(self._ema) else decay * self._ema + (1 - decay) * loss
            self._samples = samples
        return self._ema

    def _draw(self) -> None:
        """Draw the bar; from then on what is printed appears above it."""
        if self._bar is None:
            return
        if math.isinf(self._drawn) and self._notebook is None:
            loading.end()
            self._bar.start()
            if isinstance(self.stream, Tee):
                self._above.enter_context(print_above(self._bar.console))
        text = "  ".join([f"[{self._status}]", *self._parts[:1]] if self._status else self._parts)
        self._bar.update(self._task, description=text, refresh=True)
        if self._notebook is None:
            self._drawn = time.monotonic()
        elif time.monotonic() - self._drawn >= REDRAWN:
            self._drawn = time.monotonic()
            self._notebook.update(self._bar)


def problems(counts: Record) -> dict[str, float]:
    """What is wrong with a source: shares of the samples read, without those that lists leave out, by the reason for
    which they were dropped; numbers of other things, such as broken shards.
    """
    drops = {reason: count for reason, count in counts["dropped"].items() if reason not in LEFT_OUT}
    read = max(counts["read"] - sum(counts["dropped"].get(reason, 0) for reason in LEFT_OUT), 1)
    others = {name: n for name, n in counts.items() if name not in ("read", "used", "shards") and isinstance(n, int)}
    return {reason: n / read for reason, n in drops.items() if n} | {name: n for name, n in others.items() if n}


def describe_problems(found: Record) -> list[str]:
    drops = [f"{reason} {percent(share)}" for reason, share in found.items() if isinstance(share, float)]
    dropped = percent(sum(share for share in found.values() if isinstance(share, float)))
    others = [f"{name} {n}" for name, n in found.items() if isinstance(n, int)]
    return [*([f"{dropped} of the samples read are dropped ({', '.join(drops)})"] if drops else []), *others]


def _metrics(record: Record) -> list[str]:
    return [name for name in metrics_of(record) if name not in COUNTS and not name.startswith("chance")]


def _main_metrics(record: Record) -> list[str]:
    return [name for name in _metrics(record) if not is_minor(name)] or _metrics(record)[:1]


def evaluation_line(record: Record) -> str:
    """The main metrics of an evaluation, or else its first one, on one line; or how it failed."""
    head = f"{record['eval']} at step {record['step']}:"
    if "error" in record:
        return f"{head} failed: {str(record['error']).splitlines()[0]}"
    names = _main_metrics(record)
    chances = [format_chance(record, name) for name in names]
    parts = []
    for name, chance, after in zip(names, chances, [*chances[1:], ""], strict=True):
        told = f" (chance {chance})" if chance and chance != after else ""
        parts.append(f"{name.replace('_to_', '->').replace('_', ' ')} {format_value(name, record[name])}{told}")
    return f"{head} {', '.join(parts) or 'no metrics'}"


def nonfinite_line(record: Record) -> str:
    skipped = record["nonfinite"]
    return (
        f"warning: step {record['step']} is left out: loss {skipped['loss']}, norm of the gradients "
        f"{skipped['grad_norm']}; its samples: " + listed(skipped["keys"], SHOWN_KEYS, f" in {NONFINITE_FILE}")
    )


def early_stop_line(stop: Record) -> str:
    """Why a run ended before its last step, as text."""
    since = "" if stop["best_step"] is None else f" since step {stop['best_step']:g} ({_number(stop['best'], '.4g')})"
    evaluations = counted(stop["evaluations"], "evaluation")
    return f"{stop['metric']} has not improved{since}, in {evaluations}"


def table(records: Sequence[Record]) -> str:
    """Evaluations as text: a line per metric, with its chance level."""
    rows = [("evaluation", "metric", "value", "95% interval", "chance")]
    for record in records:
        for name, value in metrics_of(record).items():
            if name.startswith("chance") or is_count_of_part(name, record):
                continue
            shown = duration(value) if name == "seconds" else format_value(name, value, "g")
            rows.append((record["eval"], name, shown, interval(record, name), format_chance(record, name)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:{'<' if i < 2 else '>'}{widths[i]}}" for i, cell in enumerate(row)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, (int, float)) else str(value)


class _Formatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _URL.sub(lambda url: redact(url[0]), record.message)
        return super().formatMessage(record)


class _File(WatchedFileHandler):
    """Opens a file anew that was replaced or deleted."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # the folder is away
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the line: the message about a full disk would be the next line to be written."""

    def close(self) -> None:
        """Close the file; what a full disk does not take is dropped."""
        with suppress(OSError):
            super().close()


@contextmanager
def print_above(console: Console) -> Iterator[None]:
    """Have what is printed on a terminal appear above the live display of `console`, as long as the context is open."""
    tees = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, Tee) and stream.isatty()]
    before = [tee.terminal for tee in tees]
    for tee in tees:
        tee.terminal = FileProxy(console, tee.terminal)
    try:
        yield
    finally:
        for tee, stream in zip(tees, before, strict=True):
            tee.flush()
            tee.terminal = stream


@contextmanager
def run_log(folder: Path, name: str = LOG_FILE) -> Iterator[None]:
    """Add the lines of this process to a file in the folder, until the context ends.

    Raises OSError: the file cannot be opened.
    """
    handler = _File(folder / name, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(_Formatter("%(asctime)s | %(levelname)s | %(message)s", "%Y-%m-%d,%H:%M:%S"))
    handler.setLevel(logging.INFO)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(level or logging.INFO, logging.INFO))
    out: Any = Tee(sys.stdout)
    error: Any = Tee(sys.stderr)
    try:
        with redirect_stdout(out), redirect_stderr(error):
            yield
    finally:
        out.finish()
        error.finish()
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()

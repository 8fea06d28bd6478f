"""Owns the measuring of a user's own shards on this machine: samples a second by stage and by number of workers.

It reads as training does, with the settings that are given, and throws the batches away. It never trains, and builds a
model only for the size of its pictures and its tokenizer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from clipstream import durable
from clipstream.cli import own_flags
from clipstream.config import Settings, load, resolve
from clipstream.data.settings import DataSettings
from clipstream.data.stages import IDLE
from clipstream.errors import ClipstreamError, SettingsError
from clipstream.model.pretrained import preflight
from clipstream.report.progress import duration, milliseconds, percent
from clipstream.report.sinks import json_line
from clipstream.tools.pool import cores
from clipstream.world import World

if TYPE_CHECKING:
    from clipstream.batch import ImageSpec
    from clipstream.data.stages import StageTimes
    from clipstream.data.text import Tokenizer

OWN_FLAGS = {
    "--counts": "numbers of workers to measure, by ',': 1, 2, 4 … up to the cores unless given",
    "--seconds": "how long to measure each of them (10)",
    "--gpus": "how many GPUs are to be fed (1)",
    "--gpu-rate": "samples a second that one GPU trains; 500, 1000, 2000 and 4000 are shown unless given",
    "--output": "file that gets a JSON line a measurement",
}
USUAL_RATES = (500.0, 1000.0, 2000.0, 4000.0)


@dataclass(frozen=True)
class Measured:
    """What so many workers gave.

    Attributes:
        workers: processes; 0 for none but this one.
        rate: samples/s.
        first: s from the call to the first batch.
        times: of the stages.
        samples: that the times are of.
    """

    workers: int
    rate: float
    first: float
    times: StageTimes
    samples: int

    @property
    def each(self) -> float:
        """Samples/s of one worker."""
        return self.rate / max(1, self.workers)


def bench(argv: Sequence[str]) -> int:
    """Measure what the command line names; the exit code.

    Raises:
        SettingsError: wrong settings, or nothing to measure.
        DataError: the shards give nothing.
        ClipstreamError: the figures could not be written.
    """
    own, flags = own_flags(argv, OWN_FLAGS)
    seconds, gpus = _number(own, "--seconds", 10.0), _number(own, "--gpus", 1.0)
    rates = (_number(own, "--gpu-rate", 0.0),) if "--gpu-rate" in own else USUAL_RATES
    settings = load(flags)
    if not settings.data.sources:
        raise SettingsError("there is nothing to measure: give --train-data SHARDS")
    settings = resolve(settings, World())
    counts = _counts(own.get("--counts"), int(settings.data.lanes))
    output = _writable(own.get("--output"))
    preflight(settings.model, settings.tokenizer)
    tokenizer, image = _needs(settings)
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = 120
    found = []
    for count in counts:
        console.print(f"{count} worker{'s' * (count != 1)} …")
        found.append(measure(settings.data, count, seconds, tokenizer, image, settings.run.seed))
    _show(found, console)
    best = max(found, key=lambda one: one.rate)
    for line in needs(best, gpus, rates, cores()):
        console.print(line)
    if output is not None:
        try:
            with output.open("a", encoding="utf-8") as file:
                file.writelines(json_line(_record(one)) for one in found)
        except OSError as error:
            raise ClipstreamError(f"--output: {output} could not be written ({error.strerror})") from error
    return 0


def measure(
    data: DataSettings, workers: int, seconds: float, tokenizer: Tokenizer, image: ImageSpec, seed: int
) -> Measured:
    """Read for `seconds` with so many workers, after the first batches.

    Args:
        data: with `lanes` resolved; its own number of workers is not used.
    """
    from clipstream.data.sources import training_loader

    settings = data.model_copy(update={"workers": workers})
    began = time.perf_counter()
    with training_loader(settings, world=World(), seed=seed, tokenizer=tokenizer, image=image) as loader:
        next(loader)
        first = time.perf_counter() - began
        for _ in range(settings.prefetch):  # were filled meanwhile, or begun
            next(loader)
        loader.take_times()
        samples, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < seconds or not samples:
            samples += len(next(loader))
        return Measured(workers, samples / took, first, loader.take_times(), samples)


def needs(measured: Measured, gpus: float, rates: Sequence[float], cores: int) -> list[str]:
    """How many workers would feed the GPUs, in words."""
    lines = []
    for rate in rates:
        wanted = math.ceil(gpus * rate / measured.each)
        there = f"; here are {cores} cores" if wanted > cores else ""
        lines.append(
            f"{gpus:g} GPU{'s' * (gpus != 1)} that train{'s' * (gpus == 1)} {rate:,.0f} samples/s"
            f"{' each' * (gpus != 1)}: {wanted} workers in all, a core each{there}"
        )
    return lines


def _needs(settings: Settings) -> tuple[Tokenizer, ImageSpec]:
    """The model's tokenizer and pictures; its weights do not matter."""
    from clipstream.data.text import build_tokenizer
    from clipstream.model.pretrained import fetch
    from clipstream.model.towers import build_towers

    fetch(settings.model, settings.tokenizer, World())
    towers = build_towers(settings.model, seed=settings.run.seed, tokenizer=settings.tokenizer)
    tokenizer = build_tokenizer(
        settings.tokenizer, towers.open_clip_tokenizer(), towers.context_length, cache_dir=settings.model.cache_dir
    )
    return tokenizer, towers.image


def _show(found: Sequence[Measured], console: Console) -> None:
    table = Table(title="Workers", title_justify="left")
    for column in ("workers", "samples/s", "each", "first batch", "bottleneck"):
        table.add_column(column, justify="left" if column == "bottleneck" else "right")
    for one in found:
        table.add_row(
            str(one.workers), f"{one.rate:,.0f}", f"{one.each:,.0f}", duration(one.first), one.times.longest() or ""
        )
    console.print(table)
    last = found[-1]
    table = Table(title=f"Stages of {last.workers} workers", title_justify="left")
    for column in ("stage", "share", "a sample", "samples/s alone, a core", "p50", "p99"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    whole = sum(last.times.seconds.values())
    for stage, took in last.times.summary().items():
        a_sample = took["seconds"] / last.samples
        table.add_row(
            stage,
            percent(took["seconds"] / whole),
            milliseconds(a_sample),
            "" if stage == IDLE else f"{1 / a_sample:,.0f}",
            milliseconds(took["p50"]),
            milliseconds(took["p99"]),
        )
    console.print(table)


def _record(one: Measured) -> dict[str, object]:
    return {
        "workers": one.workers,
        "samples_per_s": one.rate,
        "first_batch_s": one.first,
        "bottleneck": one.times.longest(),
        "stages": one.times.summary(),
    }


def _counts(given: str | None, lanes: int) -> list[int]:
    if given is None:
        most = cores()
        return [count for count in (2**k for k in range(most.bit_length())) if count <= min(most, lanes)]
    try:
        counts = sorted({int(part) for part in given.split(",")})
    except ValueError:
        counts = [-1]
    if counts[0] < 0 or counts[-1] > lanes:
        raise SettingsError(f"--counts: give numbers from 0 to {lanes}, the lanes, as in 1,2,4, not {given!r}")
    return counts


def _writable(name: str | None) -> Path | None:
    """The file that gets the figures, so that nothing is measured in vain. Raises SettingsError."""
    if name is None:
        return None
    path = Path(name)
    try:
        durable.probe(path)
    except OSError as error:
        raise SettingsError(f"--output: {path} cannot be written ({error.strerror})") from error
    return path


def _number(own: dict[str, str], flag: str, default: float) -> float:
    try:
        value = float(own.get(flag, default))
    except ValueError:
        value = 0.0
    if not (0 < value < math.inf) and flag in own:
        raise SettingsError(f"{flag}: give a number above 0, not {own[flag]!r}")
    return value

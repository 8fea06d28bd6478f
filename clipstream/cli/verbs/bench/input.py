"""`clipstream bench`: throughput of a user's own shards on this machine, by stage and number of workers.

Reads as training does, with the same settings, and discards the batches. A model is built only for its image size and
tokenizer.
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

from clipstream.config.dump import print_config, take_flag
from clipstream.config.flags import own_flags
from clipstream.config.settings import load, resolve
from clipstream.data.loader.stage_timing import IDLE
from clipstream.data.settings import DataSettings
from clipstream.distributed.capabilities import cores
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError, SettingsError
from clipstream.models.pretrained import preflight
from clipstream.report.sinks import json_line
from clipstream.text import counted, duration, milliseconds, percent
from clipstream.utils import atomic_write
from clipstream.utils.console import ResultConsole
from clipstream.utils.logs import set_level

if TYPE_CHECKING:
    from clipstream.data.batch import ImageSpec
    from clipstream.data.decode.tokenizers import Tokenizer
    from clipstream.data.loader.stage_timing import StageTimes

OWN_FLAGS = {
    "--counts": "numbers of workers to measure, separated by ',': 1, 2, 4 … up to the cores unless given",
    "--seconds": "how long to measure each of them (10)",
    "--gpus": "number of GPUs to feed (1)",
    "--gpu-rate": "samples a second that one GPU trains; 500, 1000, 2000 and 4000 are shown unless given",
    "--output": "file that a JSON line is appended to for each measurement",
}
USUAL_RATES = (500.0, 1000.0, 2000.0, 4000.0)


@dataclass(frozen=True)
class Measured:
    """The throughput with one number of workers."""

    workers: int  # processes; 0 for reading in this process
    rate: float  # samples/s
    first: float  # seconds to the first batch
    times: StageTimes  # of the stages
    samples: int  # samples in `times`

    @property
    def each(self) -> float:
        return self.rate / max(1, self.workers)

    def record(self) -> dict[str, object]:
        return {
            "workers": self.workers,
            "samples_per_s": self.rate,
            "first_batch_s": self.first,
            "bottleneck": self.times.longest(),
            "stages": self.times.summary(),
        }


def bench(argv: Sequence[str]) -> int:
    """Measure, print tables, and return the exit code.

    Raises:
        SettingsError: wrong settings, or no shards.
        DataError: the shards have no usable sample.
        ClipstreamError: the figures could not be written.
    """
    every, argv = take_flag(argv)
    own, flags = own_flags(argv, OWN_FLAGS)
    seconds, gpus = _number(own, "--seconds", 10.0), _number(own, "--gpus", 1.0)
    rates = (_number(own, "--gpu-rate", 0.0),) if "--gpu-rate" in own else USUAL_RATES
    settings = load(flags)
    set_level(settings.log.level)
    settings.log_notices()
    if every is not None:
        return print_config(settings, "bench", every)
    if not settings.data.sources:
        raise SettingsError("there is nothing to measure: give --train-data SHARDS")
    settings = resolve(settings, World())
    lanes, most = int(settings.data.lanes), cores()
    counts = [count for count in (2**k for k in range(most.bit_length())) if count <= min(most, lanes)]
    if (given := own.get("--counts")) is not None:
        try:
            counts = sorted({int(part) for part in given.split(",")})
        except ValueError:
            counts = [-1]
        if counts[0] < 0 or counts[-1] > lanes:
            raise SettingsError(f"--counts: give numbers from 0 to {lanes}, the lanes, as in 1,2,4, not {given!r}")
    output = Path(own["--output"]) if "--output" in own else None
    if output is not None:
        try:
            atomic_write.probe(output)
        except OSError as error:
            raise SettingsError(f"--output: {output} cannot be written ({error.strerror})") from error
    preflight(settings.model, settings.tokenizer)
    from clipstream.data.decode.tokenizers import build_tokenizer
    from clipstream.models.build import build_towers
    from clipstream.models.pretrained import fetch

    fetch(settings.model, settings.tokenizer, World())
    towers = build_towers(settings.model, seed=settings.run.seed, tokenizer=settings.tokenizer)
    tokenizer = build_tokenizer(
        settings.tokenizer, towers.open_clip_tokenizer(), towers.context_length, cache_dir=settings.model.cache_dir
    )
    console = ResultConsole(120, markup=False)
    found = []
    for count in counts:
        console.print(f"{counted(count, 'worker')} …")
        found.append(measure(settings.data, count, seconds, tokenizer, towers.image, settings.run.seed))
    _show(found, console)
    best = max(found, key=lambda one: one.rate)
    for line in needs(best, gpus, rates, cores()):
        console.print(line)
    if output is not None:
        try:
            with output.open("a", encoding="utf-8") as file:
                file.writelines(json_line(one.record()) for one in found)
        except OSError as error:
            raise ClipstreamError(f"--output: {output} could not be written ({error.strerror})") from error
    return 0


def measure(
    data: DataSettings, workers: int, seconds: float, tokenizer: Tokenizer, image: ImageSpec, seed: int
) -> Measured:
    """The throughput over `seconds`, after the first batches.

    Args:
        data: with `lanes` resolved; `workers` is ignored.
    """
    from clipstream.data.build import training_loader

    settings = data.model_copy(update={"workers": workers})
    began = time.perf_counter()
    with training_loader(settings, world=World(), seed=seed, tokenizer=tokenizer, image=image, views=True) as loader:
        next(loader)
        first = time.perf_counter() - began
        for _ in range(settings.prefetch):  # already filled, or begun
            next(loader)
        loader.take_times()
        samples, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < seconds or not samples:
            samples += len(next(loader))
        return Measured(workers, samples / took, first, loader.take_times(), samples)


def needs(measured: Measured, gpus: float, rates: Sequence[float], cores: int) -> list[str]:
    """One sentence for each rate: how many workers the GPUs need.

    Args:
        rates: samples/s of one GPU.
    """
    lines = []
    for rate in rates:
        wanted = math.ceil(gpus * rate / measured.each)
        there = f"; here are {cores} cores" if wanted > cores else ""
        lines.append(
            f"{counted(gpus, 'GPU', 'g')} that train{'s' * (gpus == 1)} {rate:,.0f} samples/s"
            f"{' each' * (gpus != 1)}: {wanted} workers in all, a core each{there}"
        )
    return lines


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


def _number(own: dict[str, str], flag: str, default: float) -> float:
    try:
        value = float(own.get(flag, default))
    except ValueError:
        value = 0.0
    if not (0 < value < math.inf) and flag in own:
        raise SettingsError(f"{flag}: give a number above 0, not {own[flag]!r}")
    return value

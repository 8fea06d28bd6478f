"""The verb bench: measure how fast shards are read, or with `bench train` how fast a model trains.

`bench` reads as training does, with the same settings, by stage and number of workers, and discards the batches; a
model is built only for its image size and tokenizer. `bench train` is in `ladder`, which imports torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator
from rich.console import Console

from clipstream.config.command_line import CommandLine, OutPath, Verb, flag, output_file
from clipstream.config.help import READING
from clipstream.config.plan import with_lanes
from clipstream.config.settings import Written
from clipstream.config.validate import preflight_models, validate_sources
from clipstream.data.loader.stage_timing import IDLE
from clipstream.data.settings import DataSettings
from clipstream.data.source_settings import SourceSettings
from clipstream.distributed.launch import run_ranks
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError, SettingsError, did_you_mean, errors_as
from clipstream.models.pretrained import preflight
from clipstream.report.records import json_line
from clipstream.text import counted, duration, milliseconds, percent
from clipstream.utils.console import ResultConsole, result_table
from clipstream.utils.processes import cores
from clipstream.utils.section import Section

if TYPE_CHECKING:
    from clipstream.data.batch import ImageSpec
    from clipstream.data.decode.tokenizers import Tokenizer
    from clipstream.data.loader.stage_timing import StageTimes

RUNGS = (
    "tf32", "precision", "fused", "compile", "buckets", "checkpointing", "micro-batch", "fsdp", "patch-dropout",
    "shards",
)  # fmt: skip
USUAL_RATES = (500.0, 1000.0, 2000.0, 4000.0)
GENERATED = "toy:train"  # source of the batches of `bench train` where no shards are given


class InputFlags(Section):
    """Measure how fast shards are read, by stage and number of workers, or with `bench train` how a model trains."""

    counts: str | None = flag("numbers of workers to measure, separated by ',' (default: 1, 2, 4 … up to all cores)")
    seconds: float = flag("seconds to measure each number of workers", 10.0, gt=0)
    gpus: float = flag("number of GPUs to feed", 1.0, gt=0)
    gpu_rate: float | None = flag("samples/s that one GPU trains (default: shows 500, 1000, 2000 and 4000)", gt=0)
    output: OutPath | None = flag("append a JSON line per measurement to this file", form="FILE")


def _rungs(given: str | Sequence[str]) -> Sequence[str]:
    """The names, in a text separated by ','. Raises ValueError: one is unknown."""
    names = given.split(",") if isinstance(given, str) else given
    for name in names:
        if name not in RUNGS:
            raise ValueError(f"unknown setting {name!r}{did_you_mean(name, RUNGS)}; choose from {', '.join(RUNGS)}")
    return names


class Options(Section):
    """Measure how fast the model trains as settings are added one by one, starting from float32 with padded texts,
    without compilation or fusion, and print the suggested settings as YAML. Reports samples/s, memory, MFU and the
    difference from the baseline's loss. Uses the first batches of --train-data, or generated ones. Under torchrun,
    all ranks are measured together.
    """

    rungs: Annotated[tuple[str, ...], BeforeValidator(_rungs)] = flag(
        f"settings to measure, separated by ',': {', '.join(RUNGS)} (default: all)", RUNGS, form="NAMES"
    )
    rounds: int = flag("number of interleaved rounds", 3, ge=1)
    steps: int = flag("measured steps per setting and round", 5, ge=1)
    warmup_steps: int = flag("warm-up steps before them", 2, ge=0)
    loss_steps: int = flag("steps after which losses are compared", 20, ge=1)
    loss_tolerance: float = flag("maximum relative difference from the baseline's loss", 0.01, gt=0)
    against: Literal["open_clip"] | None = flag(
        "also measure the training step of open_clip's trainer on the same tensors"
    )
    csv: OutPath | None = flag("write the table to this file", form="FILE")
    yaml: OutPath | None = flag("write the suggested settings to this file, for --config", form="FILE")


def bench_train(command: CommandLine[Options]) -> int:
    """Raises ClipstreamError: wrong settings, or the baseline cannot run."""
    options = command.own
    output_file(options.csv, "--csv")
    output_file(options.yaml, "--yaml")
    settings, places = command.load()
    if not settings.data.sources:
        options = options.model_copy(update={"rungs": tuple(name for name in options.rungs if name != "shards")})
        source = SourceSettings.model_validate({"shards": GENERATED})
        data = settings.data.model_copy(update={"sources": {"train": source}})
        settings = settings.model_copy(update={"data": data})
    found = validate_sources(Written(settings, places))
    preflight_models(settings)
    from clipstream.cli.verbs.bench.ladder import run

    return run_ranks(settings.run, partial(run, found, options))


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


def bench_input(command: CommandLine[InputFlags]) -> None:
    """Measure, and print tables."""
    own = command.own
    rates = USUAL_RATES if own.gpu_rate is None else (own.gpu_rate,)
    settings = command.load().settings
    if not settings.data.sources:
        raise SettingsError("bench requires shards: --train-data SHARDS")
    if settings.data.decoder == "gpu":
        raise SettingsError("data.decoder gpu: bench measures workers, without a GPU: use bench train --rungs shards")
    settings = settings.model_copy(update={"data": with_lanes(settings.data)})
    lanes, most = int(settings.data.lanes), cores()
    counts = [count for count in (2**k for k in range(most.bit_length())) if count <= min(most, lanes)]
    if (given := own.counts) is not None:
        try:
            counts = sorted({int(part) for part in given.split(",")})
        except ValueError:
            counts = [-1]
        if counts[0] < 0 or counts[-1] > lanes:
            raise SettingsError(f"--counts: expected numbers from 0 to {lanes}, the lanes, as in 1,2,4, not {given!r}")
    output = output_file(own.output, "--output")
    preflight(settings.model, settings.tokenizer)
    from clipstream.data.decode.tokenizers import build_tokenizer
    from clipstream.models.build import build_towers

    towers = build_towers(settings.model, seed=settings.run.seed, tokenizer=settings.tokenizer)
    tokenizer = build_tokenizer(
        settings.tokenizer, towers.open_clip_tokenizer(), towers.context_length, cache_dir=settings.model.cache_dir
    )
    console = ResultConsole(120, markup=False)
    found = []
    for count in counts:
        console.print(f"{counted(count, 'worker')} …")
        found.append(measure(settings.data, count, own.seconds, tokenizer, towers.image, settings.run.seed))
    _show(found, console)
    best = max(found, key=lambda one: one.rate)
    for line in needs(best, own.gpus, rates, cores()):
        console.print(line)
    if output is not None:
        failed = errors_as(ClipstreamError, f"--output: cannot write {output}", OSError)
        with failed, output.open("a", encoding="utf-8") as file:
            file.writelines(json_line(one.record()) for one in found)


def measure(
    data: DataSettings, workers: int, seconds: float, tokenizer: Tokenizer, image: ImageSpec, seed: int
) -> Measured:
    """The throughput over `seconds`, after the first batches.

    Args:
        data: with `lanes` resolved; `workers` is ignored.
    """
    from clipstream.data.loader.reading_recipe import ModelInputs
    from clipstream.data.pipeline import training_loader

    settings = data.model_copy(update={"workers": workers})
    began = time.perf_counter()
    inputs = ModelInputs(tokenizer, image)
    with training_loader(settings, inputs, world=World(), seed=seed, zero_copy=True) as loader:
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
    columns = ("workers", "samples/s", "each", "first batch", "bottleneck")
    rates = result_table("Workers", columns, columns[:-1])
    for one in found:
        rates.add_row(
            str(one.workers), f"{one.rate:,.0f}", f"{one.each:,.0f}", duration(one.first), one.times.longest() or ""
        )
    console.print(rates)
    last = found[-1]
    parts = ("stage", "share", "a sample", "samples/s alone, a core", "p50", "p99")
    stages = result_table(f"Stages of {last.workers} workers", parts, parts[1:])
    whole = sum(last.times.seconds.values())
    for stage, took in last.times.summary().items():
        a_sample = took["seconds"] / last.samples
        stages.add_row(
            stage,
            percent(took["seconds"] / whole),
            milliseconds(a_sample),
            "" if stage == IDLE else f"{1 / a_sample:,.0f}",
            milliseconds(took["p50"]),
            milliseconds(took["p99"]),
        )
    console.print(stages)


main = Verb(
    "bench",
    InputFlags,
    bench_input,
    (*READING, "Model", "Batch"),
    (
        Verb(
            "bench train",
            Options,
            bench_train,
            (*READING, "Model", "Batch", "Loss and optimizer", "Device and precision"),
        ),
    ),
)

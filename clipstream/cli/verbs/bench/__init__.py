"""The verb `clipstream bench`: throughput of shards on this machine, and with `bench train` of training by setting.

`bench` reads as training does, with the same settings, by stage and number of workers, and discards the batches; a
model is built only for its image size and tokenizer. `bench train` is in `ladder`, which imports torch.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from clipstream.config.entry import CommandLine, command_line, entry_point
from clipstream.config.flags import choice_flag, number_flag, output_file
from clipstream.config.plan import with_lanes
from clipstream.config.settings import Written
from clipstream.config.validate import preflight_models, validate_sources
from clipstream.data.loader.stage_timing import IDLE
from clipstream.data.settings import DataSettings, SourceSettings
from clipstream.distributed.launch import run_ranks
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError, SettingsError, did_you_mean, errors_as
from clipstream.models.pretrained import preflight
from clipstream.report.sinks import json_line
from clipstream.text import counted, duration, milliseconds, percent
from clipstream.utils.console import ResultConsole, result_table
from clipstream.utils.cores import cores

if TYPE_CHECKING:
    from clipstream.data.batch import ImageSpec
    from clipstream.data.decode.tokenizers import Tokenizer
    from clipstream.data.loader.stage_timing import StageTimes

INPUT_FLAGS = {
    "--counts": "numbers of workers to measure, separated by ',' (default: 1, 2, 4 … up to the number of cores)",
    "--seconds": "seconds to measure each number of workers (default: 10)",
    "--gpus": "number of GPUs to feed (default: 1)",
    "--gpu-rate": "samples/s that one GPU trains (default: shows 500, 1000, 2000 and 4000)",
    "--output": "append a JSON line per measurement to this file",
}
RUNGS = (
    "tf32", "precision", "fused", "compile", "buckets", "checkpointing", "micro-batch", "fsdp", "patch-dropout",
    "shards",
)  # fmt: skip
TRAIN_FLAGS = {
    "--rungs": f"settings to measure, separated by ',': {', '.join(RUNGS)} (default: all)",
    "--rounds": "number of interleaved rounds (default: 3)",
    "--steps": "measured steps per setting and round (default: 5)",
    "--warmup-steps": "warm-up steps before them (default: 2)",
    "--loss-steps": "steps after which losses are compared (default: 20)",
    "--loss-tolerance": "maximum relative difference from the baseline's loss (default: 0.01)",
    "--against": "open_clip: also measure the training step of open_clip's trainer on the same tensors",
    "--csv": "write the table to this file",
    "--yaml": "write the suggested settings to this file, for --config",
}
OWN_FLAGS = {**INPUT_FLAGS, **TRAIN_FLAGS}
USUAL_RATES = (500.0, 1000.0, 2000.0, 4000.0)
GENERATED = "toy:train"  # source of the batches of `bench train` where no shards are given


@dataclass(frozen=True)
class Options:
    """What `bench train` measures, and where it is written."""

    rungs: tuple[str, ...] = RUNGS
    rounds: int = 3
    steps: int = 5
    warmup_steps: int = 2
    loss_steps: int = 20
    loss_tolerance: float = 0.01
    open_clip: bool = False
    csv: Path | None = None
    yaml: Path | None = None


@entry_point
def main(argv: list[str]) -> int:
    if argv[:1] == ["train"]:
        return _bench_train(command_line("bench train", argv[1:], TRAIN_FLAGS))
    if argv and not argv[0].startswith("-") and (meant := did_you_mean(argv[0], ["train"])):
        raise SettingsError(f"unknown topic bench {argv[0]}{meant}")
    return _bench_input(command_line("bench", argv, INPUT_FLAGS))


def _bench_train(command: CommandLine) -> int:
    """Raises ClipstreamError: wrong settings, or the baseline cannot run."""
    options, (settings, places) = train_options(command.own), command.load()
    if not settings.data.sources:
        options = replace(options, rungs=tuple(name for name in options.rungs if name != "shards"))
        source = SourceSettings.model_validate({"shards": GENERATED})
        data = settings.data.model_copy(update={"sources": {"train": source}})
        settings = settings.model_copy(update={"data": data})
    found = validate_sources(Written(settings, places))
    preflight_models(settings)
    from clipstream.cli.verbs.bench.ladder import run

    return run_ranks(settings.run, partial(run, found, options))


def train_options(own: Mapping[str, str]) -> Options:
    """The options that the verb's own flags give. Raises SettingsError: a flag has a wrong value."""
    rungs = tuple(own["--rungs"].split(",")) if "--rungs" in own else RUNGS
    for name in rungs:
        if name not in RUNGS:
            raise SettingsError(
                f"--rungs: unknown setting {name!r}{did_you_mean(name, RUNGS)}; choose from {', '.join(RUNGS)}"
            )
    choice_flag(own, "--against", ("open_clip",), "open_clip")
    return Options(
        rungs,
        number_flag(own, "--rounds", Options.rounds, least=1),
        number_flag(own, "--steps", Options.steps, least=1),
        number_flag(own, "--warmup-steps", Options.warmup_steps, least=0),
        number_flag(own, "--loss-steps", Options.loss_steps, least=1),
        number_flag(own, "--loss-tolerance", Options.loss_tolerance),
        "--against" in own,
        output_file(own, "--csv"),
        output_file(own, "--yaml"),
    )


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


def _bench_input(command: CommandLine) -> int:
    """Measure, print tables, and return the exit code."""
    own = command.own
    seconds, gpus = number_flag(own, "--seconds", 10.0), number_flag(own, "--gpus", 1.0)
    rates = (number_flag(own, "--gpu-rate", 0.0),) if "--gpu-rate" in own else USUAL_RATES
    settings = command.load().settings
    if not settings.data.sources:
        raise SettingsError("bench requires shards: --train-data SHARDS")
    settings = settings.model_copy(update={"data": with_lanes(settings.data)})
    lanes, most = int(settings.data.lanes), cores()
    counts = [count for count in (2**k for k in range(most.bit_length())) if count <= min(most, lanes)]
    if (given := own.get("--counts")) is not None:
        try:
            counts = sorted({int(part) for part in given.split(",")})
        except ValueError:
            counts = [-1]
        if counts[0] < 0 or counts[-1] > lanes:
            raise SettingsError(f"--counts: expected numbers from 0 to {lanes}, the lanes, as in 1,2,4, not {given!r}")
    output = output_file(own, "--output")
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
        found.append(measure(settings.data, count, seconds, tokenizer, towers.image, settings.run.seed))
    _show(found, console)
    best = max(found, key=lambda one: one.rate)
    for line in needs(best, gpus, rates, cores()):
        console.print(line)
    if output is not None:
        failed = errors_as(ClipstreamError, f"--output: cannot write {output}", OSError)
        with failed, output.open("a", encoding="utf-8") as file:
            file.writelines(json_line(one.record()) for one in found)
    return 0


def measure(
    data: DataSettings, workers: int, seconds: float, tokenizer: Tokenizer, image: ImageSpec, seed: int
) -> Measured:
    """The throughput over `seconds`, after the first batches.

    Args:
        data: with `lanes` resolved; `workers` is ignored.
    """
    from clipstream.data.loader.recipe import ModelInputs
    from clipstream.data.pipeline import training_loader

    settings = data.model_copy(update={"workers": workers})
    began = time.perf_counter()
    inputs = ModelInputs(tokenizer, image)
    with training_loader(settings, inputs, world=World(), seed=seed, views=True) as loader:
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


if __name__ == "__main__":
    sys.exit(main())

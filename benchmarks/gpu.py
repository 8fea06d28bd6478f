"""Training on one GPU: samples/s, MFU, memory and time by part of B/32, B/16, L/14 and SigLIP B/16, beside open_clip's.

    python benchmarks/gpu.py --models ViT-B-32 ViT-B-16 --csv build/gpu.csv --write docs/benchmarks.md   # 4 minutes
    python benchmarks/gpu.py --models ViT-L-14 ViT-B-16-SigLIP --csv build/gpu-2.csv                      # 4 minutes
    python benchmarks/gpu.py --device cpu --small           # the same on tiny models, to try the script

Each model has these rows, in bf16 with a fused optimizer:

    eager-padded, eager-buckets, eager-packed   nothing compiled; texts padded, in buckets by length, or packed
    compiled             compiled blocks, texts in buckets where the tower allows them
    shards               the same, each batch read from shards
    shards-gpu           the same with `data.decoder: gpu`
    open_clip            the step of open_clip_train with amp_bf16 on the same tensors
    open_clip-compiled   the same with --torchcompile

A row is written to the CSV file as soon as it is measured. The models share `--minutes`, L/14 with twice the share of
another; a row may take 60% of the time that its model has left, the last one all of it, and says so where that is too
short. Before the clock, a row passes over all batches that it will be measured on, again until nothing is compiled;
`shards` has new batches, and tells how many graphs were compiled meanwhile. To compile the model of
`open_clip-compiled` takes minutes: `--rows open_clip open_clip-compiled --minutes 20` measures it. A figure of speed
is the median of the rounds.

Pictures are generated (`made.py`); captions are those of `captions.txt`, written as alternative texts of web pages are:
3 to 41 tokens, 12 in the median. Shards of your own may be given instead. SigLIP has CLIP's tokenizer, which needs no
download; its token table is larger so, and its arithmetic the same.

Columns of the CSV file: `mfu` and `tflops`, of true text tokens, and `mfu_padded` and `tflops_padded`, as if each text
were as long as the context, which is how published figures are counted; `X_ms`, time of a part of the step on the GPU's
stream, with waits for the host in it (`clipstream.utils.timing`); `kernel_ms` and `kernels`, time in which any kernel
runs and number of kernels of a step, of torch's profiler; `idle`, the share of a step, as measured without the
profiler, in which no kernel runs; `clock_mhz` and `power_w`, medians of NVML's (`pip install nvidia-ml-py`), empty
without it. `--kernels FILE` lists the kernels of each row by time.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import date
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from made import make
from torch._C._autograd import DeviceType
from torch._dynamo.utils import counters

from clipstream.cli.verbs.bench import Options
from clipstream.cli.verbs.bench.ladder import (
    Ladder,
    Parts,
    Rung,
    explain,
    synchronize,
    with_changes,
)
from clipstream.config.plan import survey
from clipstream.config.settings import load
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError
from clipstream.models.execution.flops import peak_tflops
from clipstream.models.model_config import builtin
from clipstream.utils.logs import on_terminal
from clipstream.utils.timing import DATA, GIB, PARTS, PeakMemory, StepTimer, time_part

BEGIN, END = "<!-- benchmarks/gpu.py: table -->", "<!-- benchmarks/gpu.py: end -->"
CAPTIONS = Path(__file__).with_name("captions.txt")
BATCHES = 4  # in memory
PASSES = 4  # most passes over them before the clock
PROFILED = 2  # steps
LISTED = 40  # kernels of a row
SHARE = 0.6  # of the time that its model has left, for a row
INTERVAL = 0.1  # s between two looks at clock and power
COMPILED = {"train.compile": "blocks"}
RUNGS = (
    Rung("eager-padded", {"model.text_buckets": "off"}),
    Rung("eager-buckets", {"model.text_buckets": 10}),  # as many as there are lengths
    Rung("eager-packed", {"model.text_buckets": "packed"}),
    Rung("open_clip", open_clip=True),
    Rung("compiled", COMPILED),
    Rung("shards", COMPILED, from_shards=True),
    Rung("shards-gpu", COMPILED | {"data.decoder": "gpu"}, from_shards=True),
    Rung("open_clip-compiled", open_clip=True, torchcompile=True),
)
# Title, key and format of a column.
SPEED = (
    ("model", "model", ""), ("batch", "batch", ""), ("", "row", ""), ("samples/s", "samples_per_s", ",.0f"),
    ("range", "range", ""), ("to open_clip", "ratio", ".2f"), ("MFU, true tokens", "mfu", ".1%"),
    ("MFU, padded texts", "mfu_padded", ".1%"), ("TFLOP/s", "tflops", ".3g"), ("peak memory, GiB", "memory_gib", ".2f"),
    ("", "note", ""),
)  # fmt: skip
TIMES = (
    ("model", "model", ""), ("", "row", ""), *((f"{part}, ms", f"{part}_ms", ".1f") for part in PARTS),
    ("step, ms", "step_ms", ".1f"), ("kernels, ms", "kernel_ms", ".1f"), ("kernels", "kernels", ",.0f"),
    ("idle", "idle", ".1%"), ("MHz", "clock_mhz", ".0f"), ("W", "power_w", ".0f"),
)  # fmt: skip
COLUMNS = (
    "date", "card", "versions", "model", "row", "batch", "samples_per_s", "lowest", "highest", "step_ms", "mfu",
    "mfu_padded", "tflops", "tflops_padded", "memory_gib", *(f"{part}_ms" for part in PARTS), "kernel_ms", "kernels",
    "idle", "clock_mhz", "power_w", "warmup_s", "warmup_steps", "compiled_graphs", "note",
)  # fmt: skip
Row = dict[str, Any]  # by column


class Model(NamedTuple):
    """A model and the batch that it is measured with."""

    name: str  # open_clip's
    batch: int
    share: float = 1.0  # of the time, relative to other models'


MODELS = (Model("ViT-B-32", 1024), Model("ViT-B-16", 512), Model("ViT-L-14", 256, 2.0), Model("ViT-B-16-SigLIP", 512))


class OutOfTime(BaseException):
    """A row has taken its time; no `except Exception` of a compiler takes it for a failure of its own."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """A context that raises OutOfTime in the main thread after so many seconds, at least 0.01."""

    def expired(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def model_file(name: str, folder: Path, small: bool) -> str:
    """What `--model` takes: the name, or a JSON file of a model that needs no tokenizer of the Hub, or is tiny."""
    cfg: dict[str, Any] = builtin(name)
    if small:
        cfg |= {"embed_dim": 16}
        cfg["vision_cfg"] |= {"layers": 2, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 16}
        cfg["text_cfg"] |= {"layers": 2, "width": 32, "heads": 2, "context_length": 32}
        if "timm_model_name" in cfg["vision_cfg"]:
            cfg["vision_cfg"] = {"layers": 2, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 16}
    if cfg["text_cfg"].pop("hf_tokenizer_name", None) is not None:
        cfg["text_cfg"].pop("tokenizer_kwargs", None)
        cfg["text_cfg"]["vocab_size"] = 49408
    elif not small:
        return name
    path = folder / f"{name}.json"
    path.write_text(json.dumps(cfg))
    return str(path)


def ladder_of(model: Model, shards: str, folder: Path, args: argparse.Namespace) -> Ladder:
    """The settings of a model's rows, and their batches in memory."""
    batch = args.batch or (8 if args.small else model.batch)
    cpu = args.device == "cpu"
    flags = [
        "--train-data", shards, "--model", model_file(model.name, folder, args.small), "--device", args.device,
        "--data.global-batch-size", str(batch), "--precision", "fp32" if cpu else "bf16", "--train.compile", "off",
        "--train.tf32", json.dumps(not cpu), "--workers", str(args.workers),
        *(["--train.compile-backend", "eager"] if cpu else []),  # which needs no C++ compiler
    ]  # fmt: skip
    options = Options(rungs=(), loss_steps=BATCHES)
    return Ladder(survey(load(flags, ranks=1), count=False), options, World(device="cpu" if cpu else "cuda:0"))


def measure(ladder: Ladder, rung: Rung, seconds: float, args: argparse.Namespace, row: Row) -> None:
    """Measure a rung for at most so many seconds, and put what is found into `row` as soon as it is known."""
    until = time.monotonic() + seconds
    device = ladder.world.device
    if rung.name in ("eager-buckets", "eager-packed") and ladder.padded is not None:
        row["note"] = f"not run: {ladder.padded}"
        return
    memory = PeakMemory(device)
    with ExitStack() as stack:
        try:
            with time_limit(seconds):
                settings = with_changes(ladder.settings, rung.changes)
                parts = ladder.build(settings, rung, stack)
                step = step_of(parts, settings.optim.lr, [ladder.batches[0]] if rung.open_clip else None)
                warm_up(step, until - seconds / 2, row)
                timer, sensors = StepTimer(device), Sensors(device)
                rates: list[float] = []
                before = graphs()
                with timer.active(), sensors:
                    while len(rates) < args.rounds and (not rates or time.monotonic() < until - 2):
                        rates.append(rate_of(step, args.steps, timer, device))
                        row["samples_per_s"], row["lowest"], row["highest"] = (
                            statistics.median(rates), min(rates), max(rates),
                        )  # fmt: skip
                if graphs() > before:
                    row["compiled_graphs"] = graphs() - before
                    row["note"] = f"compiled {graphs() - before} graphs in measured steps"
                row["step_ms"] = 1e3 * row["batch"] / row["samples_per_s"]
                row["memory_gib"] = memory.peak() / GIB
                peak = peak_tflops(device, settings.train.arithmetic)
                for suffix, padded in (("", False), ("_padded", True)):
                    found = row[f"tflops{suffix}"] = ladder.tflops(settings, row["samples_per_s"], padded=padded)
                    row[f"mfu{suffix}"] = None if found is None or peak is None else found / peak
                row.update(sensors.medians())
                if not rung.open_clip:
                    parts_s, steps = timer.take()
                    row.update({f"{part}_ms": 1e3 * spent / steps for part, spent in parts_s.items()})
                if device != "cpu":
                    kernels = kernels_of(step, device)
                    row["kernel_ms"], row["kernels"] = busy_ms(kernels) / PROFILED, len(kernels) / PROFILED
                    row["idle"] = max(0.0, 1 - row["kernel_ms"] / row["step_ms"])
                    if args.kernels is not None:
                        with args.kernels.open("a", encoding="utf-8") as file:
                            file.write(f"{row['model']}, {rung.name}\n{by_time(kernels, PROFILED)}\n")
        except OutOfTime:
            row["note"] = f"stopped after {seconds:.0f} s"
        except (ClipstreamError, RuntimeError) as error:
            row["note"] = f"{'stopped' if 'samples_per_s' in row else 'not run'}: {explain(error)}"


def step_of(parts: Parts, lr: float, batches: Sequence[Any] | None) -> Callable[[], int]:
    """One step, which returns its number of samples; as in training, its loss is read when the next one has started.

    Args:
        batches: prepared once and repeated; None for those of the parts.
    """
    once = None if batches is None else itertools.cycle([(len(batch), parts.prepare(batch)) for batch in batches])

    started: list[Callable[[], float]] = []

    def step() -> int:
        if once is not None:
            count, batch = next(once)
        else:
            with time_part(DATA):
                batch = next(parts.batches)
            count = len(batch)
        started.append(parts.step(batch, lr / 100))
        if len(started) > 1:
            started.pop(0)()
        return count

    return step


def graphs() -> int:
    """How many graphs torch.compile has compiled in this process."""
    return int(counters["stats"]["unique_graphs"])


def warm_up(step: Callable[[], int], until: float, row: Row) -> None:
    """Pass over as many batches as are in memory, and again until nothing is compiled or the time is over."""
    began, before, row["warmup_steps"] = time.monotonic(), -1, 0
    while graphs() != before and row["warmup_steps"] < PASSES * BATCHES and time.monotonic() < until:
        before = graphs()
        for _ in range(BATCHES):
            step()
        row["warmup_steps"] += BATCHES
    row["warmup_s"] = time.monotonic() - began


def rate_of(step: Callable[[], int], steps: int, timer: StepTimer, device: str) -> float:
    """Samples/s of some steps."""
    samples = 0
    synchronize(device)
    began = time.perf_counter()
    for _ in range(steps):
        samples += step()
        timer.end_step()
    synchronize(device)
    return samples / (time.perf_counter() - began)


class Sensors:
    """A context in which a thread reads clock and power of a GPU, where NVML has them."""

    def __init__(self, device: str) -> None:
        self._device, self._over = torch.device(device), threading.Event()
        self._read: dict[str, Callable[[Any], float]] = {}
        self._found: dict[str, list[float]] = {}
        if self._device.type == "cuda":
            self._read = {"clock_mhz": torch.cuda.clock_rate, "power_w": lambda one: torch.cuda.power_draw(one) / 1e3}

    def __enter__(self) -> Sensors:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(1)

    def _run(self) -> None:
        while self._read and not self._over.wait(INTERVAL):
            for name, read in list(self._read.items()):
                try:
                    self._found.setdefault(name, []).append(read(self._device))
                except Exception:  # no nvidia-ml-py, no driver, or a GPU without this figure
                    del self._read[name]

    def medians(self) -> Row:
        """By column, those that were read."""
        return {name: statistics.median(values) for name, values in self._found.items() if values}


class Kernel(NamedTuple):
    """A kernel or copy that ran on the GPU, in microseconds."""

    start: float
    end: float
    name: str


def kernels_of(step: Callable[[], int], device: str) -> list[Kernel]:
    """What ran on the GPU in `PROFILED` steps, by its start."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            step()
        synchronize(device)
    return sorted(
        Kernel(event.time_range.start, event.time_range.end, event.name)
        for event in profile.events() or ()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    )


def busy_ms(kernels: Sequence[Kernel]) -> float:
    """Milliseconds in which some kernel runs."""
    busy, end = 0.0, float("-inf")
    for kernel in kernels:
        busy += max(0.0, kernel.end - max(kernel.start, end))
        end = max(end, kernel.end)
    return busy / 1e3


def by_time(kernels: Sequence[Kernel], steps: int) -> str:
    """The names of most time, one a line, with milliseconds, share and calls of a step."""
    calls, spent = Counter(kernel.name for kernel in kernels), dict[str, float]()
    for kernel in kernels:
        spent[kernel.name] = spent.get(kernel.name, 0.0) + kernel.end - kernel.start
    total = sum(spent.values()) or 1.0
    return "".join(
        f"{us / 1e3 / steps:8.2f} ms {us / total:6.1%} {calls[name] / steps:6.0f} x  {name[:160]}\n"
        for name, us in sorted(spent.items(), key=itemgetter(1), reverse=True)[:LISTED]
    )


def table(columns: Sequence[tuple[str, str, str]], rows: Sequence[Row]) -> str:
    """Rows as a Markdown table; columns without a value in any row are left out."""
    shown = [column for column in columns if any(row.get(column[1]) is not None for row in rows)]
    if not shown:
        return ""
    lines = [[title for title, _, _ in shown], ["---"] * len(shown)]
    lines += [["" if row.get(key) is None else format(row[key], form) for _, key, form in shown] for row in rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def report(rows: Sequence[Row], args: argparse.Namespace) -> str:
    """Both tables, with what they were measured on."""
    theirs = {
        row["model"]: row["samples_per_s"] for row in rows if row["row"] == "open_clip" and "samples_per_s" in row
    }
    for row in rows:
        if "samples_per_s" in row:
            row["range"] = f"{row['lowest']:,.0f}-{row['highest']:,.0f}"
            row["ratio"] = row["samples_per_s"] / theirs[row["model"]] if row["model"] in theirs else None
    title = f"{date.today()}, {card(args.device)}, {versions()}; medians of {args.rounds} rounds of {args.steps} steps:"
    return f"{title}\n\n{table(SPEED, rows)}\n{table(TIMES, [row for row in rows if 'step_ms' in row])}".rstrip() + "\n"


def card(device: str) -> str:
    """Name of the GPU, with its driver's version where Linux tells it."""
    if device == "cpu":
        return "CPU, float32"
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0].split()
    except (OSError, IndexError):
        words = []
    driver = next((word for word in words if word[:1].isdigit()), None)
    return torch.cuda.get_device_name() + ("" if driver is None else f", driver {driver}")


def versions() -> str:
    """Of what the figures depend on."""
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, open_clip {version('open_clip_torch')}"


def page(path: Path) -> str:
    """The file that the tables are for, which has the markers."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if BEGIN not in text or END not in text.partition(BEGIN)[2]:
        raise SystemExit(f"--write: {path} lacks the markers {BEGIN} and {END}")
    return text


def write_tables(path: Path, tables: str) -> None:
    """Put the tables between the markers of a file."""
    before, _, rest = page(path).partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{tables}{END}{rest.partition(END)[2]}", encoding="utf-8")


def rows_of(model: Model, until: float, shards: str, folder: Path, args: argparse.Namespace) -> Iterator[Row]:
    """The rows of a model, each as soon as it is measured, until a time of `time.monotonic`."""
    ladder, reason = None, "not run: no time is left"
    try:
        with time_limit(until - time.monotonic()):
            ladder = ladder_of(model, shards, folder, args)
    except OutOfTime:
        pass
    except (ClipstreamError, RuntimeError) as error:
        reason = f"not run: {explain(error)}"
    rungs = [rung for rung in RUNGS if rung.name in args.rows]
    for rung in rungs:
        row: Row = {
            "date": str(date.today()), "card": card(args.device), "versions": versions(), "model": model.name,
            "row": rung.name, "note": None,
        }  # fmt: skip
        left = until - time.monotonic()
        if ladder is None or left <= 0:
            row["note"] = reason
        else:
            row["batch"] = ladder.batches[0].global_size
            measure(ladder, rung, left if rung is rungs[-1] else SHARE * left, args, row)
        yield row


def positive(text: str) -> int:
    """A whole number of at least 1. Raises ValueError: it is none."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="?", help="as --train-data takes them; generated unless given")
    names, ways = [model.name for model in MODELS], [rung.name for rung in RUNGS]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--rows", nargs="+", choices=ways, default=ways)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models and batches")
    parser.add_argument("--batch", type=positive, help="of every model; its own unless given")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--steps", type=positive, default=5, help="measured steps of a round")
    parser.add_argument("--workers", default="auto")
    parser.add_argument("--minutes", type=float, default=3.75, help="for all models together (3.75)")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--kernels", type=Path, help="file that lists the kernels of each row")
    parser.add_argument("--write", type=Path, help="Markdown file with the markers")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU is available to torch; --device cpu --small tries the script on tiny models")
    if args.write is not None:  # before the minutes of measuring
        page(args.write)
    end, rows = time.monotonic() + 60 * args.minutes, list[Row]()
    models = [model for model in MODELS if model.name in args.models]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-gpu-")))
        stack.enter_context(on_terminal())
        writer = None
        if args.csv is not None:
            file = stack.enter_context(args.csv.open("w", newline="", encoding="utf-8"))
            writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
            writer.writeheader()
            file.flush()
        shards = args.shards
        if shards is None:
            shards = "::".join(make("jpeg-512", folder / "made", CAPTIONS.read_text(encoding="utf-8").splitlines()))
        for number, model in enumerate(models):
            share = model.share / sum(one.share for one in models[number:])
            until = time.monotonic() + (end - time.monotonic()) * share
            for row in rows_of(model, until, shards, folder, args):
                rows.append(row)
                if writer is not None:
                    writer.writerow(row)
                    file.flush()
                if args.write is not None:
                    write_tables(args.write, report(rows, args))
                print(table(SPEED, [row]).splitlines()[-1], flush=True)
    print(f"\n{report(rows, args)}", end="")


if __name__ == "__main__":
    main()

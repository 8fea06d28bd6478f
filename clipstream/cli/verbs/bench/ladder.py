"""Training speed under one setting after another: `clipstream bench train` on a rank.

Settings and options enter; two tables, a CSV file and the settings to use leave.

The first table is a chain: each rung adds changes of settings to those before it that could run. The second table adds
each further rung alone to the settings that the chain chose. In a turn, a rung builds the model, takes some steps of
the trainer, and is removed again, so its memory is its own and each turn begins with the same weights. Rungs take turns
in each round, as a machine's speed drifts; ratios are medians over the rounds of the ratio within a round.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from pydantic import ValidationError
from rich.table import Table

from clipstream.cli.verbs.bench import Options
from clipstream.cli.verbs.bench.open_clip_step import OpenClipStep
from clipstream.config.config_file import by_key, require_equal
from clipstream.config.plan import Survey, agree
from clipstream.config.settings import Settings
from clipstream.config.value_tree import Node, format_errors, to_yaml
from clipstream.data.batch import Batch
from clipstream.data.loader.stage_timing import HAND_OVER, IDLE
from clipstream.distributed.failure import FailureWatch
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError, SettingsError, errors_as
from clipstream.models.execution.flops import ModelFlops, Work, count_flops, peak_tflops
from clipstream.models.execution.text_buckets import TextBuckets, why_inexact
from clipstream.models.precision import resolve_precision
from clipstream.text import shortened
from clipstream.train import build_loader, build_model, build_plan, build_step
from clipstream.training.settings import TrainSettings
from clipstream.utils.console import ResultConsole
from clipstream.utils.logs import logger
from clipstream.utils.processes import cores
from clipstream.utils.timing import GIB, PeakMemory
from clipstream.utils.torch_state import restore_matmul_precision

Changes = Mapping[str, object]  # dotted keys of settings -> values

MOST_BYTES = 1 << 30  # of the batches that are kept in memory; where more are needed, they are repeated
WORTH = 1.02  # gain from which on a change is one of the settings to use; its inverse, where it is a default
BASELINE, CHOSEN = "baseline", "settings to use"
COLUMNS = (
    "table", "rung", "settings", "samples_per_s", "lowest", "highest", "to_before", "to_baseline", "memory_bytes",
    "tflops", "mfu", "loss", "loss_difference", "first_step_s", "input_ms_per_sample", "note",
)  # fmt: skip
# The baseline's settings in place of those of each group of rungs: float32, padded texts, nothing compiled or fused.
PLAIN: dict[str, Changes] = {
    "tf32": {"train.tf32": False},
    "precision": {"train.precision": "fp32"},
    "fused": {"optim.fused": False},
    "compile": {"train.compile": "off"},
    "buckets": {"model.text_buckets": "off"},
    "checkpointing": {
        "model.grad_checkpointing": "off",
        "model.image.grad_checkpointing": None,
        "model.text.grad_checkpointing": None,
    },
    "micro-batch": {"train.micro_batch_size": None, "train.kept_micro_batches": 1},  # more needs a size
    "fsdp": {"train.parallel": "ddp"},
    "patch-dropout": {"model.patch_dropout": None},
}


@dataclass(frozen=True)
class Rung:
    """Changes of settings, by a name.

    Attributes:
        same_loss: whether it computes the same loss as the baseline, up to rounding.
        from_shards: whether each batch is read from the shards when it is needed.
        open_clip: whether the step is that of open_clip's trainer.
        torchcompile: whether this step compiles the model, as open_clip's flag of this name does.
        reason: why it cannot run here, if that is known before it is tried.
    """

    name: str
    changes: Changes = field(default_factory=dict)
    same_loss: bool = True
    from_shards: bool = False
    open_clip: bool = False
    torchcompile: bool = False
    reason: str | None = None


@dataclass
class Row:
    """A rung and its measurements.

    Attributes:
        changes: of the user's settings.
        table: 1 for the chain of settings, 2 for what is added to the settings to use.
        before: the row that this one adds a change to; None for the baseline.
        base: the baseline of its table; None for the baseline itself.
        rates: samples/s of all ranks together, in each round.
        memory: most bytes in use above those in use before, of the rank with most: CUDA's, or resident memory.
        loss: at the last of the steps after which losses are compared, before its update.
        differs: whether the loss is that of another result.
        first_step: seconds of the first step, in which kernels are compiled.
        input_ms: milliseconds of a data worker for a sample; None where no data are read.
        reason: why there are no measurements.
    """

    rung: Rung
    changes: Changes
    table: int
    before: Row | None = None
    base: Row | None = None
    rates: list[float] = field(default_factory=list)
    memory: int = 0
    loss: float | None = None
    differs: bool = False
    first_step: float = 0.0
    input_ms: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    notes: list[str] = field(default_factory=list)
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
        """Relative difference to the baseline's loss; None for the baseline."""
        if self.base is None or self.loss is None or not self.base.loss:
            return None
        return self.loss / self.base.loss - 1

    def record(self) -> dict[str, Any]:
        """The row of the CSV file."""
        changes = " ".join(f"{key}={value}" for key, value in self.rung.changes.items())
        found = dict.fromkeys(COLUMNS) | {"table": self.table, "rung": self.rung.name, "settings": changes}
        if self.reason is not None:
            return found | {"note": f"not run: {self.reason}"}
        notes = list(self.notes)
        if self.input_ms is not None:
            step = (self.before or self).rate  # on batches in memory, so that the data do not bound it
            notes.append(
                f"a worker reads {_figure(1e3 / self.input_ms)} samples/s, the step takes {_figure(step)}: "
                f"{math.ceil(step * self.input_ms / 1e3)} workers, a core each; here are {cores()} cores"
            )
        return found | {
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
            "note": "; ".join(notes),
        }


@dataclass(frozen=True)
class Parts:
    """What a turn runs."""

    # (prepared batch, learning rate) -> function that waits for the loss, which the trainer calls a step later
    step: Callable[[Any, float], Callable[[], float]]
    prepare: Callable[[Batch], Any]  # not measured
    batches: Iterator[Batch]
    loader: Any = None  # of `batches`, where they are not in memory


def run(found: Survey, options: Options, world: World, watch: FailureWatch) -> None:
    """Measure on this rank; print and write the results on rank 0.

    Raises ClipstreamError: the baseline cannot run, a step failed on one of several ranks, or a file cannot be written.
    """
    require_equal(found.settings, world)
    rows, chosen = Ladder(found, options, world).climb()
    if not world.is_main:
        return
    table, to_use, failed = io.StringIO(), settings_to_use(rows, chosen), []
    writer = csv.DictWriter(table, COLUMNS)
    writer.writeheader()
    writer.writerows(row.record() for row in rows)
    # Files first: the reader of the output may be gone (`| head`).
    for path, text in ((options.csv, table.getvalue()), (options.yaml, to_use)):
        try:
            if path is not None:
                Path(path).write_text(text, encoding="utf-8", newline="")
        except OSError as error:
            failed.append(f"cannot write {path}: {error.strerror}")
    console = ResultConsole(150, markup=False)
    for shown in tables(rows, options.loss_steps):
        console.print(shown)
    console.print(to_use, end="", soft_wrap=True)
    if failed:
        raise ClipstreamError("; ".join(failed))


class Ladder:
    """Measures the rungs that the options name. Methods are collective.

    Args:
        found: with the user's settings, and sources.

    Attributes:
        settings: the same, resolved.
        batches: this rank's first batches, on its device, with the true lengths of their texts.
        padded: why texts cannot be cut by length; None if they can.
    """

    def __init__(self, found: Survey, options: Options, world: World) -> None:
        self.options, self.world = options, world
        self.plan, wanted = build_plan(agree(found, world), world), found.settings.train.precision
        self.settings = settings = with_changes(self.plan.settings, {"train.precision": wanted})
        self._usual = resolve_precision("auto", world) if wanted in ("auto", "fp32", "fp64") else wanted
        self.plain = {key: value for name in options.rungs for key, value in PLAIN.get(name, {}).items()}
        if "fused" not in type(settings.optim).model_fields:
            self.plain.pop("optim.fused", None)
        if "compile" in options.rungs:
            self.plain |= _compile_options(TrainSettings())
        if wanted == "auto" and "precision" not in options.rungs:
            self.plain["train.precision"] = self._usual
        self._flops: dict[float | None, ModelFlops | None] = {}
        self.batches: list[Batch] = []
        self.padded: str | None = None
        with errors_as(ClipstreamError, "cannot build the model and its first batches", RuntimeError):
            self._keep_batches(with_changes(settings, self.plain))

    def _keep_batches(self, settings: Settings) -> None:
        made = replace(self.plan, settings=settings)
        model = build_model(made, self.world)
        towers = model.towers
        known = None if "text" in towers.stored else TextBuckets.of(towers.clip, "auto")
        if known is None:
            reason = why_inexact(getattr(towers.clip, "text", towers.clip))
            self.padded = "text features come from a store" if "text" in towers.stored else reason
        with build_loader(made, self.world, model) as loader:
            for batch in itertools.islice(loader, self.options.loss_steps):
                lengths = None if known is None else known.lengths(batch.ids.cpu())
                self.batches.append(replace(batch.clone(), lengths=lengths).to(self.world.device))
                size = sum(tensor.numel() * tensor.element_size() for tensor in batch.tensors())
                if size * (len(self.batches) + 1) > MOST_BYTES:
                    break
        self._frozen = towers.unchanging()

    def chain(self) -> dict[str, list[Rung]]:
        """The rungs of the first table, by their name in --rungs."""
        train, buckets = self.settings.train, self.settings.model.text_buckets
        compiled = {"train.compile": "blocks" if train.compile == "off" else train.compile, **_compile_options(train)}
        packed = {"model.text_buckets": "packed", "train.compile": "off", **_compile_options(TrainSettings())}
        usual = {"train.precision": self._usual}
        narrow = Rung(self._usual, usual) if self._usual != "fp32" else Rung("bf16", reason="no bfloat16 here")
        cut = {"model.text_buckets": buckets if isinstance(buckets, int) else "auto"}
        return {
            "tf32": [Rung("tf32", {"train.tf32": True})],
            "precision": [narrow],
            "fused": [Rung("fused", {"optim.fused": True})],
            "compile": [Rung("compile", compiled)],
            "buckets": [Rung("buckets", cut, reason=self.padded), Rung("packed", packed, reason=self.padded)],
        }

    def variants(self) -> dict[str, list[Rung]]:
        """The rungs of the second table, by their name in --rungs."""
        sizes = dict.fromkeys(-(-len(self.batches[0]) // parts) for parts in (2, 4, 8))
        kept = self.settings.train.kept_micro_batches
        alone = "one rank: torchrun starts several" if self.world.size == 1 else None
        dropout = {"model.patch_dropout": self.settings.model.patch_dropout or 0.5}
        return {
            "checkpointing": [
                Rung(f"checkpointing {kind}", {"model.grad_checkpointing": kind}) for kind in ("matmuls", "all")
            ],
            "micro-batch": [
                Rung(f"micro-batch {size}", {"train.micro_batch_size": size, "train.kept_micro_batches": kept})
                for size in sizes
            ],
            "fsdp": [Rung("fsdp", {"train.parallel": "fsdp"}, reason=alone)],
            "patch-dropout": [Rung("patch-dropout", dropout, same_loss=False)],
            "shards": [Rung("shards", same_loss=False, from_shards=True)],
        }

    def climb(self) -> tuple[list[Row], Changes]:
        """The rows of both tables, and the settings to use as changes of the user's."""
        names, chosen, rows = self.options.rungs, dict(self.plain), []
        if added := [rung for name, rungs in self.chain().items() if name in names for rung in rungs]:
            rows = self.in_turns([Row(Rung(BASELINE), self.plain, 1)], added, cumulative=True)
        usual = by_key(Settings())
        for row in rows:
            default = all(usual.get(key) == value for key, value in row.rung.changes.items())
            gain = row.gain(row.before)
            if gain is not None and gain >= (1 / WORTH if default else WORTH) and not row.differs:
                chosen |= row.rung.changes
        others = [rung for name, rungs in self.variants().items() if name in names for rung in rungs]
        if self.options.against:
            reason = None if self.world.size == 1 else "measured on one rank only"
            if self.settings.distill.model is not None or self.settings.data.teacher_features:
                reason = "measured without distillation only"
            others.insert(0, Rung("open_clip", reason=reason, same_loss=False, open_clip=True))
        start = [Row(Rung(BASELINE), self.plain, 2)]
        if chosen != self.plain:
            start.append(Row(Rung(CHOSEN), chosen, 2, before=start[0], base=start[0]))
        elif not others:
            return rows, chosen
        return [*rows, *self.in_turns(start, others, cumulative=False)], chosen

    def in_turns(self, start: Sequence[Row], rungs: Sequence[Rung], *, cumulative: bool) -> list[Row]:
        """The rows `start`, which must run, and one for each rung.

        Args:
            cumulative: whether each rung is added to those before it that ran, and not to the last of `start` alone.
        """
        rows, before = list(start), start[-1]
        for row in start:
            self._turn(row, 0)
            if row.reason is not None:
                raise ClipstreamError(f"the {row.rung.name} cannot run: {row.reason}: try a smaller --batch-size")
        for rung in rungs:
            changes = {**before.changes, **rung.changes}
            row = Row(rung, changes, start[0].table, before=before, base=start[0], reason=rung.reason)
            rows.append(row)
            self._turn(row, 0)
            if cumulative and row.reason is None:
                before = row
        for number in range(1, self.options.rounds):
            for row in rows if number % 2 == 0 else rows[::-1]:
                self._turn(row, number)
        return rows

    def _turn(self, row: Row, number: int) -> None:
        """One turn of a row, unless it cannot run; the first has the steps after which losses are compared.

        Raises ClipstreamError: a step failed on one of several ranks.
        """
        if row.reason is not None:
            return
        options, rung = self.options, row.rung
        try:
            settings = with_changes(self.settings, row.changes)
        except SettingsError as error:
            row.reason = str(error)
        else:
            warmup = options.warmup_steps
            # Batches that were read ahead, without a step beside, are not measured.
            warmup += settings.data.prefetch + 1 if rung.from_shards else 0
            steps = options.steps if number else max(options.steps, options.loss_steps - options.warmup_steps)
            row.reason = self.take(settings, row, warmup, steps)
        if row.reason is not None:
            row.rates.clear()
            self._tell(f"{rung.name} skipped: {row.reason}")
            return
        row.tflops = self.tflops(settings, row.rate)
        peak = settings.log.peak_tflops or peak_tflops(self.world.device, settings.train.arithmetic)
        row.mfu = None if row.tflops is None or peak is None else row.tflops / peak
        self._tell(f"round {number + 1} of {options.rounds}, {rung.name}: {row.rates[-1]:.4g} samples/s")
        if number:
            return
        difference = row.loss_difference
        if rung.same_loss and difference is not None and not abs(difference) <= options.loss_tolerance:
            row.differs = True
            row.notes.append(f"LOSS DIFFERS by more than {options.loss_tolerance:.2%}")
        if "model.patch_dropout" in rung.changes:
            row.notes.append("different objective: some patches are dropped")

    def _tell(self, text: str) -> None:
        if self.world.is_main:
            logger.info(text)

    def take(self, settings: Settings, row: Row, warmup: int, steps: int) -> str | None:
        """A turn of `warmup` steps and `steps` measured ones, added to the row; returns why it cannot run, or None.

        Raises ClipstreamError: a step failed on one of several ranks.
        """
        memory = PeakMemory(self.world.device)
        with ExitStack() as stack:
            parts, reason = None, None
            try:
                parts = self.build(settings, row.rung, stack)
            except (ClipstreamError, RuntimeError) as error:
                reason = explain(error)
            reasons = [text for text in self.world.gather_objects(reason) if text is not None]
            if parts is None or reasons:
                return str(reasons[0])
            try:
                self._measure(parts, row, warmup, steps, settings.optim.lr, memory)
            except RuntimeError as error:  # the memory is full, or there is no compiler
                if self.world.size > 1:  # the others may wait in a collective
                    text = f"{row.rung.name} cannot run ({explain(error)}): exclude it with --rungs"
                    raise ClipstreamError(text) from error
                return explain(error)
        return None

    def build(self, settings: Settings, rung: Rung, stack: ExitStack) -> Parts:
        """Build the model and the step of a rung, which the stack's end removes again.

        Raises ClipstreamError, RuntimeError: the rung cannot run here.
        """
        made = replace(self.plan, settings=settings)
        model = build_model(made, self.world)
        towers = model.towers
        dropped, in_memory = settings.model.patch_dropout, itertools.cycle(self.batches)
        if dropped not in self._flops:
            self._flops[dropped] = count_flops(towers)
        if rung.open_clip:
            stack.enter_context(restore_matmul_precision())  # open_clip's step sets this, and the next
            stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            precision, name = settings.train.arithmetic, settings.model.name
            compiler = settings.train.compile_backend if rung.torchcompile else None
            theirs = OpenClipStep(towers, self.world.device, precision, settings.optim, name, compiler)
            stack.callback(torch._dynamo.reset)
            return Parts(theirs.start, theirs.prepare, in_memory)
        loader = None
        if rung.from_shards:
            loader = build_loader(made, self.world, model)
            stack.enter_context(closing(loader))
        step = build_step(settings, self.world, model)
        if step.compilation is not None:
            stack.callback(torch._dynamo.reset)  # the compiled code holds the model
            step.compilation.strict = True  # what runs eagerly would be measured as compiled

        def start(batch: Batch, lr: float) -> Callable[[], float]:
            result = step.start(batch, lr)
            return lambda: result().loss

        return Parts(start, lambda batch: batch, loader or in_memory, loader)

    def _measure(self, parts: Parts, row: Row, warmup: int, steps: int, lr: float, memory: PeakMemory) -> None:
        seconds: list[float] = []
        started: list[Callable[[], float]] = []
        losses: list[float] = []
        samples, peak_lr_at = 0, self.options.loss_steps
        for number in range(warmup + steps):
            if number == warmup:
                synchronize(self.world.device)
            began = time.perf_counter()
            batch = next(parts.batches)
            waited = time.perf_counter() - began
            prepared = parts.prepare(batch)
            began = time.perf_counter()
            started.append(parts.step(prepared, lr * min(1.0, (number + 1) / peak_lr_at)))
            if number:
                losses.append(started.pop(0)())
            if number == warmup + steps - 1:
                synchronize(self.world.device)
            seconds.append(waited + time.perf_counter() - began)
            samples += batch.global_size * (number >= warmup)
        losses.append(started.pop()())
        found = self.world.gather_objects((sum(seconds[warmup:]), memory.peak(), seconds[0]))
        slowest, most, first_step = (max(column) for column in zip(*found, strict=True))
        if not row.rates:
            row.loss, row.first_step = losses[peak_lr_at - 1], first_step
        row.rates.append(samples / slowest)
        row.memory = max(row.memory, int(most))
        if parts.loader is not None:
            times = parts.loader.take_times()
            decoded = times.buckets["decode"].total() if "decode" in times.buckets else 0
            work = sum(spent for stage, spent in times.seconds.items() if stage not in (IDLE, HAND_OVER))
            row.input_ms = 1e3 * work / decoded if decoded else None

    def tflops(self, settings: Settings, rate: float, *, padded: bool = False) -> float | None:
        """TFLOP/s of a device at `rate` samples/s of all ranks; None where the model's FLOPs cannot be counted.

        Args:
            settings: of a rung that was built.
            padded: count each text as long as the context, as published figures do, in place of its true tokens.
        """
        if (flops := self._flops[settings.model.patch_dropout]) is None:
            return None
        work = Work()
        for batch in self.batches:
            if padded:  # without lengths and a way to tell them, all ids count
                work.add(replace(batch, lengths=None), replace(flops, buckets=None))
            else:
                work.add(batch, flops)
        return work.flops(flops, self._frozen) / sum(map(len, self.batches)) * rate / self.world.size / 1e12


def _put(tree: dict[str, Any], changes: Changes) -> dict[str, Any]:
    """The tree with the values of some dotted keys."""
    for key, value in changes.items():
        *above, name = key.split(".")
        section = tree
        for part in above:
            section = section.setdefault(part, {})
        section[name] = value
    return tree


def with_changes(settings: Settings, changes: Changes) -> Settings:
    """The settings with some keys changed. Raises SettingsError: they do not go together."""
    tree = _put(settings.model_dump(), changes)
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise SettingsError("; ".join(format_errors(Settings, tree, error, Node()))) from error


def _compile_options(train: TrainSettings) -> dict[str, object]:
    """The settings that go with `train.compile`, and conflict with its default."""
    names = [name for name in TrainSettings.model_fields if name.startswith("compile_")]
    return {f"train.{name}": getattr(train, name) for name in names}


def tables(rows: Sequence[Row], loss_steps: int) -> list[Table]:
    titles = {1: "Each setting added to those above it", 2: f"Each added alone to the {CHOSEN}"}
    found = {}
    for row in rows:
        if row.table not in found:
            table = found[row.table] = Table(title=titles[row.table], title_justify="left")
            for column in ("", "samples/s", "range", "x before", "x baseline", "GiB", "TFLOP/s", "MFU"):
                table.add_column(column, justify="right" if column else "left", no_wrap=True)
            table.add_column(f"loss at {loss_steps}", justify="right", no_wrap=True)
            table.add_column("", justify="left", overflow="fold")
        one, cells = row.record(), [""] * 8
        if row.rates:
            values = one["to_before"], one["to_baseline"], row.memory / GIB, row.tflops, row.mfu, row.loss
            forms = zip(values, (".2f", ".2f", ".2f", ".3g", ".1%", ".5f"), strict=True)
            cells = [_figure(row.rate), f"{_figure(one['lowest'])}-{_figure(one['highest'])}"]
            cells += ["" if value is None else f"{value:{form}}" for value, form in forms]
        found[row.table].add_row(row.rung.name, *cells, one["note"])
    return list(found.values())


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def settings_to_use(rows: Sequence[Row], chosen: Changes) -> str:
    """YAML for `--config`: the settings of the chain's rungs that ran, as they are best; with a comment."""
    keys = [key for row in rows if row.table == 1 and row.reason is None for key in row.rung.changes]
    if not keys:
        return f"# {CHOSEN.capitalize()}: no setting was measured\n"
    gain = next((row.gain(row.base) for row in rows if row.rung.name == CHOSEN), None)
    times = "as fast as the baseline" if gain is None else f"{gain:.2f} times the baseline's samples/s"
    tree = to_yaml(_put({}, {key: chosen[key] for key in keys if key in chosen}))
    return f"# {CHOSEN.capitalize()} ({times}), for --config:\n{tree}"


def explain(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of GPU memory"
    return shortened(next(filter(str.strip, str(error).splitlines()), type(error).__name__), 120)


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)

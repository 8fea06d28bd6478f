"""What `clipstream bench train` does on a rank: rungs take turns, and settings are chosen.

Settings and options enter; rows of the tables and the settings to use leave.

First the chain of `rungs.SPEED`, each rung with the changes of those before it that could run; then, on top of the
settings that this chose, `rungs.VARIANTS` and open_clip's step. Within each part, the rungs take turns in each round,
as a machine's speed drifts; ratios are medians over the rounds of the ratio within a round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from clipstream.cli.verbs.bench.options import Options
from clipstream.cli.verbs.bench.results import Row, plot, show, write_csv, write_yaml
from clipstream.cli.verbs.bench.rungs import (
    BASELINE,
    CHOSEN,
    SPEED,
    VARIANTS,
    Changes,
    Machine,
    Rung,
    plain,
    with_changes,
)
from clipstream.cli.verbs.bench.turns import Turns, UnableError
from clipstream.config.settings import Settings, by_key, require_equal, resolve
from clipstream.distributed.failure import FailureWatch
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError, SettingsError
from clipstream.models.execution.flops import peak_tflops
from clipstream.tools.feature_stores import open_stores
from clipstream.train.run import with_workers
from clipstream.training.precision import resolve_precision
from clipstream.utils.logs import logger

# Ratio of samples/s from which on a change is one of the settings to use; its inverse, where it is a default.
WORTH = 1.02


def run(settings: Settings, options: Options, world: World, watch: FailureWatch) -> None:
    """Measure on this rank; print and write the results on rank 0.

    Raises ClipstreamError: the baseline cannot run, a step failed on one of several ranks, or a file cannot be written.
    """
    require_equal(settings, world)
    ladder = Ladder(settings, options, world)
    rows, chosen = ladder.climb()
    if not world.is_main:
        return
    failed = []
    # Files first: what reads the output may be gone (`| head`).
    for path, write in (
        (options.csv, partial(write_csv, rows)),
        (options.yaml, partial(write_yaml, rows, chosen)),
        (options.plot, partial(plot, rows)),
    ):
        try:
            if path is not None:
                write(path)
        except OSError as error:
            failed.append(f"{path} could not be written ({error.strerror})")
    show(rows, chosen, options.loss_steps)
    if failed:
        raise ClipstreamError("; ".join(failed))


class Ladder:
    """Measures the rungs that the options name.

    Args:
        settings: the user's, with sources.
    """

    def __init__(self, settings: Settings, options: Options, world: World) -> None:
        self.options, self.world = options, world
        settings = resolve(settings, world)
        stored = open_stores(settings)
        settings = with_workers(settings, world, stored)
        wanted = settings.train.precision
        usual = resolve_precision("auto", world) if wanted in ("auto", "fp32", "fp64") else wanted
        self.plain = plain(settings, options.rungs)
        if wanted == "auto" and "precision" not in options.rungs:
            self.plain["train.precision"] = usual
        self.settings = settings
        try:
            base = with_changes(settings, self.plain)
            self.turns = Turns(base, world, stored, count=options.loss_steps, peak_lr_at=options.loss_steps)
        except RuntimeError as error:
            raise ClipstreamError(f"the model and its first batches do not fit this machine: {error}") from error
        ours = len(self.turns.batches[0])
        machine = Machine(world.device, usual, world.size, ours, options.shards, self.turns.padded)
        known = len(self.turns.batches) >= options.loss_steps  # else batches are repeated, and those of shards are not
        self._made = {
            name: [replace(rung, same_loss=known) if rung.from_shards else rung for rung in make(settings, machine)]
            for name, make in {**SPEED, **VARIANTS}.items()
            if name in options.rungs
        }

    def climb(self) -> tuple[list[Row], Changes]:
        """The rows of both tables, and the settings to use as changes of the user's."""
        added, base = self._rungs(SPEED), Row(Rung(BASELINE), self.plain, 1)
        chain = self.in_turns([base], added, cumulative=True) if added else []
        chosen = dict(self.plain)
        usual = by_key(Settings())
        for row in chain:
            default = all(usual.get(key) == value for key, value in row.rung.changes.items())
            gain = row.gain(row.before)
            if gain is not None and gain >= (1 / WORTH if default else WORTH) and not row.flagged:
                chosen |= row.rung.changes
        others = self._rungs(VARIANTS)
        if self.options.open_clip:
            reason = None if self.world.size == 1 else "measured on one rank only"
            if self.settings.distill.model is not None or self.settings.data.teacher_features:
                reason = "measured without distillation only"
            others.insert(0, Rung("open_clip", reason=reason, same_loss=False, open_clip=True))
        start = [Row(Rung(BASELINE), self.plain, 2)]
        if chosen != self.plain:
            start.append(Row(Rung(CHOSEN, same_loss=True), chosen, 2, before=start[0], base=start[0]))
        elif not others:
            return chain, chosen
        return [*chain, *self.in_turns(start, others, cumulative=False)], chosen

    def in_turns(self, start: Sequence[Row], rungs: Sequence[Rung], *, cumulative: bool) -> list[Row]:
        """The rows `start`, which must run, and one for each rung.

        Args:
            cumulative: whether each rung is added to those before it that ran, and not to the last of `start` alone.
        """
        rows, before = list(start), start[-1]
        for row in start:
            self._turn(row, 0)
            if row.reason is not None:
                raise ClipstreamError(f"the {row.rung.name} cannot run: {row.reason}: give a smaller --batch-size?")
        for rung in rungs:
            changes = {**before.changes, **rung.changes}
            row = Row(rung, changes, start[0].table, before=before, base=start[0], reason=rung.reason)
            if cumulative and row.reason is None and self._packs_twice(before.changes, rung):
                row.reason = "model.text_buckets: auto packs texts here, too"
            rows.append(row)
            self._turn(row, 0)
            if cumulative and row.reason is None:
                before = row
        for number in range(1, self.options.rounds):
            for row in rows if number % 2 == 0 else rows[::-1]:
                self._turn(row, number)
        return rows

    def _rungs(self, names: Iterable[str]) -> list[Rung]:
        return [rung for name in names for rung in self._made.get(name, ())]

    def _packs_twice(self, before: Changes, rung: Rung) -> bool:
        """Whether a rung packs texts that the settings before it pack."""
        settings = with_changes(self.settings, before)
        auto = self.turns.packs and settings.model.text_buckets == "auto" and settings.train.compile == "off"
        return auto and rung.changes.get("model.text_buckets") == "packed"

    def _turn(self, row: Row, number: int) -> None:
        """One turn of a row, unless it cannot run; the first has the steps after which losses are compared."""
        if row.reason is not None:
            return
        options = self.options
        warmup, steps = options.warmup_steps, options.steps
        if number == 0:
            steps = max(steps, options.loss_steps - warmup)
        try:
            settings = with_changes(self.settings, row.changes)
            if row.rung.from_shards:
                warmup += settings.data.prefetch + 1  # batches that were read ahead, without a step beside
            turn = self.turns.take(settings, row.rung, warmup, steps)
        except (SettingsError, UnableError) as error:
            row.reason = str(error)
            row.rates.clear()
            self._tell(f"{row.rung.name} is not run: {error}")
            return
        row.rates.append(turn.rate)
        row.memory, row.input_ms = max(row.memory, turn.memory), turn.input_ms
        row.batch, row.tolerance = self.turns.batches[0].global_size, options.loss_tolerance
        if number == 0:
            row.loss, row.first_step = turn.losses[options.loss_steps - 1], turn.first_step
        row.tflops = self.turns.tflops(settings, row.rate)
        peak = settings.log.peak_tflops or peak_tflops(self.world.device, settings.train.arithmetic)
        row.mfu = None if row.tflops is None or peak is None else row.tflops / peak
        self._tell(f"round {number + 1} of {options.rounds}, {row.rung.name}: {turn.rate:.4g} samples/s")

    def _tell(self, text: str) -> None:
        if self.world.is_main:
            logger.info(text)

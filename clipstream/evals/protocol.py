"""Owns what an evaluator is, what it may use, and when evaluators run; knows no metric.

An evaluator is a class that is constructed with its settings and yields (name, value) when called with an EvalContext.
Every rank calls it. It sees its rank's part of the data and has to sum over the ranks itself, so that all ranks yield
the same values. Training goes on with the same bits whether evaluations run or not: random states and the towers'
modes are put back, and no gradient is touched.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from numbers import Integral
from typing import Any, Protocol

from clipstream.data.settings import SourceSettings
from clipstream.errors import ClipstreamError, DataError, SettingsError, did_you_mean
from clipstream.evals.agreement import AgreeingWorld, Failed, Failure, Torn
from clipstream.evals.context import Encoder, EvalContext, Rehearsal, evaluating
from clipstream.evals.settings import EvalSettings, MeanSettings, Weights, eval_name
from clipstream.example import Example, Table
from clipstream.plugins import load_plugin
from clipstream.training.passes import is_out_of_memory
from clipstream.training.precision import same_randomness

__all__ = ["Encoder", "EvalContext", "EvalRunner", "Evaluator", "Record", "build_evaluators", "evaluating", "source_of"]

Record = dict[str, Any]
RECORD = ("step", "eval", "error", "dropped", "seconds")  # of an evaluation, beside its metrics


class Evaluator(Protocol):
    """Yields (metric, value) of one model and one source. Constructed as `Name(settings)`."""

    def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
        """Evaluate, on all ranks at once; the values are the same on every rank."""


def source_of(settings: EvalSettings) -> SourceSettings:
    """The data of an evaluator that cannot do without.

    Raises:
        SettingsError: none are set.
    """
    if settings.data is None:
        raise SettingsError("the evaluator has no data: give data.shards")
    return settings.data


def build_evaluators(settings: Mapping[str, EvalSettings]) -> dict[str, Evaluator]:
    """The evaluators that the settings name, in their order; means come after all whose figures they may need.

    Raises:
        SettingsError: a class is not found, a file that the settings name is not there or wrong, or a mean is to be
            of what is not evaluated.
    """
    from clipstream.evals.frozen import Neighbours
    from clipstream.evals.linear_probe import LinearProbe
    from clipstream.evals.loss import ValidationLoss
    from clipstream.evals.mean import Mean
    from clipstream.evals.retrieval import Retrieval
    from clipstream.evals.zero_shot import ZeroShot

    builtin: dict[str, Callable[[Any], Evaluator]] = {
        "retrieval": Retrieval,
        "zero_shot": ZeroShot,
        "loss": ValidationLoss,
        "linear_probe": LinearProbe,
        "knn": Neighbours,
        "mean": Mean,
    }
    evaluators = {}
    for name, section in sorted(settings.items(), key=lambda item: isinstance(item[1], MeanSettings)):
        for other in section.of if isinstance(section, MeanSettings) else ():
            if other not in settings:
                hint = did_you_mean(other, settings)
                raise SettingsError(f"evals.{name}.of: there is no evaluator {other!r}{hint}")
        try:
            make = builtin.get(section.type) or load_plugin(section.type)
            evaluators[name] = make(section)
        except (SettingsError, ValueError) as error:
            raise SettingsError(f"evals.{name}: {error}") from error
    return evaluators


class EvalRunner:
    """Runs a run's evaluators when they are due.

    Args:
        settings: name -> settings of an evaluator.
        context: what they work with.
        emit: takes the record of each evaluation; called on rank 0 only.
        show: called as show(step, name, examples, tables) before that, where an evaluator has shown some; on rank 0
            only.
        weights: gives the context in which the towers have weights of this kind; entered where something is due.
        trace: called as trace(record, about) with what an evaluation was made with, so that its figures can be traced:
            weights, data, texts, settings, precision, ranks; on rank 0 only.

    Attributes:
        failures: of evaluations that failed, in their order.

    An evaluation that fails on some rank ends on all of them, and is told. It ends the run where its settings say so.
    """

    def __init__(
        self,
        settings: Mapping[str, EvalSettings],
        context: EvalContext,
        emit: Callable[[Record], None],
        show: Callable[[int, str, Sequence[Example], Sequence[Table]], None] | None = None,
        weights: Mapping[Weights, Callable[[], AbstractContextManager[object]]] | None = None,
        trace: Callable[[Record, Record], None] | None = None,
    ) -> None:
        self.settings, self.context = settings, context
        self.emit, self.show, self.trace = emit, show, trace
        asked = {kind for section in settings.values() for kind in section.kinds}
        self.weights = {kind: enter for kind, enter in (weights or {"trained": nullcontext}).items() if kind in asked}
        self.failures: list[Failure] = []
        self._step: int | None = None
        self._ran: dict[Weights, dict[str, Record]] = {}  # what ran at that step: by evaluator, its record
        self.evaluators = build_evaluators(settings)
        self.world = context.world
        context.world = self.agreeing = AgreeingWorld.of(context.world)

    def due(self, step: int, last: bool = False) -> list[str]:
        """Names of the evaluators to run after `step` steps; all of them after the last one."""
        sections = {name: self.settings[name] for name in self.evaluators}
        return [name for name, s in sections.items() if last or (s.every and step and step % s.every == 0)]

    def rehearse(self) -> dict[str, list[str]]:
        """Run evaluators on a few samples and made-up features, so that their data's faults show before training.

        Every rank calls this. Users' own are left out: they may do with features what they like.

        Returns:
            Of each that ran, as its evaluations are called, the names of its metrics.

        Raises:
            DataError, SettingsError: what the evaluator or its data raised.
        """
        self._have_room()
        found: dict[str, dict[str, float]] = {}
        own = {name for name, section in self.settings.items() if section.type not in EvalSettings.builtin}
        for name, evaluator in self.evaluators.items():
            section = self.settings[name]
            if name in own or (isinstance(section, MeanSettings) and own & section.of.keys()):
                continue
            context = Rehearsal.of(self.context, name)
            context.figures = found
            with _named(name):
                found[name] = dict(evaluator(context))
        return {eval_name(name, kind): list(found[name]) for name in found for kind in self.settings[name].kinds}

    def __call__(self, step: int, last: bool = False) -> list[Record]:
        """Run what is due, as `each`; its records."""
        return list(self.each(step, last))

    def each(self, step: int, last: bool = False) -> Iterator[Record]:
        """Run what is due, one after the other; on every rank, at the same step. What ran at it does not run again.

        Yields:
            A record an evaluation: step, eval (see `eval_name`), its metrics, dropped (samples that could not be used,
            over all ranks) and seconds. One that failed has `error` (what went wrong) in place of metrics.

        Raises:
            ClipstreamError: what the evaluator or its data raised, where its settings say so.
        """
        if step != self._step:
            self._step, self._ran = step, {}
        for kind, weights in self.weights.items():
            ran = self._ran.setdefault(kind, {})
            names = [name for name in self.due(step, last) if kind in self.settings[name].kinds and name not in ran]
            self.context.figures = {name: record for name, record in ran.items() if "error" not in record}
            with self._weighed(weights) if names else nullcontext():
                for name in names:
                    ran[name] = record = self._run(step, name, eval_name(name, kind))
                    if self.context.world.is_main:
                        if self.show is not None and (self.context.examples or self.context.tables):
                            self.show(step, record["eval"], self.context.examples, self.context.tables)
                        self.emit(record)
                    yield record
        if last:
            self._step = None

    def took(self, step: int, kind: Weights, records: Mapping[str, Record]) -> None:
        """Take note of what ran at a step elsewhere: evaluator -> its metrics, or its `error`."""
        self._step, self._ran = step, {kind: dict(records)}

    def _have_room(self) -> None:
        """Take the weights out once, which sharded ones need memory for."""
        try:
            for weights in self.weights.values():
                with weights():
                    pass
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise SettingsError(
                "evals: there is no memory for the whole model beside its shards: evaluate its checkpoints elsewhere "
                f"(python -m clipstream.evaluate), or take more GPUs ({str(error).splitlines()[0]})"
            ) from error

    @contextmanager
    def _weighed(self, weights: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
        """With these weights, of which a fingerprint is taken once: evaluators leave them as they are."""
        with weights():
            self.context.weights = self.context.fingerprint()
            try:
                yield
            finally:
                self.context.weights = None

    def _run(self, step: int, name: str, called: str) -> Record:
        context = self.context
        context.name, context.examples, context.tables = name, [], []
        began, dropped = time.perf_counter(), context.dropped
        context.readings, context.texts = [], None
        # Rank 0's: a run's end must not hang on a rank's last digit.
        metrics = self.world.broadcast_object(self._metrics(name))
        if "error" not in metrics:
            context.figures[name] = metrics
        dropped = sum(context.world.gather_objects(context.dropped - dropped))
        seconds = round(time.perf_counter() - began, 3)
        record = {"step": step, "eval": called, **metrics, "dropped": dropped, "seconds": seconds}
        about = self._about(name)
        if self.trace is not None and self.world.is_main:
            self.trace(record, about)
        return record

    def _metrics(self, name: str) -> Record:
        """What an evaluator yields, or {'error': what went wrong}; the same on all ranks."""
        context = self.context
        try:
            try:
                with _named(name), evaluating(context.towers), same_randomness(context.world.device):
                    metrics = _numbers(self.evaluators[name](context))
            except (Failed, Torn):
                raise
            except Exception as error:
                if self.settings[name].on_error == "raise":
                    raise
                if not isinstance(error, ClipstreamError):
                    traceback.print_exception(error)
                self.agreeing.settle(Failure.of(error, self.world.rank))
            self.agreeing.settle()
            return metrics
        except Torn as torn:
            raise torn.__cause__ or torn from None
        except Failed as failed:
            _end_frames(failed)
            return self._failed(name, failed.failure)

    def _failed(self, name: str, failure: Failure) -> Record:
        self.failures.append(failure)
        if self.world.is_main:
            who = f" on rank {failure.rank}" if self.world.size > 1 else ""
            print(
                f"warning: {failure.message}\nevaluation {name!r} failed{who} and gives no figures; "
                f"--evals.{name}.on-error raise ends the run instead",
                file=sys.stderr,
                flush=True,
            )
        return {"error": failure.message}

    def _about(self, name: str) -> Record:
        """What the evaluation was made with. Collective."""
        context = self.context
        parts = self.world.gather_objects(context.readings)
        same = min(map(len, parts))  # a rank on which it failed has read less
        return {
            "weights": context.weights,
            "data": [context.readings[i].with_others([readings[i] for readings in parts]) for i in range(same)],
            "texts": context.texts,
            "settings": self.settings[name].model_dump(mode="json"),
            "precision": context.precision,
            "ranks": self.world.size,
        }


def _numbers(yielded: Iterable[tuple[str, Any]]) -> dict[str, float]:
    """What an evaluator yields, with scalars of numpy's and torch's as plain numbers.

    Raises:
        TypeError: a value is no number, or a name is one of a record's own.
    """
    found: dict[str, float] = {}
    for name, value in yielded:
        if name in RECORD:
            raise TypeError(f"it yields a metric called {name!r}, as each evaluation has one of its own: rename it")
        if isinstance(value, str) or not hasattr(value, "__float__"):
            raise TypeError(f"it yields {name!r} with {value!r}, which is no number")
        found[name] = int(value) if isinstance(value, Integral) else float(value)
    return found


def _end_frames(error: BaseException | None) -> None:
    """Drop what the frames of an error hold: generators, and with them their data workers."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Errors of an evaluator say whose they are."""
    try:
        yield
    except (DataError, SettingsError) as error:
        raise type(error)(f"evals.{name}: {error}") from error

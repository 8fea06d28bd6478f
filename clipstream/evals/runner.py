"""Runs evaluators when they are due, during training and outside of it. Settings enter; records leave.

All ranks call an evaluator; each sees its part of the data and reduces over the ranks itself, so that all yield the
same values. Evaluations do not change training in any bit: random states and the towers' modes are restored, and no
gradient is touched.

A rank whose evaluation fails sends its failure to the others, which are in some collective of the evaluator: see
`distributed.world.AgreeingWorld`.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol

from clipstream.distributed.run_record import now, versions
from clipstream.distributed.world import AgreeingWorld, Failure, RankFailed, Torn
from clipstream.errors import ClipstreamError, DataError, SettingsError, Stopped, did_you_mean, errors_as
from clipstream.evals.choice import Choice
from clipstream.evals.context import DryRun, EvalContext, Example, Table, evaluating, of_tokenizer
from clipstream.evals.evaluators.mean import Mean
from clipstream.evals.groups import Groups
from clipstream.evals.probes import LinearProbe, Neighbours
from clipstream.evals.retrieval_and_loss import Retrieval, ValidationLoss
from clipstream.evals.settings import (
    ChoiceSettings,
    EvalSettings,
    GroupsSettings,
    LinearProbeSettings,
    LossEvalSettings,
    NeighboursSettings,
    RetrievalSettings,
    Weights,
    ZeroShotSettings,
    eval_name,
)
from clipstream.evals.statistics import metrics_of
from clipstream.evals.zero_shot import ZeroShot
from clipstream.storage.shard_url import redact_tree
from clipstream.text import Lines, lines, message
from clipstream.training.state import same_randomness
from clipstream.utils.logs import logger
from clipstream.utils.plugins import is_plugin
from clipstream.utils.section import make_part

Record = dict[str, Any]
# Names that no metric has: keys of a record on which its readers rely.
RESERVED = (
    "step", "eval", "error", "dropped", "seconds", "metrics", "run", "checkpoint", "model", "data", "texts",
    "tokenizer", "settings", "versions",
)  # fmt: skip


EVALUATORS: dict[type[EvalSettings], Callable[[Any], Evaluator]] = {  # those that import torch
    RetrievalSettings: Retrieval,
    ZeroShotSettings: ZeroShot,
    ChoiceSettings: Choice,
    GroupsSettings: Groups,
    LossEvalSettings: ValidationLoss,
    LinearProbeSettings: LinearProbe,
    NeighboursSettings: Neighbours,
}


class Evaluator(Protocol):
    """Yields (metric, value) pairs for one model and one source. Constructed as `Name(settings)`."""

    def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
        """Evaluate. Collective: every rank calls this and yields the same pairs."""


def build_evaluators(settings: Mapping[str, EvalSettings]) -> dict[str, Evaluator]:
    """The evaluators that the settings name, in their order, means last.

    Raises SettingsError: a class cannot be imported or constructed, or the mean of an unknown evaluator is asked for.
    """
    evaluators = dict[str, Evaluator]()
    for name, section in sorted(settings.items(), key=lambda item: isinstance(item[1], Mean.Settings)):
        for other in section.of if isinstance(section, Mean.Settings) else ():
            if other not in settings:
                hint = did_you_mean(other, settings)
                raise SettingsError(f"evals.{name}.of: unknown evaluator {other!r}{hint}")
        if (built_in := EVALUATORS.get(type(section))) is None:  # a part or plug-in of one class
            evaluators[name] = make_part(f"evals.{name}", section)
            continue
        with errors_as(SettingsError, f"evals.{name}", ClipstreamError, ValueError):
            evaluators[name] = built_in(section)
    return evaluators


@dataclass(frozen=True)
class Listeners:
    """What is called with the results of evaluations, on rank 0."""

    write: Callable[[Record], None] = lambda record: None  # with the record of each evaluation
    # with (step, name, examples, tables) of an evaluation that has any, before its record
    show: Callable[[int, str, Sequence[Example], Sequence[Table]], None] = lambda *shown: None
    status: Callable[[str], None] = lambda text: None  # with the current evaluation as text; with '' when it is over


class EvalRunner:
    """Runs evaluators when they are due. An evaluation that fails on some rank ends on all of them, with a warning.

    Args:
        weights: for each kind of weights, makes a context manager within which the towers have them.
        ends: whether the caller raises the failures in the end; warnings then leave out their reason.
        subject: what is evaluated, for records: run, model and checkpoint, if there are any.

    Attributes:
        failures: of evaluations so far.
    """

    def __init__(
        self,
        settings: Mapping[str, EvalSettings],
        context: EvalContext,
        listeners: Listeners | None = None,
        weights: Mapping[Weights, Callable[[], AbstractContextManager[object]]] | None = None,
        ends: bool = False,
        subject: Mapping[str, Any] | None = None,
    ) -> None:
        self.settings, self.context, self.ends, self.subject = settings, context, ends, subject or {}
        self.listeners = listeners or Listeners()
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

    def dry_run(self) -> dict[str, list[str]]:
        """Run the built-in evaluators on a few samples with constant features, to find faults before training.

        Collective. Users' evaluators are left out, as they may not accept such features.

        Returns:
            Metric names by evaluation (see `eval_name`).

        Raises DataError, SettingsError: from an evaluator or its data.
        """
        for weights in self.weights.values():
            with weights():  # gathering sharded weights takes memory
                pass
        found: dict[str, dict[str, float]] = {}
        own = {name for name, section in self.settings.items() if is_plugin(section.type)}
        for name, evaluator in self.evaluators.items():
            section = self.settings[name]
            if name in own or (isinstance(section, Mean.Settings) and own & section.of.keys()):
                continue
            context = DryRun.of(self.context, name)
            context.metrics = found
            with _name_in_errors(name):
                found[name] = dict(evaluator(context))
        return {eval_name(name, kind): list(found[name]) for name in found for kind in self.settings[name].kinds}

    def __call__(self, step: int, last: bool = False) -> list[Record]:
        """Run what is due and has not run at this step yet, one after the other. Collective.

        Returns:
            A record per evaluation: step, eval (see `eval_name`), metrics, dropped (unusable samples of all ranks) and
            seconds, and what it was made with; if it failed, `error` in place of metrics.

        Raises ClipstreamError: from an evaluator or its data, if its settings have `on_error: raise`.
        """
        context, records = self.context, []
        if step != self._step:
            self._step, self._ran = step, {}
        for kind, weights in self.weights.items():
            ran = self._ran.setdefault(kind, {})
            names = [name for name in self.due(step, last) if kind in self.settings[name].kinds and name not in ran]
            context.metrics = {name: metrics_of(record) for name, record in ran.items() if "error" not in record}
            if not names:
                continue
            with weights():
                context.weights = context.fingerprint()  # once: evaluators do not change weights
                try:
                    for name in names:
                        self.listeners.status(f"evaluating {eval_name(name, kind)}")
                        ran[name] = record = self._run(step, name, eval_name(name, kind))
                        self.listeners.status("")
                        if context.world.is_main:
                            if context.examples or context.tables:
                                self.listeners.show(step, record["eval"], context.examples, context.tables)
                            self.listeners.write(record)
                        records.append(record)
                finally:
                    context.weights = None
        if last:
            self._step = None
        return records

    def _run(self, step: int, name: str, called: str) -> Record:
        """The record of an evaluation, with what it was made with."""
        context = self.context
        context.name, context.examples, context.tables = name, [], []
        began, dropped = time.perf_counter(), context.dropped
        context.readings, context.texts = [], None
        # Those of rank 0: early stopping must not depend on rounding on other ranks.
        found = self.world.broadcast_object(self._metrics(name))
        if "error" not in found:
            context.metrics[name] = found
        dropped = sum(context.world.gather_objects(context.dropped - dropped))
        found = {**found, "dropped": dropped, "seconds": round(time.perf_counter() - began, 3)}
        parts = self.world.gather_objects(context.readings)
        same = min(map(len, parts))  # a rank on which it failed has read less
        about = {
            "metrics": [metric for metric in found if metric != "error"],
            **self.subject,
            "weights": context.weights,
            "data": [context.readings[i].with_others([readings[i] for readings in parts]) for i in range(same)],
            "texts": context.texts,
            "tokenizer": of_tokenizer(context.tokenizer),
            "settings": redact_tree(self.settings[name].model_dump(mode="json")),
            "precision": context.precision,
            "ranks": self.world.size,
            "time": now(),
            "versions": versions(),
        }
        # A metric may have the name of what no reader relies on, such as precision.
        return {"step": step, "eval": called, **found, **{key: about[key] for key in about if key not in found}}

    def _metrics(self, name: str) -> Record:
        """The metrics of an evaluator as plain numbers, or {'error': message}; the same keys on all ranks."""
        context, metrics = self.context, {}
        try:
            try:
                with _name_in_errors(name), evaluating(context.towers), same_randomness(context.world.device):
                    for metric, value in self.evaluators[name](context):
                        if metric in RESERVED:
                            text = f"yields the reserved metric {metric!r}"
                            raise TypeError(f"{text}: rename it")
                        if isinstance(value, str) or not hasattr(value, "__float__"):
                            raise TypeError(f"yields {metric!r} with {value!r}, which is not a number")
                        metrics[metric] = int(value) if isinstance(value, Integral) else float(value)
            except (RankFailed, Torn):
                raise
            except Exception as error:
                if self.settings[name].on_error == "raise" and not isinstance(error, Stopped):
                    raise
                if not isinstance(error, ClipstreamError):
                    traceback.print_exception(error)
                self.agreeing.exchange(Failure.of(error, self.world.rank))
            self.agreeing.exchange()
            return metrics
        except Torn as torn:
            raise torn.__cause__ or torn from None
        except RankFailed as failed:
            cause: BaseException | None = failed
            while cause is not None:  # frames hold generators, and with them data workers
                traceback.clear_frames(cause.__traceback__)
                cause = cause.__cause__ or cause.__context__
            failure = failed.failure
            if failure.kind is Stopped:
                raise Stopped(failure.message) from None
            self.failures.append(failure)
            if self.world.is_main:
                who = f" on rank {failure.rank}" if self.world.size > 1 else ""
                text = f"evaluation {name!r} failed{who}"
                if not self.ends:
                    text = lines(failure.message, f"{text}; --evals.{name}.on-error raise ends the run instead")
                logger.warning(text)
            return {"error": failure.message}


@contextmanager
def _name_in_errors(name: str) -> Iterator[None]:
    """Put the evaluator's name before its errors."""
    try:
        yield
    except (DataError, SettingsError) as error:
        raise type(error)(Lines(f"{message(f'evals.{name}')}: {error}")) from error

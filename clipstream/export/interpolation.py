"""Weights between the start and the end of a fine-tuning (WiSE-FT, arXiv:2109.01903), and averages of several
checkpoints (model soups, arXiv:2203.05482).

Settings with evaluators and the models' settings enter. Each mixture is evaluated; a table, a plot of what was gained
over what was kept, and the chosen model, which everything loads, leave.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch

from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError, SettingsError, did_you_mean
from clipstream.evals.context import RunSections, context_for
from clipstream.evals.runner import EvalRunner
from clipstream.evals.settings import EvalSettings
from clipstream.evals.statistics import is_share, metrics_of
from clipstream.models.build import build_towers
from clipstream.models.settings import ModelSettings
from clipstream.report.pages import Chart, Series
from clipstream.report.records import markdown_table
from clipstream.text import percent
from clipstream.training.settings import Metric
from clipstream.utils import atomic_write
from clipstream.utils.logs import announce

TABLE, PLOT, FIGURES = "frontier.md", "frontier.svg", "frontier.json"
STYLE = "text{font:10px sans-serif;fill:#666}.grid{stroke:#ddd}polyline{fill:none;stroke-width:2}.s0{stroke:#1668b4}"
STYLE += "circle.s0{fill:#1668b4}circle.s1{fill:#d95f02}"
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Point:
    """A mixture that was evaluated."""

    name: str
    metrics: dict[str, float]  # by evaluator: its main metric
    target: float  # the higher, the better


@dataclass
class Mixing:
    """Evaluates mixtures of weights on all ranks.

    Args:
        model: whose towers take the weights.
        metric_name: EVALUATOR/METRIC to be best; unless set R@1, or the first metric, of the only target.
        guard_kept: share of the start's figure that each evaluator with role guard must keep; None where none must.
    """

    settings: Any
    model: ModelSettings
    metric_name: str | None
    guard_kept: float | None
    world: World
    points: list[Point] = field(default_factory=list, init=False)
    lower: set[str] = field(default_factory=set, init=False)  # evaluators whose metric is better if smaller

    def __post_init__(self) -> None:
        evals: Mapping[str, EvalSettings] = self.settings.evals
        sections: RunSections = self.settings
        self.guards = [name for name, section in evals.items() if section.role == "guard"]
        self.metric, targets = Metric.of(self.metric_name, "auto"), [name for name in evals if name not in self.guards]
        if self.metric is not None and self.metric.evaluator not in evals:
            near = did_you_mean(self.metric.evaluator, evals)
            raise SettingsError(f"the target {self.metric} is of no evaluator{near}")
        if self.metric is None and len(targets) != 1:
            found = f"several evaluators, {', '.join(targets)}," if targets else "no evaluator"
            raise SettingsError(f"{found} without role guard: name the target as EVALUATOR/METRIC")
        self.target = targets[0] if self.metric is None else self.metric.evaluator
        self.context = context_for(sections, self.model, self.world)
        self.towers = self.context.towers
        own = {name: section.model_copy(update={"weights": "trained", "on_error": "raise"})
               for name, section in evals.items()}  # fmt: skip
        self.runner = EvalRunner(own, self.context, None, {"trained": nullcontext})

    def state(self, model: ModelSettings, name: str) -> dict[str, torch.Tensor]:
        """The weights of another model, on the CPU. Raises SettingsError: they do not fit the towers."""
        loss_type: str = self.towers.loss_type
        model = model.model_copy(update={"allow_mismatch": True})
        seed, tokenizer = self.settings.run.seed, self.settings.tokenizer
        other = build_towers(model, seed=seed, loss_type=loss_type, tokenizer=tokenizer, world=self.world)
        found: dict[str, torch.Tensor] = other.clip.state_dict()
        own = self.towers.clip.state_dict()
        shapes = [{key: tuple(tensor.shape) for key, tensor in state.items()} for state in (own, found)]
        if shapes[0] != shapes[1]:
            key = min(key for key in own.keys() | found.keys() if shapes[0].get(key) != shapes[1].get(key))
            raise SettingsError(
                f"{name} is another model than {self.model.name}: {key} differs; name one of the same kind"
            )
        return found

    def evaluate(self, name: str, state: Tensors) -> Point:
        """The metrics of weights. Collective. Raises SettingsError: the target has no such metric."""
        self.towers.clip.load_state_dict(state)
        records = {str(record["eval"]): record for record in self.runner(len(self.points), last=True)}
        found = {one: main_figure(record) for one, record in records.items()}
        if self.metric is not None:
            self.metric.expect("the target", {self.target: list(metrics_of(records[self.target]))})
            value = self.metric.value(records[self.target])
            assert value is not None
            found[self.target] = value, self.metric.lower
        metrics = {one: value for one, (value, _) in found.items()}
        self.lower = {one for one, (_, lower) in found.items() if lower}
        target = -metrics[self.target] if self.target in self.lower else metrics[self.target]
        point = Point(name, metrics, target if math.isfinite(target) else -math.inf)
        self.points.append(point)
        if self.world.is_main:
            announce(f"{name:<16} " + ", ".join(f"{one} {text_of(value)}" for one, value in metrics.items()))
        return point

    def keeps(self, point: Point, start: Point) -> bool:
        """Whether the guards have the wanted share of their metrics at the start.

        A metric that is better if smaller may grow by this factor.

        Raises ClipstreamError: a guard has no metric at the start.
        """
        for name in self.guards:
            first, lower, kept = start.metrics[name], name in self.lower, self.guard_kept
            if not math.isfinite(first):
                raise ClipstreamError(f"the guard {name} is {first} at the start, with which nothing can be compared")
            if kept:
                bar = first * (kept if (first < 0) == lower else 1 / kept)
                if not (point.metrics[name] <= bar if lower else point.metrics[name] >= bar):
                    return False
        return True

    def write(self, folder: Path, chosen: Point, state: Tensors, why: str = "") -> None:
        """Write the chosen model, the table and the plot. On rank 0 alone."""
        loss_type: str = self.towers.loss_type  # in the dtypes of the file, not those of the passes
        whole = build_towers(self.model, seed=0, loss_type=loss_type, tokenizer=self.settings.tokenizer)
        whole.clip.load_state_dict(state)
        whole.save_pretrained(folder)
        names = list(chosen.metrics)
        header = ["weights", *(f"{name} (guard)" if name in self.guards else name for name in names), ""]
        rows = [[point.name, *(text_of(point.metrics[name]) for name in names), "chosen" if point is chosen else ""]
                for point in self.points]  # fmt: skip
        table = markdown_table(header, rows)
        about = {"chosen": chosen.name, "target": self.metric_name or self.target, "guards": self.guards,
                 "guard_kept": self.guard_kept,
                 "points": [{"weights": point.name, **point.metrics} for point in self.points]}  # fmt: skip
        for name, text in ((TABLE, table), (FIGURES, json.dumps(about, indent=2)), (PLOT, self.plot(chosen))):
            atomic_write.replace(folder / name, f"{text}\n".encode())
        print(table, flush=True)
        announce(f"chosen   {chosen.name}{why}; written to {folder}")

    def plot(self, chosen: Point) -> str:
        """The target over the mean of the guards, or over the order of the mixtures, as SVG."""
        xs = [fmean(p.metrics[g] for g in self.guards) if self.guards else float(i) for i, p in enumerate(self.points)]
        at = dict(zip(map(id, self.points), xs, strict=True))
        line = Series("mixtures", [(at[id(point)], point.metrics[self.target]) for point in self.points])
        best = Series("chosen", [(at[id(chosen)], chosen.metrics[self.target])], number=1)
        title = f"{self.target} over {', '.join(self.guards) or 'mixtures'}; chosen: {chosen.name}"
        text = Chart(title, (line, best), share=0 <= chosen.metrics[self.target] <= 1).svg()
        return text.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
            ">", f"><style>{STYLE}</style><title>{title}</title>", 1
        )


def interpolate(
    settings: Any,
    start: ModelSettings,
    end: ModelSettings,
    alphas: Iterable[float],
    metric_name: str | None,
    guard_kept: float,
    out: Path,
    world: World,
) -> None:
    """Evaluate the models between two, choose one and write it. Collective.

    Of the weights at `alphas`, start + alpha (end - start), it is the one with the best target among those whose guards
    keep `guard_kept` of their metrics at the start; of equal ones the nearest to the start.

    Raises:
        SettingsError: as Mixing; the models are not of the same kind.
    """
    mixing = Mixing(settings, end, metric_name, guard_kept, world)
    last, first = mixing.state(end, "END"), mixing.state(start, "START")
    shares = sorted({0.0, *alphas})
    points = {alpha: mixing.evaluate(f"alpha {alpha:g}", mix(first, last, alpha)) for alpha in shares}
    allowed = [alpha for alpha, point in points.items() if mixing.keeps(point, points[0.0])]
    alpha = max(allowed, key=lambda one: points[one].target)
    if world.is_main:
        guard = f" with guard >= {percent(guard_kept)} of the start" if mixing.guards else ""
        mixing.write(out, points[alpha], mix(first, last, alpha), f": best {metric_name or mixing.target}{guard}")
    world.barrier()


def soup(
    settings: Any,
    models: Mapping[str, ModelSettings],
    kind: Literal["uniform", "greedy"],
    metric_name: str | None,
    out: Path,
    world: World,
) -> None:
    """Average several models, evaluate and write the average. Collective.

    `greedy` takes the models from the best one on, and keeps each with which the average is no worse in the target.

    Raises SettingsError: as `interpolate`.
    """
    mixing = Mixing(settings, next(iter(models.values())), metric_name, None, world)
    states = {name: partial(mixing.state, model, name) for name, model in models.items()}
    singles = {name: mixing.evaluate(name, load()) for name, load in states.items()}
    order = sorted(singles, key=lambda name: -singles[name].target) if kind == "greedy" else list(singles)
    taken, best = order[:1], singles[order[0]]
    for name in order[1:]:
        if kind == "uniform":
            taken.append(name)
            continue
        point = mixing.evaluate(
            f"soup of {len(taken) + 1}, with {name}", average(states[one]() for one in (*taken, name))
        )
        if point.target >= best.target:
            taken, best = [*taken, name], point
    state = average(states[name]() for name in taken)
    if kind == "uniform":
        best = mixing.evaluate(f"soup of {len(taken)}", state)
    if world.is_main:
        mixing.write(out, best, state)
    world.barrier()


def check_out(out: Path, models: Iterable[Path]) -> None:
    """Raises SettingsError: a folder to write holds other files than those of a mixture, or one of the models."""
    if out.exists() and not (out / FIGURES).is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise SettingsError(f"{out} holds files that are not of interpolate: name another folder with --out")
    if out.resolve() in [path.resolve() for path in models]:
        raise SettingsError(f"{out} is one of the models: name another folder with --out")


def mix(first: Tensors, last: Tensors, alpha: float) -> dict[str, torch.Tensor]:
    """first + alpha (last - first); at 0 and 1 with the bits of these; of whole numbers those of the nearer."""
    if alpha in (0, 1):
        return dict(last if alpha else first)
    nearer = last if alpha >= 0.5 else first
    return {name: torch.lerp(tensor, last[name], alpha) if tensor.is_floating_point() else nearer[name]
            for name, tensor in first.items()}  # fmt: skip


def average(states: Iterator[Tensors]) -> dict[str, torch.Tensor]:
    """The mean of weights, summed in float64; of whole numbers those of the first."""
    total: dict[str, torch.Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    count = 0
    for state in states:
        count += 1
        for name, tensor in state.items():
            if name not in total:
                dtypes[name] = tensor.dtype
                total[name] = tensor.double() if tensor.is_floating_point() else tensor
            elif tensor.is_floating_point():
                total[name] = total[name] + tensor.double()
    return {name: (tensor / count).to(dtypes[name]) if tensor.is_floating_point() else tensor
            for name, tensor in total.items()}  # fmt: skip


def main_figure(record: Mapping[str, Any]) -> tuple[float, bool]:
    """The main metric of an evaluation, and whether it is better if smaller: the mean of its R@1, or its first metric.

    Raises ClipstreamError: it failed, or has no metric.
    """
    if "error" in record:
        raise ClipstreamError(f"evals.{record['eval']}: {record['error']}")
    metrics = {name: value for name, value in metrics_of(record).items() if not name.startswith(("chance", "n_"))}
    if both := [value for name, value in metrics.items() if name.endswith("R@1")]:
        return fmean(both), False
    names = [name for name in metrics if name not in ("step", "eval", "dropped", "seconds", "n")]
    if not names:
        raise ClipstreamError(f"evals.{record['eval']} has no metric that could be compared")
    name = next((name for name in names if is_share(name, metrics[name])), names[0])
    metric = Metric.of(f"{record['eval']}/{name}", "auto")
    return metrics[name], metric is not None and metric.lower


def text_of(value: float) -> str:
    return percent(value) if 0 <= value <= 1 else f"{value:.4g}"

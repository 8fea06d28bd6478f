"""Line charts of metrics over steps. Points enter; SVG leaves.

Lines have the CSS classes s0, s1, …, chance has `chance`, and lines that may not be compared with the first one have
`other`. NaN makes a gap. The axis spans the values, and starts at 0 if they come near it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from html import escape

from clipstream.report.run_reader import Points, fewer

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 22
COLOURS = 8


@dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
        name: of the run, for the legend.
        points: (step, value).
        number: of its colour.
        other: whether its values may not be compared with those of the first line.
    """

    name: str
    points: Points
    number: int = 0
    other: bool = False


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        title: of the chart.
        series: its lines.
        chance: value for random guesses, if it is known.
        share: whether values are shown in percent.
    """

    title: str
    series: tuple[Series, ...]
    chance: float | None = None
    share: bool = False

    def svg(self) -> str:
        """The chart as SVG; '' if no line has two points."""
        lines = [fewer(series.points) for series in self.series]
        ys = [y for points in lines for _, y in points if math.isfinite(y)]
        xs = [x for points in lines for x, _ in points]
        if not ys or max(len(points) for points in lines) < 2:
            return ""
        if self.chance is not None:
            ys.append(self.chance)
        ticks = nice_ticks(min(ys), max(ys))
        frame = _Frame(min(xs), max(xs), min(*ticks, *ys), max(*ticks, *ys))
        # The page's script turns positions back into values by the data attributes.
        inner = f"{LEFT} {WIDTH - RIGHT} {TOP} {HEIGHT - BOTTOM}"
        spans = f'data-x0="{frame.x0}" data-x1="{frame.x1}" data-y0="{frame.y0}" data-y1="{frame.y1}"'
        label = f'role="img" aria-label="{escape(self.title)}" data-share="{str(self.share).lower()}"'
        parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" {label} {spans} data-inner="{inner}">']
        for tick in ticks:
            y = frame.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(
                f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{self.format(tick)}</text>'
            )
        for x, anchor in ((frame.x0, "start"), (frame.x1, "end")):
            shown = f'{frame.x(x):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{short(x)}'
            parts.append(f'<text class="tick" x="{shown}</text>')
        if self.chance is not None:
            y = frame.y(self.chance)
            parts.append(f'<line class="chance" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        for series, points in zip(self.series, lines, strict=True):
            about = f'class="s{series.number % COLOURS}{" other" * series.other}" data-name="{escape(series.name)}"'
            for finite, run in itertools.groupby(points, key=lambda point: math.isfinite(point[1])):
                if not finite:
                    continue
                positions = [(frame.x(x), frame.y(y)) for x, y in run]
                if len(positions) == 1:
                    parts.append(f'<circle {about} cx="{positions[0][0]:.1f}" cy="{positions[0][1]:.1f}" r="2"/>')
                else:
                    parts.append(f'<polyline {about} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in positions)}"/>')
        return "".join([*parts, "</svg>"])

    def format(self, value: float) -> str:
        """A value as text."""
        return f"{100 * value:.3g}%" if self.share else short(value)


@dataclass(frozen=True)
class _Frame:
    """Maps values to positions in the chart."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0 or 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0 or 1) * (HEIGHT - TOP - BOTTOM)


def nice_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """About `about` round values from `low` to `high`, with a step of 1, 2 or 5 times a power of ten."""
    if low > 0 and low < 0.35 * high:
        low = 0.0
    size = max(abs(low), abs(high))
    span = high - low if high - low > 1e-9 * size + 1e-15 else max(size, 1e-15) if size else 1.0
    power = 10 ** math.floor(math.log10(span / about))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= about)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = 2 - math.floor(math.log10(step))  # hides rounding errors of the product
    return [round(step * k, digits) for k in range(first, max(last, first + 1) + 1)]


def short(value: float) -> str:
    """A number in few characters: 0.00012 as 1.2e-4, 12000 as 12k."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    if size >= 1e4:
        for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if size >= unit:
                return f"{value / unit:.4g}{letter}"
    if 0 < size < 1e-3:
        return f"{value:.2g}".replace("e-0", "e-")
    return f"{value:.4g}"

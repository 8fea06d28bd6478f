"""Owns how numbers over steps become a line chart, as SVG that a page colours; never reads a file.

Lines carry the classes s0, s1, … for the page's colours; chance has the class `chance`. A value that is no number makes
a gap. Nothing is scaled to be pretty: the axis spans what the values span, from 0 where they come near it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from clipstream.report.reading import Points, fewer

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 22
COLOURS = 8


@dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
        name: of the run, for the legend.
        points: (step, value).
        number: which of the page's colours.
    """

    name: str
    points: Points
    number: int = 0


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        title: what is shown.
        series: its lines.
        chance: what guessing gives, where that is known.
        share: whether the values are shown in percent.
    """

    title: str
    series: tuple[Series, ...]
    chance: float | None = None
    share: bool = False

    def svg(self) -> str:
        """The drawing; empty where there are no two points to join."""
        lines = [fewer(series.points) for series in self.series]
        ys = [y for points in lines for _, y in points if math.isfinite(y)]
        xs = [x for points in lines for x, _ in points]
        if not ys or max(len(points) for points in lines) < 2:
            return ""
        if self.chance is not None:
            ys.append(self.chance)
        ticks = nice_ticks(min(ys), max(ys))
        frame = _Frame(min(xs), max(xs), min(*ticks, *ys), max(*ticks, *ys))
        parts = [self._opening(frame)]
        for tick in ticks:
            y = frame.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(
                f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{self.say(tick)}</text>'
            )
        for x, anchor in ((frame.x0, "start"), (frame.x1, "end")):
            shown = f'{frame.x(x):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{short(x)}'
            parts.append(f'<text class="tick" x="{shown}</text>')
        if self.chance is not None:
            y = frame.y(self.chance)
            parts.append(f'<line class="chance" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        for series, points in zip(self.series, lines, strict=True):
            about = f'class="s{series.number % COLOURS}" data-name="{escape(series.name)}"'
            for run in _unbroken(points):
                places = [(frame.x(x), frame.y(y)) for x, y in run]
                if len(places) == 1:
                    parts.append(f'<circle {about} cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="2"/>')
                else:
                    parts.append(f'<polyline {about} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>')
        return "".join([*parts, "</svg>"])

    def _opening(self, frame: _Frame) -> str:
        """The tag, with what a page's script needs to turn places into values again."""
        inner = f"{LEFT} {WIDTH - RIGHT} {TOP} {HEIGHT - BOTTOM}"
        spans = f'data-x0="{frame.x0}" data-x1="{frame.x1}" data-y0="{frame.y0}" data-y1="{frame.y1}"'
        about = f'role="img" aria-label="{escape(self.title)}" data-share="{str(self.share).lower()}"'
        return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" {about} {spans} data-inner="{inner}">'

    def say(self, value: float) -> str:
        """A value for reading."""
        return f"{100 * value:.3g}%" if self.share else short(value)


@dataclass(frozen=True)
class _Frame:
    """Values to places in the drawing."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0 or 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0 or 1) * (HEIGHT - TOP - BOTTOM)


def _unbroken(points: Points) -> list[Points]:
    """The stretches of finite values."""
    runs: list[Points] = [[]]
    for x, y in points:
        if math.isfinite(y):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def nice_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round values from around `low` to around `high`, at equal distances of 1, 2 or 5 times a power of ten."""
    if low > 0 and low < 0.35 * high:
        low = 0.0
    size = max(abs(low), abs(high))
    span = high - low if high - low > 1e-9 * size + 1e-15 else max(size, 1e-15) if size else 1.0
    power = 10 ** math.floor(math.log10(span / about))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= about)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = 2 - math.floor(math.log10(step))  # rounding errors of the product are not shown
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

"""HTML pages of runs, data sets and searches by one template, their charts as SVG, and thumbnails. Imports no torch.

Values enter; a page leaves, one file that needs no network. Texts are escaped. Charts have no scripts; their colours
are those of the page's style sheet, by the classes s0 to s7.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from html import escape
from statistics import fmean
from typing import Any, Literal

import numpy as np

from clipstream import __version__
from clipstream.data.decode.images import convert_image, load_image, opaque, open_image, orientation_of, turn_upright
from clipstream.errors import Dropped
from clipstream.text import percent, shortened

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # which no page has, though names of runs may
WIDTH, HEIGHT = 360, 190  # of a chart
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 22  # its margins
COLOURS = 8
# Of a step, in the order of the chart; others follow.
PARTS = ("data", "copy", "image_forward", "text_forward", "forward", "loss", "backward", "communication", "optimizer")

Points = list[tuple[float, float]]
MOST = 4_700_000  # bytes of thumbnails of a gallery
SIDE, SMALL = 288, 160  # pixels of a thumbnail's longer side; SMALL where there are more than MANY cards


@cache
def _template() -> Any:
    """The pages' template; a process that writes several pages compiles it once."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("clipstream.report", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.globals["hash_of"] = lambda script: f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"
    return environment.get_template("page.html")


def fill(kind: Literal["runs", "data", "search"], title: str, **values: Any) -> str:
    """A page. Its content security policy allows the template's script by its hash, styles, and images in data: URLs: a
    browser loads nothing else. Raises as jinja2 does.
    """
    given = {"several": False, "version": __version__, "percent": percent, "colours": COLOURS, **values}
    page: str = _template().render(kind=kind, title=title, **given)
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", page)


class Thumbnails:
    """Thumbnails of a page, until they take MOST bytes."""

    left = MOST

    def __call__(self, data: bytes | None, side: int) -> tuple[str, int, int]:
        """As `thumbnail`. Once one does not fit, no more are computed."""
        src, width, height = thumbnail(data if self.left else None, side)
        src, self.left = (src, self.left - len(src)) if len(src) <= self.left else ("", 0)
        return src, width, height


def thumbnail(data: bytes | None, side: int) -> tuple[str, int, int]:
    """A data URL with a JPEG, its width and its height; '' and a square if there is no image."""
    jpeg, width, height = small_jpeg(data, side)
    return f"data:image/jpeg;base64,{b64encode(jpeg).decode()}" if jpeg else "", width, height


def small_jpeg(data: bytes | None, side: int) -> tuple[bytes, int, int]:
    """A JPEG of an image file, its width and its height, `side` at most; empty and a square if there is no image."""
    try:
        image = open_image(data or b"")
        orientation = orientation_of(image)
        image.draft("RGB", (2 * side, 2 * side))  # a JPEG is decoded at a fraction of its size
        image = convert_image(turn_upright(opaque(load_image(image), (255, 255, 255)), orientation))
    except Dropped:
        return b"", side, side
    image.thumbnail((side, side))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=82)
    return file.getvalue(), *image.size


def fewer(points: Points, most: int = 400) -> Points:
    """Reduce points to at most `most`: means over equal spans of steps; the first and last are kept."""
    if len(points) <= most:
        return points
    return means(points, (points[-1][0] - points[0][0] or 1) / (most - 2))


def means(points: Points, span: float) -> Points:
    """Means of the finite values over spans of steps, at the last step of each; the first and last points are kept."""
    first, found = points[0][0], []
    for _, some in itertools.groupby(points[1:-1], lambda point: int((point[0] - first) / span)):
        *_, (step, _) = each = list(some)
        finite = [y for _, y in each if math.isfinite(y)]
        found.append((step, sum(finite) / len(finite) if finite else math.nan))
    return [points[0], *found, *points[1:][-1:]]


@dataclass(frozen=True)
class Series:
    name: str  # of the run, for the legend
    points: Points  # (step, value)
    number: int = 0  # of its colour
    other: bool = False  # whether its values may not be compared with those of the first line


@dataclass(frozen=True)
class Chart:
    title: str  # of the chart
    series: tuple[Series, ...]  # its lines
    chance: float | None = None  # value for random guesses, if it is known
    share: bool = False  # whether values are shown in percent

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
        x0, x1, y0, y1 = min(xs), max(xs), min(*ticks, *ys), max(*ticks, *ys)

        def at(x: float, y: float) -> tuple[float, float]:
            right = LEFT + (x - x0) / (x1 - x0 or 1) * (WIDTH - LEFT - RIGHT)
            return right, HEIGHT - BOTTOM - (y - y0) / (y1 - y0 or 1) * (HEIGHT - TOP - BOTTOM)

        # The page's script turns positions back into values by the data attributes.
        inner = f"{LEFT} {WIDTH - RIGHT} {TOP} {HEIGHT - BOTTOM}"
        spans = f'data-x0="{x0}" data-x1="{x1}" data-y0="{y0}" data-y1="{y1}"'
        label = f'role="img" aria-label="{escape(self.title)}" data-share="{str(self.share).lower()}"'
        parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" {label} {spans} data-inner="{inner}">']
        labels = (f"{100 * tick:.3g}%" if self.share else short(tick) for tick in ticks)
        parts += _axes({at(x0, tick)[1]: label for tick, label in zip(ticks, labels, strict=True)}, x0, x1)
        if self.chance is not None:
            y = at(x0, self.chance)[1]
            parts.append(f'<line class="chance" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        for series, points in zip(self.series, lines, strict=True):
            about = f'class="s{series.number % COLOURS}{" other" * series.other}" data-name="{escape(series.name)}"'
            for finite, run in itertools.groupby(points, key=lambda point: math.isfinite(point[1])):
                if not finite:
                    continue
                positions = [at(x, y) for x, y in run]
                if len(positions) == 1:
                    parts.append(f'<circle {about} cx="{positions[0][0]:.1f}" cy="{positions[0][1]:.1f}" r="2"/>')
                else:
                    parts.append(f'<polyline {about} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in positions)}"/>')
        return "".join([*parts, "</svg>"])


def _axes(ticks: dict[float, str], first: float, last: float) -> Iterator[str]:
    """SVG of the y axis, with labels by their height in the drawing, and of the first and the last step below."""
    for y, shown in ticks.items():
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{shown}</text>'
    for step, x, anchor in ((first, LEFT, "start"), (last, WIDTH - RIGHT, "end")):
        yield f'<text class="tick" x="{x}" y="{HEIGHT - 6}" text-anchor="{anchor}">{short(step)}</text>'


def step_times(curves: Mapping[str, Points]) -> tuple[Chart, list[tuple[str, float, float, int]]]:
    """The time of a step by part, of the curves of a run that begin with time/: a chart of the shares, and rows.

    Returns:
        The chart, and (part, mean seconds, share, number of its colour), without the first training line, which has the
        warm-up.
    """
    found = {key.removeprefix("time/"): dict(curves[key]) for key in curves if key.startswith("time/")}
    steps = sorted(set().union(*found.values()))
    parts = sorted(found, key=lambda part: PARTS.index(part) if part in PARTS else len(PARTS))
    seconds = {part: [found[part].get(step, 0.0) for step in steps] for part in parts}  # lines lack parts without time
    wholes = [sum(line) or 1.0 for line in zip(*seconds.values(), strict=True)]
    means = {part: fmean(values[1:] or values) for part, values in seconds.items()}
    series, rows = [], []
    for number, part in enumerate(parts):
        shares = [value / whole for value, whole in zip(seconds[part], wholes, strict=True)]
        series.append(Series(part.replace("_", " "), list(zip(steps, shares, strict=True)), number))
        rows.append((part, means[part], means[part] / (sum(means.values()) or 1.0), number))
    return Chart("time of a step by part", tuple(series), share=True), rows


@dataclass(frozen=True)
class Bars:
    """How often values occur: a histogram, or a bar for each name."""

    title: str  # of the chart
    bars: tuple[tuple[str, int], ...]  # (range of values or name, count)
    span: tuple[float, float] | None = None  # of a histogram: its first and last value
    mark: float | None = None  # a value that is marked in it

    @classmethod
    def of(cls, title: str, values: Any, mark: float | None = None, most: int = 30) -> Bars:
        """The histogram of numbers; the rarest 1% at the upper end are in its last bar.

        Args:
            values: array [n], n > 0.
        """
        low, high = float(np.min(values)), float(np.quantile(values, 0.99))
        ticks = nice_ticks(low, max(high, low + 1e-9 if mark is None else mark), most)
        counts, edges = np.histogram(np.clip(values, ticks[0], ticks[-1]), bins=ticks)
        names = [f"{short(one)} to {short(other)}" for one, other in itertools.pairwise(edges.tolist())]
        names[-1] = f"from {short(edges[-2])}" if np.max(values) > ticks[-1] else names[-1]
        return cls(title, tuple(zip(names, counts.tolist(), strict=True)), (ticks[0], ticks[-1]), mark)

    @classmethod
    def of_counts(cls, title: str, counts: Mapping[str, int], most: int = 12) -> Bars:
        """The largest counts by name, and the sum of the others."""
        ranked = sorted(counts.items(), key=lambda one: -one[1])
        others = sum(count for _, count in ranked[most:])
        return cls(title, (*ranked[:most], *([("others", others)] if others else [])))

    def svg(self) -> str:
        return self._by_name() if self.span is None else self._histogram(*self.span)

    def _by_name(self) -> str:
        """A horizontal bar for each name."""
        high, most = 17, max(count for _, count in self.bars)
        parts = [f'<svg viewBox="0 0 {WIDTH} {high * len(self.bars)}" role="img" aria-label="{escape(self.title)}">']
        for number, (name, count) in enumerate(self.bars):
            y, wide = high * number, (WIDTH - 180) * count / most
            parts.append(f'<text class="tick" x="0" y="{y + 12}">{escape(shortened(name, 20))}</text>')
            parts.append(f'<rect class="bin" x="120" y="{y + 4}" width="{wide:.1f}" height="9"/>')
            parts.append(f'<text class="tick" x="{WIDTH}" y="{y + 12}" text-anchor="end">{count:,}</text>')
        return "".join([*parts, "</svg>"])

    def _histogram(self, low: float, high: float) -> str:
        right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
        ticks = nice_ticks(0, max(count for _, count in self.bars))
        parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">']
        scale = (bottom - TOP) / ticks[-1]
        parts += _axes({bottom - tick * scale: short(tick) for tick in ticks}, low, high)
        wide = (right - LEFT) / len(self.bars)
        for number, (name, count) in enumerate(self.bars):
            x, y = LEFT + number * wide, bottom - count * scale
            shape = f'<rect class="bin" x="{x:.1f}" y="{y:.1f}" width="{max(wide - 1, 1):.1f}"'
            parts.append(f'{shape} height="{count * scale:.1f}"><title>{escape(name)}: {count:,}</title></rect>')
        if self.mark is not None and low <= self.mark <= high:
            x = LEFT + (self.mark - low) / (high - low) * (right - LEFT)
            parts.append(f'<line class="chance" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
            anchor = "end" if x > WIDTH / 2 else "start"
            at = x - 4 if anchor == "end" else x + 4
            parts.append(
                f'<text class="tick" x="{at:.1f}" y="{TOP + 9}" text-anchor="{anchor}">{short(self.mark)}</text>'
            )
        return "".join([*parts, "</svg>"])


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

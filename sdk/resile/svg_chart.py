"""Small charts as SVG text, for notebooks and reports: no script, no outside host, light and dark by `currentColor`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#2f6db3", "#e07b28", "#3d9a63", "#a35bb5")
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 12.0, 12.0, 44.0
_MAX_POINTS = 1200
"""A line has at most about this many points: more would not be visible."""


@dataclass(frozen=True)
class Series:
    """One line or one layer: its points are ordered by x."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Mark:
    """A moment that the chart names."""

    x: float
    text: str


@dataclass(frozen=True)
class Chart:
    """Size, scales and labels. The x axis starts at 0."""

    title: str
    x_label: str
    y_label: str
    x_max: float
    y_max: float
    y_min: float = 0.0
    width: float = 860.0
    height: float = 240.0
    marks: Sequence[Mark] = ()

    def x(self, value: float) -> float:
        """Return the horizontal position of a value."""
        return _LEFT + (self.width - _LEFT - _RIGHT) * value / (self.x_max or 1.0)

    def y(self, value: float) -> float:
        """Return the vertical position of a value."""
        share = (value - self.y_min) / ((self.y_max - self.y_min) or 1.0)
        return self.height - _BOTTOM - (self.height - _TOP - _BOTTOM) * share


def line_chart(chart: Chart, series: Sequence[Series]) -> str:
    """Return lines through the points of each series."""
    shapes = []
    for one, colour in zip(series, _colours(series), strict=True):
        points = " ".join(f"{chart.x(x):.1f},{chart.y(y):.1f}" for x, y in _thinned(one.points))
        shapes.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.8" points="{points}"/>')
    return _svg(chart, shapes, series)


def stacked_chart(chart: Chart, series: Sequence[Series]) -> str:
    """Return the series stacked; each keeps the value of a point until its next point, the last one until ``x_max``."""
    edges = sorted({0.0, chart.x_max, *(x for one in series for x, _ in one.points)})
    below = [0.0] * (len(edges) - 1)
    shapes = []
    for one, colour in zip(series, _colours(series), strict=True):
        held = [_value_at(one, edge) for edge in edges[:-1]]
        above = [low + more for low, more in zip(below, held, strict=True)]
        outline = [*_steps(chart, edges, above), *reversed(_steps(chart, edges, below))]
        shapes.append(f'<polygon fill="{colour}" points="{" ".join(outline)}"/>')
        shapes += _numbers(chart, edges, below, held)
        below = above
    return _svg(chart, shapes, series)


def _steps(chart: Chart, edges: Sequence[float], values: Sequence[float]) -> list[str]:
    points = []
    for begin, end, value in zip(edges[:-1], edges[1:], values, strict=True):
        points += [f"{chart.x(begin):.1f},{chart.y(value):.1f}", f"{chart.x(end):.1f},{chart.y(value):.1f}"]
    return points


def _numbers(chart: Chart, edges: Sequence[float], below: Sequence[float], held: Sequence[float]) -> list[str]:
    """Write each value into its area, once for each stretch that is wide enough."""
    shapes, begin = [], 0
    for number in range(len(held)):
        if number + 1 < len(held) and held[number + 1] == held[number]:
            continue
        left, right = chart.x(edges[begin]), chart.x(edges[number + 1])
        middle = sum(below[begin : number + 1]) / (number + 1 - begin) + held[number] / 2
        if held[number] and right - left > 18:
            shapes.append(
                f'<text x="{(left + right) / 2:.1f}" y="{chart.y(middle) + 4:.1f}" text-anchor="middle" fill="#fff">'
                f"{held[number]:g}</text>"
            )
        begin = number + 1
    return shapes


def _svg(chart: Chart, shapes: Sequence[str], series: Sequence[Series]) -> str:
    drawn = "".join((*_axes(chart), *shapes, *_marks(chart), *_legend(chart, series)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(chart.title)}" '
        f'viewBox="0 0 {chart.width:g} {chart.height:g}" font-family="system-ui, sans-serif" font-size="12">'
        f"{drawn}</svg>"
    )


def _axes(chart: Chart) -> list[str]:
    shapes = []
    for tick in _ticks(chart.y_min, chart.y_max, 5):
        y = chart.y(tick)
        shapes.append(
            f'<line x1="{_LEFT}" x2="{chart.width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" '
            f'stroke-opacity="0.12"/><text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="currentColor">'
            f"{tick:g}</text>"
        )
    base = chart.height - _BOTTOM
    shapes += [
        f'<text x="{chart.x(tick):.1f}" y="{base + 16}" text-anchor="middle" fill="currentColor">{tick:g}</text>'
        for tick in _ticks(0.0, chart.x_max, 8)
    ]
    middle = (_TOP + base) / 2
    shapes.append(
        f'<text x="{chart.width - _RIGHT}" y="{base + 34}" text-anchor="end" fill="currentColor">'
        f"{escape(chart.x_label)}</text>"
        f'<text x="12" y="{middle}" text-anchor="middle" fill="currentColor" transform="rotate(-90 12 {middle})">'
        f"{escape(chart.y_label)}</text>"
    )
    return shapes


def _marks(chart: Chart) -> list[str]:
    base = chart.height - _BOTTOM
    return [
        f'<line x1="{chart.x(mark.x):.1f}" x2="{chart.x(mark.x):.1f}" y1="{_TOP}" y2="{base}" stroke="currentColor" '
        f'stroke-opacity="0.45" stroke-dasharray="3 3"><title>{escape(mark.text)}</title></line>'
        f'<text x="{chart.x(mark.x) + 3:.1f}" y="{_TOP + 9}" fill="currentColor" font-weight="600">{number}</text>'
        for number, mark in enumerate(chart.marks, start=1)
    ]


def _legend(chart: Chart, series: Sequence[Series]) -> list[str]:
    if len(series) < 2:
        return []
    shapes, x, y = [], _LEFT, chart.height - 4
    for one, colour in zip(series, _colours(series), strict=True):
        shapes.append(
            f'<rect x="{x}" y="{y - 9}" width="10" height="10" rx="2" fill="{colour}"/>'
            f'<text x="{x + 15}" y="{y}" fill="currentColor">{escape(one.name)}</text>'
        )
        x += 35 + 7 * len(one.name)
    return shapes


def _colours(series: Sequence[Series]) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(len(series))]


def _value_at(series: Series, x: float) -> float:
    return next((value for moment, value in reversed(series.points) if moment <= x), 0.0)


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    step = max(1, math.ceil(len(points) / _MAX_POINTS))
    return points if step == 1 else [*points[:-1:step], points[-1]]


def _ticks(low: float, high: float, num: int) -> list[float]:
    """Return about ``num`` round numbers from ``low`` to ``high``."""
    if not high > low:
        return [low]
    rough = (high - low) / num
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 10) for number in range(first, math.floor(high / step + 1e-9) + 1)]

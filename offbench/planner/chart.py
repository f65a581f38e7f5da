"""Line charts and timelines as SVG text. Plain and deterministic: the same figures give the same bytes.

Identity is never by colour alone: lines are named at their ends, lanes at their left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 760, 62, 132, 84, 48
PLOT = 330
"""Height of a chart's plotting area, pixels."""
INK, MUTED, GRID, SURFACE = "#1f1f1d", "#6b6a65", "#e4e3df", "#fcfcfb"
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
LABEL_GAP = 14


@dataclass(frozen=True)
class Series:
    """One line."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: str
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """One chart: linear axes, lines named at their right ends."""

    title: str
    notes: tuple[str, ...]
    """Lines under the title: what kind of figures these are, and from which inputs."""
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    y_from: float = 0.0
    y_to: float | None = None
    scattered: bool = False
    """Series are single places: their names stand beside the dot, on the side with more room."""


@dataclass(frozen=True)
class Lane:
    """One row of a timeline: (start, end, colour) in seconds."""

    name: str
    spans: tuple[tuple[float, float, str], ...]


@dataclass(frozen=True)
class Strip:
    """Lanes that belong together, under a heading."""

    heading: str
    lanes: tuple[Lane, ...]


def draw(chart: Chart) -> str:
    """The chart as an SVG document."""
    xs = [x for line in chart.series for x, _ in line.points]
    ys = [y for line in chart.series for _, y in line.points]
    x_ticks = ticks(min(xs), max(xs))
    y_ticks = ticks(chart.y_from, chart.y_to or max(ys))
    low, high, bottom, top = x_ticks[0], x_ticks[-1], y_ticks[0], y_ticks[-1]
    inner = WIDTH - LEFT - RIGHT

    def across(x: float) -> float:
        return LEFT + inner * (x - low) / (high - low)

    def down(y: float) -> float:
        return TOP + PLOT * (1 - (y - bottom) / (top - bottom))

    parts = [*_heading(chart.title, chart.notes)]
    for y in y_ticks:
        parts.append(_line(LEFT, down(y), WIDTH - RIGHT, down(y), GRID))
        parts.append(_text(LEFT - 8, down(y) + 4, _number(y), anchor="end"))
    for x in x_ticks:
        parts.append(_text(across(x), TOP + PLOT + 18, _number(x), anchor="middle"))
    parts.append(_line(LEFT, TOP + PLOT, WIDTH - RIGHT, TOP + PLOT, MUTED))
    parts.append(_text(LEFT + inner / 2, TOP + PLOT + 38, chart.x_label, anchor="middle"))
    parts.append(_text(LEFT, TOP - 8, chart.y_label))
    for line in chart.series:
        parts += _series([(across(x), down(min(y, top))) for x, y in line.points], line)
    ends = [(down(min(line.points[-1][1], top)), across(line.points[-1][0]), line) for line in chart.series]
    parts += _beside(ends) if chart.scattered else _end_labels(ends)
    return _document(TOP + PLOT + BOTTOM, parts)


def timeline(title: str, notes: Sequence[str], strips: Sequence[Strip], legend: Sequence[tuple[str, str]]) -> str:
    """Strips of lanes over one time axis. legend: name and colour of what the spans show."""
    end = max(stop for strip in strips for lane in strip.lanes for _, stop, _ in lane.spans)
    x_ticks = ticks(0.0, end)
    left, inner = LEFT + 40, WIDTH - LEFT - 40 - 24
    parts = [*_heading(title, notes)]
    x: float = LEFT
    for name, colour in legend:
        parts.append(f'<rect x="{x:.0f}" y="{TOP - 10}" width="12" height="12" rx="2" fill="{colour}"/>')
        parts.append(_text(x + 17, TOP, name))
        x += 32 + 6.6 * len(name)
    y: float = TOP + 34
    for strip in strips:
        parts.append(_text(LEFT, y - 6, strip.heading, colour=INK, weight="600"))
        for lane in strip.lanes:
            parts.append(_text(left - 8, y + 13, lane.name, anchor="end"))
            for start, stop, colour in lane.spans:
                wide = max(0.4, inner * (stop - start) / x_ticks[-1])
                at = left + inner * start / x_ticks[-1]
                parts.append(f'<rect x="{at:.2f}" y="{y}" width="{wide:.2f}" height="17" fill="{colour}"/>')
            y += 20
        y += 28
    for tick in x_ticks:
        at = left + inner * tick / x_ticks[-1]
        parts.append(_text(at, y, f"{_number(tick)} s", anchor="middle"))
    return _document(y + 16, parts)


def ticks(low: float, high: float) -> list[float]:
    """Round numbers that cover low to high, about six of them; where the two are one, a tenth of it to both sides."""
    if high - low <= 1e-9 * abs(high):
        low, high = low - 0.1 * (abs(low) or 1.0), high + 0.1 * (abs(high) or 1.0)
    raw = (high - low) / 6
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * times for times in (1, 2, 2.5, 5, 10) if size * times >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * k, 10) for k in range(first, last + 1)]


def _series(points: Sequence[tuple[float, float]], line: Series) -> Iterator[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="6 5"' if line.dashed else ""
    yield f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2"{dash}/>'
    if line.dots:
        for x, y in points:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{line.colour}" stroke="{SURFACE}" stroke-width="2"/>'


def _end_labels(ends: Sequence[tuple[float, float, Series]]) -> Iterator[str]:
    """Names at the lines' ends, moved apart where they would overlap."""
    lowest: float = TOP + PLOT
    placed: list[tuple[float, float, Series]] = []
    for y, x, line in sorted(ends, key=lambda end: -end[0]):
        at = min(y, lowest)
        placed.append((at, x, line))
        lowest = at - LABEL_GAP
    for at, x, line in placed:
        yield f'<circle cx="{x + 12:.1f}" cy="{at:.1f}" r="4" fill="{line.colour}"/>'
        yield _text(x + 21, at + 4, line.name, colour=INK)


def _beside(ends: Sequence[tuple[float, float, Series]]) -> Iterator[str]:
    """Names beside single dots, moved up where they would overlap on their side."""
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    lowest: dict[str, float] = {}
    for y, x, line in sorted(ends, key=lambda end: -end[0]):
        anchor = "start" if x < middle else "end"
        at = min(y, lowest.get(anchor, y))
        lowest[anchor] = at - LABEL_GAP
        yield _text(x + (9 if anchor == "start" else -9), at + 4, line.name, anchor=anchor, colour=INK)


def _heading(title: str, notes: Sequence[str]) -> Iterator[str]:
    yield _text(16, 20, title, colour=INK, weight="600", size=15)
    for row, note in enumerate(notes):
        yield _text(16, 35 + 13 * row, note, size=11)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(
    x: float, y: float, text: str, anchor: str = "start", colour: str = MUTED, weight: str = "400", size: int = 12
) -> str:
    look = f'text-anchor="{anchor}" fill="{colour}" font-weight="{weight}" font-size="{size}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:g}"


def _document(height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-family="{FONT}">'
    surface = f'<rect width="{WIDTH}" height="{height:.0f}" fill="{SURFACE}"/>'
    return "\n".join([head, surface, *parts, "</svg>"]) + "\n"

"""Line charts as inline SVG: no script, no network, readable in light and dark.

The colours are CSS variables that the page defines, so that one drawing serves both modes; each point carries a
`<title>`, which browsers show on hover and screen readers read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 14, 34


@dataclass(frozen=True)
class Series:
    """One line: `points` are (x, y); non-finite points are left out, and the line breaks there."""

    name: str
    points: Sequence[tuple[float, float]]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that cover [low, high]."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / max(count - 1, 1)
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw)
    first = math.floor(low / step) * step
    values = []
    value = first
    while value < high + step * 0.999:
        values.append(round(value, 12))
        value += step
    return values


def line_chart(title: str, series: Sequence[Series], *, x_label: str = "step", y_label: str = "") -> str:
    """An SVG figure; says so in its place when there is nothing to draw."""
    finite = [p for s in series for p in s.points if math.isfinite(p[0]) and math.isfinite(p[1])]
    if not finite:
        return f'<figure class="chart"><figcaption>{escape(title)}</figcaption><p class="empty">no points</p></figure>'
    xs, ys = [p[0] for p in finite], [p[1] for p in finite]
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))
    x0, x1, y0, y1 = x_ticks[0], x_ticks[-1], y_ticks[0], y_ticks[-1]

    def px(x: float) -> float:
        return LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for y in y_ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(y):.1f}" y2="{py(y):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{py(y) + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in x_ticks:
        parts.append(f'<text x="{px(x):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<text class="axis" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(x_label)}</text>')
    if y_label:
        parts.append(f'<text class="axis" x="4" y="{TOP - 2}">{escape(y_label)}</text>')
    for index, s in enumerate(series):
        path, pen_up = "", True
        for x, y in s.points:
            if not (math.isfinite(x) and math.isfinite(y)):
                pen_up = True
                continue
            path += f"{'M' if pen_up else 'L'}{px(x):.1f},{py(y):.1f}"
            pen_up = False
        parts.append(f'<path class="s{index % 6}" d="{path}"/>')
        dots = [p for p in s.points if math.isfinite(p[0]) and math.isfinite(p[1])]
        if len(dots) <= 60:
            parts += [
                f'<circle class="s{index % 6}" cx="{px(x):.1f}" cy="{py(y):.1f}" r="2.5">'
                f"<title>{escape(s.name)}: {escape(x_label)} {x:g}, {y:.4g}</title></circle>"
                for x, y in dots
            ]
    parts.append("</svg>")
    legend = "".join(f'<span class="key s{i % 6}">{escape(s.name)}</span>' for i, s in enumerate(series))
    return f'<figure class="chart"><figcaption>{escape(title)}</figcaption>{"".join(parts)}<p class="legend">{legend}</p></figure>'

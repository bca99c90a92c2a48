"""A chart as an SVG file of its own."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from openhands_rl_plugin.core.types import Frozen

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 300, 48, 16, 16, 58

_CHART_STYLE = ".grid{stroke:#e4e9ef} .tick{font-size:11px;fill:#5a6775}"


class Point(Frozen):
    """One value in [0, 1] with an optional interval; ``slot`` is its place on the x axis."""

    slot: int
    value: float
    low: float | None = None
    high: float | None = None


class Series(Frozen):
    """A named line."""

    name: str
    colour: str
    points: tuple[Point, ...]
    dashed: bool = False


def svg_file(chart: str) -> str:
    """A chart as a file of its own: with its styles, on white."""
    opening, bracket, content = chart.partition(">")
    style = "<style>text{font-family:system-ui,sans-serif}" + _CHART_STYLE + "</style>"
    return f'{opening}{bracket}{style}<rect width="100%" height="100%" fill="#fff"/>{content}'


def line_chart(series: Sequence[Series], labels: Sequence[str], y_title: str) -> str:
    """An SVG with one line a series; ``labels`` name the slots of the x axis."""
    body = [_axes(labels, y_title), *(_line(one, len(labels)) for one in series), _legend(series)]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_title)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(body)}</svg>'
    )


def _x(slot: int, slots: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (slot + 0.5) / max(slots, 1)


def _y(value: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(max(value, 0.0), 1.0))


def _axes(labels: Sequence[str], y_title: str) -> str:
    parts = [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{_y(tick):.1f}" y2="{_y(tick):.1f}" class="grid"/>'
        f'<text x="{LEFT - 8}" y="{_y(tick) + 4:.1f}" class="tick" text-anchor="end">{tick:.1f}</text>'
        for tick in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    ]
    for slot, label in enumerate(labels):
        x, y = _x(slot, len(labels)), HEIGHT - BOTTOM + 16
        parts.append(f'<text x="{x:.1f}" y="{y}" class="tick" text-anchor="middle">{escape(label)}</text>')
    parts.append(
        f'<text x="12" y="{HEIGHT / 2 - 20}" class="tick" transform="rotate(-90 12 {HEIGHT / 2 - 20})" '
        f'text-anchor="middle">{escape(y_title)}</text>'
    )
    return "".join(parts)


def _line(series: Series, slots: int) -> str:
    path = " ".join(f"{_x(point.slot, slots):.1f},{_y(point.value):.1f}" for point in series.points)
    dash = ' stroke-dasharray="5 4"' if series.dashed else ""
    parts = [f'<polyline points="{path}" fill="none" stroke="{series.colour}" stroke-width="2"{dash}/>']
    for point in series.points:
        x = _x(point.slot, slots)
        if point.low is not None and point.high is not None:
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_y(point.low):.1f}" y2="{_y(point.high):.1f}" '
                f'stroke="{series.colour}"/>'
            )
        parts.append(
            f'<circle cx="{x:.1f}" cy="{_y(point.value):.1f}" r="4" fill="{series.colour}">'
            f"<title>{escape(series.name)}: {point.value:.3f}</title></circle>"
        )
    return "".join(parts)


def _legend(series: Sequence[Series]) -> str:
    return "".join(
        f'<rect x="{LEFT + at * 230}" y="{HEIGHT - 20}" width="12" height="12" fill="{one.colour}"/>'
        f'<text x="{LEFT + at * 230 + 18}" y="{HEIGHT - 10}" class="tick">{escape(one.name)}</text>'
        for at, one in enumerate(series)
    )

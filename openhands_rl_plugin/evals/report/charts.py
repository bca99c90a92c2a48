"""Charts as self-contained SVG, and the HTML page around them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from hashlib import sha256
from html import escape

from openhands_rl_plugin.core.transcript import visible
from openhands_rl_plugin.core.types import Frozen

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 300, 48, 16, 16, 58

_CHART_STYLE = ".grid{stroke:#e4e9ef} .tick{font-size:11px;fill:#5a6775}"
STYLE = (
    _CHART_STYLE
    + """
body{font:15px/1.5 system-ui,sans-serif;max-width:900px;margin:2rem auto;padding:0 1rem;color:#1c2430}
h1{font-size:1.6rem} h2{font-size:1.2rem;margin-top:2.2rem}
table{border-collapse:collapse;width:100%} td,th{padding:.3rem .6rem;border-bottom:1px solid #dde3ea;text-align:right}
td:first-child,th:first-child{text-align:left} code{font-size:.85em}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:1rem} .turns{background:#f6f8fa;padding:.6rem;border-radius:6px}
.turn{margin:.3rem 0;overflow-wrap:anywhere;white-space:pre-line}
.sampled{color:#0b5fae;font-weight:600} .page{color:#5a6775;font-size:.8rem}
"""
)
COLOURS = ("#0b5fae", "#c25e00", "#5b8c3e", "#8a3e8c", "#946c00", "#3e7f8c")


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


class Bar(Frozen):
    """One bar, of parts in [0, 1] that lie one after the other; their names are those of the legend."""

    label: str
    parts: tuple[float, ...]


def shown(text: str) -> str:
    """HTML that shows what others wrote: markup as text, and what would turn or hide the text around it written out."""
    return escape(visible(text))


def html_page(title: str, body: Sequence[str]) -> str:
    """A page that needs no other file, executes and loads nothing; ``body`` is HTML."""
    own = base64.b64encode(sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{own}'; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><title>{shown(title)}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(body)}</body></html>"
    )


def svg_file(chart: str) -> str:
    """A chart as a file of its own: with its styles, on white."""
    opening, bracket, content = chart.partition(">")
    style = "<style>text{font-family:system-ui,sans-serif}" + _CHART_STYLE + "</style>"
    return f'{opening}{bracket}{style}<rect width="100%" height="100%" fill="#fff"/>{content}'


def html_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts, which are escaped."""
    head = "".join(f"<th>{shown(each)}</th>" for each in headings)
    lines = "".join(f"<tr>{''.join(f'<td>{shown(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{lines}</table>"


def bar_chart(bars: Sequence[Bar], names: Sequence[str], title: str) -> str:
    """An SVG with one bar a line; ``names`` are those of the parts, in their order."""
    left, thick = 200, 26
    height = TOP + thick * len(bars) + 24 + 18 * len(names)
    drawn = []
    for at, bar in enumerate(bars):
        x, y = float(left), TOP + at * thick
        drawn.append(f'<text x="{left - 8}" y="{y + 14}" class="tick" text-anchor="end">{shown(bar.label[:32])}</text>')
        for part, (name, share) in enumerate(zip(names, bar.parts, strict=True)):
            wide, colour = (WIDTH - left - RIGHT) * min(max(share, 0.0), 1.0), COLOURS[part % len(COLOURS)]
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{thick - 8}" fill="{colour}">'
                f"<title>{shown(bar.label)}, {shown(name)}: {share:.3f}</title></rect>"
            )
            x += wide
    for part, name in enumerate(names):
        y = TOP + thick * len(bars) + 8 + 18 * part
        drawn.append(
            f'<rect x="{left}" y="{y}" width="12" height="12" fill="{COLOURS[part % len(COLOURS)]}"/>'
            f'<text x="{left + 18}" y="{y + 10}" class="tick">{shown(name)}</text>'
        )
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{shown(title)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(drawn)}</svg>'
    )


def line_chart(series: Sequence[Series], labels: Sequence[str], y_title: str) -> str:
    """An SVG with one line a series; ``labels`` name the slots of the x axis."""
    body = [_axes(labels, y_title), *(_line(one, len(labels)) for one in series), _legend(series)]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{shown(y_title)}" '
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
        parts.append(f'<text x="{x:.1f}" y="{y}" class="tick" text-anchor="middle">{shown(label)}</text>')
    parts.append(
        f'<text x="12" y="{HEIGHT / 2 - 20}" class="tick" transform="rotate(-90 12 {HEIGHT / 2 - 20})" '
        f'text-anchor="middle">{shown(y_title)}</text>'
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
            f"<title>{shown(series.name)}: {point.value:.3f}</title></circle>"
        )
    return "".join(parts)


def _legend(series: Sequence[Series]) -> str:
    return "".join(
        f'<rect x="{LEFT + at * 230}" y="{HEIGHT - 20}" width="12" height="12" fill="{one.colour}"/>'
        f'<text x="{LEFT + at * 230 + 18}" y="{HEIGHT - 10}" class="tick">{shown(one.name)}</text>'
        for at, one in enumerate(series)
    )

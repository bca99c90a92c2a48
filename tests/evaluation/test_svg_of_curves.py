"""The chart that a benchmark draws."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from evaluation.performance.search.svg import Point, Series, line_chart, svg_file


def test_charts_are_well_formed_and_draw_every_point() -> None:
    points = tuple(Point(slot=slot, value=slot / 4, low=0.0, high=1.0) for slot in range(4))
    chart = line_chart([Series(name="a < b", colour="#123456", points=points)], ["1", "2", "3", "<4>"], "success")
    root = ElementTree.fromstring(chart)
    assert len(root.findall(".//{*}circle")) == 4
    assert "a < b" in "".join(root.itertext())
    alone = ElementTree.fromstring(svg_file(chart))
    assert len(alone.findall(".//{*}circle")) == 4 and ".grid{" in (alone.findtext("{*}style") or "")

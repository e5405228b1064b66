"""Where the texts of an SVG lie, to find those that overlap or leave the picture."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple
from xml.etree import ElementTree

WIDE, HIGH = 0.5, 0.72  # of a letter, by its size: less than it may be, as boxes must not touch
NARROW, THIN = 0.25, frozenset(" !'(),-./:;I[]fijlrt|")
MOVE = re.compile(r"translate\(([-\d.e]+)[ ,]+([-\d.e]+)\)")
TURN = re.compile(r"rotate\(([-\d.e]+)")


class Box(NamedTuple):
    text: str
    left: float
    top: float
    right: float
    bottom: float


def boxes_of(svg: str) -> list[Box]:
    """Return the boxes of all texts."""
    return list(_boxes(ElementTree.fromstring(svg), 0.0, 0.0))


def overlapping(svg: str) -> list[tuple[str, str]]:
    """Return the pairs of texts that lie on each other."""
    return [
        (a.text, b.text)
        for a, b in combinations(boxes_of(svg), 2)
        if a.left < b.right and b.left < a.right and a.top < b.bottom and b.top < a.bottom
    ]


def outside(svg: str) -> list[str]:
    """Return the texts that leave the picture."""
    width, height = map(float, ElementTree.fromstring(svg).attrib["viewBox"].split()[2:])
    return [
        box.text
        for box in boxes_of(svg)
        if box.left < 0 or box.top < 0 or box.right > width or box.bottom > height
    ]


def _boxes(node: ElementTree.Element, x: float, y: float) -> Iterator[Box]:
    move = MOVE.search(node.get("transform", ""))
    if move:
        x, y = x + float(move[1]), y + float(move[2])
    if node.tag.endswith("}text"):
        yield from _lines(node, x, y)
        return
    for child in node:
        yield from _boxes(child, x, y)


def _lines(node: ElementTree.Element, x: float, y: float) -> Iterator[Box]:
    size = float(node.get("font-size", "11px").removesuffix("px"))
    spans = [child for child in node if child.tag.endswith("}tspan")]
    texts = [span.text or "" for span in spans] or [node.text or ""]
    for line, text in enumerate(texts):
        base = y + sum(float(span.get("dy", 0)) for span in spans[: line + 1])
        if not text or node.get("opacity") == "0":
            continue
        reach = size * sum(NARROW if letter in THIN else WIDE for letter in text)
        start = {"middle": reach / 2, "end": reach}.get(node.get("text-anchor", ""), 0.0)
        if TURN.search(node.get("transform", "")):  # upwards, as names of vertical axes
            yield Box(text, x - HIGH * size, y - reach + start, x, y + start)
        else:
            yield Box(text, x - start, base - HIGH * size, x - start + reach, base)

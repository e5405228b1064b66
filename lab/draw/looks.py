"""One table of the strategies' order and style, for figures and pages."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

# Okabe and Ito, "Color Universal Design", 2008; without its yellow, which is lost on white.
BLACK, BLUE, GREEN, ORANGE = "#000000", "#0072B2", "#009E73", "#E69F00"
VERMILLION, PURPLE, SKY, BROWN = "#D55E00", "#CC79A7", "#56B4E9", "#8C6D31"
GREY = "#767676"
# Three of Paul Tol's muted scheme, which stand apart from those for colour-blind readers too.
TEAL, WINE, INDIGO = "#44AA99", "#882255", "#332288"
COLOURS = (BLUE, GREEN, ORANGE, VERMILLION, PURPLE, SKY, BLACK)

LineStyle = Literal["-", "--", ":", "-."]
LINES: tuple[LineStyle, ...] = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Look:
    """The style of a series: a hex colour, a line as '-' or ':', and a marker as 'o' or '^'."""

    colour: str
    line: LineStyle
    marker: str


# Strategies in reading order. No two share both colour and line.
LOOKS: dict[str, Look] = {
    "none": Look(BLACK, "-", "o"),
    "allreduce": Look(BLUE, "-", "s"),
    "tree": Look(GREEN, "-", "^"),
    "tree_pipelined": Look(GREEN, ":", "^"),
    "tree_double": Look(GREEN, "-.", "v"),
    "ring": Look(SKY, "-", "D"),
    "star": Look(SKY, "--", "v"),
    "tree_overlap": Look(ORANGE, "-.", "^"),
    "overlap": Look(ORANGE, "-", "P"),
    "priority": Look(TEAL, ":", "P"),
    "layerwise": Look(ORANGE, "--", "<"),
    "bf16": Look(BLUE, "--", "X"),
    "fp16": Look(BLUE, ":", "x"),
    "int8": Look(BLUE, "-.", "8"),
    "int4": Look(GREY, "-.", "8"),
    "onebit": Look(VERMILLION, "-", "*"),
    "signsgd_ef": Look(VERMILLION, "--", "+"),
    "topk": Look(BROWN, "-", "p"),
    "randomk": Look(BROWN, "--", "h"),
    "powersgd": Look(PURPLE, "-.", "D"),
    "hierarchical": Look(TEAL, "-", "P"),
    "hierarchical_onebit": Look(TEAL, "--", "*"),
    "onebit_adam": Look(WINE, "-", "*"),
    "zero_one_adam": Look(WINE, ":", "*"),
    "onebit_lamb": Look(WINE, "-.", "*"),
    "muon": Look(WINE, "--", "P"),
    "dion": Look(INDIGO, "-", "D"),
    "auto": Look(BLACK, "--", "*"),
    "schedule": Look(GREY, ":", "*"),
    "fc1x1": Look(PURPLE, "-", "p"),
    "fc1x1_onebit": Look(PURPLE, "--", "h"),
    "local_sgd": Look(SKY, ":", ">"),
    "diloco": Look(VERMILLION, ":", "H"),
    "streaming_diloco": Look(GREY, "-", "H"),
    "des_loc": Look(GREY, "--", ">"),
    "zero1": Look(PURPLE, ":", "P"),
    "fsdp": Look(BROWN, "-.", "X"),
    "hsdp": Look(BLACK, "-.", "X"),
    "zeropp": Look(TEAL, "-.", "X"),
    "ddp": Look(GREEN, "--", "d"),
    "horovod": Look(BLACK, ":", "d"),
    "caffe": Look(BROWN, ":", "^"),
    "torch7": Look(SKY, "-.", "v"),
    "cntk": Look(VERMILLION, "-.", "*"),
    "tensorflow": Look(ORANGE, ":", "<"),
}


def order(series: str) -> tuple[int, list[str | int]]:
    """Return a sort key: strategies in the order of LOOKS, then others; numbers by value."""
    names, strategy = list(LOOKS), series.split(" ")[0]
    place = names.index(strategy) if strategy in LOOKS else len(names)
    return place, [int(p) if p.isdecimal() else p for p in re.split(r"(\d+)", series)]


def looks_of(series: Iterable[str]) -> dict[str, Look]:
    """Assign a look to each series of a study, all different while there are enough.

    A known strategy keeps its look; if a setting splits it into several series, the first keeps
    it, and the others take looks that the study does not use. On another machine (`on=...`) it
    keeps its colour and marker, with another line, as long as there is one.
    """
    ordered = sorted(set(series), key=order)
    known: dict[str, Look] = {}
    for name in ordered:
        look = LOOKS.get(name.split(" ")[0])
        if look and look not in known.values():
            known[name] = look
    taken = {(look.colour, look.line) for look in known.values()}
    for name in ordered:
        look = LOOKS.get(name.split(" ")[0])
        if look and name not in known and " on=" in name:
            other: LineStyle | None
            other = next((each for each in LINES if (look.colour, each) not in taken), None)
            if other:
                known[name] = Look(look.colour, other, look.marker)
                taken.add((look.colour, other))
    pairs: list[tuple[str, LineStyle]] = [(c, line) for line in LINES for c in COLOURS]
    free = [pair for pair in pairs if pair not in taken] or pairs
    spare = (
        Look(colour, line, m)
        for (colour, line), m in zip(itertools.cycle(free), itertools.cycle("osD^vP"), strict=False)
    )
    return {name: known[name] if name in known else next(spare) for name in ordered}

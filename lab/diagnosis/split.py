"""Draw where the time of steps goes; apart from texts, which need no Altair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from lab.diagnosis.evidence import Evidence
from lab.draw.chart import GREY, LABEL_PX, LETTER, WIDTH, Chart
from lab.draw.looks import BLUE, PURPLE, SKY, VERMILLION
from lab.draw.plots import bars

PARTS = {  # of a step, and their colours
    **{"compute, divided evenly": BLUE, "compute that did not shrink": SKY},
    **{"exchange that compute does not hide": VERMILLION, "waiting for data": GREY},
    **{"waiting for a slow rank": PURPLE, "all else": "#C8C8C8"},
}


def time_split(several: Sequence[Evidence], width: int = WIDTH) -> Chart:
    """Chart the parts of a step of some points: a bar for each, the first one's on top."""
    names = [f"{e.point.label}  N={e.one.world_size}" for e in several]
    room = LETTER * LABEL_PX * max(map(len, names))
    data: Any = pd.DataFrame(
        {"name": name, "part": part, "value": 1e3 * seconds, "text": _text(e)}
        for name, e in zip(names, several, strict=True)
        for part, seconds in _parts(e).items()
    )
    used = {part: colour for part, colour in PARTS.items() if part in set(data["part"])}
    body, _ = bars(data, "step time (ms)", used, width=int(width - room))
    first, parts = several[0], _parts(several[0])
    shares = [f"{100 * seconds / first.step_s:.0f} % {part}" for part, seconds in parts.items()]
    message = f"A step of {first.point.label} is {', '.join(shares)}"
    about = ["Even compute is the step of one rank, divided by the number of ranks."]
    return Chart("time_split", message, about, body, width)


def _parts(e: Evidence) -> dict[str, float]:
    """Return the seconds of each part of a step that takes some, in the order of PARTS."""
    parts = e.ideal_s, e.fixed_s, e.exposed_s, e.input_s, e.straggler_s
    known = {name: s for name, s in zip(PARTS, parts, strict=False) if s > 0}
    if math.isnan(e.ideal_s):
        known["all else"] = e.step_s - sum(known.values())
    return known


def _text(e: Evidence) -> str:
    times = e.one.world_size * e.ideal_s / e.step_s
    speedup = "" if math.isnan(times) else f", {times:.2f} ×"
    return f"{1e3 * e.step_s:.3g} ms{speedup}"

"""Draw where the time of steps goes; apart from texts, which need no Altair."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from lab.analysis.charts import NothingToDraw
from lab.analysis.points import Place
from lab.diagnosis.evidence import Evidence
from lab.draw.chart import BLUE, GREY, LABEL_PX, LETTER, PURPLE, SKY, VERMILLION, WIDTH, Chart
from lab.draw.plots import bars

PARTS = {  # of a step, and their colours
    **{"even compute": BLUE, "compute that did not shrink": SKY, "exposed exchange": VERMILLION},
    **{"waiting for data": GREY, "waiting for a slow rank": PURPLE, "all else": "#C8C8C8"},
}


def time_split(
    several: Sequence[Evidence], called: Mapping[Place, str], width: int = WIDTH
) -> Chart:
    """Chart the parts of a step of some points: a bar for each, the first one's on top.

    Args:
        called: short names of the points.

    Raises:
        NothingToDraw: no part of the first one's step is known.
    """
    first, parts = several[0], _parts(several[0])
    if [*parts] == ["all else"]:
        raise NothingToDraw("where the time goes: no run of one rank or of none to compare with")
    names = [f"{called[e.point.place]}  N={e.one.world_size}" for e in several]
    room = LETTER * LABEL_PX * max(map(len, names))
    data: Any = pd.DataFrame(
        {"name": name, "part": part, "value": 1e3 * seconds, "text": _text(e) if at == 1 else ""}
        for name, e in zip(names, several, strict=True)
        for at, (part, seconds) in enumerate(reversed(_parts(e).items()), start=1)
    )
    used = {part: colour for part, colour in PARTS.items() if part in set(data["part"])}
    body, _ = bars(data, "step time (ms)", used, width=int(width - room))
    shares = {part: f"{100 * seconds / first.step_s:.0f} %" for part, seconds in parts.items()}
    told = [f"{share} {part}" for part, share in shares.items() if share != "0 %"]
    message = f"A step of {called[first.point.place]} is {', '.join(told)}"
    about = [
        "Even compute is a step of one rank, divided by the number of ranks. Exposed exchange is "
        "what compute does not hide."
    ]
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

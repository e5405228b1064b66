"""Figure: the own work of each rank in a step, and its waits, from a run's steps.parquet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lab.analysis.step_parts import PHASE_LOOKS
from lab.draw import style
from lab.draw.looks import ORANGE
from lab.draw.page import SCREEN, Page
from lab.measure.spans import OWN
from lab.record.schema import Record, worded

WAIT = "waits, and the rest"
COLOURS = {
    "between": ORANGE,
    "input": PHASE_LOOKS["data"],
    **{name: PHASE_LOOKS[name] for name in ("forward", "backward", "exchange", "update")},
    WAIT: "white",
}


def own_work(steps: pd.DataFrame) -> pd.DataFrame:
    """Return mean seconds of a timed step by rank: columns of OWN that are known, and WAIT.

    Means add up to the step and the gap before it, and show what is rare as well.

    Raises:
        ValueError: the run is older than own times, or timed no step.
    """
    columns = {f"own_{name}_s": name for name in OWN}
    if not set(columns) <= set(steps.columns) or not bool(steps["timed"].to_numpy().any()):
        raise ValueError("its steps.parquet has no own times, or no timed step")
    means: Any = steps[steps["timed"]].groupby("rank").mean(numeric_only=True)
    own = means[list(columns)].rename(columns=columns).dropna(axis=1, how="all")
    turn_s = means["step_s"] + means["own_between_s"]
    own[WAIT] = (turn_s - own.sum(axis=1)).clip(lower=0.0)
    return own


def own_work_of_ranks(steps: pd.DataFrame, record: Record, page: Page = SCREEN) -> Figure:
    """Draw a stacked bar per rank: a slow rank has a long part where the others wait.

    Raises:
        ValueError: see own_work.
    """
    own = own_work(steps)
    figure, axes = style.canvas(1, 1, 7.0, 1.6 + 0.3 * len(own), page)
    panel, hatch = axes[0][0], style.HATCH if record.emulation else None
    look: dict[str, Any] = {"edgecolor": "black", "linewidth": 0.4, "hatch": hatch}
    left = np.zeros(len(own))
    for name in (name for name in COLOURS if name in own.columns):
        lengths = 1e3 * np.nan_to_num(own[name].to_numpy(float))
        panel.barh(range(len(own)), lengths, 0.8, left, color=COLOURS[name], **look)
        left += lengths
    panel.set_yticks(range(len(own)), [f"rank {rank}" for rank in own.index])
    panel.set_ylim(len(own) - 0.5, -0.5)
    panel.set_xlabel("mean time of a step, and of the gap before it (ms)")
    panel.grid(axis="x", linewidth=0.4)
    handles: list[Artist] = [
        Patch(facecolor=colour, edgecolor="black", label=name)
        for name, colour in COLOURS.items()
        if name in own.columns
    ]
    title = f"Own work of each rank: {record.strategy} on {record.world_size} ranks"
    emulated = f"emulated: {worded(record.emulation)}" if record.emulation else ""
    about = f"model {record.model} · batch_size {record.batch_size} · device {record.device}"
    return style.frame(figure, title, handles, [about, emulated], page)

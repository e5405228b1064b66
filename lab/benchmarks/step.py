"""Measure step times of two or more sets of settings, a step of each in every round."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch

from lab.benchmarks import harness, present
from lab.benchmarks.request import Request
from lab.distributed.world import World
from lab.draw.looks import looks_of
from lab.draw.plots import dots
from lab.measure.statistics import least_warmup, round_means
from lab.settings.config import ConfigError
from lab.training.assemble import Assembly, assembled
from lab.training.outcome import steps_of_trials
from lab.training.trainer import Trainer

BASELINE, REFERENCE = "none", "ddp"  # without communication, and torch's own


@harness.on_ranks
def measure(request: Request, world: World) -> dict[str, Any]:
    """Measure all variants. Rounds have as many steps as a strategy's rounds."""
    with ExitStack() as stack:
        parts = [
            stack.enter_context(assembled(variant.config, joined))
            for variant, joined in zip(
                request.variants, harness.worlds_of(request, world), strict=True
            )
        ]
        _, step_s = in_turns(parts, world)
    warmup = max(_warmup(part.trainer) for part in parts)
    every = math.lcm(*(part.trainer.sync.every for part in parts))
    times = {
        variant.label: round_means(seconds[:, warmup:], warmup, every).max(axis=0)
        for variant, seconds in zip(request.variants, step_s, strict=True)
    }
    rows = compare(times)
    for row, part in zip(rows, parts, strict=True):
        row["num_parameters"] = part.sizes["num_parameters"]
        row["comm_settings"] = part.trainer.world.comm.settings
    num_pairs = len(times[request.variants[0].label])
    return {"rows": rows, "num_pairs": num_pairs, "steps_per_round": every}


def compare(times: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Compute a row for each label: its ratio to the last, and its exposed communication.

    Args:
        times: seconds of the timed rounds by label; equal positions ran one after the other.
            Exposed communication is a step's time less that of "none", if it is among the labels,
            and is compared with that of "ddp".
    """
    *_, last = times
    return [
        {
            "name": label,
            "step_s": harness.middle(seconds),
            "ratio": None if label == last else harness.ratio(seconds, times[last]),
            **_exposed(label, times),
        }
        for label, seconds in times.items()
    ]


def _exposed(label: str, times: dict[str, np.ndarray]) -> dict[str, Any]:
    exposed: dict[str, Any] = {"exposed_exchange_s": None, "exposed_to_ddp": None}
    if BASELINE not in times or label == BASELINE:
        return exposed
    step_s, baseline = times[label], times[BASELINE]
    exposed["exposed_exchange_s"] = harness.difference(step_s, baseline)
    if REFERENCE in times and label != REFERENCE:
        to_ddp = harness.interval(
            lambda a, c, d: (a - c) / (d - c), step_s, baseline, times[REFERENCE]
        )
        exposed["exposed_to_ddp"] = to_ddp
    return exposed


def _warmup(trainer: Trainer) -> int:
    """Return how many first steps are left out: warm-up, and any in which others were tried.

    Raises:
        ConfigError: none is left.
    """
    config, trials = trainer.config, steps_of_trials(trainer)
    warmup = max(least_warmup(config.warmup_steps), trials)
    if warmup + trainer.sync.every > trainer.total_steps:
        raise ConfigError(
            f"steps={trainer.total_steps}: too few: strategy={config.strategy} leaves out the "
            f"first {warmup}, and tries others in {trials}"
        )
    return warmup


def in_turns(parts: list[Assembly], world: World) -> tuple[np.ndarray, np.ndarray]:
    """Train all parts in turns, a step of each in every round, which all ranks begin together.

    Returns:
        Seconds of whole turns, with what the host does between steps, and of steps alone: each
        [parts, ranks, steps].
    """
    align = harness.aligner(world)

    def turn_s(loop: Iterator[object]) -> float:
        align()
        began = time.perf_counter()
        next(loop)
        return time.perf_counter() - began

    takes = [partial(turn_s, part.trainer.steps()) for part in parts]
    turns = harness.take_turns(takes, parts[0].trainer.total_steps, shows=world.rank == 0)
    steps = np.stack([part.trainer.clock.step_seconds() for part in parts])
    both = world.gather(torch.from_numpy(np.stack([np.array(turns), steps])))
    of_turns, of_steps = both.permute(1, 2, 0, 3).numpy()
    return of_turns, of_steps


def columns(result: dict[str, Any]) -> dict[str, present.Column]:
    """Return the columns, of a row for each set of settings; exposed communication if known."""
    rows = result["rows"]
    found = {
        "": present.text("name"),
        **present.medians("step (ms)", "step_s", 1e3, 2),
        f"ratio to {rows[-1]['name']}": present.intervals("ratio", reference="1"),
    }
    if any(row["exposed_exchange_s"] for row in rows):
        found["exposed exchange (ms)"] = present.intervals("exposed_exchange_s", 1e3)
        found["of ddp's"] = present.intervals("exposed_to_ddp")
    return found


def notes(result: dict[str, Any]) -> list[str]:
    """Explain the columns."""
    every = result["steps_per_round"]
    round_ = "a step of each in every round" if every == 1 else f"rounds of {every} steps of each"
    return [
        f"medians of {result['num_pairs']} rounds {present.on_ranks_of(result)}, {round_}; a step "
        "lasts as long as on its slowest rank",
        "[95 % intervals] draw whole rounds; exposed exchange: step - step of none, same run",
    ]


def chart(result: dict[str, Any]) -> present.Drawn:
    """Draw step times and ratios, and exposed communication if it is known, in panels."""
    rows = result["rows"]
    last = rows[-1]["name"]
    panels: dict[str, Callable[[dict[str, Any]], dict[str, float]]] = {
        "step time (ms), ± mad": lambda row: _around(row["step_s"]),
        f"step time / that of {last}": lambda row: present.ends(row["ratio"]),
        "exposed exchange (ms)": lambda row: present.ends(row["exposed_exchange_s"], 1e3),
        "exposed exchange / ddp's": lambda row: present.ends(row["exposed_to_ddp"]),
    }
    hollow = result["emulation"] != "none"
    data: Any = pd.DataFrame(
        {"name": row["name"], "panel": panel, "hollow": hollow, **ends_of(row)}
        for panel, ends_of in panels.items()
        for row in rows
    )
    known = data.groupby("panel")["value"].transform("count") > 0
    looks = looks_of(row["name"] for row in rows)
    others = {row["name"]: row["ratio"] for row in rows[:-1] if row["name"] != BASELINE}
    message = (
        present.fastest(others, last, "step time")
        if others
        else f"Step times on {present.ranks_of(result)}"
    )
    sample = f"medians of {result['num_pairs']} rounds in turns, 95 % intervals"
    drawn = dots(
        data[known],
        {row["name"]: looks[row["name"]] for row in rows},
        {panel: 1.0 for panel in panels if "/" in panel},
    )
    return message, [f"{present.machine(result)} · {sample}"], drawn


def _around(step_s: dict[str, float]) -> dict[str, float]:
    median, mad = 1e3 * step_s["median"], 1e3 * step_s["mad"]
    return {"value": median, "low": median - mad, "high": median + mad}

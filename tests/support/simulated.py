"""Studies whose step times are simulated, on made-up hardware."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lab.model.profile import Profile
from lab.settings.config import load
from lab.settings.names import resolved, variant
from lab.simulate.hardware import Hardware, Link
from lab.simulate.predict import plain
from lab.simulate.step import BucketExchange, LayerCompute, Rank, Schedule, both_passes, simulate
from lab.simulate.strategy import Strategy
from tests.support.records import leave, make_record

FLAT = Hardware("flat", "made up", "gloo", 1, None, Link(0.0, 1e8), math.inf)
LINKED = replace(FLAT, inter=Link(4e-4, 1.1e8), codec_bytes_per_s=5e9)
TRUE = replace(LINKED, contention=0.1, overhead_s=2e-3)


@cache
def strategy(name: str, *settings: str) -> Strategy:
    """Compose `strategy=name`."""
    return Strategy.of(plain(load([f"strategy={name}", *settings])))


def run(
    layers: Sequence[LayerCompute],
    exchanges: Sequence[BucketExchange],
    schedule: Schedule,
    contention: float,
) -> Rank:
    """Simulate forward, backward and all exchanges."""
    rank = Rank(contention)
    both_passes(rank, layers, exchanges, schedule)
    schedule.finish(rank)
    return rank


def leave_study(
    folder: Path,
    profile: Profile,
    names: Iterable[str],
    hardware: Hardware,
    *more: str,
    sizes: Iterable[int] = (1, 2, 4),
    batch_size: int = 128,
) -> None:
    """Leave a cell for each strategy and world size.

    Args:
        more: settings of all cells, which tell them from those of another call.
    """
    for name in names:
        config = load([f"strategy={name}", f"batch_size={batch_size}", *more])
        about: dict[str, Any] = {"settings": resolved(plain(config)), "variant": variant(more)}
        about |= {"batch_size": batch_size, "num_parameters": profile.gradient_bytes // 4}
        for size in sizes:
            step = simulate(profile, hardware, strategy(name), size, batch_size // size)
            cell = folder / "-".join([name, f"n{size}", f"b{batch_size}", *more])
            leave(cell, make_record(name, size, step.step_s, **about))
            (cell / "config.yaml").write_text(OmegaConf.to_yaml(config))

"""Quantities of claims on one device that a study measured."""

from __future__ import annotations

from lab.claims.device import Device, Quantity
from lab.claims.metrics import Missing
from lab.measure.intervals import Interval, of_level, of_ratio


def mini_batch_s(device: Device, model: str, threads: int) -> Interval:
    """Return the seconds of a step of a network, over repeats."""
    return of_level(list(_seconds(device, model, threads).values()))


def mini_batch_ratio(
    device: Device,
    model: str,
    over_model: str | None = None,
    threads: int = 1,
    over_threads: int = 1,
) -> Interval:
    """Divide a network's seconds of a step by another's, paired by repeat.

    Args:
        over_model: None: the same network, on other threads.
    """
    first = _seconds(device, model, threads)
    second = _seconds(device, over_model or model, over_threads)
    shared = sorted(first.keys() & second.keys())
    if not shared:
        raise Missing
    return of_ratio([first[repeat] for repeat in shared], [second[repeat] for repeat in shared])


def _seconds(device: Device, model: str, threads: int) -> dict[int, float]:
    """Return the median step of each repeat."""
    found = {
        cell.repeat: cell.step_s
        for cell in device.cells
        if cell.status == "done"
        and (cell.variant.get("model"), cell.variant.get("threads")) == (model, str(threads))
    }
    if not found:
        raise Missing
    return found


SWEPT: dict[str, Quantity] = {"mini_batch_s": mini_batch_s, "mini_batch_ratio": mini_batch_ratio}

"""The parts of a layer's time, and sums of layers of one kind."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

PASSES: tuple[str, ...] = ("forward", "backward data", "backward weights", "backward, both at once")


def passes_of(layer: Mapping[str, Any]) -> dict[str, float]:
    """Divide a measured layer's seconds into PASSES.

    A layer without weights has backward data alone; one whose kernel computes both has them in
    "backward, both at once".

    Args:
        layer: forward_s and backward_s, each with its median, has_weights, and data_share.
    """
    forward, backward = layer["forward_s"]["median"], layer["backward_s"]["median"]
    share = layer["data_share"] if layer["has_weights"] else 1.0
    if share is None:
        return dict(zip(PASSES, (forward, 0.0, 0.0, backward), strict=True))
    parts = (forward, share * backward, (1 - share) * backward, 0.0)
    return dict(zip(PASSES, parts, strict=True))


def by_kind(layers: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Add up the seconds of all layers of one kind, the slowest kind first."""
    kinds: dict[str, dict[str, float]] = {}
    for layer in layers:
        sums = kinds.setdefault(layer["kind"], dict.fromkeys(PASSES, 0.0))
        for name, value in passes_of(layer).items():
            sums[name] += value
    return dict(sorted(kinds.items(), key=lambda item: -sum(item[1].values())))


def backward_ratio(layers: Iterable[Mapping[str, Any]], kinds: Container[str]) -> float | None:
    """Divide backward of all layers of some kinds by their forward; None: there are none."""
    chosen = [layer for layer in layers if layer["kind"] in kinds]
    forward, backward = (
        sum(layer[f"{way}_s"]["median"] for layer in chosen) for way in ("forward", "backward")
    )
    return backward / forward if forward else None


def bias_seconds(layers: Iterable[Mapping[str, Any]]) -> float:
    """Add up what biases take as operations of their own, where they were measured."""
    measured = [each["bias_s"] for each in layers if each.get("bias_s")]
    return sum(one[way]["median"] for one in measured for way in ("forward", "backward"))

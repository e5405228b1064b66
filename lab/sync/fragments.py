"""Rules for which parameters share a fragment of Streaming DiLoCo, from names and sizes alone.

The sync and the simulator both use them, so nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from lab.exchange.grouping import Sized

STRIDED, SEQUENTIAL = "strided", "sequential"
ORDERS = (STRIDED, SEQUENTIAL)


def fragments(parameters: Sequence[Sized], number: int, order: str) -> list[list[str]]:
    """Return the parameter names of each fragment, none empty, of sizes as equal as layers allow.

    Args:
        parameters: in the order of the model; those of one module are a layer and stay together.
        number: of fragments.
        order: "strided": each layer goes to the smallest fragment so far, which deals equal layers
            out in turns (Douillard et al. 2025, section 2.2). "sequential": runs of layers.

    Raises:
        ValueError: the model has fewer layers.
    """
    layers = _layers(parameters)
    if number > len(layers):
        raise ValueError(f"sync.fragments={number}: the model has {len(layers)} layers")
    divide = _strided if order == STRIDED else _sequential
    return [[name for layer in part for name, _ in layer] for part in divide(layers, number)]


Layer = list[Sized]


def _layers(parameters: Sequence[Sized]) -> list[Layer]:
    modules: dict[str, Layer] = {}
    for name, size in parameters:
        modules.setdefault(name.rpartition(".")[0], []).append((name, size))
    return list(modules.values())


def _size(layers: Sequence[Layer]) -> float:
    return sum(size for layer in layers for _, size in layer)


def _strided(layers: list[Layer], number: int) -> list[list[Layer]]:
    parts: list[list[Layer]] = [[] for _ in range(number)]
    for layer in layers:
        min(parts, key=_size).append(layer)
    return parts


def _sequential(layers: list[Layer], number: int) -> list[list[Layer]]:
    """Take for each part half a layer more than its share of what is left, at most."""
    parts: list[list[Layer]] = []
    rest = list(layers)
    for following in range(number - 1, -1, -1):
        share, part = _size(rest) / (following + 1), [rest.pop(0)]
        while len(rest) > following and _size(part) + _size(rest[:1]) / 2 <= share:
            part.append(rest.pop(0))
        parts.append(part)
    return parts

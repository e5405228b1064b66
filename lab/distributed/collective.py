"""Collectives in flight: how a caller waits for what it has begun."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

CACHED_VALUES = 2**16  # a sum of so many stays in a core's cache while all parts are added


class Handle(Protocol):
    """Transfers in flight."""

    def wait(self) -> Any:
        """Block until received tensors may be read and sent ones written to."""


class Collective(Handle, Protocol):
    """A collective in flight."""

    def is_completed(self) -> bool:
        """Return whether it has finished. Any thread may call this."""
        ...


class Done:
    """A collective that had finished when its call returned."""

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        return True


class SummedParts:
    """A reduce-scatter made of an all-to-all: `wait` adds the parts that have arrived.

    Args:
        parts: [size, ...], one of each rank, complete after `arriving.wait()`.
        output: receives their sum, added in rank order.
    """

    def __init__(self, arriving: Collective, parts: Tensor, output: Tensor) -> None:
        self._arriving, self._parts, self._output = arriving, parts, output

    def wait(self) -> None:
        self._arriving.wait()
        parts = self._parts.view(len(self._parts), -1).split(CACHED_VALUES, dim=1)
        for part, total in zip(parts, self._output.view(-1).split(CACHED_VALUES), strict=True):
            _sum(part, total)

    def is_completed(self) -> bool:
        return self._arriving.is_completed()


def _sum(parts: Tensor, total: Tensor) -> None:
    """Fill `total` [n] with the sum over the rows of `parts` [size, n], in the type of `total`."""
    if len(parts) > 1 and parts.dtype == total.dtype:  # saves a pass over `total`
        torch.add(parts[0], parts[1], out=total)
        others = parts[2:]
    else:
        total.copy_(parts[0])
        others = parts[1:]
    for other in others:
        total += other

"""The arguments that a run offers to the callables of its groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def to_model(input_shape: Sequence[int], output_size: int) -> dict[str, Any]:
    """Return the arguments of a model that follow from its data and task."""
    return {"input_shape": tuple(input_shape), "output_size": output_size}

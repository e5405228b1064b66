"""The guard against host waits detects them anywhere in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.guard import Guard

Deed = Callable[[Tensor], Any]
WAITS: dict[str, Deed] = {
    "item": lambda t: t[0].item(),
    "float": lambda t: float(t[0]),
    "bool": lambda t: bool(t[0]),
    "if": lambda t: 1 if t.isfinite().all() else 0,
    "index of a list": lambda t: [0, 1][(t[0] * 0).int()],
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "asarray": lambda t: np.asarray(t),
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu"),
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 0],
    "put by mask": lambda t: t.clone().__setitem__(t > 0, t[0]),
    "tensor": lambda t: torch.tensor([1, 2]),
    "as_tensor": lambda t: torch.as_tensor([1, 2]),
    "new_tensor": lambda t: t.new_tensor([1, 2]),
    "read in the same step": lambda t: float(t[0].to("cpu", non_blocking=True)),
}
PASSES: dict[str, Deed] = {
    "arithmetic": lambda t: (t * 2 + 1).sum().isfinite(),
    "fill": lambda t: torch.full((), 0.5, device=t.device).masked_fill_(t[0] > 0, torch.nan),
    "index": lambda t: t[torch.from_numpy(np.array([1, 0]))],
    "slice": lambda t: t[1:],
    "copy": lambda t: t.to("cpu", non_blocking=True),
    "dtype": lambda t: t.to(torch.bfloat16),
}


def waits(deed: Deed) -> list[str]:
    """List the waiting calls of a deed within a step."""
    with Guard() as guard, guard.step():
        deed(torch.ones(8))
    return [str(wait) for wait in guard.waits]


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_seen(name: str) -> None:
    place = f"tests/unit/conventions/test_guard.py:{WAITS[name].__code__.co_firstlineno}"
    assert waits(WAITS[name])[0].startswith(f"{place} in <lambda>: ")


def test_what_waits_in_a_hook_within_backward_is_seen() -> None:
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(lambda gradient: gradient * gradient[0].item())
    assert waits(lambda t: (weight * t[0]).sum().backward())


@pytest.mark.parametrize("name", PASSES)
def test_what_does_not_wait_passes(name: str) -> None:
    assert waits(PASSES[name]) == []


def test_a_copy_may_be_read_a_step_later_and_anything_between_steps() -> None:
    value = torch.ones(())
    with Guard() as guard:
        before = value.cpu()
        with guard.step():
            assert before.tolist() == 1
            copy = value.to("cpu", non_blocking=True)
        assert value.item() == 1
        with guard.step():
            assert float(copy) == 1
    assert guard.waits == []

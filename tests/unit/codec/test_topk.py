"""The codec of top-k: the largest values are sent, and everything else stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lab.codec.topk import codec as topk
from lab.codec.topk import native, reference
from lab.codec.topk.reference import largest
from tests.support.kernels import KINDS, LEVELS, close, kernels_at, same, unaligned
from tests.support.kernels import values_of as drawn

# Few values are large, and all near each other, so that a sample misses them or finds too many.
SKEWED = ("clustered", "two values")


def values_of(kind: str, length: int) -> Tensor:
    if kind == "clustered":
        values = torch.randn(length) * 1e-3
        values[length // 3 : length // 3 + length // 40] = 100
        return values
    if kind == "two values":
        return torch.where(torch.arange(length) % 3 == 0, 1.0, -2.0)
    return drawn(kind, length)


@pytest.mark.parametrize("count", [0, 1, 30, 100, 3000])
@pytest.mark.parametrize("length", [1, 3000, 100_000])
def test_largest_are_the_largest(length: int, count: int) -> None:
    count = min(count, length)
    for values in (torch.randn(length), torch.randn(length).clamp(-1, 1), torch.zeros(length)):
        found = largest(values, count)
        assert len(found.unique()) == count
        expected = values.abs().sort(descending=True).values[:count]
        assert torch.equal(values[found].abs().sort(descending=True).values, expected)


@pytest.mark.parametrize("place", [0, 257 * 100, 4321])
def test_nan_is_among_the_largest(place: int) -> None:
    values = torch.randn(100_000)
    values[place] = torch.nan
    assert place in largest(values, 10)


def check(codec: Any, gradient: Tensor, residual: Tensor | None, count: int) -> None:
    """Hold what was sent and what was kept to the definition."""
    indices, values = torch.full((count,), -1, dtype=torch.int32), torch.full((count,), 7.0)
    kept = None if residual is None else unaligned(residual)
    codec.encode(unaligned(gradient), kept, indices, values, 5)
    places, whole = indices.long() - 5, gradient if residual is None else residual + gradient
    assert (places.diff() > 0).all()
    assert same(values, whole[places])
    left = whole.index_fill(0, places, 0)
    if kept is not None:
        assert same(kept, left)
    sizes, others = (v.abs().nan_to_num(torch.inf, torch.inf) for v in (values, left))
    assert not count or count == len(whole) or sizes.min() >= others.max()


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, *SKEWED])
@pytest.mark.parametrize("level", [*LEVELS, "reference"])
def test_all_take_the_largest(level: str, kind: str, feedback: bool) -> None:
    codec = reference if level == "reference" else kernels_at(level, native)
    for length in (1, 33, 1000, 100_000):
        for ratio in (0.001, 0.03, 1):
            gradient = values_of(kind, length)
            residual = torch.randn(length) * gradient.abs().max() / 9 if feedback else None
            check(codec, gradient, residual, max(int(ratio * length), 1))
    check(codec, torch.empty(0), torch.empty(0) if feedback else None, 0)


@pytest.mark.parametrize("level", LEVELS)
def test_kernels_add_messages_as_the_reference(level: str) -> None:
    kernels, length, count = kernels_at(level, native), 200_000, 3000
    messages = torch.empty(3, 2, count, dtype=torch.int32)
    for message in messages:
        values = message[1].view(torch.float32)
        kernels.encode(torch.randn(length), None, message[0], values, 0)
    ours, theirs = torch.full((2, length), 7.0)
    kernels.decode(messages, ours)
    reference.decode(messages, theirs)
    assert close(ours, theirs) and ours.any()


def test_views_that_are_not_contiguous_give_the_same() -> None:
    check(topk, torch.randn(2000)[::2], None, 10)
    gradient, residual = torch.randn(2, 2000)[:, ::2]
    expected, kept = residual.clone(), residual
    sent = [(torch.empty(10, dtype=torch.int32), torch.empty(10)) for _ in range(2)]
    topk.encode(gradient.clone(), expected, *sent[0], 0)
    topk.encode(gradient, kept, *sent[1], 0)
    assert torch.equal(kept, expected) and torch.equal(sent[0][1], sent[1][1])

"""The sign codec: its definition, and the kernels, which must give the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lab.codec.signs import codec as signs
from lab.codec.signs import native, reference
from tests.support.kernels import (
    HERE,
    KINDS,
    LENGTHS,
    LEVELS,
    close,
    kernels_at,
    unaligned,
    values_of,
)

Encoded = tuple[Tensor, Tensor, Tensor | None]


def encode(codec: Any, gradient: Tensor, residual: Tensor | None = None) -> Encoded:
    """Return magnitude, bits and new residual, in memory that was filled with garbage."""
    magnitude = torch.full((), 7.0)
    bits = torch.full((signs.bit_bytes(len(gradient)),), 255, dtype=torch.uint8)
    kept = None if residual is None else unaligned(residual)
    codec.encode(unaligned(gradient), kept, magnitude, bits)
    return magnitude, bits, kept


@pytest.mark.parametrize("length", [1, 7, 8, 1000, 8192, 20_001])
def test_a_message_is_mean_magnitude_and_one_bit_each(length: int) -> None:
    values = torch.randn(length)
    magnitude, bits, _ = encode(reference, values)
    expected = torch.where(values < 0, -1.0, 1.0).double() * values.double().abs().mean()
    out = torch.empty(length)
    reference.decode(magnitude[None], bits[None], out)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=0)


def test_the_first_value_is_the_lowest_bit() -> None:
    values = torch.tensor([-1.0, 1, -1, 1, 1, 1, 1, 1, 1, -1])
    magnitude, bits, kept = encode(reference, values, torch.zeros(10))
    assert bits.tolist() == [0b00000101, 0b10]
    assert magnitude == 1 and kept is not None and not kept.any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows_in_the_magnitude(bad: float) -> None:
    values = torch.randn(20)
    values[9] = bad
    assert not encode(reference, values)[0].isfinite()
    assert not encode(signs, values)[0].isfinite()


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
def test_kernels_give_the_references_bits(level: str, kind: str, feedback: bool) -> None:
    kernels = kernels_at(level, native)
    for length in LENGTHS:
        gradient = values_of(kind, length)
        residual = values_of(kind, length) / 2 if feedback else None
        ours, theirs = (encode(codec, gradient, residual) for codec in (kernels, reference))
        assert torch.equal(ours[1], theirs[1])
        assert close(ours[0], theirs[0])
        if ours[2] is not None and theirs[2] is not None:
            assert close(ours[2], theirs[2])
        magnitudes = theirs[0] * torch.tensor([1.0, 0.5, 2.0])
        bits = torch.stack([theirs[1], ~theirs[1], theirs[1]])
        for out in (torch.empty(length), unaligned(torch.empty(length))):
            expected = torch.empty(length)
            kernels.decode(magnitudes, bits, out)
            reference.decode(magnitudes, bits, expected)
            assert close(out, expected)


def test_threads_change_nothing() -> None:
    gradient, residual = torch.randn(2, 500_000)
    before, results = torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(encode(kernels_at(HERE, native), gradient, residual))
    torch.set_num_threads(before)
    for one, three in zip(*results, strict=True):
        assert one is not None and three is not None and torch.equal(one, three)


def test_views_that_are_not_contiguous_give_the_same() -> None:
    values, bits = torch.randn(2000)[::2], torch.empty(125, dtype=torch.uint8)
    magnitude = torch.empty(())
    signs.encode(values.clone(memory_format=torch.preserve_format), None, magnitude, bits)
    assert torch.equal(encode(signs, values)[1], bits)

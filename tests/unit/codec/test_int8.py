"""The 8-bit codec: its definition, and the kernels, which must give the same bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lab.codec.int8 import codec as int8
from lab.codec.int8 import native, reference
from tests.support.kernels import (
    KINDS,
    LENGTHS,
    LEVELS,
    close,
    kernels_at,
    unaligned,
    values_of,
)


def records_of(num_values: int, block: int, fill: int = 7) -> Tensor:
    shape = (-(-num_values // block), int8.HEADER_BYTES + block)
    return torch.full(shape, fill, dtype=torch.uint8)


def through(values: Tensor, block: int) -> Tensor:
    """Encode and decode in plain torch."""
    records = records_of(len(values), block)
    reference.encode(values.clone(), records)
    out = torch.empty_like(values)
    reference.decode(records, out)
    return out


@pytest.mark.parametrize("length", [0, 1, 7, 64, 1000])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("shift", [0, 1000])
def test_a_value_is_off_by_half_a_step_at_most(length: int, scale: float, shift: int) -> None:
    values = (torch.randn(length) + shift) * scale
    decoded = through(values, 16)
    for block, got in zip(values.split(16), decoded.split(16), strict=True):
        half_a_step = (block.max() - block.min()) / 510 if len(block) else torch.zeros(())
        rounding = 2e-7 * block.abs().max() if len(block) else 0
        assert ((got - block).abs() <= half_a_step + rounding).all()


@pytest.mark.parametrize("value", [0.0, -3.3, 1e-42, 3e38])
def test_equal_values_are_kept_exactly(value: float) -> None:
    values = torch.full((21,), value)
    assert torch.equal(through(values, 8), values)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows_in_its_block_alone(bad: float) -> None:
    values = torch.randn(20)
    values[9] = bad
    finite = through(values, 8).isfinite()
    assert finite.tolist() == [True] * 8 + [False] * 8 + [True] * 4


@pytest.mark.parametrize("block", [12, 64, 1024])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
def test_kernels_give_the_references_bytes(level: str, kind: str, block: int) -> None:
    kernels = kernels_at(level, native)
    for length in LENGTHS:
        values = unaligned(values_of(kind, length))
        ours, theirs = records_of(length, block), records_of(length, block, fill=9)
        kernels.encode(values, ours)
        reference.encode(values.clone(), theirs)
        assert torch.equal(ours[:, int8.HEADER_BYTES :], theirs[:, int8.HEADER_BYTES :])
        heads = (r[:, : int8.HEADER_BYTES].contiguous().view(torch.float32) for r in (ours, theirs))
        assert close(*heads)
        assert_decoded_alike(kernels, ours, length)


def assert_decoded_alike(kernels: native.Kernels, records: Tensor, length: int) -> None:
    """Compare decoding, and the mean of three ranks, with the reference's."""
    for out in (torch.empty(length), unaligned(torch.empty(length))):
        expected = torch.empty(length)
        kernels.decode(records, out)
        reference.decode(records, expected)
        assert close(out, expected)
    of_ranks = torch.stack([records, records.flip(0), records])
    ours, theirs = torch.empty_like(records), torch.empty_like(records)
    kernels.encode_mean(of_ranks, torch.empty(length), ours)
    reference.encode_mean(of_ranks, torch.empty(length), theirs)
    assert torch.equal(ours[:, int8.HEADER_BYTES :], theirs[:, int8.HEADER_BYTES :])


def test_views_that_are_not_contiguous_give_the_same() -> None:
    values = torch.randn(2000)[::2]
    ours, theirs = records_of(1000, 64), records_of(1000, 64)
    int8.encode(values.clone(), ours)
    int8.encode(values, theirs)
    assert torch.equal(ours, theirs)

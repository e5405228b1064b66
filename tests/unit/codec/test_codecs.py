"""Codecs in plain torch, each against its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lab.codec import int4, int8, signsgd
from lab.codec.topk import largest

LENGTHS = [0, 1, 7, 8, 9, 64, 1000]


def through_int8(values: Tensor, block: int) -> Tensor:
    num_blocks = -(-len(values) // block)
    records = torch.empty(num_blocks, int8.HEADER_BYTES + block, dtype=torch.uint8)
    int8.encode(values.clone(), records)
    out = torch.empty_like(values)
    int8.decode(records, out)
    return out


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("shift", [0, 1000])
def test_int8_is_off_by_half_a_step_at_most(length: int, scale: float, shift: int) -> None:
    values = (torch.randn(length) + shift) * scale
    decoded = through_int8(values, 16)
    for block, got in zip(values.split(16), decoded.split(16), strict=True):
        half_a_step = (block.max() - block.min()) / 510 if len(block) else torch.zeros(())
        rounding = 2e-7 * block.abs().max() if len(block) else 0
        assert ((got - block).abs() <= half_a_step + rounding).all()


@pytest.mark.parametrize("value", [0.0, -3.3, 1e-42, 3e38])
def test_int8_keeps_equal_values_exactly(value: float) -> None:
    values = torch.full((21,), value)
    assert torch.equal(through_int8(values, 8), values)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_int8_shows_what_is_not_finite_in_its_block_alone(bad: float) -> None:
    values = torch.randn(20)
    values[9] = bad
    finite = through_int8(values, 8).isfinite()
    assert finite.tolist() == [True] * 8 + [False] * 8 + [True] * 4


def through_signsgd(values: Tensor) -> Tensor:
    out = torch.empty_like(values)
    signsgd.decode(*signsgd.encode(values), out)
    return out


@pytest.mark.parametrize("length", [*LENGTHS[1:], 8192, 20_001])
def test_signsgd_is_mean_magnitude_and_one_bit_each(length: int) -> None:
    values = torch.randn(length)
    assert signsgd.encode(values)[1].shape == (signsgd.bit_bytes(length),)
    expected = torch.where(values < 0, -1.0, 1.0).double() * values.double().abs().mean()
    torch.testing.assert_close(through_signsgd(values).double(), expected, rtol=1e-5, atol=0)


def test_signsgd_adds_up() -> None:
    magnitude, bits = signsgd.encode(torch.randn(10_000))
    once, twice = torch.empty(2, 10_000)
    signsgd.decode(magnitude, bits, once)
    twice.copy_(once)
    signsgd.decode(magnitude, bits, twice, add=True)
    assert torch.equal(twice, 2 * once)


def test_signsgd_packs_the_first_value_lowest() -> None:
    magnitude, bits = signsgd.encode(torch.tensor([-1.0, 1, -1, 1, 1, 1, 1, 1, 1, -1]))
    assert bits.tolist() == [0b00000101, 0b10]
    assert magnitude == 1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_signsgd_shows_what_is_not_finite(bad: float) -> None:
    values = torch.randn(20)
    values[9] = bad
    assert not through_signsgd(values).isfinite().any()


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


def through_int4(values: Tensor, block: int) -> Tensor:
    num_blocks = -(-len(values) // block)
    records = torch.empty(num_blocks + 1, int4.HEADER_BYTES + block // 2, dtype=torch.uint8)
    int4.encode(values, records)
    out = torch.empty_like(values)
    int4.decode(records, out)
    return out


@pytest.mark.parametrize("length", LENGTHS)
def test_int4_rounds_to_the_nearest_of_sixteen_levels(length: int) -> None:
    values = torch.randn(length) * 3 + 1
    before = values.clone()
    out = through_int4(values, 16)
    assert torch.equal(values, before)
    for block, decoded in zip(values.split(16), out.split(16), strict=True):
        if len(block):
            low, high = block.min(), block.max()
            levels = low + torch.arange(16) * (high - low) / 15
            nearest = (block[:, None] - levels).abs().amin(dim=1)
            torch.testing.assert_close((decoded - block).abs(), nearest, atol=1e-5, rtol=0)
            assert decoded.unique().numel() <= 16


def test_int4_packs_two_values_a_byte_the_first_below() -> None:
    records = torch.empty(1, int4.HEADER_BYTES + 4, dtype=torch.uint8)
    int4.encode(torch.tensor([0.0, 15, 1, 2, 3, 4, 5, 6]), records)
    assert records[0, : int4.HEADER_BYTES].view(torch.float32).tolist() == [0.0, 1.0]
    assert records[0, int4.HEADER_BYTES :].tolist() == [0xF0, 0x21, 0x43, 0x65]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_int4_spoils_a_whole_block_but_no_other(bad: float) -> None:
    values = torch.randn(48)
    values[20] = bad
    out = through_int4(values, 16)
    assert not out[16:32].isfinite().any()
    assert out[:16].isfinite().all() and out[32:].isfinite().all()


def test_int4_is_exact_for_equal_values() -> None:
    values = torch.full((40,), -2.5)
    assert torch.equal(through_int4(values, 16), values)

"""The 4-bit codec: levels, packing, and values that are not finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lab.codec import int4

LENGTHS = [0, 1, 7, 8, 9, 64, 1000]


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

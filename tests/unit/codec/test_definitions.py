"""What each codec writes and reads, against arithmetic in double precision and by hand."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from lab.codec.base import Codec, Reference
from lab.codec.codecs import THRESHOLDS, Int4, Int8, OneBit, Signs, TopK
from tests.support.exact import delivered
from tests.support.kernels import HERE, KINDS, LEVELS, of_codec, same, unaligned
from tests.support.kernels import values_of as drawn
from tests.support.slow import some_of

LENGTHS = [1, 7, 8, 9, 64, 1000]
# Few values are large, and all near each other, so that a sample misses them or finds too many.
SKEWED = ("clustered", "two values")


def written(codec: Codec, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return headers and payloads of rows [rows, columns], in memory that was filled with ones."""
    sizes = codec.row_bytes(values.shape[1])
    header, payload = (torch.full((len(values), size), 255, dtype=torch.uint8) for size in sizes)
    codec.write(values, header, payload)
    return header, payload


def through(codec: Codec, values: Tensor) -> Tensor:
    """Encode and decode rows [rows, columns]."""
    return codec.read(*written(codec, values), values.shape[1])


def test_onebit_reads_each_side_of_zero_as_its_mean() -> None:
    values = torch.tensor([[1.0, 3.0, -2.0, -4.0, 0.0, 2.0, -3.0]])
    header, payload = written(OneBit(), values)
    assert header.view(torch.float32).tolist() == [[-3.0, 1.5]]
    assert payload.tolist() == [[0b0110011]]
    assert through(OneBit(), values).tolist() == [[1.5, 1.5, -3.0, -3.0, 1.5, 1.5, -3.0]]


def test_onebit_reads_each_side_of_the_mean_as_mean_and_deviation() -> None:
    header, payload = written(OneBit("mean"), torch.tensor([[1.0, 2.0, 3.0, 6.0]]))
    assert header.view(torch.float32).tolist() == [[1.5, 4.5]]  # mean 3, mean deviation 1.5
    assert payload.tolist() == [[0b1100]]


@pytest.mark.parametrize(
    ("codec", "rtol", "atol"),
    [
        *((OneBit(threshold), 1e-6, 1e-7) for threshold in THRESHOLDS),
        (Signs(1), 1e-6, 0.0),
        *((levels, 0.0, 1e-5) for levels in (Int8(16), Int4(16))),
    ],
)
def test_rows_are_read_as_float64_arithmetic_says(codec: Codec, rtol: float, atol: float) -> None:
    for columns in LENGTHS:
        values = torch.randn(5, columns) * 3 + 1
        before, decoded = values.clone(), through(codec, values).double()
        expected = torch.stack([delivered(codec, row) for row in values.double()])
        torch.testing.assert_close(decoded, expected, rtol=rtol, atol=atol)
        assert torch.equal(values, before)
        equal = torch.full((2, columns), -2.0)
        assert torch.equal(through(codec, equal), equal)


def test_the_sign_of_the_first_value_is_the_lowest_bit() -> None:
    _, payload = written(Signs(1), torch.tensor([[-1.0, 1, -1, 1, 1, 1, 1, 1, 1, -1]]))
    assert payload.tolist() == [[0b00000101, 0b10]]


def test_int4_packs_two_values_a_byte_the_first_below() -> None:
    header, payload = written(Int4(8), torch.tensor([[0.0, 15, 1, 2, 3, 4, 5, 6]]))
    assert header.view(torch.float32).tolist() == [[0.0, 1.0]]
    assert payload.tolist() == [[0xF0, 0x21, 0x43, 0x65]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "codec",
    [OneBit(), OneBit("mean"), Signs(1), Int8(16), Int4(16)],
    ids=["onebit", "onebit mean", "signs", "int8", "int4"],
)
def test_a_row_with_a_value_that_is_not_finite_is_read_as_such_and_no_other(
    codec: Codec, bad: float
) -> None:
    values = torch.randn(3, 16)
    values[1, 5] = bad
    finite = through(codec, values).isfinite()
    assert finite.any(dim=1).tolist() == finite.all(dim=1).tolist() or not finite.all()
    assert finite.all(dim=1).tolist() == [True, False, True]


def values_of(kind: str, length: int) -> Tensor:
    if kind == "clustered":
        values = torch.randn(length) * 1e-3
        values[length // 3 : length // 3 + length // 40] = 100
        return values
    if kind == "two values":
        return torch.where(torch.arange(length) % 3 == 0, 1.0, -2.0)
    return drawn(kind, length)


LARGEST = [
    *product([HERE, "definition"], [*KINDS, *SKEWED], [True, False]),
    *some_of(
        product([level for level in LEVELS if level != HERE], [*KINDS, *SKEWED], [True, False]),
        also=product(LEVELS, ["normal", *SKEWED], [True]),
    ),
    *some_of(
        product(["triton"], [*KINDS, *SKEWED], [True, False]),
        also=[("triton", "normal", False), *(("triton", kind, True) for kind in SKEWED)],
    ),
]


@pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")  # numpy's, interpreting
@pytest.mark.parametrize(("level", "kind", "feedback"), LARGEST)
def test_topk_takes_the_largest(level: str, kind: str, feedback: bool) -> None:
    for length in (1, 1000, 9001) if level == "triton" else (1, 33, 1000, 100_000):
        for ratio in (0.001, 0.03, 1):
            codec = TopK(ratio)
            kernels = Reference(codec) if level == "definition" else of_codec(codec, level)
            layout = codec.layout({"w": (length,)}, length, 1)
            gradient = values_of(kind, length)
            residual = torch.randn(length) * gradient.abs().max() / 9 if feedback else None
            kept = None if residual is None else unaligned(residual)
            message = torch.zeros(layout.num_bytes, dtype=torch.uint8)
            kernels.encode(layout, unaligned(gradient), kept, message)
            whole = gradient if residual is None else gradient + residual
            check_largest(message.view(torch.int32), math.ceil(ratio * length), whole, kept)


def check_largest(words: Tensor, count: int, whole: Tensor, kept: Tensor | None) -> None:
    """Hold what was sent and what was kept to the definition."""
    places, values = words[:count].long(), words[count : 2 * count].view(torch.float32)
    assert (places.diff() > 0).all()
    assert same(values, whole[places])
    left = whole.index_fill(0, places, 0)
    if kept is not None:
        finite = whole.isfinite()  # what else a step leaves behind is not used
        assert same(kept[finite], left[finite])
    sizes, others = (v.abs().nan_to_num(torch.inf, torch.inf) for v in (values, left))
    assert count == len(whole) or sizes.min() >= others.max()

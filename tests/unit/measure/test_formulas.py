"""Counted operations against nested loops over the definitions, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.measure.operations import Uncountable, count, operations_of

Index = tuple[int, ...]


@dataclass(frozen=True)
class Convolution:
    """A convolution of one sample [channels, *size], whose definition is a loop."""

    channels: int
    filters: int
    size: Index
    kernel: Index
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1
    transposed: bool = False
    output_padding: int = 0
    bias: bool = False

    def layer(self) -> nn.Module:
        kind = f"Conv{'Transpose' if self.transposed else ''}{len(self.size)}d"
        more = {"output_padding": self.output_padding} if self.transposed else {}
        where = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        make: Any = getattr(nn, kind)
        return make(
            *(self.channels, self.filters, self.kernel),
            **{**where, **more, "groups": self.groups, "bias": self.bias},
        )

    def meetings(self, out_size: Index) -> Iterator[tuple[Index, Index, Index]]:
        """Yield the places in input, weight and output of each multiply-add of forward.

        A place outside of its tensor is padding: it is multiplied all the same.
        """
        per_input, per_output = self.channels // self.groups, self.filters // self.groups
        fixed = self.size if self.transposed else out_size
        for group, c, k in product(range(self.groups), range(per_input), range(per_output)):
            channel, filt = group * per_input + c, group * per_output + k
            weight = (channel, k) if self.transposed else (filt, c)
            for pixel, tap in product(*(product(*map(range, s)) for s in (fixed, self.kernel))):
                other = tuple(
                    p * self.stride + t * self.dilation - self.padding
                    for p, t in zip(pixel, tap, strict=True)
                )
                x, y = (pixel, other) if self.transposed else (other, pixel)
                yield (channel, *x), (*weight, *tap), (filt, *y)


CONVOLUTIONS = [
    Convolution(2, 3, (5, 4), (3, 2), padding=1, bias=True),
    Convolution(4, 6, (5, 4), (3, 2), groups=2),
    Convolution(3, 6, (5, 5), (3, 3), stride=2, padding=1, groups=3),  # a multiplier of 2
    Convolution(2, 3, (7, 6), (3, 2), stride=2, dilation=2, padding=1),
    Convolution(4, 2, (9,), (3,), groups=2),
    Convolution(2, 4, (3, 4, 3), (2, 2, 2), stride=2, padding=1, groups=2),
    Convolution(4, 6, (3, 4), (3, 2), 2, 1, 1, 2, True, 1, True),
    Convolution(3, 3, (4, 3), (3, 3), dilation=2, groups=3, transposed=True),
]


def flops(
    call: Callable[[Tensor], Tensor], *shape: int, dtype: torch.dtype = torch.float32
) -> tuple[float, float]:
    """Count forward and backward of one sample of inputs [*shape] that need a gradient."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=dtype))
            self.call = call  # a module's parameters are the model's

        def forward(self, inputs: Tensor) -> Tensor:
            return self.call(self.scale * inputs)

    work = count(
        Model(), shape, dtype, torch.zeros(()), lambda outputs, _: outputs.abs().float().sum()
    )
    forward = work.forward_flops_per_sample
    return forward, work.flops_per_sample - forward


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_a_convolution_counts_each_meeting_of_weight_and_pixel(case: Convolution) -> None:
    """The loop is the definition: it yields torch's own output and gradients."""
    layer: Any = case.layer().double()
    x = torch.randn(case.channels, *case.size, dtype=torch.float64, requires_grad=True)
    y = layer(x[None])[0]
    gradient = torch.randn_like(y)
    y.backward(gradient)
    weight = layer.weight
    mine = [torch.zeros_like(each, requires_grad=False) for each in (y, x, weight)]
    num_meetings = 0
    for at_x, at_w, at_y in case.meetings(tuple(y.shape[1:])):
        num_meetings += 1
        if _inside(at_x, x) and _inside(at_y, y):
            mine[0][at_y] += x[at_x].detach() * weight[at_w].detach()
            mine[1][at_x] += gradient[at_y] * weight[at_w].detach()
            mine[2][at_w] += gradient[at_y] * x[at_x].detach()
    bias = 0 if layer.bias is None else layer.bias.detach().view(-1, *[1] * len(case.size))
    for found, expected in zip(mine, (y.detach() - bias, x.grad, weight.grad), strict=True):
        torch.testing.assert_close(found, expected)
    found = flops(case.layer(), case.channels, *case.size)
    assert found == (2 * num_meetings, 2 * 2 * num_meetings)


def _inside(at: Index, tensor: Tensor) -> bool:
    return all(0 <= i < n for i, n in zip(at, tensor.shape, strict=True))


def loops(*sizes: int) -> int:
    """Count the rounds of nested loops."""
    return sum(1 for _ in product(*map(range, sizes)))


def weights(*shape: int) -> Tensor:
    return nn.Parameter(torch.zeros(shape, device="meta"))


B, N, K, M = 3, 4, 5, 2  # inputs are [samples, B, N, K]
PAIRS = loops(B, N, N, K)  # of rows of one matrix


def rows(x: Tensor) -> Tensor:
    return x.flatten(0, 2)


def taps() -> tuple[Tensor, Tensor]:
    return weights(3, K, M), weights(M)


def squares(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.flatten(0, 1), x.flatten(0, 1).mT


PRODUCTS: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
    # The rounds of forward's loops, and how many such products backward takes: the gradient of a
    # factor of rank 1 is an outer product, which adds nothing up.
    "linear": (nn.Linear(K, M), loops(B, N, M, K), 2),
    "bmm": (lambda x: torch.bmm(*squares(x)), PAIRS, 2),
    "addbmm": (lambda x: torch.addbmm(weights(N, N), *squares(x)), PAIRS, 2),
    "baddbmm": (lambda x: torch.baddbmm(weights(N, N), *squares(x)), PAIRS, 2),
    "mv": (lambda x: rows(x) @ weights(K), loops(B, N, K), 1),
    "addmv": (lambda x: torch.addmv(rows(x)[:, 0], rows(x), weights(K)), loops(B, N, K), 1),
    "dot": (lambda x: x.flatten() @ x.flatten(), loops(B, N, K), 0),
    "cdist": (lambda x: torch.cdist(x.flatten(1, 2), weights(30, K)), loops(B, N, 30, K), 2),
    "conv_tbc": (
        lambda x: torch.conv_tbc(x.flatten(1, 2).transpose(0, 1).contiguous(), *taps()) * 1,
        loops(B * N - 2, 3, K, M),
        2,
    ),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), 2 * PAIRS, 2),
    "attention of few keys": (
        lambda x: F.scaled_dot_product_attention(x, x[:, :1], x[:, :1], enable_gqa=True),
        2 * PAIRS,
        2,
    ),
    "elementwise": (lambda x: F.gelu(x * x).softmax(-1), 0, 0),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_counts_the_rounds_of_its_loops(name: str) -> None:
    call, rounds, in_backward = PRODUCTS[name]
    assert flops(call, B, N, K) == (2 * rounds, in_backward * 2 * rounds)


@pytest.mark.parametrize(("cell", "gates"), [(nn.LSTMCell, 4), (nn.GRUCell, 3), (nn.RNNCell, 1)])
def test_a_cell_counts_its_gates(cell: Any, gates: int) -> None:
    class First(cell):  # type: ignore[misc]
        def forward(self, input: Tensor) -> Tensor:
            state = super().forward(input, None)
            return state[0] if isinstance(state, tuple) else state

    forward, _ = flops(First(K, M), K)
    assert forward == 2 * gates * (loops(M, K) + loops(M, M))


def test_a_product_of_complex_numbers_is_four_of_real_ones() -> None:
    real = flops(nn.Linear(K, M, bias=False), K)
    layer = nn.Linear(K, M, bias=False, dtype=torch.complex64)
    assert flops(layer, K, dtype=torch.complex64) == tuple(4 * each for each in real)


@pytest.mark.parametrize(
    ("left", "right"),
    [((2, N, K), (2, K, M)), ((N, K), (2, K, M)), ((2, N, K), (K, M)), ((N, K), (K, M))],
)
def test_groups_divide_the_matrix_that_has_no_dimension_for_them(left: Index, right: Index) -> None:
    each = torch.empty(left, device="meta"), torch.empty(right, device="meta")
    groups = 2 if len(left) == len(right) == 3 else 1
    found = operations_of(torch.ops.aten._grouped_mm, each, {}, None)
    assert found == 2 * loops(groups, N, K, M)


def test_a_fused_kernel_counts_as_its_parts() -> None:
    """On a CPU attention is one kernel, on the meta device it is two products."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(K, K)

        def forward(self, x: Tensor) -> Tensor:
            float(x.sum())
            mixed = self.mix(x)
            return F.scaled_dot_product_attention(mixed, mixed, mixed)

    work = count(Fused(), (B, N, K), torch.float32, torch.zeros(()), lambda y, _: y.sum())
    mix, attention = 2 * loops(B, N, K, K), 2 * 2 * PAIRS
    assert work.flops_per_sample == 2 * mix + 3 * attention  # inputs need no gradient
    assert any("flash_attention_for_cpu" in op.name for op in work.layers[0].forward)


def test_a_product_without_a_formula_is_not_counted_as_nothing() -> None:
    bilinear = nn.Bilinear(K, K, M)
    with pytest.raises(Uncountable, match="aten._trilinear has no formula"):
        flops(lambda x: F.bilinear(x, x, bilinear.weight.to("meta")), K)

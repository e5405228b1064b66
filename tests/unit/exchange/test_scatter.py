"""Reduce-scatters by name: exact sums, bounded errors, and residuals that lose nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.distributed.comm import Comm, run_ranks
from lab.exchange.allreduce import AllReduce
from lab.exchange.base import Exchange
from lab.exchange.compressed import Int4, Int8, OneBit
from lab.exchange.powersgd import PowerSGD
from lab.exchange.scatter import Columns, ScatterLayout, TwoLevels, scatter_of

ROWS = {"w": (10, 7), "b": (5, 1), "e": (3, 4)}  # rows and inner values of three parameters
ONEBIT = {"granularity": "block", "block_size": 16}


def layout(size: int) -> tuple[ScatterLayout, int]:
    """Return where FSDP puts ROWS on `size` ranks, and the values of a rank's part."""
    columns, start = dict[str, Columns](), 0
    for name, (rows, inner) in ROWS.items():
        stop = start + -(-rows // size) * inner
        columns[name] = Columns(start, stop, inner)
        start = stop
    return ScatterLayout(columns), start


def laid_out(values: dict[str, Tensor], size: int) -> Tensor:
    """Return whole parameters as FSDP lays out gradients: [size, n], padded with zeros."""
    parts = []
    for name, (rows, inner) in ROWS.items():
        padded = torch.zeros(-(-rows // size) * size, inner)
        padded[:rows] = values[name]
        parts.append(padded.view(size, -1))
    return torch.cat(parts, dim=1)


def drawn(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in ROWS.items()}


def summed(size: int, steps: int = 1) -> dict[str, Tensor]:
    every = [drawn(rank, step) for rank in range(size) for step in range(steps)]
    return {name: torch.stack([each[name] for each in every]).sum(dim=0) for name in ROWS}


def scattered(size: int, exchange: Exchange) -> tuple[Tensor, int]:
    """Return the parts of all ranks after one reduce-scatter, and the bytes that one sent."""
    exchanges = [copy.deepcopy(exchange) for _ in range(size)]

    def rank_main(comm: Comm) -> tuple[Tensor, int]:
        place, n = layout(size)
        output = torch.full((n,), torch.nan)
        own = laid_out(drawn(comm.rank, 0), size)
        scatter_of(exchanges[comm.rank]).sum(output, own, comm, place)
        return output, comm.traffic.payload_bytes

    parts, sent = zip(*run_ranks(size, rank_main), strict=True)
    return torch.stack(parts), sent[0]


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(
    ("exchange", "tolerance"),
    [
        (AllReduce(), 1e-6),
        (AllReduce("bfloat16"), 0.01),
        (Int8(block_size=8), 0.02),
        (Int4(block_size=8), 0.2),
    ],
)
def test_each_rank_receives_its_part_of_the_sum(
    exchange: Exchange, tolerance: float, size: int
) -> None:
    parts, sent = scattered(size, exchange)
    expected = laid_out(summed(size), size)
    assert (parts - expected).abs().max() <= tolerance * size * 4
    if isinstance(exchange, AllReduce):
        assert sent == (size - 1) * exchange.dtype.itemsize * parts.shape[1]


def test_halves_are_summed_in_full_precision() -> None:
    # In bfloat16, 256 + 1 is 256.
    def rank_main(comm: Comm) -> float:
        output, own = torch.empty(1), torch.full((3, 1), [256.0, 1.0, 1.0][comm.rank])
        scatter_of(AllReduce("bfloat16")).sum(output, own, comm, ScatterLayout({}))
        return float(output)

    assert run_ranks(3, rank_main) == [258.0] * 3


def onebit() -> OneBit:
    return OneBit(**ONEBIT)  # type: ignore[arg-type]


def run_feedback(
    size: int, steps: range, states: list[Any], make: Callable[[], OneBit | Int4] = onebit
) -> list[tuple[dict[str, Any], Tensor, Tensor]]:
    """Return each rank's state, the sum of what it received, and its last part."""

    def rank_main(comm: Comm) -> tuple[dict[str, Any], Tensor, Tensor]:
        exchange = make()
        if states:
            exchange.load_state_dict(states[comm.rank])
        scatter, (place, n) = scatter_of(exchange), layout(size)
        delivered, output = torch.zeros(n), torch.empty(n)
        for step in steps:
            scatter.sum(output, laid_out(drawn(comm.rank, step), size), comm, place)
            delivered += output
        return copy.deepcopy(exchange.state_dict()), delivered, output

    return run_ranks(size, rank_main)


def residuals(states: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the ranks' sums, by parameter, without padding."""
    return {
        name: torch.stack([s["residual"][name].flatten(0, 1)[:rows] for s in states]).sum(dim=0)
        for name, (rows, _) in ROWS.items()
    }


@pytest.mark.parametrize("make", [onebit, lambda: Int4(16)])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_coarse_codec_delivers_everything_but_its_residuals(
    size: int, make: Callable[[], OneBit | Int4]
) -> None:
    states, delivered, _ = zip(*run_feedback(size, range(4), [], make), strict=True)
    left = laid_out(residuals(list(states)), size)
    real = laid_out({name: torch.ones(shape) for name, shape in ROWS.items()}, size) > 0
    gap = torch.stack(delivered) + left - laid_out(summed(size, 4), size)
    assert left.abs().max() > 0.01
    assert gap[real].abs().max() < 1e-4


def test_residuals_resume_in_the_same_bits() -> None:
    whole = run_feedback(3, range(4), [])
    first = [state for state, _, _ in run_feedback(3, range(2), [])]
    resumed = run_feedback(3, range(2, 4), first)
    for (state, _, output), (other, _, again) in zip(whole, resumed, strict=True):
        assert torch.equal(output, again)
        for name, residual in state["residual"].items():
            assert torch.equal(residual, other["residual"][name])


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4), (2, 1)])
def test_residuals_keep_their_sum_on_another_number_of_ranks(before: int, after: int) -> None:
    states = [state for state, _, _ in run_feedback(before, range(3), [])]
    shares = [OneBit(**ONEBIT).redistribute(states, r, after) for r in range(after)]  # type: ignore[arg-type]

    def rank_main(comm: Comm) -> tuple[dict[str, Any], Tensor]:
        exchange = OneBit(**ONEBIT)  # type: ignore[arg-type]
        exchange.load_state_dict(shares[comm.rank])
        place, n = layout(after)
        output = torch.empty(n)
        scatter_of(exchange).sum(output, torch.zeros(after, n), comm, place)
        return copy.deepcopy(exchange.state_dict()), output

    # With zero gradients, what is delivered comes from the residuals.
    moved, delivered = zip(*run_ranks(after, rank_main), strict=True)
    real = laid_out({name: torch.ones(shape) for name, shape in ROWS.items()}, after) > 0
    left = laid_out(residuals(list(moved)), after)
    gap = torch.stack(delivered) + left - laid_out(residuals(states), after)
    assert torch.stack(delivered).abs().max() > 0.1
    assert gap[real].abs().max() < 1e-5


def test_others_have_no_reduce_scatter() -> None:
    with pytest.raises(ValueError, match="exchange=PowerSGD has no reduce-scatter; allowed:"):
        scatter_of(PowerSGD())
    with pytest.raises(ValueError, match="onebit without warmup_steps"):
        scatter_of(OneBit(warmup_steps=3))


def in_words(block: int, payload: int, n: int) -> int:
    """Return the bytes of a line of blocks: headers and payloads begin at multiples of 16."""
    whole, rest = divmod(n, block)
    parts = [8 * whole, payload * whole, *([8, -(-rest * payload // block)] if rest else [])]
    return sum(-(-part // 16) * 16 for part in parts)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (2, 3)])
@pytest.mark.parametrize(
    ("make", "tolerance", "num_bytes"),
    [
        (AllReduce, 1e-6, lambda n: 4 * n),
        (lambda: Int8(8), 0.02, lambda n: in_words(8, 8, n)),
        (lambda: Int4(8, error_feedback=False), 0.3, lambda n: in_words(8, 4, n)),
    ],
)
def test_two_levels_sum_inside_nodes_before_they_cross(
    nodes: int,
    per_node: int,
    make: Callable[[], Exchange],
    tolerance: float,
    num_bytes: Callable[[int], int],
) -> None:
    size = nodes * per_node

    def rank_main(comm: Comm) -> tuple[Tensor, int, int]:
        first = range(0, size, per_node)
        comm.nodes = [list(range(at, at + per_node)) for at in first]
        inside, across = comm.split(comm.rank // per_node), comm.split(comm.rank % per_node)
        place, n = layout(size)
        output = torch.full((n,), torch.nan)
        own = laid_out(drawn(comm.rank, 0), size)
        TwoLevels(make(), inside, across).sum(output, own, comm, place)
        return output, comm.traffic.payload_bytes, comm.traffic.across_bytes

    parts, sent, crossed = zip(*run_ranks(size, rank_main), strict=True)
    expected = laid_out(summed(size), size)
    assert (torch.stack(parts) - expected).abs().max() <= tolerance * size * 4
    n = expected.shape[1]
    assert set(crossed) == {(nodes - 1) * num_bytes(n)}
    assert set(sent) == {crossed[0] + (per_node - 1) * num_bytes(nodes * n)}


def test_two_levels_keep_no_residuals() -> None:
    def rank_main(comm: Comm) -> None:
        with pytest.raises(ValueError, match="two_levels stores no residuals; set exchange"):
            TwoLevels(Int4(8), comm, comm)

    run_ranks(1, rank_main)

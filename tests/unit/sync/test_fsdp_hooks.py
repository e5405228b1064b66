"""The lab's collectives in FSDP2, and its units."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.distributed.comm import Comm, run_ranks
from lab.exchange.bucket import Plans
from lab.exchange.compressed import Int4, Int8, OneBit
from lab.exchange.scatter import Scatter, ScatterLayout, scatter_of
from lab.sync.drift import GRADIENTS, WEIGHTS, FsdpDrift
from lab.sync.fsdp import UnitAllGather, UnitReduceScatter, ranks_of_a_host
from lab.sync.fsdp_units import groups_of

ROWS, INNER, UNITS, EVERY = 12, 300, ("first", "last"), 2
SIZE = 4


class Group:
    """A process group that FSDP names to a hook."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def gather(hook: UnitAllGather, own: Tensor, comm: Comm) -> Tensor:
    """Gather as FSDP does: a rank's part is copied into the output, which the hook fills."""
    output = torch.full((comm.size * len(own),), torch.nan)
    place = output.view(comm.size, -1)[comm.rank]
    place.copy_(own)
    hook(output, place, cast(dist.ProcessGroup, Group(comm.size)))
    return output


def test_gathered_copies_are_rounded_alike_and_the_rank_s_own_weights_stay() -> None:
    def rank_main(comm: Comm) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
        own = torch.randn(1500, generator=torch.Generator().manual_seed(comm.rank))
        hook = UnitAllGather("first", comm, None, Plans())
        kept = own.clone()
        copy = gather(hook, own, comm)
        sent = comm.traffic.payload_bytes
        hook.exact = True
        assert torch.equal(own, kept)
        return copy, own, gather(hook, own, comm), sent, kept

    results = run_ranks(SIZE, rank_main)
    true = torch.cat([own for _, own, _, _, _ in results])
    for copy, _, exact, sent, _ in results:
        assert torch.equal(copy, results[0][0])
        assert 1e-4 < (copy - true).norm() / true.norm() < 0.02
        assert torch.equal(exact, true)
        assert sent == (SIZE - 1) * (
            1024 + 480 + 2 * 16
        )  # headers and payloads of two rows, in words


def test_a_second_shard_is_gathered_inside_its_group_as_it_is() -> None:
    def rank_main(comm: Comm) -> tuple[bool, int]:
        inside = comm.split(comm.rank // 2)
        inside.nodes = [[0, 1]]
        hook = UnitAllGather("first", comm, inside, Plans())
        first = torch.full((8,), float(comm.rank) / 3)
        copy = gather(hook, first, inside)
        expected = torch.stack([torch.full((8,), (comm.rank // 2 * 2 + r) / 3) for r in (0, 1)])
        return torch.equal(copy, expected.view(-1)), comm.traffic.across_bytes

    assert run_ranks(SIZE, rank_main) == [(True, 0)] * SIZE


class WrongScale(Scatter):
    """Doubles what another reduce-scatter delivers."""

    def __init__(self, scatter: Scatter) -> None:
        self._scatter = scatter

    def sum(self, output: Tensor, gradients: Tensor, comm: Comm, layout: ScatterLayout) -> None:
        self._scatter.sum(output, gradients, comm, layout)
        output *= 2


class WrongWeights(UnitAllGather):
    """Halves the weights that rank 1 gathers."""

    def _gather(self, output: Tensor, own: Tensor) -> None:
        super()._gather(output, own)
        if self._comm.rank == 1:
            output *= 0.5


def make_exchange(name: str) -> Int4 | Int8 | OneBit:
    if name == "onebit":
        return OneBit(granularity="block", block_size=64)  # type: ignore[call-arg]
    return Int8(64) if name == "int8" else Int4(64, error_feedback=name == "int4")


def windows(exchange_name: str, broken: tuple[str, str] | None) -> list[dict[str, Any]]:
    """Run a window of each part and unit, with a fault in one; return what the ranks found."""

    def rank_main(comm: Comm) -> list[dict[str, Any]]:
        exchange = make_exchange(exchange_name)
        drift = FsdpDrift(exchange, comm, EVERY, UNITS, (WEIGHTS, GRADIENTS))
        hooks = {unit: hooks_of(unit, exchange, comm, broken) for unit in UNITS}
        generator = torch.Generator().manual_seed(comm.rank)
        group = cast(dist.ProcessGroup, Group(comm.size))
        for step in range(4 * EVERY):
            drift.begin_step(step)
            for gathers, scatters in hooks.values():
                gathers.drift = scatters.drift = drift
                gather(gathers, torch.randn(ROWS * INNER, generator=generator), comm)
                own = torch.randn(comm.size * ROWS // SIZE * INNER, generator=generator)
                output = torch.empty(len(own) // comm.size)
                scatters(output, own, group, dist.ReduceOp.AVG)
            drift.end_step()
        return drift.results()

    results = run_ranks(SIZE, rank_main)
    assert all(found == results[0] for found in results)
    return results[0]


def hooks_of(
    unit: str, exchange: Int4 | Int8 | OneBit, comm: Comm, broken: tuple[str, str] | None
) -> tuple[UnitAllGather, UnitReduceScatter]:
    weights = WrongWeights if broken == (WEIGHTS, unit) else UnitAllGather
    scatter = scatter_of(exchange)
    if broken == (GRADIENTS, unit):
        scatter = WrongScale(scatter)
    parameters = {f"{unit}.weight": nn.Parameter(torch.empty(ROWS, INNER))}
    return (
        weights(unit, comm, None, Plans()),
        UnitReduceScatter(scatter, unit, parameters, comm.traffic, comm),
    )


@pytest.mark.parametrize("exchange", ["int8", "int4", "int4 without feedback", "onebit"])
def test_sound_parts_do_not_alarm(exchange: str) -> None:
    found = windows(exchange, None)
    parts = [f"{part} of unit {unit}" for unit in UNITS for part in (WEIGHTS, GRADIENTS)]
    assert [window["bucket"] for window in found] == parts
    assert [window["step"] for window in found] == [1, 3, 5, 7]
    assert not any(window["alarm"] for window in found)
    assert all(window["cosine"] > 0.95 for window in found)


NAMES = {WEIGHTS: r"sync\.all_gather=int8", GRADIENTS: "exchange=Int4"}


@pytest.mark.parametrize("broken", [(part, u) for u in UNITS for part in (WEIGHTS, GRADIENTS)])
@pytest.mark.parametrize("exchange", ["int4", "int4 without feedback"])
def test_a_wrong_scale_is_named_by_part_and_unit(exchange: str, broken: tuple[str, str]) -> None:
    where = f"{broken[0]} of unit {broken[1]}"
    with pytest.warns(UserWarning, match=f"{NAMES[broken[0]]}: drift in {where}"):
        alarms = [window["bucket"] for window in windows(exchange, broken) if window["alarm"]]
    assert alarms == [where]


def test_hosts_of_different_sizes_have_no_levels() -> None:
    assert ranks_of_a_host("sync.reshard=node", [[0, 1], [2, 3]]) == 2
    for nodes in ([[0, 1, 2], [3]], [[0, 2], [1, 3]]):
        with pytest.raises(ValueError, match=r"sync\.reshard=node: hosts have the ranks \[0, "):
            ranks_of_a_host("sync.reshard=node", nodes)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"_fsdp_param_group": "g"}, ["g"]),  # until torch 2.11
        ({"_fsdp_param_group": None}, []),
        ({"_fsdp_param_groups": ["g", "h"]}, ["g", "h"]),
    ],
)
def test_groups_of_a_unit(state: dict[str, Any], expected: list[str]) -> None:
    unit: Any = SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(**state))
    assert groups_of(unit) == expected

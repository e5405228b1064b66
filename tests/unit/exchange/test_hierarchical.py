"""Two levels: means, residuals, bytes and states, on nodes of many shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.distributed.comm import Comm, Traffic, run_ranks
from lab.exchange.bucket import GradBucket
from lab.exchange.compressed import OneBit
from lab.exchange.hierarchical import Hierarchical, part_shapes
from tests.support.cases import COMPRESSES_LITTLE, EXACT, MEANS, maker
from tests.support.ledger import (
    NUM_VALUES,
    SHAPES,
    Ledger,
    assert_nothing_is_lost,
    exchanged,
    kept_by_all,
    states_of,
)
from tests.support.slow import some_of

Nodes = list[list[int]]
NODES: dict[str, Nodes] = {
    "2x2": [[0, 1], [2, 3]],
    "2x3": [[0, 1, 2], [3, 4, 5]],
    "2+3": [[0, 1], [2, 3, 4]],
    "1+3": [[0], [1, 2, 3]],
    "2 in turns": [[0, 2], [1, 3]],
    "3x1": [[0], [1], [2]],
    "1x3": [[0, 1, 2]],
}
TWO_LEVELS = [name for name in NODES if name not in ("3x1", "1x3")]
LEVELS_OF_THEIR_OWN = [e for e in MEANS if not e.startswith("hierarchical")]
INTER_EXACT = [e for e in LEVELS_OF_THEIR_OWN if e in EXACT]
INTER = [e for e in LEVELS_OF_THEIR_OWN if e not in EXACT]
WITH_FEEDBACK = [e for e in INTER if maker(e)().keeps_residuals]


def hierarchy(inter: str) -> Callable[[], Hierarchical]:
    """Makes a hierarchical exchange, in any thread, whose inter compresses SHAPES."""
    make = maker(inter, *COMPRESSES_LITTLE.get(inter, ()))
    return lambda: Hierarchical(make())


def exchange_steps(
    inter: str, nodes: Nodes, gradients: Tensor, states: Sequence[Any] = ()
) -> list[Ledger]:
    """Exchange `gradients` [steps, ranks, values]; return each rank's ledger."""
    return exchanged(hierarchy(inter), gradients, nodes=nodes, states=states)


def drawn(num_steps: int, nodes: Nodes) -> Tensor:
    return torch.randn(num_steps, sum(map(len, nodes)), NUM_VALUES)


@pytest.mark.parametrize("inter", INTER_EXACT)
def test_every_rank_weighs_the_same_in_the_mean(inter: str) -> None:
    for nodes in NODES.values():
        gradients = drawn(2, nodes)
        means = torch.stack(exchange_steps(inter, nodes, gradients)[0].means).double()
        truth = gradients.double().mean(dim=1)
        torch.testing.assert_close(means, truth, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_divided_gradients_are_summed(nodes: Nodes) -> None:
    make = hierarchy("allreduce")
    for shapes in (SHAPES, {"w": torch.Size((12, 7))}):
        gradients = torch.randn(sum(map(len, nodes)), sum(s.numel() for s in shapes.values()))

        def rank_main(comm: Comm, shapes: Any = shapes, gradients: Tensor = gradients) -> Tensor:
            bucket = GradBucket(shapes, gradients[comm.rank].clone(), divided=True)
            make().average(bucket, comm)
            return bucket.flat

        for result in run_ranks(len(gradients), rank_main, nodes):
            expected = gradients.double().sum(dim=0)
            torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    "nodes", some_of([NODES[name] for name in TWO_LEVELS], every=2), ids=TWO_LEVELS
)
@pytest.mark.parametrize("inter", WITH_FEEDBACK)
def test_delivered_and_residuals_make_the_true_sum(inter: str, nodes: Nodes) -> None:
    gradients = drawn(20, nodes)
    ledgers = exchange_steps(inter, nodes, gradients)
    assert_nothing_is_lost(ledgers, gradients.double().sum(dim=(0, 1)))


@pytest.mark.parametrize("inter", ["onebit", "topk", "powersgd"])
def test_other_nodes_take_over_the_sum_of_residuals(inter: str) -> None:
    nodes = NODES["2+3"]
    before = drawn(3, nodes)
    old = exchange_steps(inter, nodes, before)
    for to in NODES.values():
        after = drawn(2, to)
        new = exchange_steps(inter, to, after, states_of(old))
        truth = before.double().sum(dim=(0, 1)) + after.double().sum(dim=(0, 1))
        delivered = old[0].delivered + new[0].delivered
        assert (delivered + kept_by_all(new) - truth).norm() <= 1e-5 * truth.norm()


@pytest.mark.parametrize("inter", INTER)
def test_the_same_nodes_go_on_in_the_same_bits(inter: str) -> None:
    nodes = NODES["2+3"]
    gradients = drawn(4, nodes)
    whole = exchange_steps(inter, nodes, gradients)[0]
    first = exchange_steps(inter, nodes, gradients[:2])
    # Draws depend on the step's number, which starts anew.
    rest = exchange_steps(inter, nodes, gradients[2:], states_of(first))[0]
    if inter != "randomk":
        assert torch.equal(torch.stack(whole.means[2:]), torch.stack(rest.means))


def test_another_loop_may_not_continue_on_other_nodes() -> None:
    states = states_of(exchange_steps("onebit", NODES["2x2"], drawn(1, NODES["2x2"])))

    def rank_main(comm: Comm) -> None:
        exchange = hierarchy("onebit")()
        exchange.validate(comm)
        with pytest.raises(ValueError, match=r"state_dict: its ranks were on nodes \[\[0, 1\], "):
            exchange.resume(states[comm.rank], torch.device("cpu"))

    run_ranks(4, rank_main, NODES["2 in turns"])


def test_nodes_of_one_rank_have_the_exchange_between_nodes_alone() -> None:
    nodes = NODES["3x1"]
    gradients = drawn(3, nodes)
    flat, levels = exchanged(OneBit, gradients), exchange_steps("onebit", nodes, gradients)
    assert all(map(torch.equal, flat[0].means, levels[0].means))


def test_one_node_compresses_nothing() -> None:
    gradients = drawn(1, NODES["1x3"])
    (mean,) = exchange_steps("onebit", NODES["1x3"], gradients)[0].means
    torch.testing.assert_close(mean, gradients[0].mean(dim=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inter", INTER)
def test_a_gradient_that_is_not_finite_is_known_to_all(inter: str) -> None:
    # In a matrix, in a bias, in kernels.
    for place, bad in product((5, 705, 2000), (torch.nan, -torch.inf)):
        gradients = drawn(1, NODES["2+3"])
        gradients[0, -1, place] = bad
        for ledger in exchange_steps(inter, NODES["2+3"], gradients):
            assert ledger.finite == [False] and not ledger.means[0].isfinite().all()


def traffic(inter: str, nodes: Nodes, shape: tuple[int, ...]) -> list[Traffic]:
    make = maker(inter)

    def rank_main(comm: Comm) -> Traffic:
        flat = torch.randn(torch.Size(shape).numel())
        Hierarchical(make()).average(GradBucket({"w": torch.Size(shape)}, flat), comm)
        return comm.traffic

    return run_ranks(sum(map(len, nodes)), rank_main, nodes)


@pytest.mark.parametrize("inter", ["allreduce", "onebit"])
def test_each_rail_carries_its_share_between_nodes(inter: str) -> None:
    rows, columns = 384, 2048
    n = rows * columns
    message = n / 2 / 8 + 8 * rows / 2
    between, gathered = (8 * n / 2 / 2, 4 * n / 2) if inter == "allreduce" else (message, message)
    for sent in traffic(inter, NODES["2x2"], (rows, columns)):
        assert sent.across_bytes == pytest.approx(between, rel=0.001)
        assert sent.payload_bytes - sent.across_bytes == 4 * n / 2 + gathered


def test_ranks_without_a_rail_send_nothing_to_other_nodes() -> None:
    sent = traffic("allreduce", NODES["2+3"], (60, 10))
    assert [bool(each.across_bytes) for each in sent] == [True, True, True, True, False]
    # A block is half of the bucket, and the larger node has three.
    assert sent[4].payload_bytes == 2 * 2 * 4 * 300


def test_parts_are_whole_rows_of_every_parameter() -> None:
    parts = [part_shapes(SHAPES, rail, 4) for rail in range(4)]
    assert [part["conv"] for part in parts] == [(1, 20, 5, 5), *[(2, 20, 5, 5)] * 3]
    for name, shape in SHAPES.items():
        assert sum(part[name].numel() for part in parts) == shape.numel()


class Unsplit(Comm):
    no_split = "it has only one group"
    _iall_reduce = _iall_gather = _iall_to_all = _ibroadcast = None  # type: ignore[assignment]


def test_a_comm_that_cannot_be_split_is_refused() -> None:
    comm = Unsplit(0, 4)
    comm.nodes = NODES["2x2"]
    with pytest.raises(ValueError, match=r"exchange=Hierarchical: makes groups of ranks, but it"):
        Hierarchical(OneBit()).validate(comm)


@pytest.mark.parametrize("name", ["allreduce", "bf16", "onebit", "int8", "signsgd_ef", "topk"])
def test_all_buckets_have_as_many_stages(name: str) -> None:
    """Else one could overtake another in the all-gather that follows, on some ranks alone."""

    def rank_main(comm: Comm) -> list[int]:
        exchange, counts = maker(name)(), list[int]()
        for shape in ((7,), (64, 128)):  # too small to be encoded, and not
            bucket = GradBucket({f"{shape}": torch.Size(shape)}, torch.ones(shape).flatten())
            begun = [collective.wait() for collective in exchange.stages(bucket, comm)]
            counts.append(len(begun))
        return counts

    for few, many in run_ranks(2, rank_main):
        assert few == many > 0

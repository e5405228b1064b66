"""Which ranks share a node, from the places that launchers give them."""

from __future__ import annotations

import pytest
import torch

from lab.distributed.comm import Comm, run_ranks
from lab.distributed.launcher import nodes_of

BLOCKS, TURNS, UNEVEN = [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1], [2, 3, 4], [5]]


@pytest.mark.parametrize("nodes", [BLOCKS, TURNS, UNEVEN, [[0, 3, 5], [1, 4], [2]]])
def test_places_tell_which_ranks_share_a_node(nodes: list[list[int]]) -> None:
    at = {rank: (node.index(rank), len(node)) for node in nodes for rank in node}
    assert nodes_of([at[rank] for rank in sorted(at)]) == nodes


@pytest.mark.parametrize("places", [[(0, 2), (0, 2)], [(0, 1), (1, 2)], [(1, 2), (0, 1)]])
def test_places_that_do_not_fit_are_refused(places: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"LOCAL_RANK of LOCAL_WORLD_SIZE: the 2 ranks have "):
        nodes_of(places)


def test_groups_know_their_nodes() -> None:
    def rank_main(comm: Comm) -> list[list[int]]:
        return [list(node) for node in comm.split(comm.rank % 2).nodes]

    assert run_ranks(6, rank_main, UNEVEN) == [[[0], [1, 2]], [[0], [1], [2]]] * 3


def test_bytes_to_other_nodes_are_those_that_leave_along_each_path() -> None:
    def rank_main(comm: Comm) -> list[int]:
        tensor, counts = torch.zeros(4, 100), []
        for run in (
            lambda: comm.all_reduce(tensor),
            lambda: comm.all_to_all(torch.zeros(4, 100), tensor),
            lambda: comm.isend_irecv(
                [(tensor, (comm.rank + 2) % 4)], [(tensor.clone(), (comm.rank + 2) % 4)]
            ).wait(),
        ):
            before = comm.traffic.across_bytes
            run()
            counts.append(comm.traffic.across_bytes - before)
        return counts

    ring, pairs, whole = 1600 * 3 // 2, 400 * 2, 1600
    # Around the ring, each node is left once.
    inside, leaving = [0, pairs, whole], [ring, pairs, whole]
    assert run_ranks(4, rank_main, BLOCKS) == [inside, leaving] * 2
    assert run_ranks(4, rank_main, TURNS) == [[ring, pairs, 0]] * 4

"""Reduce-scatters in two levels: inside each node first, then between nodes."""

from __future__ import annotations

from torch import Tensor

from lab.distributed.comm import Comm
from lab.exchange.base import Exchange
from lab.exchange.scatter import Layout, Scatter, scatter_of


class TwoLevels(Scatter):
    """Sums inside nodes before a codec rounds again and the sums cross (ZeRO++, qgZ: Wang et al.
    2023, section 4.3).

    Of M nodes with L ranks, rank l of a node first receives from its node's ranks what the l-th
    ranks of all nodes are due, and adds it: M parts. Then the l-th ranks exchange these sums. Each
    value is rounded twice, however many ranks there are, and a node sends (M-1)/M of a gradient to
    others, 1/L of what its ranks would send each for itself. The order of the parts that the paper
    swaps to keep them in place is that of the rows here.

    One object serves one unit, since it has the memory of both levels.

    Args:
        exchange: its first half runs at both levels.
        inside, across: this rank's node, and the ranks with its number on all nodes. Rank l of node
            m is number m * L + l of all.

    Raises:
        ValueError: the exchange has no reduce-scatter, or keeps residuals, of which there would be
            two of different lengths.
    """

    def __init__(self, exchange: Exchange, inside: Comm, across: Comm) -> None:
        require_no_residuals(exchange)
        self._scatter = scatter_of(exchange)
        self._inside, self._across = inside, across
        self._first, self._second = Layout({}), Layout({})

    def sum(self, output: Tensor, gradients: Tensor, comm: Comm, layout: Layout) -> None:
        per_node, nodes, n = self._inside.size, self._across.size, gradients.shape[1]
        by_local_rank = layout.plans.scratch("by local rank", gradients, per_node, nodes, n)
        by_local_rank.copy_(gradients.view(nodes, per_node, n).transpose(0, 1))
        of_node = layout.plans.scratch("of node", gradients, nodes, n)
        parts = by_local_rank.view(per_node, -1)
        self._scatter.sum(of_node.view(-1), parts, self._inside, self._first)
        self._scatter.sum(output, of_node, self._across, self._second)


def require_no_residuals(exchange: Exchange) -> None:
    """Refuse an exchange that keeps residuals.

    Raises:
        ValueError: it does.
    """
    if exchange.keeps_residuals:
        raise ValueError(
            "exchange.error_feedback=true: sync.reduce_scatter=two_levels keeps no residuals; "
            "must be false, or sync.reduce_scatter=lab"
        )

"""Trees of ranks: each rank's parent, children and depth. Nothing here imports torch."""

from __future__ import annotations

from typing import NamedTuple


class Node(NamedTuple):
    """A rank's place in a tree: its parent, its children and its distance from the root."""

    parent: int | None
    children: list[int]
    depth: int


def binomial_node(rank: int, size: int) -> Node:
    """Return a rank's place in the binomial tree of `size` ranks, rooted at 0.

    Rank r's parent is r with its lowest set bit cleared. Children come in ascending order, which
    is the order in which their subtrees complete. Any size is allowed.
    """
    children, bit = [], 1
    while bit < size and not rank & bit:
        if rank + bit < size:
            children.append(rank + bit)
        bit *= 2
    return Node(rank - bit if rank else None, children, rank.bit_count())


def in_order_node(rank: int, size: int, tree: int) -> Node:
    """Return a rank's place in the first (`tree` 0) or second (1) of two trees of `size` ranks.

    The first binary tree numbers its nodes in order (left subtree, node, right subtree), and no
    node has a right child only, so even ranks are its leaves. The second is the first with every
    rank moved up by one, so odd ranks are its leaves. Neither is higher than log2(size).
    """
    position = (rank - tree) % size
    low, high = 0, size - 1
    path = [_root(low, high)]
    while path[-1] != position:
        low, high = (low, path[-1] - 1) if position < path[-1] else (path[-1] + 1, high)
        path.append(_root(low, high))
    halves = (low, position - 1), (position + 1, high)
    children = [(_root(*half) + tree) % size for half in halves if half[0] <= half[1]]
    parent = (path[-2] + tree) % size if len(path) > 1 else None
    return Node(parent, children, depth=len(path) - 1)


def _root(low: int, high: int) -> int:
    """Return the root of positions `low` (even) to `high`: odd and near the middle, if possible."""
    return low if low == high else low - 1 + 2 * ((high - low + 3) // 4)

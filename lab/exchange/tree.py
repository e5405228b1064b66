"""Reduction tree: the exchange whose 2*log2(N) transfers Kim et al. found on the critical path."""

from __future__ import annotations

import torch

from lab.distributed.comm import Comm
from lab.exchange.bucket import Bucket
from lab.exchange.exchange import Exchange


def parent_and_children(rank: int, size: int) -> tuple[int | None, list[int]]:
    """A rank's place in the binomial tree of `size` ranks, rooted at 0.

    Rank r's parent is r with its lowest set bit cleared. Children come in ascending order, which
    is the order in which their subtrees are complete. Any size is allowed.
    """
    children, bit = [], 1
    while bit < size and not rank & bit:
        if rank + bit < size:
            children.append(rank + bit)
        bit *= 2
    return (rank - bit if rank else None), children


class Tree(Exchange):
    """Reduce up a binomial tree, divide at the root, broadcast down the same tree.

    Store and forward of whole buckets: the critical path is 2*ceil(log2 N) transfers of the bucket
    (Kim et al., ISPASS 2017, slide 25; Caffe's P2PSync; Paleo's "Tree"). A rank sends the bucket
    once to its parent and once to each child. Sums are taken in the order of the children.
    """

    needs_send_recv = True

    def average(self, bucket: Bucket, comm: Comm) -> None:
        parent, children = parent_and_children(comm.rank, comm.size)
        received = torch.empty_like(bucket.flat) if children else bucket.flat
        for child in children:
            comm.recv(received, child)
            bucket.flat += received
        if parent is None:
            bucket.flat.div_(comm.size)
        else:
            comm.send(bucket.flat, parent)
            comm.recv(bucket.flat, parent)
        for child in reversed(children):
            comm.send(bucket.flat, child)

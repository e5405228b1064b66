"""Gradients that an exchange delivers over many steps, found by running it among threads."""

from __future__ import annotations

from functools import cache

import torch

from lab.distributed.comm import Comm
from lab.distributed.thread_comm import run_ranks
from lab.exchange.base import Exchange
from lab.exchange.bucket import GradBucket
from lab.settings.config import build, load
from lab.settings.overrides import own_choices

RANKS, STEPS, SHAPE = 2, 64, (32, 2048)


@cache
def delivered_error(strategy: str) -> float:
    """Return how far the mean of the delivered gradients is from that of the true ones.

    Two ranks exchange the same random gradients STEPS times: what one step leaves out, later steps
    must deliver.

    Returns:
        The norm of the difference, relative to that of the true mean.
    """
    chance = torch.Generator().manual_seed(0)
    gradients = torch.randn(RANKS, SHAPE[0] * SHAPE[1], generator=chance)
    chosen = load(own_choices([f"strategy={strategy}"])).exchange

    def rank_main(comm: Comm) -> torch.Tensor:
        exchange: Exchange = build(chosen)
        total = torch.zeros_like(gradients[0])
        bucket = GradBucket({"weight": torch.Size(SHAPE)}, total.clone())
        for step in range(STEPS):
            bucket.step = step
            bucket.flat.copy_(gradients[comm.rank])
            exchange.average(bucket, comm)
            total += bucket.flat
        return total / STEPS

    delivered = run_ranks(RANKS, rank_main)[0]
    true = gradients.mean(dim=0)
    return float((delivered - true).norm() / true.norm())

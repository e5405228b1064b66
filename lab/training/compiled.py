"""torch.compile: the whole model at once, or regions of it, between which gradients can leave."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from lab.exchange.grouping import FIRST_BUCKET_BYTES, MB
from lab.sync.pattern import pattern_of

BACKEND = "inductor"


def compiled_as(config: DictConfig) -> str | None:
    """How `compiled` compiles: "whole", "regions", or None for not at all.

    Backward of what is compiled at once is one node of autograd's graph: all its gradients come
    with its last kernel. So where exchanges overlap backward there are regions.
    """
    if not config.compile:
        return None
    return "regions" if config.overlap and config.bucket_mb is not None else "whole"


def compiled(model: nn.Module, config: DictConfig) -> nn.Module:
    """The model as forward is to run it; its parameters keep their names and places.

    Regions are cut out of the graph as torch cuts them for DDP, from the end on, wherever a
    bucket's worth of parameters is full. DDP itself has them cut at its own buckets.
    """
    how, backend = compiled_as(config), BACKEND
    if how is None:
        return model
    if how == "regions" and not pattern_of(config).waits_in_backward:
        from torch._dynamo.backends.distributed import DDPOptimizer
        from torch._dynamo.backends.registry import lookup_backend

        cap = max(1, int(config.bucket_mb * MB))
        regions = DDPOptimizer(cap, lookup_backend(BACKEND), min(cap, FIRST_BUCKET_BYTES))
        backend = regions.compile_fn
    module: Any = torch.compile(model, backend=backend)
    return module

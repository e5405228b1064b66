"""torch.compile: of the whole model, or of regions, so that gradients appear between them."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from lab.exchange.grouping import FIRST_BUCKET_BYTES, MIB
from lab.sync.pattern import pattern_of

BACKEND = "inductor"


def compiled_as(config: DictConfig) -> str | None:
    """Return how `compiled` compiles: "whole", "regions", or None for not at all.

    Backward of a compiled region is one node of autograd's graph: all its gradients appear with its
    last kernel. So a model is compiled in regions if exchanges overlap backward.
    """
    if not config.compile:
        return None
    return "regions" if config.overlap and config.bucket_mb is not None else "whole"


def compiled(model: nn.Module, config: DictConfig) -> nn.Module:
    """Return the module that runs forward; its parameters keep their names and memory.

    Regions are cut as torch cuts them for DDP: from the end of the graph, whenever the parameters
    fill a bucket. DDP itself cuts them at its own buckets.
    """
    how, backend = compiled_as(config), BACKEND
    if how is None:
        return model
    if how == "regions" and not pattern_of(config).waits_in_backward:
        from torch._dynamo.backends.distributed import DDPOptimizer
        from torch._dynamo.backends.registry import lookup_backend

        cap = max(1, int(config.bucket_mb * MIB))
        regions = DDPOptimizer(cap, lookup_backend(BACKEND), min(cap, FIRST_BUCKET_BYTES))
        backend = regions.compile_fn
    module: Any = torch.compile(model, backend=backend)
    return module

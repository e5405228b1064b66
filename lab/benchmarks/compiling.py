"""Compile several sets of settings in one process, each as a run of its own would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from omegaconf import DictConfig


@contextmanager
def compiling_each(configs: Sequence[DictConfig], num_ways: int) -> Iterator[None]:
    """Let torch.compile make kernels for each batch.

    It would take other batches of a model for changes of shape, make the second one's kernels for
    any, and after eight of them compile no more.

    Args:
        num_ways: forms of each model: training alone, or inference too.
    """
    if not any(config.compile for config in configs):
        yield
        return
    import torch._dynamo

    limit = 2 * num_ways * len(configs)
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=limit):
        yield

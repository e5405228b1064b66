"""The fingerprint of a model's code."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lab.measure.environment import source_hash


class Net(nn.Sequential): ...


class Other(nn.Sequential):
    """Of other source."""


def test_a_sharded_model_has_the_code_of_the_model() -> None:
    """fully_shard replaces the class of each unit; runs with and without it are compared."""
    model = Net(nn.Linear(2, 2))
    before = source_hash(model)
    model.__class__ = type("FSDPNet", (FSDPModule, Net), {})
    assert source_hash(model) == before != source_hash(Other(nn.Linear(2, 2)))

"""Launches of a step on a GPU: operations of torch, kernels, and collectives; without a GPU."""

from __future__ import annotations

import importlib

import pytest
import torch

from lab.claims.predicted import profile_of
from lab.codec.base import Codec, Reference
from lab.exchange import powersgd, randomk
from lab.exchange.bucket import GradBucket
from lab.simulate.recorded import META, Event, MemoryTraffic, Passes, RecordingComm
from lab.simulate.strategy import buckets
from tests.support.cases import maker
from tests.support.kernels import LAUNCHED, Counter

NUM_RANKS, BUCKET_MB = 8, 25.0
ALEXNET = buckets(profile_of("alexnet_titanx"), BUCKET_MB, on_gpu=True)
# Of a step of AlexNet in 4 buckets: of torch that move values, of Triton, and collectives.
LAUNCHES = {
    "allreduce": (0, 0, 4),
    "bf16": (8, 0, 4),
    "onebit": (0, 12, 8),
    "int8": (0, 12, 8),
    "int4": (0, 12, 8),
    "signsgd_ef": (0, 12, 4),
    "topk": (0, 20, 4),
    "randomk": (8, 8, 4),
    "powersgd": (11, 20, 9),
}


@pytest.fixture
def kernels_of_triton(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Codecs have the kernels that they would have on a GPU, which are counted."""
    triton, counter = pytest.importorskip("lab.codec.gpu", reason="no triton here"), Counter()
    modules = {name: importlib.import_module(f"lab.codec.{name}") for name in LAUNCHED}
    for name, launched in LAUNCHED.items():
        for kernel in launched:
            monkeypatch.setattr(modules[name], kernel, counter)
    drawn, factors = modules["gpu_randomk"], modules["gpu_low_rank"]
    monkeypatch.setattr(randomk, "kernels", lambda _: drawn.made())
    monkeypatch.setattr(powersgd, "factor_kernels", lambda *_: factors.made())

    def kernels(codec: Codec, _: torch.device) -> Reference:
        return triton.made(codec.reading) if codec.reading else Reference(codec)

    monkeypatch.setattr(Codec, "kernels", kernels)
    return counter


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_of_a_step_are_as_many_as_pinned(name: str, kernels_of_triton: Counter) -> None:
    events, exchange = list[Event](), maker(name)()
    comm, planned = RecordingComm(0, NUM_RANKS), list[GradBucket]()
    for shapes in ALEXNET:
        named = {key: torch.Size(shape) for key, shape in shapes.items()}
        flat = torch.empty(sum(shape.numel() for shape in named.values()), device=META)
        planned.append(GradBucket(named, flat, divided=exchange.accepts_prescaled))
    for _ in range(2):
        kernels_of_triton.launches, comm.events[:] = 0, []
        events.clear()
        with Passes(events):
            for bucket in planned:
                exchange.average(bucket, comm)
    in_torch = sum(isinstance(event, MemoryTraffic) for event in events)
    assert (in_torch, kernels_of_triton.launches, len(comm.events)) == LAUNCHES[name]

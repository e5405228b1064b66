"""GPU kernels without a GPU: their launches, their compiled form, and what they compute."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from lab.codec import kernels
from lab.codec.codecs import TopK
from lab.distributed.comm import Comm, run_ranks
from lab.exchange.bucket import GradBucket, plan
from lab.exchange.compressed import OneBit
from tests.support.compiled import (
    ARCHITECTURES,
    BOUNDS,
    CASES,
    DECODE,
    ENCODE,
    PUSH,
    REGISTERS,
    Case,
    compiled_outside,
)
from tests.support.kernels import interpret, of_codec, same, values_of
from tests.support.slow import some_of
from tests.unit.codec.test_kernels import run

pytest.importorskip("triton", reason="no triton here")
# Without a GPU, conftest.py has Triton's interpreter on.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
READING = kernels.Reading("sides", 8)

# An architecture for some codecs. Of one all kernels, of others those that encode and decode.
QUICK = {"onebit": 90, "int8": 90, "float8": 80, "randomk": 80, "topk": 100, "low rank": 100}
SOME = [(name, arch, () if name == "onebit" else (ENCODE, DECODE)) for name, arch in QUICK.items()]
EVERY = [(name, arch, ()) for name in CASES for arch in ARCHITECTURES]
WIDE = (("onebit", 90), ("int8", 90))  # those whose moves of wide words are counted
# Of rows of 64, two scales are read for so few values that decoding them takes more instructions.
LOOSER = {("onebit, short rows", DECODE): 30, ("float8", DECODE): 26}


def test_constants_that_kernels_read_are_fields() -> None:
    """Triton 3.8 turns a NamedTuple into a tuple of its own, which has no properties."""
    gpu, gpu_kernels = (importlib.import_module(f"lab.codec.{x}") for x in ("gpu", "gpu_kernels"))
    read = set(re.findall(r"FORM\.(\w+)", inspect.getsource(gpu_kernels)))
    assert "per_unit" in read and read <= set(gpu.Form._fields)


@pytest.mark.parametrize(
    "cases", [SOME, pytest.param(EVERY, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_kernels_stay_in_registers_and_take_few_instructions(cases: list[Case]) -> None:
    found = compiled_outside(cases)
    assert {(each.codec, each.architecture) for each in found} == {case[:2] for case in cases}
    for each in found:
        assert each.registers * each.threads <= REGISTERS, each
        # Addresses of peers, which are read from a table, may take some of a thread's stack.
        assert each.stack <= 40 * (each.work == PUSH) and not each.calls, each
        if each.work in BOUNDS:
            bound = LOOSER.get((each.codec, each.work), BOUNDS[each.work])
            assert each.instructions <= bound, each
        if (each.codec, each.architecture) in WIDE:
            assert each.wide_stores >= 4, each  # 16 values for each thread
            # Gradient and residual, once.
            assert each.wide_loads == 8 or each.work != ENCODE, each


@pytest.mark.parametrize("size", [1, 3])
def test_an_exchange_by_these_kernels_is_the_cpus(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    shapes = {"fc": torch.Size((10, 70)), "bias": torch.Size((10,)), "conv": torch.Size((3, 64))}
    gradients = torch.randn(2, size, 902)

    def rank_main(comm: Comm) -> torch.Tensor:
        exchange = OneBit()
        buckets = [
            GradBucket(shapes, g[comm.rank].to(device, copy=True), s)
            for s, g in enumerate(gradients)
        ]
        for bucket in buckets:
            exchange.average(bucket, comm)
        return torch.stack([bucket.flat.cpu() for bucket in buckets])

    device = torch.device("cpu")
    on_cpu = run_ranks(size, rank_main)
    device = DEVICE
    interpret(monkeypatch)
    for ours, theirs in zip(run_ranks(size, rank_main), on_cpu, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


SAMPLES = ["right", "too high", "crowded"]


@pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")  # numpy's, interpreting
@pytest.mark.parametrize(
    ("kind", "sample", "feedback"),
    some_of(
        product(["normal", "equal", "few", "nan"], SAMPLES, [True, False]),
        also=[
            *(("normal", sample, True) for sample in SAMPLES),
            *(("equal", "right", True), ("few", "crowded", True), ("nan", "too high", False)),
        ],
    ),
)
def test_largest_values_are_those_of_cpus_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, kind: str, sample: str, feedback: bool
) -> None:
    """The first of equals, too, and whatever a sample says of a row."""
    topk = pytest.importorskip("lab.codec.gpu_topk", reason="no triton here")
    limit = topk._limit
    changed = {"too high": lambda row: (1, row[1]), "crowded": lambda row: (row[0], 3)}
    monkeypatch.setattr(topk, "_limit", lambda *row: changed.get(sample, tuple)(limit(*row)))
    monkeypatch.setattr(topk, "SAMPLE_BITS", 8)
    codec = TopK(0.01)
    layout = codec.layout({"w": (5, 800), "v": (7, 143), "b": (3,)}, 5013, 1)
    gradients = torch.stack([values_of(kind.replace("few", "normal"), 5013) for _ in range(3)])
    if kind == "few":
        gradients[:, torch.arange(5013) % 300 != 0] = 0
    none = torch.zeros(2, 5013)
    ended = [
        run(of_codec(codec, level), layout, gradients, feedback, none)
        for level in ("triton", "DEFAULT")
    ]
    for ours, theirs in zip(*ended, strict=True):
        assert same(ours.float(), theirs.float())


@pytest.fixture
def untried() -> Iterator[None]:
    kernels.tried.cache_clear()
    yield
    kernels.tried.cache_clear()


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("kernel", ["encode", "reduce", "add_up"])
def test_a_kernel_that_fails_its_trial_is_replaced_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable")

    gpu = importlib.import_module("lab.codec.gpu")
    monkeypatch.setattr(gpu.Triton, kernel, fail)
    with pytest.warns(UserWarning, match=r"RuntimeError: Failed to find C compiler\.\); plain"):
        assert kernels.on_gpu(READING, DEVICE) is None
    with warnings.catch_warnings(action="error"):
        assert kernels.on_gpu(READING, DEVICE) is None


@pytest.mark.usefixtures("untried")
def test_a_full_gpu_is_no_fault_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    gpu = importlib.import_module("lab.codec.gpu")
    monkeypatch.setattr(gpu.Triton, "encode", fail)
    with pytest.raises(torch.OutOfMemoryError):
        kernels.on_gpu(READING, DEVICE)


@pytest.mark.usefixtures("untried")
def test_kernels_that_pass_their_trial_are_used() -> None:
    gpu = importlib.import_module("lab.codec.gpu")
    assert isinstance(kernels.on_gpu(READING, DEVICE), gpu.Triton)


def test_matrices_of_a_gathered_bucket_begin_where_wide_loads_can() -> None:
    model = nn.Sequential(nn.Linear(16, 3), nn.Linear(3, 10), nn.Linear(10, 32))
    (gathered,) = plan(model, None)
    aligned = [name for name, p in gathered.parameters.items() if p.nbytes % 64 == 0]
    assert len(aligned) > 1
    spans = {name: start for name, start, _ in gathered.pack(0).spans()}
    assert all(4 * spans[name] % 64 == 0 for name in aligned)

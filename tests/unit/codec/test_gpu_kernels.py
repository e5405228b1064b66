"""The 1-bit codec's GPU kernels, without a GPU: their launches and their compiled form."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from lab.codec import kernels
from lab.codec.base import Codec
from lab.distributed.comm import Comm, run_ranks
from lab.exchange.bucket import GradBucket, plan
from lab.exchange.compressed import OneBit
from tests.support.kernels import Counter

pytest.importorskip("triton", reason="no triton here")
# Without a GPU, conftest.py has Triton's interpreter on.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
READING = kernels.Reading("sides", 8)

# Launches each kernel for an absent GPU, so that Triton specialises and compiles it as for a real
# one, and prints the result: {name: {"threads": ..., "registers": ..., ...}}.
COMPILE = """
import json, re, subprocess, sys, tempfile
from pathlib import Path
import torch, triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from lab.codec import gpu
from lab.codec.codecs import Cast, Float8, Int4, Int8, OneBit, Signs
from lab.codec.kernels import Peers

class Driver:
    def get_current_device(self): return self.arch
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", self.arch, 32)

class Compiling:
    def __init__(self, kernel): self.kernel = kernel
    def __getitem__(self, grid):
        return lambda *a, **k: made.append(self.kernel.warmup(*a, grid=grid, **k))

def describe(kernel):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        said = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True)
    used = {k: int(v) for k, v in re.findall(r"(REG|STACK):(\\d+)", said.stdout)}
    moves = re.findall(r"(ld|st)\\.global(?:\\.\\w+)*?(\\.v4)?\\.b(8|32)\\b", kernel.asm["ptx"])
    widths = {
        f"{width}_{move}": moves.count((instruction, vector, "32"))
        for width, vector in (("wide", ".v4"), ("narrow", ""))
        for move, instruction in (("loads", "ld"), ("stores", "st"))
    }
    return {
        "threads": 32 * kernel.metadata.num_warps, "registers": used["REG"],
        "spilled": used["STACK"], "shared": kernel.metadata.shared, **widths,
        }

def compiled(arch, name, codec, columns):
    driver.arch = arch
    made.clear()
    layout = codec.layout({"w": (2, columns)}, 2 * columns, 1)
    values, message = torch.zeros(2 * columns), torch.zeros(layout.num_bytes, dtype=torch.uint8)
    kernels, finite = gpu.Triton(codec.reading), torch.ones((), dtype=torch.bool)
    kernels.encode(layout, values, values.clone(), message, finite)
    kernels.reduce(layout, message[None], values.clone(), message.clone())
    peers = Peers(message.clone() for _ in range(4))
    kernels.reduce(layout, Peers(peers[:2]), values.clone(), Peers(peers[2:]))
    kernels.add_up(layout, message[None], values, 2, finite)
    names = ("encode", "sum", "push", "decode")
    if len(made) == 7:
        sums = ("magnitudes of sums", "sum", "magnitudes of peers", "push")
        names = ("magnitudes", "encode", *sums, "decode")
    return {f"{name} {kind} {columns} sm_{arch}": describe(k) for kind, k in zip(names, made)}

TOOL = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
made, driver = [], Driver()
triton.runtime.driver.set_active(driver)
for kernel in ("encode_rows", "decode_rows", "add_magnitudes"):
    setattr(gpu, kernel, Compiling(getattr(gpu, kernel)))
found, onebit = {}, OneBit()
cases = [(80, "onebit", onebit, 4096), (100, "onebit", onebit, 4096)]
cases += [(90, "onebit", onebit, columns) for columns in (64, 363, 9216)]
cases += [(90, "mean", OneBit("mean"), 4096), (80, "int8", Int8(1024), 4096)]
cases += [(90, "int4", Int4(128), 4096), (90, "signs", Signs(), 4096)]
cases += [(80, "float8", Float8(), 4096), (90, "bfloat16", Cast("bfloat16"), 4096)]
for case in cases:
    found |= compiled(*case)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, int]]:
    """Return registers, spilled bytes, shared memory and moves of each kernel, by name and GPU."""
    outside = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", COMPILE], env=outside, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return json.loads(done.stdout)


def test_kernels_stay_in_registers_and_move_wide_words(
    compiled: dict[str, dict[str, int]],
) -> None:
    for name, used in compiled.items():
        codec, kind, *_, columns, _ = name.split()
        assert used["registers"] * used["threads"] <= 32768, name  # half of a multiprocessor's
        assert used["spilled"] <= 16, name  # bytes of a thread
        assert used["shared"] <= 48 * 1024, name
        if int(columns) % 16 == 0 and codec != "int4" and kind != "magnitudes":
            assert used["wide_stores"] >= 4, name  # 16 values for each thread
            if kind == "encode":  # gradient and residual, once, or of long rows in two passes
                assert used["wide_loads"] == (8 if int(columns) <= 4096 else 16), name


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Triton's kernels, which 1-bit SGD takes for every tensor from here on.

    One at a time: the interpreter is not made for ranks that are threads.
    """
    module = importlib.import_module("lab.codec.gpu")
    lock = threading.Lock()

    def alone(kernel: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            with lock:
                kernel(*arguments)

        return call

    for name in ("encode", "reduce", "add_up"):
        monkeypatch.setattr(module.Triton, name, alone(getattr(module.Triton, name)))
    monkeypatch.setattr(Codec, "kernels", lambda codec, _: module.Triton(codec.reading))
    return module


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_launches_of_a_bucket_depend_on_no_number_of_matrices(
    monkeypatch: pytest.MonkeyPatch, gpu: ModuleType, size: int
) -> None:
    """Of rows of 64 and of 400 values, even and odd, which share three kernels."""
    counter = Counter()
    for name in ("encode_rows", "decode_rows", "add_magnitudes"):
        monkeypatch.setattr(gpu, name, counter)
    kinds = {"a": (8, 64), "b": (24, 400), "c": (8, 401), "bias": (8,)}
    shapes = {f"{kind}{n}": torch.Size(shape) for kind, shape in kinds.items() for n in range(5)}
    num_values = sum(shape.numel() for shape in shapes.values())

    def rank_main(comm: Comm) -> None:
        OneBit().average(GradBucket(shapes, torch.zeros(num_values)), comm)

    run_ranks(size, rank_main)
    assert counter.launches == size * 3


@pytest.mark.parametrize("size", [1, 3])
def test_an_exchange_by_these_kernels_is_the_cpus(
    request: pytest.FixtureRequest, size: int
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
    request.getfixturevalue("gpu")
    for ours, theirs in zip(run_ranks(size, rank_main), on_cpu, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.fixture
def untried() -> Iterator[None]:
    kernels.on_gpu.cache_clear()
    yield
    kernels.on_gpu.cache_clear()


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

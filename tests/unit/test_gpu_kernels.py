"""The 1-bit codec's GPU kernels, without a GPU: how many are launched, and what they compile to."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from lab.codec import onebit
from lab.distributed.comm import Comm
from lab.distributed.thread_comm import run_ranks
from lab.exchange.bucket import Bucket, plan
from lab.exchange.onebit import OneBit
from lab.model.alexnet import alexnet

pytest.importorskip("triton", reason="no triton here")

# Compiles each kernel as its launcher would, for tensors that are aligned, and prints what the
# assembler says. {kind: {arch: {...}}}
COMPILE = """
import json, re, subprocess, tempfile
from pathlib import Path
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lab.codec import gpu

TYPES = {name: "*fp32" for name in ("source", "residual", "scales", "out")}
TYPES |= {"source_bits": "*u8", "bits": "*u8"}
TOOL = Path(nvidia.__file__).parent / "bin" / "cuobjdump"

def compiled(kernel, columns, most, arch, **flags):
    tile = gpu.tile_of(columns, most)
    flags |= {"EVEN": columns % 16 == 0, "ROWS": tile.rows, "BYTES": tile.num_bytes}
    names = kernel.arg_names
    signature = {n: "constexpr" if n in flags else TYPES.get(n, "i32") for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in TYPES}
    source = ASTSource(fn=kernel, signature=signature, constexprs=flags, attrs=aligned)
    made = triton.compile(source, GPUTarget("cuda", arch, 32), {"num_warps": tile.num_warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        said = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True)
    used = {k: int(v) for k, v in re.findall(r"(REG|STACK):(\\d+)", said.stdout)}
    moved = re.findall(r"(ld|st)\\.global(?:\\.\\w+)*?(\\.v4)?\\.b(8|32)\\b", made.asm["ptx"])
    count = lambda *wanted: sum(move == wanted for move in moved)
    return {
        "threads": 32 * tile.num_warps, "registers": used["REG"], "spilled": used["STACK"],
        "shared": made.metadata.shared,
        "wide_loads": count("ld", ".v4", "32"), "narrow_loads": count("ld", "", "32"),
        "wide_stores": count("st", ".v4", "32"), "narrow_stores": count("st", "", "32"),
    }

def encode(columns, arch, sums=False):
    on_chip = columns <= gpu.LONGEST
    most = gpu.LONGEST if on_chip else gpu.PIECE
    flags = {"SPLIT_AT_MEAN": False, "SUM": sums, "ON_CHIP": on_chip}
    return compiled(gpu._encode, columns, most, arch, **flags)

found = {}
for arch in (80, 90, 100):
    found[f"encode 4096 sm_{arch}"] = encode(4096, arch)
    found[f"decode 4096 sm_{arch}"] = compiled(gpu._decode, 4096, gpu.TILE, arch, ADD=False)
for columns in (64, 363, 9216, 25088):
    found[f"encode {columns} sm_90"] = encode(columns, 90)
found["sum 4096 sm_90"] = encode(4096, 90, sums=True)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, int]]:
    """Registers, spilled bytes, shared memory and moves of each kernel, by name and GPU."""
    outside = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=outside, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return json.loads(done.stdout)


@pytest.mark.timeout(120)
def test_values_move_in_wide_words_and_stay_in_registers(
    compiled: dict[str, dict[str, int]],
) -> None:
    for name, used in compiled.items():
        kind, columns, _ = name.split()
        assert used["registers"] * used["threads"] <= 65536, name  # of a multiprocessor
        assert used["spilled"] <= 64, name
        assert used["shared"] <= 48 * 1024, name
        if int(columns) % 16 == 0:
            assert used["wide_stores"] >= 4, name
            assert used["narrow_stores"] == (0 if kind == "decode" else 2), name  # two scales a row
            if kind == "encode":  # gradient and residual, 16 values for each thread
                assert used["wide_loads"] in (8, 16) and used["narrow_loads"] == 0, name
    assert compiled["encode 9216 sm_90"]["wide_loads"] == 8  # once, not in every pass
    assert compiled["encode 25088 sm_90"]["wide_loads"] == 16


class Counter:
    """Stands for a kernel: counts its launches, and does nothing."""

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(size > 0 for size in grid)
        return self._launch

    def _launch(self, *_: Any, **__: Any) -> None:
        self.launches += 1


def gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Triton's kernels, which the codec takes for every tensor from here on."""
    kernels = importlib.import_module("lab.codec.gpu")
    monkeypatch.setattr(onebit, "_implementation", lambda *_: kernels)
    return kernels


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_step_of_alexnet_takes_three_launches_a_matrix(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    kernels = gpu_kernels(monkeypatch)
    counter = Counter()
    monkeypatch.setattr(kernels, "_encode", counter)
    monkeypatch.setattr(kernels, "_decode", counter)
    shapes = _small_shapes()
    num_values = sum(shape.numel() for shape in shapes.values())

    def rank_main(comm: Comm) -> int:
        exchange, bucket = OneBit(), Bucket(shapes, torch.zeros(num_values))
        exchange.average(bucket, comm)
        return len(exchange.matrices(bucket))

    assert run_ranks(size, rank_main) == [8] * size
    assert counter.launches == size * 8 * 3


def _small_shapes() -> dict[str, torch.Size]:
    """AlexNet's, with fewer rows and columns: launches depend on the number of matrices alone."""
    with torch.device("meta"):
        model = alexnet(image_shape=(3, 224, 224), num_classes=1000)
    return {
        name: torch.Size((min(p.shape[0], 64), 64) if p.dim() > 1 else p.shape)
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("size", [1, 3])
def test_an_exchange_by_these_kernels_is_the_cpus(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    shapes = {"fc": torch.Size((10, 70)), "bias": torch.Size((10,)), "conv": torch.Size((3, 64))}
    gradients = torch.randn(2, size, 902)

    def rank_main(comm: Comm) -> torch.Tensor:
        exchange = OneBit()
        buckets = [Bucket(shapes, g[comm.rank].clone(), s) for s, g in enumerate(gradients)]
        for bucket in buckets:
            exchange.average(bucket, comm)
        return torch.stack([bucket.flat for bucket in buckets])

    on_cpu = run_ranks(size, rank_main)
    gpu_kernels(monkeypatch)
    for ours, theirs in zip(run_ranks(size, rank_main), on_cpu, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.fixture
def untried() -> Iterator[None]:
    onebit._triton.cache_clear()
    yield
    onebit._triton.cache_clear()


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("kernel", ["encode", "reduce", "decode"])
def test_a_kernel_that_fails_its_trial_is_replaced_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable")

    monkeypatch.setattr(importlib.import_module("lab.codec.gpu"), kernel, fail)
    with pytest.warns(UserWarning, match=r"RuntimeError: Failed to find C compiler\.\); plain"):
        assert onebit._triton(torch.device("cpu")) is None
    with warnings.catch_warnings(action="error"):
        assert onebit._triton(torch.device("cpu")) is None


@pytest.mark.usefixtures("untried")
def test_kernels_that_pass_their_trial_are_used() -> None:
    assert onebit._triton(torch.device("cpu")) is importlib.import_module("lab.codec.gpu")


def test_matrices_of_a_gathered_bucket_begin_where_wide_loads_can() -> None:
    model = nn.Sequential(nn.Linear(16, 3), nn.Linear(3, 10), nn.Linear(10, 32))
    (gathered,) = plan(model, None)
    aligned = [name for name, p in gathered.parameters.items() if p.nbytes % 64 == 0]
    assert len(aligned) > 1
    spans = {name: start for name, start, _ in gathered.pack(0).spans()}
    assert all(4 * spans[name] % 64 == 0 for name in aligned)

"""Kernels of GPUs, compiled for absent ones: registers, stack and instructions, by architecture.

    python -m tests.support.compiled > docs/results/gpu_kernels.md

Each is launched on a GPU that does not exist, so that Triton specialises and compiles it as for a
real one. Instructions are counted in the path that whole tiles take, of which addresses are
multiples of 16 bytes: in a copy of the source without the others.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from lab.codec.base import Codec
from lab.codec.codecs import Cast, Float8, Int4, Int8, OneBit, Signs, TopK
from lab.codec.kernels import Peers
from lab.codec.layout import Draws, Factors
from lab.draw.text import markdown
from tests.support import round_products_once
from tests.support.exact import error_of
from tests.support.kernels import LAUNCHED

ARCHITECTURES = (80, 90, 100)
# What whole tiles do not run, in the sources of kernels.
ELSEWHERE = {
    "gpu": (("if program[1] == 0:", "if False:"), ("elif program[6] != 0:", "elif True:")),
    "gpu_topk": (
        ("if row < 0:", "if False:"),
        ("if (at != 0) & (number == TILE):", "if True:"),
        ("if (at != 0) & (count == SIZE):", "if True:"),
    ),
    "gpu_randomk": (),
    "gpu_low_rank": (("if program[6] != 0:", "if True:"),),
}
ENCODE, SUM, PUSH, DECODE, FEW = "encode", "sum", "push", "decode", "few values"
BOUNDS = {ENCODE: 50, SUM: 75, PUSH: 92, DECODE: 25}  # instructions a value
REGISTERS = 32_768  # of a program: half of a multiprocessor's
COLUMNS = 9216  # of long rows, which do not fit into registers
RATIO, RANK = 0.3, 2


class Compiled(NamedTuple):
    """A kernel of a codec.

    Attributes:
        work: ENCODE, SUM (of messages, which it encodes), PUSH (the same, between ranks that read
            and write each other's memory), DECODE, or FEW: it reads few values.
        registers: of a thread. stack: bytes of a thread. calls: of subroutines.
        instructions: for a value, in the path of whole tiles; of FEW, in all.
        wide_loads, wide_stores: of 16 bytes, in that path.
    """

    codec: str
    kernel: str
    work: str
    architecture: int
    threads: int
    registers: int
    stack: int
    calls: int
    instructions: float
    wide_loads: int
    wide_stores: int


# A name in CASES, an architecture, and works of the kernels to look at; of none, at all kernels.
Case = tuple[str, int, Sequence[str]]
Operation = tuple[str, int, int | None]  # its name, its address, and that of a branch's target


class _Driver:
    """Stands for Triton's, of a GPU of an architecture."""

    def __init__(self) -> None:
        self.architecture = 0

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return importlib.import_module("triton.backends.compiler").GPUTarget(
            "cuda", self.architecture, 32
        )


class _Launch(NamedTuple):
    kernel: str
    whole: Any
    path: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class _Noted:
    """Stands for a kernel, and notes its launches."""

    def __init__(self, name: str, whole: Any, path: Any, launches: list[_Launch]) -> None:
        self._launch, self._launches = (name, whole, path), launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: self._launches.append(
            _Launch(*self._launch, arguments, options)
        )


def noted(launches: list[_Launch]) -> None:
    """Let all kernels be noted in `launches`, from here on."""
    for name, kernels in LAUNCHED.items():
        launcher = importlib.import_module(f"lab.codec.{name}")
        own = inspect.getmodule(getattr(launcher, kernels[0]).fn)
        assert own
        paths = _without(own, ELSEWHERE[name])
        for kernel in kernels:
            whole, path = getattr(launcher, kernel), getattr(paths, kernel)
            setattr(launcher, kernel, _Noted(kernel, whole, path, launches))


def _without(module: ModuleType, replaced: Sequence[tuple[str, str]]) -> ModuleType:
    """Return a copy of a module in which parts of its source are replaced."""
    source = inspect.getsource(module)
    for old, new in replaced:
        assert old in source, f"{module.__name__}: {old}"
        source = source.replace(old, new)
    path = Path(tempfile.mkdtemp()) / f"{module.__name__.rpartition('.')[2]}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_path", path)
    assert spec and spec.loader
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def of_codec(codec: Codec, columns: int) -> None:
    """Launch the kernels of a codec: encode, sum two messages, decode."""
    module = importlib.import_module("lab.codec.gpu")
    layout = codec.layout({"w": (16, columns)}, 16 * columns, 1)
    values, finite = torch.zeros(16 * columns), torch.ones((), dtype=torch.bool)
    message = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    kernels = module.made(codec.reading)
    kernels.encode(layout, values, values.clone(), message, finite)
    if not isinstance(codec, TopK):  # of which a sum is decoded and encoded again
        kernels.reduce(layout, message[None], values.clone(), message.clone())
        peers = Peers(message.clone() for _ in range(4))
        kernels.reduce(layout, Peers(peers[:2]), values.clone(), Peers(peers[2:]))
    kernels.add_up(layout, message[None].repeat(2, 1), values, 2, finite)


def of_randomk() -> None:
    number = 1_000_000
    sent = round(RATIO * number)
    draws, values = Draws([number], [sent], [1]), torch.zeros(number)
    message, made = torch.zeros(sent + 1), importlib.import_module("lab.codec.gpu_randomk").made()
    made.encode(draws, values, values.clone(), message[:-1], message[-1])
    made.decode(draws, message[:-1], values, 8)


def of_low_rank() -> None:
    factors, matrix = Factors([(0, 128, 1024, RANK)]), torch.zeros(128, 1024)
    p, q = torch.zeros(128, RANK), torch.zeros(RANK, 1024)
    made = importlib.import_module("lab.codec.gpu_low_rank").made()
    made.project(factors, matrix, matrix.clone(), q, p)
    made.orthonormalise(factors, p, [p])
    made.project_back(factors, matrix, p, q, True)
    made.rebuild(factors, p, q, matrix)


CASES: dict[str, Callable[[], None]] = {
    "onebit": lambda: of_codec(OneBit(), 4096),
    "onebit, short rows": lambda: of_codec(OneBit(), 64),
    "onebit, long rows": lambda: of_codec(OneBit(), COLUMNS),
    "onebit mean": lambda: of_codec(OneBit("mean"), 4096),
    "int8": lambda: of_codec(Int8(1024), 4096),
    "int4": lambda: of_codec(Int4(128), 4096),
    "float8": lambda: of_codec(Float8(128), 4096),
    "bfloat16": lambda: of_codec(Cast("bfloat16"), 4096),
    "float16": lambda: of_codec(Cast("float16"), 4096),
    "signs": lambda: of_codec(Signs(), 4096),
    "topk": lambda: of_codec(TopK(0.01), 65_536),
    "randomk": of_randomk,
    "low rank": of_low_rank,
}


def compiled(cases: Sequence[Case]) -> Iterator[Compiled]:
    """Compile the kernels of codecs for architectures.

    Where works are named, subroutines are looked for in the path of whole tiles alone.
    """
    os.environ.pop("TRITON_INTERPRET", None)  # the package of this file has set it
    driver, launches = _Driver(), list[_Launch]()
    importlib.import_module("triton").runtime.driver.set_active(driver)
    noted(launches)
    for codec, driver.architecture, works in cases:
        launches.clear()
        CASES[codec]()
        for launch in launches:
            if not works or _work(launch)[0] in works:
                yield _described(codec, driver.architecture, launch, all_paths=not works)


def _described(codec: str, architecture: int, launch: _Launch, all_paths: bool) -> Compiled:
    whole, path = (
        kernel.warmup(*launch.arguments, grid=(1,), **launch.options)
        for kernel in (launch.whole, launch.path)
    )
    threads = 32 * whole.metadata.num_warps
    used, of_path = _used(whole), _disassembled(path)
    operations = _disassembled(whole) if all_paths else of_path
    work, values, passes = _work(launch)
    calls = sum(each.startswith("CALL") for each, *_ in operations)
    wide = (sum(each.startswith(f"{m}.E.128") for each, *_ in of_path) for m in ("LDG", "STG"))
    number = len(of_path) + (passes - 1) * _looped(of_path)
    subtracts = launch.kernel == "multiply_factors" and launch.arguments[5]
    sums = {SUM: ", after summing", PUSH: ", after summing, symmetric"}.get(work, "")
    name = launch.kernel + sums + ", subtracted" * subtracts
    return Compiled(
        *(codec, name, work, architecture, threads, used["REG"], used["STACK"]),
        # Without a return, it is ptxas's jump out of a loop.
        calls if any(each.startswith("RET") for each, *_ in operations) else 0,
        round(number / max(1, values / threads), 1),
        *wide,
    )


def _looped(operations: Sequence[Operation]) -> int:
    """Return the operations of the last loop that stores values."""
    for number, (name, at, to) in reversed(list(enumerate(operations))):
        if name.startswith("BRA") and to is not None and to < at:
            body = [each for each in operations[:number] if each[1] >= to]
            if any(each[0].startswith("STG") for each in body):
                return len(body) + 1
    return 0


def _work(launch: _Launch) -> tuple[str, int, int]:
    """Return what a kernel is for, values that a program reads, and passes of the loop over them.

    Of a loop whose length depends on rows, a pass: as many values as it reads at once.
    """
    arguments, modules = launch.arguments, importlib.import_module
    if launch.kernel in ("encode_rows", "decode_rows", "add_magnitudes"):
        form, sums = arguments[-1], launch.kernel != "decode_rows" and arguments[-2]
        summed = PUSH if isinstance(arguments[2], torch.Tensor) else SUM
        kind = DECODE if launch.kernel == "decode_rows" else summed if sums else ENCODE
        return kind, form.rows * form.width, 1
    topk, low_rank = (modules(f"lab.codec.gpu_{name}") for name in ("topk", "low_rank"))
    size, at_once, _ = topk.SIZES
    drawn = round(arguments[-2] / RATIO) if launch.kernel.endswith("_drawn") else 0
    passes = -(-drawn // arguments[-1]) if drawn else 0
    rows, columns = math.prod(low_rank.WIDE), math.prod(low_rank.TALL)
    return {
        "collect_largest": (ENCODE, topk.TILE, 1),
        "spread_largest": (DECODE, size, size // at_once),
        "take_drawn": (ENCODE, drawn, passes),
        "put_drawn": (DECODE, drawn, passes),
        "multiply_rows": (ENCODE, rows, 1),
        "multiply_columns": (ENCODE, columns, 1),
        "multiply_factors": (DECODE, rows, 1),
    }.get(launch.kernel, (FEW, 1, 1))


def _dumped(kernel: Any, option: str) -> str:
    nvidia = Path(importlib.import_module("triton.backends.nvidia").__file__ or "").parent
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        line = [nvidia / "bin/cuobjdump", option, file.name]
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout


def _used(kernel: Any) -> dict[str, int]:
    """Return the registers and the stack of a thread."""
    used = re.findall(r"(REG|STACK):(\d+)", _dumped(kernel, "-res-usage"))
    return {name: int(number) for name, number in used}


def _disassembled(kernel: Any) -> list[Operation]:
    """Return a kernel's operations in order; takes a third of a second."""
    operation = r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_.]+)(?:[^;]*?(0x[0-9a-f]+))?"
    return [
        (name, int(at, 16), int(to, 16) if to and name.startswith("BRA") else None)
        for at, name, to in re.findall(operation, _dumped(kernel, "-sass"))
        if name != "NOP"
    ]


def _outside(*arguments: str) -> str:
    """Run this module in another process, and return what it prints."""
    command = [sys.executable, "-m", "tests.support.compiled", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def compiled_outside(cases: Sequence[Case]) -> list[Compiled]:
    """Compile in another process, where Triton's interpreter is off."""
    return [Compiled(*each) for each in json.loads(_outside(json.dumps(cases)))]


NOTES = """# Kernels of codecs on GPUs

**We compiled these kernels and ran them in an interpreter on a CPU. No GPU has run them.** This
page is generated by `python -m tests.support.compiled > docs/results/gpu_kernels.md`.
tests/unit/codec/test_gpu_kernels.py checks that the kernels stay within the bounds given below.

Where a table cell has three numbers, they are for the architectures sm_80, sm_90 and sm_100,
respectively. A kernel marked "after summing" decodes the messages of several ranks, adds them up
and encodes the sum. If it is also marked "symmetric", it reads the messages from the memory of the
other ranks and writes the result there (`path=symmetric`).

* **Registers × threads** is the number of registers per thread and the number of threads. Their
  product is at most 32 768, which is half of the registers of a multiprocessor.
* **Stack** is the size of the stack, in bytes per thread. Only symmetric kernels may use a stack,
  of at most 40 bytes. No kernel calls a subroutine.
* **SASS per value** is the number of machine instructions per value, in the code that handles whole
  tiles (full blocks of values). A number in parentheses counts all instructions of a kernel that
  reads only a few values. The bounds are:
  * for encoding: 50
  * for decoding: 25, but 26 for float8, and 30 for short rows (64 values), because each row has two
    scales that must be read
  * for summing and encoding: 75, but 92 for symmetric kernels, which must first read the addresses
    of the memory of the other ranks
* **Error** shows how accurately the kernels compute the mean of the messages of three ranks. It is
  the largest difference from the same mean in double precision, divided by the largest value. The
  first number is for float32 gradients, and the second is for bfloat16 gradients. Some of the
  gradients have rows of odd length.
"""


def page() -> Iterator[str]:
    """Yield the lines of the page of results."""
    round_products_once()
    yield NOTES
    found = compiled_outside([(name, arch, ()) for name in CASES for arch in ARCHITECTURES])
    rows = dict.fromkeys((each.codec, each.kernel) for each in found)
    lines = list[list[str]]()
    for codec, kernel in rows:
        own = [each for each in found if (each.codec, each.kernel) == (codec, kernel)]
        few = own[0].work == FEW
        per_value = _each([f"({e.instructions:.0f})" if few else str(e.instructions) for e in own])
        registers = _each([str(each.registers) for each in own])
        name = codec.partition(",")[0]
        errors = (error_of(name, dtype) for dtype in (torch.float32, torch.bfloat16))
        error = " / ".join(f"{each:.0e}" for each in errors)
        called, *about = kernel.partition(",")
        cells = f"`{called}`{''.join(about)}", f"{registers} × {own[0].threads}"
        lines.append([codec, *cells, _each([str(e.stack) for e in own]), per_value, error])
    header = "codec", "kernel", "registers × threads", "stack", "SASS per value", "error"
    yield from markdown(header, lines)


def _each(texts: list[str]) -> str:
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(list(compiled(json.loads(sys.argv[1])))))
    else:
        print("\n".join(page()))

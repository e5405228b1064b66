"""Peaks of devices, as their makers state them; of a CPU, as its clock and its registers give them.

And rates that this machine's processor reaches in large products, measured in a moment: a clock
that a virtual machine reports is not the one that the processor runs at, and a library may not use
its widest registers (MKL has AVX2 alone for processors that are not Intel's). So what estimates
start from is measured, for each kind of product apart.

torch is imported only to ask or measure this machine.
"""

from __future__ import annotations

import re
import timeit
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

T = 1e12
GB = 1e9
# Floating-point operations of a core in a cycle: two units, the lanes of a register, and a
# multiply-add for two. Processors that have one unit, or half-wide ones, reach half of it.
CPU_FLOPS_PER_CYCLE = {"AVX512": 2 * 16 * 2, "AVX2": 2 * 8 * 2, "DEFAULT": 2 * 4 * 2}
MAX_CLOCK = Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")  # kHz
CPUINFO = Path("/proc/cpuinfo")
TRIALS = 7  # the fastest counts: others were disturbed, or found their memory unmapped
SIDE = 768  # of square matrices: 2.3 MB each
BATCH, CHANNELS, PIXELS, KERNEL = 8, 128, 28, 3  # a convolution of VGG-16 at an eighth of its area
COPIED_AT_ONCE = 16_000_000  # bytes that are timed together, so that the clock's own time is small


@dataclass(frozen=True)
class Peak:
    """Peak rates of one device.

    Attributes:
        pattern: regular expression of the name that torch reports, without NVIDIA and Tesla.
        flops_per_s: dense, by precision: fp32 (IEEE, no tensor cores), tf32, bf16, fp16.
        bandwidth_bytes_per_s: of its memory; None: unknown.
        source: document that states them.
    """

    pattern: str
    flops_per_s: Mapping[str, float]
    bandwidth_bytes_per_s: float | None
    source: str

    def times(self, num_devices: int) -> Peak:
        """Return the peak of so many of these devices together."""
        return replace(
            self,
            flops_per_s={key: num_devices * rate for key, rate in self.flops_per_s.items()},
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s
            and num_devices * self.bandwidth_bytes_per_s,
            source=f"{num_devices} x {self.source}",
        )


def _gpu(
    pattern: str,
    source: str,
    gb_per_s: float,
    fp32: float | None = None,
    tf32: float | None = None,
    half: float | None = None,
    fp16: float | None = None,
) -> Peak:
    """Make a row of the table from TFLOP/s; `half` is of bf16 and fp16."""
    given = {"fp32": fp32, "tf32": tf32, "bf16": half, "fp16": fp16 or half}
    rates = {name: rate * T for name, rate in given.items() if rate}
    return Peak(pattern, rates, gb_per_s * GB, source)


# Figures that a datasheet gives with sparsity are halved; one that is not certain is left out.
AMPERE, HOPPER = "NVIDIA A100 datasheet", "NVIDIA H100 datasheet"
GPUS = (
    _gpu(
        r"GeForce GTX TITAN X",
        "NVIDIA, GeForce GTX TITAN X specifications: 3072 cores at 1.0 GHz, 336.5 GB/s",
        *(336.5, 6.144),
    ),
    _gpu(r"P100-SXM2-16GB", "NVIDIA Tesla P100 datasheet", 732, 10.6, fp16=21.2),
    _gpu(r"P100-PCIE-16GB", "NVIDIA Tesla P100 PCIe datasheet", 732, 9.3, fp16=18.7),
    _gpu(r"P100-PCIE-12GB", "NVIDIA Tesla P100 PCIe datasheet", 549, 9.3, fp16=18.7),
    _gpu(r"V100-SXM[23]-\d+GB.*", "NVIDIA Tesla V100 datasheet", 900, 15.7, fp16=125),
    _gpu(r"V100-PCIE-\d+GB", "NVIDIA Tesla V100 datasheet", 900, 14.0, fp16=112),
    _gpu(r"T4", "NVIDIA T4 datasheet", 320, 8.1, fp16=65),
    _gpu(r"A100-(SXM4|PCIE)-40GB", AMPERE, 1555, 19.5, 156, 312),
    _gpu(r"A100-SXM4-80GB", AMPERE, 2039, 19.5, 156, 312),
    _gpu(r"A100 80GB PCIe", AMPERE, 1935, 19.5, 156, 312),
    _gpu(r"A10", "NVIDIA A10 datasheet", 600, 31.2, 62.5, 125),
    _gpu(r"L4", "NVIDIA L4 datasheet", 300, 30.3, 60, 121),
    _gpu(r"L40S", "NVIDIA L40S datasheet", 864, 91.6, 183, 362),
    _gpu(r"H100 80GB HBM3", HOPPER, 3350, 67, 494.5, 989.5),
    _gpu(r"H100 PCIe", HOPPER, 2000, 51, 378, 756),
    _gpu(r"H200", "NVIDIA H200 datasheet", 4800, 67, 494.5, 989.5),
    _gpu(r"B200", "NVIDIA Blackwell architecture technical brief", 8000, 80, 1100, 2250),
    _gpu(r"GeForce RTX 3090", "NVIDIA Ampere GA102 whitepaper", 936, 35.6, 35.6, 71),
    _gpu(r"GeForce RTX 4090", "NVIDIA Ada GPU architecture whitepaper", 1008, 82.6, 82.6, 165.2),
)


def gpu_peak(name: str) -> Peak | None:
    """Return the peak of a GPU by the name that torch reports; None: it is not in the table."""
    plain = re.sub(r"^(NVIDIA |Tesla )+", "", name)
    return next((each for each in GPUS if re.fullmatch(each.pattern, plain)), None)


def arithmetic_of(precision: str, tf32: bool) -> str:
    """Return the key of a peak that runs of these settings compute at."""
    return "tf32" if precision == "fp32" and tf32 else precision


def cpu_peak(num_threads: int) -> Peak | None:
    """Estimate the fp32 peak of threads on cores of this machine's own; None: no clock is known.

    That is threads x clock x operations in a cycle. The clock is the highest that the kernel
    reports, which in a virtual machine may be below what the processor reaches.
    """
    import torch

    from lab.measure.environment import cpu_model

    capability, clock_hz = torch.backends.cpu.get_cpu_capability(), cpu_clock_hz()
    if clock_hz is None:
        return None
    per_cycle = CPU_FLOPS_PER_CYCLE.get(capability, CPU_FLOPS_PER_CYCLE["DEFAULT"])
    cores = f"{num_threads} core{'s' if num_threads > 1 else ''}"
    source = f"estimated: {cores} x {clock_hz / 1e9:.2f} GHz x {per_cycle} FLOP ({capability})"
    return Peak(cpu_model(), {"fp32": num_threads * clock_hz * per_cycle}, None, source)


def cpu_clock_hz() -> float | None:
    """Return the highest clock of a core that the kernel reports; None: it reports none."""
    try:
        return 1e3 * float(MAX_CLOCK.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        pass
    try:
        found = re.findall(
            r"^cpu MHz\s*: ([\d.]+)", CPUINFO.read_text(encoding="utf-8"), re.MULTILINE
        )
    except OSError:
        return None
    return 1e6 * max(map(float, found)) if found else None


@dataclass(frozen=True)
class Rates:
    """Floating-point operations per second, fp32; a multiply-add is two."""

    product: float
    convolution: float


@lru_cache
def measured_rates(num_threads: int) -> Rates:
    """Measure the rates of so many threads, at most once in a process: 0.2 s on one core."""
    import torch
    from torch.nn.functional import conv2d

    a, b = torch.rand(2, SIDE, SIDE)
    images = torch.rand(BATCH, CHANNELS, PIXELS, PIXELS)
    filters = torch.rand(CHANNELS, CHANNELS, KERNEL, KERNEL)
    convolved = 2 * images.numel() * CHANNELS * KERNEL**2
    with on_threads(num_threads):
        return Rates(
            2 * SIDE**3 / _fastest_s(lambda: a @ b),
            convolved / _fastest_s(lambda: conv2d(images, filters, padding=KERNEL // 2)),
        )


def copy_rate(num_bytes: int, num_threads: int) -> float:
    """Measure the bytes per second, read and written, of copies of so many bytes.

    Small copies stay in a cache, large ones go to memory.
    """
    import torch

    a = torch.ones(num_bytes // 8)  # half of the bytes are read, half are written
    b = torch.empty_like(a)
    repeats = max(1, COPIED_AT_ONCE // num_bytes)
    with on_threads(num_threads):
        return repeats * (a.nbytes + b.nbytes) / _fastest_s(lambda: b.copy_(a), repeats)


@contextmanager
def on_threads(number: int) -> Iterator[None]:
    """Let torch compute on so many threads of the CPU, and afterwards on as many as before."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _fastest_s(compute: Callable[[], object], repeats: int = 1) -> float:
    """Return the seconds of so many calls together, in the fastest trial."""
    return min(timeit.repeat(compute, number=repeats, repeat=TRIALS))

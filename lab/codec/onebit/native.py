"""kernels.cpp, built at first use for this processor and kept in the user's cache."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("kernels.cpp")
OPTIONS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread")
# What torch says of the processor, ATEN_CPU_CAPABILITY heeded: what the compiler may use.
LEVELS = {"AVX512": ("-march=x86-64-v4",), "AVX2": ("-march=x86-64-v3",)}


class Kernels:
    """The functions of one build; see lab.codec.onebit.codec for what they do."""

    def __init__(self, library: ctypes.CDLL) -> None:
        address, number = ctypes.c_void_p, ctypes.c_int64
        self._encode, self._decode = library.onebit_encode, library.onebit_decode
        self._reduce = library.onebit_reduce
        self._encode.argtypes = [address] * 4 + [number] * 7
        self._decode.argtypes = [address] * 3 + [number] * 7
        self._reduce.argtypes = [address] * 2 + [number] * 3 + [address] * 3 + [number] * 4
        self._encode.restype = self._decode.restype = self._reduce.restype = None

    def encode(
        self,
        gradient: Tensor,
        residual: Tensor | None,
        threshold: str,
        scales: Tensor,
        bits: Tensor,
    ) -> None:
        self._encode(
            gradient.data_ptr(),
            None if residual is None else residual.data_ptr(),
            scales.data_ptr(),
            bits.data_ptr(),
            *gradient.shape,
            *_lines(scales, bits),
            threshold == "mean",
            torch.get_num_threads(),
        )

    def decode(self, scales: Tensor, bits: Tensor, out: Tensor, add: bool) -> None:
        self._decode(
            scales.data_ptr(),
            bits.data_ptr(),
            out.data_ptr(),
            *out.shape,
            *_lines(scales, bits),
            add,
            torch.get_num_threads(),
        )

    def reduce(
        self,
        scales: Tensor,
        bits: Tensor,
        total: Tensor,
        residual: Tensor | None,
        threshold: str,
        out_scales: Tensor,
        out_bits: Tensor,
    ) -> None:
        self._reduce(
            scales.data_ptr(),
            bits.data_ptr(),
            len(bits),
            scales.stride(0),
            bits.stride(0),
            None if residual is None else residual.data_ptr(),
            out_scales.data_ptr(),
            out_bits.data_ptr(),
            *total.shape,
            threshold == "mean",
            torch.get_num_threads(),
        )


def _lines(scales: Tensor, bits: Tensor) -> tuple[int, int, int]:
    """Rows of a line, and the distances between lines: float32 values, bytes."""
    return scales.shape[1], scales.stride(0), bits.stride(0)


@functools.cache
def build(level: str) -> Kernels | None:
    """The kernels for processors of `level`; None, and a warning, where they cannot be built.

    Args:
        level: as torch.backends.cpu.get_cpu_capability names it. One that is not in LEVELS gets
            what every processor can run.
    """
    options = (*OPTIONS, *LEVELS.get(level, ()))
    try:
        return Kernels(ctypes.CDLL(str(_built(compiler(), options))))
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        warn(f"its C++ cannot be built ({said.strip().splitlines()[0]})")
        return None


def warn(reason: str) -> None:
    """Say, once a host and in one line, why the codec is slow."""
    text = f"1-bit codec: {reason}; plain torch is used, which is many times slower"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        warnings.warn_explicit(text, UserWarning, __name__, 0)  # shows no line of source


def compiler() -> list[str]:
    """The command of the C++ compiler: CXX, c++ or g++."""
    return shlex.split(os.environ.get("CXX", "")) or [shutil.which("c++") or "g++"]


def _built(command: list[str], options: tuple[str, ...]) -> Path:
    cache = _cache()
    recipe = repr((command, options)).encode() + SOURCE.read_bytes()
    library = cache / f"onebit-{hashlib.sha256(recipe).hexdigest()[:16]}.so"
    if not library.exists():
        # Ranks that start together each build it, and the last one's stays: all are the same.
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            fresh = Path(folder) / library.name
            line = [*command, *options, str(SOURCE), "-o", str(fresh)]
            subprocess.run(line, check=True, capture_output=True, text=True)
            fresh.replace(library)
    return library


def _cache() -> Path:
    """The user's cache folder; where that cannot be written, one of the user's own in /tmp.

    Raises:
        OSError: somebody else has made the latter, or could write to it.
    """
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: a user without a home
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scaling-lab"
        cache.mkdir(parents=True, exist_ok=True)
        if os.access(cache, os.W_OK):
            return cache
    cache = Path(tempfile.gettempdir()) / f"scaling-lab-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    found = cache.lstat()  # what is loaded from here runs as this user
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError(f"{cache} is not a folder of this user alone")
    return cache

"""Compile any C++ source at its first use, for this processor, into the user's cache."""

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

HEADERS = Path(__file__).with_name("cpp")  # those that all codecs share
# Without contraction, a product is rounded before it is added, at each level alike.
OPTIONS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=off")
# Processor levels as torch names them, and the compiler options of each.
LEVELS = {"AVX512": ("-march=x86-64-v4",), "AVX2": ("-march=x86-64-v3",)}


@functools.cache
def load(source: Path, level: str) -> ctypes.CDLL | None:
    """Compile and load a C++ source; return None, after one warning, if it cannot be built.

    Args:
        source: may include headers (*.h) of its own folder and of HEADERS. A change of any of
            them, or of the source, compiles it again.
        level: from torch.backends.cpu.get_cpu_capability, which respects ATEN_CPU_CAPABILITY. A
        level outside LEVELS gets instructions that every processor has.
    """
    try:
        return ctypes.CDLL(str(_compiled(source, (*OPTIONS, *LEVELS.get(level, ())))))
    except (OSError, subprocess.CalledProcessError) as error:
        message = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[0]
        warn_slow(f"{source.parent.name}/{source.name} cannot be built ({message})")
        return None


def warn_slow(reason: str) -> None:
    """Warn, in one line on the first rank of a host, why a codec falls back to plain torch."""
    text = f"{reason}; plain torch is used, which is many times slower"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        warnings.warn_explicit(text, UserWarning, __name__, 0)  # shows no line of source


def compiler() -> list[str]:
    """Return the command of the C++ compiler: CXX, c++ or g++."""
    return shlex.split(os.environ.get("CXX", "")) or [shutil.which("c++") or "g++"]


def _compiled(source: Path, options: tuple[str, ...]) -> Path:
    command, cache = compiler(), cache_folder()
    headers = [header for folder in (source.parent, HEADERS) for header in folder.glob("*.h")]
    texts = [path.read_bytes() for path in (source, *sorted(headers))]
    recipe = repr((command, options, texts)).encode()
    name = f"{source.parent.name}-{source.stem}-{_hash(recipe)}"
    for library in cache.glob(f"{name}-*.so"):
        if _is_own(library) and library.stem == f"{name}-{_hash(library.read_bytes())}":
            return library
    # Ranks that start together all build it; the last build stays, and all are equal.
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        fresh = Path(folder) / "fresh.so"
        line = [*command, *options, f"-I{HEADERS}", str(source), "-o", str(fresh)]
        subprocess.run(line, check=True, capture_output=True, text=True)
        fresh.chmod(0o700)
        return fresh.replace(cache / f"{name}-{_hash(fresh.read_bytes())}.so")


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _is_own(path: Path) -> bool:
    """Return whether a file or folder is this user's, and no other can write to it."""
    status = path.lstat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def cache_folder() -> Path:
    """Return the user's cache folder or, if others can write to it or none can, one in /tmp.

    Raises:
        OSError: another user owns the latter, or can write to it.
    """
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: no home directory
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scaling-lab"
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(cache, os.W_OK) and _is_own(cache):  # what lies there runs as this user
            return cache
    cache = Path(tempfile.gettempdir()) / f"scaling-lab-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    status = cache.lstat()  # libraries loaded from here run as this user
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise OSError(f"{cache} is not a folder that only this user can write to")
    return cache

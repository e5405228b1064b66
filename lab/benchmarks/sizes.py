"""Sizes of tensors in bytes, as settings and figures write them: 64KiB is 65536, 64kB is 64000."""

from __future__ import annotations

import re

from lab.settings.errors import ConfigError

# Larger units first; of a pair, the one that has powers of two. IEC 80000-13.
UNITS = {
    "GiB": 2**30,
    "GB": 10**9,
    "MiB": 2**20,
    "MB": 10**6,
    "KiB": 2**10,
    "kB": 10**3,
    "B": 1,
}
BYTES = {unit.lower(): num_bytes for unit, num_bytes in UNITS.items()}
VALUE_BYTES = 4  # everything that is measured is float32


def sizes_in_bytes(key: str, text: str) -> list[int]:
    """Parse `[4KiB,1MB]`, in upper or lower case, into bytes, in the order given.

    Raises:
        ConfigError: one of them is not a whole number of float32 values.
    """
    sizes = []
    for word in text.strip("[]").split(","):
        match = re.fullmatch(r"(\d+)([a-z]+)", word.strip().lower())
        size = int(match[1]) * BYTES.get(match[2], 0) if match else 0
        if size == 0 or size % VALUE_BYTES:
            raise ConfigError(
                f"{key}={text}: {word.strip()!r} is not a size; allowed are whole float32 values "
                "in KiB, MiB, GiB (powers of 1024), kB, MB, GB (of 1000) or B, as in [4KiB,1MiB]"
            )
        sizes.append(size)
    return sizes


def size_name(size: int) -> str:
    """Write a number of bytes in the largest unit that leaves no fraction: 64 KiB, 1 MB."""
    unit = next(unit for unit, num_bytes in UNITS.items() if size % num_bytes == 0)
    return f"{size // UNITS[unit]} {unit}"

"""Bytes that the network interfaces of this process have sent, as Linux counts them."""

from __future__ import annotations

from pathlib import Path

COUNTERS = Path("/proc/net/dev")  # of this process's network namespace
SENT_BYTES = 8  # column after the interface's name


def sent_bytes() -> int | None:
    """Return the bytes that all interfaces have sent since they exist; None if nobody counts.

    Loopback is one of them. Each packet's headers are included, and so is what other processes
    send.
    """
    try:
        lines = COUNTERS.read_text().splitlines()[2:]
    except OSError:
        return None
    return sum(int(line.partition(":")[2].split()[SENT_BYTES]) for line in lines)


def namespace() -> int:
    """Return the number of this process's network namespace: its processes share counters."""
    return Path("/proc/self/ns/net").stat().st_ino

"""Bytes that a network interface of this host has sent, as the kernel counts them."""

from __future__ import annotations

from pathlib import Path

COUNTERS = Path("/proc/net/dev")  # of this process's network namespace
SENT = 8  # columns after the name: eight of receiving come first


def sent_bytes(interface: str) -> int | None:
    """Return the bytes of packets that `interface` has sent since it is there; None: unknown.

    Headers count, once for each packet that TCP hands over whole; lost bytes count again.
    """
    if not COUNTERS.exists():
        return None
    for line in COUNTERS.read_text().splitlines():
        name, colon, counts = line.partition(":")
        if colon and name.strip() == interface:
            return int(counts.split()[SENT])
    return None

"""Bytes that the network interfaces of this process have sent, as Linux counts them."""

from __future__ import annotations

from pathlib import Path

COUNTERS = Path("/proc/net/dev")  # of this process's network namespace
NAMESPACE = Path("/proc/self/ns/net")
SENT_BYTES = 8  # column after the interface's name


def sent_bytes(interface: str | None = None) -> int | None:
    """Return the bytes that an interface has sent since it exists; None if nobody counts them.

    Headers are included, once for each packet that TCP hands over whole, and so is what other
    processes send; bytes that are lost count again.

    Args:
        interface: its name, such as "lo"; None: the sum of all, of which loopback is one.
    """
    try:
        lines = COUNTERS.read_text().splitlines()[2:]
    except OSError:
        return None
    sent = {
        name.strip(): int(counts.split()[SENT_BYTES])
        for name, _, counts in (line.partition(":") for line in lines)
    }
    return sum(sent.values()) if interface is None else sent.get(interface)


def namespace() -> int:
    """Return the number of this process's network namespace, whose processes share counters.

    0: this system has none.
    """
    return NAMESPACE.stat().st_ino if NAMESPACE.exists() else 0

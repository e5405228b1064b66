"""Ports for servers that are started later."""

from __future__ import annotations

import random
import socket

BELOW_DYNAMIC = range(10_000, 30_000)  # Linux gives none of these to a socket that asks for any


def free_port() -> int:
    """Return a port that nothing holds, and that Gloo and the like will not be given until then."""
    for port in random.sample(BELOW_DYNAMIC, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"100 ports of {BELOW_DYNAMIC} are taken")

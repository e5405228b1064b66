"""Two hosts on one machine: network namespaces where they may be made, or else loopback."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """Where a command runs: what stands before it, and under which address others reach it."""

    prefix: tuple[str, ...]
    address: str
    interface: str


@contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Two hosts with a cable between them. They are gone afterwards, and what runs on them."""
    names = [f"lab-{uuid.uuid4().hex[:8]}" for _ in range(2)]
    made = [name for name in names if _ip("netns", "add", name)]
    try:
        cable = ("type", "veth", "peer", "name", "cable", "netns", names[1])
        if len(made) == 2 and _ip("link", "add", "cable", "netns", names[0], *cable):
            yield [_plug_in(name, f"10.77.0.{number}") for number, name in enumerate(names, 1)]
        else:
            yield [Host((), "127.0.0.1", "lo")] * 2
    finally:
        for name in made:
            _end_processes(name)
            _ip("netns", "delete", name)


def _plug_in(name: str, address: str) -> Host:
    prefix = ("ip", "netns", "exec", name)
    for command in (
        ("addr", "add", f"{address}/24", "dev", "cable"),
        ("link", "set", "cable", "up"),
        ("link", "set", "lo", "up"),
    ):
        subprocess.run([*prefix, "ip", *command], check=True)
    return Host(prefix, address, "cable")


def _end_processes(name: str) -> None:
    pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
    for pid in pids.split():
        os.kill(int(pid), 9)


def _ip(*arguments: str) -> bool:
    try:
        return subprocess.run(["ip", *arguments], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False

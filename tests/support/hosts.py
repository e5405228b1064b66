"""Hosts on one machine: network namespaces if permitted, otherwise loopback."""

from __future__ import annotations

import ctypes
import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Host:
    """A place to run commands: the command prefix, and the address for other hosts."""

    prefix: tuple[str, ...]
    address: str
    interface: str


@contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Make two hosts joined by a cable; remove them and their processes afterwards."""
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


# A loopback interface that no other process uses, for as long as the pipe is open.
OWN_NETWORK = ("unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec cat")


def has_own_network() -> bool:
    """Return whether this user may create network namespaces here."""
    try:
        return subprocess.run(OWN_NETWORK, capture_output=True, input=b"").returncode == 0
    except FileNotFoundError:
        return False


@contextmanager
def own_network() -> Iterator[int]:
    """Start a process in a separate network namespace; yield its id, for `enter_network`."""
    with subprocess.Popen(OWN_NETWORK, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"up\n"
        yield holder.pid


def enter_network(pid: int) -> None:
    """Move this thread, and those that it starts later, to the network of process `pid`.

    Raises:
        OSError: not permitted, unless this is its network already.
    """
    theirs = Path(f"/proc/{pid}/ns/net")
    if theirs.readlink() == Path("/proc/self/ns/net").readlink():
        return
    with theirs.open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")


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

"""Check of a cluster: measured rates of its links against those asked for."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lab.cluster import endpoint
from lab.cluster.network import SWITCH, address, on_host
from lab.cluster.settings import Cluster, bits_per_s

TOLERANCE = 0.07
SLACK_S = 0.001  # the machine's own part of a delay
TRIES = 3  # a busy machine may slow a link down


@dataclass
class Endpoint:
    """A process of lab.cluster.endpoint on one host."""

    host: int

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            on_host(self.host, sys.executable, endpoint.__file__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.answer()

    def ask(self, task: str) -> None:
        assert self.process.stdin
        print(task, file=self.process.stdin, flush=True)

    def answer(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()


def check(cluster: Cluster) -> int:
    """Measure each link alone, between its host and the switch; print a table.

    Returns:
        0; 1 if any link is further than TOLERANCE from what was asked for.
    """
    hosts = [Endpoint(host) for host in range(cluster.num_hosts)]
    print(f"{'host':<6}{'asked':>12}{'up Mb/s':>12}{'down Mb/s':>12}{'to h0 ms':>12}  verdict")
    verdicts = []
    with socket.create_server(("", endpoint.PORT)) as listener:
        for host, rate in zip(hosts, cluster.rates, strict=True):
            up = _measured(rate, partial(_up, host, listener))
            down = _measured(rate, partial(_down, host))
            delay_s = _delay(host, hosts[0]) if host.host else None
            verdicts.append(_verdict(cluster, rate, (up, down), delay_s))
            to_first = "" if delay_s is None else f"{1000 * delay_s:.3f}"
            print(
                f"{f'h{host.host}':<6}{rate or 'no limit':>12}{up / 1e6:>12.1f}{down / 1e6:>12.1f}"
                f"{to_first:>12}  {verdicts[-1]}",
                flush=True,
            )
    return int("OFF" in verdicts)


def _measured(rate: str | None, measure: Callable[[], float]) -> float:
    """Measure bits per second; repeat if a busy machine may have slowed the link."""
    found = 0.0
    for _ in range(TRIES):
        found = max(found, measure())
        if not rate or _is_near(found, rate):
            break
    return found


def _up(host: Endpoint, listener: socket.socket) -> float:
    host.ask(f"send {SWITCH}")
    found = endpoint.receive(listener)
    host.answer()
    return found


def _down(host: Endpoint) -> float:
    host.ask("receive")
    endpoint.send(address(host.host))
    return float(host.answer())


def _delay(host: Endpoint, first: Endpoint) -> float:
    first.ask("echo")
    host.ask(f"ping {address(first.host)}")
    found = float(host.answer())
    first.answer()
    return found


def _verdict(
    cluster: Cluster, rate: str | None, found: tuple[float, float], delay_s: float | None
) -> str:
    near = [_is_near(one, rate) for one in found if rate]
    if cluster.delay_ms and delay_s is not None:
        asked_s = cluster.delay_ms / 1000
        near.append(0 <= delay_s - asked_s <= TOLERANCE * asked_s + SLACK_S)
    return ("ok" if all(near) else "OFF") if near else "reported"


def _is_near(found: float, rate: str) -> bool:
    return abs(found / bits_per_s(rate) - 1) <= TOLERANCE

"""Check the rates of a cluster's links by measurement."""

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
SLACK_S = 0.001  # seconds: the machine's own part of a delay
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
        0; 1 if a link differs from the requested rate by more than TOLERANCE.
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
    seconds = float(host.answer())
    first.answer()
    return seconds


def _verdict(
    cluster: Cluster, rate: str | None, rates: tuple[float, float], delay_s: float | None
) -> str:
    checks = [_is_near(measured, rate) for measured in rates if rate]
    if cluster.delay_ms and delay_s is not None:
        asked_s = cluster.delay_ms / 1000
        checks.append(0 <= delay_s - asked_s <= TOLERANCE * asked_s + SLACK_S)
    return ("ok" if all(checks) else "OFF") if checks else "reported"


def _is_near(measured: float, rate: str) -> bool:
    return abs(measured / bits_per_s(rate) - 1) <= TOLERANCE

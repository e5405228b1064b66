"""Check the rates of a cluster's links by measurement.

As a command of its own it is one end of the measured connections, on a host of the cluster: it
reads tasks from standard input, one a line, and answers each with a number.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

from lab.cluster.network import SWITCH, address, on_host
from lab.cluster.settings import Cluster, bits_per_s

TOLERANCE = 0.07
SLACK_S = 0.001  # the machine's own part of a delay
TRIES = 3  # a busy machine may slow a link down
PORT = 29500
SKIPPED_S = 0.2  # which TCP needs to reach full speed
COUNTED_S = 1.0
NUM_PINGS = 200


class Endpoint:
    """The other end: a process on one host."""

    def __init__(self, host: int) -> None:
        self.host = host
        self.process = subprocess.Popen(
            on_host(host, sys.executable, "-m", "lab.cluster.check"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

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
    for host in hosts:
        host.answer()  # it is ready
    print(f"{'host':<6}{'asked':>12}{'up Mb/s':>12}{'down Mb/s':>12}{'to h0 ms':>12}  verdict")
    verdicts = list[str]()
    with socket.create_server(("", PORT)) as listener:
        for host, rate in zip(hosts, cluster.rates, strict=True):

            def up(host: Endpoint = host) -> float:
                host.ask(f"send {SWITCH}")
                found = receive(listener)
                host.answer()
                return found

            def down(host: Endpoint = host) -> float:
                host.ask("receive")
                send(address(host.host))
                return float(host.answer())

            rates = _measured(rate, up), _measured(rate, down)
            delay_s = _delay(host, hosts[0]) if host.host else None
            verdicts.append(_verdict(cluster, rate, rates, delay_s))
            to_first = "" if delay_s is None else f"{1000 * delay_s:.3f}"
            measured = "".join(f"{each / 1e6:>12.1f}" for each in rates)
            print(
                f"{f'h{host.host}':<6}{rate or 'no limit':>12}{measured}{to_first:>12}"
                f"  {verdicts[-1]}",
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


def receive(listener: socket.socket) -> float:
    """Accept a connection and return the bits per second of TCP payload that it brings."""
    connection, _ = listener.accept()
    with connection:
        connection.recv(1)
        _rate(connection, SKIPPED_S)
        return _rate(connection, COUNTED_S)


def _rate(connection: socket.socket, seconds: float) -> float:
    buffer, num_bytes = bytearray(1 << 20), 0
    began = now = time.monotonic()
    while now < began + seconds:
        num_bytes += connection.recv_into(buffer)
        now = time.monotonic()
    return 8 * num_bytes / (now - began)


def send(to: str) -> None:
    """Send to an address until it closes the connection."""
    with socket.create_connection((to, PORT)) as connection:
        data = bytes(1 << 20)
        try:
            while True:
                connection.sendall(data)
        except ConnectionError:
            return


def echo(listener: socket.socket) -> None:
    """Accept a connection and echo it until it ends."""
    connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := connection.recv(1):
            connection.sendall(data)


def ping(to: str) -> float:
    """Return the median seconds of one byte to an address: half of a round trip."""
    with socket.create_connection((to, PORT)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = list[float]()
        for _ in range(NUM_PINGS):
            began = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            times.append(time.perf_counter() - began)
    return median(times) / 2


def serve() -> None:
    with socket.create_server(("", PORT)) as listener:
        print("ready", flush=True)
        for line in sys.stdin:
            task, _, to = line.strip().partition(" ")
            if task in ("receive", "echo"):
                print((receive if task == "receive" else echo)(listener), flush=True)
            else:
                print((ping if task == "ping" else send)(to), flush=True)


if __name__ == "__main__":
    serve()

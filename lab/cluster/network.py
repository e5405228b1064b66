"""The network of an emulated cluster: made by commands of iproute2, and measured.

Every host is a network namespace h0, h1, ... whose eth0 is one end of a veth pair; the other ends,
link0, link1, ... are ports of a bridge in the namespace around them, which has an address too.

As a command of its own this is one end of the measured connections, on a host of the cluster: it
reads tasks from standard input, one a line, and answers each with a number.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from lab.cluster.settings import Cluster, LinkChange, bits_per_s

BURST_S = 0.001  # seconds of a link's rate, so that late timers lose nothing
LEAST_BURST_BYTES = 16_384
LARGEST_BYTES = 65_536  # that TCP passes at a time
WHOLE = 0.8  # share of a burst that passes whole with the headers of all its frames
SWITCH = "10.77.0.1"
SUBNET = "10.77.0.0/24"
SLOW_START = "/proc/sys/net/ipv4/tcp_slow_start_after_idle"
AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
INTERFACE = "eth0"  # of every host
QUEUE = "50ms"  # longest queue of a link; the rest is dropped
TOLERANCE = 0.07  # of a rate that is measured
SLACK_S = 0.001  # the machine's own part of a delay
TRIES = 3  # a busy machine may slow a link down
PORT = 29500  # of the measured connections
SKIPPED_S = 0.2  # which TCP needs to reach full speed
COUNTED_S = 1.0
NUM_PINGS = 200


def address(host: int) -> str:
    """Return the address of a host's eth0. They sort as text like hosts: torchrun ranks by it."""
    return f"10.77.0.{101 + host}"


def on_host(host: int, *command: str) -> list[str]:
    """Prefix `command` so that it runs on a host."""
    return ["ip", "netns", "exec", f"h{host}", *command]


def build(cluster: Cluster) -> Iterator[list[str]]:
    """List the commands that make the network, in a network and a mount namespace of its own."""
    yield ["mount", "-t", "tmpfs", "run", "/run"]  # where ip keeps namespaces, and users may not
    yield ["mkdir", "/run/netns"]
    yield ["ip", "link", "set", "lo", "up"]
    yield ["ip", "link", "add", "switch", "type", "bridge"]
    yield ["ip", "address", "add", f"{SWITCH}/24", "dev", "switch"]
    yield ["ip", "link", "set", "switch", "up"]
    for host, rate in enumerate(cluster.rates):
        end = ["peer", "name", INTERFACE, "netns", f"h{host}"]
        yield ["ip", "netns", "add", f"h{host}"]
        yield ["ip", "link", "add", f"link{host}", "type", "veth", *end]
        yield ["ip", "-n", f"h{host}", "address", "add", f"{address(host)}/24", "dev", INTERFACE]
        yield ["ip", "-n", f"h{host}", "link", "set", "lo", "up"]
        yield ["ip", "-n", f"h{host}", "link", "set", INTERFACE, "up"]
        yield ["ip", "link", "set", f"link{host}", "master", "switch", "up"]
        yield from govern_tcp(host)
        if rate:
            yield from limit(host, rate)
        if cluster.needs_netem:
            yield impair(cluster, host)


def govern_tcp(host: int) -> Iterator[list[str]]:
    """Configure TCP so that it fills links as on most clusters, regardless of this machine.

    An idle connection keeps its window. CUBIC is Linux's default; BBR, which some machines use,
    estimates the rate anew after each pause between exchanges, and leaves 3 to 20 % of a link
    unused. A route may select CUBIC in any namespace.
    """
    yield on_host(host, "sh", "-c", f"echo 0 > {SLOW_START}")
    if "cubic" in AVAILABLE.read_text(encoding="utf-8").split():
        route = [SUBNET, "dev", INTERFACE, "src", address(host), "congctl", "cubic"]
        yield ["ip", "-n", f"h{host}", "route", "replace", *route]


def limit(host: int, rate: str) -> Iterator[list[str]]:
    """Limit a host's link in both directions: at the host's end and at the switch's.

    tbf counts bytes of Ethernet frames. TCP passes it up to 64 KiB at a time, which tbf splits into
    frames if the burst is smaller: each frame would then be handled and acknowledged alone, and
    four hosts at 300 Mb/s would keep two cores busy. So TCP passes no more than fits.
    """
    burst = max(LEAST_BURST_BYTES, round(bits_per_s(rate) / 8 * BURST_S))
    largest = str(min(LARGEST_BYTES, round(WHOLE * burst)))
    yield ["ip", "-n", f"h{host}", "link", "set", INTERFACE, "gso_max_size", largest]
    yield ["ip", "link", "set", f"link{host}", "gso_max_size", largest]
    shape = ["root", "handle", "1:", "tbf", "rate", rate, "burst", f"{burst}b", "latency", QUEUE]
    yield ["tc", "-n", f"h{host}", "qdisc", "replace", "dev", INTERFACE, *shape]
    yield ["tc", "qdisc", "replace", "dev", f"link{host}", *shape]


def impair(cluster: Cluster, host: int) -> list[str]:
    """Delay and drop packets that a host sends: once on the way to any other host."""
    netem = ["netem", "delay", f"{cluster.delay_ms:g}ms", "loss", f"{cluster.loss_percent:g}%"]
    where = ["parent", "1:"] if cluster.rates[host] else ["root"]
    return ["tc", "-n", f"h{host}", "qdisc", "add", "dev", INTERFACE, *where, *netem]


def change_link(event: LinkChange) -> Iterator[list[str]]:
    """List the commands that change a host's link while it is in use."""
    if event.sets_rate:
        yield from limit(event.host, event.to)
    else:
        yield ["ip", "link", "set", f"link{event.host}", event.to]


def name_hosts(cluster: Cluster) -> None:
    """Give addresses names, which torchrun's store resolves, in IPv6's form too."""
    lines = [Path("/etc/hosts").read_text(encoding="utf-8")]
    for host in range(cluster.num_hosts):
        lines += [f"{address(host)} h{host}", f"::ffff:{address(host)} h{host}"]
    hosts = Path("/run/hosts")
    hosts.write_text("\n".join([*lines, ""]), encoding="utf-8")
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)


def execute(commands: Iterator[list[str]]) -> None:
    """Run commands one after the other; one that fails has printed why."""
    for command in commands:
        subprocess.run(command, check=True)


class Endpoint:
    """The other end: a process on one host."""

    def __init__(self, host: int) -> None:
        self.host = host
        self.process = subprocess.Popen(
            on_host(host, sys.executable, "-m", "lab.cluster.network"),
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

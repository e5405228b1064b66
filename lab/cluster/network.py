"""The network of an emulated cluster, as command lines of iproute2.

Every host is a network namespace h0, h1, ... whose eth0 is one end of a veth pair; the other ends,
link0, link1, ... are ports of a bridge in the namespace around them, which has an address too.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

from lab.cluster.settings import Change, Cluster, bits_per_s

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
    if "cubic" in AVAILABLE.read_text().split():
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


def change_link(event: Change) -> Iterator[list[str]]:
    """List the commands that change a host's link while it is in use."""
    if event.sets_rate:
        yield from limit(event.host, event.to)
    else:
        yield ["ip", "link", "set", f"link{event.host}", event.to]


def name_hosts(cluster: Cluster) -> None:
    """Give addresses names, which torchrun's store resolves, in IPv6's form too."""
    lines = [Path("/etc/hosts").read_text()]
    for host in range(cluster.num_hosts):
        lines += [f"{address(host)} h{host}", f"::ffff:{address(host)} h{host}"]
    hosts = Path("/run/hosts")
    hosts.write_text("\n".join([*lines, ""]))
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)


def execute(commands: Iterator[list[str]]) -> None:
    """Run commands one after the other; one that fails has printed why."""
    for command in commands:
        subprocess.run(command, check=True)

"""Bytes of an exchange: by its formula, as Comm counts them, and as an interface does."""

from __future__ import annotations

import math
import platform
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.distributed.launcher import Nodes, each_alone
from lab.simulate.costs import BY_ITSELF, class_of, payload_bytes
from lab.simulate.hardware import Hardware, Link
from lab.simulate.network import Network

TOLERANCE = 0.05  # of the formula, and of an interface's count: headers, acknowledgements
SLACK_BYTES = 16_384  # of control messages: stores, barriers, headers of short ones
ENOUGH_BYTES = 10 * SLACK_BYTES  # of all ranks, to be told from those
BLOCK_BYTES = 1032  # by which padding may lengthen a rank's part of a bucket, in each of two stages
COUNTERS = Path("/proc/net/dev")  # by Linux, of the interfaces of this process's network namespace
NAMESPACE = Path("/proc/self/ns/net")
SENT_BYTES = 8  # column after the interface's name
# Payload bytes are the same over any links.
ANY_LINK = Link(0.0, 1e9)
ANY_LINKS = Hardware("any", "any links", "gloo", 1, ANY_LINK, ANY_LINK, math.inf)
Bucket = tuple[list[tuple[int, ...]], int]  # shapes of its values, and the bytes of each


class ByteCounter:
    """Bytes that one rank sends, and that its interfaces send, from `start` to `stop`."""

    def start(self, sent: int) -> None:
        """Begin to count; `sent` is the payload so far."""
        self._sent, self._before = sent, _interface_bytes()

    def stop(self, sent: int) -> Tensor:
        """Return payload; interfaces' counts before and after, of lo and of all; and where."""
        after = _interface_bytes()
        host = zlib.crc32(platform.node().encode())
        row = [sent - self._sent, *self._before, *after, namespace(), host]
        return torch.tensor(row, dtype=torch.float64)


@dataclass(frozen=True)
class ExchangeTraffic:
    """Bytes that one exchange moved.

    Attributes:
        payload: bytes by rank that were handed to the network.
        counted: bytes of all ranks that crossed the interfaces; None: no interface tells.
        why: the reason for None; else the interface's name.
    """

    payload: tuple[int, ...]
    counted: float | None
    why: str


def moved(rows: Tensor, backend: str) -> ExchangeTraffic:
    """Combine the results of `ByteCounter.stop` of all ranks: [N, 7]."""
    payload = tuple(int(each) for each in rows[:, 0].tolist())
    if backend != "gloo":
        return ExchangeTraffic(
            payload, None, f"{backend} does not have to send over a network interface"
        )
    if len(set(rows[:, 6].tolist())) > 1:
        return ExchangeTraffic(payload, None, "the hosts' interfaces also carry other traffic")
    if not COUNTERS.exists():
        return ExchangeTraffic(payload, None, f"no {COUNTERS} here")
    places = rows[:, 5]
    inside = [rows[places == place] for place in places.unique()]
    # All ranks of a namespace read the same counters: the first before, the last after.
    before, after = (1, 3) if len(inside) == 1 else (2, 4)
    counted = sum(float(each[:, after].max() - each[:, before].min()) for each in inside)
    where = "lo" if len(inside) == 1 else "the hosts' interfaces"
    return ExchangeTraffic(payload, counted, where)


def formula_bytes(
    exchange: Mapping[str, Any] | None,
    buckets: Sequence[Bucket],
    size: int,
    nodes: Nodes | None = None,
) -> float | None:
    """Return the bytes of the busiest rank, as exchanges say them; None: one is not the lab's.

    Args:
        exchange: its settings.
        nodes: the ranks of each node, on which those of two levels depend; None: each is alone.
    """
    if not exchange or not is_labs(exchange) or not buckets:
        return None
    if class_of(exchange) in BY_ITSELF:  # those decide by the clock or the step
        return None
    per_node = {len(ranks) for ranks in nodes or each_alone(size)}
    if len(per_node) > 1:  # costs are of nodes of one size
        return None
    network = Network(replace(ANY_LINKS, ranks_per_node=per_node.pop()), size)
    try:  # costs count four bytes; values of other sizes are added as they are, never compressed
        return sum(
            itemsize / 4 * payload_bytes(shapes, exchange, network)
            for shapes, itemsize in buckets
            if shapes
        )
    except ValueError:
        return None


def is_labs(exchange: Mapping[str, Any] | None) -> bool:
    return str((exchange or {}).get("_target_", "")).startswith("lab.")


@dataclass
class Ledger:
    """The bytes of several exchanges, compared with each other and with the formula.

    Args:
        num_values: of the gradients.
        entries: the exchanges, in order.
    """

    num_values: int
    entries: list[ExchangeTraffic]

    def fault(self, formula: float | None, padding: float, uses_comm: bool) -> str | None:
        """Return why the last exchange did not send what it should; None: it did.

        Args:
            formula: bytes of the busiest rank; None: there is none.
            padding: bytes by which the formula may be too low.
            uses_comm: the exchange is known to send by a Comm, which counts; a user's may not.
        """
        payload = self.entries[-1].payload
        if not any(payload):
            ignored = "hook ignored: the exchange handed no bytes to the network"
            return ignored if uses_comm else None
        off = abs(max(payload) - formula) if formula else 0.0
        if formula and off > TOLERANCE * formula + padding:
            return (
                f"bytes: rank {payload.index(max(payload))} handed {max(payload)} bytes to the "
                f"network, but the formula for this exchange says {formula:.0f}"
            )
        return None

    @property
    def factor(self) -> float | None:
        """How many times fewer bytes were handed to the network than by an fp32 ring."""
        total = sum(self.entries[-1].payload)
        return self._ring_bytes / total if total else None

    @property
    def counted_factor(self) -> float | None:
        """The same of the bytes that an interface counted; the most of all exchanges."""
        counted = [each.counted for each in self.entries if each.counted]
        return self._ring_bytes / min(counted) if counted else None

    @property
    def _ring_bytes(self) -> float:
        """The bytes of all ranks in an fp32 ring."""
        return 2 * (len(self.entries[-1].payload) - 1) * 4.0 * self.num_values

    def excess(self) -> tuple[float | None, str]:
        """Return counted bytes over payload, the least of all exchanges; or None, and why.

        Others' bytes only add, so the least is nearest to the exchange's own.
        """
        *_, last = self.entries
        if last.counted is None:
            return None, last.why
        if sum(last.payload) < ENOUGH_BYTES:
            kib = sum(last.payload) / 1024
            return None, f"{kib:.3g} KiB is too little"
        ratios = [_ratio(each) for each in self.entries if each.counted is not None]
        return min(ratios), last.why


def _ratio(each: ExchangeTraffic) -> float:
    """Return counted bytes over payload, less what control messages may have added."""
    total = sum(each.payload)
    assert each.counted is not None
    over = each.counted - total
    spared = math.copysign(min(abs(over), SLACK_BYTES), over)
    return (each.counted - spared) / total


def _interface_bytes() -> tuple[int, int]:
    """Return the bytes sent so far over lo, and over all interfaces of this namespace."""
    return sent_bytes("lo") or 0, sent_bytes() or 0


def sent_bytes(interface: str | None = None) -> int | None:
    """Return the bytes that an interface has sent since it exists; None if nobody counts them.

    Headers are included, once for each packet that TCP hands over whole, and so is what other
    processes send; bytes that are lost count again.

    Args:
        interface: its name, such as "lo"; None: the sum of all, of which loopback is one.
    """
    try:
        lines = COUNTERS.read_text(encoding="utf-8").splitlines()[2:]
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

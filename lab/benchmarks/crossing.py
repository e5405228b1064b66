"""Bytes that one call sends: as Comm counts them, and as the interfaces of hosts do."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lab.cluster.network import INTERFACE
from lab.cluster.settings import EMULATION
from lab.distributed.world import World
from lab.measure.interfaces import namespace, sent_bytes

NUM_EMULATED_CALLS, COUNTED_CALLS = 3, 4


@dataclass(frozen=True)
class Crossing:
    """Bytes of one call.

    Attributes:
        busiest: payload of the rank that sends most.
        across: payload that the ranks of a host send to other hosts, of the host that sends most.
        link: all bytes that a host's interface has sent, of the host that sent most; None: the
            ranks are not on emulated hosts.
    """

    busiest: int
    across: int
    link: int | None


def count(call: Callable[[], object], world: World) -> Crossing:
    """Count the bytes of one `call`, which all ranks make together.

    On emulated hosts it is the median of several by the interface's bytes: on a busy machine TCP
    sends a segment twice, now and then.
    """
    num_calls = NUM_EMULATED_CALLS if EMULATION in os.environ else 1
    counted = [_count(call, world) for _ in range(num_calls)]
    return sorted(counted, key=lambda crossing: crossing.link or 0)[num_calls // 2]


def _count(call: Callable[[], object], world: World) -> Crossing:
    world.barrier()
    before, traffic = _link_bytes(), world.comm.traffic
    sent = traffic.so_far()
    call()
    world.barrier()  # until all have received, so that all have sent
    payload, _, across = (now - then for now, then in zip(traffic.so_far(), sent, strict=True))
    own = torch.tensor([payload, across, _link_bytes() - before])
    payloads, acrosses, links = world.gather(own).T.tolist()
    of_hosts = [sum(acrosses[rank] for rank in node) for node in world.comm.nodes]
    return Crossing(max(payloads), max(of_hosts), max(links) or None)


def _link_bytes() -> int:
    """Return what this emulated host has sent so far; 0 if it is a real one."""
    return (EMULATION in os.environ and sent_bytes(INTERFACE)) or 0


def through_interfaces(call: Callable[[], None], world: World) -> float | None:
    """Return the bytes of one call that crossed the interfaces of all ranks; None if uncounted.

    Ranks of one host share its interfaces, which count once. Barriers and headers are included, so
    small tensors seem to need more.
    """
    if world.device.type == "cuda":  # whose links have no such counter
        return None
    call()
    world.barrier()
    before = sent_bytes()
    world.barrier()
    for _ in range(COUNTED_CALLS):
        call()
    world.barrier()
    after = sent_bytes()
    world.barrier()
    if before is None or after is None:
        return None
    counted = world.gather(torch.tensor([namespace(), after - before])).tolist()
    return sum(dict(counted).values()) / COUNTED_CALLS

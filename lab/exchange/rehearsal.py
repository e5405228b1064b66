"""The cost of an exchange, predicted: its own work is timed, its messages are counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from lab.distributed.comm import Comm
from lab.distributed.silent_comm import SilentComm
from lab.exchange.base import Exchange
from lab.exchange.bucket import GradBucket
from lab.measure.marks import mark, seconds

ENOUGH_S = 0.05  # a transfer of so long tells the rate of a link
LEAST_VALUES, MOST_VALUES = 2**14, 2**20  # float32 values of the transfers that are timed
TINY_TIMES = 5


@dataclass(frozen=True)
class Link:
    """The links between ranks as Hockney's model sees them (Parallel Computing 20, 1994).

    Attributes:
        message_s: seconds of a message.
        byte_s: seconds of a byte that the busiest node sends to others.
    """

    message_s: float
    byte_s: float

    def seconds(self, num_messages: float, num_bytes: float) -> float:
        """Return the time of messages that follow each other."""
        return self.message_s * num_messages + self.byte_s * num_bytes


@dataclass(frozen=True)
class Cost:
    """Seconds of a bucket's exchange: a rank's own work, and messages on their way."""

    work_s: float
    wire_s: float

    @property
    def seconds(self) -> float:
        """Its time if nothing else runs."""
        return self.work_s + self.wire_s


def least_seconds(costs: Sequence[Cost]) -> float:
    """Return the least time of several buckets, if all of one's work hides others' messages."""
    return max(sum(each.work_s for each in costs), sum(each.wire_s for each in costs))


def of_all(numbers: Sequence[float], comm: Comm, device: torch.device) -> Tensor:
    """Return every rank's `numbers`, float64 [ranks, numbers], on the host.

    It is a sum, not an all-gather, which an exchange under way might use for its second stage.
    """
    table = torch.zeros(comm.size, len(numbers), dtype=torch.float64)
    table[comm.rank] = torch.tensor(numbers, dtype=torch.float64)
    table = table.to(device)
    comm.all_reduce(table)
    return table.cpu()


def timed(work: Callable[[], None], device: torch.device) -> float:
    """Return the seconds of `work`; on a GPU the host waits for them."""
    begin = mark(device)
    work()
    end = mark(device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return seconds(begin, end)


def probe(comm: Comm, device: torch.device) -> Link:
    """Time a few all-reduces, of a value and of more until one takes long; all ranks call this."""
    if comm.size == 1:
        return Link(0.0, 0.0)
    tiny, sent = torch.zeros(1, device=device), comm.traffic.num_messages
    comm.all_reduce(tiny)  # connects
    num_messages = comm.traffic.num_messages - sent
    times = [timed(partial(comm.all_reduce, tiny), device) for _ in range(TINY_TIMES)]
    tiny_s = float(of_all([median(times)], comm, device).max())
    num_values = LEAST_VALUES
    while True:
        large, before = torch.zeros(num_values, device=device), _sent(comm)
        own_s = timed(partial(comm.all_reduce, large), device)
        rows = of_all([own_s, _sent(comm) - before], comm, device)
        large_s = float(rows[:, 0].max())
        if large_s >= ENOUGH_S or num_values >= MOST_VALUES:
            break
        num_values *= 4
    byte_s = max(0.0, large_s - tiny_s) / _of_busiest_node(rows[:, 1], comm)
    return Link(tiny_s / num_messages, byte_s)


def rehearse(exchange: Exchange, bucket: GradBucket, comm: Comm) -> tuple[float, int, int]:
    """Average a copy of `bucket` among ranks that seem to have the same one; nothing is sent.

    Args:
        exchange: without state; it is left so.

    Returns:
        Seconds of this rank's work, messages, and bytes as `costs` wants them.
    """
    silent, one = SilentComm(comm), deepcopy(exchange)
    own, own_s = GradBucket(bucket.shapes, bucket.flat.clone(), bucket.step), 0.0
    for _ in range(2):  # the first allocates memory
        silent.traffic = type(silent.traffic)()
        own.flat.copy_(bucket.flat)
        own_s = timed(partial(one.average, own, silent), bucket.flat.device)
    return own_s, silent.traffic.num_messages, _sent(silent)


def costs(exchanges: Sequence[Exchange], bucket: GradBucket, link: Link, comm: Comm) -> list[Cost]:
    """Predict the cost of each exchange for `bucket`, the same on all ranks, which call this.

    Work is the slowest rank's, bytes are those of the node that sends most.
    """
    own = [number for each in exchanges for number in rehearse(each, bucket, comm)]
    rows = of_all(own, comm, bucket.flat.device).view(comm.size, len(exchanges), 3)
    work_s, num_messages = rows[:, :, 0].amax(dim=0), rows[:, :, 1].amax(dim=0)
    return [
        Cost(
            float(work_s[at]),
            link.seconds(float(num_messages[at]), _of_busiest_node(rows[:, at, 2], comm)),
        )
        for at in range(len(exchanges))
    ]


def _sent(comm: Comm) -> int:
    """Return the bytes that a rank has sent to other nodes, or to other ranks on the only node."""
    traffic = comm.traffic
    return traffic.across_bytes if len(comm.nodes) > 1 else traffic.payload_bytes


def _of_busiest_node(by_rank: Tensor, comm: Comm) -> float:
    return max(float(by_rank[list(node)].sum()) for node in comm.nodes)

"""All-reduces by size: the library's and the lab's, with nccl-tests' columns.

algbw = size / time and busbw = algbw * 2(N-1)/N (nccl-tests, doc/PERFORMANCE.md). Further columns
are the ratio to the library's time, and the share of its own bound that each algorithm reaches. The
bound is a time at the rate of a plain send and recv in the same run, with all ranks in pairs in
which one sends to the other:

* On one host it is that of the busiest rank's bytes, both sent and received, as one memory and its
  cores do both.
* On several hosts each pair is on two of them, and all ranks of a host send over its link at once.
  The bound is the time that the link needs for what the busiest host sends, as links carry both
  directions at once. Bytes inside hosts are not part of it.

Exchanges that compress take part: busbw is then that of an all-reduce which takes as long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.benchmarks import crossing, interleave
from lab.benchmarks.crossing import Crossing
from lab.benchmarks.request import Request
from lab.benchmarks.sizes import VALUE_BYTES
from lab.benchmarks.timing import NUM_CALLS, aligner, cache_bytes, per_call
from lab.distributed import world as worlds
from lab.distributed.comm import Comm
from lab.distributed.nodes import Nodes
from lab.distributed.world import World
from lab.exchange.allreduce import AllReduce
from lab.exchange.base import Exchange
from lab.exchange.bucket import GradBucket, Plans
from lab.measure.turns import order
from lab.settings.config import ConfigError, build
from lab.training.assemble import join
from lab.training.identity import surroundings

LIBRARY, SEND_RECV = "allreduce", "sendrecv"
CALLS_BYTES = 2**22  # most bytes timed together where the host waits for each call
COLUMNS = 1024  # values that share the scales of 1-bit SGD
LARGEST_SUM = 256  # whole numbers up to this are exact even in bfloat16


@dataclass(frozen=True)
class Candidate:
    """An operation on each rank's tensor, float32 [num_values].

    Attributes:
        expected: its result, from the tensors of all ranks; None: it loses some of the mean, but
            all ranks have the same.
    """

    name: str
    run: Callable[[Tensor, Comm], None]
    expected: Callable[[list[Tensor], int], Tensor] | None


def measure(request: Request) -> dict[str, Any] | None:
    """Measure, and return the result on rank 0.


    Raises:
        ConfigError: a single rank, or an exchange that is not an all-reduce or cannot run here.
    """
    if request.own["world_size"] == 1:
        raise ConfigError(
            "world_size=1: nothing is exchanged; must be at least 2. With one GPU set device=cpu, "
            "or world_size=2 share_gpus=true backend=gloo exchange=bf16 (Gloo has no send and recv "
            "on GPUs)"
        )
    world = join(request.variants[0].config)
    try:
        exchanges = {v.label: build(v.config.exchange) for v in request.variants}
        candidates = make_candidates(exchanges, world.comm)
        sizes, num_rounds = request.own["sizes"], request.own["rounds"]
        rows = [
            row
            for size in interleave.progress(sizes, world.rank)
            for row in measure_size(size, candidates, world, num_rounds)
        ]
        result = {
            "rows": rows,
            "num_rounds": num_rounds,
            "world_size": world.size,
            "backend": world.comm.backend,
            "cache_bytes": cache_bytes(world.device),
            **surroundings(world),
        }
        return result if world.rank == 0 else None
    finally:
        worlds.stop()


def make_candidates(exchanges: dict[str, Exchange], comm: Comm) -> list[Candidate]:
    """List the library's all-reduce, then the others, and a plain send and recv.

    Raises:
        ConfigError: an exchange does not average, or cannot run over `comm`.
    """
    for label, exchange in exchanges.items():
        if not exchange.keeps_replicas_equal:
            raise ConfigError(
                f"exchange={label}: delivers no mean; allowed are those that do, as ring and onebit"
            )
        try:
            exchange.check_reach(comm)
        except ValueError as error:
            raise ConfigError(f"exchange={label}: {str(error).partition(': ')[2]}") from None
    candidates = [
        Candidate(label, _averaging(exchange), _result_of(exchange))
        for label, exchange in {LIBRARY: AllReduce(), **exchanges}.items()
    ]
    if not comm.no_send_recv:
        candidates.append(Candidate(SEND_RECV, _send_recv, partial(_of_sender, comm.nodes)))
    return candidates


def measure_size(
    size: int,
    candidates: list[Candidate],
    world: World,
    num_rounds: int,
) -> list[dict[str, Any]]:
    """Measure a row for each candidate at tensors of `size` bytes; all ranks call it together."""
    flat = torch.empty(size // VALUE_BYTES, device=world.device)
    # The first calls warm up.
    before = [count_wrong(candidate, flat, world.rank, world.comm) for candidate in candidates]
    sent = [crossing.count(partial(each.run, flat, world.comm), world) for each in candidates]
    plain = sent[-1] if candidates[-1].name == SEND_RECV else None
    num_calls = calls_together(size, world)
    align = aligner(world)
    own_s = np.full((2, len(candidates), num_rounds), np.nan)
    for number in range(num_rounds):
        for index in order(len(candidates), number):
            run = partial(candidates[index].run, flat, world.comm)
            took = per_call(run, num_calls, world.device, align)
            own_s[:, index, number] = took.call_s, took.host_s or np.nan
    after = [count_wrong(candidate, flat, world.rank, world.comm) for candidate in candidates]
    wrong = world.gather(torch.tensor([before, after])).sum(dim=(0, 1)).tolist()
    # A time is that of the slowest rank.
    calls_s, hosts_s = world.gather(torch.from_numpy(own_s)).amax(dim=0).numpy()
    times = {candidate.name: taken for candidate, taken in zip(candidates, calls_s, strict=True)}
    return [
        _row(candidate.name, size, times, num_wrong, world.size, _share(bytes_sent, plain))
        | {"busiest_rank_bytes": bytes_sent.busiest}
        | {"across_bytes": bytes_sent.across, "link_bytes": bytes_sent.link}
        | {"host_s": float(np.median(host_s)) if world.device.type == "cuda" else None}
        for candidate, num_wrong, bytes_sent, host_s in zip(
            candidates, wrong, sent, hosts_s, strict=True
        )
    ]


def calls_together(size: int, world: World) -> int:
    """Return how many calls to time together: fewer on large sizes, unless in a stream."""
    most = NUM_CALLS if world.comm.backend == "nccl" else CALLS_BYTES // size
    return max(1, min(NUM_CALLS, most))


def count_wrong(candidate: Candidate, flat: Tensor, rank: int, comm: Comm) -> int:
    """Count the values of this rank that are wrong after one call on fresh values.

    Values are whole numbers times the number of ranks, drawn for each rank, so that the mean is
    exact in any order of summing, and in bfloat16 as well. Of a candidate that loses some of it,
    those values are wrong that are not rank 0's.
    """
    everyones = [draw_values(flat, each, comm.size) for each in range(comm.size)]
    flat.copy_(everyones[rank])
    candidate.run(flat, comm)
    if candidate.expected:
        expected = candidate.expected(everyones, rank)
    else:
        comm.broadcast(expected := flat.clone(), 0)
    return int((flat != expected).sum())


def draw_values(like: Tensor, rank: int, size: int) -> Tensor:
    """Draw whole numbers for a rank, whose sums over `size` ranks are exact in any order."""
    generator = torch.Generator(like.device).manual_seed(rank)
    below = min(11, LARGEST_SUM // size + 1)
    drawn = torch.randint(0, below, like.shape, generator=generator, device=like.device)
    return drawn.float() * size


def _averaging(exchange: Exchange) -> Callable[[Tensor, Comm], None]:
    plans = defaultdict[int, Plans](Plans)  # a bucket's are kept from step to step

    def run(flat: Tensor, comm: Comm) -> None:
        shapes = {"tensor": torch.Size(shape_of(flat.numel()))}
        kept = plans[flat.numel()]
        bucket = GradBucket(shapes, flat, divided=exchange.takes_divided, plans=kept)
        exchange.average(bucket, comm)

    return run


def shape_of(num_values: int) -> tuple[int, ...]:
    """Return the shape of the parameter that a tensor stands for: rows of COLUMNS, if it can be."""
    return (num_values // COLUMNS, COLUMNS) if num_values % COLUMNS == 0 else (num_values,)


def _result_of(exchange: Exchange) -> Callable[[list[Tensor], int], Tensor] | None:
    if not exchange.exact and not exchange.takes_divided:  # a cast to half leaves whole numbers
        return None
    return _sum if exchange.takes_divided else _mean


def _mean(everyones: list[Tensor], _rank: int) -> Tensor:
    return torch.stack(everyones).mean(dim=0)


def _sum(everyones: list[Tensor], _rank: int) -> Tensor:
    return torch.stack(everyones).sum(dim=0)


def pairs(nodes: Nodes) -> dict[int, int]:
    """Pair senders with receivers: the k-th ranks of two hosts, or neighbours on a single one.

    Ranks left over, of the last of an odd number of hosts or of the larger of two, have no partner.
    """
    if len(nodes) == 1:
        nodes = [[rank] for rank in nodes[0]]
    hosts = zip(nodes[::2], nodes[1::2], strict=False)
    return {a: b for pair in hosts for a, b in zip(*pair, strict=False)}


def _send_recv(flat: Tensor, comm: Comm) -> None:
    for sender, receiver in pairs(comm.nodes).items():
        if comm.rank == sender:
            comm.send(flat, receiver)
        elif comm.rank == receiver:
            comm.recv(flat, sender)


def _of_sender(nodes: Nodes, everyones: list[Tensor], rank: int) -> Tensor:
    sender_of = {receiver: sender for sender, receiver in pairs(nodes).items()}
    return everyones[sender_of.get(rank, rank)]


def _share(sent: Crossing, plain: Crossing | None) -> float | None:
    """Return the time that bounds an algorithm, over that of the plain send and recv.

    Args:
        sent: bytes of one of its calls. plain: of the plain one; None: there is none.
    """
    if plain is None or sent is plain:
        return None if plain is None else 1.0
    return sent.across / plain.across if plain.across else 2 * sent.busiest / plain.busiest


def _row(
    name: str,
    size: int,
    times: dict[str, np.ndarray],
    num_wrong: int,
    world_size: int,
    share: float | None,
) -> dict[str, Any]:
    own = times[name]
    algbw = size / float(np.median(own)) / 1e9
    factor = 1.0 if name == SEND_RECV else 2 * (world_size - 1) / world_size
    return {
        "algorithm": name,
        "size_bytes": size,
        "count": size // VALUE_BYTES,
        "shape": shape_of(size // VALUE_BYTES),
        "type": "float",
        "time_s": interleave.middle(own),
        "algbw_gb_per_s": algbw,
        "busbw_gb_per_s": algbw * factor,
        "wrong": num_wrong,
        "ratio_to_library": interleave.ratio(own, times[LIBRARY]),
        "of_bound": None
        if share is None
        else interleave.interval(lambda plain, took: share * plain / took, times[SEND_RECV], own),
    }

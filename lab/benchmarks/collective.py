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
import pandas as pd
import torch
from torch import Tensor

from lab.benchmarks import harness, present
from lab.benchmarks.catalogue import VALUE_BYTES, size_name
from lab.benchmarks.request import BenchRequest
from lab.distributed.comm import Comm
from lab.distributed.launcher import Nodes
from lab.distributed.world import World
from lab.draw.chart import GREY, Look, looks_of
from lab.draw.plots import Axis, joined, lines
from lab.exchange.allreduce import AllReduce
from lab.exchange.base import Exchange
from lab.exchange.bucket import GradBucket, Plans
from lab.settings.config import ConfigError, build
from lab.settings.streams import progress
from lab.simulate.calibration import SEND_RECV

LIBRARY = "allreduce"
CALLS_BYTES = 2**22  # most bytes timed together where the host waits for each call
ROW_VALUES = 1024  # that share the scales of 1-bit SGD
PANEL_PX = 300, 220
LARGEST_SUM = 256  # whole numbers up to this are exact even in bfloat16


@dataclass(frozen=True)
class CollectiveCandidate:
    """An operation on each rank's tensor, float32 [num_values].

    Attributes:
        expected: its result, from the tensors of all ranks; None: it loses some of the mean, but
            all ranks have the same.
    """

    name: str
    run: Callable[[Tensor, Comm], None]
    expected: Callable[[list[Tensor], int], Tensor] | None


@harness.on_ranks
def measure(request: BenchRequest, world: World) -> dict[str, Any]:
    exchanges = {v.label: build(v.config.exchange) for v in request.variants}
    candidates = make_candidates(exchanges, world.comm)
    found = by_size(request, world, partial(measure_size, candidates=candidates))
    return {**found, "cache_bytes": harness.cache_bytes(world.device)}


def by_size(
    request: BenchRequest,
    world: World,
    measure_size: Callable[[int, World, int], list[dict[str, Any]]],
) -> dict[str, Any]:
    """Collect the rows of each size; `measure_size` gets it, the world and the rounds."""
    num_rounds = request.own["rounds"]
    sizes = progress(request.own["sizes"], "size", world.rank == 0)
    rows = [row for size in sizes for row in measure_size(size, world, num_rounds)]
    return {"rows": rows, "num_rounds": num_rounds}


def make_candidates(exchanges: dict[str, Exchange], comm: Comm) -> list[CollectiveCandidate]:
    """List the library's all-reduce, then the others, and a plain send and recv.

    Raises:
        ConfigError: an exchange does not average, or cannot run over `comm`.
    """
    for label, exchange in exchanges.items():
        if not exchange.keeps_replicas_equal:
            raise ConfigError(
                f"exchange={label} does not average gradients; "
                "use an exchange that does, such as ring or onebit"
            )
        try:
            exchange.validate(comm)
        except ValueError as error:
            raise ConfigError(f"exchange={label}: {str(error).partition(': ')[2]}") from None
    candidates = [
        CollectiveCandidate(label, _averaging(exchange), _result_of(exchange))
        for label, exchange in {LIBRARY: AllReduce(), **exchanges}.items()
    ]
    if not comm.no_send_recv:
        candidates.append(
            CollectiveCandidate(SEND_RECV, _send_recv, partial(_of_sender, comm.nodes))
        )
    return candidates


def measure_size(
    size: int, world: World, num_rounds: int, candidates: list[CollectiveCandidate]
) -> list[dict[str, Any]]:
    """Measure a row for each candidate at tensors of `size` bytes; all ranks call it together."""
    flat = torch.empty(size // VALUE_BYTES, device=world.device)
    runs = [partial(candidate.run, flat, world.comm) for candidate in candidates]
    # The first calls warm up.
    before = [count_wrong(candidate, flat, world.rank, world.comm) for candidate in candidates]
    sent = [harness.sent_by(run, world) for run in runs]
    plain = sent[-1] if candidates[-1].name == SEND_RECV else None
    calls_s, hosts_s = harness.slowest(runs, calls_together(size, world), num_rounds, world)
    after = [count_wrong(candidate, flat, world.rank, world.comm) for candidate in candidates]
    wrong = world.gather(torch.tensor([before, after])).sum(dim=(0, 1)).tolist()
    times = {candidate.name: taken for candidate, taken in zip(candidates, calls_s, strict=True)}
    return [
        _row(name, size, times, num_wrong, world.size, _share(bytes_sent, plain))
        | {"busiest_rank_bytes": bytes_sent.busiest}
        | {"across_bytes": bytes_sent.across, "link_bytes": bytes_sent.link}
        | {"host_s": float(np.median(host_s)) if world.device.type == "cuda" else None}
        for name, num_wrong, bytes_sent, host_s in zip(times, wrong, sent, hosts_s, strict=True)
    ]


def calls_together(size: int, world: World) -> int:
    """Return how many calls to time together: fewer on large sizes, unless in a stream."""
    most = harness.NUM_CALLS if world.comm.backend == "nccl" else CALLS_BYTES // size
    return max(1, min(harness.NUM_CALLS, most))


def count_wrong(candidate: CollectiveCandidate, flat: Tensor, rank: int, comm: Comm) -> int:
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
        size = flat.numel()
        # Residuals are kept by a parameter's name, so each size is a parameter of its own.
        shapes = {f"tensor of {size}": torch.Size(shape_of(size))}
        bucket = GradBucket(shapes, flat, divided=exchange.accepts_prescaled, plans=plans[size])
        exchange.average(bucket, comm)

    return run


def shape_of(num_values: int) -> tuple[int, ...]:
    """Return the shape of a parameter that a tensor stands for: rows of ROW_VALUES, if possible."""
    return (num_values // ROW_VALUES, ROW_VALUES) if num_values % ROW_VALUES == 0 else (num_values,)


def _result_of(exchange: Exchange) -> Callable[[list[Tensor], int], Tensor] | None:
    if not exchange.exact and not exchange.accepts_prescaled:  # a cast to half leaves whole numbers
        return None
    reduce = torch.sum if exchange.accepts_prescaled else torch.mean
    return lambda everyones, _rank: reduce(torch.stack(everyones), dim=0)


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


def _share(sent: harness.Sent, plain: harness.Sent | None) -> float | None:
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
        "time_s": harness.middle(own),
        "algbw_gb_per_s": algbw,
        "busbw_gb_per_s": algbw * factor,
        "wrong": num_wrong,
        "ratio_to_library": harness.ratio(own, times[LIBRARY]),
        "of_bound": None
        if share is None
        else harness.interval(lambda plain, took: share * plain / took, times[SEND_RECV], own),
    }


def columns(result: dict[str, Any]) -> dict[str, present.Column]:
    counted = {"across (B)": "across_bytes", "link (B)": "link_bytes"}
    rows = result["rows"]

    def ratio_to(reference: str, key: str) -> present.Column:
        write = present.intervals(key)
        return lambda row: "1" if row["algorithm"] == reference else write(row)

    return {
        "algorithm": present.text("algorithm"),
        "size (B)": present.text("size_bytes"),
        "count": present.text("count"),
        "type": present.text("type"),
        **present.medians("time (us)", "time_s", 1e6, 1),
        "algbw": present.number("algbw_gb_per_s", digits=3),
        "busbw": present.number("busbw_gb_per_s", digits=3),
        "#wrong": present.text("wrong"),
        "ratio to allreduce": ratio_to(LIBRARY, "ratio_to_library"),
        "of bound": ratio_to(SEND_RECV, "of_bound"),
        **present.host_column(rows),
        **{name: present.text(key) for name, key in counted.items() if _known(rows, key)},
    }


def notes(result: dict[str, Any]) -> list[str]:
    return [
        f"medians of {result['num_rounds']} rounds {present.on_ranks_of(result)}; a call's time is "
        "that of its slowest rank",
        "algbw, busbw: GB/s, busbw = algbw x 2(N-1)/N; ratio: time divided by the time of "
        "allreduce, with 95 % intervals",
        *_notes_on_bounds(result["rows"]),
        *present.in_cache(result, min(row["size_bytes"] for row in result["rows"])),
    ]


def _notes_on_bounds(rows: list[dict[str, Any]]) -> list[str]:
    if not _known(rows, "across_bytes"):
        what = "what the busiest rank sends and receives"
        return [f"of bound: least possible time (for {what}, at sendrecv's rate) / time"]
    text = "across: payload per call that the busiest host's ranks send to other hosts"
    if _known(rows, "link_bytes"):
        text += "; link: what its interface counted, including headers"
    return [
        text,
        "of bound: least possible time (for across, at the rate of sendrecv's across) / time",
    ]


def _known(rows: list[dict[str, Any]], key: str) -> bool:
    return any(row.get(key) for row in rows)


def axis_of(sizes: list[int]) -> Axis:
    """Return an axis of tensors' bytes, with a named tick at each."""
    texts = ", ".join(f"'{size}': '{size_name(size)}'" for size in sizes)
    return Axis("tensor", log=2, ticks=sizes, label=f"({{{texts}}})[datum.value]")


def chart(result: dict[str, Any]) -> present.Drawn:
    """Draw bus bandwidth, ratio to the library's time, and share of the bound, by size."""
    rows, hollow = result["rows"], result["emulation"] != "none"
    sizes = sorted({row["size_bytes"] for row in rows})
    data: Any = pd.DataFrame(
        {
            **{"series": row["algorithm"], "x": row["size_bytes"], "hollow": hollow, "key": key},
            **present.ends({"median": row[key]} if key == "busbw_gb_per_s" else row[key]),
            "one": 1.0,
        }
        for row in rows
        for key in ("busbw_gb_per_s", "ratio_to_library", "of_bound")
        if row["algorithm"] != {"ratio_to_library": LIBRARY, "of_bound": SEND_RECV}.get(key)
    ).dropna(subset="value")
    ys = {
        "busbw_gb_per_s": Axis("bus bandwidth (GB/s)", log=10),
        "ratio_to_library": Axis("time / the library's (below 1: faster)", log=10),
        "of_bound": Axis("fraction of its bound (1: at the link's rate)"),
    }
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    looks = looks_of(name for name in names if name != SEND_RECV)
    looks[SEND_RECV] = Look(GREY, ":", "x")
    panels = []
    for key, y in ys.items():
        one = data[data["key"] == key].drop(columns="key")
        shown = {name: looks[name] for name in names if name in set(one["series"])}
        if shown:
            line = "" if key == "busbw_gb_per_s" else "one"
            panels.append(lines(one, axis_of(sizes), y, shown, reference=line, size=PANEL_PX))
    body = joined([panel for panel, _ in panels], 2)
    largest = {row["algorithm"]: row for row in rows if row["size_bytes"] == sizes[-1]}
    others = {
        name: row["ratio_to_library"]
        for name, row in largest.items()
        if name not in (LIBRARY, SEND_RECV)
    }
    message = f"Bus bandwidth of the library's all-reduce on {present.ranks_of(result)}"
    if others:
        message = f"{present.fastest(others, 'the library')}, at {size_name(sizes[-1])}"
    sample = f"medians of {result['num_rounds']} interleaved rounds, 95 % bootstrap intervals"
    below = [
        f"All-reduce of float32; {LIBRARY} is the library's, {SEND_RECV} a plain send and recv.",
        f"{present.machine(result)} · {sample}",
    ]
    # A single size is in the middle of its panel, with its names.
    width = sum(wide for _, wide in panels[:2]) if len(sizes) > 1 else 2 * (PANEL_PX[0] + 50)
    return message, below, (body, width)

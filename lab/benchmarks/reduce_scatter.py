"""Reduce-scatters by size: the lab's and torch's, with the bytes that crossed the network.

Gloo's own is an all-reduce of which each rank keeps a part: it sends 2(N-1)/N of the tensor, where
(N-1)/N suffice. The lab's is an all-to-all, and a sum of the parts in rank order (lab.distributed.
comm.SummedParts). NCCL's is optimal, and the lab's calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lab.benchmarks import interleave
from lab.benchmarks.collective import calls_together, draw_values
from lab.benchmarks.crossing import through_interfaces
from lab.benchmarks.harness import on_ranks, slowest
from lab.benchmarks.present import ranged, tabulate
from lab.benchmarks.request import VALUE_BYTES, Request
from lab.distributed.torch_comm import TorchComm, reduce_scatter_flat
from lab.distributed.world import World
from lab.settings.config import ConfigError

TORCH, LAB = "torch", "lab"


@dataclass(frozen=True)
class Buffers:
    """Memory of one size: both fill `output` [values / N] from `tensor` [N, values / N].

    Attributes:
        parts: [N, values / N], for the lab's.
    """

    tensor: Tensor
    output: Tensor
    parts: Tensor


@on_ranks
def measure(request: Request, world: World) -> dict[str, Any]:
    """Measure both by size. ConfigError: ranks do not talk over torch."""
    calls, num_rounds = calls_over(world), request.own["rounds"]
    rows = [
        row
        for size in interleave.progress(request.own["sizes"], world.rank)
        for row in measure_size(size, calls, world, num_rounds)
    ]
    return {"rows": rows, "num_rounds": num_rounds}


def calls_over(world: World) -> dict[str, Callable[[Buffers], None]]:
    """Return the two reduce-scatters. ConfigError: `world` does not talk over torch."""
    comm = world.comm
    if not isinstance(comm, TorchComm):
        raise ConfigError("comm: reduce_scatter compares with torch's; must be comm=torch")

    def of_torch(buffers: Buffers) -> None:
        reduce_scatter_flat(comm.group, buffers.output, buffers.tensor.view(-1)).wait()

    def of_lab(buffers: Buffers) -> None:
        comm.ireduce_scatter(buffers.output, buffers.tensor, buffers.parts).wait()

    return {TORCH: of_torch, LAB: of_lab}


def measure_size(
    size: int, calls: dict[str, Callable[[Buffers], None]], world: World, num_rounds: int
) -> list[dict[str, Any]]:
    """Measure a row for each call on a tensor of `size` bytes; all ranks call it together."""
    tensor = torch.empty(world.size, max(1, size // VALUE_BYTES // world.size), device=world.device)
    buffers = Buffers(tensor, torch.empty_like(tensor[0]), torch.empty_like(tensor))
    wrong = [count_wrong(call, buffers, world) for call in calls.values()]
    runs = [partial(call, buffers) for call in calls.values()]
    crossed = [through_interfaces(run, world) for run in runs]
    calls_s, _ = slowest(runs, calls_together(size, world), num_rounds, world)
    return [
        {
            "algorithm": name,
            "size_bytes": tensor.nbytes,
            "time_s": interleave.middle(taken),
            "ratio_to_torch": interleave.ratio(taken, calls_s[0]),
            "crossed_share": None if sent is None else sent / world.size / tensor.nbytes,
            "wrong": num_wrong,
        }
        for name, taken, sent, num_wrong in zip(calls, calls_s, crossed, wrong, strict=True)
    ]


def count_wrong(call: Callable[[Buffers], None], buffers: Buffers, world: World) -> int:
    """Count the values on all ranks that are wrong after a call on whole numbers."""
    everyones = [draw_values(buffers.tensor, rank, world.size) for rank in range(world.size)]
    buffers.tensor.copy_(everyones[world.rank])
    call(buffers)
    expected = torch.stack([each[world.rank] for each in everyones]).sum(dim=0)
    return int(world.gather((buffers.output != expected).sum()).sum())


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, and a line for each size and algorithm."""
    return tabulate(
        result["rows"],
        {
            "reduce-scatter": lambda row: row["algorithm"],
            "size (B)": lambda row: str(row["size_bytes"]),
            "time (us)": lambda row: f"{1e6 * row['time_s']['median']:.1f}",
            "mad": lambda row: f"{1e6 * row['time_s']['mad']:.1f}",
            "ratio to torch": lambda row: ranged(row["ratio_to_torch"]),
            "sent": lambda row: (
                "-" if row["crossed_share"] is None else f"{row['crossed_share']:.3f}"
            ),
            "#wrong": lambda row: str(row["wrong"]),
        },
    )


def notes(result: dict[str, Any]) -> list[str]:
    """Explain the columns."""
    least = (result["world_size"] - 1) / result["world_size"]
    return [
        f"medians of {result['num_rounds']} rounds on {result['world_size']} ranks "
        f"({result['backend']}); a call takes as long as on its slowest rank",
        f"sent: bytes by the interfaces' counters, per rank and byte of the tensor; {least:.3g} is "
        "least; it includes headers, and all that others send",
    ]

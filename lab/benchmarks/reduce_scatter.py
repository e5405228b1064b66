"""Reduce-scatters by size: the lab's and torch's, with the bytes that crossed the network.

Gloo's own is an all-reduce of which each rank keeps a part: it sends 2(N-1)/N of the tensor, where
(N-1)/N suffice. The lab's is an all-to-all, and a sum of the parts in rank order (lab.distributed.
comm.SummedParts). NCCL's is optimal, and the lab's calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lab.benchmarks.catalogue import VALUE_BYTES
from lab.benchmarks.collective import by_size, calls_together, draw_values
from lab.benchmarks.harness import middle, on_ranks, ratio, slowest, through_interfaces
from lab.benchmarks.present import Column, intervals, medians, number, on_ranks_of, text
from lab.benchmarks.request import BenchRequest
from lab.distributed.torch_comm import TorchComm, reduce_scatter_flat
from lab.distributed.world import World
from lab.settings.config import ConfigError

TORCH, LAB = "torch", "lab"

# Fills output [values / N] from a tensor [N, values / N]; the last one is scratch, as the tensor.
ReduceScatter = Callable[[Tensor, Tensor, Tensor], None]


@on_ranks
def measure(request: BenchRequest, world: World) -> dict[str, Any]:
    """Measure both by size. ConfigError: ranks do not talk over torch."""
    return by_size(request, world, partial(measure_size, calls=calls_over(world)))


def calls_over(world: World) -> dict[str, ReduceScatter]:
    """Return the two reduce-scatters. ConfigError: `world` does not talk over torch."""
    comm = world.comm
    if not isinstance(comm, TorchComm):
        raise ConfigError(
            "comm: must be torch, because the benchmark compares with torch's reduce-scatter"
        )

    def of_torch(output: Tensor, tensor: Tensor, _parts: Tensor) -> None:
        reduce_scatter_flat(comm.group, output, tensor.view(-1)).wait()

    def of_lab(output: Tensor, tensor: Tensor, parts: Tensor) -> None:
        comm.ireduce_scatter(output, tensor, parts).wait()

    return {TORCH: of_torch, LAB: of_lab}


def measure_size(
    size: int, world: World, num_rounds: int, calls: dict[str, ReduceScatter]
) -> list[dict[str, Any]]:
    """Measure a row for each call on a tensor of `size` bytes; all ranks call it together."""
    tensor = torch.empty(world.size, max(1, size // VALUE_BYTES // world.size), device=world.device)
    output, parts = torch.empty_like(tensor[0]), torch.empty_like(tensor)
    runs = [partial(call, output, tensor, parts) for call in calls.values()]
    wrong = [count_wrong(run, output, tensor, world) for run in runs]
    crossed = [through_interfaces(run, world) for run in runs]
    calls_s, _ = slowest(runs, calls_together(size, world), num_rounds, world)
    return [
        {
            "algorithm": name,
            "size_bytes": tensor.nbytes,
            "time_s": middle(taken),
            "ratio_to_torch": ratio(taken, calls_s[0]),
            "crossed_share": None if sent is None else sent / world.size / tensor.nbytes,
            "wrong": num_wrong,
        }
        for name, taken, sent, num_wrong in zip(calls, calls_s, crossed, wrong, strict=True)
    ]


def count_wrong(run: Callable[[], None], output: Tensor, tensor: Tensor, world: World) -> int:
    """Count the values on all ranks that are wrong after a call on whole numbers."""
    everyones = [draw_values(tensor, rank, world.size) for rank in range(world.size)]
    tensor.copy_(everyones[world.rank])
    run()
    expected = torch.stack([each[world.rank] for each in everyones]).sum(dim=0)
    return int(world.gather((output != expected).sum()).sum())


COLUMNS: dict[str, Column] = {
    "reduce-scatter": text("algorithm"),
    "size (B)": text("size_bytes"),
    **medians("time (us)", "time_s", 1e6, 1),
    "ratio to torch": intervals("ratio_to_torch"),
    "sent": number("crossed_share", digits=3),
    "#wrong": text("wrong"),
}


def notes(result: dict[str, Any]) -> list[str]:
    least = (result["world_size"] - 1) / result["world_size"]
    return [
        f"medians of {result['num_rounds']} rounds {on_ranks_of(result)}; a call's time is "
        "that of its slowest rank",
        "sent: bytes that the interfaces counted, per rank and per byte of the tensor, including "
        f"headers and all other traffic; the least possible is {least:.3g}",
    ]

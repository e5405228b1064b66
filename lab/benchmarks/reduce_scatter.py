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

import numpy as np
import torch
from torch import Tensor

from lab.benchmarks import interleave
from lab.benchmarks.collective import calls_together, draw_values
from lab.benchmarks.request import Request
from lab.benchmarks.sizes import VALUE_BYTES
from lab.benchmarks.timing import aligner, per_call
from lab.distributed import world as worlds
from lab.distributed.torch_comm import TorchComm, reduce_scatter_flat
from lab.distributed.world import World
from lab.measure.interfaces import namespace, sent_bytes
from lab.measure.turns import order
from lab.settings.config import ConfigError
from lab.training.assemble import join
from lab.training.identity import surroundings

TORCH, LAB = "torch", "lab"
COUNTED_CALLS = 4


@dataclass(frozen=True)
class Buffers:
    """Memory of one size: both fill `output` [values / N] from `tensor` [N, values / N].

    Attributes:
        parts: [N, values / N], for the lab's.
    """

    tensor: Tensor
    output: Tensor
    parts: Tensor


def measure(request: Request) -> dict[str, Any] | None:
    """Measure, and return the result on rank 0.

    Raises:
        ConfigError: a single rank, or ranks that do not talk over torch.
    """
    if request.own["world_size"] == 1:
        raise ConfigError("world_size=1: nothing is exchanged; must be at least 2")
    world = join(request.only_config)
    try:
        sizes, num_rounds = request.own["sizes"], request.own["rounds"]
        calls = calls_over(world)
        rows = [
            row
            for size in interleave.progress(sizes, world.rank)
            for row in measure_size(size, calls, world, num_rounds)
        ]
        facts = {"num_rounds": num_rounds, "world_size": world.size, "backend": world.comm.backend}
        result = {"rows": rows, **facts, **surroundings(world)}
        return result if world.rank == 0 else None
    finally:
        worlds.stop()


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
    crossed = [crossed_bytes(partial(call, buffers), world) for call in calls.values()]
    align, num_calls = aligner(world), calls_together(size, world)
    own_s = np.full((len(calls), num_rounds), np.nan)
    for number in range(num_rounds):
        for index in order(len(calls), number):
            run = partial([*calls.values()][index], buffers)
            own_s[index, number] = per_call(run, num_calls, world.device, align).call_s
    calls_s = world.gather(torch.from_numpy(own_s)).amax(dim=0).numpy()  # of the slowest rank
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


def crossed_bytes(call: Callable[[], None], world: World) -> float | None:
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

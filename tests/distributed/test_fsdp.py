"""torch's FSDP2 with the lab's reduce-scatters, and checkpoints between sharded strategies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import lab
from lab.codec.base import Codec
from lab.codec.codecs import Int4, Int8
from lab.distributed.replicas import gathered
from lab.distributed.torch_comm import TorchComm
from lab.distributed.world import stop
from lab.sync.fsdp_units import units
from tests.distributed.test_strategies import distance
from tests.support.ranks import CREW, Outcome, composed, execute, join, spawn, told, train
from tests.support.slow import some_of

# Adam divides by a gradient's own size, so eps stands above rounding errors.
ADAMW = ("optim=adamw", "optim.eps=1e-3", "optim.decay_vectors=false")
RUN = ("data.size=16", "batch_size=24", "warmup_steps=1", "bucket_mb=0.01", *ADAMW)


class Net(nn.Module):
    """Layers whose rows no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(37, 29), nn.Linear(29, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def inputs(rank: int) -> Tensor:
    return torch.randn(8, 37, generator=torch.Generator().manual_seed(rank))


def gradients(exchanges: list[str | None]) -> list[tuple[dict[str, Tensor], int]]:
    """Return, for each exchange in FSDP2's hook, whole gradients and the bytes that it sent."""
    comm, results = join().comm, []
    assert isinstance(comm, TorchComm)
    for exchange in exchanges:
        net, mesh = Net(), DeviceMesh.from_group(comm.group, "cpu")
        fully_shard(net.first, mesh=mesh)
        fully_shard(net, mesh=mesh)
        options = {"exchange.block_size": 64} if exchange == "int8" else {}
        made = lab.fsdp_reduce_scatter(net, exchange, **options) if exchange else None
        net(inputs(comm.rank)).square().mean().backward()
        found = {name: gathered(p.grad) for name, p in net.named_parameters()}
        results.append((found, made.traffic.payload_bytes if made else 0))
        if exchange == "onebit" and made:
            made.load_state_dict(made.state_dict())
            assert made.state_dict()["residual"].keys() == found.keys()
    with pytest.raises(
        lab.ConfigError, match="contains no module that FSDP2's fully_shard wrapped"
    ):
        lab.fsdp_reduce_scatter(Net())
    stop()
    return results


@pytest.mark.parametrize("size", some_of([2, 3], every=2))
def test_gradients_of_fsdp2_are_those_of_one_process(size: int) -> None:
    net = Net()
    net(torch.cat([inputs(rank) for rank in range(size)])).square().mean().backward()
    alone = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    results = spawn(size, gradients, [None, "allreduce", "bf16", "int8", "onebit"])[0]
    far = [distance(found, alone) for found, _ in results]
    assert max(far[:2]) < 1e-6
    assert 1e-5 < far[2] < 0.01 and 1e-5 < far[3] < 0.05 and 0.05 < far[4] < 1.5
    sent = [num_bytes for _, num_bytes in results]
    padded = sum(-(-p.shape[0] // size) * p[0].numel() for p in net.parameters())
    assert sent[1] == 4 * padded * (size - 1) and sent[2] == sent[1] / 2
    assert sent[3] < 0.5 * sent[1] and sent[4] < 0.25 * sent[1]


def test_a_unit_is_the_largest_module_that_fits_and_the_model_takes_the_rest() -> None:
    inner = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))  # 1 MiB each
    large, small = nn.Linear(1024, 2048), nn.Linear(2, 2)
    model = nn.Sequential(inner, large, small)
    assert units(model, 25) == [inner, large, model]
    assert units(model, 1.5) == [inner[0], inner[2], large, model]
    assert units(model, None) == [model]
    tied = nn.Linear(512, 512, bias=False)
    tied.weight = inner[0].weight  # type: ignore[assignment]
    blocks = nn.Sequential(nn.ModuleList([inner, small]), tied)
    assert units(nn.ModuleList([large, nn.ModuleList([large])]), 25)[:-1] == [large]
    assert units(blocks, 25) == [inner[2], blocks]


def test_sharded_strategies_go_on_from_each_others_checkpoints(tmp_path: Path) -> None:
    whole_run = (*RUN, "steps=9", "checkpoint_every=3")
    alone = train(1, "strategy=overlap", *whole_run)[0].weights
    resume, weights = (), dict[str, Tensor]()
    # Three steps each, on another number of ranks, from what the one before has saved.
    for steps, (strategy, size) in enumerate((("zero1", 3), ("fsdp", 2), ("overlap", 2)), start=1):
        settings = (*RUN, f"steps={3 * steps}", "checkpoint_every=3", f"cell={strategy}", *resume)
        outcome = train(size, f"strategy={strategy}", *settings)[0]
        assert outcome.code == 0
        weights = outcome.weights
        saved = f"runs/default/{strategy}/checkpoints/step_{3 * steps:06d}"
        resume = (f"resume={tmp_path / saved}",)
    assert distance(weights, alone) < 1e-5
    for strategy, size in (("zero1", 2), ("hsdp", 2)):  # from a whole state
        more = ("steps=9", f"resume={tmp_path}/runs/default/overlap/checkpoints/step_000009")
        assert distance(train(size, f"strategy={strategy}", *RUN, *more)[0].weights, alone) < 1e-5


# A copy of the weights in each group, or a second shard; an evaluation gathers them otherwise.
@pytest.mark.parametrize(
    "groups", some_of(["strategy=hsdp sync.shard_size=2", "strategy=fsdp sync.reshard=2"], every=2)
)
def test_weights_in_groups_of_ranks_are_equal_and_one_process_s(groups: str) -> None:
    settings = (*RUN, "steps=4", "clip_grad_norm=0.5", "accumulate=2", "eval_every=2")
    alone = train(1, "strategy=overlap", *settings)[0]
    ours = train(4, *groups.split(), *settings)
    assert distance(ours[0].weights, alone.weights) < 1e-5
    hashes = {outcome.record["replica_hash"] for outcome in ours}
    assert len(hashes) == 1 and None not in hashes


def execute_on_hosts(per_host: int, *run: Any) -> Outcome:
    """Execute one rank of a run whose launcher seems to have started `per_host` on each host."""
    os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % per_host)
    os.environ["LOCAL_WORLD_SIZE"] = str(per_host)
    return execute(*run)


def message(codec: Codec, num_values: int) -> int:
    return codec.layout_of_parts(num_values, 1).num_bytes


def test_zeropp_trains_on_two_hosts_of_two_ranks() -> None:
    run = composed(
        "strategy=zeropp", "model=mlp", "model.hidden=[128,128]", "batch_size=64", "steps=24",
        "warmup_steps=1", "eval_every=12", "bucket_mb=0.05",
    )  # fmt: skip
    ours = CREW.call(4, execute_on_hosts, 2, *run)
    assert len({outcome.record["replica_hash"] for outcome in ours}) == 1
    for outcome in ours[1:]:  # all gathered the same weights
        assert all(torch.equal(outcome.weights[name], w) for name, w in ours[0].weights.items())
    record = ours[0].record
    first, last = (each["loss"] for each in record["evaluations"])
    assert record["environment"]["num_hosts"] == 2 and last < 0.9 * first
    # Three layers are units; the last one's 10 rows are filled up to 12.
    quarters = [128 * 1025 // 4, 128 * 129 // 4, 12 * 129 // 4]
    gathered = sum(3 * message(Int8(1024), n) for n in quarters)  # a ring, in forward alone
    scattered = sum(message(Int4(256), n) for n in quarters)  # to the rank of the same number
    assert record["across_bytes_per_step"] == 2 * [scattered, gathered + scattered]


MISTAKES = {
    "overlap=false": "overlap=false: must be true; strategy=fsdp always exchanges during backward",
    "sync.shard_size=3": "sync.shard_size=3: must be node, null, or a divisor of the",
    "sync.reduce_scatter=mine": "sync.reduce_scatter=mine: allowed: torch, lab",
    "exchange=int8": "exchange=Int8: strategy=fsdp has its own exchange; leave exchange=none",
    "sync.all_gather=int4": "sync.all_gather=int4: allowed: torch, int8",
    "sync.reshard=3": "sync.reshard=3: must be node, null, or a divisor of the",
    "sync.reshard=node sync.shard_size=1": "sync.reshard=node: sync.shard_size=1 already",
    "sync.reduce_scatter=two_levels exchange=int4": "exchange.error_feedback=true: sync.reduce_sc",
    "drift_every=2": "drift_every=2: torch sends all weights and gradients, but",
    "sync.reduce_scatter=lab exchange=powersgd": "exchange=PowerSGD has no reduce-scatter",
}


def test_what_fsdp_cannot_do_is_one_line() -> None:
    found = told(*(("strategy=fsdp", *RUN, "steps=2", *each.split()) for each in MISTAKES))
    for message, line in zip(MISTAKES.values(), found, strict=True):
        assert line.startswith(message) and "\n" not in line

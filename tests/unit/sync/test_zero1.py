"""Zero1: the weights of whole optimizers, from sharded ones whose state any ranks take over."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from lab.distributed.comm import Comm, run_ranks
from lab.distributed.worker import make_worker
from lab.exchange.allreduce import AllReduce
from lab.exchange.compressed import Coded, Int4, OneBit, TopK
from lab.exchange.powersgd import PowerSGD
from lab.settings.errors import ConfigError
from lab.sync.base import Sync, SyncParts
from lab.sync.gradsync import GradSync
from lab.sync.refusals import require_elementwise
from lab.sync.zero1 import Zero1
from lab.training import checkpoint
from lab.training.optim import Optim
from lab.training.trainer import clip_gradients
from tests.support.steps import take_steps

CPU = torch.device("cpu")
Make = Callable[[Any], Optimizer]
MAKES: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: Adam(p, lr=0.01, eps=1e-3),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, eps=1e-2),
}


class Net(nn.Module):
    """Matrices of odd sizes, vectors, a scalar, and a layer without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.never = nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))) * self.scale


torch.manual_seed(0)
NET = Net()  # threads share one generator, so each has a copy


def parts(comm: Comm, overlap: bool = True, precision: str = "fp32", dtype: str = "float32") -> Any:
    net = copy.deepcopy(NET)
    worker = make_worker(overlap, CPU, comm.backend, False)
    exchange = AllReduce(dtype)
    return SyncParts(net, net, exchange, comm, worker, overlap, 1e-4, precision)


def train(sync: Sync, optimizer: Optimizer, steps: range, max_norm: float | None = None) -> None:
    """Take steps on batches of this rank as the trainer does."""

    def inputs(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(sync.comm.size, 4, 7, generator=generator)[sync.comm.rank]

    def clip() -> None:
        if max_norm is not None:
            clip_gradients(_Params(optimizer), max_norm, sync.norm)

    with sync:
        take_steps(sync, optimizer, inputs, steps, before_update=clip)


class _Params(nn.ParameterList):
    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__([p for group in optimizer.param_groups for p in group["params"]])


def sharded(comm: Comm, make: Make, **settings: Any) -> tuple[Zero1, Optimizer]:
    sync = Zero1(parts(comm, **settings))
    return sync, make(sync.optimized(sync.module).parameters())


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize(("size", "overlap"), [(1, True), (2, False), (3, True)])
def test_weights_are_those_of_a_whole_optimizer(
    size: int, overlap: bool, make: Make, max_norm: float | None
) -> None:
    def rank_main(comm: Comm) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        whole = GradSync(parts(comm, overlap))
        train(whole, make(whole.module.parameters()), range(5), max_norm)
        sync, optimizer = sharded(comm, make, overlap=overlap)
        before = comm.traffic.payload_bytes
        train(sync, optimizer, range(5), max_norm)
        num_values = sum(p.numel() for p in sync.module.parameters())
        least = 5 * 8 * num_values * (size - 1) // size
        assert least <= comm.traffic.payload_bytes - before <= 1.6 * least  # a bucket is padded
        return weights(whole.module), weights(sync.module)

    results = run_ranks(size, rank_main)
    for whole, ours in results:
        for name in whole:
            torch.testing.assert_close(ours[name], whole[name], rtol=1e-5, atol=1e-6)
            assert torch.equal(ours[name], results[0][1][name])
            if size < 3 and max_norm is None and make is MAKES["sgd"]:
                assert torch.equal(ours[name], whole[name])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_has_its_share_of_every_bucket_and_slices_cover_all(size: int) -> None:
    def rank_main(comm: Comm) -> dict[str, tuple[int, int, int]]:
        shards = Zero1(parts(comm)).shards
        return {name: (s.start, s.stop, s.values.dim()) for name, s in shards.items()}

    ranks, net = run_ranks(size, rank_main), dict(NET.named_parameters())
    for name, parameter in net.items():
        spans = [rank[name] for rank in ranks if name in rank]
        starts, stops, dims = zip(*spans, strict=True)
        assert (0, *stops) == (*starts, parameter.numel())
        assert all(dim == parameter.dim() for dim in dims)  # decay_vectors tells by it
    largest = max(sum(stop - start for start, stop, _ in rank.values()) for rank in ranks)
    num_buckets = 8
    assert largest <= sum(p.numel() for p in net.values()) / size + num_buckets


def test_gradients_may_travel_in_half_precision_and_are_summed_in_full() -> None:
    def rank_main(comm: Comm, dtype: str) -> tuple[dict[str, Tensor], int]:
        sync, optimizer = sharded(comm, MAKES["sgd"], dtype=dtype)
        train(sync, optimizer, range(5))
        return weights(sync.module), comm.traffic.payload_bytes

    exact = run_ranks(3, partial(rank_main, dtype="float32"))
    for dtype in ("bfloat16", "float16"):
        ranks = run_ranks(3, partial(rank_main, dtype=dtype))
        for (ours, sent), (whole, _) in zip(ranks, exact, strict=True):
            gaps = [(ours[name] - whole[name]).abs().max() for name in ours]
            assert 0 < max(gaps) < 0.01
            assert sent < 0.8 * 5 * 8 * sum(map(Tensor.numel, ours.values()))


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_no_state_is_lost_on_the_way_from_four_ranks_to_others_to_one_whole_and_back(
    make: Make,
) -> None:
    def rank_main(comm: Comm) -> Any:
        sync, optimizer = sharded(comm, make)
        train(sync, optimizer, range(3))
        return checkpoint.slices_of(optimizer, sync.shards)

    def state_on(size: int, whole: dict[str, Any], saved: list[Any]) -> list[Any]:
        """Load a checkpoint of a whole optimizer, or of slices; return what ranks then save."""

        def resumed(comm: Comm) -> Any:
            sync, optimizer = sharded(comm, make)
            named, given = sync.module.named_parameters(), copy.deepcopy((whole, saved))
            checkpoint.load_optimizer(optimizer, named, sync.shards, *given)
            return checkpoint.slices_of(optimizer, sync.shards)

        return run_ranks(size, resumed)

    first = run_ranks(4, rank_main)
    on_three = state_on(3, {}, state_on(2, {}, first))
    net = copy.deepcopy(NET)
    optimizer = make(net.parameters())
    checkpoint.load_optimizer(optimizer, net.named_parameters(), {}, {}, on_three)
    names = checkpoint.names_of(optimizer, net.named_parameters())
    whole = {"optimizer": optimizer.state_dict(), "names": names}
    for before, after in zip(first, state_on(4, whole, [{}]), strict=True):
        assert before["groups"] == after["groups"]
        assert any(piece["state"] for piece in before["slices"].values())
        for name, piece in before["slices"].items():
            assert piece["state"].keys() == after["slices"][name]["state"].keys()
            for key, value in piece["state"].items():
                assert torch.equal(value, after["slices"][name]["state"][key])


def test_a_gradient_that_is_not_finite_is_known_to_all_ranks_in_fp16() -> None:
    def rank_main(comm: Comm) -> tuple[bool, bool]:
        found = []
        for worst in (1.0, torch.inf):
            sync, _ = sharded(comm, MAKES["sgd"], precision="fp16")
            x = torch.ones(4, 7)
            with sync, sync.micro_batch(last=True):
                loss = sync.module(x).mean() * (worst if comm.rank == 1 else 1.0)
                loss.backward()
            finite = sync.finish()
            assert finite is not None
            found.append(bool(finite))
        return found[0], found[1]

    assert run_ranks(3, rank_main) == [(True, False)] * 3


CODECS: dict[str, Callable[[], Coded]] = {
    "onebit": lambda: OneBit(granularity="block", block_size=16),
    "int4": lambda: Int4(block_size=16),
    "topk": lambda: TopK(ratio=0.2),
}


@pytest.mark.parametrize("make", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize(("size", "precision"), [(1, "fp32"), (3, "fp32"), (3, "fp16")])
def test_what_codecs_leave_out_is_kept(
    size: int, precision: str, make: Callable[[], Coded]
) -> None:
    """Delivered + kept = true sums: weights have moved by all that was sent."""

    def rank_main(comm: Comm) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        net, exchange = copy.deepcopy(NET), make()
        worker = make_worker(True, CPU, comm.backend, False)
        made = SyncParts(net, net, exchange, comm, worker, True, 1e-4, precision)
        sync, true = Zero1(made), {n: torch.zeros_like(p) for n, p in net.named_parameters()}
        before = weights(net)
        optimizer = SGD(sync.optimized(net).parameters(), lr=1.0)
        sync.loss_scale = 8.0 if precision == "fp16" else 1.0
        with sync:
            for step in range(5):
                generator = torch.Generator().manual_seed(10 * step + comm.rank)
                named = dict(net.named_parameters())
                drawn = {n: torch.randn(p.shape, generator=generator) for n, p in named.items()}
                with sync.micro_batch(last=True):
                    terms = [(p * drawn[name]).sum() for name, p in named.items()]
                    (sum(terms, torch.zeros(())) * sync.loss_factor).backward()
                sync.finish()
                sync.update(optimizer)
                sync.after_update(last=False)
                for name, values in drawn.items():
                    true[name] += values
        kept = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
        for name, start, values in exchange.residuals({}, comm):
            kept[name].view(-1)[start : start + len(values)] += values
        return {name: before[name] - p for name, p in weights(net).items()}, kept, true

    ranks = run_ranks(size, rank_main)
    for name in ranks[0][0]:
        moved = size * ranks[0][0][name]
        kept, true = (sum(rank[place][name] for rank in ranks) for place in (1, 2))
        torch.testing.assert_close(moved + kept, true, rtol=1e-4, atol=1e-4)
        assert all(torch.equal(rank[0][name], ranks[0][0][name]) for rank in ranks)


def test_what_has_no_reduce_scatter_and_too_many_ranks_are_refused() -> None:
    def with_low_rank(comm: Comm) -> None:
        made = parts(comm)
        Zero1(SyncParts(made.model, made.module, PowerSGD(), comm, made.worker))

    def one_value(comm: Comm) -> None:
        net = nn.Linear(1, 1, bias=False)
        Zero1(SyncParts(net, net, AllReduce(), comm, make_worker(False, CPU, "threads", False)))

    with pytest.raises(ValueError, match="exchange=PowerSGD has no reduce-scatter"):
        run_ranks(2, with_low_rank)
    with pytest.raises(ValueError, match="world_size=2: strategy=zero1 leaves rank 1"):
        run_ranks(2, one_value)


def optim(target: str, **settings: Any) -> Optim:
    return Optim(OmegaConf.create({"_target_": target, **settings}), batch_size=8)


def try_in_slices(target: str) -> None:
    made = optim(target, lr=0.01)
    require_elementwise(target, "why", made.optimizer, made.prepare)


WHOLE = ("torch.optim.Muon", "torch.optim.Adafactor", "tests.unit.sync.test_zero1.CountsCalls")


def test_optimizers_that_look_at_more_than_a_value_are_refused() -> None:
    for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam"):
        try_in_slices(f"torch.optim.{name}")
    for target in WHOLE:
        message = (
            f"optim={target}: why, but this optimizer updates a slice of a parameter differently"
        )
        with pytest.raises(ConfigError, match=message):
            try_in_slices(target)


class CountsCalls(AdamW):
    """AdamW whose rate falls with each call of `step`, whichever parameters have gradients."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr=lr)
        self.calls = 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            group["lr"] /= self.calls
        super().step()

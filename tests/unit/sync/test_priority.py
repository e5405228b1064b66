"""Priority: the bits of the blocking run, on any schedule; the schedule itself, and its trial."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from lab.distributed.comm import Collective, Comm, run_ranks
from lab.distributed.worker import InlineWorker, ThreadWorker, TurnsWorker, Worker
from lab.exchange.allreduce import AllReduce
from lab.exchange.base import Exchange
from lab.exchange.bucket import GradBucket
from lab.exchange.hierarchical import Hierarchical
from lab.exchange.paths import Tree
from lab.measure import OWN, PHASES
from lab.measure.clock import Clock
from lab.sync import priority
from lab.sync.base import SyncParts
from lab.sync.priority import COLD, PrioritySync, ScheduleTrial
from tests.support.cases import maker
from tests.support.steps import made

CPU = torch.device("cpu")
LATE_S = 0.2
WIDE = 2048  # the last layer's weight has 16 KiB: two parts of at most CHUNK_MB
CHUNK_MB = 8 / 1024
NUM_STEPS = 7


class Net(nn.Module):
    """Layers that forward reads in another order than they are registered in, and one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDE, 2)
        self.unused = nn.Linear(6, 3)
        self.first = nn.Linear(6, 6)
        self.middle = nn.Linear(6, WIDE)
        self.middle.bias.requires_grad_(False)
        generator = torch.Generator().manual_seed(0)  # ranks are threads
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.relu(self.first(x))))


class Noting(AllReduce):
    """An all-reduce that notes the names in each bucket, and the optimizer step it belongs to."""

    accepts_prescaled = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, list[str]]] = []

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        self.seen.append((bucket.step, list(bucket.shapes)))
        return super().stages(bucket, comm)


def make(
    comm: Comm, exchange: Exchange, worker: Worker, trials: int = 0, overlap: bool = True
) -> PrioritySync:
    own = {"chunk_mb": CHUNK_MB, "trials": trials}
    return made(PrioritySync, Net(), comm, exchange, worker, overlap=overlap, bucket_mb=25.0, **own)


def train(
    sync: PrioritySync,
    optimizer: torch.optim.Optimizer,
    steps: range,
    micro_batches: int = 1,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Train as the trainer does, and return the weights."""
    sync.step = steps.start
    with sync:
        for step in steps:
            generator = torch.Generator().manual_seed(100 * step + sync.comm.rank)
            for number in range(1, micro_batches + 1):
                x = torch.randn(4, 6, generator=generator).to(dtype)
                with sync.micro_batch(last=number == micro_batches):
                    loss = sync.module(x).square().mean() / micro_batches
                    loss.backward(torch.full_like(loss, sync.loss_factor))
            sync.finish()
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)  # of this step, as Optim sets it
            sync.update(optimizer)
        sync.settle()
    return {n: p.detach().clone() for n, p in sync.module.named_parameters()}


def adamw(sync: PrioritySync) -> torch.optim.Optimizer:
    return torch.optim.AdamW(sync.module.parameters(), weight_decay=0.1, fused=True)


def sgd(sync: PrioritySync) -> torch.optim.Optimizer:
    return torch.optim.SGD(sync.module.parameters(), momentum=0.9, weight_decay=0.1)


def on_ranks(size: int, rank_main: Callable[[PrioritySync], Any], **settings: Any) -> list[Any]:
    """Call `rank_main(sync)` on each of `size` ranks, with a sync of these settings."""
    make_exchange, make_worker = settings.pop("exchange", AllReduce), settings.pop("worker")

    def of_rank(comm: Comm) -> Any:
        worker = make_worker()
        try:
            return rank_main(make(comm, make_exchange(), worker, **settings))
        finally:
            worker.close()

    return run_ranks(size, of_rank)


THREAD = partial(ThreadWorker, CPU)
BLOCKING = {"worker": InlineWorker, "overlap": False}


@pytest.mark.parametrize(
    ("exchange", "optimizer", "worker"),
    [
        *((AllReduce, sgd, worker) for worker in (THREAD, TurnsWorker)),
        *((maker("onebit"), adamw, worker) for worker in (THREAD, TurnsWorker)),
        (Tree, adamw, THREAD),
    ],
)
def test_weights_are_the_bits_of_the_blocking_run(
    exchange: Callable[[], Exchange], optimizer: Callable[..., Any], worker: Callable[[], Worker]
) -> None:
    def run(sync: PrioritySync) -> dict[str, Tensor]:
        return train(sync, optimizer(sync), range(NUM_STEPS), micro_batches=2)

    ours = on_ranks(3, run, worker=worker, exchange=exchange)
    blocking = on_ranks(3, run, exchange=exchange, **BLOCKING)
    for weights in ours:
        assert all(torch.equal(weights[name], blocking[0][name]) for name in weights)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_parameter_may_be_frozen_before_buckets_are_planned_anew(step: int) -> None:
    def run(sync: PrioritySync) -> dict[str, Tensor]:
        def freeze(module: nn.Module, _: object) -> None:
            if sync.step == step:
                module.requires_grad_(False)

        sync.module.get_submodule("first").register_forward_pre_hook(freeze)
        return train(sync, sgd(sync), range(NUM_STEPS))

    ours, blocking = on_ranks(2, run, worker=THREAD, trials=1), on_ranks(2, run, **BLOCKING)
    for weights in ours:
        assert all(torch.equal(weights[name], blocking[0][name]) for name in weights)


def test_both_schedules_of_a_trial_carry_weights_of_two_bytes_as_float32() -> None:
    model = Net().bfloat16()
    own: dict[str, Any] = {"chunk_mb": CHUNK_MB, "trials": 1, "overlap": True, "bucket_mb": 25.0}

    def of_rank(comm: Comm) -> dict[str, Tensor]:
        sync = made(PrioritySync, copy.deepcopy(model), comm, maker("onebit")(), **own)
        return train(sync, sgd(sync), range(10), dtype=torch.bfloat16)

    first, second = run_ranks(2, of_rank)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["first.weight"], model.first.weight)


def test_after_the_trial_too_where_sums_are_taken_in_the_order_of_ranks() -> None:
    def run(sync: PrioritySync) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        return train(sync, adamw(sync), range(10)), sync.choices()

    ours = on_ranks(2, run, worker=THREAD, trials=1)
    ((blocking, none), _) = on_ranks(2, run, **BLOCKING)
    assert none == []
    for weights, choices in ours:
        assert all(torch.equal(weights[name], blocking[name]) for name in weights)
        ((choice),) = choices
        assert choices == ours[0][1]  # all ranks decide alike
        gains = choice["priority_s"] < 0.98 * choice["overlap_s"]
        assert choice["chosen"] == ("priority" if gains else "overlap")


def test_gradients_needed_first_overtake_the_parts_of_a_large_one() -> None:
    def run(sync: PrioritySync) -> list[list[str]]:
        train(sync, sgd(sync), range(2))
        # As if all gradients were there at once: the plan is the order of need.
        sync._arrived = dict.fromkeys(sync.needed, 0.0)
        sync._plan_sends(0.0, 1.0)
        sync._schedule()
        train(sync, sgd(sync), range(2, 3))
        assert isinstance(sync.exchange, Noting)
        return [names for step, names in sync.exchange.seen if step == 2]

    seen, other = on_ranks(2, run, worker=TurnsWorker, exchange=Noting)
    assert seen == other
    layers = ["first", "middle", "last", "unused"]
    needed = [min(layers.index(name.partition(".")[0]) for name in names) for names in seen]
    assert needed == sorted(needed)
    assert needed[0] == 0 and needed[-1] >= 2
    parts = [name for names in seen for name in names if name.startswith("last.weight[")]
    assert parts == ["last.weight[0:2048]", "last.weight[2048:4096]"]


@pytest.mark.parametrize("name", ["onebit", "onebit_adam", "muon"])
def test_exchanges_that_do_more_than_sum_get_whole_parameters(name: str) -> None:
    def run(sync: PrioritySync) -> set[str]:
        return {name for bucket in sync.buckets for name in bucket.shapes}

    (names,) = on_ranks(1, run, worker=InlineWorker, exchange=maker(name))
    assert names == {n for n, p in Net().named_parameters() if p.requires_grad}


def test_a_module_waits_for_its_own_parameters_alone() -> None:
    def run(sync: PrioritySync) -> list[set[str]]:
        left: list[set[str]] = []

        def note(*_: object) -> None:
            left.append({n for i in sync._deferred._updates for n in sync._groups[i].parameters})

        net = sync.module
        assert isinstance(net, Net)
        for layer in (net.first, net.middle, net.last):
            layer.register_forward_hook(note)
        train(sync, sgd(sync), range(4))
        return left[-3:]

    for first, middle, last in on_ranks(2, run, worker=THREAD):
        assert not {n for n in first if n.startswith("first")}
        assert {"middle.weight", "last.weight"} <= first
        assert "middle.weight" not in middle
        assert "last.weight" in middle
        assert not {n for n in last if n.startswith("last")}


def test_a_resumed_run_keeps_plan_and_choice_and_ends_in_the_same_bits() -> None:
    def whole(sync: PrioritySync) -> tuple[dict[str, Tensor], Any, dict[str, Tensor], Any]:
        optimizer = adamw(sync)
        train(sync, optimizer, range(5))
        weights = {n: p.detach().clone() for n, p in sync.module.named_parameters()}
        state = sync.state_dict(), {**optimizer.state_dict()}
        return weights, copy.deepcopy(state), train(sync, optimizer, range(5, 8)), sync.sends

    saved = on_ranks(2, whole, worker=THREAD)

    def resumed(sync: PrioritySync) -> tuple[dict[str, Tensor], Any]:
        weights, (of_sync, of_optimizer), *_ = saved[sync.comm.rank]
        sync.module.load_state_dict(weights)
        optimizer = adamw(sync)
        optimizer.load_state_dict(of_optimizer)
        sync.load_state_dict(of_sync)
        return train(sync, optimizer, range(5, 8)), sync.sends

    for (_, _, weights, sends), (again, sends_again) in zip(
        saved, on_ranks(2, resumed, worker=THREAD), strict=True
    ):
        assert sends == sends_again
        assert all(torch.equal(weights[name], again[name]) for name in weights)

    def elsewhere(sync: PrioritySync) -> Any:
        sync.load_state_dict(saved[0][1][0])
        return sync.order, sync.needed, sync.sends

    order, needed, sends = on_ranks(1, elsewhere, worker=THREAD)[0]
    assert order and needed
    assert sends is None  # another number of ranks: planned anew


@pytest.mark.parametrize("worker", [THREAD, TurnsWorker])
def test_waits_in_forward_are_no_work_of_the_ranks_that_wait(worker: Callable[[], Worker]) -> None:
    def run(sync: PrioritySync) -> tuple[dict[str, float], float, float]:
        sync.clock = clock = Clock(CPU, breakdown=True)
        net, optimizer = sync.module, sgd(sync)
        if sync.comm.rank == 1:
            net.get_parameter("first.weight").register_hook(lambda _: time.sleep(LATE_S))
        with sync:
            for _ in range(8):
                with clock.step():
                    with sync.micro_batch(last=True):
                        with clock.phase("forward"):
                            loss = net(torch.ones(4, 6)).square().mean()
                        with clock.phase("backward"):
                            loss.backward(torch.full_like(loss, sync.loss_factor))
                    with clock.phase("exchange"):
                        sync.finish()
                    with clock.phase("update"):
                        sync.update(optimizer)
            own = clock.own_times().own_seconds()[4:].min(axis=0)
            waited_s = clock.phase_seconds()[4:, PHASES.index("exchange")].min()
            before_s = clock.total_seconds()
            sync.settle()
        left_s = clock.total_seconds() - before_s
        return dict(zip(OWN, own.tolist(), strict=True)), float(waited_s), left_s

    (own, waited_s, _), (late, *_), _ = ranks = on_ranks(3, run, worker=worker)
    assert waited_s > LATE_S / 2  # within forward: `finish` does not wait
    assert all(left_s > 0 for *_, left_s in ranks)  # a pause is charged with what is left
    assert late["backward"] >= LATE_S > 2 * own["backward"]
    rest = ("forward", "exchange", "update")
    assert all(each[phase] < LATE_S / 2 for each in (own, late) for phase in rest)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trials": -1}, "sync.trials=-1: must be an integer from 0 to 1000000"),
        ({"trials": True}, "sync.trials=true: must be an integer"),
        ({"chunk_mb": 0}, "sync.chunk_mb=0: must be a number above 0"),
        ({"chunk_mb": "8"}, "sync.chunk_mb=8: must be a number above 0"),
        ({"precision": "fp16"}, "precision=fp16: skips steps that overflow, but a step cannot be"),
        ({"compiled": True}, "model: compiled layers cannot wait"),
        ({"exchange": maker("auto")}, "exchange=Auto: sync=priority also chooses by measurement"),
        ({"exchange": lambda: Hierarchical(maker("auto")())}, "exchange=Auto: sync=priority"),
    ],
)
def test_refusals(settings: dict[str, Any], message: str) -> None:
    arguments = {"trials": 0, "chunk_mb": 8, **settings}
    run = True, 25.0, arguments.pop("precision", "fp32")
    model = module = Net()
    if arguments.pop("compiled", False):
        module = cast(nn.Module, torch.compile(model, backend="eager"))
    exchange = arguments.pop("exchange", AllReduce)()

    def rank_main(comm: Comm) -> None:
        parts = SyncParts(model, module, exchange, comm, InlineWorker(), *run)
        PrioritySync(parts, **arguments)

    with pytest.raises(ValueError, match="^" + message.replace(".", r"\.")):
        run_ranks(1, rank_main)


PLANNED = 1  # the step in which the order was planned


class Standing:
    """A clock that stands until a step moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(priority, "mark", lambda _device: self.now)


def test_first_steps_of_each_row_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, tried, rows = Standing(monkeypatch), ScheduleTrial(2, CPU), list[bool]()
    rows_s = [(False, [9.0] * (PLANNED + COLD)), (True, [9.0] * COLD)]
    rows_s += [(False, [9.0, 1.0, 3.0]), (True, [9.0, 1.0, 1.0])]
    costs = None
    for second, times in rows_s:
        for seconds in times:
            assert costs is None
            rows.append(tried.second == second)
            clock.now += seconds
            costs = tried.end_step()
    assert all(rows)
    assert costs == [2.0, 1.0]


def test_a_step_in_which_other_work_ran_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, tried = Standing(monkeypatch), ScheduleTrial(1, CPU)
    num_steps = 0
    while (costs := tried.end_step()) is None:
        num_steps += 1
        clock.now += 2.0 if tried.second else 1.0
        if num_steps == PLANNED + COLD + COLD + 1:  # next is the first that counts
            clock.now += 100.0  # an evaluation
            tried.interrupt()
    assert costs == [1.0, 2.0]


@pytest.mark.parametrize(("costs", "second"), [([1.0, 0.99], False), ([1.0, 0.97], True)])
def test_the_second_has_to_gain_more_than_noise(costs: list[float], second: bool) -> None:
    tried = ScheduleTrial(3, CPU)
    tried.costs = costs
    assert tried.second == second

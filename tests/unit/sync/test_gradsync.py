"""When gradients are exchanged: buckets, hooks, order, accumulation."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lab.distributed.comm import Collective, Comm, Completed, run_ranks
from lab.distributed.worker import InlineWorker, ThreadWorker, Worker
from lab.exchange.allreduce import AllReduce
from lab.exchange.bucket import BucketPlan, GradBucket, plan
from lab.sync.gradsync import GradSync
from lab.sync.priority import PrioritySync
from tests.support.steps import made

CPU = torch.device("cpu")


class Net(nn.Module):
    """A shared layer used twice, a layer used by some inputs only, and one never used."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)
        self.never = nn.Linear(6, 3)
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor, use: bool = True) -> Tensor:
        x = self.shared(torch.relu(self.shared(x)))
        return self.out(torch.relu(self.sometimes(x) if use else x))


class Recording(AllReduce):
    """An all-reduce that records its buckets in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        self.seen.append(next(iter(bucket.shapes)))
        return super().stages(bucket, comm)


torch.manual_seed(0)
NET = Net()  # threads share one generator, so each has a copy


def make(comm: Comm, overlap: bool, net: nn.Module = NET) -> tuple[GradSync, Recording]:
    net, exchange = copy.deepcopy(net), Recording()
    worker: Worker = ThreadWorker(CPU) if overlap else InlineWorker()
    return made(GradSync, net, comm, exchange, worker, overlap=overlap, bucket_mb=0), exchange


def step(sync: GradSync, batches: list[tuple[Tensor, dict[str, Any]]]) -> dict[str, Tensor]:
    """Return one optimizer step's gradients; each batch is a micro-batch."""
    for number, (x, options) in enumerate(batches, start=1):
        with sync.micro_batch(last=number == len(batches)):
            loss = sync.module(x, **options).square().mean() / len(batches)
            loss.backward(torch.full_like(loss, sync.loss_factor))
    assert sync.finish() is None  # an all-reduce does not check whether gradients are finite
    return {n: p.grad.clone() for n, p in sync.module.named_parameters() if p.grad is not None}


def on_ranks(
    size: int, overlap: bool, batches_of: Callable[[int], list[tuple[Tensor, dict[str, Any]]]]
) -> list[tuple[dict[str, Tensor], list[str]]]:
    def rank_main(comm: Comm) -> tuple[dict[str, Tensor], list[str]]:
        sync, exchange = make(comm, overlap)
        with sync:
            gradients = step(sync, batches_of(comm.rank))
        sync.worker.close()
        return gradients, exchange.seen

    return run_ranks(size, rank_main)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_are_those_of_all_samples_and_overlap_changes_no_bit(size: int) -> None:
    x = torch.randn(size, 4, 6)
    blocking, overlapped = (
        on_ranks(size, overlap, lambda rank: [(x[rank], {})]) for overlap in (False, True)
    )
    whole = copy.deepcopy(NET)
    whole(x.flatten(0, 1)).square().mean().backward()
    expected = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    for (gradients, _), (others, _) in zip(blocking, overlapped, strict=True):
        assert gradients.keys() == expected.keys()  # what no rank reached has none
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-7)
            assert torch.equal(gradients[name], others[name])


def test_all_ranks_exchange_in_one_order_though_gradients_arrive_in_another() -> None:
    x = torch.randn(4, 6)
    results = on_ranks(3, True, lambda rank: [(x, {"use": rank == 1})])
    orders = [seen for _, seen in results]
    assert orders[0] == ["out.bias", "never.bias", "sometimes.bias", "shared.bias"]
    assert orders == [orders[0]] * 3


class Backwards(nn.Module):
    """A model whose first layer is registered last; the caller orders the other two."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(6, 6, bias=False)
        self.c = nn.Linear(6, 6, bias=False)
        self.a = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor, swap: bool) -> Tensor:
        second, third = (self.c, self.b) if swap else (self.b, self.c)
        return third(torch.relu(second(torch.relu(self.a(x)))))


@pytest.mark.parametrize("overlap", [False, True])
def test_after_the_first_step_all_follow_the_order_of_rank_0(overlap: bool) -> None:
    x = torch.randn(4, 6)

    def rank_main(comm: Comm) -> tuple[list[str], list[str] | None]:
        sync, exchange = make(comm, overlap, Backwards())
        with sync:
            for _ in range(2):
                step(sync, [(x, {"swap": comm.rank > 0})])
        sync.worker.close()
        return exchange.seen, sync.order

    order = ["c.weight", "b.weight", "a.weight"]
    seen = ["a.weight", "c.weight", "b.weight", *order]
    assert run_ranks(3, rank_main) == [(seen, order)] * 3


def test_accumulation_exchanges_once_and_keeps_what_only_an_early_micro_batch_used() -> None:
    x = torch.randn(2, 4, 6)
    batches = [(x[0], {"use": True}), (x[1], {"use": False})]
    (gradients, seen), *_ = on_ranks(2, True, lambda _: batches)
    assert len(seen) == 4
    whole = copy.deepcopy(NET)
    for images, options in batches:
        (whole(images, **options).square().mean() / 2).backward()
    assert whole.sometimes.weight.grad is not None
    torch.testing.assert_close(gradients["sometimes.weight"], whole.sometimes.weight.grad)


def test_overlap_starts_exchanges_inside_backward_until_exit() -> None:
    def rank_main(comm: Comm) -> list[int]:
        net, exchange = Net(), Recording()  # exchanges run where they are submitted
        sync = made(GradSync, net, comm, exchange, overlap=True, bucket_mb=0)

        def begun_in_backward() -> int:
            exchange.seen.clear()
            with sync.micro_batch(last=True):
                sync.module(torch.randn(4, 6)).square().mean().backward()
            return len(exchange.seen)

        seen: list[int] = []
        with sync:
            for _ in range(2):
                seen.append(begun_in_backward())
                sync.finish()
        return [*seen, begun_in_backward()]  # hooks are gone

    # The first step counts how often each gradient grows; "never" has none, so it comes last.
    assert run_ranks(1, rank_main) == [[0, 3, 0]]


class Chain(nn.Module):
    """Layers that the caller chooses, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abc":
            self.add_module(name, nn.Linear(6, 6))

    def forward(self, x: Tensor, order: str) -> Tensor:
        for name in order:
            x = torch.tanh(self.get_submodule(name)(x))
        return x


@pytest.mark.parametrize("bucket_mb", [None, 0])
@pytest.mark.parametrize(
    ("orders", "in_backward"),
    [
        ("abc abc abc", [0, 1, 1]),
        ("abc cba abc abc", [0, 0, 1, 1]),  # the last gradient comes first: all are watched again
        ("abc ab abc a abc", [0, 0, 1, 0, 1]),  # one is missing; a bucket without it may leave
        ("bc abc abc", [0, 0, 1]),  # the first step lacked what comes last
        ("abc ab+abc abc", [0, 1, 1]),  # two micro-batches
        ("abc *abc abc abc", [0, 0, 1, 1]),  # gradients are zeroed, not cleared
        ("abc,abc abc,abc", [0, 1]),  # two backwards
    ],
)
def test_the_mean_is_right_whichever_gradient_comes_last(
    orders: str, in_backward: list[int], bucket_mb: float | None
) -> None:
    x = torch.randn(2, 4, 6)
    torch.manual_seed(1)
    start = Chain()

    def losses(net: nn.Module, micro_batch: str, rank: int) -> Iterator[Tensor]:
        for order in micro_batch.strip("*").split(","):
            yield net(x[rank], order).square().sum()

    def rank_main(comm: Comm) -> list[int]:
        net, exchange = copy.deepcopy(start), Recording()
        sync = made(GradSync, net, comm, exchange, overlap=True, bucket_mb=bucket_mb)
        begun: list[int] = []
        with sync:
            for step in orders.split():
                net.zero_grad(set_to_none="*" not in step)
                exchange.seen.clear()
                *others, last = step.split("+")
                for micro_batch in (*others, last):
                    with sync.micro_batch(last=micro_batch is last):
                        for loss in losses(net, micro_batch, comm.rank):
                            loss.backward(torch.full_like(loss, sync.loss_factor))
                begun.append(len(exchange.seen))
                sync.finish()
                alone = copy.deepcopy(start)
                for rank, micro_batch in itertools.product(range(2), (*others, last)):
                    for loss in losses(alone, micro_batch, rank):
                        (loss / 2).backward()
                for name, parameter in net.named_parameters():
                    expected = alone.get_parameter(name).grad
                    found = parameter.grad
                    assert (found is None) == (expected is None)
                    if found is not None:
                        torch.testing.assert_close(found, expected)
        return begun

    for begun in run_ranks(2, rank_main):
        assert bucket_mb == 0 or begun == in_backward


@pytest.mark.parametrize("counts", [True, False])
def test_a_gradient_that_grows_after_its_bucket_has_left_is_refused(counts: bool) -> None:
    def rank_main(comm: Comm) -> None:
        sync = made(GradSync, net := Chain(), comm, Recording(), overlap=True, bucket_mb=None)
        x = torch.randn(4, 6)
        with sync:
            for more in ([], [], ["bc"]):  # the last one leaves out a
                net.zero_grad()
                with sync.micro_batch(last=True):
                    net(x, "abc").sum().backward()
                for order in more:
                    with sync.micro_batch(last=counts):
                        net(x, order).sum().backward()
                sync.finish()

    with pytest.raises(RuntimeError, match=r"^[bc]\.\w+: .* after (its gradient|it) had been sent"):
        run_ranks(1, rank_main)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.words(words))


def test_a_sparse_gradient_that_grows_after_its_bucket_has_left_is_refused() -> None:
    def rank_main(comm: Comm) -> None:
        sync = made(GradSync, net := Sparse(), comm, Recording(), overlap=True, bucket_mb=None)
        words = torch.tensor([1, 2])
        with sync:
            for late in (False, False, True):
                net.zero_grad()
                with sync.micro_batch(last=True):
                    net(words).sum().backward()
                    if late:
                        net.out(torch.ones(1, 3)).sum().backward()
                sync.finish()
                assert all(p.grad is not None and not p.grad.is_sparse for p in net.parameters())

    with pytest.raises(RuntimeError, match=r"^out\.\w+: .* after (its gradient|it) had been sent"):
        run_ranks(1, rank_main)


class Later(Completed):
    """A collective that notes when it is waited for."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait(self) -> None:
        self.log.append(self.name)


def test_other_workers_end_a_job_with_what_it_began() -> None:
    log: list[str] = []
    threads = ThreadWorker(CPU)
    for worker in (InlineWorker(), threads):
        worker.submit("a", lambda: iter([Later(log, "a")]))
        worker.wait()
    threads.close()
    assert log == ["a", "a"]


def test_error_of_an_exchange_reaches_finish() -> None:
    class Broken(AllReduce):
        def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
            raise ConnectionError("peer is gone")

    def rank_main(comm: Comm) -> None:
        net, worker = Net(), ThreadWorker(CPU)
        with made(GradSync, net, comm, Broken(), worker, overlap=True, bucket_mb=0) as sync:
            step(sync, [(torch.randn(4, 6), {})])

    with pytest.raises(ConnectionError, match="peer is gone"):
        run_ranks(1, rank_main)


def test_loss_scale_is_taken_off_before_the_exchange() -> None:
    x = torch.randn(4, 6)

    def rank_main(comm: Comm) -> list[Tensor]:
        found = []
        for scale in (1.0, 1024.0):
            sync, _ = make(comm, overlap=False)
            sync.loss_scale = scale
            found.append(step(sync, [(x, {})])["out.weight"])
        return found

    torch.testing.assert_close(*run_ranks(1, rank_main)[0])


def sizes_of(buckets: list[BucketPlan]) -> list[list[str]]:
    return [list(bucket.parameters) for bucket in buckets]


def test_plan_by_bucket_size() -> None:
    model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600), nn.Linear(600, 10))
    assert sizes_of(plan(model, None)) == [[n for n, _ in list(model.named_parameters())[::-1]]]
    assert sizes_of(plan(model, 0)) == [
        ["2.bias", "2.weight"], ["1.bias", "1.weight"], ["0.bias", "0.weight"],
    ]  # fmt: skip
    # 600 x 600 floats are 1.37 MiB: above 1 MiB a parameter travels alone, small ones together, and
    # each bucket takes its turn when its last gradient is due.
    small = ["2.bias", "2.weight", "1.bias", "0.bias"]
    assert sizes_of(plan(model, 1)) == [["1.weight"], small, ["0.weight"]]
    # Little stays together, and large parameters travel alone.
    layers = [nn.Linear(600, 600) for _ in range(4)]  # of 1.37 MiB
    assert [len(group) for group in sizes_of(plan(nn.Sequential(*layers[:2]), 25))] == [4]
    model = nn.Sequential(nn.Linear(1100, 1100), *layers, nn.Linear(10, 10))  # the first: 4.6 MiB
    last = ["5.bias", "5.weight", "4.bias"]  # and what does not fit into the first MiB:
    between = [n for i in (4, 3, 2, 1, 0) for n in (f"{i}.bias", f"{i}.weight")][1:-1]
    assert sizes_of(plan(model, 25)) == [last, between, ["0.weight"]]


def test_the_gradient_of_a_layer_is_exchanged_where_autograd_left_it() -> None:
    layer = nn.Linear(4, 3, bias=False)
    layer.weight.grad = torch.randn(3, 4)
    (bucket,) = plan(layer, 0)
    assert bucket.pack(0).flat.data_ptr() == layer.weight.grad.data_ptr()


class Aliased(nn.Module):
    """Two large parameters whose gradients are views of the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(1100, 1000)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.a.view(-1) + self.b.view(-1)) * x).sum()


def test_gradients_that_share_memory_are_averaged_once() -> None:
    def rank_main(comm: Comm) -> list[float]:
        net = Aliased()
        with made(GradSync, net, comm, overlap=True, bucket_mb=25) as sync:
            with sync.micro_batch(last=True):
                (net(torch.tensor(1.0 + comm.rank)) * sync.loss_factor).backward()
            sync.finish()
        return [float(p.grad.mean()) for p in net.parameters() if p.grad is not None]

    assert run_ranks(2, rank_main) == [[1.5, 1.5]] * 2


class Stacked(nn.Module):
    """Two layers whose weights are added up before use: backward gives both one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        if not both:
            return self.b(self.a(x))
        return x @ torch.stack([self.a.weight, self.b.weight]).sum(0)


@pytest.mark.parametrize("kind", [GradSync, partial(PrioritySync, chunk_mb=4, trials=0)])
def test_layers_whose_gradients_share_memory_are_averaged_once(
    kind: Callable[..., GradSync],
) -> None:
    def rank_main(comm: Comm) -> None:
        net, expected = Stacked(), 1.0 + (comm.size - 1) / 2
        with made(kind, net, comm, overlap=True, bucket_mb=0) as sync:
            for _ in range(3):
                x = torch.full((1, 4), 1.0 + comm.rank)
                with sync.micro_batch(last=True):
                    (net(x, True).sum() * sync.loss_factor).backward()
                sync.finish()
                sync.settle()
                for parameter in net.parameters():
                    assert parameter.grad is not None
                    assert torch.equal(parameter.grad, torch.full((4, 4), expected))
                net.zero_grad()

    run_ranks(2, rank_main)


def test_gradients_that_come_to_share_memory_are_refused() -> None:
    def rank_main(comm: Comm) -> None:
        net = Stacked()
        with made(GradSync, net, comm, overlap=True, bucket_mb=0) as sync:
            for both in (False, False, True):
                net.zero_grad()
                with sync.micro_batch(last=True):
                    loss = net(torch.ones(1, 4), both).sum()
                    if not both:
                        loss.backward()
                        sync.finish()
                        continue
                    with pytest.raises(RuntimeError, match=r"weight: its gradient shares memory"):
                        loss.backward()

    run_ranks(2, rank_main)


@pytest.mark.parametrize("channels_last_gradient", [True, False])
def test_gradients_keep_the_memory_layout_of_their_parameters(channels_last_gradient: bool) -> None:
    layout = torch.channels_last if channels_last_gradient else torch.contiguous_format
    weight = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    weight.grad = torch.randn(2, 3, 4, 4).to(memory_format=layout)
    expected = weight.grad.clone()
    bucket = BucketPlan({"w": weight}).pack(0)
    assert torch.equal(bucket.flat, expected.permute(0, 2, 3, 1).flatten())
    bucket.flat.mul_(2)
    assert torch.equal(weight.grad, 2 * expected)
    assert weight.grad.stride() == weight.stride()


def test_a_parameter_that_comes_after_steps_without_a_batch_is_refused() -> None:
    def rank_main(comm: Comm) -> None:
        sync, _ = make(comm, overlap=False)
        with sync:
            sync.finish()
            late = nn.Parameter(torch.ones(2))
            sync.module.register_parameter("late", late)
            late.grad = torch.ones(2)
            with pytest.raises(RuntimeError, match=r"^late: was frozen or missing when"):
                sync.finish()

    run_ranks(1, rank_main)


def test_buckets_know_parameters_by_the_names_that_they_have_without_torch_compile() -> None:
    """Residuals, orders and a certificate are kept by name."""
    compiled = nn.Module()
    compiled._orig_mod = nn.Linear(6, 6)
    (bucket,) = plan(nn.Sequential(compiled), bucket_mb=None)
    assert sorted(bucket.parameters) == ["0.bias", "0.weight"]

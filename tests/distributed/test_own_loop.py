"""Loops of one's own: states, groups, uneven inputs, and models that change while they train.

tests/zoo/test_own_loop.py trains what the table in docs/reference/own_loop.md says works.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import lab
from tests.support.ranks import CREW, spawn

STEPS, WIDTH, CLASSES = 5, 64, 10
Optimizers = list[torch.optim.Optimizer]


class Net(nn.Module):
    """A small classifier."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # After its first step DDP's bucket has another order, with the same parameter in front.
        self.last = nn.Linear(WIDTH, CLASSES, bias=False)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.second(self.first(inputs).relu()).relu())


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(8, WIDTH, generator=generator)
    return inputs, torch.randint(CLASSES, (8,), generator=generator)


@contextlib.contextmanager
def entered(way: str, net: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Enter "hook", "sync" or "fsdp" and a strategy; yield the module, and what has its state."""
    kind, _, strategy = way.partition(" ")
    if kind == "sync":
        with lab.grad_sync(net, strategy, overlap=True, bucket_mb=0.02) as sync:
            yield net, sync
    elif kind == "fsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
        yield net, lab.fsdp_reduce_scatter(net, strategy)
    else:
        module = DistributedDataParallel(net)
        yield module, lab.attach(module, strategy)


def finish(kept: Any) -> None:
    """Call lab.grad_sync's `finish`, which the others do not need."""
    if hasattr(kept, "finish"):
        kept.finish()


# The group of the last test: if a model of DDP's were the last to hold it, torch would end the
# group's threads while it has Python's lock, for which one of them may wait.
_held: list[object] = []


@contextlib.contextmanager
def joined() -> Iterator[int]:
    """Join the crew's ranks as a user's program does, and yield the rank."""
    gc.collect()  # models of tests before
    dist.init_process_group("gloo")
    _held[:] = [dist.group.WORLD]
    dist.barrier()  # else one that leaves at once closes connections that others still make
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference between two states of a model."""
    return max(float((one[name] - other[name]).detach().abs().max()) for name in one)


def spoiled() -> list[str]:
    with joined() as rank:
        messages = []
        for way in ("hook onebit", "sync onebit"):
            inputs = batch(0, rank)[0] * (torch.nan if rank else 1.0)
            with entered(way, Net()) as (module, kept):
                try:
                    for _ in range(2):
                        module(inputs).sum().backward()
                        finish(kept)
                except FloatingPointError as error:
                    messages.append(str(error))
        return messages


# After an exception in backward torch may hang when this process frees a later DDP, with or without
# the lab: these ranks do nothing else.
def test_without_a_scaler_gradients_that_are_not_finite_are_an_error() -> None:
    for messages in spawn(2, spoiled):
        assert len(messages) == 2
        assert all(m.startswith("exchange=OneBit: gradients of the last step") for m in messages)


def among_some() -> float | None:
    with joined() as rank:
        group = dist.new_group([0, 2])
        if rank == 1:
            return None
        net = Net()
        ddp = DistributedDataParallel(net, process_group=group)
        state = lab.attach(ddp, "onebit")
        assert (state.comm.rank, state.comm.size) == (rank // 2, 2)
        ddp(batch(0, rank)[0]).sum().backward()
        assert net.first.weight.grad is not None
        return float(net.first.weight.grad.sum())


def test_a_ddp_among_some_ranks_needs_no_others() -> None:
    first, outside, second = CREW.call(3, among_some)
    assert first == second
    assert outside is None


def uneven() -> list[dict[str, Tensor]]:
    with joined() as rank:
        trained = []
        for way in ("ddp", "allreduce", "onebit"):
            net = Net()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            module = DistributedDataParallel(net, bucket_cap_mb=0.02)
            if way != "ddp":
                lab.attach(module, way)
            with module.join():
                for step in range(STEPS - 2 * rank):
                    optimizer.zero_grad()
                    inputs, targets = batch(step, rank)
                    F.cross_entropy(module(inputs), targets).backward()
                    optimizer.step()
            trained.append({name: p.detach() for name, p in net.named_parameters()})
        return trained


def test_a_rank_may_have_fewer_inputs_in_join() -> None:
    first, second = CREW.call(2, uneven)
    assert all(apart(one, other) == 0 for one, other in zip(first, second, strict=True))
    plain, allreduce, onebit = first
    assert apart(plain, allreduce) == 0
    assert 1e-4 < apart(plain, onebit) < 0.1


def hooked_already() -> list[str]:
    with joined():
        messages = []
        policy = _MixedPrecision(param_dtype=torch.bfloat16)
        hooked = DistributedDataParallel(Net())
        lab.attach(hooked, "onebit")
        with mock.patch("torch.Stream"):  # a build for CUDA makes none without a GPU
            mixed = DistributedDataParallel(Net(), mixed_precision=policy)
        for ddp in (hooked, mixed):
            with pytest.raises(lab.ConfigError) as caught:
                lab.attach(ddp, "onebit")
            messages.append(str(caught.value))
        return messages


def test_ddp_takes_one_hook() -> None:
    (messages,) = CREW.call(1, hooked_already)
    assert len(messages) == 2
    assert all("has a communication hook" in message for message in messages)


def names_when_compiled() -> list[set[str]]:
    with joined():
        found = []
        for outside in (False, True):
            net: Any = Net() if outside else torch.compile(Net(), backend="aot_eager")
            ddp: Any = DistributedDataParallel(net)
            ddp = torch.compile(ddp, backend="aot_eager") if outside else ddp
            state = lab.attach(ddp, "onebit")
            ddp(batch(0, 0)[0]).sum().backward()
            found.append(set(state.state_dict()["exchange"]["residual"]))
        return found


def test_residuals_have_the_models_names_however_it_is_compiled() -> None:
    (found,) = CREW.call(1, names_when_compiled)
    names = {f"{layer}.weight" for layer in ("first", "second", "last")}
    assert found == [names, names]


def other_states() -> list[str]:
    with joined():
        messages = []
        state = lab.attach(DistributedDataParallel(Net()), "topk").state_dict()
        with pytest.raises(ValueError, match="state_dict: contains") as caught:
            lab.attach(DistributedDataParallel(Net()), "onebit").load_state_dict(state)
        messages.append(str(caught.value))
        with lab.grad_sync(Net(), "onebit") as sync:
            Net()(batch(0, 0)[0]).sum().backward()
            with pytest.raises(ValueError, match="state_dict: contains"):
                sync.load_state_dict({"step": {"step": torch.tensor(1)}})
        return messages


def test_a_state_of_another_exchange_is_refused() -> None:
    expected = "state_dict: contains residual; OneBit needs owner, owner_start, residual"
    assert CREW.call(2, other_states) == [[expected], [expected]]


def of_another(way: str) -> dict[str, str]:
    """Return what refuses states that are not this rank's, by what is wrong with them."""
    with joined() as rank, entered(way, Net()) as (module, kept):
        module(batch(0, rank)[0]).sum().backward()
        finish(kept)
        buffer = io.BytesIO()
        torch.save(kept.state_dict(), buffer)
        own = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        kept.load_state_dict(own)
        earlier = own["of"]["exchange"].replace("lab.exchange.", "lab.exchange.before.")
        kept.load_state_dict({**own, "of": own["of"] | {"exchange": earlier}})
        shapes = {**own["of"]["parameters"], "second.bias": [3]}
        others = {
            "rank": own["of"] | {"rank": 1 - rank},  # as one file for all ranks leaves it
            "size": own["of"] | {"size": 4},
            "exchange": own["of"] | {"exchange": '{"_target_": "mine.Own"}'},
            "model": own["of"] | {"parameters": shapes},
            "old": None,
        }
        found = dict[str, str]()
        for wrong, mark in others.items():
            try:
                others_own = {k: v for k, v in own.items() if k != "of"}
                kept.load_state_dict(others_own | ({"of": mark} if mark else {}))
            except ValueError as error:
                found[wrong] = str(error)
        with pytest.raises(
            ValueError, match="must be what state_dict.* returned, but has type NoneType"
        ):
            kept.load_state_dict(None)
        return found


@pytest.mark.parametrize("way", ["hook onebit", "sync powersgd", "fsdp onebit"])
def test_a_state_of_another_rank_exchange_or_model_is_refused(way: str) -> None:
    for rank, found in enumerate(CREW.call(2, of_another, way)):
        assert found["rank"].startswith(
            f"state_dict: belongs to rank {1 - rank} of 2, but this is rank {rank} of 2; each rank "
            "has its own residuals, so save and load one file per rank"
        )
        assert f"belongs to rank {rank} of 4, but this is rank {rank} of 2" in found["size"]
        assert 'contains residuals of exchange={"_target_": "mine.Own"}, but' in found["exchange"]
        assert found["model"].endswith("another model: second.bias is [3] there and [64] here")
        assert "contains residuals but does not name their rank" in found["old"]


@pytest.mark.parametrize("way", ["hook allreduce", "sync tree", "fsdp int8"])
def test_a_state_without_residuals_is_every_ranks(way: str) -> None:
    for found in CREW.call(2, of_another, way):
        assert set(found) == {"model"}


def backward_several_times() -> tuple[float, str]:
    """Return how far two backwards in each step are off, and what a third one meets."""
    off = 0.0
    with joined() as rank, lab.grad_sync(net := Net(), "overlap", bucket_mb=0.02) as sync:
        for step in range(2):
            net.zero_grad()
            for part in range(2):
                net(batch(2 * step + part, rank)[0]).sum().backward()
            sync.finish()
            (alone := copy.deepcopy(net)).zero_grad()
            for part, each in itertools.product(range(2), range(2)):
                (alone(batch(2 * step + part, each)[0]).sum() / 2).backward()
            off = max(off, apart(dict(gradients(net)), dict(gradients(alone))))
        for _ in range(2):
            net(batch(0, 0)[0]).sum().backward()
        with pytest.raises(
            RuntimeError, match="backward reached it again after its gradient had"
        ) as caught:
            net(batch(0, 0)[0]).sum().backward()
        sync.worker.wait()
        return off, str(caught.value)


def gradients(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in net.named_parameters():
        if parameter.grad is not None:
            yield name, parameter.grad


def test_as_many_backwards_as_in_the_first_step_are_exchanged_once() -> None:
    for off, text in spawn(2, backward_several_times):
        assert off < 1e-6
        assert "3 in this step, expected 2" in text


def without_a_process_group() -> tuple[dict[str, Tensor], int]:
    rank = int(os.environ["RANK"])
    first = nn.Linear(4, 4)
    nn.init.constant_(first.weight, rank + 1.0)
    net = nn.Sequential(first, nn.BatchNorm1d(4))
    net.register_buffer("mask", torch.tensor([rank == 0, True]))
    with lab.grad_sync(net, "tree") as sync:
        size = dist.get_world_size()
        assert (sync.comm.rank, sync.comm.size) == (rank, size)
    dist.destroy_process_group()
    return {name: value.float() for name, value in net.state_dict().items()}, size


def test_grad_sync_makes_the_process_group_and_replicas_equal() -> None:
    (first, size), (second, _) = CREW.call(2, without_a_process_group)
    assert size == 2
    assert apart(first, second) == 0
    assert first["0.weight"].eq(1).all() and first["mask"].all()


def unmoved(net: nn.Module) -> None: ...


def moved(net: nn.Module) -> None:
    net.double().float()  # Module.to gives `grad` other memory


def relaid(net: nn.Module) -> None:
    cast(Any, net).to(memory_format=torch.channels_last)


def scaled_in_place(net: nn.Module) -> None:
    for parameter in net.parameters():
        assert parameter.grad is not None
        parameter.grad.data = parameter.grad.data * 2


def halved(net: nn.Module) -> None:
    net.bfloat16()


def replaced(net: nn.Module) -> None:
    net.last = nn.Linear(8 * 4 * 4, 3)  # type: ignore[assignment]


def reassigned(net: nn.Module) -> None:
    net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Linear(8 * 4 * 4, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.first(images).relu().flatten(1))


def change_while_training(change: Callable[[nn.Module], None]) -> dict[str, Tensor] | str:
    """Train with gradients left in place while the model changes; return weights, or the error."""
    dist.init_process_group("gloo")
    net, rank = Images(), dist.get_rank()
    with lab.grad_sync(net, "allreduce", overlap=True, check=None) as sync:
        for step in range(6):
            inputs = torch.randn(
                4, 3, 6, 6, generator=torch.Generator().manual_seed(2 * step + rank)
            )
            try:
                net(inputs.to(net.last.weight.dtype)).square().mean().backward()
                sync.finish()
            except RuntimeError as error:
                return str(error)
            torch.optim.SGD(net.parameters(), lr=0.1).step()
            if step == 3:
                change(net)
            net.zero_grad()
    dist.destroy_process_group()
    return {name: value.contiguous() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("change", [moved, relaid, scaled_in_place])
def test_gradients_that_are_moved_are_exchanged_all_the_same(
    change: Callable[[nn.Module], None],
) -> None:
    first, second = spawn(2, change_while_training, change)
    unchanged, _ = spawn(2, change_while_training, unmoved)
    assert apart(first, second) == 0
    assert apart(first, unchanged) < 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (halved, "is torch.bfloat16 now, and was torch.float32 when its exchange was set up"),
        (replaced, "last.weight: was frozen or missing when the exchange was set up"),
        (reassigned, "was frozen or missing when the exchange was set up"),
    ],
)
def test_a_model_whose_parameters_change_is_refused(
    change: Callable[[nn.Module], None], message: str
) -> None:
    for found in spawn(2, change_while_training, change):
        assert isinstance(found, str) and message in found


def outside_with() -> None:
    dist.init_process_group("gloo")
    sync = lab.grad_sync(nn.Linear(2, 2), "allreduce", check=None)
    with pytest.raises(RuntimeError, match="outside `with`"):
        sync.finish()
    with pytest.raises(lab.ConfigError, match="^1: DistributedDataParallel: exchanges"):
        lab.grad_sync(nn.Sequential(nn.ReLU(), DistributedDataParallel(nn.Linear(2, 2))))
    dist.destroy_process_group()


def test_a_sync_that_would_do_nothing_or_twice_is_refused() -> None:
    CREW.call(2, outside_with)

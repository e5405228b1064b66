"""Loops of one's own whose model, wrapper or process groups are not what they were."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

import lab
from lab.distributed.comm import Comm
from lab.exchange.base import Exchange
from lab.exchange.bucket import GradBucket
from tests.distributed.test_own_loop import Images, joined
from tests.distributed.test_own_loop_misused import (
    CONVERTED,
    UNKNOWN,
    batch,
    net,
    train,
    weight,
)
from tests.support.ranks import CREW, spawn

SETTINGS: dict[str, Any] = {"exchange.ratio": 0.1}


def beside_other_groups() -> list[str]:
    """Exchange among two of three ranks, and among all, of which rank 0 has a group for itself."""
    with joined() as rank:
        dist.new_group([0])
        some: Any = dist.new_group([0, 2])
        lines: list[str] = []
        for group in (some, None):
            if group is some and rank == 1:
                continue
            state = lab.attach(
                module := DistributedDataParallel(net(), process_group=group), "topk"
            )
            train(module, lambda: None, range(4))
            with lab.grad_sync(model := net(), "topk", group=group) as sync:
                train(model, sync.finish, range(4))
            lines += [each.certificate.line for each in (state, sync) if each.certificate]
        return lines


def test_ranks_may_be_in_unlike_numbers_of_groups() -> None:
    found = CREW.call(3, beside_other_groups)
    assert [len(lines) for lines in found] == [4, 2, 4]
    for line in found[1]:
        assert "averaged once over 3 of 3 ranks" in line


def thawed(model: nn.Sequential) -> None:
    model[0].requires_grad_(True)


def converted(model: nn.Sequential) -> None:
    model.bfloat16()


def with_another_head(model: nn.Sequential) -> None:
    model[2] = net()


def unchanged(model: nn.Sequential) -> None: ...


def wrapped_again(change: Callable[[nn.Sequential], None], steps: int, again: str) -> str:
    """Train a model with a hook, change it, and train it with another hook, a sync, or DDP."""
    model = nn.Sequential(net(), nn.Tanh(), net())
    model[0].requires_grad_(change is not thawed)
    first = DistributedDataParallel(model)
    kept = [lab.attach(first, "topk", **SETTINGS)]
    train(first, lambda: None, range(steps))
    change(model)
    if again == "ddp":
        del first
        gc.collect()  # OmegaConf's errors keep the frames of calls
    with ExitStack() as stack:
        sync: Any = None
        module: Any = model
        if again == "grad_sync":
            sync = stack.enter_context(lab.grad_sync(model, "allreduce"))
        else:
            module = DistributedDataParallel(model)
        if again == "attach":
            kept.append(lab.attach(module, "allreduce"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            inputs = batch(step, dist.get_rank()).to(next(model.parameters()).dtype)
            module(inputs).square().mean().backward()
            if sync:
                sync.finish()
            optimizer.step()
        certificate = (sync or kept[-1]).certificate
        return certificate.line if certificate else ""


def wrapped_again_and_left(change: Callable[[nn.Sequential], None], steps: int, again: str) -> str:
    # DDP ends before its process group: as the last one that holds it, it would end the group's
    # threads while it has Python's lock, for which these may wait.
    with joined():
        return wrapped_again(change, steps, again)


@pytest.mark.parametrize("again", ["attach", "grad_sync", "ddp"])
@pytest.mark.parametrize(
    ("change", "steps"), [(unchanged, 1), (thawed, 4), (converted, 4), (with_another_head, 4)]
)
def test_a_model_that_was_changed_may_be_wrapped_again(
    change: Callable[[nn.Sequential], None], steps: int, again: str
) -> None:
    for line in CREW.call(2, wrapped_again_and_left, change, steps, again):
        assert again == "ddp" or "averaged once over 2 of 2 ranks, for 4 of 4 parameters" in line


def part_of_another() -> str:
    """Train a head on a frozen encoder, and then both with another head; keep all objects."""
    with joined():
        encoder = net().requires_grad_(False)
        kept: list[Any] = []
        for _ in range(2):
            kept.append(DistributedDataParallel(nn.Sequential(encoder, nn.Tanh(), net())))
            kept.append(lab.attach(kept[-1], "topk", **SETTINGS))
            train(kept[-2], lambda: None, range(4))
            encoder.requires_grad_(True)
        return kept[-1].certificate.line


def test_a_part_of_a_model_may_be_trained_in_another() -> None:
    for line in CREW.call(2, part_of_another):
        assert "averaged once over 2 of 2 ranks, for 4 of 4 parameters" in line


def on_another_model() -> str:
    with joined() as rank:
        one, other = (DistributedDataParallel(net()) for _ in range(2))
        other.register_comm_hook(*lab.ddp_comm_hook("allreduce", one))
        with pytest.raises(RuntimeError) as caught:
            other(batch(0, rank)).square().mean().backward()
        return str(caught.value)


def test_a_hook_on_another_model_than_its_own_is_refused() -> None:
    for line in spawn(2, on_another_model):
        assert line.startswith("the hook was made for another model than the one that it is reg")


def left_behind() -> bool:
    """Train a model with a hook for a step, and return whether it is in memory afterwards."""
    with joined():
        state = lab.attach(module := DistributedDataParallel(model := net()), "topk")
        train(module, lambda: None, range(1))
        left = weakref.ref(model)
        del state, module, model
        for _ in range(2):  # DDP first, and then what its hook has kept
            gc.collect()
        return left() is not None


def test_a_model_that_nobody_needs_is_not_kept_by_its_hook() -> None:
    assert CREW.call(2, left_behind) == [False, False]


def converted_to_other_parameters(way: str) -> str:
    """Convert a model in the way that gives its modules other parameters; return the error."""
    with joined() as rank, ExitStack() as stack:
        sync: Any = None
        model = module = nn.Sequential(net(), nn.Tanh(), net())
        if way == "attach":
            lab.attach(module := DistributedDataParallel(model), "allreduce")
        else:
            sync = stack.enter_context(lab.grad_sync(model, "allreduce"))
        train(module, sync.finish if sync else lambda: None, range(4))
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            model.double().float()
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        module(batch(4, rank)).square().mean().backward()
        with pytest.raises(RuntimeError) as caught:
            if sync:
                sync.finish()
            optimizer.step()
        stack.pop_all()
        return str(caught.value)


@pytest.mark.parametrize("way", ["attach", "grad_sync"])
def test_a_model_whose_conversion_gives_it_other_parameters_is_refused(way: str) -> None:
    assert all(line.startswith(UNKNOWN) for line in spawn(2, converted_to_other_parameters, way))


def parametrized(layer: int, finds_unused: bool) -> str:
    with joined():
        model = nn.Sequential(net(), nn.Tanh(), net())
        module = DistributedDataParallel(model, find_unused_parameters=finds_unused)
        lab.attach(module, "allreduce", check=None)
        train(module, lambda: None, range(1))
        parametrizations.spectral_norm(model[layer])
        with pytest.raises(RuntimeError) as caught:
            train(module, lambda: None, range(1))
        return str(caught.value)


@pytest.mark.parametrize(("layer", "finds_unused"), [(0, False), (2, True)])
def test_a_layer_that_is_parametrized_after_ddp_was_made_is_refused(
    layer: int, finds_unused: bool
) -> None:
    for line in spawn(2, parametrized, layer, finds_unused):
        assert line.startswith(CONVERTED)


def frozen_at_first(when: str) -> tuple[Tensor, str]:
    """Freeze a layer before the first step, and train it from the third step on."""
    with joined():
        model = nn.Sequential(net(), nn.Tanh(), net())
        sync = lab.grad_sync(model, "topk", overlap=True, **SETTINGS)
        model[0].requires_grad_(when != "before")
        with sync:
            model[0].requires_grad_(False)
            train(model, sync.finish, range(2))
            start = weight(model)
            model[0].requires_grad_(True)
            train(model, sync.finish, range(2, 5))
        assert sync.certificate
        return weight(model) - start, sync.certificate.line


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_layer_may_be_frozen_before_the_first_step(when: str) -> None:
    (first, line), (second, _) = CREW.call(2, frozen_at_first, when)
    assert torch.equal(first, second) and first.any()
    assert "for 2 of 4 parameters (unused: 0.weight and 1 more)" in line


def divided_by_those_left() -> str:
    with joined():
        lab.attach(module := DistributedDataParallel(net()), "allreduce")
        with pytest.raises(RuntimeError) as caught, module.join(divide_by_initial_world_size=False):
            train(module, lambda: None, range(1))
        return str(caught.value)


def test_join_that_divides_by_the_ranks_left_is_refused() -> None:
    for line in spawn(2, divided_by_those_left):
        assert line.startswith("ddp.join(divide_by_initial_world_size=False): gradients are div")


def not_to_be_hooked() -> list[str]:
    with joined():
        model = nn.Sequential(net(), nn.Tanh(), net())
        late: Any = [("2.weight", model[2].weight)]
        first: Any = model[0].weight
        delayed = DistributedDataParallel(
            model, delay_all_reduce_named_params=late, param_to_hook_all_reduce=first
        )
        with warnings.catch_warnings(action="ignore"):  # of torch's, about its own
            from torch.distributed.optim import _apply_optimizer_in_backward

        _apply_optimizer_in_backward(torch.optim.SGD, (other := net()).parameters(), {"lr": 0.1})
        said: list[str] = []
        for module in (delayed, DistributedDataParallel(other)):
            with pytest.raises(lab.ConfigError) as caught:
                lab.attach(module, "allreduce")
            said.append(str(caught.value))
        return said


def test_a_ddp_that_exchanges_or_updates_by_itself_is_refused() -> None:
    for delayed, updating in CREW.call(1, not_to_be_hooked):
        assert delayed.startswith("delay_all_reduce_named_params: DistributedDataParallel exchang")
        assert updating.startswith("_apply_optimizer_in_backward: takes DistributedDataParallel's")


def with_wide_gradients() -> str:
    with joined():
        for parameter in (model := net().bfloat16()).parameters():
            parameter.grad_dtype = torch.float32
        with pytest.raises(lab.ConfigError) as caught:
            lab.grad_sync(model, "topk")
        return str(caught.value)


def test_gradients_of_another_dtype_than_their_parameters_are_refused() -> None:
    for line in CREW.call(1, with_wide_gradients):
        assert line == (
            "weight: has grad_dtype=torch.float32; only gradients in its own dtype are exchanged"
        )


def in_inference_mode(inside: bool) -> Tensor:
    with joined(), lab.grad_sync(model := net(), "allreduce", overlap=True) as sync:

        def finish() -> None:
            with torch.inference_mode() if inside else nullcontext():
                sync.finish()

        train(model, finish, range(4))
        return weight(model)


def test_finish_may_be_called_in_inference_mode() -> None:
    first, _ = CREW.call(2, in_inference_mode, True)
    second, _ = CREW.call(2, in_inference_mode, False)
    assert torch.equal(first, second)


def to_channels_last(model: nn.Module) -> nn.Module:
    return cast(Any, model).to(memory_format=torch.channels_last)


def images(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(2 * step + rank)
    return torch.randn(4, 3, 6, 6, generator=generator)


def reordered(way: str, strategy: str, bucket_mb: float | None) -> str:
    """Change the order of weights in memory after some steps; return the error."""
    with joined() as rank, ExitStack() as stack:
        sync: Any = None
        model: Any = Images()
        module = model
        if way == "attach":
            lab.attach(module := DistributedDataParallel(model), strategy)
        else:
            sync = stack.enter_context(lab.grad_sync(model, strategy, bucket_mb=bucket_mb))
        try:
            for step in range(6):
                if step == 4:
                    to_channels_last(model)
                module(images(step, rank)).square().mean().backward()
                if sync:
                    sync.finish()
                model.zero_grad(set_to_none=step % 2 == 0)
        except RuntimeError as error:
            stack.pop_all()
            return str(error)
        return ""


@pytest.mark.parametrize(
    ("way", "strategy", "bucket_mb", "line"),
    [
        ("attach", "allreduce", None, "first.weight: lies in another memory order than when the"),
        ("grad_sync", "topk", None, "first.weight: lies in another memory order than before, unli"),
        ("grad_sync", "topk", 0, "first.weight: lies in another memory order than before, unlike"),
        ("grad_sync", "allreduce", 0, ""),
    ],
)
def test_values_that_come_to_lie_in_another_order_are_not_mixed_up(
    way: str, strategy: str, bucket_mb: float | None, line: str
) -> None:
    for said in spawn(2, reordered, way, strategy, bucket_mb):
        assert said.startswith(line)
        assert bool(said) == bool(line)


def updated_in_another_order(to_none: bool) -> float:
    """Train by a fused optimizer, and in one process; return how far weights are apart."""
    with joined() as rank, lab.grad_sync(model := Images(), "allreduce") as sync:
        alone = copy.deepcopy(model)
        for step in range(6):
            for each, ranks in ((model, [rank]), (alone, [0, 1])):
                each.zero_grad(set_to_none=to_none)
                if step == 3:
                    for p in each.first.parameters():
                        kind = torch.channels_last if p.dim() == 4 else torch.contiguous_format
                        p.data = p.data.contiguous(memory_format=kind)
                for other in ranks:
                    (each(images(step, other)).square().mean() / len(ranks)).backward()
                if each is model:
                    sync.finish()
                torch.optim.SGD(each.parameters(), lr=0.1, fused=each is model).step()
        off = [
            (a - b).abs().max() for a, b in zip(model.parameters(), alone.parameters(), strict=True)
        ]
        return float(torch.stack(off).max())


@pytest.mark.parametrize("to_none", [False, True])
def test_gradients_follow_the_memory_order_of_their_parameters(to_none: bool) -> None:
    for off in CREW.call(2, updated_in_another_order, to_none):
        assert off < 1e-6


def state_of_another_order() -> str:
    with joined() as rank:
        states: list[Any] = []
        for model in (Images(), to_channels_last(Images())):
            state = lab.attach(module := DistributedDataParallel(model), "topk")
            module(images(0, rank)).square().mean().backward()
            states.append(state)
        with pytest.raises(ValueError, match="memory order") as caught:
            states[1].load_state_dict(states[0].state_dict())
        states[1].load_state_dict(states[1].state_dict())
        return str(caught.value)


def test_residuals_of_another_memory_order_are_refused() -> None:
    for line in CREW.call(2, state_of_another_order):
        assert line.startswith("state_dict: first.weight was in another memory order")


def divided_otherwise() -> str:
    with joined() as rank:
        fully_shard(model := net(), mesh=init_device_mesh("cpu", (2,)))
        lab.fsdp_reduce_scatter(model, "allreduce")
        cast(Any, model).set_gradient_divide_factor(3.0)
        with pytest.raises(ValueError, match="FSDP asks") as caught:
            model(batch(0, rank)).square().mean().backward()
        return str(caught.value)


def test_another_reduction_than_fsdps_own_is_refused() -> None:
    for line in spawn(2, divided_otherwise):
        assert line.startswith("FSDP asks for neither a sum nor a mean, as after set_gradient_div")


def in_own_orders(way: str, dtype: torch.dtype) -> str:
    """Train a channels-last layer and a column-major one; return the certificate."""
    with joined() as rank, ExitStack() as stack:
        model: Any = to_channels_last(Images().to(dtype))
        model.last.weight.data = model.last.weight.data.t().contiguous().t()
        sync: Any = None
        if way == "attach":
            state = lab.attach(module := DistributedDataParallel(model), "topk")
        else:
            state = sync = stack.enter_context(lab.grad_sync(module := model, "topk"))
        for step in range(4):
            module(images(step, rank).to(dtype)).float().square().mean().backward()
            if sync:
                sync.finish()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
        assert state.certificate
        return state.certificate.line


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["attach", "grad_sync"])
def test_a_model_may_mix_memory_orders(way: str, dtype: torch.dtype) -> None:
    for line in spawn(2, in_own_orders, way, dtype):
        assert "gradients averaged once over 2 of 2 ranks" in line


class Mean(Exchange):
    """An exchange without stages, which therefore runs on a thread."""

    exact = True

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        comm.all_reduce(bucket.flat)
        bucket.divide(bucket.flat, comm.size)


def finished_after_its_end() -> str:
    with joined() as rank:
        with lab.grad_sync(model := net(), f"{__name__}.Mean", overlap=True) as sync:
            train(model, sync.finish, range(3))
        model(batch(3, rank)).square().mean().backward()
        with pytest.raises(RuntimeError) as caught:
            sync.finish()
        return str(caught.value)


def test_finish_after_the_end_of_its_block_is_refused() -> None:
    for line in CREW.call(2, finished_after_its_end, timeout_s=60):
        assert line.startswith("grad_sync: finish() outside `with`")


def closed(strategy: str) -> list[str]:
    """Train a model with a hook and one with a sync; return what using them once more says."""
    state = lab.attach(module := DistributedDataParallel(net()), strategy)
    train(module, lambda: None, range(4))
    with lab.grad_sync(model := net(), strategy) as sync:
        train(model, sync.finish, range(4))
    for each in (state, sync, state):  # a second time changes nothing
        each.close()
    with pytest.raises(RuntimeError) as hook:
        train(module, lambda: None, range(1))
    with pytest.raises(RuntimeError) as block, sync:
        pass
    return [str(hook.value), str(block.value)]


def closed_in_turn(strategy: str) -> tuple[list[str], list[int]]:
    """Return what `closed` says, and the number of open files after each of several calls."""
    with joined():
        num_open: list[int] = []
        lines: list[str] = []
        for _ in range(3):
            lines = closed(strategy)
            gc.collect()
            num_open.append(len(list(Path("/proc/self/fd").iterdir())))
        return lines, num_open


@pytest.mark.parametrize("strategy", ["topk", "hierarchical"])
def test_models_in_turn_keep_no_connections_once_closed(strategy: str) -> None:
    for (hook, block), num_open in spawn(2, closed_in_turn, strategy):
        assert hook.startswith("close() has ended this hook; ")
        assert block.startswith("grad_sync: close() has ended it; ")
        assert num_open[-1] == num_open[0]

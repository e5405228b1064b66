"""Loops of one's own that are misused: right, or refused in a line that says what to do."""

from __future__ import annotations

import copy
import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import lab
from lab.loop import check
from tests.support import HANG_S
from tests.support.ranks import CREW, spawn

WIDTH, STEPS = 8, 16
SHORT_ROWS: dict[str, Any] = {"exchange.min_columns": WIDTH}  # for onebit to compress them


@contextmanager
def joined() -> Iterator[int]:
    """Join the ranks as a user's program does, and yield the rank."""
    dist.init_process_group("gloo")
    dist.barrier()
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2 * step + rank))


def weight(model: nn.Module) -> Tensor:
    return next(model.parameters()).detach().clone()


def train(model: nn.Module, finish: Callable[[], object], steps: range) -> Tensor:
    """Train with SGD; return a weight."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        model(batch(step, dist.get_rank())).square().mean().backward()
        finish()
        optimizer.step()
    return weight(model)


def one_rests_first() -> list[str]:
    """Train two models of one shape, each in its sync, of which the first has no first step."""
    with joined() as rank, ExitStack() as stack:
        models = [net(), net()]
        syncs = [stack.enter_context(lab.grad_sync(model, "allreduce")) for model in models]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        for step in range(4):
            for number, (model, sync) in enumerate(zip(models, syncs, strict=True)):
                if step or number:
                    model(batch(step, rank)).square().mean().backward()
                sync.finish()
                optimizers[number].step()
                model.zero_grad()
        return [sync.certificate.line for sync in syncs if sync.certificate]


def test_a_model_that_rests_is_no_model_whose_copy_trains() -> None:
    for lines in CREW.call(2, one_rests_first):
        assert len(lines) == 2
        assert all("averaged once over 2 of 2 ranks, for 2 of 2" in line for line in lines)


def with_a_common_part() -> str:
    with joined():
        encoder = net()
        first, second = nn.Sequential(encoder, net()), nn.Sequential(encoder, net())
        with (
            lab.grad_sync(first, "allreduce"),
            pytest.raises(lab.ConfigError) as caught,
            lab.grad_sync(second, "allreduce"),
        ):
            pass
        with lab.grad_sync(second, "allreduce"):  # the other one has ended
            return str(caught.value)


def with_a_part_in_two_hooks() -> str:
    with joined() as rank:
        encoder = net()
        models = [DistributedDataParallel(nn.Sequential(encoder, net())) for _ in range(2)]
        for model in models:
            lab.attach(model, "onebit", **SHORT_ROWS)
        with pytest.raises(lab.CertificateError) as caught:
            for model in models:
                model(batch(0, rank)).square().mean().backward()
            torch.optim.SGD(encoder.parameters(), lr=0.1).step()
        return str(caught.value)


def test_a_parameter_that_two_hooks_exchange_is_named() -> None:
    for line in CREW.call(2, with_a_part_in_two_hooks):
        assert line.startswith("certificate: 0.weight: is in two models that both exchange")
        assert line.endswith("and attach or sync the combined model")


def changed_too_early(overlap: bool, change: Callable[[nn.Module], object]) -> str:
    """Change gradients between backward and `finish`, from the third step on."""
    with joined(), lab.grad_sync(model := net(), "allreduce", overlap=overlap) as sync:

        def change_and_finish() -> None:
            change(model)
            sync.finish()

        train(model, sync.finish, range(2))
        if not overlap:
            train(model, change_and_finish, range(2, 4))
            return ""
        with pytest.raises(RuntimeError) as caught:
            train(model, change_and_finish, range(2, 3))
        return str(caught.value)


def clipped(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def set_anew(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


@pytest.mark.parametrize("change", [clipped, set_anew])
def test_gradients_that_are_changed_when_they_may_have_left_are_refused(
    change: Callable[[nn.Module], object],
) -> None:
    for line in CREW.call(2, changed_too_early, True, change):
        assert re.match(r"(weight|bias): its gradient was changed between backward and fin", line)
    assert CREW.call(2, changed_too_early, False, change) == ["", ""]


def thawed(model: nn.Sequential) -> None:
    model[0].requires_grad_(True)


def replaced(model: nn.Sequential) -> None:
    model[0] = net()


def reassigned(model: nn.Sequential) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def converted(model: nn.Sequential) -> None:
    model.double().float()


def with_another_first_layer(change: Callable[[nn.Sequential], None], check: str | None) -> str:
    """Train a layer whose gradient DDP does not see; return the error."""
    with joined() as rank:
        model = nn.Sequential(net(), nn.Tanh(), net())
        model[0].requires_grad_(change is not thawed)
        lab.attach(module := DistributedDataParallel(model), "allreduce", check=check)
        change(model)
        with pytest.raises(RuntimeError) as caught:
            for step in range(2):
                module(batch(step, rank)).square().mean().backward()
                torch.optim.SGD(model.parameters(), lr=0.1).step()
                model.zero_grad()
        return str(caught.value)


UNKNOWN = "0.weight: was frozen or missing when the exchange was set up"
CONVERTED = "the model was converted to another dtype, or a layer parametrized, after Distri"


@pytest.mark.parametrize(
    ("change", "check", "says"),
    [
        (thawed, None, UNKNOWN),
        (replaced, "first", UNKNOWN),
        (reassigned, None, UNKNOWN),
        (converted, None, CONVERTED),
    ],
)
def test_a_parameter_whose_gradient_ddp_does_not_see_is_refused(
    change: Callable[[nn.Sequential], None], check: str | None, says: str
) -> None:
    for line in spawn(2, with_another_first_layer, change, check):
        assert line.startswith(says)


def frozen_later(finds_unused: bool) -> str:
    with joined():
        model = nn.Sequential(net(), nn.Tanh(), net())
        module = DistributedDataParallel(model, find_unused_parameters=finds_unused)
        state = lab.attach(module, "allreduce")
        train(module, lambda: None, range(1))
        model[0].requires_grad_(False)
        try:
            train(module, lambda: None, range(1, 4))
        except RuntimeError as error:
            return str(error)
        assert state.certificate
        return state.certificate.line


def test_a_parameter_that_is_frozen_later_needs_ddps_flag() -> None:
    for line in spawn(2, frozen_later, False):
        assert (
            line.startswith("certificate: hook ignored") and "find_unused_parameters=True" in line
        )
    for line in spawn(2, frozen_later, True):
        assert line.startswith("certificate: weights equal on 2 ranks; gradients averaged once")


def with_a_generator(way: str, set_aside: str) -> str:
    """Train a GAN, whose generator's backward also reaches the discriminator; return the error."""
    with joined() as rank:
        made, judge = net(), net()
        generator, discriminator = DistributedDataParallel(made), DistributedDataParallel(judge)
        for each in (generator, discriminator):
            lab.attach(each, way, check=None, **(SHORT_ROWS if way == "onebit" else {}))
        first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (made, judge))
        try:
            for step in range(8):
                second.zero_grad()
                discriminator(batch(step, rank)).square().mean().backward()
                second.step()
                if step % 4 < 3:  # several steps of the discriminator for one of the generator
                    continue
                first.zero_grad()
                judge.requires_grad_(set_aside != "frozen")
                with discriminator.no_sync() if set_aside == "no_sync" else nullcontext():
                    discriminator(generator(batch(step, rank))).square().mean().backward()
                judge.requires_grad_(True)
                first.step()
        except RuntimeError as error:
            return str(error)
        return ""


@pytest.mark.parametrize(
    ("way", "set_aside", "says"),
    [
        ("onebit", "", "exchange=OneBit: the last gradients were exchanged, but cleared before"),
        ("onebit", "no_sync", ""),
        ("onebit", "frozen", ""),
        ("allreduce", "", ""),
    ],
)
def test_residuals_of_gradients_that_were_discarded_are_refused(
    way: str, set_aside: str, says: str
) -> None:
    for line in spawn(2, with_a_generator, way, set_aside):
        assert line.startswith(says)
        assert bool(line) == bool(says)


def skipped() -> list[str]:
    """Skip an update on all ranks; return the warnings."""
    with joined() as rank, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lab.attach(module := DistributedDataParallel(net()), "onebit", check=None, **SHORT_ROWS)
        for step in range(4):
            module.zero_grad()
            module(batch(step, rank)).square().mean().backward()
            if step != 1:
                torch.optim.SGD(module.parameters(), lr=0.1).step()
        return [str(each.message) for each in caught if "exchange=" in str(each.message)]


def test_a_skipped_update_whose_residuals_stay_is_a_warning() -> None:
    for (line,) in CREW.call(2, skipped):
        assert line.startswith("exchange=OneBit: the last gradients were exchanged, but cleared")


def used_otherwise() -> None:
    """Use gradients in loops that no optimizer of all parameters steps through."""
    with joined() as rank, warnings.catch_warnings():
        warnings.filterwarnings("error", "exchange=")
        for update in (by_hand, some_only, at_no_rate):
            lab.attach(module := DistributedDataParallel(net()), "onebit", check=None, **SHORT_ROWS)
            for step in range(4):
                module.zero_grad()
                module(batch(step, rank)).square().mean().backward()
                update(module)
        lab.attach(module := DistributedDataParallel(net()), "onebit", check=None, **SHORT_ROWS)
        for step in range(4):  # without no_sync
            module(batch(step, rank)).square().mean().backward()


def by_hand(module: nn.Module) -> None:
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.data.sub_(parameter.grad, alpha=0.1)


def some_only(module: nn.Module) -> None:
    torch.optim.SGD([next(module.parameters())], lr=0.1).step()


def at_no_rate(module: nn.Module) -> None:
    torch.optim.SGD(module.parameters(), lr=0.0).step()


def test_gradients_that_are_used_in_any_way_are_not_taken_for_discarded() -> None:
    CREW.call(2, used_otherwise)


class Sharp(torch.optim.SGD):
    """SGD by the gradient at the weights that an ascent of `rho` leads to (Foret et al. 2021)."""

    def ascend(self, rho: float) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(move := rho * parameter.grad / parameter.grad.norm())
                self.state[parameter]["move"] = move
        self.zero_grad()

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            self.ascend(0.05)
            with torch.enable_grad():
                closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(self.state[parameter]["move"])
        torch.optim.SGD(self.param_groups, lr=0.1).step()


def sharp(way: str, exchanged: bool, closure: bool) -> str:
    """Train by two backwards in each step, of which the first may be exchanged, too."""
    with joined() as rank, ExitStack() as stack:
        model: Any = net()
        if way == "attach":
            model = DistributedDataParallel(model)
            sync: Any = lab.attach(model, "onebit", **SHORT_ROWS)
            apart, finish = model.no_sync, lambda: None
        else:
            sync = stack.enter_context(lab.grad_sync(model, "onebit", **SHORT_ROWS))
            apart, finish = sync.accumulate, sync.finish
        optimizer = Sharp(model.parameters(), lr=0.1)

        def backward() -> None:
            model(batch(step, rank)).square().mean().backward()
            finish()

        try:
            for step in range(4):
                optimizer.zero_grad()
                if exchanged:
                    backward()
                else:
                    with apart():
                        model(batch(step, rank)).square().mean().backward()
                if closure:
                    optimizer.step(backward)
                else:
                    optimizer.ascend(0.05)
                    backward()
                    optimizer.step()
        except RuntimeError as error:
            return str(error)
        return sync.certificate.line


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("way", ["attach", "grad_sync"])
def test_two_backwards_in_a_step_are_exchanged_once_or_refused(way: str, closure: bool) -> None:
    for line in spawn(2, sharp, way, True, closure):
        assert line.startswith(
            "exchange=OneBit: each update follows two exchanges, and the weights"
        )
    for line in CREW.call(2, sharp, way, False, closure):
        assert line.startswith("certificate: weights equal on 2 ranks; gradients averaged once")


def entered_again() -> list[Tensor]:
    with joined():
        found = []
        for times in (1, 2):
            sync = lab.grad_sync(model := net(), "allreduce", overlap=True, bucket_mb=0)
            for _ in range(times):
                with sync:
                    train(model, sync.finish, range(4 // times))
            found.append(weight(model))
        return found


def test_a_sync_may_be_entered_again() -> None:
    first, second = CREW.call(2, entered_again)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert all(each.isfinite().all() for each in first)


def set_by_hand(way: str, first: int) -> str:
    """Set gradients in the loop from a step on, and exchange those by backward alone."""
    with joined() as rank, ExitStack() as stack:
        model = net()
        sync: Any = None
        if way == "attach":
            lab.attach(module := DistributedDataParallel(model), "allreduce")
        else:
            sync, module = stack.enter_context(lab.grad_sync(model, "allreduce")), model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(module, sync.finish if sync else lambda: None, range(first))
        model.zero_grad()
        loss = module(batch(first, rank)).square().mean()
        slopes = torch.autograd.grad(loss, [*model.parameters()])
        for parameter, slope in zip(model.parameters(), slopes, strict=True):
            parameter.grad = slope
        with pytest.raises(lab.CertificateError) as caught:
            optimizer.step()
        return str(caught.value)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("way", "line"), [("attach", "hook ignored: DDP gave"), ("grad_sync", "not exchanged: optim")]
)
def test_gradients_set_by_hand_that_nobody_exchanges_are_refused(
    way: str, line: str, first: int
) -> None:
    for said in spawn(2, set_by_hand, way, first):
        assert said.startswith(f"certificate: {line}")


def copied_and_saved(runs: Path) -> list[float]:
    """Train while copies are made, as an average of weights is; return what they differ by."""
    with joined():
        off: list[float] = []
        for way in ("attach", "grad_sync"):
            model: Any = net()
            ddp = DistributedDataParallel(model) if way == "attach" else model
            with ExitStack() as stack:
                finish: Callable[[], object] = lambda: None  # noqa: E731
                sync: Any = lab.attach(ddp, "onebit") if way == "attach" else None
                if sync is None:
                    sync = stack.enter_context(lab.grad_sync(ddp, "onebit"))
                    finish = sync.finish
                run = lab.Run(study=way, model=ddp, batch_size=8, sync=sync, runs_dir=runs)
                stack.enter_context(run)
                train(ddp, finish, range(2))
                twin, file = copy.deepcopy(ddp), io.BytesIO()
                torch.save(ddp, file)
                loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
                for other in (twin, loaded):
                    off.append(float((weight(other) - weight(ddp)).abs().max()))
                    other(batch(0, 0))  # with the hooks of the run
                if way == "attach":
                    lab.attach(twin, "onebit", check=None)
        return off


def test_a_model_may_be_copied_and_saved(tmp_path: Path) -> None:
    assert CREW.call(2, copied_and_saved, tmp_path) == [[0.0] * 4] * 2


def rolled_back(first: int) -> str:
    """Train a copy from a step on; return what is told."""
    with joined(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with lab.grad_sync(model := net(), "allreduce") as sync:
            train(model, sync.finish, range(first))
            try:
                train(copy.deepcopy(model), sync.finish, range(first, STEPS))
            except RuntimeError as error:
                return str(error)
        with pytest.raises(TypeError, match=r"^lab\.grad_sync: its result cannot be copied"):
            copy.deepcopy(sync)
        return "".join(str(each.message) for each in caught if "a copy" in str(each.message))


@pytest.mark.parametrize("first", [0, 1, 5])  # during check="first", and after it
def test_a_copy_that_trains_in_the_place_of_a_model_is_told(first: int) -> None:
    for line in CREW.call(2, rolled_back, first):
        assert line.removeprefix("certificate: ").startswith("hook ignored: backward reached no")
        assert line.count("hook ignored") == 1


def uneven(way: str) -> str:
    """Let the last rank take fewer steps than others; return what these are told."""
    check.GRACE_S = 3.0
    dist.init_process_group("gloo")
    model, rank = net(), dist.get_rank()
    told = ""
    with ExitStack() as stack:
        if way == "attach":
            module, finish = DistributedDataParallel(model), lambda: None
            lab.attach(module, "onebit", check=None, exchange_timeout_s=3)
        else:
            module, sync = model, lab.grad_sync(model, "tree", check=None, exchange_timeout_s=3)
            finish = stack.enter_context(sync).finish
        try:
            train(module, finish, range(3 if rank == 2 else 5))
        except RuntimeError as error:
            told = str(error)
            stack.pop_all()  # as after an error
    store = distributed_c10d._get_default_store()
    store.set(f"told/{rank}", told)
    store.wait(["told/0", "told/1", "told/2"], timedelta(seconds=HANG_S))  # an end would be noticed
    return told


@pytest.mark.parametrize(
    ("way", "cure"), [("attach", "use ddp.join()"), ("grad_sync", "call finish() without backward")]
)
def test_ranks_that_wait_in_vain_are_told_who_has_stopped(way: str, cure: str) -> None:
    *waiting, stopped = spawn(3, uneven, way)
    assert stopped == ""
    for rank, line in enumerate(waiting):
        assert line.startswith(
            f"rank 2 stopped after 3 steps, but rank {rank} continues; all ranks"
        )
        assert cure in line
        assert line.endswith("if rank 2 is only slow, raise exchange_timeout_s=3")


def loaded_by_rank_0_alone(way: str) -> str:
    short: dict[str, Any] = {"exchange_timeout_s": 2}
    with joined() as rank:
        model: Any = net()
        ddp = DistributedDataParallel(model)
        sync: Any = lab.attach(ddp, "powersgd", **short)
        if way == "grad_sync":
            sync = lab.grad_sync(model, "powersgd", **short)
        said = ""
        if rank == 0:
            with pytest.raises(ValueError, match="load_state_dict") as caught:
                sync.load_state_dict(sync.state_dict())
            said = str(caught.value)
        dist.barrier()
        return said


@pytest.mark.parametrize("way", ["attach", "grad_sync"])
def test_a_state_that_some_ranks_do_not_load_is_refused(way: str) -> None:
    first, _ = CREW.call(2, loaded_by_rank_0_alone, way)
    assert first.startswith("load_state_dict: rank 1 did not call it within 2 s (exchange_tim")


def loaded_unlike() -> str:
    with joined() as rank, lab.grad_sync(net(), "allreduce") as sync:
        with pytest.raises(ValueError, match="must be equal on all ranks") as caught:
            sync.load_state_dict({**sync.state_dict(), "step": {"step": torch.tensor(3 + rank)}})
        return str(caught.value)


def state_of_the_other(strategy: str) -> list[str]:
    with joined():
        hooked = lab.attach(DistributedDataParallel(net()), strategy)
        said: list[str] = []
        with lab.grad_sync(net(), strategy) as sync:
            for one, other in ((hooked, sync), (sync, hooked)):
                with pytest.raises(ValueError, match="state_dict: lab") as caught:
                    one.load_state_dict(other.state_dict())
                said.append(str(caught.value))
        return said


def test_a_state_of_another_function_is_refused() -> None:
    for said in CREW.call(1, state_of_the_other, "onebit"):
        assert said == [
            "state_dict: lab.grad_sync saved it; load it into what lab.grad_sync returns",
            "state_dict: lab.attach saved it; load it into what lab.attach returns",
        ]


def sharded_by_columns(exchange: str) -> float:
    """Scatter gradients of a model that FSDP divides by columns; return how far they are off."""
    with joined() as rank:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 7, bias=False), nn.Linear(7, 4))
        alone = copy.deepcopy(model)
        fully_shard(
            model,
            mesh=init_device_mesh("cpu", (2,)),
            shard_placement_fn=lambda p: Shard(int(p.dim() > 1 and p.shape[1] % 2 == 0)),
        )
        kept = lab.fsdp_reduce_scatter(model, exchange)
        x = [torch.randn(4, 6, generator=torch.Generator().manual_seed(each)) for each in range(2)]
        total = [torch.zeros_like(p) for p in alone.parameters()]
        for _ in range(STEPS):
            model.zero_grad()
            model(x[rank]).square().mean().backward()
            kept.load_state_dict(kept.state_dict())
            for sums, parameter in zip(total, model.parameters(), strict=True):
                assert isinstance(parameter.grad, DTensor)
                sums += parameter.grad.full_tensor()
        for each in x:
            (alone(each).square().mean() / 2).backward()
        found = torch.cat([sums.flatten() / STEPS for sums in total])
        due = torch.cat([p.grad.flatten() for p in alone.parameters() if p.grad is not None])
        return float((found - due).norm() / due.norm())


@pytest.mark.parametrize(
    ("exchange", "most"), [("allreduce", 1e-6), ("int8", 0.02), ("int4", 0.05), ("onebit", 0.2)]
)
def test_fsdp_may_divide_other_dimensions_than_the_first(exchange: str, most: float) -> None:
    for off in spawn(2, sharded_by_columns, exchange):
        assert off < most


def wrapped_late() -> str:
    with joined() as rank:
        model = nn.Sequential(net(), net())
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model[0], mesh=mesh)
        lab.fsdp_reduce_scatter(model, "onebit")
        fully_shard(model[1], mesh=mesh)
        with pytest.raises(RuntimeError) as caught:
            model(batch(0, rank)).square().mean().backward()
        return str(caught.value)


def replaced_after_fsdp() -> str:
    with joined() as rank:
        fully_shard(model := nn.Sequential(net(), net()), mesh=init_device_mesh("cpu", (2,)))
        lab.fsdp_reduce_scatter(model, "onebit")
        model[0] = net()
        with pytest.raises(RuntimeError) as caught:
            model(batch(0, rank)).square().mean().backward()
        return str(caught.value)


@pytest.mark.parametrize(
    ("loop", "line"),
    [
        (with_a_common_part, "0.weight: another open lab.grad_sync exchanges its gradient"),
        (wrapped_late, "1: was wrapped after lab.fsdp_reduce_scatter; call that after"),
        (replaced_after_fsdp, UNKNOWN),
        (loaded_unlike, "load_state_dict: step: 3 on rank 0, 4 on rank 1; must be equal on all"),
    ],
)
def test_what_no_loop_may_do_is_refused_on_all_ranks(loop: Callable[[], str], line: str) -> None:
    assert all(said.startswith(line) for said in spawn(2, loop))

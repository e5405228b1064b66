"""Loops of a user's own in which nothing is wrong, though they look so at one moment or another."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import lab
from tests.support.misused import Net, inputs, loss

STEPS = 4


class Loop:
    """A model that DDP trains with a hook of the lab's, or `grad_sync` without DDP.

    Attributes:
        net: the model. module: runs forward.
        scaler: of the loss; it does nothing, or overflows in the first steps.
    """

    def __init__(
        self, strategy: str, by_ddp: bool, net: nn.Module, scales: bool = False, **more: Any
    ) -> None:
        self.net, self.by_ddp = net, by_ddp
        self.scaler = torch.amp.GradScaler("cpu", 2.0**126, 2.0, 2.0**-58, enabled=scales)
        if by_ddp:
            self.module: nn.Module = DistributedDataParallel(net, **more)
            self.state: Any = lab.attach(self.module, strategy, scaler=self.scaler)
        else:
            self.module = net
            self.state = lab.grad_sync(net, strategy, scaler=self.scaler).__enter__()

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        """Enclose a backward after which nothing is exchanged."""
        module: Any = self.module
        return module.no_sync() if self.by_ddp else self.state.accumulate()

    def finish(self) -> None:
        if not self.by_ddp:
            self.state.finish()

    def sgd(self, **more: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.05, **more)

    def end(self) -> Any:
        """Return the certificate."""
        if not self.by_ddp:
            self.state.__exit__()
        return self.state.certificate


Body = Callable[[Loop], None]


def closure(loop: Loop) -> None:
    """Micro-batches before, and the last one in the optimizer's closure, as Lightning does it."""
    optimizer = loop.sgd()
    for step in range(STEPS):
        with loop.accumulate():
            loss(loop.module, 10 + step).backward()

        def last(step: int = step) -> Any:  # as torch's own examples do, whose type is float
            value = loss(loop.module, step)
            value.backward()
            loop.finish()
            return value

        optimizer.step(closure=last) if step % 2 else optimizer.step(last)
        optimizer.zero_grad()


def line_search(loop: Loop) -> None:
    """LBFGS calls the closure several times in a step."""
    optimizer = torch.optim.LBFGS(loop.net.parameters(), lr=0.05, max_iter=3)
    for step in range(2):

        def again(step: int = step) -> Tensor:
            optimizer.zero_grad()
            value = loss(loop.module, step)
            value.backward()
            loop.finish()
            return value

        optimizer.step(again)


def skipped(loop: Loop) -> None:
    """Steps that a scaler would skip, and micro-batches that are thrown away."""
    optimizer = loop.sgd()
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        with loop.accumulate():
            loss(loop.module, 10 + step).backward()
        if step % 3 == 1:
            continue
        loss(loop.module, step).backward()
        loop.finish()
        if step % 3:
            optimizer.step()


def overflow(loop: Loop) -> None:
    """Scaled gradients of the first steps are infinite, and the scaler skips them."""
    optimizer = loop.sgd()
    for step in range(2 * STEPS):
        loop.scaler.scale(loss(loop.module, step)).backward()
        loop.finish()
        loop.scaler.step(optimizer)
        loop.scaler.update()
        optimizer.zero_grad()


def two_optimizers(loop: Loop) -> None:
    """Each updates its part; the other part's gradients stay, or are thrown away."""
    net: Any = loop.net
    of_first = torch.optim.SGD(net.first.parameters(), lr=0.05)
    of_rest = torch.optim.SGD([*net.rare.parameters(), *net.last.parameters()], lr=0.05)
    for step in range(2 * STEPS):
        loss(loop.module, step).backward()
        loop.finish()
        mine, other = (of_first, of_rest) if step % 2 else (of_rest, of_first)
        mine.step()
        if step % 3:
            other.zero_grad()
        mine.zero_grad()


def one_part_later(loop: Loop) -> None:
    """One part is updated while the other one's micro-batches add up."""
    net: Any = loop.net
    of_first = torch.optim.SGD(net.first.parameters(), lr=0.05)
    of_rest = torch.optim.SGD([*net.rare.parameters(), *net.last.parameters()], lr=0.05)
    for step in range(STEPS):
        loss(loop.module, step).backward()
        loop.finish()
        with loop.accumulate():
            of_rest.zero_grad()
            loss(loop.module, 10 + step).backward(inputs=[*net.last.parameters()])
        of_first.step()
        of_rest.zero_grad()
        loss(loop.module, 20 + step).backward()
        loop.finish()
        of_rest.step()
        of_first.zero_grad()
        of_rest.zero_grad()


def changed_between(loop: Loop) -> None:
    """Gradients are clipped, or thrown away, between backwards of a step."""
    optimizer = loop.sgd()
    for step in range(STEPS):
        with loop.accumulate():
            loss(loop.module, 10 + step).backward()
        if step == 1:
            optimizer.zero_grad(set_to_none=False)
        elif step == 2:
            optimizer.zero_grad()
        else:
            nn.utils.clip_grad_norm_(loop.net.parameters(), 1e-3)
        loss(loop.module, step).backward()
        loop.finish()
        nn.utils.clip_grad_value_(loop.net.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()


def left_in_grad(loop: Loop) -> None:
    """Gradients of the steps before are never thrown away."""
    optimizer = loop.sgd()
    for step in range(STEPS):
        loss(loop.module, step).backward()
        loop.finish()
        optimizer.step()


def hooks(loop: Loop) -> None:
    """Hooks of the user's own, set late, change gradients as they grow and once they have."""
    net: Any = loop.net
    net.first.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    net.last.weight.register_hook(lambda gradient: 2 * gradient)
    left_in_grad(loop)


def observed(loop: Loop) -> None:
    """Gradients are also computed aside: by autograd.grad, of inputs, and of an EMA copy."""
    optimizer = loop.sgd(momentum=0.9)
    ema = copy.deepcopy(loop.net)
    for step in range(STEPS):
        loss(loop.module, step).backward()
        loop.finish()
        torch.autograd.grad(loss(loop.net, step), [*loop.net.parameters()])
        attacked = inputs(step).requires_grad_()
        torch.autograd.grad(loop.net(attacked).sum(), attacked)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for average, weight in zip(ema.parameters(), loop.net.parameters(), strict=True):
                average.lerp_(weight, 0.1)


def resumed(loop: Loop) -> None:
    """The exchange's state is put back between steps."""
    optimizer = loop.sgd()
    first = copy.deepcopy(loop.state.state_dict())
    for step in range(STEPS):
        loss(loop.module, step).backward()
        loop.finish()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            loop.state.load_state_dict(first)


def broken_off(loop: Loop) -> None:
    """A batch fails in forward, on all ranks, and is left out."""
    optimizer = loop.sgd()
    for step in range(2 * STEPS):
        try:
            with loop.accumulate():
                loss(loop.module, 10 + step).backward()
            if step % 3 == 1:
                raise ValueError("a bad batch")
            loss(loop.module, step).backward()
            loop.finish()
            optimizer.step()
        except ValueError:
            pass
        optimizer.zero_grad()


def idle(loop: Loop) -> None:
    """Another model trains for some steps, while this one's exchange finds nothing to do."""
    other = nn.Linear(3, 2)
    of_other, optimizer = torch.optim.SGD(other.parameters(), lr=0.1), loop.sgd()
    for step in range(2 * STEPS):
        if step % 2:
            loss(loop.module, step).backward()
        else:
            other(torch.ones(1, 3)).sum().backward()
            of_other.step()
        if step % 2 or not loop.by_ddp:
            loop.finish()
        if step % 2:
            optimizer.step()
        optimizer.zero_grad()


def joined(loop: Loop) -> None:
    """Ranks have different numbers of batches."""
    optimizer, module = loop.sgd(), loop.module
    assert isinstance(module, DistributedDataParallel)
    with module.join():
        for step in range(2 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            loss(module, step).backward()
            optimizer.step()


class Recomputed(Net):
    """Layers that reentrant checkpointing computes again, one of them used twice."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Any = checkpoint(self.first, inputs.requires_grad_(), use_reentrant=True)
        for _ in range(2):
            hidden = checkpoint(self.rare, hidden.tanh(), use_reentrant=True)
        return self.last(hidden.tanh())


class Ignoring(Net):
    """A layer that ranks train apart, and a buffer of each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(40, 5)
        ignored = ["own.weight", "own.bias"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ignored)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + self.own(inputs)


BODIES: tuple[Body, ...] = (
    *(closure, line_search, skipped, overflow, two_optimizers, one_part_later, changed_between),
    *(left_in_grad, hooks, observed, resumed, broken_off, idle),
)


def loops(strategy: str) -> Iterator[tuple[str, Loop, Body]]:
    """Yield loops by name; each is made when the one before has ended."""
    for body in BODIES:
        for by_ddp in (True, False):
            name = f"{body.__name__} {'DDP' if by_ddp else 'grad_sync'}"
            yield name, Loop(strategy, by_ddp, Net(), scales=body is overflow), body
    yield "joined DDP", Loop(strategy, True, Net()), joined
    yield "recomputed DDP", Loop(strategy, True, Recomputed(), static_graph=True), left_in_grad
    yield "recomputed grad_sync", Loop(strategy, False, Recomputed()), left_in_grad
    yield "ignoring DDP", Loop(strategy, True, Ignoring()), left_in_grad
    yield "views DDP", Loop(strategy, True, Net(), gradient_as_bucket_view=True), changed_between


def lines_of_right_loops(strategy: str) -> dict[str, str]:
    """Run all loops, as one of several ranks; return each one's certificate, or its error."""
    dist.init_process_group("gloo")
    lines = {}
    for name, loop, body in loops(strategy):
        try:
            body(loop)
            lines[name] = (found := loop.end()) and found.line
        except RuntimeError as error:
            lines[name] = f"{type(error).__name__}: {error}"
    dist.destroy_process_group()
    return lines

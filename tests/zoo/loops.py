"""Training loops of the zoo. Each is written once, against what a loop of a user's own has."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.models import RANDOM, Model, loss_of

STEPS = 5
Named = dict[str, Tensor | None]  # gradients by parameter


class Handle:
    """A model whose gradients are averaged, as a loop sees it.

    Attributes:
        net: the user's model.
        module: runs forward: the model, or DDP's wrapper of it.
        delivered: what each exchange has left in `grad`, divided by the scale of the loss.
        follow: the gradients to go on with after each exchange, in the place of those delivered.
    """

    def __init__(self, net: nn.Module, scaler: torch.amp.GradScaler | None) -> None:
        self.net, self.scaler = net, scaler
        self.module: Callable[..., Tensor] = net
        self.delivered: list[Named] = []
        self.follow: list[Named] | None = None
        self.late = False  # the reference applies gradients a step late

    def accumulate(self) -> AbstractContextManager[Any]:
        """Enclose a micro-batch that is not its step's last."""
        return nullcontext()

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Enclose a micro-batch, as the lab's trainer does."""
        return nullcontext()

    def optimized(self, model: nn.Module) -> nn.Module:
        """Return the module whose parameters the optimizer updates."""
        return model

    def update(self, optimizer: torch.optim.Optimizer, last: bool) -> None:
        """Take the optimizer's step."""
        optimizer.step()
        optimizer.zero_grad()

    @property
    def factor(self) -> float:
        """The factor of the loss."""
        return 1.0

    def finish(self) -> None:
        """Average the gradients, after a step's last backward."""
        self.exchange()
        scale = self.scale
        found = gradients(self.net)
        self.delivered.append({n: None if g is None else g / scale for n, g in found.items()})
        if self.follow is None:
            return
        due = self.follow[len(self.delivered) - 1]
        for name, parameter in self.net.named_parameters():
            gradient = due[name]
            if gradient is None or parameter.grad is None:
                parameter.grad = None if gradient is None else torch.empty_like(parameter)
            if gradient is not None and parameter.grad is not None:
                parameter.grad = parameter.grad.to_dense().copy_(gradient * scale)

    @property
    def scale(self) -> float:
        """The scale of the loss."""
        return self.scaler.get_scale() if self.scaler else 1.0

    def exchange(self) -> None:
        """Leave the mean in `grad`."""

    def state_dict(self) -> Any:
        """Return what the exchange keeps."""
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Continue from `state_dict`."""

    def close(self) -> None:
        """End."""


class Run(ABC):
    """One rank of a loop.

    Attributes:
        handles: opened so far; one that continues another has its place.
        extras: more tensors that must be right at the end.
    """

    def __init__(self, model: Model, rank: int, size: int) -> None:
        self.model, self.rank, self.size = model, rank, size
        self.handles: list[Handle] = []
        self.extras: dict[str, Tensor] = {}

    def make(self, number: int = 0) -> nn.Module:
        """Build a model, with initial weights of this rank's own."""
        with RANDOM:
            torch.manual_seed(1000 * number + self.rank)
            return self.model.make()

    def open(
        self,
        net: nn.Module,
        scaler: torch.amp.GradScaler | None = None,
        continues: Handle | None = None,
    ) -> Handle:
        """Let the entrance under test have a model."""
        place = self.handles.index(continues) if continues else len(self.handles)
        handle = self.enter(net, scaler, place)
        if continues:
            handle.delivered = continues.delivered
        self.handles[place : place + 1] = [handle]
        return handle

    @abstractmethod
    def enter(self, net: nn.Module, scaler: Any, place: int) -> Handle:
        """Make the handle of a model, the one at `place`."""

    def loss(
        self, handle: Handle, step: int, micro: int = 0, which: tuple[Any, ...] = ()
    ) -> Tensor:
        """Return the loss of this rank's batch.

        Args:
            which: more arguments of forward, before the batch.
        """
        return loss_of(handle.module(*which, *self.batch(step, micro)))

    def batch(self, step: int, micro: int = 0) -> tuple[Any, ...]:
        """Return a batch of this rank's own."""
        chance = torch.Generator().manual_seed(10_000 * self.rank + 100 * step + micro)
        return self.model.batch(chance, self.rank)

    def sgd(self, parameters: Any) -> torch.optim.Optimizer:
        """Return the optimizer of most loops."""
        kept: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.01} if self.model.decay else {}
        return torch.optim.SGD(parameters, lr=0.05, **kept)

    def begin(
        self, net: nn.Module | None = None, scaler: Any = None
    ) -> tuple[Handle, torch.optim.Optimizer]:
        """Open a model, by default a new one, and make its optimizer."""
        handle = self.open(net or self.make(), scaler)
        return handle, self.sgd(handle.net.parameters())


@dataclass(frozen=True)
class Loop:
    """A loop of the zoo.

    Attributes:
        train: runs it on one rank.
        unusual_at: exchanges before the one in which it first does what others do not: a refusal
            may come as late.
        refused: when a refusal is right; see Model.
        ddp: plain DistributedDataParallel can run it.
        sums: what is delivered and kept adds up.
        of_trainer: it is the trainer's, for entrance=sync alone.
    """

    train: Callable[[Run], None]
    unusual_at: int = 0
    refused: str = ""
    ddp: bool = True
    sums: bool = True
    of_trainer: bool = False


LOOPS: dict[str, Loop] = {}


class DoesNotApply(Exception):
    """A loop that makes no sense with this model."""


def gradients(net: nn.Module) -> Named:
    """Return copies of all gradients, by parameter; None also for one without values."""
    pairs = ((name, p.grad if p.numel() else None) for name, p in net.named_parameters())
    return {n: None if g is None else g.detach().to_dense().clone() for n, g in pairs}


def loop(**facts: Any) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Add a loop under its name."""

    def add(train: Callable[[Run], None]) -> Callable[[Run], None]:
        LOOPS[train.__name__] = Loop(train, **facts)
        return train

    return add


def steps(handle: Handle, *optimizers: torch.optim.Optimizer) -> Iterator[int]:
    """Yield each step's number; after what the loop does in it, average and update."""
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        yield step
        handle.finish()
        for optimizer in optimizers:
            optimizer.step()


@loop()
def plain(run: Run) -> None:
    handle, optimizer = run.begin()
    for step in steps(handle, optimizer):
        run.loss(handle, step).backward()


@loop()
def keep_zeros(run: Run) -> None:
    handle, optimizer = run.begin()
    for step in range(STEPS):
        run.loss(handle, step).backward()
        handle.finish()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@loop()
def accumulated(run: Run) -> None:
    """Steps of one to three micro-batches."""
    handle, optimizer = run.begin()
    for step in steps(handle, optimizer):
        num = 1 + step % 3
        for micro in range(num - 1):
            with handle.accumulate():
                (run.loss(handle, step, micro) / num).backward()
        (run.loss(handle, step, num) / num).backward()


@loop(ddp=False, refused="overlap")
def two_backwards(run: Run) -> None:
    """Two backwards in every step, of which no one has told the sync."""
    handle, optimizer = run.begin()
    for step in steps(handle, optimizer):
        run.loss(handle, step).backward()
        run.loss(handle, step, 1).backward()


@loop(ddp=False, unusual_at=3, refused="overlap")
def one_more_backward(run: Run) -> None:
    """A second backward in one step alone."""
    handle, optimizer = run.begin()
    for step in steps(handle, optimizer):
        run.loss(handle, step).backward()
        if step == 3:
            run.loss(handle, step, 1).backward()


@loop()
def sum_of_losses(run: Run) -> None:
    """Two forwards and one backward."""
    handle, optimizer = run.begin()
    for step in steps(handle, optimizer):
        (run.loss(handle, step, 0) + run.loss(handle, step, 1)).backward()


@loop()
def two_optimizers(run: Run) -> None:
    handle = run.open(run.make())
    first, second = halves(handle.net)
    optimizers = run.sgd(first), torch.optim.Adam(second, lr=0.01, eps=1e-2)
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        run.loss(handle, step).backward()
        handle.finish()
        for optimizer in optimizers[: 1 + step % 2]:
            optimizer.step()


class Pair(nn.Module):
    """Two models in one."""

    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.pair = nn.ModuleList([one, other])

    def forward(self, which: int, *batch: Any) -> Tensor:
        return self.pair[which](*batch)


@loop()
def alternating(run: Run) -> None:
    """Two models in one module, trained in turns as of a GAN: the other has no gradients."""
    pair = Pair(run.make(0), run.make(1))
    handle = run.open(pair)
    optimizers = [run.sgd(net.parameters()) for net in pair.pair]
    for step in range(STEPS):
        for which in range(2):
            handle.net.zero_grad()
            run.loss(handle, step, which, (which,)).backward()
            handle.finish()
            optimizers[which].step()


@loop(ddp=False)
def adversary(run: Run) -> None:
    """A loss through a model that is frozen for the time being, by requires_grad."""
    pair = Pair(run.make(0), run.make(1))
    handle, optimizer = run.begin(pair)
    trained = [p for p in pair.pair[1].parameters() if p.requires_grad]
    for step in steps(handle, optimizer):
        for parameter in trained:
            parameter.requires_grad_(step % 2 == 0)
        losses = [run.loss(handle, step, which, (which,)) for which in range(2)]
        (losses[0] + losses[1]).backward()


@loop()
def lbfgs(run: Run) -> None:
    """A closure that is called several times in a step."""
    handle = run.open(run.make())
    trained = [p for p in handle.net.parameters() if p.requires_grad]
    options: dict[str, Any] = {"max_iter": 2, "tolerance_change": 0, "tolerance_grad": 0}
    optimizer = torch.optim.LBFGS(trained, lr=0.05, **options)
    for step in range(STEPS):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            loss = run.loss(handle, step)
            loss.backward()
            handle.finish()
            return float(loss.detach())

        optimizer.step(closure)


@loop()
def averaged_copy(run: Run) -> None:
    """A moving average of the weights, in a deep copy."""
    handle = run.open(run.make())
    if any(0 in buffer.stride() for buffer in handle.net.buffers()):
        raise DoesNotApply("torch's own average cannot write to expanded buffers")
    optimizer = run.sgd(handle.net.parameters())
    copy = torch.optim.swa_utils.AveragedModel(
        handle.net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8)
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(handle, step).backward()
        handle.finish()
        optimizer.step()
        copy.update_parameters(handle.net)
    run.extras |= {f"copy of {n}": p.detach() for n, p in copy.module.named_parameters()}


@loop(unusual_at=2, refused="always", ddp=False)
def unfreezing(run: Run) -> None:
    """A half of the parameters trains from a step on."""
    net = run.make()
    parameters = list(halves(net)[0])
    for parameter in parameters:
        parameter.requires_grad_(False)
    handle, optimizer = run.begin(net)
    for step in steps(handle, optimizer):
        if step == 2:
            for parameter in parameters:
                parameter.requires_grad_(True)
        run.loss(handle, step).backward()


@loop()
def refrozen(run: Run) -> None:
    """A half of the parameters is frozen, and later trains again."""
    handle = run.open(run.make())
    parameters = list(halves(handle.net)[0])
    for step in steps(handle, run.sgd(handle.net.parameters())):
        for parameter in parameters:
            parameter.requires_grad_(step % 3 != 1)
        run.loss(handle, step).backward()


@loop()
def gradient_norm(run: Run) -> None:
    """A loss with the norm of its own gradients: second order."""
    handle, optimizer = run.begin()
    for step in steps(handle, optimizer):
        loss = run.loss(handle, step)
        trained = [p for p in handle.net.parameters() if p.requires_grad]
        slopes = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
        norm = sum(slope.abs().square().sum().float() for slope in slopes if slope is not None)
        (loss + 0.01 * norm).backward()


@loop()
def zero_loss(run: Run) -> None:
    """The last rank runs out of batches, and goes on with a loss of zero."""
    handle, optimizer = run.begin()
    for step in steps(handle, optimizer):
        factor = 0.0 if step > 2 and run.rank == run.size - 1 else 1.0
        (factor * run.loss(handle, step)).backward()


@loop(ddp=False)
def no_backward(run: Run) -> None:
    """The last rank runs out of batches, and does nothing but finish."""
    handle, optimizer = run.begin()
    for step in steps(handle, optimizer):
        if step != 1 and (step < 3 or run.rank < run.size - 1):
            run.loss(handle, step).backward()


@loop(ddp=False)
def nobody_first(run: Run) -> None:
    """No rank has a batch in the first step, and rank 0 none in the second.

    Raises:
        DoesNotApply: forward adds parameters, which only the ranks that have a batch can refuse.
    """
    handle = run.open(run.make())
    optimizer, names = run.sgd(handle.net.parameters()), dict(handle.net.named_parameters()).keys()
    for step in steps(handle, optimizer):
        if step > 1 or (step == 1 and run.rank):
            run.loss(handle, step).backward()
        if dict(handle.net.named_parameters()).keys() != names:
            raise DoesNotApply("forward adds parameters")


class Interrupted(Exception):
    """An error of the user's own, which the loop survives."""


@loop()
def broken_forward(run: Run) -> None:
    """A step that ends before backward, on all ranks."""
    handle, optimizer = run.begin()
    for step in range(STEPS):
        optimizer.zero_grad()
        try:
            run.loss(handle, step)
            if step in (0, 3):
                raise Interrupted
            run.loss(handle, step, 1).backward()
        except Interrupted:
            continue
        handle.finish()
        optimizer.step()


@loop(ddp=False, sums=False, unusual_at=2, refused="overlap")
def broken_backward(run: Run) -> None:
    """A step that ends in the middle of backward, on all ranks; the loop goes on."""
    handle, optimizer = run.begin()
    trained = [p for p in handle.net.parameters() if p.requires_grad]

    def interrupt(_gradient: Tensor) -> None:
        raise Interrupted

    for step in range(STEPS):
        optimizer.zero_grad()
        hook = trained[0].register_hook(interrupt) if step == 2 else None
        try:
            run.loss(handle, step).backward()
            if hook:
                raise DoesNotApply("a rank does not reach the parameter")
        except Interrupted:
            continue
        finally:
            if hook:
                hook.remove()
        handle.finish()
        optimizer.step()


@loop()
def skipped_steps(run: Run) -> None:
    """A GradScaler, which skips two steps in which a rank's gradients are infinite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    handle, optimizer = run.begin(scaler=scaler)
    for step in range(STEPS):
        optimizer.zero_grad()
        bad = torch.inf if step in (0, 3) and run.rank == run.size - 1 else 1.0
        scaler.scale(run.loss(handle, step) * bad).backward()
        handle.finish()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(handle.net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@loop()
def evaluated(run: Run) -> None:
    """Evaluations in between, another number on each rank; and a forward that nothing follows."""
    handle, optimizer = run.begin()
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(handle, step).backward()
        handle.finish()
        optimizer.step()
        handle.net.eval()
        with torch.no_grad():
            for micro in range(1, 2 + run.rank):
                handle.net(*run.batch(step, micro))
        handle.net.train()


@loop()
def two_syncs(run: Run) -> None:
    """Two models, each with a sync of its own."""
    handles = [run.open(run.make(number)) for number in range(2)]
    optimizers = [run.sgd(handle.net.parameters()) for handle in handles]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [run.loss(handle, step, place) for place, handle in enumerate(handles)]
        (losses[0] * 2 + losses[1]).backward()
        for handle in handles:
            handle.finish()
        for optimizer in optimizers:
            optimizer.step()


@loop()
def resumed(run: Run) -> None:
    """Everything is saved half-way, and loaded into a new model, optimizer and sync."""
    handle, optimizer = run.begin()
    for step in range(STEPS):
        if step == 3:
            file = io.BytesIO()
            parts = handle.net, optimizer, handle
            torch.save([part.state_dict() for part in parts], file)
            handle.close()
            file.seek(0)
            states = torch.load(file, weights_only=False)
            net = run.make(1)
            net.load_state_dict(states[0])
            handle = run.open(net, continues=handle)
            optimizer = run.sgd(net.parameters())
            optimizer.load_state_dict(states[1])
            handle.load_state_dict(states[2])
        optimizer.zero_grad()
        run.loss(handle, step).backward()
        handle.finish()
        optimizer.step()


def halves(net: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Divide the trainable parameters.

    Raises:
        DoesNotApply: there is one at most.
    """
    trained = [p for p in net.parameters() if p.requires_grad]
    if len(trained) < 2:
        raise DoesNotApply("the model has too few parameters")
    middle = len(trained) // 2
    return trained[:middle], trained[middle:]


def _as_the_trainer(run: Run, micro_batches: int, late: bool = False) -> None:
    handle = run.open(run.make())
    handle.late = late
    optimizer = run.sgd(handle.optimized(handle.net).parameters())
    for step in range(STEPS):
        for micro in range(micro_batches):
            with handle.micro_batch(last=micro == micro_batches - 1):
                loss = run.loss(handle, step, micro) / micro_batches
                (loss * handle.factor).backward()
        handle.finish()
        handle.update(optimizer, last=step == STEPS - 1)
    handle.close()


@loop(of_trainer=True)
def trained(run: Run) -> None:
    """A step of lab.train's trainer."""
    _as_the_trainer(run, 1)


@loop(of_trainer=True)
def trained_in_two(run: Run) -> None:
    _as_the_trainer(run, 2)


@loop(of_trainer=True)
def trained_late(run: Run) -> None:
    """Gradients are applied a step late."""
    _as_the_trainer(run, 1, late=True)

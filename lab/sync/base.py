"""Sync: the protocol between the training loop and the exchange of gradients or weights."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self, cast
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from lab.distributed.comm import Collective, Comm, Completed, Sent
from lab.distributed.worker import Job, Worker, record_stream
from lab.exchange.allreduce import NoExchange
from lab.exchange.base import Exchange, Staged
from lab.exchange.layout import named
from lab.measure.clock import Clock
from lab.sync.pattern import Pattern, none, refuse
from lab.sync.refusals import refuse_exchange

SyncState = dict[str, dict[str, Tensor]]  # tensors by kind, then by parameter name
Buckets = list[tuple[list[tuple[int, ...]], int]]  # shapes in each, and the bytes of a value
# Called before a bucket leaves: whether it is the first of its step, and the gradients in it.
BeforeExchange = Callable[[bool, Sequence[tuple[nn.Parameter, Tensor | None]]], None]


@dataclass(frozen=True)
class SyncParts:
    """The parts of a run that a sync connects.

    Attributes:
        model: on its device, with the same weights on all ranks; names its parameters.
        module: runs forward: the model, or its compiled form.
        exchange: averages one bucket.
        comm: connects the ranks.
        worker: runs exchanges.
        overlap: exchange while the rank computes.
        bucket_mb: see lab.exchange.bucket.plan.
        precision: of the run: "fp32", "bf16" or "fp16".
        accumulate: micro-batches per optimizer step.
        sample: inputs that the model takes, [1, ...]; None: none are known.
    """

    model: nn.Module
    module: nn.Module
    exchange: Exchange
    comm: Comm
    worker: Worker
    overlap: bool = False
    bucket_mb: float | None = None
    precision: str = "fp32"
    accumulate: int = 1
    sample: Tensor | None = None


@dataclass(frozen=True)
class Shard:
    """This rank's slice of a parameter: its values `start` to `stop`, in memory order.

    Attributes:
        values: a view of the parameter, of as many dimensions; all but the last are 1.
    """

    values: nn.Parameter
    start: int
    stop: int


class Exchanging:
    """A Sync, or the state of a hook: it moves gradients or weights by an exchange.

    Attributes:
        exchange: averages buckets; its state is part of a checkpoint.
        comm: counts the bytes sent.
        step: number of the step under way, from 0. The trainer sets it on a resume.
        loss_scale: of fp16; gradients are divided by it before they are exchanged, so that
            residuals do not depend on it. The trainer sets it in each step.
        clock: records when exchanges run. The loop sets it; None: nothing is recorded.
    """

    def __init__(self, exchange: Exchange, comm: Comm) -> None:
        self.exchange, self.comm = exchange, comm
        self.step: int = 0
        self.loss_scale = 1.0
        self.clock: Clock | None = None

    @property
    def every(self) -> int:
        """Steps from one exchange to the next."""
        return 1

    @property
    def settled_at(self) -> int | None:
        """The first step after any trials, in which choices are made; None: they go on."""
        return self.exchange.settled_at

    @property
    def keeps_replicas_equal(self) -> bool:
        """True if all ranks have the same weights after the last step."""
        return self.exchange.keeps_replicas_equal

    def sent(self) -> Sent:
        """Return what the exchanges that have ended have sent."""
        return self.comm.traffic.so_far()

    def bucket_values(self) -> Buckets:
        """Return what each bucket holds before compression; empty: a library plans them."""
        return []


class Sync(Exchanging, ABC):
    """A schedule that keeps replicas of a model together while ranks compute their own gradients.

    A sync is a context manager: its hooks live between `__enter__` and `__exit__`. One step is

        for each micro-batch:
            with sync.micro_batch(last=...):
                value = loss(sync.module(inputs))
                value.backward(torch.full_like(value, sync.loss_factor))
        finite = sync.finish()
        sync.update(optimizer)
        late = sync.after_update(last=...)

    Attributes:
        module: runs forward.
        pattern: when the sync exchanges, and what it sends.
        needs_like_gpus: the sync itself must compute the same bits on all ranks; see Exchange.
        shards: the slices that this rank's optimizer updates, by parameter name; {}: it updates
            whole parameters.
        eager_steps: steps before one is captured as a graph: they plan buckets, and find kernels.

    Raises:
        ValueError: the pattern refuses `overlap`, `precision` or the exchange.
    """

    eager_steps = 3

    def __init__(self, parts: SyncParts, pattern: Pattern) -> None:
        refuse(pattern, parts.overlap, parts.precision)
        refuse_exchange(pattern, parts.exchange)
        super().__init__(parts.exchange, parts.comm)
        self.module = parts.module
        self.pattern = pattern
        self.needs_like_gpus = False
        self.shards: dict[str, Shard] = {}

    @property
    def every(self) -> int:
        return self.pattern.every

    @property
    def waits_in(self) -> tuple[str, ...]:
        """Phases of a step, besides that of the exchange, in which a rank waits for others."""
        return ("backward",) if self.pattern.waits_in_backward else ()

    @property
    def loss_factor(self) -> float:
        """The gradient of the loss with which backward begins: 1, or what scales all gradients."""
        return self.loss_scale

    def optimized(self, model: nn.Module) -> nn.Module:
        """Return the module whose parameters this rank's optimizer updates."""
        return model

    def norm(self, own: Tensor) -> Tensor:
        """Return the norm of the gradients that `finish` left, over the ranks if these shard them.

        Args:
            own: of those on this rank, float32 []. All ranks call this together.
        """
        return own

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    @abstractmethod
    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Enclose forward and backward of one micro-batch; `last`: the last one of its step."""

    @abstractmethod
    def finish(self) -> Tensor | None:
        """Leave in `grad` the gradients that the optimizer is to apply.

        Returns:
            Whether all of them are finite, bool [], the same on all ranks; None: not checked.

        Raises:
            Exception: the first error of an exchange.
        """

    def update(self, optimizer: Optimizer) -> None:
        """Take the optimizer's step, and clear the gradients."""
        optimizer.step()
        optimizer.zero_grad()

    def after_update(self, last: bool) -> Tensor | None:
        """Exchange weights, if this sync does, once the optimizer has updated them.

        Args:
            last: this was the run's last step.

        Returns:
            Whether all values were finite, bool [], the same on all ranks; None: not checked.
        """
        return None

    def evaluating(self) -> AbstractContextManager[None]:
        """Enclose forward passes outside of steps, of which each rank may run its own number."""
        return nullcontext()

    def error_bound(self, largest: float, size: int) -> float:
        """Bound the distance of a gradient from the mean, as Exchange.error_bound does."""
        return self.exchange.error_bound(largest, size)

    def settle(self) -> None:
        """End exchanges and updates that outlast their step, so that other work may begin."""

    def choices(self) -> list[dict[str, Any]]:
        """Return the choices that this sync made by itself, for the record."""
        return []

    def observe_drift(self, every: int) -> None:
        """Compare what the lab's exchanges deliver with what was due, over windows of `every`."""
        raise ValueError(
            "needs a strategy that sends the mean to all ranks with one of the lab's exchanges, "
            "such as onebit"
        )

    def drift_found(self) -> list[dict[str, Any]] | None:
        """Return the results of drift_every, for the record; None: nothing is observed."""
        return None

    def needs_host(self) -> str:
        """Return why the host must see values of steps such as the last one; empty: it need not."""
        return ""

    def ineffective(self) -> list[str]:
        """List this sync's settings that change nothing in the run; see lab.sync.pattern."""
        return []

    def state_dict(self) -> SyncState:
        """Return the tensors to keep between steps, the same on all ranks."""
        return {}

    def load_state_dict(self, state: SyncState) -> None:
        """Continue from a result of `state_dict`; {} if another sync wrote the checkpoint."""

    def _unscale(self) -> None:
        if self.loss_scale != 1.0:
            gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
            torch._foreach_div_(gradients, self.loss_scale)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def all_finite(found: Iterable[Tensor | None]) -> Tensor | None:
    """Return whether all that was checked is finite, bool []; None: nothing was checked."""
    looked = [finite for finite in found if finite is not None]
    return torch.stack(looked).all() if looked else None


def observed(
    clock: Clock, bucket: str, job: Job, exchange: Exchange, comm: Comm, worker: Worker
) -> Job:
    """Wrap `job`, the exchange of one bucket, so that `clock` records its times."""
    # Seconds waited within stages. In a stream, waits lie between the stages; where an exchange has
    # none, or Gloo carries tensors of GPUs, the stream's events do not tell when it idles.
    waited: Callable[[], float] | None
    if not clock.on_gpu:
        waited = lambda: comm.traffic.waited_s  # noqa: E731
    else:
        has_stages = comm.backend == "nccl" and isinstance(exchange, Staged)
        waited = float if has_stages else None
    return clock.traced(bucket, job, not exchange.exact, waited, worker.in_line)


def on_gradient(
    parameter: nn.Parameter, method: Callable[..., None], *given: object
) -> RemovableHandle:
    """Call a bound `method` with `given` whenever backward has added to a parameter's gradient.

    Its object is not kept: torch would keep it, and the parameter, for ever, where the object holds
    the parameter.
    """
    known = WeakMethod(method)

    def grew(_: Tensor) -> None:
        if (call := known()) is not None:
            call(*given)

    register = parameter.register_post_accumulate_grad_hook  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return cast(RemovableHandle, register(grew))


class NoSync(Sync):
    """A sync that leaves each rank its own gradients, without copying them into buckets.

    (`strategy=overlap exchange=none` has buckets and hooks, and shows what they cost.) Sparse
    gradients become dense, as buckets make them: few optimizers take others.

    Raises:
        ValueError: an exchange is set, which would be ignored.
    """

    def __init__(self, parts: SyncParts) -> None:
        if not isinstance(parts.exchange, NoExchange):
            name = type(parts.exchange).__name__
            raise ValueError(
                f"exchange={name}: strategy=none exchanges nothing; use strategy=allreduce"
            )
        super().__init__(parts, none())
        self._parameters = list(parts.model.parameters())
        self._sparse: list[nn.Parameter] | None = None  # those with such gradients, once known

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> None:
        if self._sparse is None:
            dense = (None, torch.strided)
            layouts = ((p, getattr(p.grad, "layout", None)) for p in self._parameters)
            self._sparse = [p for p, layout in layouts if layout not in dense]
        for parameter in self._sparse:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to_dense()
        self._unscale()
        self.step += 1


class Reached:
    """Tells the gradients that some rank made from zeros that stand for none.

    An exchange takes zeros for a parameter that backward did not reach. If no rank has a gradient,
    weight decay and momentum must not move it, as in one process. So ranks add up flags, as
    DistributedDataParallel does with find_unused_parameters=True: one small all-reduce in each
    step, uncounted, which no host waits for unless its rank lacks a gradient. Where nobody has one,
    it stays None, and what the exchange keeps of this parameter is put back as it was.

    Args:
        names: of all parameters that are exchanged, alike on all ranks.
    """

    def __init__(self, names: Iterable[str], exchange: Exchange, device: torch.device) -> None:
        self._index = {name: place for place, name in enumerate(names)}
        self._exchange = exchange
        self._all = torch.ones(len(self._index), device=device)
        self._lacking: dict[str, None] = {}
        self.lacked: list[str] = []  # on this rank, in the last step
        self._kept: dict[str, dict[str, Tensor]] = {}  # by kind and lacking parameter
        self._counts = self._all
        self._adding: Collective = Completed()  # of a CPU

    def lacks(self, names: Sequence[str]) -> None:
        """Note parameters without a gradient on this rank, before their exchange begins."""
        self._lacking.update(dict.fromkeys(names))
        for kind, tensors in self._exchange.state_dict().items() if names else ():
            found = {name: tensors[name].clone() for name in names if name in tensors}
            self._kept.setdefault(kind, {}).update(found)

    def is_lacking(self, names: Iterable[str]) -> bool:
        """Return whether this rank lacks the gradient of one of `names` in this step."""
        return bool(self._lacking) and not self._lacking.keys().isdisjoint(names)

    def begin(self, comm: Comm, worker: Worker) -> None:
        """Begin to add up the flags of this step, after its last exchange has begun."""
        self._adding.wait()  # of the step before
        counts = self._counts = self._all.clone()
        if self._lacking:
            counts[[self._index[name] for name in self._lacking]] = 0

        def add() -> Iterator[Collective]:
            with comm.traffic.uncounted():
                adding = comm.iall_reduce(record_stream(counts))
            if counts.is_cuda:  # a stream waits, and no host
                yield adding
            else:
                self._adding = adding

        worker.submit("flags of gradients", add)

    def nowhere(self) -> list[str]:
        """Return the parameters that no rank has reached, once all exchanges have ended."""
        lacking, self._lacking = self._lacking, {}
        kept, self._kept = self._kept, {}
        self.lacked = [*lacking]
        if not lacking:
            return []
        self._adding.wait()
        counts = cast(list[float], self._counts.tolist())  # pyright: ignore[reportUnknownMemberType]
        nowhere = [name for name in lacking if not counts[self._index[name]]]
        if nowhere:
            self._put_back(nowhere, kept)
        return nowhere

    def _put_back(self, names: Sequence[str], kept: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace what the exchange keeps of some parameters by what it kept before the step."""
        state: dict[str, dict[str, Tensor]] = self._exchange.state_dict()
        pairs: list[tuple[Tensor, Tensor]] = []
        is_new = False
        for kind, name in itertools.product(state, names):
            before, now = kept.get(kind, {}).get(name), state[kind].get(name)
            if before is not None and now is not None and before.shape == now.shape:
                pairs.append((now, before))
            elif before is not None:
                is_new = True
            elif now is not None:  # a step that adds zeros, or a shape, has added nothing
                is_new |= now.dtype != torch.int64 and bool(now.any())
        if not is_new:
            for now, before in pairs:
                now.copy_(before)
            return
        restored = dict[str, dict[str, Tensor]]()
        for kind, each in state.items():
            others = {name: tensor for name, tensor in each.items() if name not in names}
            before = {name: t for name, t in kept.get(kind, {}).items() if name in names}
            restored[kind] = others | before
        self._exchange.load_state_dict(restored)


class Listeners:
    """Methods that torch calls for all modules or optimizers, each as long as its object lives.

    Torch has one hook for all of them, and for good. It fails if a hook is removed while it goes
    through its hooks, which a garbage collection may do at any moment.

    Args:
        registers: of torch: each adds a global hook.
    """

    def __init__(self, *registers: Callable[[Callable[..., Any]], object]) -> None:
        self._registers = registers
        self._methods: list[WeakMethod[Callable[..., Any]]] = []

    def add(self, method: Callable[..., Any]) -> None:
        """Call a bound method with what torch gives its hooks; it may return other arguments."""
        for register in self._registers:
            register(self._call)
        self._registers = ()
        alive = [known for known in self._methods if known() is not None]
        self._methods = [*alive, WeakMethod(method)]

    def remove(self, method: Callable[..., Any]) -> None:
        """Call it no more."""
        self._methods = [known for known in self._methods if known() != method]

    def _call(self, of: nn.Module | Optimizer, *given: Any) -> tuple[Any, ...] | None:
        changed = None
        for known in self._methods:
            if (method := known()) is not None:
                changed = method(of, *(changed or given)) or changed
        return changed


REGISTRATIONS = Listeners(
    register_module_parameter_registration_hook, register_module_module_registration_hook
)
BEFORE_UPDATES = Listeners(register_optimizer_step_pre_hook)
AFTER_UPDATES = Listeners(register_optimizer_step_post_hook)


class Outside:
    """The parameters of a model that no exchange was set up for: frozen ones, and any to come.

    Args:
        admitted: the others, a result of lab.exchange.gate.admit.
    """

    def __init__(self, model: nn.Module, admitted: Mapping[str, nn.Parameter]) -> None:
        self._model, self._admitted = model, admitted
        self._parameters = self._found()
        self._has_trained = False
        # Perhaps: torch tells of the registrations of all modules.
        self._has_changed = self._is_parametrized = False
        REGISTRATIONS.add(self._note_change)

    def refuse_at_updates(self) -> None:
        """Call `refuse_trained` and `refuse_converted` before each optimizer's step."""
        self._nodes = [(p, get_gradient_edge(p).node) for p in self._admitted.values() if p.numel()]
        BEFORE_UPDATES.add(self._before_update)

    def close(self) -> None:
        """Look at no more updates."""
        BEFORE_UPDATES.remove(self._before_update)

    def refuse_converted(self, optimizer: Optimizer) -> None:
        """Refuse an update of a model whose gradients DDP does not see any more.

        If a parameter's dtype changes, torch makes a new node for its gradient, which has none of
        DDP's hooks, even if the dtype changes back. A parametrization that sets a parameter's
        values does the same.

        Raises:
            RuntimeError: the model was converted, or a layer parametrized.
        """
        looked_at = self._nodes if self._is_parametrized else self._nodes[:1]
        self._is_parametrized = False
        changed = {
            id(p)
            for p, node in looked_at
            if p.requires_grad and get_gradient_edge(p).node is not node
        }
        if changed and not changed.isdisjoint(
            id(p) for group in optimizer.param_groups for p in group["params"]
        ):
            raise RuntimeError(
                "the model was converted to another dtype, or a layer parametrized, after "
                "DistributedDataParallel was made, which therefore does not see its gradients; "
                "convert a copy, or wrap the changed model"
            )

    def refuse_trained(self, optimizer: Optimizer | None = None) -> None:
        """Refuse a model in which one of them trains; call this in each step, after backward.

        Parameters that a model registered by itself are looked for until a backward has been seen,
        and later ones, added or in the place of others, once any module has registered something,
        or once one has another parameter, as Module.to gives all of them if torch.__future__ says
        so.

        Args:
            optimizer: only parameters that it updates count; None: all do.

        Raises:
            RuntimeError: names one that has a gradient, which no other rank would get.
        """
        is_replaced = self._place and self._place[0].get(self._place[1]) is not self._place[2]
        if self._has_changed or is_replaced or not self._has_trained:
            self._has_changed = False
            self._parameters = self._found()
            self._has_trained |= any(p.grad is not None for p in self._admitted.values())
        if not (found := self._parameters):
            return
        trained = [(n, p) for n, p in found.items() if p.requires_grad and p.grad is not None]
        if trained and optimizer:
            updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
            trained = [(n, p) for n, p in trained if id(p) in updated]
        if trained:
            raise RuntimeError(
                f"{trained[0][0]}: was frozen or missing when the exchange was set up, so its "
                "gradient reaches no other rank; add or replace layers, and set "
                "requires_grad=True, before that (you can freeze parameters at any time)"
            )

    def _note_change(self, *_: object) -> None:
        self._has_changed = self._is_parametrized = True

    def _before_update(self, optimizer: Optimizer, *_: object) -> None:
        self.refuse_trained(optimizer)
        if not torch.compiler.is_compiling():
            self.refuse_converted(optimizer)

    def _found(self) -> dict[str, nn.Parameter]:
        admitted = {id(p) for p in self._admitted.values()}
        held = ((m._parameters, n) for m in self._model.modules() for n in m._parameters)  # pyright: ignore[reportPrivateUsage]
        # One for all: to look at each in every step would cost more than the rest.
        self._place = next(((d, n, d[n]) for d, n in held if id(d[n]) in admitted), None)
        return {n: p for n, p in named(self._model).items() if id(p) not in admitted}

"""torch's DistributedDataParallel, with its own communication hooks or the lab's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Self, cast, get_type_hints

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket as DDPBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
)
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lab.distributed.comm import Collective, Comm
from lab.distributed.torch_comm import TorchComm
from lab.distributed.worker import Worker
from lab.exchange.allreduce import NoExchange
from lab.exchange.base import Exchange
from lab.exchange.bucket import GradBucket, Plans
from lab.exchange.gate import admit, carrier
from lab.exchange.grouping import MIB
from lab.exchange.layout import (
    COMPILED,
    as_real,
    is_dense,
    is_rows_first,
    named,
    order_of,
    trainable,
    travel_shape,
)
from lab.measure.clock import Clock
from lab.settings import checks
from lab.sync.base import (
    BeforeExchange,
    Buckets,
    Exchanging,
    Outside,
    Reached,
    SyncParts,
    all_finite,
    observed,
    on_gradient,
)
from lab.sync.library import LibrarySync, library_bound
from lab.sync.owner import NonfiniteGuard
from lab.sync.pattern import ddp

UNUSED = (
    "some parameters had no gradient in the last step; use sync.find_unused_parameters=true or "
    "strategy=overlap"
)
CHECKED_STEPS = 3  # the certificate's, which would show that DDP has not averaged, and not why
CURES = {  # by what DDP says, in many lines
    "mark a variable ready only once": (
        "a gradient was completed twice in one backward pass, as when a module is used twice under "
        "reentrant checkpointing; use checkpoint(use_reentrant=False), sync.static_graph=true or "
        "strategy=overlap"
    ),
    "finished reduction in the prior iteration": UNUSED,
    "storage of SparseTensorImpl": (
        "a gradient is sparse, as of torch.nn.functional.embedding(sparse=True); use sparse=False "
        "or strategy=overlap"
    ),
}
HOOKS = ("none", "noop", "bf16", "fp16", "powersgd", "lab")


class HookState(Exchanging):
    """The state of `exchange_hook`: an exchange, whose own state is kept by parameter name.

    DDP plans its buckets anew after the first backward, and a resumed run begins with the first
    plan, so nothing that is kept depends on them. One exchange of all gradients is a step; the last
    bucket's call waits for all of them. See docs/exchanges/inside.md.

    Args:
        model: DDP's module; names the parameters.
        comm: connects the ranks, apart from DDP's own process group.
        guard: protects the exchange's state; None: the caller does.
        finds_unused: DDP leaves alone what no rank reached, as find_unused_parameters=True asks.

    Attributes:
        finite: bool [], the exchange's finding in the last step; None: it did not check.
        before_exchange: called before a bucket leaves; None: nothing is.
        after_exchange: called once all buckets of a step have arrived, before DDP puts them into
            `grad`; None: nothing is.

    Raises:
        ValueError: the exchange cannot run over this comm, or does not take a parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        exchange: Exchange,
        comm: Comm,
        worker: Worker,
        guard: NonfiniteGuard | None = None,
        finds_unused: bool = False,
    ) -> None:
        super().__init__(exchange, comm)
        exchange.validate(comm)
        trainable = admit(model, exchange)
        for name, module in cast(Iterator[tuple[str, nn.Module]], model.named_modules()):
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise ValueError(
                    f"{name or 'model'}.weight has sparse gradients (sparse=True), which DDP "
                    "does not pass to hooks; use sparse=False, or lab.grad_sync without DDP"
                )
        inner = getattr(model, COMPILED.rstrip("."), model)
        exchange.setup(inner if isinstance(inner, nn.Module) else model)
        self.worker = worker
        self.finite: Tensor | None = None
        self.before_exchange: BeforeExchange | None = None
        self.after_exchange: Callable[[], None] | None = None
        self._guard, self._model = guard, model
        self._device = next(iter(trainable.values())).device
        self._names = {id(p): name for name, p in named(model).items()}
        self._strides = {name: p.stride() for name, p in named(model).items()}
        self._trained = set(trainable)
        self._to_come = set(trainable)  # parameters of this step that DDP has not handed over
        # By all names in order: a plan made anew may differ in their order alone.
        self._plans = defaultdict[tuple[str, ...], Plans](Plans)
        self._exchanged: list[tuple[GradBucket, Tensor]] = []
        self._hooks: list[RemovableHandle] = []
        self._outside = Outside(model, trainable)
        self._outside.refuse_at_updates()  # gradients may come after the last bucket, or alone
        self._fired: set[str] = set()  # since the last exchange
        self._reached = Reached(trainable, exchange, self._device) if finds_unused else None
        if exchange.asynchronous(comm) or finds_unused:
            for name, parameter in trainable.items():
                self._hooks.append(on_gradient(parameter, self._gradient_ready, name))

    def bucket_values(self) -> Buckets:
        """As of a Sync, of the buckets of the last step."""
        buckets = [packed for packed, _ in self._exchanged]
        return [(self.exchange.moves_as(b.shapes), b.flat.element_size()) for b in buckets]

    def close(self) -> None:
        """Stop the worker. DDP cannot forget a hook, so it cannot run backward any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.worker.close()

    def submit(self, bucket: DDPBucket) -> Future[Tensor]:
        """Begin to exchange one of DDP's buckets; the result is its buffer, with the mean."""
        buffer, parameters = bucket.buffer(), cast(list[nn.Parameter], bucket.parameters())
        try:
            names = {self._names[id(parameter)] for parameter in parameters}
        except KeyError:
            raise RuntimeError(
                "the hook was made for another model than the one that it is registered on; pass "
                "this DistributedDataParallel to lab.ddp_comm_hook"
            ) from None
        # DDP's numbers do not tell: with static_graph all buckets of the first step have the same.
        begins = len(self._to_come) == len(self._trained)
        if begins or not self._to_come >= names & self._trained:  # or the last step was broken off
            self._to_come, self._exchanged = set(self._trained), []
            if self._guard:
                self.loss_scale = self._guard.begin_step()
        if self.clock:
            self.clock.ready(len(self._exchanged))
        if self.before_exchange:
            self.before_exchange(not self._exchanged, [(p, p.grad) for p in parameters])
        packed = self._pack(parameters, buffer)
        if self._reached:
            self._reached.lacks([name for name in packed.shapes if name not in self._fired])
        self._exchanged.append((packed, buffer))
        # With its device, the future holds an event of the exchange's stream to wait for.
        future = Future[Tensor](devices=[buffer.device] if buffer.is_cuda else None)
        job = partial(self._stages, packed, buffer, future)
        if self.clock:
            job = observed(self.clock, str(packed), job, self.exchange, self.comm, self.worker)
        self.worker.submit(f"{type(self.exchange).__name__} of bucket {packed}", job)
        self._to_come -= names
        if bucket.is_last() or not self._to_come:
            self._to_come = set(self._trained)
            self._end_step()
        return future

    def _gradient_ready(self, name: str) -> None:
        """Let exchanges under way go on whenever a gradient arrives, as GradSync does."""
        self._fired.add(name)
        self.worker.advance()

    def _pack(self, parameters: list[nn.Parameter], buffer: Tensor) -> GradBucket:
        """Return DDP's buffer as a bucket; a copy, if values travel in another order or dtype."""
        present = {self._names[id(p)]: p for p in parameters if p.numel()}
        for name, p in present.items():
            if p.stride() != self._strides[name]:
                self._refuse_moved(name, p)
        shapes = {name: travel_shape(p) for name, p in present.items()}
        plans = self._plans[tuple(shapes)]
        dtype = carrier(buffer.dtype, self.exchange)
        assert dtype is not None  # `admit` has refused others
        # DDP lays dense gradients out like their parameters, and others row-major.
        as_it_lies = all(
            p.is_contiguous() or is_rows_first(p) or not is_dense(p) for p in present.values()
        )
        if not present or (as_it_lies and dtype == buffer.dtype):
            return GradBucket(shapes, buffer, self.step, plans=plans)
        pairs = any(p.is_complex() for p in present.values())  # or none: they are of one dtype
        whole = torch.view_as_complex(buffer.view(-1, 2)) if pairs else buffer
        views = [
            as_real(part.as_strided(p.shape, p.stride()) if is_dense(p) else part.view(p.shape))
            for part, p in zip(
                torch.split(whole, [p.numel() for p in present.values()]),
                present.values(),
                strict=True,
            )
        ]
        sizes = [shape.numel() for shape in shapes.values()]
        flat = plans.scratch("flat", buffer.new_empty(0, dtype=dtype), sum(sizes))
        parts = torch.split(flat, sizes)
        values = [  # in the order in which they travel
            part.as_strided(p.shape, p.stride()) if is_rows_first(p) else part.view(shape)
            for part, p, shape in zip(parts, present.values(), shapes.values(), strict=True)
        ]
        torch._foreach_copy_(values, views)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        copied = [*zip(views, values, strict=True)]
        return GradBucket(shapes, flat, self.step, plans=plans, copied=copied)

    def _refuse_moved(self, name: str, parameter: nn.Parameter) -> None:
        """Refuse a parameter in another memory order, if it is one: DDP's buffers keep the first.

        Raises: RuntimeError: DDP mixes up the values of its gradient.
        """
        shape = parameter.shape
        if order_of(parameter.stride(), shape) != order_of(self._strides[name], shape):
            raise RuntimeError(
                f"{name}: lies in another memory order than when the hook was set up, so "
                "DistributedDataParallel mixes up its gradient; convert the model (as to "
                "torch.channels_last) before you wrap it"
            )

    def _stages(
        self, packed: GradBucket, buffer: Tensor, future: Future[Tensor]
    ) -> Iterator[Collective]:
        if self.loss_scale != 1.0:
            packed.flat.div_(self.loss_scale)
        if packed.shapes:
            yield from self.exchange.stages(packed, self.comm)
        if self.loss_scale != 1.0:
            packed.flat.mul_(self.loss_scale)
        packed.unpack()
        future.set_result(buffer)

    def _end_step(self) -> None:
        self._outside.refuse_trained()
        if self._reached:
            self._reached.begin(self.comm, self.worker)
        self.worker.wait()
        if self._reached:
            self._reached.nowhere()  # DDP leaves their gradients alone
        self._fired.clear()
        if self.clock:
            self.clock.next_phase("update")
        buckets = [packed for packed, _ in self._exchanged]
        self.finite = all_finite(bucket.finite for bucket in buckets)
        if self._guard:
            self._guard.end_step([buffer for _, buffer in self._exchanged], self.finite)
        for planned_before in set(self._plans) - {tuple(bucket.shapes) for bucket in buckets}:
            del self._plans[planned_before]
        self.step += 1
        if self.after_exchange:
            self.after_exchange()


def exchange_hook(state: HookState, bucket: DDPBucket) -> Future[Tensor]:
    """Average one of DDP's buckets: `ddp.register_comm_hook(state, exchange_hook)`."""
    return state.submit(bucket)


# DDP compares annotations with types, and here they are strings.
exchange_hook.__annotations__ = get_type_hints(exchange_hook)


class DDPSync(LibrarySync):
    """A sync in which DDP buckets the gradients, and finishes inside backward.

    Args:
        hook: torch's communication hook (torch.distributed.algorithms.ddp_comm_hooks). "noop" moves
            nothing, for timing alone: replicas drift apart. "powersgd" is its PowerSGD of rank 1
            after two exact steps; its errors are DDP's own, and not in checkpoints. "lab" is the
            lab's hook (lab.sync.ddp), for any exchange.
        gradient_as_bucket_view, find_unused_parameters, static_graph: DDP's own.

    Raises:
        ValueError: settings that DDP or its hook does not support.
    """

    eager_steps = 11  # torch's manual, "CUDA Graphs": DDP needs so many before one is captured

    def __init__(
        self,
        parts: SyncParts,
        *,
        hook: str,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
    ) -> None:
        checks.one_of("sync.hook", hook, HOOKS)
        checks.truth("sync.gradient_as_bucket_view", gradient_as_bucket_view)
        checks.truth("sync.find_unused_parameters", find_unused_parameters)
        checks.truth("sync.static_graph", static_graph)
        if not parts.overlap or not parts.bucket_mb:
            raise ValueError(
                f"overlap={parts.overlap} bucket_mb={parts.bucket_mb}: strategy=ddp needs "
                "overlap=true and a bucket_mb above 0"
            )
        gradient_bytes = sum(p.nbytes for p in parts.model.parameters() if p.requires_grad)
        super().__init__("ddp", parts, ddp(hook), gradient_bytes)
        if not isinstance(parts.comm, TorchComm):
            raise ValueError("strategy=ddp: runs only over torch.distributed; use comm=torch")
        _check(hook, parts, parts.comm.backend, gradient_bytes)
        for buffer in parts.model.buffers():
            if 0 in buffer.stride():  # DDP writes to buffers, which it cannot to expanded ones
                buffer.data = buffer.detach().contiguous()
        self.wrapped = DistributedDataParallel(
            parts.module,
            bucket_cap_mb=parts.bucket_mb,
            process_group=parts.comm.group,
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
        )
        self.module = self.wrapped
        self._power: powerSGD_hook.PowerSGDState | None = None
        self._lab: HookState | None = None
        self._hook_name = hook
        self._sent = 0  # values, by PowerSGD since it began
        self._last: LastGradient | None = None
        self._model = parts.model
        self._trainable = trainable(parts.model)
        self._outside = Outside(parts.model, self._trainable)
        self._takes_unused = find_unused_parameters or static_graph
        self._register(hook, parts, parts.comm.group)

    def _register(self, hook: str, parts: SyncParts, group: ProcessGroup) -> None:
        self.needs_like_gpus = hook == "powersgd"  # orthogonalises on every rank
        register = self.wrapped.register_comm_hook  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if hook == "noop":
            self._wire_bytes = 0
            register(None, debugging_hooks.noop_hook)
        elif hook in ("bf16", "fp16"):
            self._wire_bytes //= 2
            register(group, getattr(default_hooks, f"{hook}_compress_hook"))
        elif hook == "powersgd":
            self._power = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2)
            register(self._power, powerSGD_hook.powerSGD_hook)
        elif hook == "lab":
            self._wire_bytes = 0  # the comm counts what its exchange sends
            self._lab = HookState(
                parts.model,
                parts.exchange,
                parts.comm,
                parts.worker,
                finds_unused=self.wrapped.find_unused_parameters,
            )
            register(self._lab, exchange_hook)

    @property
    def keeps_replicas_equal(self) -> bool:
        return super().keeps_replicas_equal and (
            self._lab is None or self._lab.keeps_replicas_equal
        )

    @property
    def waits_in(self) -> tuple[str, ...]:
        return waits_of_ddp(self._model)

    def __enter__(self) -> Self:
        self._last = None if self._lab else LastGradient(self._model)
        return self

    def __exit__(self, *_: object) -> None:
        if self._last:
            self._last.close()

    def bucket_values(self) -> Buckets:
        return self._lab.bucket_values() if self._lab else []

    def error_bound(self, largest: float, size: int) -> float:
        if self._hook_name == "lab":
            return super().error_bound(largest, size)
        return library_bound(self._hook_name, largest, size)

    @contextmanager
    def micro_batch(self, last: bool) -> Generator[None]:
        """Enclose one micro-batch; where DDP does not support the model, say which setting does."""
        if self._last:
            self._last.clock = self.clock
        if self._lab is not None:
            self._lab.step, self._lab.loss_scale = self.step, self.loss_scale
            self._lab.clock = self.clock
        try:
            with nullcontext() if last else self.wrapped.no_sync():
                yield
        except RuntimeError as error:
            cures = [cure for words, cure in CURES.items() if words in str(error)]
            if not cures:
                raise
            raise RuntimeError(f"strategy=ddp: {cures[0]}") from None

    def finish(self) -> Tensor | None:
        """Count what DDP sent; backward has exchanged the gradients.

        Raises: RuntimeError: a parameter has a gradient that DDP does not know, or lacks one.
        """
        self._outside.refuse_trained()
        if self.step < CHECKED_STEPS and not self._takes_unused:
            for name, parameter in self._trainable.items():
                if parameter.grad is None and parameter.numel():
                    raise RuntimeError(f"strategy=ddp: {name}: {UNUSED}")
        if self._power is not None:
            sent = int(self._power.compression_stats()[2])
            if sent:  # the first steps are exact, and not in its count
                self._wire_bytes = 4 * (sent - self._sent)
            self._sent = sent
        super().finish()
        if self._last:
            self._last.end_step()
        return self._lab.finite if self._lab is not None else None


def _check(hook: str, parts: SyncParts, backend: str, gradient_bytes: int) -> None:
    """Refuse hooks that cannot run here, and say what to use instead."""
    if hook == "lab" and isinstance(parts.exchange, NoExchange):
        raise ValueError(
            "sync.hook=lab: needs one of the lab's exchanges, as in "
            "strategy=onebit sync=ddp sync.hook=lab"
        )
    if backend != "gloo":
        return
    if hook == "bf16":
        raise ValueError(
            "sync.hook=bf16: torch supports this hook only with NCCL; use sync.hook=fp16"
        )
    # Over Gloo the callbacks of several buckets run at once and share torch's state: it aborts.
    if hook == "powersgd" and gradient_bytes > (parts.bucket_mb or 0) * MIB:
        mib = -(-gradient_bytes // MIB)
        raise ValueError(
            f"sync.hook=powersgd bucket_mb={parts.bucket_mb:g}: over Gloo, torch's hook fails with "
            f"several buckets; use bucket_mb={mib}, or strategy=powersgd"
        )


def waits_of_ddp(model: nn.Module) -> tuple[str, ...]:
    """Return the phases in which DDP waits: before forward it sends buffers, as running means."""
    return ("backward", "forward") if any(True for _ in model.buffers()) else ("backward",)


class LastGradient:
    """A hook on the parameter whose gradient came last in the first step; all count as one bucket.

    DDP's own hook runs after it, and DDP waits when backward ends. Each hook costs a microsecond,
    so the others are removed after the first step, which marks nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self.clock: Clock | None = None
        self._hooks: dict[str, RemovableHandle] = {}  # in the order in which gradients came
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._hooks[name] = on_gradient(parameter, self._ready, name)

    def end_step(self) -> None:
        while len(self._hooks) > 1:
            self._hooks.pop(next(iter(self._hooks))).remove()

    def close(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _ready(self, name: str) -> None:
        if len(self._hooks) > 1:
            self._hooks[name] = self._hooks.pop(name)
        elif self.clock:
            self.clock.ready(0, latest=True)  # micro-batches: the last one's counts

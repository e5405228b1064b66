"""The lab's exchanges as a communication hook of torch's DistributedDataParallel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast, get_type_hints

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket as DDPBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.futures import Future
from torch.utils.hooks import RemovableHandle

from lab.distributed.collective import Collective
from lab.distributed.comm import Comm, Sent
from lab.distributed.worker import Worker
from lab.exchange.base import Exchange
from lab.exchange.bucket import GradBucket, Outside, Plans, label
from lab.exchange.gate import admit, carrier
from lab.exchange.layout import COMPILED, as_real, is_dense, is_rows_first, named, travel_shape
from lab.measure.clock import Clock
from lab.sync.base import BeforeExchange, all_finite, observed
from lab.sync.owner import KEY, Owner, SpoiledState, require_state
from lab.sync.reached import Reached


class HookState:
    """The state of `exchange_hook`: an exchange, whose own state is kept by parameter name.

    DDP plans its buckets anew after the first backward, and a resumed run begins with the first
    plan, so nothing that is kept depends on them. One exchange of all gradients is a step; DDP
    asks for one in each backward outside `no_sync`. The last bucket's call waits for all exchanges,
    as DDP itself would: backward has nothing left to compute.

    Args:
        model: DDP's module; names the parameters.
        exchange: averages buckets.
        comm: connects the ranks, apart from DDP's own process group.
        worker: runs exchanges while backward computes.
        guard: protects the exchange's state; None: the caller does.
        finds_unused: DDP leaves alone what no rank reached, as find_unused_parameters=True asks.

    Attributes:
        step: exchanges of all gradients so far.
        finite: bool [], the exchange's finding in the last step; None: it did not check.
        loss_scale: gradients are divided by it for the exchange, and multiplied again, so that
            residuals do not depend on it.
        clock: records when exchanges run; None: nothing is recorded.
        before_exchange: called before a bucket leaves; None: nothing is.
        after_exchange: called once all buckets of a step have arrived, before DDP puts them into
            `grad`; None: nothing is.
        settings: the composed settings that made the exchange; {}: it was not made from any.

    Raises:
        ValueError: the exchange cannot run over this comm, or does not take a parameter.
    """

    every = 1  # steps from one exchange to the next

    def __init__(
        self,
        model: nn.Module,
        exchange: Exchange,
        comm: Comm,
        worker: Worker,
        guard: SpoiledState | None = None,
        finds_unused: bool = False,
    ) -> None:
        exchange.validate(comm)
        trainable = admit(model, exchange)
        _refuse_sparse(model)
        inner = getattr(model, COMPILED.rstrip("."), model)
        exchange.setup(inner if isinstance(inner, nn.Module) else model)
        self.exchange, self.comm, self.worker = exchange, comm, worker
        self.step = 0
        self.finite: Tensor | None = None
        self.loss_scale = 1.0
        self.clock: Clock | None = None
        self.before_exchange: BeforeExchange | None = None
        self.after_exchange: Callable[[], None] | None = None
        self.settings: Mapping[str, Any] = {}
        self._guard, self._model = guard, model
        self._device = next(iter(trainable.values())).device
        self._names = {id(p): name for name, p in named(model).items()}
        self._trained = set(trainable)
        self._to_come = set(trainable)  # parameters of this step that DDP has not handed over
        self._plans = defaultdict[str, Plans](Plans)
        self._exchanged: list[tuple[GradBucket, Tensor]] = []
        self._hooks: list[RemovableHandle] = []
        self._outside = Outside(model, trainable)
        self._fired: set[str] = set()  # since the last exchange
        self._reached = Reached(trainable, exchange, self._device) if finds_unused else None
        if exchange.asynchronous(comm) or finds_unused:
            for name, parameter in trainable.items():
                register = parameter.register_post_accumulate_grad_hook  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
                call = partial(self._gradient_ready, name)
                self._hooks.append(cast(RemovableHandle, register(call)))

    @property
    def keeps_replicas_equal(self) -> bool:
        """True if all ranks have the same weights after each step."""
        return self.exchange.keeps_replicas_equal

    @property
    def settled_at(self) -> int | None:
        """The first step after any trials; None: they go on."""
        return self.exchange.settled_at

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, to save beside the model; every rank has its own.

        As with a model, its tensors are not copied: they change with the next step.
        """
        kept = self.exchange.state_dict()
        return {"step": self.step, "exchange": kept, KEY: self._owner.mark()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict` of the same rank among as many ranks.

        Raises:
            ValueError: it is of another exchange, or see Owner.check.
        """
        require_state(state, "step", "exchange")
        self._owner.check(state.get(KEY), state["exchange"])
        self.exchange.resume(state["exchange"], self._device)
        self.step = int(state["step"])

    @property
    def _owner(self) -> Owner:
        comm, made_from = self.comm, self.settings.get("exchange", {})
        return Owner(self._model, self.exchange, made_from, comm.rank, comm.size)

    def sent(self) -> Sent:
        """Return what the exchanges have sent so far."""
        return self.comm.traffic.so_far()

    def bucket_shapes(self) -> list[list[tuple[int, ...]]]:
        """Return the shapes of the parameters of each bucket of the last step."""
        return [self.exchange.moves_as(packed.shapes) for packed, _ in self._exchanged]

    def bucket_itemsizes(self) -> list[int]:
        """Return the bytes of a value of each bucket of the last step, before compression."""
        return [packed.flat.element_size() for packed, _ in self._exchanged]

    def close(self) -> None:
        """Stop the worker. DDP cannot forget a hook, so it cannot run backward any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.worker.close()

    def submit(self, bucket: DDPBucket) -> Future[Tensor]:
        """Begin to exchange one of DDP's buckets; the result is its buffer, with the mean."""
        buffer, parameters = bucket.buffer(), cast(list[nn.Parameter], bucket.parameters())
        names = {self._names[id(parameter)] for parameter in parameters}
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

    def _gradient_ready(self, name: str, _parameter: Tensor) -> None:
        """Let exchanges under way go on whenever a gradient arrives, as GradSync does."""
        self._fired.add(name)
        self.worker.advance()

    def _pack(self, parameters: list[nn.Parameter], buffer: Tensor) -> GradBucket:
        """Return DDP's buffer as a bucket; a copy, if values travel in another order or dtype."""
        present = {self._names[id(p)]: p for p in parameters if p.numel()}
        shapes = {name: travel_shape(p) for name, p in present.items()}
        plans = self._plans[label(present)]
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
        values = [part.view(shape) for part, shape in zip(parts, shapes.values(), strict=True)]
        torch._foreach_copy_(values, views)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        copied = [*zip(views, values, strict=True)]
        return GradBucket(shapes, flat, self.step, plans=plans, copied=copied)

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
        for planned_before in set(self._plans) - {str(bucket) for bucket in buckets}:
            del self._plans[planned_before]
        self.step += 1
        if self.after_exchange:
            self.after_exchange()


def _refuse_sparse(model: nn.Module) -> None:
    """Refuse embeddings with sparse gradients, which DDP gives to no hook.

    Raises:
        ValueError: names one.
    """
    modules = cast(Iterator[tuple[str, nn.Module]], model.named_modules())
    for name, module in modules:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"{name or 'model'}.weight: has sparse gradients (sparse=True), which DDP gives to "
                "no hook; use sparse=False, or lab.grad_sync without DDP"
            )


def exchange_hook(state: HookState, bucket: DDPBucket) -> Future[Tensor]:
    """Average one of DDP's buckets: `ddp.register_comm_hook(state, exchange_hook)`."""
    return state.submit(bucket)


# DDP compares annotations with types, and here they are strings.
exchange_hook.__annotations__ = get_type_hints(exchange_hook)

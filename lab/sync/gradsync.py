"""Average gradients in every step: during backward or after it; DoubleBuffer, one step late."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn, Self, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from lab.distributed.comm import Collective, Sent
from lab.exchange.base import require_known_residuals
from lab.exchange.bucket import BucketPlan, GradBucket, in_one_memory, plan
from lab.exchange.gate import admit, carrier, is_linear
from lab.sync import pattern
from lab.sync.base import (
    BeforeExchange,
    Buckets,
    Outside,
    Reached,
    Sync,
    SyncParts,
    SyncState,
    all_finite,
    observed,
    on_gradient,
)
from lab.sync.drift import Drift, GradientNoise
from lab.sync.pattern import Begin, Pattern, gradsync

UNTIMED = nullcontext()


class Arrivals:
    """Counts gradients as backward adds to them, and tells when a bucket is full.

    A gradient may grow several times in a step, as in reentrant recomputation, where a module is
    used twice, or in two backwards. The first step calls no bucket full and counts how often each
    gradient grows; later ones are complete when they have grown as often.

    A hook costs the host a microsecond. So from the second step on, a bucket has one hook, at the
    gradient that came last in the first step. It looks whether `grad` of the others is set. Every
    gradient keeps its hook if it grows several times or on top of an earlier micro-batch, if it is
    no view of its bucket, or once some gradient has come later than the hook.

    Args:
        parameters: the trainable ones, by name.
        full: called with the place of each bucket that is full.
        each: called with the name of each gradient that grows, which therefore all have hooks.

    Attributes:
        armed: gradients are counted.
        order: names, in the order of the last growth in the first step.
        num_sent: buckets of this step that have left, in their order.
        buckets_of: places of the buckets of a parameter: one, or several with a part of it in each.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        full: Callable[[int], None],
        each: Callable[[str], None] | None,
    ) -> None:
        self._parameters, self._full, self._each = parameters, full, each
        self.armed = False
        self.order: dict[str, None] = {}
        self.num_sent = 0
        self.buckets_of: dict[str, list[int]] = {}
        # How often each gradient grows in a step, as it did in the first; None: not known yet.
        self._due: list[int] | None = None
        self._watches_all = each is not None
        self._is_open = False
        self._hooks: list[tuple[Node, RemovableHandle]] = []
        self._buckets: Sequence[BucketPlan] = ()
        self._lasts: dict[int, str] = {}  # by bucket, the parameter that has its only hook
        self._early: list[int] = []  # buckets that lacked a gradient when the last one came
        self._names: list[str] = []  # of parameters with values; lists below have their order
        self._filled: list[list[int]] = []  # places of the buckets that each helps to fill
        self._left: list[int] = []  # growths to come in this step; below 0: more than were due
        self._sizes: list[int] = []  # of buckets: how many of their parameters have a hook
        self._missing: list[int] = []  # of these, how many have not arrived in this step

    def plan(self, buckets: Sequence[BucketPlan]) -> None:
        """Count for these buckets from now on, between two steps."""
        self._buckets, self.buckets_of = buckets, {}
        for place, bucket in enumerate(buckets):
            for name in bucket.parameters:
                self.buckets_of.setdefault(name, []).append(place)
        self._names = self._names or list(self.buckets_of)
        self._filled = [self.buckets_of.get(name, []) for name in self._names]
        self._watch()

    def watch(self, is_open: bool) -> None:
        """Hook gradients, or no longer."""
        self._is_open = is_open
        self._watch()

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        is_first = self._due is None and any(self._left)
        if is_first:
            self._due = [-left or 1 for left in self._left]
        if is_first or (self._watches_all and self._lasts):
            self._watch()
        else:
            self._reset()

    @contextmanager
    def counted(self) -> Generator[None]:
        """Enclose the last micro-batch of a step, whose gradients are those that leave."""
        self.armed = True
        try:
            yield
        finally:
            self.armed = False

    @contextmanager
    def uncounted(self) -> Generator[None]:
        """Enclose an earlier micro-batch, on top of whose gradients the last one's come."""
        if not self._watches_all:
            self._watches_all = True
            self._watch()
        before, self.armed = self.armed, False
        try:
            yield
        finally:  # a loop may catch an error, and go on
            self.armed = before

    def end_backward(self) -> None:
        """Note whether hooks of the last gradients were misleading: then hook all again."""
        self._watches_all |= any(self._buckets[place].has_gradients() for place in self._early)

    def is_full(self, place: int) -> bool:
        """Tell whether there is such a bucket, and all of its gradients have arrived."""
        return place < len(self._missing) and not self._missing[place]

    def refuse_changed(self) -> None:
        """Refuse gradients that have changed since they left, once exchanges have ended.

        Raises:
            RuntimeError: names a parameter.
        """
        for bucket in self._buckets:
            if name := bucket.changed():
                raise RuntimeError(
                    f"{name}: its gradient was changed between backward and finish(), or "
                    "another backward added to it, after it had been sent; change gradients after "
                    "finish(), put other backward passes into sync.accumulate(), or set "
                    "overlap=false"
                )

    def _watch(self) -> None:
        """Hook the gradients that tell when buckets are full, and no others.

        Hooks are on autograd's nodes: a tensor that once had a hook calls Python for ever, but
        torch makes a node anew, without hooks, as soon as nobody holds it.
        """
        for _, handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        self._lasts = self._find_lasts()
        self._sizes = [
            1 if place in self._lasts else len(bucket.parameters)
            for place, bucket in enumerate(self._buckets)
        ]
        for index, name in enumerate(self._names if self._is_open else ()):
            if not self._parameters[name].requires_grad:  # frozen since the sync was made
                continue
            if all(self._lasts.get(place, name) == name for place in self._filled[index]):
                node = accumulator(self._parameters[name])
                handle: Any = node.register_hook(self._counter(name, index))
                self._hooks.append((node, cast(RemovableHandle, handle)))
        self._reset()

    def _find_lasts(self) -> dict[int, str]:
        if self._due is None or self._watches_all or not self._is_open:
            return {}
        due = dict(zip(self._names, self._due, strict=True))
        came = {name: place for place, name in enumerate(self.order)}
        return {
            place: max(bucket.parameters, key=lambda name: came.get(name, -1))
            for place, bucket in enumerate(self._buckets)
            if len(bucket.parameters) > 1
            and bucket.has_views
            and all(due[name] == 1 for name in bucket.parameters)
        }

    def _reset(self) -> None:
        self._left = self._due.copy() if self._due else [0] * len(self._names)
        self._missing = self._sizes.copy()
        self._early = []
        self.num_sent = 0

    def _counter(self, name: str, index: int) -> Callable[..., None]:
        """Return what counts the growths of a gradient.

        It is called for most parameters in every step, so it looks at little.
        """
        each = self._each

        def grew(*_gradients: object) -> None:
            if not self.armed:
                return
            self._left[index] = left = self._left[index] - 1
            if each:
                each(name)
            if left:
                self._grew_again(name, index)
                return
            missing = self._missing
            for place in self._filled[index]:
                missing[place] -= 1
                if not missing[place]:
                    self._all_counted(place)

        return grew

    def _all_counted(self, place: int) -> None:
        if place in self._lasts and not self._buckets[place].has_gradients(fresh=True):
            self._early.append(place)
            self._missing[place] = 1  # it leaves after backward
        else:
            self._full(place)

    def _grew_again(self, name: str, index: int) -> None:
        """Look at a growth that is not the last one: in the first step, none is known to be."""
        if self._due is None:
            self.order.pop(name, None)
            self.order[name] = None
        elif self._left[index] < 0 and self._filled[index][0] < self.num_sent:
            due = self._due[index]
            _refuse(name, str(due - self._left[index]), due)


def accumulator(parameter: nn.Parameter) -> Node:
    """Return autograd's node that adds to `grad`: hooks of the user's own run before it.

    Unlike a hook on the tensor, one on this node is not called by torch.autograd.grad. A frozen
    parameter has one, too.
    """
    is_trained = parameter.requires_grad
    node = get_gradient_edge(parameter.requires_grad_()).node
    parameter.requires_grad_(is_trained)
    return node


def _refuse(name: str, times: str, due: int) -> NoReturn:
    raise RuntimeError(
        f"{name}: backward reached it again after its gradient had been sent (number of times: "
        f"{times} in this step, expected {due}); call finish() after each step's backward, even "
        "if the step is skipped; put other backward passes of this model, such as a GAN "
        "generator's or an earlier micro-batch's, into sync.accumulate(); recompute with "
        "checkpoint(use_reentrant=False); or set overlap=false"
    )


class GradSync(Sync):
    """A sync that averages gradients over the ranks once per optimizer step.

    With `overlap`, `Arrivals` tells during the last backward which buckets are full, and they go to
    the worker, always in bucket order: all ranks must start the same exchanges in the same order,
    while their gradients may arrive in different ones. `finish` submits the buckets that backward
    did not complete: all of them in the first step, and without `overlap`.

    Buckets are first planned in the reverse order of registration. After the first step they are
    planned anew in the order in which rank 0's gradients were complete, on all ranks.

    Args:
        pattern: a subclass's; None: GradSync's own.
        multiple: divides the length of each bucket's flat tensor; zeros fill it up.

    Attributes:
        parameters: the trainable ones, by name.
        nowhere: after `finish`, the parameters that backward reached on no rank: they have no
            gradient.

    Raises: ValueError: the exchange cannot run over this comm, or does not take a parameter.
    """

    asks_who_reached = True  # of the ranks; not if all have something to send for each parameter

    def __init__(self, parts: SyncParts, pattern: Pattern | None = None, multiple: int = 1) -> None:
        super().__init__(parts, pattern or gradsync(parts.overlap))
        self.exchange.validate(self.comm)
        self.exchange.setup(parts.model)
        self.worker = parts.worker
        self._during_backward = self.pattern.begins is Begin.DURING_BACKWARD
        self.divides_loss = self.exchange.accepts_prescaled and is_linear(parts.model)
        self.order: list[str] | None = None
        self.noise: GradientNoise | None = None  # set to observe it
        self.drift: Drift | None = None  # the same
        self.before_exchange: BeforeExchange | None = None  # set to see what leaves
        self.parameters = admit(parts.model, self.exchange)
        self._outside = Outside(parts.model, self.parameters)
        self._device = next(iter(self.parameters.values())).device
        # `admit` has refused types that have none.
        carried_by = cast(
            Callable[[torch.dtype], torch.dtype], partial(carrier, exchange=self.exchange)
        )
        self._copied: set[str] = set()  # parameters whose gradients share memory
        self._plan = partial(
            plan,
            parts.model,
            parts.bucket_mb,
            multiple=multiple,
            carrier=carried_by,
            copied=self._copied,
        )
        self._arrivals = Arrivals(self.parameters, self._full, self._at_each())
        self._hooks: list[RemovableHandle] = []
        self._use(self._plan())
        self.nowhere: list[str] = []
        self._reached: Reached | None = None
        if self.asks_who_reached and self.exchange.keeps_replicas_equal:
            self._reached = Reached(self._arrivals.buckets_of, self.exchange, self._device)

    @property
    def loss_factor(self) -> float:
        """The loss scale; divided by N if that saves the exchange a pass over all gradients."""
        return self.loss_scale / (self.comm.size if self.divides_loss else 1)

    def state_dict(self) -> SyncState:
        """Return the order of gradients: with other buckets, sums may round differently."""
        order = {name: torch.tensor(place) for place, name in enumerate(self.order or ())}
        return {"order": order}

    def load_state_dict(self, state: SyncState) -> None:
        if order := state.get("order"):
            self._follow(list(order))

    def __enter__(self) -> Self:
        if self._waits_for_gradients():
            self._arrivals.watch(True)
        return self

    def _waits_for_gradients(self) -> bool:
        """Tell whether buckets leave during backward, or are yet to be planned in its order."""
        return self._during_backward or (self.order is None and len(self.buckets) > 1)

    def _at_each(self) -> Callable[[str], None] | None:
        """Return what to call at each gradient that arrives, by the parameter's name."""
        return self._advance if self.worker.takes_turns else None

    def _advance(self, _name: str) -> None:
        self.worker.advance()

    def _advance_at_gradients(self) -> None:
        """Let exchanges under way, of another step, go on whenever a gradient arrives."""
        for parameter in self.parameters.values():
            self._hooks.append(on_gradient(parameter, self.worker.advance))

    def __exit__(self, *_: object) -> None:
        self._arrivals.watch(False)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Enclose one micro-batch. Only the last one's hooks start exchanges."""
        return self._arrivals.counted() if last else self._arrivals.uncounted()

    def finish(self) -> Tensor | None:
        """Exchange the buckets that backward did not submit, and wait for all of them.

        The mean is in `grad` afterwards, even if it is not finite; see Sync.
        """
        self._all_ready()
        self._submit_rest()
        self.worker.wait()
        self._arrivals.refuse_changed()
        self.nowhere = self._reached.nowhere() if self._reached else []
        for name in self.nowhere:
            self.parameters[name].grad = None  # of zeros that stand for no gradient on any rank
        if self.noise:
            self.noise.end_step()
        if self.drift:
            self.drift.leave_out(self.nowhere)
            self.drift.end_step()
        finite = all_finite(bucket.finite for bucket in self._exchanged)
        self._begin_step()
        if self.order is None and len(self.buckets) > 1:
            self._follow(self._as_on_rank_0(self._arrivals.order))
            if not self._waits_for_gradients():
                self._arrivals.watch(False)
        self.step += 1
        return finite

    def _submit_rest(self) -> None:
        """Begin the exchanges that backward did not, and ask which parameters nobody reached."""
        self._outside.refuse_trained()
        if not self._exchanged:
            self._copy_shared()
        while len(self._exchanged) < len(self.buckets):
            self._submit_next()
        if self._reached:
            self._reached.begin(self.comm, self.worker)

    def _copy_shared(self) -> None:
        """Exchange no gradient in place whose memory is another's too, from now on."""
        if any(bucket.in_place for bucket in self.buckets):
            self._copied |= in_one_memory(self.buckets)
        for bucket in self.buckets:
            bucket.in_place = bucket.in_place and self._copied.isdisjoint(bucket.parameters)

    def observe_drift(self, every: int) -> None:
        if self.pattern.waits_in_forward:
            raise ValueError(
                f"sync={type(self).__name__} ends exchanges only in the next forward pass, so "
                "drift cannot be measured; set overlap=false"
            )
        if not self.pattern.takes_any_exchange or self.exchange.delivers != "mean":
            super().observe_drift(every)
        require_known_residuals("exchange", self.exchange)
        self.drift = Drift(self.exchange, self.comm, self.worker, every)

    def drift_found(self) -> list[dict[str, Any]] | None:
        return self.drift.results() if self.drift else None

    def needs_host(self) -> str:
        if lacked := self._reached.lacked if self._reached else []:
            return (
                f"{lacked[0]}: has no gradient on rank {self.comm.rank}, so the host would have "
                "to ask the other ranks in each step whether they have one; freeze it, or use it "
                "in the loss"
            )
        return ""

    def bucket_values(self) -> Buckets:
        return [(self.exchange.moves_as(b.shapes), b.dtype.itemsize) for b in self.buckets]

    def _follow(self, order: list[str]) -> None:
        self.order = order
        if self.drift:
            self.drift.restart()
        self._use(self._plan(order))

    def _use(self, buckets: list[BucketPlan]) -> None:
        self.buckets = buckets
        kind = type(self.exchange).__name__
        self._labels = [f"{kind} of bucket {bucket.label}" for bucket in buckets]
        self._arrivals.plan(buckets)
        self._begin_step()

    def _all_ready(self) -> None:
        """Mark the buckets that backward did not complete, or that leave after it."""
        self._arrivals.end_backward()
        if self.clock:
            for bucket in range(len(self.buckets)):
                self.clock.ready(bucket)

    def _begin_step(self) -> None:
        self._arrivals.begin_step()
        self._exchanged: list[GradBucket] = []
        self._in_place: dict[int, str] = {}  # addresses of gradients that have left in place

    def _full(self, place: int) -> None:
        """Begin exchanges as far as buckets are full: all ranks must begin them in one order."""
        if not self._during_backward:
            return
        if self.clock:
            self.clock.ready(place)
        while self._arrivals.is_full(place := self._arrivals.num_sent):
            self._submit_next()
            self.buckets[place].leave()

    def _as_on_rank_0(self, names: Iterable[str]) -> list[str]:
        """Return all parameters' names in the order of rank 0's `names`; the other ones last."""
        known = list(self._arrivals.buckets_of)
        order = [known.index(name) for name in dict.fromkeys([*names, *known])]
        return [known[index] for index in self._from_rank_0(order)]

    def _from_rank_0(self, numbers: list[int]) -> list[int]:
        sent = torch.tensor(numbers, device=self._device)
        self._alone("order of buckets", lambda: self.comm.ibroadcast(sent, 0))
        return cast(list[int], sent.tolist())  # pyright: ignore[reportUnknownMemberType]

    def _alone(self, label: str, begin: Callable[[], Collective]) -> None:
        """Run a collective while no exchange is under way, whose stages might share connections."""
        self.worker.wait()
        self.worker.submit(label, lambda: iter([begin()]))
        self.worker.wait()

    def _submit_next(self) -> None:
        place = len(self._exchanged)
        planned = self.buckets[place]
        with self.clock.exchange_work() if self.clock else UNTIMED:
            if self.before_exchange:
                gradients = [(p, p.grad) for p in planned.parameters.values()]
                self.before_exchange(not self._exchanged, gradients)
            for address, name in planned.addresses() if self._in_place else ():
                if (sent := self._in_place.get(address, name)) != name:
                    raise RuntimeError(
                        f"{name}: its gradient shares memory with that of {sent}, which has been "
                        "sent, as after torch.stack([a, b]).sum(0); set overlap=false"
                    )
            bucket = planned.pack(self.step, self.divides_loss)
            if planned.reordered and self.exchange.state_dict():
                raise RuntimeError(
                    f"{planned.reordered}: lies in another memory order than before, unlike its "
                    "residuals; convert it (as to torch.channels_last) before you make the sync"
                )
            if planned.in_place:
                self._in_place[bucket.flat.data_ptr()] = planned.label
            if bucket.lacking and self._reached:
                self._reached.lacks(bucket.lacking)
        self._exchanged.append(bucket)
        self._arrivals.num_sent = len(self._exchanged)
        job = partial(self._stages, bucket)
        if self.clock:
            job = observed(self.clock, planned.label, job, self.exchange, self.comm, self.worker)
        self.worker.submit(self._labels[place], job)

    def _stages(self, bucket: GradBucket) -> Iterator[Collective]:
        if self.loss_scale != 1.0:
            bucket.flat.div_(self.loss_scale)  # residuals are kept in units of true gradients
        if self.noise:
            self.noise.before(bucket, self.comm.size)
        if self.drift:
            self.drift.before(bucket)
        yield from self.exchange.stages(bucket, self.comm)
        bucket.unpack()
        if self.noise:
            self.noise.after(bucket)
        if self.drift:
            self.drift.after(bucket)


class DoubleBuffer(GradSync):
    """A sync that exchanges all gradients after backward, and waits there or one step later.

    With `double_buffer` the update of step t uses the mean gradient of step t-1, while that of t
    travels during step t+1: CNTK's useBufferedAsyncGradientAggregation (AllReduceDistGradAggregator
    ::AggregateGradients), which Seide et al. 2014 call double buffering. The first step updates
    nothing, and the last step's gradient is never applied.

    Without, it waits as GradSync does. `overlap` must have the same value: it chooses a worker that
    runs while the rank computes.

    Raises:
        ValueError: `double_buffer` is not a bool, or differs from `overlap`.
    """

    def __init__(self, parts: SyncParts, *, double_buffer: bool) -> None:
        super().__init__(parts, pattern.double_buffer(double_buffer))
        self.double_buffer = double_buffer
        self.arriving: dict[str, Tensor] = {}  # the last step's gradients; means once received
        self._sent = 0, 0, 0

    def _use(self, buckets: list[BucketPlan]) -> None:
        super()._use(buckets)
        self._resting = [bucket.twin() for bucket in buckets]  # for every second step

    def __enter__(self) -> Self:
        if not self.double_buffer:
            return super().__enter__()
        self._sent = super().sent()
        self._advance_at_gradients()
        return self

    def finish(self) -> Tensor | None:
        """Begin to exchange this step's gradients; leave the previous step's means in `grad`."""
        if not self.double_buffer:
            return super().finish()
        self._all_ready()
        self.settle()
        if self.drift:
            self.drift.end_step()
        finite = all_finite(bucket.finite for bucket in self._exchanged)
        self.buckets, self._resting = self._resting, self.buckets
        self._begin_step()
        self._submit_rest()
        arrived, self.arriving = self.arriving, {}
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:  # None: it has no values
                self.arriving[name] = parameter.grad
            parameter.grad = arrived.get(name)
        self.step += 1
        return finite

    def sent(self) -> Sent:
        return self._sent if self.double_buffer else super().sent()

    def settle(self) -> None:
        self.worker.wait()
        for name in self._reached.nowhere() if self._reached else ():
            del self.arriving[name]
        self._sent = super().sent()  # later, an exchange under way may have sent a part

    def state_dict(self) -> SyncState:
        """Return GradSync's state and the means that the next step will use. Settle first."""
        return {**super().state_dict(), "arriving": dict(self.arriving)}

    def load_state_dict(self, state: SyncState) -> None:
        super().load_state_dict(state)
        if self.double_buffer:
            self.arriving = state.get("arriving", {})

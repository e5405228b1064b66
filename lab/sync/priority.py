"""PrioritySync: no barrier between steps; each layer's forward waits for its own parameters."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lab.distributed.comm import Sent
from lab.distributed.worker import Worker
from lab.exchange.bucket import BucketPlan, GradBucket, plan
from lab.exchange.grouping import cut
from lab.exchange.layout import is_compiled
from lab.measure.clock import Clock, Mark, mark, seconds
from lab.sync.base import SyncParts, SyncState, all_finite
from lab.sync.first_use import FirstReads, after, before
from lab.sync.gradsync import GradSync
from lab.sync.pattern import priority, send_order
from lab.sync.update import update_some

COLD = 2  # first steps of each schedule in a trial, up to 40 % slower: buffers are new
GAIN = 0.02  # share of a step by which the second schedule has to be faster


class PrioritySync(GradSync):
    """A sync whose exchange runs on during the next forward, most urgent gradients first.

    P3 (Jayarajan et al., MLSys 2019) and ByteScheduler (Peng et al., SOSP 2019), as in BytePS's
    cross barrier: `finish` does not wait, and each module of the next forward waits for its own
    parameters' gradients and updates these. Buckets are small and larger parameters are cut, so
    that gradients of early layers, which are there last and needed first, overtake those of late
    ones. (Exchanges that do more than sum get whole ones.) Step 0 finds the orders in which
    gradients arrive and forward reads, step 1 the time that they travel; then GradSync's schedule
    and this one are timed (Trial). Why, and what is refused: docs/exchanges/schedules.md. Settings:
    conf/sync/priority.yaml.

    Raises:
        ValueError: an argument out of range, a compiled model, or an exchange that chooses by time.
    """

    def __init__(self, parts: SyncParts, *, chunk_mb: float, trials: int) -> None:
        pattern = priority(parts.overlap, chunk_mb, trials)
        if is_compiled(parts.module):
            raise ValueError(
                "model: compiled layers cannot wait for their weights; leave out torch.compile"
            )
        scale = getattr(parts.model, "bytes_scale", 1.0)
        exchange = parts.exchange
        cuts = exchange.accepts_prescaled and exchange.delivers == "mean"  # it only sums
        self._cut = partial(cut, bucket_mb=chunk_mb if cuts else None, bytes_scale=scale)
        super().__init__(replace(parts, bucket_mb=chunk_mb), pattern)
        self._plan_overlap = partial(plan, parts.model, parts.bucket_mb, **self._plan.keywords)
        self.overlap, self.model = parts.overlap, parts.model
        self.trial = ScheduleTrial(trials, self._device)
        self._settled_at = 0
        self.needed: list[str] = []  # parameters in the order in which forward reads them
        self.sends: list[int] | None = None  # places among the parts, in the order of sending
        self._sending: list[BucketPlan] = []  # these parts
        self._measuring = False
        self._late = False  # this step's gradients are applied in the next one
        self._overlapped: list[BucketPlan] | None = None  # buckets of the other schedule
        self._watched = False  # hooks know where forward reads each parameter
        self._reads: list[str] = []  # parameters in the order in which it does, on this rank
        self._arrived: dict[str, Mark] = {}
        self._deferred = DeferredUpdates(
            parts.worker, getattr(parts.model, "delay", lambda _: None)
        )
        self._leaving: list[GradBucket] = []
        self._finite: Tensor | None = None  # of the last step whose exchange outlasted it
        self._sent = 0, 0, 0

    def __enter__(self) -> Self:
        self._sent = super().sent()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._watched = False  # the hooks are gone

    @contextmanager
    def micro_batch(self, last: bool) -> Generator[None]:
        """Enclose one micro-batch; the first of all is watched to see where parameters are read."""
        watch = FirstReads(self.model) if self.overlap and not self._watched else nullcontext()
        with watch as reads, super().micro_batch(last):
            yield
        if reads is not None:
            self._wait_in_forward(reads.waits())

    def finish(self) -> Tensor | None:
        """End the step's exchange, or leave it to the next forward; tell of the last update's."""
        if self._late:
            return self._leave()
        begin = None
        if self._measuring:  # all ranks meet, so that a late one's time does not count as travel
            nothing = torch.zeros(1, device=self._device)
            self._alone("a meeting of ranks", partial(self.comm.iall_reduce, nothing))
            begin = mark(self._device)
        finite = super().finish()
        if begin is not None:
            self._plan_sends(begin, mark(self._device))
        if self._reads and not self.needed:
            self.needed = self._as_on_rank_0(self._reads)
        return finite

    def update(self, optimizer: Optimizer) -> None:
        """Update all parameters, or each as forward comes to it."""
        if self._deferred:
            self._deferred.use(optimizer)
        else:
            super().update(optimizer)
            self._sent = super().sent()
        if self.sends is not None and (own := self.trial.end_step()) is not None:
            self.trial.costs, self._settled_at = self._slowest(own), self.step
        self._schedule()

    def settle(self) -> None:
        if self._deferred:
            with self.clock.overtime() if self.clock else nullcontext():
                self._apply()
        self.trial.interrupt()

    @property
    def settled_at(self) -> int | None:
        return None if self.overlap and not self.trial.is_over else self._settled_at

    def sent(self) -> Sent:
        return self._sent if self._deferred else super().sent()

    @contextmanager
    def arrived(self) -> Generator[None]:
        """Wait for the step's exchange, and show each parameter's `grad` meanwhile."""
        self._drop_nowhere(self._group_of)
        with self._deferred.in_grad():
            self._sent = super().sent()
            yield

    def choices(self) -> list[dict[str, Any]]:
        """Return the seconds of a step under each schedule, and the chosen one."""
        if self.trial.costs is None:
            return []
        overlap_s, priority_s = self.trial.costs
        chosen = "priority" if self.trial.second else "overlap"
        return [{"overlap_s": overlap_s, "priority_s": priority_s, "chosen": chosen}]

    def state_dict(self) -> SyncState:
        """Return GradSync's state, the planned order and the choice. Settle first."""
        needed = {name: torch.tensor(place) for place, name in enumerate(self.needed)}
        kept = {"ranks": torch.tensor(self.comm.size)}
        if self.sends is not None:
            kept["sends"] = torch.tensor(self.sends)
        if self.trial.costs is not None:
            kept["costs"] = torch.tensor(self.trial.costs, dtype=torch.float64)
        return {**super().state_dict(), "needed": needed, "plan": kept}

    def load_state_dict(self, state: SyncState) -> None:
        """Continue; another number of ranks, or of parts, plans and tries anew."""
        super().load_state_dict(state)
        self.needed = list(state.get("needed", {}))
        kept = state.get("plan", {})
        fits = "sends" in kept and len(kept["sends"]) == len(self._parts)
        if fits and int(kept["ranks"]) == self.comm.size:
            self._send_in(map(int, kept["sends"]))
            self.trial.costs = [*map(float, kept["costs"])] if "costs" in kept else None
        self._schedule()

    def _use(self, buckets: list[BucketPlan]) -> None:
        self._groups, self._parts = buckets, list[BucketPlan]()
        self._group_of = {n: i for i, bucket in enumerate(buckets) for n in bucket.parameters}
        for bucket in buckets:
            can_be_cut = len(bucket.parameters) == 1 and bucket.has_views
            self._parts += in_parts(bucket, self._cut(bucket.num_values) if can_be_cut else [])
        super()._use(self._parts)

    def _schedule(self) -> None:
        planned = self.overlap and self.sends is not None
        self._measuring = self.overlap and not planned and bool(self.needed)
        self._during_backward = self.overlap and not self._measuring
        self._late = planned and self.trial.second
        buckets = self._parts
        if self._late:
            self._overlapped, buckets = None, self._sending
        elif planned:
            buckets = self._overlapped = self._overlapped or self._plan_overlap(self.order)
        if buckets is not self.buckets:
            super()._use(buckets)

    def _waits_for_gradients(self) -> bool:
        return True  # schedules change, and each gradient's time is measured

    def _at_each(self) -> Callable[[str], None]:
        def arrived(name: str) -> None:
            if self._measuring:
                self._arrived[name] = mark(self._device)
            self.worker.advance()

        return arrived

    def _plan_sends(self, begin: Mark, end: Mark) -> None:
        """Plan the order of sending from rank 0's times; all parts travelled between two marks."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # once a run
        first = next(iter(self._arrived.values()))
        ready = {name: seconds(first, arrived) for name, arrived in self._arrived.items()}
        last = max(ready.values())
        need = {name: place for place, name in enumerate(self.needed)}
        byte_s = seconds(begin, end) / sum(part.nbytes for part in self._parts)
        order = send_order(
            [max(ready.get(name, last) for name in part.parameters) for part in self._parts],
            [byte_s * part.nbytes for part in self._parts],
            [min(need[name] for name in part.parameters) for part in self._parts],
        )
        self._send_in(self._from_rank_0(order))
        self._arrived.clear()

    def _send_in(self, order: Iterable[int]) -> None:
        self.sends = list(order)
        self._sending = [self._parts[place] for place in self.sends]

    def _leave(self) -> Tensor | None:
        """Submit what backward did not, and go on while it travels."""
        self._all_ready()
        self._submit_rest()
        places = self._arrivals.buckets_of
        for index, bucket in enumerate(self._groups):
            last = max(place for name in bucket.parameters for place in places[name])
            jobs = len(self.buckets) + (self._reached is not None)  # which sends flags at last
            self._deferred.add(index, bucket.parameters, jobs - 1 - last)
        finite, self._finite = self._finite, None
        self._leaving = self._exchanged
        self._begin_step()
        self.step += 1
        return finite

    def _wait_in_forward(self, waits: Mapping[str, list[str]]) -> None:
        """Wait as modules begin, for the parameters that `waits` has by module (FirstReads)."""
        trained = {m: [n for n in names if n in self._group_of] for m, names in waits.items()}
        self._watched, self._reads = True, [name for names in trained.values() for name in names]
        for module, names in trained.items():
            begin = partial(self._apply, names)
            self._hooks.append(before(self.model.get_submodule(module), begin))
        # Parameters that this forward did not read are updated at its end.
        self._hooks.append(after(self.model, self._apply))

    def _apply(self, names: list[str] | None = None) -> None:
        """Wait for the buckets of some parameters and update these buckets; None: all buckets."""
        if not self._deferred:
            return
        groups: Sequence[int] = range(len(self._groups))
        if names is not None:
            self.worker.advance()
            # A parameter that was frozen before buckets were planned anew is in none.
            groups = [self._group_of[name] for name in names if name in self._group_of]
        self._drop_nowhere(name for group in groups for name in self._groups[group].parameters)
        self._deferred.apply(groups, self.clock)
        if not self._deferred:
            self._sent = super().sent()
            self._finite = all_finite(bucket.finite for bucket in self._leaving)
            self._leaving = []

    def _drop_nowhere(self, names: Iterable[str]) -> None:
        """Drop updates of what no rank reached, if this one lacks the gradient of any `names`."""
        if self._reached and self._reached.is_lacking(names):
            with self.clock.phase("exchange") if self.clock else nullcontext():
                self.worker.wait()
            self._deferred.drop(self.parameters[name] for name in self._reached.nowhere())

    def _slowest(self, costs: list[float]) -> list[float]:
        """Return each entry of `costs` on the rank where it is largest."""
        own = torch.tensor(costs, dtype=torch.float64, device=self._device)
        every = own.new_empty(self.comm.size, len(costs))
        self._alone("times of both schedules", partial(self.comm.iall_gather, every, own))
        return [*map(float, every.amax(dim=0))]


class ScheduleTrial:
    """Times steps of two schedules: some of both that do not count, then some of each that do.

    Each has its steps in a row, because an exchange that outlasts its step runs into the next one;
    so the first step of a row never counts.

    Args:
        trials: timed steps of each; 0: the second schedule is taken as it is.

    Attributes:
        costs: median seconds of a step under each; None: not known yet.
    """

    def __init__(self, trials: int, device: torch.device) -> None:
        self._trials, self._device = trials, device
        self.costs: list[float] | None = None
        self._spans: list[list[tuple[Mark, Mark]]] = [[], []]
        self._last: Mark | None = None  # end of the last step; None: it is not to be timed
        # The step in which the order was planned is the first.
        rows = [(0, 1 + COLD, 0), (1, COLD, 0), (0, 1, trials), (1, 1, trials)]
        self._left = deque(  # steps to come: which schedule, and whether it counts
            (which, counts)
            for which, untimed, timed in rows
            for counts in [False] * untimed + [True] * timed
        )

    @property
    def second(self) -> bool:
        """Whether the next step is to follow the second schedule."""
        if self.costs is not None:
            return self.costs[1] < (1 - GAIN) * self.costs[0]
        return self.is_over or self._left[0][0] == 1

    @property
    def is_over(self) -> bool:
        return self.costs is not None or self._trials == 0

    def end_step(self) -> list[float] | None:
        """Note the end of a step.

        Returns:
            This rank's `costs`, to be compared with the others', once it has them; else None.
        """
        if self.is_over:
            return None
        which, counts = self._left[0]
        last, self._last = self._last, mark(self._device)
        if counts and last is None:
            return None  # other work ran in it: another step takes its place
        self._left.popleft()
        if counts and last is not None:
            self._spans[which].append((last, self._last))
        if self._left:
            return None
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # once a run
        return [median(seconds(*span) for span in spans) for spans in self._spans]

    def interrupt(self) -> None:
        """Leave out the step under way, in which other work ran."""
        self._last = None


class _Packed:
    """A bucket's gradients of one step, packed when the first of its parts leaves."""

    def __init__(self, plan: BucketPlan, num_parts: int) -> None:
        self.plan, self._num_parts = plan, num_parts
        self._whole: GradBucket | None = None
        self._left = 0  # parts that have not left in this step

    def take(self, step: int, divided: bool) -> GradBucket:
        """Return the whole bucket; each part calls this once a step."""
        whole = self._whole
        if whole is None:
            whole, self._left = self.plan.pack(step, divided), self._num_parts
        self._left -= 1
        self._whole = whole if self._left else None  # so that its memory can be freed
        return whole


class PartPlan(BucketPlan):
    """A range of values of another bucket's single parameter.

    Its GradBucket has one entry, named by parameter and range. So it is for exchanges that only
    sum: a residual is kept by parameter name.
    """

    def __init__(self, packed: _Packed, part: range) -> None:
        self._packed, self._part = packed, part
        super().__init__(packed.plan.parameters, packed.plan.in_place)
        (name,) = self.parameters
        self.shapes = {f"{name}[{part.start}:{part.stop}]": torch.Size([len(part)])}

    @property
    def in_place(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._packed.plan.in_place

    @in_place.setter
    def in_place(self, value: bool) -> None:
        self._packed.plan.in_place = value

    @property
    def nbytes(self) -> int:
        (parameter,) = self.parameters.values()
        return len(self._part) * parameter.element_size()

    def pack(self, step: int, divided: bool = False) -> GradBucket:
        whole, part = self._packed.take(step, divided), self._part
        values = whole.flat[part.start : part.stop]
        return GradBucket(self.shapes, values, step, divided, lacking=whole.lacking)


def in_parts(plan: BucketPlan, parts: Sequence[range]) -> list[BucketPlan]:
    """Return the plans of a bucket's `parts`: ranges of values that together are all."""
    if len(parts) < 2:
        return [plan]
    packed = _Packed(plan, len(parts))
    return [PartPlan(packed, part) for part in parts]


@dataclass(frozen=True)
class _Update:
    """The update of some parameters, once all jobs of the worker but the last `left` have ended."""

    gradients: dict[nn.Parameter, Tensor]
    left: int
    label: str


class DeferredUpdates:
    """The updates of a step, by bucket, that its end did not wait for.

    Args:
        worker: exchanges the gradients; it has no other jobs as long as updates are deferred.
        delay: told the seconds that each call of `apply` took.
    """

    def __init__(self, worker: Worker, delay: Callable[[float], None]) -> None:
        self._worker, self._delay = worker, delay
        self._updates: dict[int, _Update] = {}
        self._optimizer: Optimizer | None = None

    def __bool__(self) -> bool:
        return bool(self._updates)

    def add(self, bucket: int, parameters: Mapping[str, nn.Parameter], left: int) -> None:
        """Take the gradients of a bucket away from its parameters, to apply them later.

        Args:
            left: number of the worker's jobs behind the bucket's last one.
        """
        gradients: dict[nn.Parameter, Tensor] = {}
        for parameter in parameters.values():
            assert parameter.grad is not None  # its bucket gave it one
            gradients[parameter], parameter.grad = parameter.grad, None
        self._updates[bucket] = _Update(gradients, left, next(iter(parameters)))

    def use(self, optimizer: Optimizer) -> None:
        """Apply by `optimizer`, whose hyperparameters are those of the step until none is left."""
        self._optimizer = optimizer

    def drop(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            for update in self._updates.values():
                update.gradients.pop(parameter, None)

    def apply(self, buckets: Iterable[int], clock: Clock | None) -> None:
        """Wait for the gradients of some buckets, and update their parameters.

        Buckets without deferred updates are skipped.
        """
        begin_s = time.perf_counter()
        for bucket in buckets:
            if (update := self._updates.pop(bucket, None)) is None:
                continue
            assert self._optimizer is not None  # `use` follows `add`
            with clock.phase("exchange", update.label) if clock else nullcontext():
                self._worker.wait(update.left)
            with clock.phase("update") if clock else nullcontext():
                for parameter, gradient in update.gradients.items():
                    parameter.grad = gradient
                update_some(self._optimizer, update.gradients)
        self._delay(time.perf_counter() - begin_s)

    @contextmanager
    def in_grad(self) -> Generator[None]:
        """Wait for all gradients, and have them in `grad` of their parameters meanwhile."""
        if not self:
            yield
            return
        self._worker.wait()
        gradients = {p: g for update in self._updates.values() for p, g in update.gradients.items()}
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        yield
        for parameter in gradients:
            parameter.grad = None

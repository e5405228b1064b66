"""PrioritySync: no barrier between steps; each layer's forward waits for its own parameters."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lab.exchange.auto import Auto
from lab.exchange.bucket import BucketPlan, GradBucket
from lab.exchange.grouping import cut
from lab.exchange.parts import in_parts
from lab.measure.clock import Mark, mark, seconds
from lab.sync.base import SyncParts, SyncState
from lab.sync.gradsync import GradSync, all_finite
from lab.sync.pattern import priority
from lab.sync.reads import FirstReads, before
from lab.sync.send_order import send_order
from lab.sync.trial import Trial
from lab.sync.update_some import update_some


class PrioritySync(GradSync):
    """A sync whose exchange runs on during the next forward, most urgent gradients first.

    P3 (Jayarajan et al., MLSys 2019) and ByteScheduler (Peng et al., SOSP 2019), as in BytePS's
    cross barrier: backward hands gradients to the worker, `finish` does not wait, and each module
    of the next forward waits for its own parameters' gradients and updates these. Parameters above
    `bucket_mb` are cut, so that gradients of early layers, which are there last and needed first,
    overtake those of late ones. (Exchanges that compress get whole parameters.)

    All ranks begin all exchanges in one order, so it is planned: the first step of a run tells the
    order in which gradients arrive and forward reads parameters, the second how long all of them
    travel after backward. The order follows from rank 0's times. Then steps under this schedule and
    under that of `overlap` are timed, and the faster is kept (Trial).

    Weights are the same bits under both, and with `overlap=false`: the messages are the same.

    Args:
        trials: see Trial.

    Raises:
        ValueError: `trials` is no number of steps, the model is compiled, or the exchange makes a
            choice by time as well.
    """

    def __init__(self, parts: SyncParts, *, trials: int) -> None:
        _check(parts, trials)
        scale = getattr(parts.model, "bytes_scale", 1.0)
        cuts = parts.exchange.takes_divided  # it only sums
        self._cut = partial(cut, bucket_mb=parts.bucket_mb if cuts else None, bytes_scale=scale)
        super().__init__(parts, priority(parts.overlap))
        self.overlap, self.model = parts.overlap, parts.model
        self.trial = Trial(trials, self._device)
        self.needed: list[str] = []  # parameters in the order in which forward reads them
        self.sends: list[int] | None = None  # places among the parts, in the order of sending
        self._measuring = False
        self._late = False  # this step's gradients are applied in the next one
        self._waits: dict[str, list[str]] | None = None  # see FirstReads; None: not watched yet
        self._arrivals: dict[str, Mark] = {}
        self._due: dict[int, int] = {}  # buckets to apply, and the jobs that may be left by then
        self._gradients: dict[nn.Parameter, Tensor] = {}  # of these
        self._leaving: list[GradBucket] = []
        self._finite: Tensor | None = None  # of the last step whose exchange outlasted it
        self._sent = 0, 0
        self._delay: Callable[[float], None] = getattr(parts.model, "delay", lambda _: None)

    def __enter__(self) -> Self:
        self._sent = super().sent()
        return super().__enter__()

    @contextmanager
    def micro_batch(self, last: bool) -> Generator[None]:
        """Enclose one micro-batch; the first of all is watched to see where parameters are read."""
        if self._waits is not None or not self.overlap:
            with super().micro_batch(last):
                yield
            return
        with FirstReads(self.model) as reads, super().micro_batch(last):
            yield
        self._waits = reads.waits()
        self._wait_in_forward(self._waits)

    def finish(self) -> Tensor | None:
        """End the step's exchange, or leave it to the next forward.

        Returns:
            Whether the gradients that the last update applied were finite.
        """
        if self._late:
            return self._leave()
        begin = self._meet() if self._measuring else None
        finite = super().finish()
        if begin is not None:
            self._plan_sends(seconds(begin, mark(self._device)))
        if self._waits is not None and not self.needed:
            self.needed = self._as_on_rank_0(n for names in self._waits.values() for n in names)
        return finite

    def update(self, optimizer: Optimizer) -> None:
        """Update all parameters, or each as forward comes to it."""
        self._update = partial(update_some, optimizer)
        if self._due:
            for bucket in self._groups:
                for parameter in bucket.parameters.values():
                    assert parameter.grad is not None  # its bucket gave it one
                    self._gradients[parameter], parameter.grad = parameter.grad, None
        else:
            super().update(optimizer)
            self._sent = super().sent()
        if self.sends is not None and (own := self.trial.end_step()) is not None:
            self.trial.costs = self._slowest(own)
        self._schedule()

    def settle(self) -> None:
        if self._due:
            with self.clock.overtime() if self.clock else nullcontext():
                self._apply(tuple(self._due))
        self.trial.interrupt()

    def sent(self) -> tuple[int, int]:
        return self._sent if self._due else super().sent()

    def choices(self) -> list[dict[str, Any]]:
        """Return the seconds of a step under each schedule, and the chosen one."""
        if self.trial.costs is None:
            return []
        overlap_s, priority_s = self.trial.costs.tolist()
        chosen = "priority" if self.trial.second else "overlap"
        return [{"overlap_s": overlap_s, "priority_s": priority_s, "chosen": chosen}]

    def state_dict(self) -> SyncState:
        """Return GradSync's state, the planned order and the choice. Settle first."""
        needed = {name: torch.tensor(place) for place, name in enumerate(self.needed)}
        plan = {"ranks": torch.tensor(self.comm.size)}
        if self.sends is not None:
            plan["sends"] = torch.tensor(self.sends)
        if self.trial.costs is not None:
            plan["costs"] = self.trial.costs
        return {**super().state_dict(), "needed": needed, "plan": plan}

    def load_state_dict(self, state: SyncState) -> None:
        """Continue; another number of ranks, or of parts, plans and tries anew."""
        super().load_state_dict(state)
        self.needed = list(state.get("needed", {}))
        plan = state.get("plan", {})
        if "sends" in plan and len(plan["sends"]) == len(self._parts):
            if int(plan["ranks"]) == self.comm.size:
                self.sends = plan["sends"].tolist()
                self.trial.costs = plan["costs"].cpu() if "costs" in plan else None
        self._schedule()

    def _use(self, buckets: list[BucketPlan]) -> None:
        self._groups, self._parts = buckets, list[BucketPlan]()
        self._group_of = {n: i for i, bucket in enumerate(buckets) for n in bucket.parameters}
        for bucket in buckets:
            num_values = sum(p.numel() for p in bucket.parameters.values())
            alone = len(bucket.parameters) == 1
            parts = self._cut(num_values) if alone else [range(num_values)]
            self._parts += in_parts(bucket, parts)
        super()._use(self._parts)

    def _schedule(self) -> None:
        """Set the next step's schedule."""
        planned = self.sends is not None
        self._measuring = self.overlap and not planned and bool(self.needed)
        self._during_backward = self.overlap and not self._measuring
        self._late = planned and self.overlap and self.trial.second
        places = self.sends if self._late and self.sends else range(len(self._parts))
        super()._use([self._parts[place] for place in places])

    def _gradient_ready(self, name: str, parameter: Tensor) -> None:
        if self._measuring and self._armed:
            self._arrivals[name] = mark(self._device)
        super()._gradient_ready(name, parameter)

    def _meet(self) -> Mark:
        """Wait for all ranks, so that a late one's time does not count as travel."""
        nothing = torch.zeros(1, device=self._device)
        self.worker.submit("a meeting of ranks", lambda: iter([self.comm.iall_reduce(nothing)]))
        self.worker.wait()
        return mark(self._device)

    def _plan_sends(self, all_s: float) -> None:
        """Plan the order of sending from rank 0's arrivals and the time in which all travelled."""
        first = next(iter(self._arrivals.values()))
        ready = {name: seconds(first, arrived) for name, arrived in self._arrivals.items()}
        last = max(ready.values())
        need = {name: place for place, name in enumerate(self.needed)}
        total = sum(part.nbytes for part in self._parts)
        order = send_order(
            [max(ready.get(name, last) for name in part.parameters) for part in self._parts],
            [all_s * part.nbytes / total for part in self._parts],
            [min(need[name] for name in part.parameters) for part in self._parts],
        )
        self.sends = self._from_rank_0(order)
        self._arrivals.clear()

    def _leave(self) -> Tensor | None:
        """Submit what backward did not, and go on while it travels."""
        while len(self._exchanged) < len(self.buckets):
            self._submit_next()
        for index, bucket in enumerate(self._groups):
            last = max(place for name in bucket.parameters for place in self._buckets_of[name])
            self._due[index] = len(self.buckets) - 1 - last
        finite, self._finite = self._finite, None
        self._leaving = self._exchanged
        self._begin_step()
        self.step += 1
        return finite

    def _wait_in_forward(self, waits: dict[str, list[str]]) -> None:
        modules = dict(self.model.named_modules())
        for module, names in waits.items():
            self._hooks.append(before(modules[module], partial(self._begin_module, names)))
        end = self.model.register_forward_hook(lambda *_: self._apply(tuple(self._due)))
        self._hooks.append(end)  # of parameters that this forward did not read

    def _begin_module(self, names: list[str]) -> None:
        if self._due:
            self.worker.advance()
            self._apply([self._group_of[name] for name in names])

    def _apply(self, groups: Iterable[int]) -> None:
        """Wait for the gradients of some buckets, and update their parameters."""
        begin_s = time.perf_counter()
        for index in groups:
            if (left := self._due.pop(index, None)) is None:
                continue
            with self._phase("exchange", str(next(iter(self._groups[index].parameters)))):
                self.worker.wait(left)
            with self._phase("update"):
                parameters = self._groups[index].parameters.values()
                for parameter in parameters:
                    parameter.grad = self._gradients.pop(parameter)
                self._update(parameters)
            if not self._due:
                self._sent = super().sent()
                self._finite = all_finite(self._leaving)
        self._delay(time.perf_counter() - begin_s)

    def _phase(self, name: str, label: str | None = None) -> AbstractContextManager[None]:
        return self.clock.phase(name, label) if self.clock else nullcontext()

    def _slowest(self, costs: Tensor) -> Tensor:
        """Return each entry of `costs` on the rank where it is largest."""
        own = costs.to(self._device)
        every = own.new_empty(self.comm.size, len(own))
        gather = partial(self.comm.iall_gather, every, own)
        self.worker.submit("times of both schedules", lambda: iter([gather()]))
        self.worker.wait()
        return every.amax(dim=0).cpu()


def _check(parts: SyncParts, trials: object) -> None:
    if isinstance(trials, bool) or not isinstance(trials, int) or trials < 0:
        raise ValueError(f"sync.trials={trials}: must be an integer of at least 0")
    if parts.module is not parts.model:
        raise ValueError("compile=true: compiled layers cannot wait for theirs; allowed is false")
    if isinstance(parts.exchange, Auto):
        raise ValueError("exchange=Auto: sync=priority chooses by measurement too; choose another")

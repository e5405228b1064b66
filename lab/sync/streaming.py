"""StreamingSync: local steps, and one fragment of the weights after another is exchanged."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Self

import torch
from torch import Tensor

from lab.distributed.comm import Sent
from lab.exchange.bucket import plan
from lab.settings import checks
from lab.sync import pattern as rules
from lab.sync.base import SyncParts, SyncState, all_finite
from lab.sync.local import LocalSync


class StreamingSync(LocalSync):
    """Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512, algorithm 2).

    The model is divided into P fragments. Each is exchanged every H steps, as LocalSync exchanges
    the whole model, but H/P steps after the one before it, so that a P-th of the bytes travels at
    once. An exchange runs while the next `delay` steps compute. Then the anchor of its fragment
    moves, and the weights, which have moved on, become
    `alpha * weights + (1 - alpha) * anchor`. After the run's last step all fragments are exchanged,
    and weights are their anchors.

    With one fragment, no delay and alpha 0 this is LocalSync, bit for bit.

    Args:
        every: steps from one exchange of a fragment to the next, H.
        outer_lr, outer_momentum: see LocalSync.
        fragments: P; fragment_order: see lab.sync.pattern.
        delay: steps that an exchange may take, tau in the paper; 0: the rank waits for it.
            `overlap` chooses a worker that runs while the rank computes, so it must be `delay > 0`.
        alpha: share of a rank's own weights that it keeps when it receives the anchor.

    Raises:
        ValueError: an argument out of range, or more fragments than layers.
    """

    def __init__(
        self,
        parts: SyncParts,
        *,
        every: int,
        outer_lr: float,
        outer_momentum: float,
        fragments: int,
        fragment_order: str,
        delay: int,
        alpha: float,
    ) -> None:
        pattern = rules.streaming(every, fragments, fragment_order, delay)
        outer = {"outer_lr": outer_lr, "outer_momentum": outer_momentum}
        super().__init__(parts, every=every, **outer, pattern=pattern)
        _check_fragments(every, fragments, fragment_order, delay, alpha)
        if delay and not parts.overlap:
            raise ValueError(f"overlap=false: must be true with sync.delay={delay}")
        self.delay, self.alpha = delay, alpha
        sizes = [(name, p.nbytes) for name, p in self.parameters.items()]
        self.fragments = rules.fragments(sizes, fragments, fragment_order)
        make_plan = partial(plan, parts.model, parts.bucket_mb, self.order)
        self._plans = [make_plan(only=names) for names in self.fragments]
        self._all = [*chain(*self._plans)]
        self._use(self._all)
        # The last fragment at the end of a round, the others at equal distances before it.
        turns = {(1 + n) * every // fragments % every: n for n in range(fragments)}
        self._turns = turns  # the fragment whose exchange begins, by steps done modulo `every`
        self.arriving: dict[str, Tensor] = {}  # changes of a fragment under way; means once there
        self._sent = 0, 0, 0

    def __enter__(self) -> Self:
        super().__enter__()
        self._sent = super().sent()
        for parameter in self.parameters.values() if self.delay else ():
            self._on_gradient(parameter, lambda _: self.worker.advance())
        return self

    @torch.no_grad()
    def after_update(self, last: bool) -> Tensor | None:
        done = self.step + 1
        begins = self._turns.get(done % self.every)
        arrives = (done - self.delay) % self.every in self._turns
        found: list[Tensor | None] = []
        if self.arriving and (arrives or begins is not None or last):
            found.append(self._receive(self.alpha))
        for number in range(len(self.fragments)) if last else () if begins is None else (begins,):
            self._send(number)
            if last or not self.delay:
                found.append(self._receive(0.0 if last else self.alpha))
        moved_all = begins is not None and len(self.fragments) == 1 and not self.delay
        self.in_round = not (last or (moved_all and not self.alpha))
        self.step = done
        return all_finite(found)

    def _send(self, number: int) -> None:
        """Begin to exchange a fragment."""
        self._leave_changes(self.fragments[number])
        self._use(self._plans[number])
        while len(self._exchanged) < len(self.buckets):
            self._submit_next()
        for name in self.fragments[number]:
            gradient = self.parameters[name].grad
            assert gradient is not None  # a bucket gave it one
            self.arriving[name], self.parameters[name].grad = gradient, None

    def _receive(self, own_share: float) -> Tensor | None:
        """Wait for the fragment under way, and move its anchor and weights."""
        self.settle()
        if self.drift:
            self.drift.end_step()
        finite = all_finite(bucket.finite for bucket in self._exchanged)
        for name, mean in self.arriving.items():
            self.parameters[name].grad = mean
        self._move_anchor(self.arriving, own_share)
        self.arriving = {}
        self._use(self._all)
        return finite

    def sent(self) -> Sent:
        return self._sent

    def settle(self) -> None:
        self.worker.wait()
        self._sent = super().sent()  # later, an exchange under way may have sent a part

    def state_dict(self) -> SyncState:
        """Return LocalSync's state and the means that have arrived early. Settle first."""
        return {**super().state_dict(), "arriving": dict(self.arriving)}

    def load_state_dict(self, state: SyncState) -> None:
        """Continue. Means of a fragment that this run has not are dropped: its anchor stays where
        it was, so its next exchange covers the same change.
        """
        super().load_state_dict(state)
        arriving = state.get("arriving", {})
        known = any(set(names) == set(arriving) for names in self.fragments)
        self.arriving = arriving if known else {}


def _check_fragments(
    every: int, fragments: object, order: object, delay: object, alpha: object
) -> None:
    number = checks.whole("sync.fragments", fragments, 1, every)
    checks.one_of("sync.fragment_order", order, rules.ORDERS)
    # At most the steps from one fragment to the next.
    checks.whole("sync.delay", delay, 0, every // number)
    checks.number("sync.alpha", alpha, at_least=0, below=1)

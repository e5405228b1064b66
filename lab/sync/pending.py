"""Updates that wait for their gradients while the next forward runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from lab.distributed.worker import Worker
from lab.measure.clock import Clock


@dataclass(frozen=True)
class _Update:
    """The update of some parameters, once all jobs of the worker but the last `left` have ended."""

    gradients: dict[nn.Parameter, Tensor]
    left: int
    label: str


class Pending:
    """The updates of a step, by bucket, that its end did not wait for.

    Args:
        worker: exchanges the gradients; it has no other jobs as long as updates are pending.
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
        """Leave some parameters as they are."""
        for parameter in parameters:
            for update in self._updates.values():
                update.gradients.pop(parameter, None)

    def apply(self, buckets: Iterable[int], clock: Clock | None) -> None:
        """Wait for the gradients of some buckets, and update their parameters.

        Buckets whose updates are not pending are skipped.
        """
        begin_s = time.perf_counter()
        for bucket in buckets:
            if update := self._updates.pop(bucket, None):
                self._apply(update, clock)
        self._delay(time.perf_counter() - begin_s)

    @contextmanager
    def lent(self) -> Generator[None]:
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

    def _apply(self, update: _Update, clock: Clock | None) -> None:
        assert self._optimizer is not None  # `use` follows `add`
        with clock.phase("exchange", update.label) if clock else nullcontext():
            self._worker.wait(update.left)
        with clock.phase("update") if clock else nullcontext():
            for parameter, gradient in update.gradients.items():
                parameter.grad = gradient
            update_some(self._optimizer, update.gradients)


def update_some(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Let `optimizer` update `parameters` alone, and drop their gradients.

    For the time of its step the optimizer's groups hold nothing else, so it costs what these
    parameters cost. The results are those of one step for all only if the optimizer treats each
    parameter by itself: see lab.training.optim.
    """
    wanted = {id(parameter) for parameter in parameters}
    groups = optimizer.param_groups
    everything = [group["params"] for group in groups]
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) in wanted]
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        optimizer.step()
        optimizer.zero_grad()
    finally:
        optimizer.param_groups = groups
        for group, all_of_it in zip(groups, everything, strict=True):
            group["params"] = all_of_it

"""DoubleBuffer: the exchange of one step's gradients runs beside the whole next step."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor, nn

from lab.distributed.comm import Comm
from lab.distributed.worker import Worker
from lab.exchange.base import Exchange
from lab.sync.gradsync import GradSync


class DoubleBuffer(GradSync):
    """Exchange all gradients after backward, and wait for them there or one step later.

    With `double_buffer` the update of step t uses the mean gradient of step t-1, while that of t
    travels during step t+1: CNTK's useBufferedAsyncGradientAggregation (AllReduceDistGradAggregator
    ::AggregateGradients), which Seide et al. 2014 call double buffering. The first step updates
    nothing, and the last step's gradient is never applied.

    Args:
        double_buffer: False waits as GradSync does.
        precision: of the run.
        overlap: must be what double_buffer is: it makes the worker run beside computation.
        model, module, exchange, comm, worker, bucket_mb: see GradSync.

    Raises:
        ValueError: an argument that is not allowed here.
    """

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        exchange: Exchange,
        comm: Comm,
        worker: Worker,
        *,
        double_buffer: bool,
        precision: str = "fp32",
        overlap: bool = False,
        bucket_mb: float | None = None,
    ) -> None:
        if not isinstance(double_buffer, bool):
            raise ValueError(f"sync.double_buffer={double_buffer}: must be true or false")
        if overlap != double_buffer:
            raise ValueError(
                f"overlap={overlap}: must be sync.double_buffer, which is {double_buffer}; nothing "
                "is exchanged during backward"
            )
        if double_buffer and precision == "fp16":
            raise ValueError(
                "precision=fp16: a step cannot be skipped once the next one is under way; allowed "
                "with sync.double_buffer=true are fp32, bf16"
            )
        super().__init__(model, module, exchange, comm, worker, bucket_mb=bucket_mb)
        self.double_buffer = double_buffer
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.arriving: dict[str, Tensor] = {}  # the last step's gradients, means once they are here
        self._resting = self._plan() if double_buffer else []

    def __enter__(self) -> Self:
        if not self.double_buffer:
            return super().__enter__()
        for parameter in self.parameters.values():
            hook = parameter.register_post_accumulate_grad_hook(lambda _: self.worker.advance())
            self._hooks.append(hook)
        return self

    def finish(self) -> Tensor | None:
        """Begin to exchange this step's gradients, and leave the means of the step before."""
        if not self.double_buffer:
            return super().finish()
        self.worker.wait()
        finite = self._all_finite()
        self.buckets, self._resting = self._resting, self.buckets
        self._begin_step()
        while len(self._exchanged) < len(self.buckets):
            self._submit_next()
        arrived, self.arriving = self.arriving, {}
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None  # a bucket gave it one
            self.arriving[name] = parameter.grad
            parameter.grad = arrived.get(name)
        self.step += 1
        return finite

    def settle(self) -> None:
        self.worker.wait()

    def state_dict(self) -> dict[str, Any]:
        """Beside GradSync's, the means that the next step will use. Settle first."""
        return {**super().state_dict(), "arriving": dict(self.arriving)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.double_buffer:
            self.arriving = state.get("arriving", {})

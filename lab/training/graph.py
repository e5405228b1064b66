"""A whole step as one CUDA graph: forward, backward, exchange and update, launched at once.

The host runs a step's Python once more while the step is captured: hooks, workers and exchanges
launch what they always do, and the graph keeps it, kernels, collectives and addresses alike. A
replay needs none of them. What a step would tell the host, its loss and whether all values were
finite, is in one number, which the host reads while the next step runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lab.exchange.base import Exchange
from lab.settings.errors import ConfigError, one_line
from lab.sync.pattern import Pattern

if TYPE_CHECKING:
    from lab.training.trainer import Trainer

Batch = tuple[Tensor, Tensor]  # inputs and targets


class CudaGraph:
    """Work of the current stream, which must not be the default one: captured once, to replay."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        """Call `work`, whose kernels are noted and do not run; return what it returns.

        Raises: RuntimeError: of `work`, or of the capture's end.
        """
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        before, cause = generator.clone_state(), None
        try:
            # Other threads may go on meanwhile: NCCL's and the lab's watchdog ask for their events.
            with torch.cuda.graph(
                self._graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
            ):
                try:
                    return work()
                except RuntimeError as error:
                    cause = error
                    raise
        except RuntimeError as error:
            # The generator would think that the capture goes on, and draw nothing outside of it.
            generator.graphsafe_set_state(before)
            raise cause or error from None  # after a failure, the end fails too, and tells less

    def replay(self) -> None:
        """Run the work. It reads and writes the same memory as each time."""
        self._graph.replay()

    def close(self) -> None:
        """Free the graph. NCCL ends no communicator whose collectives are in one."""
        self._graph.reset()


def leave_default_stream(device: torch.device) -> None:
    """Make another stream of a GPU current for this thread, if the default one is.

    The default stream cannot be captured. Backward accumulates a gradient on the stream on which
    its parameter was first used, so all that runs of a process do must be on one.
    """
    if device.type != "cuda":
        return
    default = torch.cuda.default_stream(device)
    if torch.cuda.current_stream(device) == default:
        other = torch.cuda.Stream(device)
        other.wait_stream(default)
        torch.cuda.set_stream(other)


class Refusal(NamedTuple):
    """Settings, as they are typed, with which no step can be captured."""

    settings: str
    why: str  # and what is allowed instead
    applies: Callable[[Trainer], bool]


REFUSALS = [
    Refusal(
        "device=cpu or backend=gloo",
        "a CUDA graph can contain only GPU kernels and NCCL collectives; set device=cuda and "
        "backend=nccl",
        lambda run: run.sync.comm.backend != "nccl",
    ),
    Refusal(
        "precision=fp16",
        "the host decides whether to skip a step that overflowed; use precision=fp32 or bf16",
        lambda run: run.loss_scale is not None,
    ),
    Refusal(
        "measure=breakdown",
        "the host marks phases within a step; use measure=throughput",
        lambda run: run.config.measure == "breakdown",
    ),
    Refusal(
        "measure=noise",
        "the host collects norms within a step; use measure=throughput",
        lambda run: run.config.measure == "noise",
    ),
    Refusal(
        "drift_every=N",
        "the host compares buckets within a step; set drift_every=null",
        lambda run: run.config.drift_every is not None,
    ),
    Refusal(
        "straggler=CHOICE",
        "the host delays a phase of some steps; set straggler=none",
        lambda run: "rank" in run.config.straggler,
    ),
    Refusal(
        "model=replay",
        "its layers make the host wait instead of computing",
        lambda run: "profile" in run.config.model,
    ),
]


def refuse(trainer: Trainer) -> None:
    """Refuse a run whose steps cannot be captured: a ConfigError names the first reason."""
    config = trainer.config
    for refusal in REFUSALS:
        if refusal.applies(trainer):
            raise ConfigError(f"graph=true {refusal.settings}: {refusal.why}")
    if why := no_graph(trainer.sync.pattern, trainer.sync.exchange):
        raise ConfigError(f"graph=true strategy={config.strategy}: {why}")
    if not all(map(_is_capturable, trainer.optimizer.param_groups)):
        raise ConfigError(
            f"graph=true optim={config.optim['_target_']}: must read its learning rate from the "
            "device; use an optimizer with capturable, or fused SGD"
        )
    first = trainer.progress.step + num_eager(trainer)
    if first >= trainer.total_steps:
        raise ConfigError(
            f"graph=true steps={trainer.total_steps}: the first {first} steps run without a "
            f"graph; set steps={first + 1} or more"
        )


def no_graph(pattern: Pattern, exchange: Exchange) -> str:
    """Return why no step of a sync and its exchange can be captured; empty: one can."""
    if pattern.no_graph or not pattern.takes_exchanges or exchange.steady_from is not None:
        return pattern.no_graph
    return (
        "its operations depend on the step number, on trials or on values, but a graph "
        "repeats the same step"
    )


def num_eager(trainer: Trainer) -> int:
    """Return how many steps must have run before one is captured."""
    sync = trainer.sync
    steady_from = sync.exchange.steady_from if sync.pattern.takes_exchanges else 0
    return max(sync.eager_steps, (steady_from or 0) + 1)


def _is_capturable(group: dict[str, object]) -> bool:
    is_sgd = "momentum" in group and "dampening" in group
    return bool(group.get("capturable") or (is_sgd and group.get("fused")))


class StepGraph:
    """The steps of a trainer: the first ones run as ever, then one is captured and replayed.

    The first ones plan buckets, make the optimizer's state and compile kernels, and are examined by
    check=first. All take their batch from the same memory.

    Attributes:
        captured_at: number of the step that was captured; None: none was yet.
    """

    def __init__(self, trainer: Trainer, graph: CudaGraph) -> None:
        self._trainer, self._graph = trainer, graph
        self.captured_at: int | None = None
        self._batch: Batch | None = None
        self._loss = torch.empty(0)
        self._sent = 0, 0, 0
        self._first_step = trainer.progress.step

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Train one step; return its loss, which the next one overwrites.

        Raises:
            ConfigError: the step cannot be captured, or its batch has another shape than others.
        """
        trainer = self._trainer
        batch = self._filled(inputs, targets)
        trainer.prepare_update()
        if self.captured_at is None and not self._is_steady():
            return trainer.train(*batch)
        if self.captured_at is None:
            self._capture(batch)
        else:
            trainer.sync.step += 1
            trainer.sync.comm.traffic.count(*self._sent)
        self._graph.replay()
        if trainer.watch.worker:
            trainer.watch.worker.watch_stream("a step's graph")
        trainer.check_last_step()  # while this one runs
        return self._loss

    def close(self) -> None:
        """Free what was captured."""
        self._graph.close()

    def _is_steady(self) -> bool:
        trainer = self._trainer
        done = trainer.progress.step - self._first_step
        return done >= num_eager(trainer) and trainer.check.is_over

    def _filled(self, inputs: Tensor, targets: Tensor) -> Batch:
        """Copy a batch to where the graph reads it."""
        if self._batch is None:
            self._batch = inputs.clone(), targets.clone()
        for name, kept, now in zip(
            ("inputs", "targets"), self._batch, (inputs, targets), strict=True
        ):
            if kept.shape != now.shape or kept.dtype != now.dtype:
                raise ConfigError(
                    f"graph=true: {name} of step {self._trainer.progress.step} are "
                    f"{now.dtype} {list(now.shape)}, but those of the first are "
                    f"{kept.dtype} {list(kept.shape)}; all must have the same type and shape"
                )
            kept.copy_(now)
        return self._batch

    def _capture(self, batch: Batch) -> None:
        """Capture the step under way. ConfigError: something in it needs the host."""
        trainer = self._trainer
        trainer.check_last_step()
        if reason := trainer.sync.needs_host():
            raise ConfigError(f"graph=true: {reason}")
        before, worker = trainer.sync.sent(), trainer.watch.worker
        assert worker is not None  # `assemble` made it
        try:
            with trainer.clock.unmarked(), worker.captured():
                self._loss = self._graph.capture(lambda: trainer.train(*batch))
        except RuntimeError as error:
            raise ConfigError(
                f"graph=true: step {trainer.progress.step} cannot be captured, because something "
                f"in it waits for the host: {one_line(error)}"
            ) from error
        after = trainer.sync.sent()
        self._sent = after[0] - before[0], after[1] - before[1], after[2] - before[2]
        self.captured_at = trainer.progress.step

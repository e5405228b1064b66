"""The training loop of one rank: its progress, its losses, and what guards its updates."""

from __future__ import annotations

import math
import operator
import time
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lab.certificate.check import CertificateCheck
from lab.cluster.settings import Straggler
from lab.data import Data, GlobalSampler
from lab.distributed.comm import Sent
from lab.distributed.replicas import broadcast_buffers, gathered, local
from lab.distributed.worker import HostCopy, Watchdog
from lab.distributed.world import World
from lab.measure.clock import Clock, mark, seconds
from lab.measure.memory import PeakMemory
from lab.measure.statistics import InterleavedSteps, least_warmup
from lab.record.schema import Certificate
from lab.settings.config import RunSettings, global_batch_size
from lab.sync.base import Exchanging, Sync
from lab.task.base import Task, describe
from lab.training.graph import StepGraph
from lab.training.optim import Optim

DEFAULT_EPOCHS = 30
CALIBRATION_CYCLES = 10**8  # of a GPU that sleeps
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Progress:
    """The progress of training; part of every checkpoint.

    Attributes:
        total_steps: optimizer steps of the whole run, including those before a resume.
        evaluations: each holds its step, seconds of training, and the task's metrics.
    """

    total_steps: int
    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    num_skipped_steps: int = 0
    evaluations: list[dict[str, float]] = field(default_factory=list)


def total_steps(
    config: RunSettings, num_train: int, batch_size: int, step: int = 0, samples: int = 0
) -> int:
    """Return the optimizer steps of the whole run.

    Args: step, samples: progress of a checkpoint, possibly with another batch size.
    """
    if config.steps is not None:
        return config.steps
    epochs = DEFAULT_EPOCHS if config.epochs is None else config.epochs
    return step + max(0, math.ceil((epochs * num_train - samples) / batch_size))


S = TypeVar("S", bound=Exchanging, covariant=True)


class RecordedLoop(Generic[S]):
    """One rank's training loop as its record shows it: the Trainer's, or a user's own.

    Attributes:
        batch_size: global.
        progress: without a number of total steps, unless the Trainer sets it.
        first_step: number of the first step of this start of the run.
        turns: how its steps are spread among other runs', which train in between; None: none do.
        traffic: what each step sent, one after the other (see `Sent`), or had sent for the step
            before, where exchanges outlast their steps.
        sent_last: the same of exchanges that ended after the last step.
    """

    def __init__(
        self, config: RunSettings, world: World, model: nn.Module, sync: S, clock: Clock
    ) -> None:
        self.config, self.world, self.model, self.sync = config, world, model, sync
        self.batch_size = global_batch_size(config, world.size)
        self.progress, self.clock = Progress(total_steps=0), clock
        self.memory, self.losses, self.traffic = PeakMemory(world.device), Losses(), array("q")
        self.sent_last: Sent = (0, 0, 0)
        self.first_step = 0
        self.turns: InterleavedSteps | None = None
        self._least_warmup = least_warmup(config.warmup_steps)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run, including those before a resume."""
        return self.progress.total_steps

    @property
    def settled_at(self) -> int | None:
        """The first step from which on all are made alike; None: that is still to come."""
        return self.sync.settled_at

    @property
    def captured_at(self) -> int | None:
        """The number of the step that is repeated as a CUDA graph; None: none is."""
        return None

    @property
    def counts_payload(self) -> bool:
        """True if what a step sends is known."""
        return True

    @property
    def certificate(self) -> Certificate | None:
        """The finding of an examination of its first exchanges; None: there is none."""
        return None

    def before_step(self) -> None:
        """Begin to measure memory, once warm-up is over and steps are made alike."""
        is_warm = self.progress.step >= self.first_step + self._least_warmup
        if is_warm and not self.memory.is_running and self.settled_at is not None:
            self.memory.resume()

    def count_step(self, before: Sent, after: Sent) -> None:
        """Count a step by what had been sent before it, and after it."""
        self.traffic.extend(map(operator.sub, after, before))
        self.progress.step += 1
        self.progress.samples += self.batch_size

    def pause(self) -> None:
        """Wait for the device; the time until the next step is not the loop's."""
        self.clock.pause()
        self.memory.pause()
        self.check_last_step()

    def check_last_step(self) -> None:
        """Read the last step's loss."""
        self.losses.read_last()


Loop = RecordedLoop[Exchanging]


class Trainer(RecordedLoop[Sync]):
    """Data-parallel training on one rank.

    Args:
        watch: tells when to stop.
        model: on the device, transformed, equal on all ranks.
        check: examines the first exchanges.
    """

    def __init__(
        self,
        config: RunSettings,
        world: World,
        watch: Watchdog,
        data: Data,
        task: Task,
        model: nn.Module,
        sync: Sync,
        optim: Optim,
        check: CertificateCheck,
    ) -> None:
        clock = Clock(world.device, config.measure == "breakdown", sync.waits_in)
        super().__init__(config, world, model, sync, clock)
        self.progress.total_steps = total_steps(config, data.num_train, self.batch_size)
        self._samples = (self.batch_size // world.size,)  # of a batch
        self.watch, self.data, self.task, self.optim, self.check = watch, data, task, optim, check
        self.optimized = sync.optimized(model)
        self.optimizer = optim.optimizer(self.optimized)
        self.loss_scale = LossScale() if config.precision == "fp16" else None
        self.sync.clock = self.clock
        self.delay: Delay | None = None  # set to delay a phase of each step
        self.graph: StepGraph | None = None  # set to replay steps

    def steps(self) -> Generator[int]:
        """Train, and yield the number of steps done after each one; end early after a signal.

        Raises:
            FloatingPointError: a step was not finite, found while the next one is queued or before
                any other work.
            CertificateError: gradients are not exchanged as they should be.
        """
        batches = iter(self.data.train_batches(self._sampler()))
        batches = self.delay.inputs(batches) if self.delay else batches
        self.sync.step = self.progress.step
        self.sync.exchange.total_steps = self.total_steps
        with self.sync, self.check:
            self.model.train()
            before = self.sync.sent()
            while self.progress.step < self.total_steps and self.watch.begin_step():
                self.before_step()
                with self.clock.step():
                    self._step(batches)
                now = self.sync.sent()  # since the last step: exchanges may outlast their steps
                self.count_step(before, now)
                before = now
                yield self.progress.step
            self.pause()
            payload, messages, across = map(operator.sub, self.sync.sent(), before)
            self.sent_last = payload, messages, across

    def evaluate(self) -> dict[str, float]:
        """Return the task's metrics over the test samples of all ranks; add them to `progress`.

        Raises: FloatingPointError: the loss is not finite: training has diverged.
        """
        self.pause()
        broadcast_buffers(self.model, self.world)
        self.model.eval()
        sums = torch.zeros(self.task.num_sums, dtype=torch.float64, device=self.world.device)
        per_rank = max(1, self.batch_size // self.world.size)
        with torch.no_grad(), self.sync.evaluating():
            for batch in self.data.test_batches(self.world.rank, self.world.size, per_rank):
                inputs, targets = batch
                with self._autocast():
                    outputs = self.model(self._layout(inputs))
                sums += self.task.checked_sums(outputs, targets)
        self.model.train()
        metrics = self.task.evaluation(self.world.gather(sums).sum(dim=0))
        if not math.isfinite(metrics["loss"]):
            raise self._diverged(metrics["loss"])
        when = {"step": self.progress.step, "seconds": self.training_seconds()}
        self.progress.evaluations.append(when | metrics)
        return self.progress.evaluations[-1]

    @property
    def settled_at(self) -> int | None:
        settled_at = super().settled_at
        if self.graph is None or settled_at is None:
            return settled_at
        return None if self.captured_at is None else max(settled_at, self.captured_at + 1)

    @property
    def captured_at(self) -> int | None:
        return self.graph.captured_at if self.graph else None

    @property
    def certificate(self) -> Certificate | None:
        return self.check.certificate

    def evaluated(self) -> bool:
        evaluations = self.progress.evaluations
        return bool(evaluations) and evaluations[-1]["step"] == self.progress.step

    def training_seconds(self) -> float:
        """Return the seconds spent in steps so far, including those before a resume."""
        return self.progress.seconds + self.clock.total_seconds()

    def _step(self, batches: Iterator[Any]) -> None:
        with self.clock.phase("data"):
            batch: Any = next(batches, ())
            is_pair = (
                len(batch) == 2 and isinstance(batch[0], Tensor) and isinstance(batch[1], Tensor)
            )
            samples = self._samples  # the mean over ranks of a mean is that of all their samples
            if not is_pair or not batch[0].shape[:1] == batch[1].shape[:1] == samples:
                self._refuse_batch(batch)
            inputs, targets = batch
        step = self.train if self.graph is None else self.graph.step
        self.losses.append(step(inputs, targets))

    def _refuse_batch(self, batch: Iterable[Any]) -> NoReturn:
        """Refuse a batch of the user's own data: it is none, or of other samples than it must be.

        Raises: RuntimeError: says what it is.
        """
        found = (str(len(p)) if isinstance(p, Tensor) else type(p).__name__ for p in batch)
        (per_rank,) = self._samples
        raise RuntimeError(
            f"data={self.config.data['_target_']}: train_batches yields ({', '.join(found)}) "
            f"samples; it must yield tensors of {per_rank} inputs and {per_rank} targets, without "
            "end"
        )

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Update the weights by a batch; return its loss, float32 [], NaN if a value is not finite.

        The host waits for nothing but, in the middle, the loss of the step before, if that is
        still to be read.
        """
        clock, sync, parts = self.clock, self.sync, self.config.accumulate
        micro_batches = list(zip(inputs.chunk(parts), targets.chunk(parts), strict=True))
        before = self.sync.exchange.snapshot() if self.loss_scale else {}
        sync.loss_scale = self.loss_scale.value if self.loss_scale else 1.0
        total = torch.zeros((), device=self.world.device)
        for number, (inputs, targets) in enumerate(micro_batches, start=1):
            with sync.micro_batch(last=number == parts):
                with clock.phase("forward"), self._autocast():
                    outputs = sync.module(self._layout(inputs))
                    mean: Any = self.task.loss(outputs, targets)
                if not isinstance(mean, Tensor) or mean.ndim or not mean.requires_grad:
                    raise self._no_loss(outputs, mean)
                loss = mean / parts
                with clock.phase("backward"):  # overlapped exchanges start here
                    loss.backward(torch.full_like(loss, sync.loss_factor))
            total += loss.detach()
        with clock.phase("exchange"):  # the part that backward did not hide
            finite = sync.finish()
        if not self.check.is_over:
            self.check.after_gradients()
        self.check_last_step()  # before the update, so that weights show the error
        with clock.phase("update"):
            self._update(finite, before)
        last = self.progress.step + 1 == self.total_steps
        if not self.check.is_over:
            self.check.before_weights(last)
        with clock.phase("exchange"):  # of weights
            late = sync.after_update(last)
        if not self.check.is_over:
            self.check.after_weights()
        return total if self.loss_scale else marked(total, finite, late)

    def _no_loss(self, outputs: Any, loss: object) -> RuntimeError:
        """Return the error of a loss that is no number, or has no gradient; name whose it is."""
        if not isinstance(loss, Tensor) or loss.ndim:
            found = describe(loss) if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            return RuntimeError(
                f"task={self.config.task['_target_']}: loss returns {found}; it must return one "
                "number, the mean loss, as a tensor"
            )
        parts = [each for each in tree_leaves(outputs) if isinstance(each, Tensor)]
        key, what = ("task", "loss") if any(o.requires_grad for o in parts) else ("model", "output")
        target = getattr(self.config, key)["_target_"]
        return RuntimeError(
            f"{key}={target}: its {what} has no gradient, so nothing can be trained; compute it "
            "from the weights without detach(), torch.no_grad(), item() or NumPy"
        )

    def _update(self, finite: Tensor | None, exchange_before: dict[str, Any]) -> None:
        if self.loss_scale:
            good = gradients_finite(self.optimized, finite)
            self.loss_scale.update(good)
            if not good:
                self.sync.exchange.load_state_dict(exchange_before)
                self.optimizer.zero_grad()
                self.progress.num_skipped_steps += 1
                return
        if self.config.clip_grad_norm is not None:
            clip_gradients(self.optimized, self.config.clip_grad_norm, self.sync.norm)
        if self.graph is None:  # which has done so
            self.prepare_update()
        self.sync.update(self.optimizer)

    def prepare_update(self) -> None:
        """Set the optimizer's hyperparameters of this step."""
        self.optim.prepare(self.optimizer, self.progress.step, self.total_steps)

    def pause(self) -> None:
        """Wait for exchanges under way, and check the last step; call before other work.

        Raises: FloatingPointError: the last step was not finite.
        """
        super().pause()
        self.sync.settle()

    def end_turn(self) -> None:
        """Wait for exchanges under way, so that other runs may train.

        This wait counts towards no step: without the others, the next forward would hide it.
        """
        clock, self.sync.clock = self.sync.clock, None
        self.pause()
        self.sync.clock = clock

    def check_last_step(self) -> None:
        """Read the last step's loss.

        Raises: FloatingPointError: the step was not finite.
        """
        loss = self.losses.read_last()
        if loss is not None and self.loss_scale is None and not math.isfinite(loss):
            raise self._overflow()

    def _diverged(self, loss: float) -> FloatingPointError:
        """Return the error of an evaluation whose loss is not finite."""
        if not all(local(p).isfinite().all() for p in self.model.parameters()):
            return self._overflow()
        return FloatingPointError(
            f"test loss is {loss} after {self.progress.step} steps, with finite weights; check the "
            "test samples, the task's sums and metrics, and the model in eval mode"
        )

    def _overflow(self) -> FloatingPointError:
        return overflow(self.progress.step - 1, self.model.named_parameters())

    def _sampler(self) -> GlobalSampler:
        return GlobalSampler(
            num_samples=self.data.num_train,
            batch_size=self.batch_size,
            rank=self.world.rank,
            world_size=self.world.size,
            seed=self.config.seed + self.config.repeat,
            start=self.progress.samples,
        )

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = AUTOCAST.get(self.config.precision)
        return torch.autocast(self.world.device.type, dtype) if dtype else nullcontext()

    def _layout(self, inputs: Tensor) -> Tensor:
        if self.config.channels_last:
            return inputs.contiguous(memory_format=torch.channels_last)
        return inputs


class Delay:
    """The injected delay of a rank: once a step, where its phase does its work.

    In backward that is a hook of autograd, on a parameter whose gradient is about to be
    accumulated; in the exchange, the first hand-over to the network, within the exchange's job. On
    a GPU the stream is delayed, not the host, which may run ahead.
    """

    def __init__(self, straggler: Straggler, trainer: Trainer) -> None:
        self.straggler = straggler
        self._sleep = _sleeper(trainer.world.device)
        self._num_steps = 0
        self._due = False
        phase = straggler.phase
        if phase == "forward":
            trainer.sync.module.register_forward_pre_hook(self._delay)
        if phase == "backward":
            trained = [p for p in trainer.model.parameters() if p.requires_grad]
            trained[len(trained) // 2].register_hook(self._delay)
        if phase == "exchange":
            trainer.sync.comm.before_sending = self._delay
        if phase == "update":
            trainer.optimizer.register_step_pre_hook(self._delay)

    def inputs(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield `batches`, one for each step."""
        for batch in batches:
            self._due = self._num_steps % self.straggler.every == 0
            self._num_steps += 1
            if self.straggler.phase == "input":
                self._delay()
            yield batch

    def _delay(self, *_: object) -> None:
        if self._due:
            self._due = False
            self._sleep(self.straggler.delay_s)


def _sleeper(device: torch.device) -> Callable[[float], None]:
    """Return a function that delays this rank by some seconds: on a GPU, its current stream."""
    if device.type == "cpu":
        return time.sleep
    torch.cuda._sleep(CALIBRATION_CYCLES)  # the clock rises to its rate under load
    begin = mark(device)
    torch.cuda._sleep(CALIBRATION_CYCLES)
    end = mark(device)
    torch.cuda.synchronize(device)
    cycles_per_s = CALIBRATION_CYCLES / seconds(begin, end)
    return lambda delay_s: torch.cuda._sleep(int(delay_s * cycles_per_s))


class Losses:
    """Copies of each step's loss to the host, made while the next step is queued: no host waits.

    Attributes: read: the losses that have been read, in the order of steps.
    """

    def __init__(self) -> None:
        self.read = array("d")
        self._coming: HostCopy | None = None

    def append(self, loss: Tensor) -> None:
        """Begin to copy a step's loss, float32 [], to the host."""
        self.read_last()
        self._coming = HostCopy(loss)

    def read_last(self) -> float | None:
        """Return the loss appended last, once the device has computed it; None if it was read."""
        if self._coming is None:
            return None
        coming, self._coming = self._coming, None
        self.read.append(float(coming.read()))
        return self.read[-1]


def marked(loss: Tensor, *finite: Tensor | None) -> Tensor:
    """Return `loss`, float32 [], NaN if an exchange found values that are not `finite`, bool []."""
    for found in finite:
        if found is not None:
            loss.masked_fill_(found.logical_not(), torch.nan)
    return loss


def overflow(step: int, tensors: Iterable[tuple[str, Tensor]]) -> FloatingPointError:
    """Return the error of a step, counted from 0; it names the first tensor that is not finite.

    If none is finite, the first one cannot be told.
    """
    everything = list(tensors)
    bad = [name for name, tensor in everything if not local(tensor).isfinite().all()]
    first = f", first in {bad[0]}" if bad else ""
    where = ", in all parameters" if len(bad) == len(everything) else first
    return FloatingPointError(f"gradient not finite at step {step}{where}; try a smaller optim.lr")


class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018, section 3.2).

    The scale is equal on all ranks: it depends only on whether the averaged gradient was finite,
    which all ranks see.
    """

    INITIAL, GROW_EVERY, LEAST = 2.0**16, 2000, 1.0

    def __init__(self) -> None:
        self.value = self.INITIAL
        self._good_steps = 0

    def update(self, finite: bool) -> None:
        """Halve the scale after a step that overflowed; double it after many that did not.

        Raises: FloatingPointError: the gradient is not finite at the smallest scale either.
        """
        if not finite:
            self._good_steps = 0
            self.value /= 2
            if self.value < self.LEAST:
                raise FloatingPointError("precision=fp16: gradient not finite even at loss scale 1")
            return
        self._good_steps += 1
        if self._good_steps % self.GROW_EVERY == 0:
            self.value *= 2

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self._good_steps = state["value"], state["good_steps"]


def clip_gradients(
    model: nn.Module, max_norm: float, over_ranks: Callable[[Tensor], Tensor] = lambda norm: norm
) -> None:
    """Scale all gradients down to the norm `max_norm`, if theirs is larger.

    `over_ranks` turns the norm of this rank's gradients into that of all.

    Like torch's clip_grad_norm_, except that a non-finite gradient spoils no other: if the norm is
    NaN all others become 0, as they do if it is infinite.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if gradients:
        norm = over_ranks(nn.utils.get_total_norm(gradients))
        norm.masked_fill_(norm.isnan(), torch.inf)
        nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)


def gradients_finite(model: nn.Module, exchanged: Tensor | None) -> bool:
    """Return whether all gradients are finite, also by what the exchange found, bool [].

    The host waits: the update depends on it.
    """
    norms = torch._foreach_norm([p.grad for p in model.parameters() if p.grad is not None])
    finite = gathered(torch.stack(norms).isfinite().all())
    return bool(finite if exchanged is None else finite & exchanged)

"""The training loop of one rank."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from lab.data import Data
from lab.data.sampler import GlobalSampler
from lab.distributed.replicas import broadcast_buffers
from lab.distributed.watchdog import Watch
from lab.distributed.world import World
from lab.measure.clock import Clock
from lab.measure.memory import Memory
from lab.settings.config import Settings
from lab.sync.base import Sync
from lab.training.losses import Losses, overflow
from lab.training.optim import LossScale, Optim, clip_gradients
from lab.training.resume import check_fit, replica_of

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Progress:
    """How far training has come; part of every checkpoint."""

    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    num_skipped_steps: int = 0
    evaluations: list[dict[str, float]] = field(default_factory=list)


class Trainer:
    """Data-parallel SGD on one rank.

    Args:
        watch: says when to stop.
        model: on the device, transformed, equal on all ranks.
        sync: exchanges its gradients, or its weights once in a while.
        optim: updates it.
        batch_size: global.
    """

    def __init__(
        self,
        config: Settings,
        world: World,
        watch: Watch,
        data: Data,
        model: nn.Module,
        sync: Sync,
        optim: Optim,
        batch_size: int,
    ) -> None:
        self.config, self.world, self.watch, self.data = config, world, watch, data
        self.model, self.sync, self.optim = model, sync, optim
        self.batch_size = batch_size
        self.optimizer = optim.optimizer(model)
        self.criterion = nn.CrossEntropyLoss()
        self.loss_scale = LossScale() if config.precision == "fp16" else None
        self.clock = Clock(world.device, breakdown=config.measure == "breakdown")
        sync.clock = self.clock
        self.progress = Progress()
        self.memory = Memory(world.device)
        self.first_step = 0  # of this start of the run
        self.losses = Losses()
        self.traffic = array("q")  # payload bytes and messages, of one step after the other

    def steps(self) -> Iterator[int]:
        """Train; yields the number of steps done after each of them. Ends early after a signal.

        Raises:
            FloatingPointError: a step was not finite. It is found while the next one is queued, or
                before anything else that follows.
        """
        batches = iter(self.data.train_batches(self._sampler()))
        self.sync.step = self.progress.step
        with self.sync:
            self.model.train()
            before = self._sent()
            while self.progress.step < self.total_steps and self.watch.begin_step():
                if self.progress.step >= self.first_step + self.config.warmup_steps:
                    self.memory.resume()
                with self.clock.step():
                    self._step(batches)
                now = self._sent()  # since the last step's end: exchanges may outlast their steps
                self.traffic.extend((now[0] - before[0], now[1] - before[1]))
                before = now
                self.progress.step += 1
                self.progress.samples += self.batch_size
                yield self.progress.step
            self._pause()

    def evaluate(self) -> dict[str, float]:
        """Mean loss and accuracy over the test images of all ranks.

        Raises:
            FloatingPointError: the loss is not finite: training has diverged.
        """
        self._pause()
        broadcast_buffers(self.model, self.world)
        self.model.eval()
        totals = torch.zeros(3, dtype=torch.float64)
        per_rank = max(1, self.batch_size // self.world.size)
        with torch.no_grad():
            batches = self.data.test_batches(self.world.rank, self.world.size, per_rank)
            for images, labels in batches:
                with self._autocast():
                    outputs = self.model(self._layout(images))
                loss = nn.functional.cross_entropy(outputs.float(), labels, reduction="sum")
                correct = (outputs.argmax(dim=1) == labels).sum()
                totals += torch.tensor([float(loss), float(correct), len(labels)])
        self.model.train()
        loss, correct, count = self.world.gather(totals).sum(dim=0).tolist()
        if not math.isfinite(loss):
            raise self._overflow()
        result = {"step": self.progress.step, "seconds": self.training_seconds()}
        result |= {"loss": loss / count, "accuracy": correct / count}
        self.progress.evaluations.append(result)
        return result

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run, those before a resume included."""
        return self.optim.total_steps

    def evaluated(self) -> bool:
        """Whether the weights as they are have been evaluated."""
        evaluations = self.progress.evaluations
        return bool(evaluations) and evaluations[-1]["step"] == self.progress.step

    def training_seconds(self) -> float:
        """Seconds spent in steps so far, those before a resume included."""
        return self.progress.seconds + self.clock.total_seconds()

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a checkpoint holds: the part that all ranks share, and this rank's own.

        Raises:
            FloatingPointError: weights or gradients in it are not finite.
        """
        self._pause()
        broadcast_buffers(self.model, self.world)
        of_sync = self.sync.state_dict()
        self._refuse_spoiled(of_sync)
        replica = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        shared = {
            "sync": of_sync,
            "progress": asdict(self.progress) | {"seconds": self.training_seconds()},
            "loss_scale": self.loss_scale and self.loss_scale.state_dict(),
            "channels_last": self.config.channels_last,
            "exchange": OmegaConf.to_container(self.config.exchange),
        }
        own = {"exchange": self.sync.exchange.state_dict(), "rng": torch.get_rng_state()}
        if self.world.device.type == "cuda":
            own["cuda_rng"] = torch.cuda.get_rng_state(self.world.device)
        (own if self.sync.own_replicas else shared).update(replica)
        return shared, own

    def load_state(self, shared: dict[str, Any], owns: list[dict[str, Any]]) -> None:
        """Continue from what `state` returned on each rank of as many, or of other, ranks.

        Raises:
            ValueError: the checkpoint is of another model or strategy.
        """
        check_fit(self.config, shared, owns)
        mine = self.world.rank if self.sync.own_replicas else None
        replica = replica_of(mine, self.world.size, shared, owns)
        try:
            self.model.load_state_dict(replica["model"])
            self.optimizer.load_state_dict(replica["optimizer"])
        except (RuntimeError, ValueError):
            raise ValueError(
                f"resume={self.config.resume}: the checkpoint is of another model; use the same "
                "model, transform and data"
            ) from None
        self.progress = Progress(**shared["progress"])
        self.first_step = self.progress.step
        if self.loss_scale and shared["loss_scale"]:
            self.loss_scale.load_state_dict(shared["loss_scale"])
        self.sync.load_state_dict(_to(shared["sync"], self.world.device))
        self._load_own(owns)

    def _load_own(self, owns: list[dict[str, Any]]) -> None:
        rank, size, exchange = self.world.rank, self.world.size, self.sync.exchange
        states = [own["exchange"] for own in owns]
        if size == len(owns):
            torch.set_rng_state(owns[rank]["rng"])
            if "cuda_rng" in owns[rank] and self.world.device.type == "cuda":
                torch.cuda.set_rng_state(owns[rank]["cuda_rng"], self.world.device)
            state = states[rank]
        else:
            state = exchange.redistribute(states, rank, size) if states[0] else {}
        if state:
            exchange.load_state_dict(_to(state, self.world.device))

    def _step(self, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
        clock, sync, parts = self.clock, self.sync, self.config.accumulate
        with clock.phase("data"):
            images, labels = next(batches)
            micro_batches = list(zip(images.chunk(parts), labels.chunk(parts), strict=True))
        before = self._exchange_state()
        sync.loss_scale = self.loss_scale.value if self.loss_scale else 1.0
        total = torch.zeros((), device=self.world.device)
        for number, (images, labels) in enumerate(micro_batches, start=1):
            with sync.micro_batch(last=number == parts):
                with clock.phase("forward"), self._autocast():
                    loss = self.criterion(sync.module(self._layout(images)), labels) / parts
                with clock.phase("backward"):  # overlapped exchanges start in here
                    (loss * sync.loss_factor).backward()
            total += loss.detach()
        with clock.phase("exchange"):  # what backward could not hide
            finite = sync.finish()
        self._check_last_step()  # before this one's update, so that weights tell what was wrong
        with clock.phase("update"):
            self._update(finite, before)
        with clock.phase("exchange"):  # of weights
            late = sync.after_update(last=self.progress.step + 1 == self.total_steps)
        self.losses.append(total, *() if self.loss_scale else (finite, late))

    def _update(self, finite: Tensor | None, exchange_before: dict[str, Any]) -> None:
        if self.loss_scale:
            good = self._gradients_finite(finite)
            self.loss_scale.update(good)
            if not good:
                self.sync.exchange.load_state_dict(exchange_before)
                self.optimizer.zero_grad()
                self.progress.num_skipped_steps += 1
                return
        if self.config.clip_grad_norm is not None:
            clip_gradients(self.model, self.config.clip_grad_norm)
        self.optim.prepare(self.optimizer, self.progress.step)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _exchange_state(self) -> dict[str, Any]:
        """What the exchange knows before the step, where the step may yet have to be undone."""
        if not self.loss_scale:
            return {}
        state = self.sync.exchange.state_dict()
        return {key: {n: v.clone() for n, v in tensors.items()} for key, tensors in state.items()}

    def _sent(self) -> tuple[int, int]:
        traffic = self.sync.comm.traffic
        return traffic.payload_bytes, traffic.num_messages

    def _pause(self) -> None:
        """Before anything but a step: wait for what is under way, and look at the last step."""
        self.clock.pause()
        self.memory.pause()
        self._check_last_step()
        self.sync.settle()

    def _check_last_step(self) -> None:
        loss = self.losses.read_last()
        if loss is not None and self.loss_scale is None and not math.isfinite(loss):
            raise self._overflow()

    def _overflow(self) -> FloatingPointError:
        return overflow(self.progress.step - 1, self.model.named_parameters())

    def _refuse_spoiled(self, of_sync: dict[str, dict[str, Tensor]]) -> None:
        """Raise if weights or what the sync keeps are not finite, though no loss has shown it."""
        kept = (pair for tensors in of_sync.values() for pair in tensors.items())
        tensors = [*self.model.named_parameters(), *kept]
        if not all(tensor.isfinite().all() for _, tensor in tensors):
            raise overflow(self.progress.step - 1, tensors)

    def _gradients_finite(self, found: Tensor | None) -> bool:
        """Whether the step counts. The host must know at once, as only then is there an update."""
        norms = torch._foreach_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        finite = torch.stack(norms).isfinite().all()
        return bool(finite if found is None else finite & found)

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

    def _layout(self, images: Tensor) -> Tensor:
        if self.config.channels_last:
            return images.contiguous(memory_format=torch.channels_last)
        return images


def _to(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: {n: v.to(device) for n, v in tensors.items()} for key, tensors in state.items()}

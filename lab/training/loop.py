"""Loop: a training loop as its record shows it, the Trainer's or a user's own."""

from __future__ import annotations

from array import array
from typing import Protocol

from torch import nn

from lab.distributed.world import World
from lab.exchange.base import Exchange
from lab.measure.clock import Clock
from lab.measure.memory import Memory
from lab.measure.turns import Turns
from lab.record.certificate import Certificate
from lab.settings.config import Settings
from lab.training.losses import Losses
from lab.training.progress import Progress


class Synced(Protocol):
    """The part of a Sync that a record shows."""

    @property
    def every(self) -> int: ...
    @property
    def keeps_replicas_equal(self) -> bool: ...
    @property
    def settled_at(self) -> int | None: ...
    @property
    def exchange(self) -> Exchange: ...


class Loop(Protocol):
    """One rank's training loop, once it has ended.

    Attributes:
        batch_size: global.
        first_step: number of the first step of this start of the run.
        turns: how its steps are spread among other runs'; None: it is alone.
        certificate: what an examination of its first exchanges found; None: there was none.
        traffic: what each step sent, one after the other (see `Sent`); empty: unknown.
    """

    @property
    def config(self) -> Settings: ...
    @property
    def world(self) -> World: ...
    @property
    def model(self) -> nn.Module: ...
    @property
    def sync(self) -> Synced: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def first_step(self) -> int: ...
    @property
    def turns(self) -> Turns | None: ...
    @property
    def total_steps(self) -> int: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def memory(self) -> Memory: ...
    @property
    def losses(self) -> Losses: ...
    @property
    def progress(self) -> Progress: ...
    @property
    def certificate(self) -> Certificate | None: ...
    @property
    def traffic(self) -> array[int]: ...

"""Exchanges and data that go wrong on purpose, named by `_target_` in tests."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lab.distributed.comm import Collective, Comm
from lab.exchange.allreduce import AllReduce
from lab.exchange.bucket import GradBucket
from lab.exchange.onebit import OneBit

FAULT_STEP = 3


class Blocking(AllReduce):
    """All-reduce that is done when `average` returns, so that this is where it can go wrong."""

    def asynchronous(self, comm: Comm) -> bool:
        return False

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        self.average(bucket, comm)
        yield from ()

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        for collective in super().stages(bucket, comm):
            collective.wait()


class RaisesOnRank1(Blocking):
    """Raises on rank 1 while the other ranks wait for it."""

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        if comm.rank == 1 and bucket.step == FAULT_STEP:
            raise RuntimeError("planted error")
        super().average(bucket, comm)


class HangsOnRank1(AllReduce):
    """Rank 1 never enters the collective that the other ranks wait in."""

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        if comm.rank == 1 and bucket.step == FAULT_STEP:
            Path("stuck").touch()
            time.sleep(3600)
        return super().stages(bucket, comm)


class OneBitNanOnRank1(OneBit):
    """Rank 1's gradient is not a number, on its way into 1-bit SGD."""

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        if comm.rank == 1 and bucket.step == FAULT_STEP:
            bucket.flat[0] = torch.nan
        return super().stages(bucket, comm)


class OneBitKilled(OneBit):
    """SIGKILL for one rank, in the middle of one exchange: LAB_TEST_KILL=RANK:STEP. Once."""

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        rank, step = map(int, os.environ["LAB_TEST_KILL"].split(":"))
        killed = Path("killed")
        if (comm.rank, bucket.step) == (rank, step) and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().stages(bucket, comm)


class DeadlyToSave:
    """Ends the process that pickles it."""

    def __reduce__(self) -> str:
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
        return ""


class OneBitKilledWhileSaving(OneBit):
    """SIGKILL in the middle of writing a checkpoint's file, once there is an earlier one. Once."""

    def state_dict(self) -> dict[str, Any]:
        deadly = not Path("killed").exists() and any(Path("runs").rglob("step_*/DONE"))
        return super().state_dict() | ({"deadly": DeadlyToSave()} if deadly else {})


class NanOnRank1(Blocking):
    """Rank 1's gradient is not a number."""

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        if comm.rank == 1 and bucket.step == FAULT_STEP:
            bucket.flat[0] = torch.nan
        super().average(bucket, comm)


class DriftsOnRank1(Blocking):
    """Rank 1 ends up with another mean than the others."""

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        super().average(bucket, comm)
        if comm.rank == 1 and bucket.step == FAULT_STEP:
            bucket.flat[0] += 1

"""Exchanges and data that go wrong on purpose, named by `_target_` in tests."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lab.distributed import worker
from lab.distributed.comm import Collective, Comm
from lab.exchange.allreduce import AllReduce
from lab.exchange.bucket import GradBucket
from lab.exchange.compressed import OneBit

FAULT_STEP = 3


class Blocking(AllReduce):
    """All-reduce that is complete when `average` returns, so that faults occur there."""

    def asynchronous(self, comm: Comm) -> bool:
        return False

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        self.average(bucket, comm)
        yield from ()

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        for collective in super().stages(bucket, comm):
            collective.wait()


class RaisesOnRank1(Blocking):
    """All-reduce that raises on rank 1 while the other ranks wait for it."""

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        if comm.rank == 1 and bucket.step == FAULT_STEP:
            raise RuntimeError("planted error")
        super().average(bucket, comm)


class HangsOnRank1(AllReduce):
    """All-reduce whose collective rank 1 never enters, while the other ranks wait.

    After a signal, ranks wait 2 s for it in the place of 20.
    """

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        worker.STUCK_S = 2.0
        if comm.rank == 1 and bucket.step == FAULT_STEP:
            Path("stuck").touch()
            time.sleep(3600)
        return super().stages(bucket, comm)


class OneBitNanOnRank1(OneBit):
    """1-bit SGD in which rank 1's gradient becomes NaN before it is encoded."""

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        if comm.rank == 1 and bucket.step == FAULT_STEP:
            bucket.flat[0] = torch.nan
        return super().stages(bucket, comm)


class OneBitKilled(OneBit):
    """SIGKILL for one rank, once, in the middle of one exchange: LAB_TEST_KILL=RANK:STEP."""

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        rank, step = map(int, os.environ["LAB_TEST_KILL"].split(":"))
        killed = Path("killed")
        if (comm.rank, bucket.step) == (rank, step) and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().stages(bucket, comm)


class DeadlyToSave(dict[str, Any]):
    """Ends the process that pickles it."""

    def __reduce__(self) -> str:
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
        return ""


class OneBitKilledWhileSaving(OneBit):
    """SIGKILL, once, while a checkpoint's file is written and an earlier checkpoint exists."""

    def state_dict(self) -> dict[str, Any]:
        deadly = not Path("killed").exists() and any(Path("runs").rglob("step_*/DONE"))
        return super().state_dict() | ({"deadly": DeadlyToSave()} if deadly else {})


class NanOnRank1(Blocking):
    """All-reduce in which rank 1's gradient becomes NaN."""

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        if comm.rank == 1 and bucket.step == FAULT_STEP:
            bucket.flat[0] = torch.nan
        super().average(bucket, comm)


class DriftsOnRank1(Blocking):
    """All-reduce that leaves another mean on rank 1 than on the others."""

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        super().average(bucket, comm)
        if comm.rank == 1 and bucket.step == FAULT_STEP:
            bucket.flat[0] += 1

"""Syncs behave as the facts say that simulator and diagnosis read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lab.distributed.comm import Collective, Comm, run_ranks
from lab.distributed.worker import InlineWorker
from lab.exchange.allreduce import AllReduce
from lab.exchange.bucket import GradBucket
from lab.settings.config import build, choices_of, load
from lab.sync.base import Sync, SyncParts
from lab.sync.pattern import OF_CLASS, UNKNOWN, Begin, Leg, pattern_of

LIBRARIES = {"ddp", "fsdp", "hsdp", "zeropp", "horovod"}  # these need their own process group


def sync_of(comm: Comm, *settings: str) -> Sync:
    config, model = load(list(settings)), nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    of_run = config.overlap, config.bucket_mb, config.precision
    parts = SyncParts(model, model, build(config.exchange), comm, InlineWorker(), *of_run)
    return build(config.sync, parts)


@pytest.mark.parametrize("name", choices_of("sync"))
def test_every_choice_has_a_pattern(name: str) -> None:
    assert pattern_of(load([f"sync={name}"])) is not UNKNOWN


@pytest.mark.parametrize("strategy", [s for s in choices_of("strategy") if s not in LIBRARIES])
def test_a_sync_has_the_pattern_that_its_settings_tell(strategy: str) -> None:
    told = pattern_of(load([f"strategy={strategy}"]))
    (pattern,) = run_ranks(1, lambda comm: sync_of(comm, f"strategy={strategy}").pattern)
    assert pattern == told


@pytest.mark.parametrize(
    ("settings", "begins", "legs", "every"),
    [
        ("strategy=allreduce", Begin.AFTER_BACKWARD, (Leg.MEAN_OF_GRADIENTS,), 1),
        ("strategy=overlap", Begin.DURING_BACKWARD, (Leg.MEAN_OF_GRADIENTS,), 1),
        ("strategy=cntk sync.double_buffer=true", Begin.NEXT_STEP, (Leg.MEAN_OF_GRADIENTS,), 1),
        ("strategy=streaming_diloco", Begin.NEXT_STEPS, (Leg.MEAN_OF_CHANGES,), 10),
        ("strategy=des_loc", Begin.AFTER_UPDATE, (Leg.MEAN_OF_STATES,), 60),
        ("strategy=diloco sync.every=5", Begin.AFTER_UPDATE, (Leg.MEAN_OF_CHANGES,), 5),
        (
            "strategy=tensorflow",
            Begin.DURING_BACKWARD,
            (Leg.GRADIENTS_TO_ROOT, Leg.WEIGHTS_FROM_ROOT),
            1,
        ),
        ("strategy=priority", Begin.DURING_BACKWARD, (Leg.MEAN_OF_GRADIENTS,), 1),
        ("strategy=priority overlap=false", Begin.AFTER_BACKWARD, (Leg.MEAN_OF_GRADIENTS,), 1),
        (
            "strategy=zero1",
            Begin.DURING_BACKWARD,
            (Leg.PARTS_OF_GRADIENTS, Leg.PARTS_OF_WEIGHTS),
            1,
        ),
        (
            "strategy=hsdp",
            Begin.DURING_BACKWARD,
            (Leg.WEIGHTS_OF_UNITS, Leg.PARTS_OF_GRADIENTS, Leg.MEAN_OF_PARTS),
            1,
        ),
        ("strategy=none", Begin.NEVER, (), 1),
        ("strategy=ddp sync.hook=noop", Begin.DURING_BACKWARD, (), 1),
        (
            "strategy=onebit sync=ddp sync.hook=lab",
            Begin.DURING_BACKWARD,
            (Leg.MEAN_OF_GRADIENTS,),
            1,
        ),
    ],
)
def test_patterns(settings: str, begins: Begin, legs: tuple[Leg, ...], every: int) -> None:
    pattern = pattern_of(load(settings.split()))
    assert (pattern.begins, pattern.legs, pattern.every) == (begins, legs, every)


class Noting(AllReduce):
    """An exchange that records the part of the step in which its stages run."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.ran = "", list[str]()

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        self.ran.append(self.now)
        return super().stages(bucket, comm)


@pytest.mark.parametrize(
    ("sync", "overlap", "part"),
    [
        ("gradsync", False, Begin.AFTER_BACKWARD),
        ("gradsync", True, Begin.DURING_BACKWARD),
        ("double_buffer", False, Begin.AFTER_BACKWARD),
        ("local", False, Begin.AFTER_UPDATE),
    ],
)
def test_exchanges_begin_when_the_pattern_says(sync: str, overlap: bool, part: Begin) -> None:
    def rank_main(comm: Comm) -> tuple[Begin, list[str]]:
        model, exchange = nn.Linear(4, 3), Noting()
        parts = SyncParts(model, model, exchange, comm, InlineWorker(), overlap, 25)
        built: Sync = build(load([f"sync={sync}"]).sync, parts)
        with built:
            for last in (False, True):  # the first step looks how often each gradient grows
                exchange.ran.clear()
                with built.micro_batch(last=True):
                    exchange.now = Begin.DURING_BACKWARD.value
                    built.module(torch.ones(2, 4)).sum().backward()
                exchange.now = Begin.AFTER_BACKWARD.value
                built.finish()
                exchange.now = Begin.AFTER_UPDATE.value
                built.after_update(last)
        return built.pattern.begins, exchange.ran

    assert run_ranks(1, rank_main) == [(part, [part.value])]


@pytest.mark.parametrize("path", ["lab.exchange.local.LocalSync", "lab.sync.local.LocalSync"])
def test_records_of_any_age_tell_their_pattern(path: str) -> None:
    pattern = pattern_of({"sync": {"_target_": path, "every": 3}, "overlap": False})
    assert pattern.own_replicas and pattern.every == 3


def test_a_sync_from_elsewhere_keeps_its_own_schedule() -> None:
    assert pattern_of({"sync": {"_target_": "mine.Sync"}}) is UNKNOWN
    assert pattern_of({}) is UNKNOWN
    assert UNKNOWN.by_library and not UNKNOWN.takes_exchanges
    assert set(OF_CLASS) >= {"GradSync"}


def test_facts_need_no_torch() -> None:
    check = "import sys, lab.sync.pattern; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0

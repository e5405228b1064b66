"""Patterns: what syncs do and refuse, what does nothing, orders of sending, and ranks alike."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from lab.distributed.comm import Collective, Comm, run_ranks
from lab.distributed.worker import InlineWorker, ThreadWorker, Worker
from lab.exchange.allreduce import AllReduce
from lab.exchange.bucket import GradBucket
from lab.exchange.grouping import MIB, group
from lab.measure import OWN
from lab.measure.clock import Clock
from lab.settings.config import build, choices_of, load
from lab.sync.base import Sync
from lab.sync.gradsync import GradSync
from lab.sync.pattern import (
    OF_CLASS,
    UNKNOWN,
    Begin,
    Pattern,
    Transfer,
    comparable_phases,
    ddp,
    double_buffer,
    gradsync,
    ineffective,
    local,
    none,
    pattern_of,
    send_order,
)
from tests.support.steps import OF_RUN, made

LIBRARIES = {"ddp", "fsdp", "hsdp", "zeropp", "horovod"}  # these need their own process group


def sync_of(comm: Comm, *settings: str) -> Sync:
    config, model = load(list(settings)), nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    kind, of_run = partial(build, config.sync), {key: config[key] for key in OF_RUN}
    return made(kind, model, comm, build(config.exchange), **of_run)


@pytest.mark.parametrize("name", choices_of("sync"))
def test_every_choice_has_a_pattern(name: str) -> None:
    assert pattern_of(load([f"sync={name}"])) is not UNKNOWN


STRATEGY_OF = {  # by sync, where it has another name
    **{"double_buffer": "cntk", "gradsync": "overlap", "local": "local_sgd"},
    **{"root_update": "caffe", "streaming": "streaming_diloco"},
}


@pytest.mark.parametrize("sync", [s for s in choices_of("sync") if s not in LIBRARIES])
def test_a_sync_has_the_pattern_that_its_settings_tell(sync: str) -> None:
    setting = f"strategy={STRATEGY_OF.get(sync, sync)}"
    (pattern,) = run_ranks(1, lambda comm: sync_of(comm, setting).pattern)
    assert pattern == pattern_of(load([setting]))


MEAN, PARTS = Transfer.MEAN_OF_GRADIENTS, Transfer.PARTS_OF_GRADIENTS
BY_ROOT = (Transfer.GRADIENTS_TO_ROOT, Transfer.WEIGHTS_FROM_ROOT)
HSDP = (Transfer.WEIGHTS_OF_UNITS, PARTS, Transfer.MEAN_OF_PARTS)


@pytest.mark.parametrize(
    ("settings", "begins", "transfers", "every"),
    [
        ("strategy=allreduce", Begin.AFTER_BACKWARD, (MEAN,), 1),
        ("strategy=overlap", Begin.DURING_BACKWARD, (MEAN,), 1),
        ("strategy=cntk sync.double_buffer=true", Begin.NEXT_STEP, (MEAN,), 1),
        ("strategy=streaming_diloco", Begin.NEXT_STEPS, (Transfer.MEAN_OF_CHANGES,), 10),
        ("strategy=des_loc", Begin.AFTER_UPDATE, (Transfer.MEAN_OF_STATES,), 60),
        ("strategy=diloco sync.every=5", Begin.AFTER_UPDATE, (Transfer.MEAN_OF_CHANGES,), 5),
        ("strategy=tensorflow", Begin.DURING_BACKWARD, BY_ROOT, 1),
        ("strategy=priority", Begin.DURING_BACKWARD, (MEAN,), 1),
        ("strategy=priority overlap=false", Begin.AFTER_BACKWARD, (MEAN,), 1),
        ("strategy=zero1", Begin.DURING_BACKWARD, (PARTS, Transfer.PARTS_OF_WEIGHTS), 1),
        ("strategy=hsdp", Begin.DURING_BACKWARD, HSDP, 1),
        ("strategy=none", Begin.NEVER, (), 1),
        ("strategy=ddp sync.hook=noop", Begin.DURING_BACKWARD, (), 1),
        ("strategy=onebit sync=ddp sync.hook=lab", Begin.DURING_BACKWARD, (MEAN,), 1),
    ],
)
def test_patterns(
    settings: str, begins: Begin, transfers: tuple[Transfer, ...], every: int
) -> None:
    pattern = pattern_of(load(settings.split()))
    assert (pattern.begins, pattern.transfers, pattern.every) == (begins, transfers, every)


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
        kind = partial(build, load([f"sync={sync}"]).sync)
        built = made(kind, model, comm, exchange, overlap=overlap, bucket_mb=25)
        with built:
            for last in (False, True):  # the first step looks how often each gradient grows
                exchange.ran.clear()
                model.zero_grad()
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


MLP = [("2.bias", 40), ("2.weight", 120_000), ("0.bias", 1200), ("0.weight", 200_000)]
TOTAL = sum(size for _, size in MLP)


ONE_BUCKET = "all 0.321 MB of gradients are in one bucket"
ACCUMULATE = "accumulate=4: exchanges overlap only the backward of the last micro-batch"


@pytest.mark.parametrize(
    ("pattern", "changes", "expected"),
    [
        (gradsync(True), {}, ""),
        (gradsync(False), {}, ""),
        (ddp("none"), {}, ""),
        (local(100), {}, ""),
        (gradsync(True), {"world_size": 1}, "one rank: strategy=mine has nothing to exchange"),
        (ddp("none"), {"world_size": 1}, "one rank: strategy=mine has nothing to exchange"),
        (none(), {"world_size": 1, "bucket_bytes": []}, ""),  # it exchanges nothing on purpose
        (ddp("noop"), {"world_size": 1, "bucket_bytes": []}, ""),
        (  # the hint is a quarter of the bucket, which divides the model
            gradsync(True),
            {"bucket_bytes": [TOTAL], "accumulate": 4},
            f"overlap=true: nothing overlaps, because {ONE_BUCKET}, which is full only when "
            "backward ends; set bucket_mb=0.077 to divide them",
        ),
        (
            gradsync(True),
            {"bucket_bytes": [1_234_000_000]},
            "overlap=true: nothing overlaps, because all 1230 MB of gradients are in one bucket, "
            "which is full only when backward ends; set bucket_mb=290 to divide them",
        ),
        (
            gradsync(False),
            {"bucket_bytes": [TOTAL]},
            f"bucket_mb=25: divides nothing, because {ONE_BUCKET}",
        ),
        (gradsync(False), {"bucket_bytes": [TOTAL], "bucket_mb": None}, ""),
        (double_buffer(True), {"bucket_bytes": [MIB], "bucket_mb": None}, ""),
        (gradsync(True), {"accumulate": 4}, ACCUMULATE),
        (ddp("none"), {"accumulate": 4, "bucket_bytes": []}, ACCUMULATE),
        (gradsync(False), {"accumulate": 4}, ""),
        (local(200), {}, "sync.every=200: ranks exchange once, after the last step (100)"),
    ],
)
def test_what_does_nothing_is_named(
    pattern: Pattern, changes: dict[str, Any], expected: str
) -> None:
    facts: dict[str, Any] = {"strategy": "mine", "world_size": 2, "num_steps": 100}
    facts |= {"bucket_mb": 25.0, "accumulate": 1, "bucket_bytes": [1_000_000, 4_000_000]}
    assert ineffective(pattern, **(facts | changes)) == [expected] * bool(expected)
    assert len(group(MLP, 25)) == 1 < len(group(MLP, 0.077))


ONE = [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("ready_s", "send_s", "needed", "order"),
    [
        ([0, 1, 2], ONE, [2, 1, 0], [0, 1, 2]),  # the link is free as each one is ready
        ([0, 0, 0], ONE, [2, 0, 1], [1, 2, 0]),  # all are ready: as needed
        ([0, 0, 2.5], ONE, [1, 2, 0], [0, 1, 2]),  # what travels is not interrupted
        ([0, 0, 0.5], ONE, [1, 2, 0], [0, 2, 1]),  # the last overtakes what has not left
        ([5, 7, 0], ONE, [0, 1, 2], [2, 0, 1]),  # a link without work waits
        ([0, 0, 0], ONE, [0, 0, 0], [0, 1, 2]),  # parts of one parameter keep their order
        ([], [], [], []),
    ],
)
def test_the_most_urgent_of_those_ready_leaves(
    ready_s: list[float], send_s: list[float], needed: list[int], order: list[int]
) -> None:
    assert send_order(ready_s, send_s[: len(ready_s)], needed) == order


CPU = torch.device("cpu")
LATE, LATE_S = 1, 0.2
SHORT_S = 0.15  # work without a delay takes less, waiting for it more
NUM_LATE = 4  # steps, of which the shortest counts: threads keep each other from work


def own_of_a_step(comm: Comm, config: DictConfig, phase: str) -> dict[str, float]:
    """Return the least own times of steps in which rank 1 is late."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    worker: Worker = ThreadWorker(CPU) if config.overlap else InlineWorker()
    of_run = {"overlap": config.overlap, "bucket_mb": 0}
    with made(GradSync, net, comm, build(config.exchange), worker, **of_run) as sync:
        sync.clock = clock = Clock(CPU, breakdown=False)
        _step(sync, net)
        if comm.rank == LATE and phase == "backward":
            next(net.parameters()).register_hook(lambda _: time.sleep(LATE_S))
        for _ in range(NUM_LATE):
            if comm.rank == LATE and phase == "exchange":
                comm.before_sending = _once()
            _step(sync, net)
    worker.close()
    least = clock.own_times().own_seconds()[1:].min(axis=0)
    return dict(zip(OWN, least.tolist(), strict=True))


def _step(sync: GradSync, net: nn.Module) -> None:
    clock = sync.clock
    assert clock
    with clock.step(), sync.micro_batch(last=True):
        loss: Tensor = net(torch.ones(4, 64)).sum()
        with clock.phase("backward"):
            loss.backward()
        with clock.phase("exchange"):
            sync.finish()


def _once() -> Any:
    due = [LATE_S]
    return lambda: time.sleep(due.pop()) if due else None


@pytest.mark.parametrize("phase", ["backward", "exchange"])
@pytest.mark.parametrize("strategy", ["allreduce", "overlap", "ring", "onebit", "auto"])
def test_the_late_rank_works_longer_and_those_that_wait_do_not(strategy: str, phase: str) -> None:
    config = load([f"strategy={strategy}"])
    late, *others = sorted(
        run_ranks(3, lambda comm: (comm.rank != LATE, own_of_a_step(comm, config, phase))),
        key=lambda pair: pair[0],
    )
    assert LATE_S <= late[1][phase] < LATE_S + SHORT_S, late
    assert all(own[phase] < SHORT_S for _, own in others)
    other = {"backward": "exchange", "exchange": "backward"}[phase]
    assert late[1][other] < SHORT_S


ALIKE = ("overlap", "ring", "onebit", "ddp", "local_sgd", "zero1", "hierarchical", "schedule")


@pytest.mark.parametrize(
    ("settings", "unlike"),
    [
        *((name, set()) for name in ALIKE),
        *((name, {"exchange"}) for name in ("tree", "tree_double", "star")),
        ("muon", {"exchange"}),  # the owner of the dearest matrix computes longest
        ("hierarchical exchange@exchange.inter=tree", {"exchange"}),
        ("schedule exchange@exchange.first=star", {"exchange"}),
        ("fsdp", {"update"}),
        ("caffe", {"exchange", "update"}),
    ],
)
def test_ranks_that_have_more_to_do_are_not_compared(settings: str, unlike: set[str]) -> None:
    assert set(comparable_phases(load(f"strategy={settings}".split()))) == set(OWN) - unlike


def test_ranks_of_uneven_nodes_are_not_compared() -> None:
    """The exchange itself, on nodes of one and three ranks: the sole rail has more to send."""
    config = load(["strategy=hierarchical"])

    def rank_main(comm: Comm) -> int:
        values = GradBucket({"w": torch.Size([8, 64])}, torch.ones(512))
        build(config.exchange).average(values, comm)
        return comm.traffic.payload_bytes

    uneven = run_ranks(4, rank_main, [[0], [1, 2, 3]])
    even = run_ranks(4, rank_main, [[0, 1], [2, 3]])
    assert set(comparable_phases(config, uneven)) == set(OWN) - {"exchange"}
    assert set(comparable_phases(config, even)) == set(OWN)

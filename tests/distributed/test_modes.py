"""Switches of the trainer that keep its results; and fp16's skipped steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lab.distributed.worker import InlineWorker
from lab.exchange.allreduce import NoExchange
from lab.loop.setup import world_of
from lab.sync.base import SyncParts
from lab.sync.ddp import DDPSync
from lab.sync.fsdp import FSDPSync
from lab.sync.library import LibrarySync
from tests.distributed.test_strategies import distance
from tests.support.ranks import Outcome, spawn, train, train_once
from tests.support.slow import some_of

RUN = ("data.size=16", "batch_size=24", "optim.lr=0.01", "steps=10", "warmup_steps=2")


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Outcome]]:
    """Run on some ranks, once for all tests."""
    place = f"runs_dir={tmp_path_factory.mktemp('once')}"
    return lambda size, *settings: train_once(size, *RUN, *settings, place)


def apart(ours: list[Outcome], theirs: list[Outcome]) -> float:
    return distance(ours[0].weights, theirs[0].weights)


@pytest.mark.parametrize("strategy", some_of(["allreduce", "overlap", "ddp"], every=2))
def test_accumulation_is_one_exchange_of_the_same_mean(
    strategy: str, once: Callable[..., list[Outcome]]
) -> None:
    whole = once(2, f"strategy={strategy}")
    parts = train(2, f"strategy={strategy}", "accumulate=3", *RUN)
    assert apart(parts, whole) < 1e-6
    for key in ("payload_bytes_per_step", "messages_per_step"):
        assert parts[0].record[key] == whole[0].record[key]
        assert min(parts[0].record[key]) > 0


def test_weak_scaling_fixes_the_batch_of_a_rank(once: Callable[..., list[Outcome]]) -> None:
    weak = train(2, *RUN, "batch_size=12", "scaling=weak")
    assert weak[0].record["batch_size"] == 24
    assert weak[0].record["per_rank_batch_size"] == 12
    assert weak[0].record["replica_hash"] == once(2)[0].record["replica_hash"]


def test_deterministic_reruns_are_bit_identical() -> None:
    first, second = (train(2, "deterministic=true", *RUN) for _ in range(2))
    assert first[0].record["replica_hash"] == second[0].record["replica_hash"]
    other = train(2, "deterministic=true", "seed=1", *RUN)
    assert first[0].record["replica_hash"] != other[0].record["replica_hash"]


def test_what_is_clipped_is_the_mean_gradient(once: Callable[..., list[Outcome]]) -> None:
    alone, among_three = (train(size, "clip_grad_norm=0.05", *RUN) for size in (1, 3))
    assert apart(among_three, alone) < 1e-6
    assert apart(once(2), alone) > 1e-3


def test_channels_last_changes_the_layout_alone(once: Callable[..., list[Outcome]]) -> None:
    assert apart(train(2, "channels_last=true", *RUN), once(2)) < 1e-5


@pytest.mark.parametrize("strategy", some_of(["allreduce", "onebit", "ddp"], every=3))
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_trains(
    strategy: str, precision: str, once: Callable[..., list[Outcome]]
) -> None:
    outcomes = train(2, f"strategy={strategy}", f"precision={precision}", *RUN)
    assert 0 < apart(outcomes, once(2, f"strategy={strategy}")) < 0.1
    assert outcomes[0].record["final"]["loss"] < 2.303


def test_a_step_that_fp16_skips_changes_neither_weights_nor_residuals() -> None:
    fp16 = ("strategy=onebit", "precision=fp16", *RUN)
    fault = "exchange._target_=tests.support.faults.OneBitNanOnRank1"
    before, after = (train(2, *fp16, fault, f"steps={steps}") for steps in (3, 4))
    assert before[0].record["num_skipped_steps"] + 1 == after[0].record["num_skipped_steps"]
    for one, other in zip(before, after, strict=True):
        assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
        for kind, residuals in one.exchange_state.items():
            assert residuals
            for name, residual in residuals.items():
                assert torch.equal(residual, other.exchange_state[kind][name])


SHARES = [("noop", 0, 0), ("fp16", 0.5, 0.5), ("powersgd", 0.001, 0.1)]


@pytest.mark.parametrize(("hook", "least", "most"), SHARES)
def test_hooks_of_ddp_train_and_their_bytes_are_counted(
    hook: str, least: float, most: float
) -> None:
    outcomes = train(2, "strategy=ddp", f"sync.hook={hook}", "model=mlp", *RUN)
    record = outcomes[0].record
    assert record["final"]["loss"] < 2.303
    assert (record["replica_hash"] is None) == (hook == "noop")
    payload, _ = record["payload_bytes_per_step"]
    assert least <= payload / record["gradient_bytes"] <= most
    assert (record["messages_per_step"][0] == 0) == (hook == "noop")


def test_the_labs_hook_in_ddp_does_what_the_labs_own_sync_does() -> None:
    run = ("strategy=onebit", "bucket_mb=0.05", "precision=fp16", "accumulate=2", *RUN)
    own, hook = train(2, *run), train(2, *run, "sync=ddp", "sync.hook=lab")
    assert apart(hook, own) < 1e-6
    assert hook[0].record["num_skipped_steps"] == own[0].record["num_skipped_steps"]
    # Own buckets are sent in another order from the second step on, which rank 0 broadcasts.
    sent = [run[0].record["payload_bytes_per_step"] for run in (own, hook)]
    assert sent[1] == pytest.approx(sent[0], rel=0.01)
    for one, other in zip(own, hook, strict=True):
        assert one.exchange_state.keys() == other.exchange_state.keys()


def test_an_exchange_that_outlasts_its_step_is_counted_once() -> None:
    """Evaluations wait for it, and its payload is neither lost nor counted twice."""
    cntk = ("strategy=cntk", "exchange=tree", "eval_every=3", *RUN)
    waiting, late = (train(2, *cntk, f"sync.double_buffer={on}") for on in ("false", "true"))
    assert waiting[0].record["payload_bytes_per_step"] == late[0].record["payload_bytes_per_step"]
    assert min(late[0].record["payload_bytes_per_step"]) > 0
    assert apart(waiting, late) > 1e-4


def test_all_that_a_run_sends_counts_if_no_step_is_timed() -> None:
    """Steps of a trial are not timed, and the exchange of the last one ends after it."""
    runs = (train(2, f"strategy={name}", *RUN, "steps=6") for name in ("overlap", "priority"))
    (own, _), (late, _) = ([outcome.record for outcome in run] for run in runs)
    assert own["num_timed_steps"] and not late["num_timed_steps"]
    assert late["payload_bytes_per_step"] == pytest.approx(own["payload_bytes_per_step"], rel=1e-3)


def replaced(make: Callable[[SyncParts], LibrarySync]) -> str:
    dist.init_process_group("gloo")
    comm = world_of(None, torch.device("cpu")).comm
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parts = SyncParts(model, model, NoExchange(), comm, InlineWorker(), True, 25)
    with make(parts) as sync:
        model[0] = nn.Linear(4, 4)
        with pytest.raises(RuntimeError) as caught:
            with sync.micro_batch(last=True):
                sync.module(torch.ones(1, 4)).sum().backward()
            sync.finish()
    dist.destroy_process_group()
    return str(caught.value)


def ddp(parts: SyncParts) -> DDPSync:
    return DDPSync(parts, hook="none")


def fsdp(parts: SyncParts) -> FSDPSync:
    by = "torch"
    return FSDPSync(parts, shard_size=None, reshard=None, all_gather=by, reduce_scatter=by)


@pytest.mark.parametrize("make", [ddp, fsdp])
def test_a_layer_that_replaces_one_under_a_library_is_refused(
    make: Callable[[SyncParts], LibrarySync],
) -> None:
    for line in spawn(2, replaced, make):
        assert line.startswith("0.weight: was frozen or missing when the exchange was set up")
        assert "add or replace layers, and set requires_grad=True, before" in line


def skipped() -> str:
    """Return why a step fails in which ranks skip a layer."""
    dist.init_process_group("gloo")
    comm = world_of(None, torch.device("cpu")).comm
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sync = ddp(SyncParts(model, model, NoExchange(), comm, InlineWorker(), True, 25.0))
    model[0].register_forward_hook(lambda _layer, given, _made: given[0])
    with sync, pytest.raises(RuntimeError) as caught:
        with sync.micro_batch(last=True):
            sync.module(torch.ones(1, 4)).sum().backward()
        sync.finish()
    dist.destroy_process_group()
    return str(caught.value)


def test_ddp_names_the_parameter_without_a_gradient_and_the_cure() -> None:
    for line in spawn(2, skipped):
        assert line.startswith("strategy=ddp: 0.weight: some parameters had no gradient in the ")
        assert line.endswith("use sync.find_unused_parameters=true or strategy=overlap")

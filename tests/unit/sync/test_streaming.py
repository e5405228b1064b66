"""Streaming DiLoCo: fragments, delay, merging, and what it has in common with DiLoCo."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lab.distributed.comm import Comm, run_ranks
from lab.distributed.worker import InlineWorker, ThreadWorker, TurnsWorker, Worker
from lab.exchange.allreduce import AllReduce, NoExchange
from lab.exchange.base import Exchange
from lab.exchange.compressed import Int8, OneBit
from lab.sync.local import LocalSync, StreamingSync
from lab.sync.pattern import fragments
from tests.support.steps import made
from tests.unit.sync.test_des_loc import des_loc
from tests.unit.sync.test_local import local, networks, train, weights

OUTER: dict[str, Any] = {"every": 4, "outer_lr": 0.7, "outer_momentum": 0.5}
WHOLE: dict[str, Any] = {"fragments": 1, "fragment_order": "strided", "delay": 0, "alpha": 0.0}
HALVES: dict[str, Any] = {**WHOLE, "fragments": 2, "delay": 1, "alpha": 0.5}
one_bit = partial(OneBit, granularity="block", block_size=8)


def streaming(*parts: Any, **settings: Any) -> StreamingSync:
    settings = {**OUTER, **HALVES, **settings}
    return made(StreamingSync, *parts, **{"overlap": bool(settings["delay"]), **settings})


@pytest.mark.parametrize("make", [AllReduce, one_bit])
@pytest.mark.parametrize("bucket_mb", [None, 1e-5])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_fragment_without_delay_is_diloco_bit_for_bit(
    dtype: torch.dtype, size: int, bucket_mb: float | None, make: Callable[[], Exchange]
) -> None:
    batches = torch.randn(size, 10, 4, 6, dtype=dtype)
    models = [model.to(dtype) for model in networks(size)]

    def rank_main(comm: Comm) -> tuple[Tensor, Tensor, bool]:
        other = copy.deepcopy(models[comm.rank])
        settings = {**OUTER, "bucket_mb": bucket_mb}
        ours = streaming(models[comm.rank], comm, make(), **settings, **WHOLE)
        theirs = local(other, comm, make(), **settings)
        same = True
        for each in (ours, theirs):
            with each:
                train(each, batches[comm.rank], 8)
                same = same and each.keeps_replicas_equal
                train(each, batches[comm.rank], 10)
        return weights(ours), weights(theirs), same

    for ours, theirs, equal in run_ranks(size, rank_main):
        assert torch.equal(ours, theirs)
        assert equal


def test_anchors_and_weights_follow_the_algorithm_of_the_paper() -> None:
    """Algorithm 2, written literally for one fragment that is under way for two steps."""
    changes = torch.randn(9, 2, 4)  # steps, ranks, values
    alpha, every, delay, lr = 0.25, 3, 2, 0.7

    def rank_main(comm: Comm) -> list[Tensor]:
        model, seen = nn.Linear(4, 1, bias=False), []
        nn.init.zeros_(model.weight)
        settings = {"every": every, "delay": delay, "alpha": alpha, "fragments": 1}
        with streaming(model, comm, **settings, outer_momentum=0.0) as sync:
            for step, change in enumerate(changes[:, comm.rank]):
                model.weight.data -= change
                sync.after_update(last=step == 8)
                seen.append(weights(sync).clone())
        return seen

    own, shared, outer = torch.zeros(2, 4), torch.zeros(4), torch.zeros(4)
    results = run_ranks(2, rank_main)
    for step, change in enumerate(changes, start=1):
        own = own - change
        if step % every == delay and step > delay:  # the exchange of `delay` steps ago is there
            shared = shared - lr * outer
            own = alpha * own + (1 - alpha) * shared
        if step % every == 0:
            outer = (shared - own).mean(dim=0)
        if step == 9:
            own = (shared - lr * outer).expand(2, 4)
        for rank in range(2):
            torch.testing.assert_close(results[rank][step - 1], own[rank])


def test_a_fragment_is_sent_every_h_steps_and_received_after_the_delay() -> None:
    batches, models = torch.randn(3, 12, 4, 6), networks(3)

    def rank_main(comm: Comm) -> list[tuple[int, int, bool, Tensor]]:
        sync = streaming(models[comm.rank], comm, every=6, delay=2)
        seen = []
        with sync:
            for step in range(1, 13):
                train(sync, batches[comm.rank], step)
                sent = comm.traffic.payload_bytes, sync.sent()[0]
                seen.append((*sent, sync.keeps_replicas_equal, weights(sync)))
        return seen

    handed, counted, claims, first = zip(*(ranks := run_ranks(3, rank_main))[0], strict=True)
    for other in ranks[1:]:  # replicas are equal after the last step alone
        equal = [torch.equal(ours, theirs[-1]) for ours, theirs in zip(first, other, strict=True)]
        assert equal == [False] * 11 + [True] == [*claims]
    layers = [4 * (6 * 5 + 5) * 4 // 3, 4 * (5 * 2 + 2) * 4 // 3]  # what a ring of 3 sends
    by_step = [[b - a for a, b in itertools.pairwise([0, *counts])] for counts in (handed, counted)]
    # The second fragment is due at the run's last step; then the whole model is exchanged.
    assert by_step[0] == [0, 0, layers[0], 0, 0, layers[1], 0, 0, layers[0], 0, 0, sum(layers)]
    assert by_step[1] == [0, 0, 0, 0, layers[0], 0, 0, layers[1], 0, 0, layers[0], sum(layers)]


@pytest.mark.parametrize("make_worker", [TurnsWorker, lambda: ThreadWorker(torch.device("cpu"))])
def test_the_worker_changes_no_bit(make_worker: Callable[[], Worker]) -> None:
    batches, models = torch.randn(2, 10, 4, 6), networks(2)

    def rank_main(comm: Comm) -> tuple[Tensor, Tensor]:
        results, worker = [], make_worker()
        other = copy.deepcopy(models[comm.rank])
        for model, each in ((models[comm.rank], worker), (other, InlineWorker())):
            with streaming(model, comm, one_bit(), each) as sync:
                train(sync, batches[comm.rank], 10)
            results.append(weights(sync))
        worker.close()
        return results[0], results[1]

    for background, inline in run_ranks(2, rank_main):
        assert torch.equal(background, inline)


def diloco(model: nn.Module, comm: Comm, exchange: Exchange) -> LocalSync:
    return local(model, comm, exchange, **OUTER)


@pytest.mark.parametrize(
    ("make", "stop"),  # a fragment is under way after steps 6 and 8
    [(streaming, 5), (streaming, 6), (streaming, 7), (diloco, 6)],
)
def test_a_round_goes_on_from_its_state_bit_for_bit(
    make: Callable[..., LocalSync], stop: int
) -> None:
    batches, models, others = torch.randn(2, 11, 4, 6), networks(2), networks(2)

    def rank_main(comm: Comm) -> tuple[Tensor, Tensor, int]:
        sync = make(models[comm.rank], comm, one_bit())
        resumed = make(others[comm.rank], comm, one_bit())
        with sync:
            train(sync, batches[comm.rank], stop)
            sync.settle()
            state, residuals = copy.deepcopy((sync.state_dict(), sync.exchange.snapshot()))
            resumed.module.load_state_dict(sync.module.state_dict())
            train(sync, batches[comm.rank], 11)
        assert state["anchor"]
        resumed.load_state_dict(state)
        resumed.exchange.load_state_dict(residuals)
        resumed.step = stop
        with resumed:
            train(resumed, batches[comm.rank], 11)
        return weights(sync), weights(resumed), len(state.get("arriving", ()))

    for whole, resumed, num_arriving in run_ranks(2, rank_main):
        assert num_arriving == (2 if make is streaming and stop == 6 else 0)
        assert torch.equal(whole, resumed)


def test_means_of_a_fragment_that_is_no_more_are_dropped() -> None:
    (model,) = networks(1)

    def rank_main(comm: Comm) -> tuple[int, int]:
        first, other = (streaming(model, comm, fragments=number) for number in (2, 1))
        with first:
            train(first, torch.randn(20, 4, 6), 2)
        other.load_state_dict(first.state_dict())
        return len(first.arriving), len(other.arriving)

    assert run_ranks(1, rank_main) == [(2, 0)]


@pytest.mark.parametrize("order", ["strided", "sequential"])
@pytest.mark.parametrize("number", [1, 3, 12])
def test_fragments_of_equal_layers_are_equal(number: int, order: str) -> None:
    sizes = [(f"{n}.{kind}", size) for n in range(12) for kind, size in (("w", 90.0), ("b", 10.0))]
    parts = fragments(sizes, number, order)
    layers = [list(dict.fromkeys(int(name.partition(".")[0]) for name in part)) for part in parts]
    each = 12 // number
    expected = {
        "strided": [list(range(n, 12, number)) for n in range(number)],
        "sequential": [list(range(n * each, (n + 1) * each)) for n in range(number)],
    }
    assert layers == expected[order]


@pytest.mark.parametrize("order", ["strided", "sequential"])
def test_every_parameter_is_in_one_fragment_and_none_is_empty(order: str) -> None:
    sizes = [(f"{n}.w", float(size)) for n, size in enumerate((1, 1000, 3, 2, 1, 0))]
    for number in range(1, 7):
        parts = fragments(sizes, number, order)
        assert all(parts) and len(parts) == number
        assert sorted(name for part in parts for name in part) == [name for name, _ in sizes]
    with pytest.raises(ValueError, match="sync.fragments=7: must be at most 6"):
        fragments(sizes, 7, order)


REFUSED: dict[Callable[..., Any], dict[str, dict[str, Any]]] = {
    local: {
        "sync.every=0: must be an integer of at least 1": {"every": 0},
        "sync.every=2.5: must be an integer": {"every": 2.5},
        "sync.outer_lr=0: must be a number above 0": {"outer_lr": 0},
        "sync.outer_lr=fast: must be a number": {"outer_lr": "fast"},
        "sync.outer_momentum=1.0: must be a number of at least 0 and below 1": {
            "outer_momentum": 1.0
        },
        "sync.outer_momentum=-0.1: must be": {"outer_momentum": -0.1},
        "overlap=true: must be false": {"overlap": True},
        "precision=fp16: .*allowed: fp32, bf16": {"precision": "fp16"},
        "exchange=NoExchange does not keep replicas equal": {"exchange": NoExchange()},
    },
    des_loc: {
        "sync.every=0: must be an integer of at least 1": {"every": 0},
        "sync.first_every=null: must be an integer of at least 1": {"first_every": None},
        "sync.second_every=2.5: must be an integer": {"second_every": 2.5},
        "is not exact, but second moments need an exact exchange": {"exchange": Int8(8)},
        "overlap=true: must be false": {"overlap": True},
        "precision=fp16: .*allowed: fp32, bf16": {"precision": "fp16"},
    },
    streaming: {
        "sync.fragments=0: must be an integer from 1 to 4": {"fragments": 0},
        "sync.fragments=5: must be an integer from 1": {"fragments": 5},
        "sync.fragments=3: must be at most 2, the number of layers": {"fragments": 3, "every": 9},
        "sync.fragment_order=random: allowed: strided, seq": {"fragment_order": "random"},
        "sync.delay=3: must be an integer from 0 to 2": {"delay": 3},
        "sync.delay=true: must be an integer": {"delay": True},
        "sync.alpha=1.0: must be a number of at least 0 and below 1": {"alpha": 1.0},
        "sync.alpha=half: must be": {"alpha": "half"},
        "sync.every=0: must be an integer of at least 1": {"every": 0},
        "overlap=false: must be true with sync.delay=1": {"overlap": False},
        "overlap=true: must be false with sync.delay=0": {"delay": 0, "overlap": True},
        "precision=fp16: .*allowed: fp32, bf16": {"precision": "fp16"},
    },
}


@pytest.mark.parametrize(
    ("make", "message"), [(make, message) for make in REFUSED for message in REFUSED[make]]
)
def test_settings_that_make_no_sense_are_refused(make: Callable[..., Any], message: str) -> None:
    (model,) = networks(1)
    with pytest.raises(ValueError, match=message):
        run_ranks(1, lambda comm: make(model, comm, **REFUSED[make][message]))

"""Faults are named, and right runs are not accused: ranks as threads, by the trainer's syncs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lab.sync.base import Sync
from lab.sync.local import LocalSync
from tests.support import misaveraged
from tests.support.certified import MODELS, MORE, UNCHECKED, Case, certified, clean_cases
from tests.support.slow import some_of


def other_weights(model: nn.Module, _sync: Sync, rank: int) -> None:
    if rank == 1:
        with torch.no_grad():
            next(model.parameters()).view(-1)[3] += 1e-5


def sends_all(_model: nn.Module, sync: Sync, _rank: int) -> None:
    """Swap the exchange that the settings name for one that does not compress."""
    sync.exchange = misaveraged.Uncompressed()


def sends_elsewhere(_model: nn.Module, sync: Sync, _rank: int) -> None:
    sync.exchange = misaveraged.Bypassed()


def lossy(strategy: str, exchange: str) -> Case:
    return Case((f"strategy={strategy}",), "images", 4, exchange=getattr(misaveraged, exchange))


def wrong(exchange: str, *more: str, model: str = "perceptron", size: int = 4) -> Case:
    settings = ("strategy=overlap", *more)
    return Case(settings, model, size, exchange=getattr(misaveraged, exchange))


def one_bit(exchange: str) -> Case:
    return Case(("strategy=onebit",), size=3, exchange=getattr(misaveraged, exchange))


FAULTS = {
    "summed": (wrong("Summed"), "averaged once", "summed, not averaged: ranks 0-3 hold 4x the"),
    "summed 1-bit": (one_bit("SummedOneBit"), "averaged once", "summed, not averaged: ranks 0-2"),
    "divided twice": (wrong("DividedTwice"), "averaged once", "divided twice: ranks 0-3 hold 1/4"),
    "scaled": (wrong("Scaled"), "averaged once", "scaled: ranks 0-3 hold 1.5x the mean in 0.wei"),
    "not exchanged": (
        *(wrong("NotExchanged"), "exchanged"),
        "not exchanged: ranks 0-3 hold the rank's own gradient in 0.weight and 2 more (exchange 1)",
    ),
    "other weights": (
        *(Case(("strategy=onebit",), spoil=other_weights, size=3), "equal start"),
        "different initial weights: 0.weight on rank 1 differs from rank 0's in the first step",
    ),
    "left out": (
        *(wrong("OneBucketLeftOut", "bucket_mb=0.01"), "complete"),
        "left out: ranks 0-3 hold the rank's own gradient in 0.weight (exchange 1)",
    ),
    "one value": (wrong("OneValueOff"), "averaged once", "not the mean: rank 1 holds something"),
    "ignored": (
        *(Case(("strategy=onebit",), spoil=sends_elsewhere), "exchanged"),
        "hook ignored: the exchange handed no byte",
    ),
    "wrong group": (
        *(wrong("WrongGroup"), "right group"),
        "wrong group: ranks 0, 1 hold the mean over 2 of 4 (ranks 0, 1) in 0.weight",
    ),
    "stale": (
        *(wrong("Stale"), "fresh"),
        "stale buffer: ranks 0-3 hold the mean from the step before in 0.weight and 2 more",
    ),
    "stale later": (
        *(wrong("Stale", "bucket_mb=0.01", model="recurrent", size=3), "fresh"),
        "(exchange 3)",
    ),
    "stale in the next forward": (
        wrong("Stale", "strategy=priority", *MORE["priority"], model="recurrent", size=3),
        "fresh",
        "(exchange 3)",
    ),
    "summed int8": (
        lossy("int8", "SummedInt8"),
        "averaged once",
        "summed, not averaged: ranks 0-3",
    ),
    "divided bf16": (lossy("bf16", "DividedBFloat16"), "averaged once", "divided twice: ranks 0-3"),
    "own int8": (lossy("int8", "OwnInt8"), "exchanged", "not exchanged: ranks 0-3 hold the rank's"),
    "unwritten": (wrong("Unwritten"), "fresh", "stale buffer: ranks 0-3 hold zeros"),
    "residual": (one_bit("ForgetsResidual"), "averaged once", "not the mean: ranks 0-2 hold some"),
    "not compressed": (
        *(Case(("strategy=onebit",), spoil=sends_all), "bytes"),
        "bytes: rank 0 handed 91200 bytes to the network, but the formula for this exchange says ",
    ),
}


@pytest.mark.parametrize("name", some_of(FAULTS, every=2))
def test_a_fault_is_named(name: str) -> None:
    case, broken, line = FAULTS[name]
    first, *others = certified(case)
    assert line in first.line
    assert not first.holds
    assert [f.property for f in first.findings if f.outcome == "fails"] == [broken]
    assert all(other == first for other in others)


CLEAN = list(clean_cases())


def test_there_are_200_clean_cases() -> None:
    assert len(set(map(str, CLEAN))) == len(CLEAN) >= 200
    assert {case.model for case in CLEAN} == set(MODELS)


@pytest.mark.parametrize("case", some_of(CLEAN[::9], every=4), ids=str)
def test_a_right_run_is_not_accused(case: Case) -> None:
    """`python -m tests.support.certified` runs all of them."""
    certificate = certified(case)[0]
    assert certificate.holds, certificate.line
    unchecked = {f"strategy={strategy}" for strategy in UNCHECKED}
    assert bool(certificate.proven) == unchecked.isdisjoint(case.settings)


def right(settings: str) -> Case:
    return Case(tuple(settings.split()), size=3)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            right("strategy=caffe"),
            "gradients averaged once at the root over 3 of 3 ranks, for 3 of 3 parameters; as",
        ),
        (
            right("strategy=local_sgd sync.every=2"),
            "weight changes averaged once over 3 of 3 ranks, for 3 of 3 par",
        ),
        (
            right("strategy=cntk sync.double_buffer=true"),
            "gradients averaged once, a step late, over 3",
        ),
        (
            right("strategy=priority sync.trials=0 sync.chunk_mb=0.01"),
            "gradients averaged once over 3 of 3 ranks, for 3 of 3 parameters; as many bytes",
        ),
        (
            right("strategy=topk"),
            "3 of 3 parameters; 33.0x fewer bytes than fp32 (not counted: threads",
        ),
        (right("strategy=none"), "not checked, because strategy=none exchanges nothing"),
        (
            right("strategy=overlap exchange=none"),
            "not checked, because strategy=overlap exchanges nothing",
        ),
        (
            wrong("Apart", size=2),
            "not checked, because exchange=Apart does not keep replicas equal",
        ),
        (
            right("strategy=onebit exchange.error_feedback=false"),
            "1 of 3 parameters (exchange=OneBit states no bound on its error: 0.weight and 1 more)",
        ),
        (  # right in the first exchange only
            wrong("Momentum", size=2),
            "no gradients checked, because exchange=Momentum states no bound on its error",
        ),
        (  # forward leaves parameters out
            Case(("strategy=onebit",), "tied"),
            "8 of 10 parameters (unused: never.weight and 1 more)",
        ),
        (  # a user's exchange sends by no comm
            wrong("Bypassed", size=2),
            "3 of 3 parameters; bytes not counted, because exchange=Bypassed",
        ),
        (  # if all ranks have the same samples, a rank's own gradient is the mean
            Case(("strategy=overlap",), size=3, same_samples=True),
            "weights equal on 3 ranks; no gradients checked, because gradients are equal on all",
        ),
    ],
)
def test_a_certificate_says_what_was_promised_and_no_more(case: Case, words: str) -> None:
    certificate = certified(case)[0]
    assert words in certificate.line
    assert certificate.holds
    unchecked = {f.property for f in certificate.findings if f.outcome != "holds"}
    assert unchecked >= {"bytes"}  # threads have no interface
    assert ("averaged once" in unchecked) == ("exchanged" in unchecked) == (not certificate.proven)
    assert ("equal start" in unchecked) == (not certificate.num_exchanges)
    assert (certificate.unused or []) == ["never.weight", "never.bias"] * ("unused" in words)


def test_a_certificate_says_how_much_travels_as_float32() -> None:
    narrow = certified(Case(("strategy=onebit",), "recurrent", 2))[0]
    assert narrow.line.endswith(
        "; 100 % of the values are sent as float32 (4,132 of 4,132): vectors, and rows shorter "
        "than exchange.min_columns=64"
    )
    assert "sent as float32" not in certified(Case(("strategy=onebit",), size=2))[0].line


def test_a_round_that_ranks_leave_with_other_weights_is_found() -> None:
    def drift(model: nn.Module, sync: Sync, rank: int) -> None:
        assert isinstance(sync, LocalSync)
        after_update = sync.after_update

        def drifting(last: bool) -> object:
            finite = after_update(last)
            if rank == 1 and not sync.in_round:
                with torch.no_grad():
                    next(model.parameters()).mul_(1.01)
            return finite

        sync.after_update = drifting  # type: ignore[assignment]

    case = Case(("strategy=local_sgd", "sync.every=2"), size=3, spoil=drift)
    assert "not the mean: rank 1 holds something else" in certified(case)[0].line

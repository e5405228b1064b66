"""Settings that do nothing are named; those that do something are not."""

from __future__ import annotations

from typing import Any

import pytest

from lab.exchange.grouping import MIB, group
from lab.sync.pattern import Pattern, ddp, double_buffer, gradsync, idle, local, none

MLP = [("2.bias", 40), ("2.weight", 120_000), ("0.bias", 1200), ("0.weight", 200_000)]
TOTAL = sum(size for _, size in MLP)


def lines(pattern: Pattern, **changes: Any) -> list[str]:
    """List what is idle in a run of two ranks and two buckets, with `changes`."""
    facts: dict[str, Any] = {"strategy": "mine", "world_size": 2, "num_steps": 100}
    facts |= {"bucket_mb": 25.0, "accumulate": 1, "bucket_bytes": [1_000_000, 4_000_000]}
    return idle(pattern, **(facts | changes))


@pytest.mark.parametrize("pattern", [gradsync(True), gradsync(False), ddp("none"), local(10)])
def test_one_rank_exchanges_nothing(pattern: Pattern) -> None:
    assert lines(pattern, world_size=1, bucket_bytes=[4]) == [
        "one rank: strategy=mine has nothing to exchange"
    ]
    assert lines(pattern) == []


def test_a_strategy_that_exchanges_nothing_on_purpose_is_not_idle() -> None:
    for pattern in (none(), ddp("noop")):
        assert lines(pattern, world_size=1, bucket_bytes=[]) == []


def test_one_bucket_overlaps_nothing_and_the_hint_divides_it() -> None:
    (line,) = lines(gradsync(True), bucket_bytes=[TOTAL])
    assert line.startswith("overlap=true: nothing overlaps: all 0.321 MB of gradients are one")
    hint = line.split("bucket_mb=")[1].split(" ")[0]
    assert len(group(MLP, 25)) == 1  # larger than the model
    assert len(group(MLP, float(hint))) > 1


def test_buckets_larger_than_the_model_divide_nothing() -> None:
    (line,) = lines(gradsync(False), bucket_bytes=[TOTAL])
    assert line == "bucket_mb=25: divides nothing: all 0.321 MB of gradients are one bucket"
    assert lines(gradsync(False), bucket_bytes=[TOTAL], bucket_mb=None) == []


def test_a_double_buffer_overlaps_one_bucket_too() -> None:
    assert lines(double_buffer(True), bucket_bytes=[MIB], bucket_mb=None) == []


def test_only_the_last_micro_batch_overlaps() -> None:
    expected = "accumulate=4: exchanges overlap the last micro-batch's backward alone"
    for pattern, buckets in ((gradsync(True), [1, 2]), (ddp("none"), [])):
        assert lines(pattern, accumulate=4, bucket_bytes=buckets) == [expected]
    assert lines(gradsync(False), accumulate=4) == []
    (line,) = lines(gradsync(True), accumulate=4, bucket_bytes=[TOTAL])
    assert line.startswith("overlap=true: nothing overlaps")


def test_a_round_longer_than_the_run_is_named() -> None:
    expected = "sync.every=200: ranks exchange once, after the last step (100)"
    assert lines(local(200)) == [expected]
    assert lines(local(100)) == []

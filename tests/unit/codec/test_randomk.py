"""The codec of random-k: all implementations draw the same places, each value as often."""

from __future__ import annotations

import pytest
import torch

from lab.codec.randomk import Native, Reference, kernels, places
from tests.support.kernels import (
    KINDS,
    LENGTHS,
    LEVELS,
    library_at,
    same,
    unaligned,
    values_of,
)

SEEDS = (0, 12345, 2**32 - 1, 2**63 - 1)
CPU = torch.device("cpu")


def test_places_are_one_of_each_range_and_differ_by_seed() -> None:
    for seed in SEEDS:
        drawn = places(1000, 300, seed, CPU)
        edges = torch.arange(301) * 1000 // 300
        assert (drawn >= edges[:-1]).all() and (drawn < edges[1:]).all()
    draws = torch.stack([places(1000, 30, seed, CPU) for seed in range(50)])
    assert len(draws.unique(dim=0)) == 50


def test_all_values_are_equally_probable() -> None:
    counts = torch.zeros(1000)
    for seed in range(1000):
        counts[places(1000, 30, seed, CPU)] += 1
    assert counts.sum() == 30 * 1000
    # 34 values share 30 ranges' draws unevenly: 33 or 34 to a range.
    assert abs(counts - 30).max() < 6 * 30**0.5


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
def test_kernels_take_what_the_reference_takes(level: str, kind: str, feedback: bool) -> None:
    fast, slow = Native(library_at(level, "randomk")), Reference()
    for length in LENGTHS:
        for seed in SEEDS:
            gradient = unaligned(values_of(kind, length))
            residual = values_of(kind, length) / 2 if feedback else None
            count = max(length * 3 // 10, 1)
            sent, kept, probes = torch.full((2, count), 7.0), [], torch.zeros(2)
            for codec, values, probe in zip((fast, slow), sent, probes, strict=True):
                kept.append(None if residual is None else residual.clone())
                codec.encode(gradient.clone(), kept[-1], values, probe, seed)
            assert same(sent[0], sent[1])
            if kept[0] is not None:
                assert same(kept[0], kept[1])
            finite = kind not in ("nan", "-inf")
            assert [bool(probe == 0) for probe in probes] == [finite, finite]
            ours, theirs = torch.full((2, length), 7.0)
            fast.decode(sent[0], ours, seed)
            slow.decode(sent[0], theirs, seed)
            assert same(ours, theirs)


def test_without_values_nothing_is_drawn() -> None:
    nothing, probe = torch.empty(0), torch.zeros(())
    kernels(CPU).encode(nothing, nothing.clone(), nothing.clone(), probe, 1)
    kernels(CPU).decode(nothing, nothing.clone(), 1)
    assert probe == 0

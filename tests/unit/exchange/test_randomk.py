"""The codec of random-k: all implementations draw the same places, each value as often."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from lab.codec.layout import Draws
from lab.exchange.randomk import NativeRandomK, RandomKReference, kernels, places
from tests.support.kernels import (
    HERE,
    KINDS,
    LENGTHS,
    LEVELS,
    OnGPU,
    library_at,
    same,
    unaligned,
    values_of,
)
from tests.support.slow import some_of

SEEDS = (0, 12345, 2**32 - 1, 2**63 - 1)
CASES = [
    *product([HERE], KINDS, [True, False]),
    *some_of(
        product([*(level for level in LEVELS if level != HERE), "triton"], KINDS, [True, False]),
        also=[*product([*LEVELS, "triton"], ["normal"], [True]), ("triton", "nan", False)],
    ),
]
CPU = torch.device("cpu")


def implementation(level: str) -> Any:
    """Return kernels of a processor's level, or of GPUs, which Triton may interpret."""
    if level == "triton":
        return OnGPU(pytest.importorskip("lab.codec.gpu_randomk", reason="no triton here").made())
    return (
        RandomKReference() if level == "reference" else NativeRandomK(library_at(level, "randomk"))
    )


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


@pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")  # numpy's, interpreting
@pytest.mark.parametrize(("level", "kind", "feedback"), CASES)
def test_kernels_take_what_the_reference_takes(level: str, kind: str, feedback: bool) -> None:
    fast, slow = implementation(level), RandomKReference()
    interpreted = level == "triton"  # which is slow
    for length in (*LENGTHS[:-1:2], 9001) if interpreted else LENGTHS:
        for seed in SEEDS[:: 3 if interpreted else 1]:
            gradient = unaligned(values_of(kind, length))
            residual = values_of(kind, length) / 2 if feedback else None
            count = max(length * 3 // 10, 1)
            draws = Draws([length], [count], [seed])
            sent, kept, probes = torch.full((2, count), 7.0), [], torch.zeros(2)
            for codec, values, probe in zip((fast, slow), sent, probes, strict=True):
                kept.append(None if residual is None else residual.clone())
                codec.encode(draws, gradient.clone(), kept[-1], values, probe)
            assert same(sent[0], sent[1])
            if kept[0] is not None:
                assert same(kept[0], kept[1])
            finite = kind not in ("nan", "-inf")
            assert [bool(probe == 0) for probe in probes] == [finite, finite]
            ours, theirs = torch.full((2, length), 7.0)
            fast.decode(draws, sent[0].clone(), ours, 3)
            slow.decode(draws, sent[0], theirs, 3)
            # Kernels of GPUs divide infinity into what is not a number.
            assert same(*(mean.where(mean.isfinite(), torch.nan) for mean in (ours, theirs)))


@pytest.mark.parametrize("level", [*LEVELS, "triton", "reference"])
def test_each_parameter_of_a_bucket_is_drawn_by_its_own_seed(level: str) -> None:
    codec = implementation(level)
    sizes, counts = [1000, 7, 300], [100, 7, 30]
    draws = Draws(sizes, counts, SEEDS[:3])
    gradients, residuals, out = torch.randn(1307), torch.zeros(1307), torch.full((1307,), 7.0)
    sent, probe = torch.empty(137), torch.zeros(())
    codec.encode(draws, gradients.clone(), residuals, sent, probe)
    codec.decode(draws, sent, out, 1)
    assert torch.equal(out + residuals, gradients)
    parts = zip(gradients.split(sizes), sent.split(counts), SEEDS, strict=False)
    for own, values, seed in parts:
        assert torch.equal(values, own[places(len(own), len(values), seed, CPU)])


def test_without_values_nothing_is_drawn() -> None:
    nothing, probe = torch.empty(0), torch.zeros(())
    draws = Draws([0], [0], [1])
    kernels(CPU).encode(draws, nothing, nothing.clone(), nothing.clone(), probe)
    kernels(CPU).decode(draws, nothing, nothing.clone(), 1)
    assert probe == 0

"""Settings out of range are refused by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lab.codec import codecs
from lab.exchange.allreduce import AllReduce, NoExchange
from lab.exchange.auto import Auto
from lab.exchange.compressed import OneBit, TopK
from lab.exchange.hierarchical import Hierarchical
from lab.exchange.muon import Dion, Muon
from lab.exchange.onebit_adam import OneBitAdam, OneBitLamb, ZeroOneAdam
from lab.exchange.paths import DoubleTree, Ring, Tree
from lab.exchange.powersgd import PowerSGD
from lab.exchange.randomk import RandomK
from lab.exchange.schedule import Schedule


def schedule(until: Any, phases: int = 2, second: Any = None) -> Schedule:
    third = AllReduce() if phases == 3 else None
    return Schedule(AllReduce(), second or AllReduce(), third, until)


def auto(**settings: Any) -> Auto:
    candidates = {"a": AllReduce(), "b": NoExchange(), "c": schedule((1,))}
    return Auto(
        **({"candidates": candidates, "among": ["a"], "rounds": 1, "tolerance": 0} | settings)
    )


NO_MEAN, TWO_ENDS = (
    "does not keep replicas equal",
    r": must be 2 increasing numbers, for 3 exchanges",
)
EACH = "such a value for each of gloo and nccl"
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (codecs.OneBit, {"threshold": "median"}, "threshold=median: allowed: zero, mean"),
    (codecs.OneBit, {"granularity": "row"}, "granularity=row: allowed: column, block"),
    (codecs.OneBit, {"block_size": 4}, "block_size=4: must be an integer of at least 8"),
    (codecs.OneBit, {"block_size": 64}, "block_size=64: needs granularity=block"),
    (codecs.Int8, {"block_size": 10}, "block_size=10: must be a multiple of 4 above 0"),
    (codecs.Int4, {"block_size": 12}, "block_size=12: must be a multiple of 8 above 0"),
    (codecs.Float8, {"block_size": 4}, "block_size=4: must be an integer of at least 8"),
    (codecs.Cast, {"dtype": "float64"}, "dtype=float64: allowed: bfloat16, float16"),
    (codecs.Signs, {"min_values": 0}, "min_values=0: must be an integer of at least 1"),
    (codecs.TopK, {"ratio": 0}, "ratio=0: must be a number above 0 and at most 1"),
    (RandomK, {"ratio": 1.5}, "ratio=1.5: must be a number above 0 and at most 1"),
    (RandomK, {"seed": "a"}, "seed=a: must be an integer"),
    (PowerSGD, {"rank": 0}, "rank=0: must be an integer of at least 1"),
    (TopK, {"error_feedback": 1}, "error_feedback=1: must be true or false"),
    (AllReduce, {"dtype": "float8"}, "dtype=float8"),
    *(
        (path, {"chunk_mb": 0}, "chunk_mb=0: must be null, a number above 0")
        for path in (Tree, Ring)
    ),
    *((Ring, {"chunk_mb": size}, f"chunk_mb={size}: must be") for size in (True, float("inf"))),
    (DoubleTree, {"chunk_mb": {"gloo": 4}}, f"chunk_mb=.*{EACH}"),
    (DoubleTree, {"chunk_mb": {"gloo": 4, "nccl": -1}}, f"chunk_mb=.*{EACH}"),
    (Hierarchical, {"inter": NoExchange()}, f"inter=NoExchange {NO_MEAN}"),
    (Hierarchical, {"inter": Hierarchical(OneBit())}, "inter=Hierarchical already has two levels"),
    (auto, {"among": ["a", "x"]}, r"among=\['a', 'x'\]: must be a list of different names"),
    (auto, {"among": []}, r"among=\[\]: must be"),
    (auto, {"among": "a"}, "among=a: must be"),
    (auto, {"rounds": 0}, "rounds=0: must be an integer of at least 1"),
    (auto, {"tolerance": 1}, "tolerance=1: must be a number of at least 0 and below 1"),
    (auto, {"among": ["b"]}, rf"candidates\.b=NoExchange {NO_MEAN}"),
    (auto, {"among": ["c"]}, r"candidates\.c=Schedule is made of other exchanges"),
    (schedule, {"until": (5,), "second": NoExchange()}, f"second=NoExchange {NO_MEAN}"),
    (schedule, {"until": [0.5], "phases": 3}, rf"until=\[0.5\]{TWO_ENDS}"),
    (schedule, {"until": [0.1, 0.5]}, r"until=.*: must be 1 increasing number, for 2 exchanges"),
    (schedule, {"until": [0.5, 0.1], "phases": 3}, rf"until=\[0.5, 0.1\]{TWO_ENDS}"),
    (schedule, {"until": [0.5, 0.5], "phases": 3}, rf"until=\[0.5, 0.5\]{TWO_ENDS}"),
    (
        schedule,
        {"until": [0.5, 20], "phases": 3},
        "until=.*fractions of the run between 0 and 1, or",
    ),
    *((schedule, {"until": end}, "until=.*: must be") for end in ([0], [1.0], [True], 0.5, "half")),
    (OneBitAdam, {"betas": (0.9, 1.0)}, r"betas=\[0.9, 1.0\]: must be two numbers"),
    (OneBitAdam, {"eps": 0}, "eps=0: must be a number above 0"),
    (OneBitAdam, {"block_size": 4}, "block_size=4: must be an integer of at least 8"),
    (OneBitAdam, {"settle_every": 1}, "settle_every=1: must be an integer of at least 2"),
    (OneBitAdam, {"settle_below": 1}, "settle_below=1: must be a number above 0"),
    (OneBitAdam, {"freeze_at": 0}, "freeze_at=0: must be an integer of at least 1"),
    (OneBitAdam, {"signs_of": "sums"}, "signs_of=sums: allowed: momentum, gradient"),
    (OneBitAdam, {"least_steps": 0}, "least_steps=0: must be an integer of at least 1"),
    (ZeroOneAdam, {"updates_per_interval": 0}, "updates_per_interval=0: must be an integer from 1"),
    (ZeroOneAdam, {"longest_interval": 12}, "longest_interval=12: must be a power of two"),
    (OneBitLamb, {"ratio_range": (2, 10)}, r"ratio_range=\[2, 10\]: must be two numbers above 0"),
    (OneBitLamb, {"factor_range": (0, 4)}, r"factor_range=\[0, 4\]: must be two numbers above 0"),
    (OneBitLamb, {"ratio_decay": 1}, "ratio_decay=1: must be a number of at least 0 and below 1"),
    (OneBitLamb, {"factor_change": -1}, "factor_change=-1: must be a number of at least 0"),
    (Muon, {"momentum": 1.0}, "momentum=1.0: must be a number of at least 0 and below 1"),
    (Muon, {"nesterov": 1}, "nesterov=1: must be true or false"),
    (Muon, {"steps": 0}, "steps=0: must be an integer of at least 1"),
    (Muon, {"dtype": "fp8"}, "dtype=fp8: allowed: auto, bfloat16, float32"),
    (Muon, {"adam": "head.*"}, r"adam=head\.\*: must be a list of parameter names"),
    (Muon, {"matrices": [3]}, r"matrices=\[3\]: must be a list"),
    (Muon, {"adam": None}, "adam=None: must be a list"),
    (Dion, {"rank_fraction": 0.0}, "rank_fraction=0.0: must be a number above 0 and at most 1"),
    (Dion, {"momentum": 1.0}, "momentum=1.0: must be a number of at least 0 and below 1"),
    (Dion, {"betas": [0.9]}, "betas="),
    (Muon, {"betas": None}, "betas=null: must be a list"),
    (OneBitAdam, {"betas": ["a", "b"]}, "betas=.*: must be two numbers"),
    (OneBitLamb, {"ratio_range": 1}, "ratio_range=1: must be a list"),
    (OneBitLamb, {"factor_range": [1]}, r"factor_range=\[1\]: must be two numbers"),
    (OneBitLamb, {"factor_range": ["a", 4]}, "factor_range=.*: must be two numbers"),
    (ZeroOneAdam, {"updates_per_interval": 10**9}, "updates_per_interval=1000000000: must be"),
]


@pytest.mark.parametrize(("make", "settings", "message"), REFUSED)
def test_settings_out_of_range_are_refused_in_a_line(
    make: Callable[..., Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"^exchange.{message}.*\Z"):
        make(**settings)

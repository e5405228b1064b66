"""Published throughput over ranks: one entry of a file of conf/claims makes a claim per point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def expand(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the claims of one entry of `series`.

    One rank's figure made the profile, so it is calibrated; the others claim a speedup of weak
    scaling.

    Args:
        entry: `says`, `source`, `strategy`, `profile`, `per_rank_batch_size`, `within`, and
            `samples_per_s` by number of ranks, one rank first.

    Raises:
        KeyError: one of these is missing.
    """
    rates = dict(entry["samples_per_s"])
    alone = rates.pop(1)
    common = {"source": entry["source"]}
    at = {"profile": entry["profile"]}
    batch_size = entry["per_rank_batch_size"]
    yield {
        **common,
        "says": f"{entry['says']}: one GPU trains {alone} images/s",
        "kind": "calibrated",
        "quantity": "samples_per_s",
        "at": {**at, "strategy": "none", "world_size": 1, "batch_size": batch_size},
        "published": alone,
        "check": {"about": alone, "within": 0.02},
    }
    for world_size, rate in rates.items():
        speedup = rate / alone
        yield {
            **common,
            "says": f"{entry['says']}: {world_size} GPUs {rate}, {speedup:.2f} times as many",
            "kind": "emergent",
            "quantity": "weak_speedup",
            "at": {
                **at,
                "strategy": entry["strategy"],
                "world_size": world_size,
                "batch_size": world_size * batch_size,
            },
            "published": speedup,
            "check": {"about": speedup, "within": entry["within"]},
        }

"""Random models for some seconds; `make fuzz` has two thousand."""

from __future__ import annotations

import time

from tests.zoo.drive import BAD, REFUSED, RIGHT, Driver, random_cases

SECONDS = 4.0
LEAST = 8  # cases that must have been judged by then


def test_random_models_are_right_or_refused() -> None:
    driver, until = Driver(), time.monotonic() + SECONDS
    kinds: list[str] = []
    faults: list[str] = []
    for case in random_cases(1000, seed=7000):
        outcome = driver.outcome(case)
        kinds.append(outcome.kind)
        if outcome.kind in BAD:
            faults.append(f"{case}: {outcome.kind}: {outcome.said}")
        if time.monotonic() > until and len(kinds) >= LEAST:
            break
    driver.close()
    assert faults == []
    assert kinds.count(RIGHT) + kinds.count(REFUSED) >= LEAST / 2

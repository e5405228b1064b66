"""The zoo's product: `python -m tests.zoo [KEY=NAMES ...] [out=FILE]`, and its fuzzer.

    python -m tests.zoo                                all
    python -m tests.zoo model=mlp,images loop=plain    all of these; also exchange=, entrance=
    python -m tests.zoo fuzz num=2000 seed=0           random models, loops, exchanges, entrances

Faults are printed as they are found and go to OUT, a line each with the words that repeat it; what
the processes print goes to a file beside it that ends in `.log`. Without names, all models meet all
exchanges in the plain loop among threads, and a fixed part of all other combinations is drawn.
Returns 1 if anything is wrong, crashed or misleading.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lab.draw.text import markdown
from tests.support.commands import divert
from tests.zoo import fuzz
from tests.zoo.drive import (
    BAD,
    ENTRANCES,
    EXCHANGES,
    REFUSED,
    RIGHT,
    SKIPPED,
    SYNCS,
    Case,
    Driver,
    Outcome,
    random_cases,
    whole_product,
)
from tests.zoo.loops import LOOPS
from tests.zoo.models import MODELS

WORKERS = 2
EVERY_S = 30.0  # between two lines of progress
NAMES: dict[str, Iterable[str]] = {
    "model": MODELS,
    "loop": LOOPS,
    "exchange": [*EXCHANGES, *SYNCS],
    "entrance": ENTRANCES,
}
Judged = tuple[Case, Outcome]


def main(words: list[str]) -> int:
    """Run the product or the fuzzer, print the table, and return 1 if there is a fault."""
    is_fuzz = words[:1] == ["fuzz"]
    given = {key: value for key, _, value in (word.partition("=") for word in words[is_fuzz:])}
    out = Path(given.pop("out", "zoo.txt"))
    allowed = ("num", "seed") if is_fuzz else tuple(NAMES)
    for key, value in given.items():
        known = value.isdecimal() if is_fuzz else set(value.split(",")) <= set(NAMES.get(key, ()))
        if key not in allowed or not known:
            print(f"{key}={value}: allowed: {', '.join(allowed)}, out=FILE", file=sys.stderr)
            return 2
    if is_fuzz:
        cases = random_cases(int(given.get("num", 2000)), int(given.get("seed", 0)))
    else:
        cases = whole_product({key: value.split(",") for key, value in given.items()})
    divert(out.with_suffix(".log"))
    judged = run_all(cases, out)
    print(table(judged))
    return int(any(outcome.kind in BAD for _, outcome in judged))


def run_all(cases: list[Case], out: Path) -> list[Judged]:
    """Run all cases, some at a time; print progress and faults."""
    progress, lock, began = [0, time.monotonic()], threading.Lock(), time.monotonic()
    local, drivers = threading.local(), list[Driver]()

    def run(case: Case) -> Judged:
        if not hasattr(local, "driver"):
            local.driver = Driver()
            drivers.append(local.driver)
        outcome = local.driver.outcome(case)
        with lock:
            progress[0] += 1
            if outcome.kind in BAD:
                kind, _, number = case.model.partition(":")
                plan = f" [{fuzz.describe(int(number))}]" if kind == "fuzz" else ""
                line = f"{outcome.kind}: {case}: {outcome.said}{plan}"
                print(line)
                file.write(line + "\n")
                file.flush()
            if time.monotonic() - progress[1] > EVERY_S:
                progress[1] = time.monotonic()
                print(f"{progress[0]} of {len(cases)} done, {progress[1] - began:.0f} s")
        return case, outcome

    with out.open("w") as file, ThreadPoolExecutor(WORKERS) as pool:
        judged = list(pool.map(run, cases))
    for driver in drivers:
        driver.close()
    print(f"{len(cases)} cases in {time.monotonic() - began:.0f} s")
    return judged


def table(judged: list[Judged]) -> str:
    """Count outcomes by entrance, by exchange, by loop and by model, as Markdown."""
    kinds = (RIGHT, REFUSED, *BAD, SKIPPED)
    rows: list[list[str]] = []
    keys: list[tuple[str, Callable[[Case], str]]] = [
        ("entrance", lambda case: case.entrance),
        ("exchange", lambda case: case.exchange),
        ("loop", lambda case: case.loop),
        ("model", lambda case: case.model.partition(":")[0]),
        ("all", lambda _: ""),
    ]
    for key, of in keys:
        counts: dict[str, Counter[str]] = {}
        for case, outcome in judged:
            counts.setdefault(of(case), Counter())[outcome.kind] += 1
        for name, found in sorted(counts.items()):
            numbers = (found.total(), *(found[kind] for kind in kinds))
            rows.append([f"{key} {name}", *map(str, numbers)])
    return "\n".join(markdown(["", "cases", *kinds], rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Resume a run under other settings: it goes on, or a line says what does not fit and why."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from tests.attack.outcome import REFUSED, SURVIVED, Attempt
from tests.support import ranks
from tests.support.cases import RESUMED, STRATEGIES

BEFORE = ("data.size=16", "batch_size=24", "optim.lr=0.01", "warmup_steps=1", "steps=4")
SAVED = "checkpoint_every=4"
OTHERS = (
    (),
    ("batch_size=48",),
    ("optim=adamw",),
    ("optim.momentum=0.5",),
    ("precision=bf16",),
    ("accumulate=2",),
    ("bucket_mb=0.01",),
    ("model=mlp",),
    ("data.size=8",),
    ("measure=breakdown",),
    ("transform=fc1x1",),
)


def attack(seed: int, count: int, folder: Path) -> Iterator[Attempt]:
    """Resume `count` runs under another strategy, number of ranks and setting."""
    for number in range(count):
        chance = random.Random(f"changes {seed} {number}")
        before, after = chance.choice(STRATEGIES), chance.choice(STRATEGIES)
        sizes = chance.choice((1, 2, 3)), chance.choice((1, 2, 3))
        yield changed(before, after, sizes, chance.choice(OTHERS), folder.resolve())


def changed(
    before: str, after: str, sizes: tuple[int, int], more: tuple[str, ...], folder: Path
) -> Attempt:
    """Train four steps in one way, and four more in another."""
    what = f"{before} on {sizes[0]} -> {after} on {sizes[1]} {' '.join(more)}"
    place = f"runs_dir={folder}/{before}-{sizes[0]}"
    first = (f"strategy={before}", *RESUMED.get(before, ()), *BEFORE, SAVED, place, "cell=a")
    ranks.train_once(sizes[0], *first)
    checkpoint = folder / f"{before}-{sizes[0]}/default/a/checkpoints/step_000004"
    then = (f"strategy={after}", *RESUMED.get(after, ()), *BEFORE, "steps=8", *more)
    try:
        outcomes = ranks.train(sizes[1], *then, f"resume={checkpoint}", f"runs_dir={folder}/after")
    except AssertionError as error:
        lines = str(error).rstrip().splitlines()
        named = lines[-1].startswith("lab.settings.errors.ConfigError: ")
        return Attempt("change", what, REFUSED if named else "traceback", lines[-1][-300:])
    except ValueError as error:  # refused when composed, before any rank
        return Attempt("change", what, REFUSED, str(error))
    if all(outcome.code == 0 and outcome.record["num_steps"] == 8 for outcome in outcomes):
        return Attempt("change", what, SURVIVED)
    return Attempt("change", what, "lost", str(outcomes[0].record["error"]))

"""Odd gradients and data: a run is right, or says in one line what is wrong.

A gradient that is not finite must never pass in silence; zero gradients must move no weight.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from tests.attack import odd
from tests.attack.outcome import REFUSED, SURVIVED, Attempt
from tests.support import ranks
from tests.support.cases import RESUMED, STRATEGIES

SIZE, STEPS = 3, 8
RUN = (
    *("device=cpu", "batch_size=24", "optim.lr=0.01", "optim.weight_decay=0"),
    *(f"steps={STEPS}", "warmup_steps=1", "exchange_timeout_s=60", "cell=a"),
)
PRECISIONS = ("fp32", "fp32", "fp16", "bf16")
IMAGES = {
    "images of other sizes": (((40, 30), (1, 1), (300, 7)), -1),
    "a corrupt image": (((40, 30),), 17),
}


def attack(seed: int, count: int, folder: Path) -> Iterator[Attempt]:
    """Run with `count` odd models, and with all odd data; yield what came of each."""
    folder = folder.resolve()
    folder.mkdir(parents=True)
    cases = list(product(STRATEGIES, odd.KINDS))
    random.Random(f"numbers {seed}").shuffle(cases)
    for number, (strategy, kind) in enumerate(cases[:count]):
        precision = PRECISIONS[number % len(PRECISIONS)]
        model = ("model._target_=tests.attack.odd.Odd", f"+model.kind={kind}", "data.size=16")
        more = (*model, *RESUMED.get(strategy, ()), f"precision={precision}")
        yield tried(f"{strategy} {precision}: {kind}", kind, strategy, more, folder)
    for strategy, kind in product(("allreduce", "onebit"), odd.DATA):
        yield tried(f"{strategy}: {kind}", kind, strategy, of_data(kind), folder)
    for kind, (sizes, corrupt) in IMAGES.items():
        odd.write_images(folder / kind, sizes, corrupt)
        more = ("data=imagefolder", f"data.path={folder / kind}", "data.size=16", "data.workers=0")
        yield tried(kind, kind, "onebit", more, folder)


def of_data(kind: str) -> tuple[str, ...]:
    """Return the settings of odd data."""
    return "data._target_=tests.attack.odd.data", f"+data.kind={kind}", "~data.size"


def tried(what: str, kind: str, strategy: str, more: tuple[str, ...], folder: Path) -> Attempt:
    """Train a few steps, and judge weights and messages."""
    judged = partial(Attempt, "numbers", what)
    shutil.rmtree(folder / "runs", ignore_errors=True)
    try:
        outcomes = ranks.train(SIZE, f"strategy={strategy}", *RUN, *more, f"runs_dir={folder}/runs")
    except (AssertionError, ValueError) as error:
        return judged(*_refused(str(error), folder))
    first = outcomes[0]
    if any(outcome.code for outcome in outcomes):
        return judged(REFUSED if first.record["error"] else "silent", str(first.record["error"]))
    weights = [value for outcome in outcomes for value in outcome.weights.values()]
    if not all(torch.isfinite(value).all() for value in weights):
        return judged("silent", "weights are not finite, and nothing is said")
    if kind in odd.BAD and not first.record["num_skipped_steps"]:  # which fp16 does
        return judged("silent", "the gradient was not finite, and nothing is said")
    if kind == "zero" and (moved := _moved(first.weights)) > 0:
        return judged("lost", f"zero gradients moved a weight by {moved}")
    return judged(SURVIVED, "")


def _refused(message: str, folder: Path) -> tuple[str, str]:
    """Return the outcome of a run that raised: its record or its last line must say why."""
    record = folder / "runs/default/a/record.json"
    if record.exists() and (error := json.loads(record.read_text())["error"]):
        return REFUSED, error
    last = message.rstrip().splitlines()[-1]
    named = "Traceback" not in message or last.startswith("lab.settings.errors.ConfigError: ")
    return (REFUSED if named else "traceback"), last[-300:]


def _moved(weights: dict[str, Tensor]) -> float:
    """Return the largest change of a weight."""
    begun = odd.Odd(input_shape=(1, 16, 16), output_size=10, kind="zero").state_dict()
    return max(float((value - begun[name]).abs().max()) for name, value in weights.items())

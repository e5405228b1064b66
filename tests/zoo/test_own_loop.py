"""What docs/reference/own_loop.md says works in a loop of one's own: the same bits, or up to 1e-6.

Two ranks train a model of the zoo by DDP alone, by its hook and by lab.grad_sync.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.conftest import ROOT
from tests.support.ranks import Crew
from tests.support.slow import some_of
from tests.zoo.drive import EXCHANGES, Case, run_rank

# The rows of the page's table, each with a model and a loop.
ROWS = {
    "a plain training loop": ("mlp", "plain"),
    "several buckets": ("buckets", "plain"),
    "`no_sync`, accumulation": ("mlp", "accumulated"),
    "several optimizers": ("mlp", "two_optimizers"),
    "clipping": ("mlp", "skipped_steps"),
    "`GradScaler`": ("buckets", "skipped_steps"),
    "autocast to bfloat16": ("autocast", "plain"),
    "tied weights": ("tiedmodules", "plain"),
    "frozen weights": ("unusedhead", "refrozen"),
    "`find_unused_parameters=True`": ("sometimesused", "plain"),
    "`static_graph=True`": ("recomputed_twice", "plain"),
    "`gradient_as_bucket_view=True`": ("buckets", "accumulated"),
    "`torch.compile`": ("compiled", "plain"),
    "weights in bfloat16, float16": ("mixed_bits", "plain"),
    "weights in another memory order": ("channels_last", "plain"),
}
# Rows that other cases of the zoo hold, or tests/distributed/test_own_loop*.py.
ELSEWHERE = (
    *("a process group of some ranks", "resuming", "`ddp.join()`, uneven inputs", "float64"),
    *(
        "complex64",
        "reentrant activation checkpointing",
        "double backward",
        "GANs, discarded gradients",
    ),
    "SAM, two backward passes per step",
)
# Blocks of int8 and int4 follow the buckets, auto decides by the clock, schedule by the step.
ANY = [name for name in EXCHANGES if name not in ("int8", "int4", "auto", "schedule")]


@dataclass(frozen=True)
class Alike(Case):
    """A case whose settings do not depend on its name."""

    @property
    def overrides(self) -> dict[str, Any]:
        return {} if self.entrance == "attach" else {"overlap": True, "bucket_mb": 0.02}


def trained(cases: list[Case]) -> list[dict[str, Tensor]]:
    """Train as one of two ranks in each way; return the weights."""
    dist.init_process_group("gloo")
    results = [run_rank(case, dist.get_rank(), None, None) for case in cases]
    dist.destroy_process_group()
    assert [str(result.error) for result in results if result.error] == []
    return [result.weights[0] for result in results]


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """Processes of their own: the zoo replaces parts of the lab."""
    made = Crew()
    yield made
    made.dismiss()


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference between two states of a model."""
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("row", some_of(ROWS, every=3))
def test_a_loop_of_ones_own_works(row: str, crew: Crew) -> None:
    ways = [("allreduce", "attach"), ("onebit", "attach"), ("onebit", "gloo")]
    model, loop = ROWS[row]
    plain = Alike(model, loop, "allreduce", "attach", plain=True)
    first, second = crew.call(2, trained, [plain, *(Alike(model, loop, *way) for way in ways)])
    assert all(apart(one, other) == 0 for one, other in zip(first, second, strict=True))
    alone, exact, hook, sync = first
    assert apart(alone, exact) == 0
    assert apart(hook, sync) <= 1e-6
    assert apart(hook, alone) > 1e-4


def test_the_document_has_a_row_for_each_case_and_no_other() -> None:
    text = (ROOT / "docs/reference/own_loop.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| works \|", text.partition("\n#")[0], re.MULTILINE)
    assert set(rows) == {*ROWS, *ELSEWHERE}


@pytest.mark.parametrize("exchange", some_of(ANY, every=9))
def test_any_buckets_and_a_resume_give_the_same_bits(exchange: str, crew: Crew) -> None:
    ways = [("plain", "attach"), ("plain", "gloo"), ("resumed", "attach"), ("resumed", "gloo")]
    cases = [Alike("buckets", loop, exchange, entrance) for loop, entrance in ways]
    for hook, *others in crew.call(2, trained, cases):
        assert [apart(hook, other) for other in others] == [0.0] * 3

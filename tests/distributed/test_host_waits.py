"""No step makes the host wait for the device, with any strategy: checked on a CPU as a mock GPU.

Exchanges run where they are submitted, in hooks within backward, as NCCL's do on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from omegaconf import DictConfig

from lab.codec import build
from lab.distributed import world as worlds
from lab.distributed.worker import InlineWorker
from lab.distributed.world import World
from lab.settings.config import load
from lab.training import assemble
from lab.training.assemble import assembled
from tests.support.cases import STRATEGIES
from tests.support.guard import Guard, Wait
from tests.support.ranks import join, spawn

# All cases run in one process for each rank.
pytestmark = pytest.mark.xdist_group("host waits")

Guarded = Callable[[], AbstractContextManager[None]]
RUN = ("device=cpu", "data.size=16", "batch_size=24", "optim.lr=0.01", "steps=12", "warmup_steps=2")
FREE_STEPS, STEPS = 7, 4  # in the first, buckets are planned and `auto` decides
MORE = {
    "local_sgd": ("sync.every=2",),
    "priority": ("sync.trials=0", "sync.chunk_mb=0.05"),
    "diloco": ("sync.every=2",),
    "streaming_diloco": ("sync.every=4", "sync.delay=2"),
    "des_loc": ("sync.every=2", "sync.first_every=3", "sync.second_every=6"),
    "onebit_adam": ("exchange.freeze_at=4",),
    "onebit_lamb": ("exchange.freeze_at=4",),
    "zero_one_adam": ("exchange.updates_per_interval=1", "exchange.longest_interval=2"),
}
# All strategies over torch; Horovod's own optimizer waits for its thread.
CASES = {name: (f"strategy={name}", *MORE.get(name, ())) for name in STRATEGIES} | {
    "cntk, double buffer": ("strategy=cntk", "sync.double_buffer=true"),
    "clipped": ("strategy=onebit", "clip_grad_norm=1", "accumulate=2", "precision=bf16"),
    "adamw": ("strategy=onebit", "optim=adamw", "optim.decay_vectors=false"),
    "settling": ("strategy=onebit_adam", "exchange.settle_every=2", "exchange.least_steps=99"),
    "precision=fp16": ("strategy=onebit", "precision=fp16"),
}
# Places that may wait, and why.
MAY_WAIT = {
    "lab/training/trainer.py gradients_finite": "fp16: the host must know whether to update",
}


def steps(config: DictConfig, world: World, guarded: Guarded) -> None:
    """Train for some steps, the last of them within `guarded()`."""
    with assembled(config, world) as part:
        loop = part.trainer.steps()
        for _ in range(FREE_STEPS):
            next(loop)
        for _ in range(STEPS):
            with guarded():
                next(loop)


def waits_in_steps(configs: dict[str, DictConfig]) -> dict[str, list[Wait]]:
    """Return by case the waits in steps after the first ones, of some cases."""
    assemble.make_worker = lambda *_, **__: InlineWorker()
    build.load = lambda *_: None  # codecs are plain torch, as on GPUs
    world, found = join(), {}
    for name, config in configs.items():
        with Guard() as guard:
            steps(config, world, guard.step)
        found[name] = guard.waits
    worlds.stop()
    return found


@pytest.fixture(scope="module", params=[8, pytest.param(1, marks=pytest.mark.slow)])
def waits(request: pytest.FixtureRequest) -> dict[str, list[Wait]]:
    some = {*[*CASES][:: request.param], "precision=fp16"}  # the last may wait
    configs = {name: load([*RUN, *CASES[name]]) for name in sorted(some)}
    return spawn(2, waits_in_steps, configs)[0]


def test_the_host_waits_for_nothing_in_a_step(waits: dict[str, list[Wait]]) -> None:
    found = {n: [str(w) for w in each if w.place not in MAY_WAIT] for n, each in waits.items()}
    assert {name: each for name, each in found.items() if each} == {}


def test_what_may_wait_still_does(waits: dict[str, list[Wait]]) -> None:
    assert {wait.place for found in waits.values() for wait in found} >= MAY_WAIT.keys()

"""The drift alarm: silent on every sound exchange, loud on planted faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from torch import nn

from lab.distributed.comm import Collective, Comm, run_ranks
from lab.distributed.worker import InlineWorker, TurnsWorker
from lab.exchange.allreduce import AllReduce
from lab.exchange.base import Exchange
from lab.exchange.bucket import GradBucket
from lab.exchange.compressed import OneBit, TopK
from lab.settings.config import build, load
from lab.settings.errors import ConfigError
from lab.sync.drift import LIMIT, Drift
from lab.sync.gradsync import GradSync
from lab.training.assemble import observe_drift
from tests.support.cases import COMPRESSES_LITTLE, DIRECTIONS, EXCHANGES, bytes_per_value, maker
from tests.support.slow import some_of
from tests.support.steps import made, take_steps

SHAPES = {"fc": torch.Size((12, 70)), "bias": torch.Size((12,)), "conv": torch.Size((6, 5, 3, 3))}
NUM_VALUES = sum(shape.numel() for shape in SHAPES.values())
EVERY = 4
SENDING = [e for e in EXCHANGES if bytes_per_value(e) > 0 and e not in DIRECTIONS]
Make = Callable[[], Exchange]


one_bit = partial(OneBit, min_columns=1)


def windows_of(make: Make, size: int, num_steps: int = 3 * EVERY) -> list[dict[str, Any]]:
    """Exchange two buckets of random gradients; return what rank 0 found."""
    gradients = torch.randn(num_steps, 2, size, NUM_VALUES)

    def rank_main(comm: Comm) -> list[dict[str, Any]]:
        exchange = make()
        drift = Drift(exchange, comm, InlineWorker(), EVERY)
        for step, both in enumerate(gradients):
            for number, of_ranks in enumerate(both):
                shapes = {f"{number}.{name}": shape for name, shape in SHAPES.items()}
                bucket = GradBucket(shapes, of_ranks[comm.rank].clone(), step)
                drift.before(bucket)
                exchange.average(bucket, comm)
                drift.after(bucket)
            drift.end_step()
        return drift.results()

    results = run_ranks(size, rank_main)
    assert all(found == results[0] for found in results)
    return results[0]


@pytest.mark.parametrize("size", some_of([1, 2, 3], every=3))
@pytest.mark.parametrize("exchange", SENDING)
def test_no_sound_exchange_alarms(exchange: str, size: int) -> None:
    make = maker(exchange, *COMPRESSES_LITTLE.get(exchange, ()))
    windows = windows_of(make, size)
    assert [window["step"] for window in windows] == [3, 7, 11]
    assert [window["bucket"][0] for window in windows] == ["0", "1", "0"]  # they take turns
    for window in windows:
        assert not window["alarm"]
        assert window["error"] < LIMIT / 2
        assert window["cosine"] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("make", [one_bit, lambda: TopK(0.01)])
def test_error_feedback_leaves_rounding_alone(make: Make) -> None:
    assert all(window["error"] < 1e-4 for window in windows_of(make, 3))


class WrongScale(OneBit):
    """Its decoder multiplies by 2, of which its residuals know nothing."""

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        yield from super().stages(bucket, comm)
        bucket.flat *= 2


class ShiftedRows(OneBit):
    """Decoded rows of one matrix end in the next row's place."""

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        yield from super().stages(bucket, comm)
        first = self.layout(bucket, 1).pieces[0]
        rows = bucket.flat[first.start : first.stop].view(first.rows, first.columns)
        rows.copy_(rows.roll(1, dims=0))


class LosesResidual(OneBit):
    """Forgets its residuals after each exchange."""

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        yield from super().stages(bucket, comm)
        for _, _, values in self.memory.residuals():
            values.zero_()


FAULTS: dict[str, Make] = {
    "scale": partial(WrongScale, min_columns=1),
    "rows": partial(ShiftedRows, min_columns=1),
    "residual": partial(LosesResidual, min_columns=1),
    "no feedback": partial(one_bit, error_feedback=False),
    "no feedback of topk": lambda: TopK(0.05, error_feedback=False),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault: str, size: int) -> None:
    windows = windows_of(FAULTS[fault], size)
    assert all(window["alarm"] for window in windows)
    assert min(window["error"] for window in windows) > 2.5 * LIMIT


def test_one_line_names_the_bucket_and_the_numbers() -> None:
    message = (
        r"exchange=WrongScale: drift in bucket 0.fc and 2 more: the values delivered in the 4 "
        r"exchanges up to step 3 differ from the exact ones by \d+\.\d% \(cosine [\d.]+\)"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        assert sum(window["alarm"] for window in windows_of(FAULTS["scale"], 2)) == 3
    assert len(caught) == 1  # of one rank, and of the first alarm


@pytest.mark.parametrize("size", [1, 2])
def test_a_layer_that_some_steps_use_alarms_nobody(size: int) -> None:
    """Where no rank reached it, its residual is put back, and what was delivered taken away."""

    def rank_main(comm: Comm) -> list[dict[str, Any]]:
        torch.manual_seed(0)
        net = nn.ModuleList([nn.Linear(40, 30), nn.Linear(40, 30)])
        sync = made(GradSync, net, comm, TopK(0.05))
        sync.observe_drift(EVERY)
        with sync:
            for step in range(3 * EVERY):
                net.zero_grad()
                used = net if step % 3 == 0 else net[:1]
                torch.stack([layer(torch.randn(4, 40)) for layer in used]).sum().backward()
                sync.finish()
        return sync.drift_found() or []

    windows = run_ranks(size, rank_main)[0]
    assert [window["step"] for window in windows] == [3, 7, 11]
    assert all(window["error"] < 1e-4 for window in windows)


def train(config: DictConfig, exchange: Exchange, comm: Comm, model: nn.Module) -> list[Any]:
    """Train a little with a strategy's sync; return the windows."""
    of_run = {"overlap": config.overlap, "bucket_mb": 1e-3}
    sync = made(partial(build, config.sync), model, comm, exchange, TurnsWorker(), **of_run)
    observe_drift(sync, 2, "fp32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with sync:
        take_steps(sync, optimizer, lambda _: torch.randn(4, 40), range(12), last=11)
        sync.settle()
    return sync.drift.results()


OBSERVED = ("overlap", "onebit", "cntk", "local_sgd", "diloco", "streaming_diloco", "des_loc")


@pytest.mark.parametrize("strategy", OBSERVED)
def test_every_sync_is_observed(strategy: str) -> None:
    models = [nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 5)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    make: Make = AllReduce if strategy in ("overlap", "des_loc") else one_bit
    config = load([f"strategy={strategy}"])
    for key in {"every", "first_every", "second_every"} & {str(key) for key in config.sync}:
        config.sync[key] = 2

    def rank_main(comm: Comm) -> list[dict[str, Any]]:
        return train(config, make(), comm, models[comm.rank])

    for windows in run_ranks(2, rank_main):
        assert len(windows) >= 2
        assert len({window["bucket"] for window in windows}) >= 2
        assert all(window["error"] < 1e-4 for window in windows)


@pytest.mark.parametrize(
    ("settings", "precision", "message"),
    [
        ("strategy=none", "fp32", "needs a strategy that sends the mean"),
        ("strategy=caffe", "fp32", "needs a strategy that sends the mean"),
        ("strategy=priority", "fp32", "sync=PrioritySync .* overlap=false"),
        ("strategy=allreduce", "fp16", "drift cannot be measured with precision=fp16"),
    ],
)
def test_where_no_mean_reaches_all_ranks_in_its_step_it_is_refused(
    settings: str, precision: str, message: str
) -> None:
    config, model = load([settings]), nn.Linear(4, 3)

    def rank_main(comm: Comm) -> None:
        kind, exchange = partial(build, config.sync), build(config.exchange)
        sync = made(kind, model, comm, exchange, overlap=config.overlap)
        observe_drift(sync, 5, precision)

    with pytest.raises(ConfigError, match=f"drift_every=5: {message}"):
        run_ranks(1, rank_main)

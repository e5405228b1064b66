"""The classes of the guide "Write your own codec, exchange or sync", as it prints them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.codec.layout import spans
from lab.distributed.comm import Comm, run_ranks
from lab.exchange.bucket import GradBucket
from lab.exchange.compressed import AllGather, TwoStage
from lab.exchange.memory import Memory
from lab.settings.own_code import callable_at
from tests.conftest import ROOT
from tests.unit.conventions.test_docs import check

PAGE = (ROOT / "docs/how-to/own_exchange.md").read_text()
BLOCKS = re.findall(r"^```python\n# mine\.py.*?\n(.*?)^```$", PAGE, re.M | re.S)
COMMANDS = [
    (name, line)
    for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S)
    for line in block.splitlines()
    for name in re.findall(r"lab\.\w+", line)[:1]
    if name != "lab.plot"  # which needs a study's folder
]
SHAPES = {"w": torch.Size((40, 50)), "b": torch.Size((40,))}
NUM_VALUES = 2040


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the guide's file, as the module `mine` of the current folder."""
    (tmp_path / "mine.py").write_text("\n\n".join(BLOCKS))
    monkeypatch.chdir(tmp_path)
    paths = list(sys.path)
    callable_at("mine.Ternary", "codec=mine.Ternary")
    yield sys.modules.pop("mine")
    sys.path[:] = paths


def trained(exchange: Any, comm: Comm, steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of some steps, and what was delivered."""
    bucket, given, delivered = GradBucket(dict(SHAPES), torch.empty(NUM_VALUES)), [], []
    for bucket.step in range(steps):
        chance = torch.Generator().manual_seed(10 * comm.rank + bucket.step)
        given.append(bucket.flat.normal_(generator=chance).clone())
        exchange.average(bucket, comm)
        delivered.append(bucket.flat.clone())
    return given, delivered


def test_ternary_delivers_each_gradient_in_time_and_the_same_in_every_run(mine: Any) -> None:
    def rank_main(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        exchange = TwoStage(mine.Ternary(block_size=256), Memory())
        given, delivered = trained(exchange, comm, 5)
        kept = torch.zeros(NUM_VALUES)
        at = {name: start for name, start, _ in spans(SHAPES)}
        for name, first, values in exchange.residuals(SHAPES, comm):
            kept[at[name] + first :][: len(values)] += values
        return torch.stack(given).sum(dim=0), torch.stack(delivered).sum(dim=0), kept

    given, delivered, kept = zip(*run_ranks(3, rank_main), strict=True)
    torch.testing.assert_close(3 * delivered[0] + sum(kept), sum(given), atol=1e-4, rtol=0)
    assert torch.equal(run_ranks(3, rank_main)[0][1], delivered[0])


def test_ternary_sends_no_value_but_three_and_is_right_on_average(mine: Any) -> None:
    codec, values = mine.Ternary(), torch.randn(4, 63)
    mean = torch.zeros_like(values)
    for shift in range(500):  # other values, so another draw
        header, payload = torch.empty(4, 4).byte(), torch.empty(4, 16).byte()
        codec.write(values + shift * 1e-7, header, payload)
        read = codec.read(header, payload, 63)
        mean += read / 500
        assert all(len(row.unique()) <= 3 for row in read)
    assert (mean - values).abs().max() < 0.3


def test_dgc_sends_what_its_paper_says(mine: Any) -> None:
    """Lin et al. 2018, algorithm 4, of one tensor on each of two ranks."""

    def rank_main(comm: Comm) -> Any:
        return (*trained(exchange := mine.DGC(ratio=0.1), comm, 6), exchange)

    results = run_ranks(2, rank_main)
    velocity, total = torch.zeros(2, NUM_VALUES), torch.zeros(2, NUM_VALUES)
    for step in range(6):
        expected = torch.zeros(NUM_VALUES)
        for rank in range(2):
            velocity[rank] = 0.9 * velocity[rank] + results[rank][0][step]
            total[rank] += velocity[rank]
            for _, start, stop in spans(SHAPES):
                own = total[rank, start:stop]
                chosen = start + own.abs().topk(-(-(stop - start) // 10)).indices
                expected[chosen] += total[rank, chosen] / 2
                velocity[rank, chosen] = total[rank, chosen] = 0
        torch.testing.assert_close(results[0][1][step], expected)
    states = [result[2].state_dict() for result in results]
    other = mine.DGC(ratio=0.1)
    other.load_state_dict(other.redistribute(states, 0, 3))
    torch.testing.assert_close(other.velocity["w"], velocity[:, :2000].mean(dim=0))


def test_vote_tells_all_ranks_of_a_gradient_that_is_not_finite(mine: Any) -> None:
    def rank_main(comm: Comm) -> Tensor:
        bucket = GradBucket(dict(SHAPES), torch.ones(NUM_VALUES))
        bucket.flat[7] = torch.inf if comm.rank else 1.0
        mine.Vote().average(bucket, comm)
        return bucket.flat.isfinite()

    for finite in run_ranks(2, rank_main):
        assert finite.tolist() == [place != 7 for place in range(NUM_VALUES)]


def test_its_commands_are_accepted(mine: Any) -> None:
    assert len(COMMANDS) == 7
    for name, line in COMMANDS:
        check(name, line)
    given, delivered = run_ranks(1, lambda comm: trained(mine.Vote(scale=0.5), comm, 40))[0]
    left = torch.stack(given).sum(dim=0) - torch.stack(delivered).sum(dim=0)
    assert left.abs().mean() < 5  # what it keeps does not grow
    AllGather(mine.Ternary(), Memory())

"""Every exchange of conf/exchange against its own card, as threads of this process."""

from __future__ import annotations

import pytest
import torch

from lab.distributed.comm import Comm
from lab.distributed.thread_comm import run_ranks
from lab.exchange.bucket import GradBucket
from lab.settings.config import build, load
from lab.simulate.costs import extra_bytes, payload_bytes
from lab.simulate.load import Sizes
from lab.simulate.network import Network
from tests.support.cases import EXCHANGES, LINKS, REPEATABLE, exchange_settings

SHAPE = torch.Size((384, 2048))  # 2, 3, 4 and 8 ranks share it equally, in whole lines of a message


def exchange_once(exchange: str, size: int) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """Return gradients, each rank's result, and the bytes that the busiest rank sent."""
    node = load([f"exchange={exchange}"]).exchange  # Hydra composes only in one thread
    gradients = [torch.randn(SHAPE.numel()) for _ in range(size)]

    def rank_main(comm: Comm) -> tuple[torch.Tensor, int]:
        bucket = GradBucket({"w": SHAPE}, gradients[comm.rank].clone())
        build(node).average(bucket, comm)
        return bucket.flat, comm.traffic.payload_bytes

    means, payloads = zip(*run_ranks(size, rank_main), strict=True)
    return gradients, list(means), max(payloads)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("exchange", REPEATABLE)
def test_sends_what_its_card_says_and_leaves_all_ranks_the_same(exchange: str, size: int) -> None:
    gradients, means, payload = exchange_once(exchange, size)
    expected = payload_bytes([tuple(SHAPE)], exchange_settings(exchange), Network(LINKS, size))
    assert payload == pytest.approx(expected, rel=0.01, abs=64)
    assert all(torch.equal(mean, means[0]) for mean in means)
    if build(load([f"exchange={exchange}"]).exchange).exact:
        truth = torch.stack(gradients).double().mean(dim=0)
        torch.testing.assert_close(means[0].double(), truth, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_memory_grows_with_the_model_and_holds_gathered_gradients(exchange: str) -> None:
    settings = exchange_settings(exchange)
    for rank in range(3):
        small, large = (
            extra_bytes(Sizes(n, n // 2, n // 4, rank, 3), settings) for n in (10**6, 10**7)
        )
        assert 4 * 10**6 // 2 <= small < large

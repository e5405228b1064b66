"""Bytes: what is compared with what, and when an interface's count means nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab.certificate.examination import Examination
from lab.certificate.traffic import SLACK_BYTES, ExchangeTraffic, Ledger, formula_bytes, moved
from tests.support.cases import EXCHANGES, exchange_settings

MB = 1_000_000
# payload; lo before, all before; lo after, all after; namespace; host
ONE_PLACE = [[MB, 5, 50, 2 * MB + 5, 0, 1, 7], [MB, 9, 90, 2 * MB + 5, 0, 1, 7]]
TWO_PLACES = [[MB, 5, 50, 5, MB + 50, 1, 7], [MB, 6, 60, 6, MB + 60, 2, 7]]
TWO_HOSTS = [[MB, 5, 50, 5, MB + 50, 1, 7], [MB, 6, 60, 6, MB + 60, 1, 8]]


@pytest.mark.parametrize(
    ("of_ranks", "backend", "counted", "why"),
    [
        (ONE_PLACE, "gloo", 2 * MB, "lo"),  # ranks of a namespace share its counters
        (TWO_PLACES, "gloo", 2 * MB, "the hosts' interfaces"),  # emulated hosts have their own
        (TWO_HOSTS, "gloo", None, "the hosts' interfaces also carry other traffic"),
        (ONE_PLACE, "nccl", None, "nccl does not have to send over a network interface"),
    ],
)
def test_what_interfaces_counted(
    of_ranks: list[list[int]], backend: str, counted: float | None, why: str
) -> None:
    rows = torch.tensor(of_ranks, dtype=torch.float64)
    assert moved(rows, backend) == ExchangeTraffic((MB, MB), counted, why)


def ledger(*counted: float | None, payload: int = MB) -> Ledger:
    return Ledger(4 * MB, [ExchangeTraffic((payload, payload), each, "lo") for each in counted])


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (8 * MB, "2.0x fewer bytes than fp32 (counted on lo: 2.0x)"),
        (16 * MB, "as many bytes as fp32 (counted on lo: 1.0x)"),
        (24 * MB, "1.5x more bytes than fp32 (counted on lo: 1.5x)"),
    ],
)
def test_bytes_sent_and_counted_are_compared_the_same_way(payload: int, words: str) -> None:
    seen: Any = SimpleNamespace(ledger=ledger(2 * payload, payload=payload))
    assert Examination._bytes(seen)[0] == words


def test_the_least_count_is_nearest_to_the_exchange() -> None:
    found = ledger(9 * MB, 2.02 * MB, 3 * MB)
    ratio, where = found.excess()
    assert (ratio, where) == (pytest.approx(1.01 - SLACK_BYTES / 2 / MB), "lo")
    assert found.factor == pytest.approx(16.0)  # 2 (N-1) 4 n over what both handed over
    assert found.counted_factor == pytest.approx(16 / 1.01)


def test_control_messages_are_spared_but_not_more() -> None:
    assert ledger(2 * MB + SLACK_BYTES).excess()[0] == 1
    assert ledger(3 * MB).excess()[0] == pytest.approx(1.5 - SLACK_BYTES / 2 / MB)
    assert ledger(MB).excess()[0] == pytest.approx(0.5 + SLACK_BYTES / 2 / MB)


def test_few_bytes_are_not_compared() -> None:
    ratio, why = ledger(30_000, payload=10_000).excess()
    assert ratio is None
    assert why == "19.5 KiB is too little"


def test_an_exchange_that_hands_over_nothing_or_too_much_is_a_fault() -> None:
    assert "hook ignored" in str(ledger(0, payload=0).fault(None, 0, True))
    assert ledger(0, payload=0).fault(None, 0, uses_comm=False) is None
    assert ledger(2 * MB).fault(None, 0, True) is None
    assert ledger(2 * MB).fault(0.98 * MB, 0, True) is None
    assert ledger(2 * MB).fault(0.5 * MB, 0.6 * MB, True) is None
    assert "but the formula for this exchange says 500000" in str(
        ledger(2 * MB).fault(0.5 * MB, 0, True)
    )


def test_every_card_gives_a_formula_but_those_that_choose() -> None:
    buckets = [([(512, 256), (256,)], 4), ([(128, 512)], 4)]
    found = {name: formula_bytes(exchange_settings(name), buckets, 4) for name in EXCHANGES}
    assert [name for name, sent in found.items() if sent is None] == ["auto", "schedule"]
    assert found["allreduce"] == pytest.approx(2 * 3 / 4 * 4 * (512 * 256 + 256 + 128 * 512))


@pytest.mark.parametrize(
    "settings", [None, {}, {"_target_": "mine.Gossip"}, {"_target_": "mine.OneBit"}]
)
def test_an_exchange_without_a_card_has_none(settings: dict[str, str] | None) -> None:
    assert formula_bytes(settings, [([(8, 8)], 4)], 2) is None


def test_values_of_two_or_eight_bytes_count_as_such() -> None:
    """Those of a complex number are two."""
    buckets = [([(40, 5)], 2), ([(40, 5), (7, 2)], 8), ([], 4)]
    found = formula_bytes(exchange_settings("allreduce"), buckets, 2)
    assert found == pytest.approx(2 * 200 + 8 * 214)

"""The order in which parts leave, by hand."""

from __future__ import annotations

import pytest

from lab.sync.pattern import send_order

ONE = [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("ready_s", "send_s", "needed", "order"),
    [
        ([0, 1, 2], ONE, [2, 1, 0], [0, 1, 2]),  # the link is free as each one is ready
        ([0, 0, 0], ONE, [2, 0, 1], [1, 2, 0]),  # all are ready: as needed
        ([0, 0, 2.5], ONE, [1, 2, 0], [0, 1, 2]),  # what travels is not interrupted
        ([0, 0, 0.5], ONE, [1, 2, 0], [0, 2, 1]),  # the last overtakes what has not left
        ([5, 7, 0], ONE, [0, 1, 2], [2, 0, 1]),  # a link without work waits
        ([0, 0, 0], ONE, [0, 0, 0], [0, 1, 2]),  # parts of one parameter keep their order
        ([], [], [], []),
    ],
)
def test_the_most_urgent_of_those_ready_leaves(
    ready_s: list[float], send_s: list[float], needed: list[int], order: list[int]
) -> None:
    assert send_order(ready_s, send_s[: len(ready_s)], needed) == order

"""What ranks compare: the line that names what differs."""

from __future__ import annotations

import pytest

from lab.distributed.world import MOST_NAMED, differences, ranks_in_words


def test_equal_facts_give_no_line() -> None:
    assert differences([{"steps": "3"}] * 4) == ""
    assert differences([{"steps": "3"}]) == ""


def test_each_value_is_named_with_its_ranks() -> None:
    stated = [{"batch_size": "24"}, {"batch_size": "24"}, {"batch_size": "48"}]
    assert differences(stated) == (
        "batch_size: 24 on ranks 0-1, 48 on rank 2; must be equal on all ranks"
    )


def test_what_a_rank_does_not_have_is_named() -> None:
    line = differences([{"code.nets_py": "1a2b", "seed": "0"}, {"seed": "0"}])
    assert line.startswith("code.nets_py: 1a2b on rank 0, nothing on rank 1;")


def test_of_many_differences_the_first_are_named_and_the_others_counted() -> None:
    one, other = ({f"key{n}": f"{side}" for n in range(MOST_NAMED + 3)} for side in range(2))
    line = differences([one, other])
    assert line.count(" on rank 0") == MOST_NAMED
    assert "; and 3 more; must be equal" in line


def test_long_values_that_differ_at_their_ends_are_told_apart() -> None:
    line = differences([{"path": "x" * 500 + "a"}, {"path": "x" * 500 + "b"}])
    first, second = line.removeprefix("path: ").split(" on rank 0, ")
    assert len(line) < 300
    assert first != second.partition(" on rank 1")[0]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([3], "rank 3"), ([0, 1, 2], "ranks 0-2"), ([0, 2, 3, 7], "ranks 0, 2-3, 7")],
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert ranks_in_words(ranks) == words

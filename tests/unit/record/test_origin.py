"""A record says which of its steps were made otherwise."""

from __future__ import annotations

from typing import Any

from lab.record.schema import append_stretch, stretches_of


def made(first: int, end: int, **others: Any) -> dict[str, Any]:
    own = {"cell": "s/a", "world_size": 2, "batch_size": 8, "commit": "abc", "settings": {"lr": 1}}
    return {"first_step": first, "end_step": end, **own, **others}


def test_steps_made_alike_are_one_stretch() -> None:
    assert append_stretch([], made(0, 5)) == [made(0, 5)]
    assert append_stretch([made(0, 5)], made(5, 9)) == [made(0, 9)]
    assert stretches_of(append_stretch([made(0, 5)], made(5, 9))) == []


def test_a_run_that_made_no_step_adds_none() -> None:
    assert append_stretch([made(0, 5)], made(5, 5, cell="s/b")) == [made(0, 5)]
    assert append_stretch([], made(0, 0)) == []


def test_steps_of_another_cell_settings_ranks_and_commit_are_told() -> None:
    then = made(0, 5, settings={"lr": 1, "seed": 3}, world_size=1, commit=None)
    now = made(5, 9, cell="s/b", settings={"lr": 2})
    first, second = stretches_of(append_stretch([then], now))
    assert (first.steps, second.steps) == ("0-4", "5-8")
    assert first.settings == {"lr": 1, "seed": 3} and second.settings == {}
    assert first.made_by == "s/a on 1 rank, batch_size=8, commit unknown; lr=1, seed=3"
    assert second.made_by == "s/b on 2 ranks, batch_size=8, commit abc"

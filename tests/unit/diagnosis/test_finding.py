"""The sentences and figures that a study's page begins with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from lab.analysis.results import load
from lab.diagnosis.evidence import gather
from lab.diagnosis.finding import Finding, finding
from lab.diagnosis.rules import judge
from lab.diagnosis.view import best_remedies, time_split
from tests.support.records import leave, make_record

Times = Mapping[tuple[str, int], Sequence[float]]  # milliseconds of each repeat, by strategy, ranks
CLEAR: Times = {
    ("none", 1): (400, 404, 402),
    ("none", 4): (100, 101, 102),
    ("allreduce", 4): (175, 176, 174),
    ("overlap", 4): (115, 114, 116),
}


def found_in(folder: Path, times: Times) -> Finding:
    for (strategy, size), steps in times.items():
        for repeat, ms in enumerate(steps):
            cell = f"{strategy}-n{size}-r{repeat}"
            record = make_record(
                *(strategy, size, 1e-3 * ms),
                batch_size=128,
                cell=cell,
                repeat=repeat,
                gradient_bytes=8_000_000,
                payload_bytes_per_step=[0 if strategy == "none" else 12_000_000] * size,
                messages_per_step=[4.0] * size,
            )
            leave(folder / cell, record)
    results = load(folder)
    several = [p for p in results.points if p.world_size > 1]
    known = [gather(results, p.one) for p in several]
    explained = {e.point.place: (e, judge(e)) for e in known}
    return finding(results.points, results.noise_floor, explained)


def test_a_leader_is_named_with_its_speedup_its_gain_and_its_limit(tmp_path: Path) -> None:
    found = found_in(tmp_path / "made", CLEAR)
    expected = "With overlap, 4 ranks train 3.50 times as fast as one, and 1.52 times as fast as"
    assert found.verdict == f"{expected} with allreduce."
    assert found.more == [
        "The next fastest, allreduce, takes 52 % longer, a significant difference."
    ]
    best, speed, limit = found.figures
    assert (best.value, best.note) == ("overlap", "of 2 measured at batch 128")
    assert speed.value == "3.50\u2009×"
    assert speed.note == "95 % interval 3.39 to 3.60; ideal is 4"
    assert (limit.value, limit.note) == ("Exchange, 12 %", "of the step waits for gradients")


@pytest.mark.parametrize(
    ("times", "verdict", "more"),
    [
        pytest.param(
            {**CLEAR, ("onebit", 4): (114, 117, 115)},
            "With overlap, 4 ranks train 3.50 times as fast as one, ",
            "With 3 repeats, these are not significantly slower: onebit.",
            id="tied",
        ),
        pytest.param(
            {key: steps[:1] for key, steps in CLEAR.items()},
            "With overlap, 4 ranks train 3.48 times as fast as one, ",
            "Each strategy ran once, so this may be chance. 3 repeats would show whether it is.",
            id="once",
        ),
        pytest.param(
            {**CLEAR, ("onebit", 4): (60,)},
            "With overlap, 4 ranks train 3.50 times as fast as one, ",
            "Not ranked, with fewer than 3 repeats: onebit.",
            id="one lucky run",
        ),
        pytest.param(
            {**CLEAR, ("overlap", 4): (115, 114), ("allreduce", 4): (175,)},
            "With overlap, 4 ranks train 3.51 times as fast as one, ",
            "Each strategy ran fewer than 3 times, so this may be chance. 3 repeats would show "
            "whether it is.",
            id="once or twice",
        ),
        pytest.param(
            {**CLEAR, ("overlap", 4): (440, 441, 442), ("allreduce", 4): (500, 501, 502)},
            "4 ranks train no faster than one rank. With overlap, the fastest strategy, they train",
            "The next fastest, allreduce, takes 14 % longer, a significant difference.",
            id="slower than one",
        ),
        pytest.param(
            {**CLEAR, ("overlap", 2): (90, 91, 90)},
            "With overlap, 4 ranks train 3.50 times as fast as one, ",
            "Fewer ranks are faster: with overlap, 2 ranks train 1.27 times as fast.",
            id="fewer are faster",
        ),
        pytest.param(
            {("overlap", 4): (115, 114, 116)},
            "On 4 ranks, overlap is the fastest strategy measured: 115 ms per step.",
            "Nothing else was measured there (batch 128, 4 ranks).",
            id="alone",
        ),
    ],
)
def test_how_sure_a_verdict_is(tmp_path: Path, times: Times, verdict: str, more: str) -> None:
    found = found_in(tmp_path / "made", times)
    assert found.verdict.startswith(verdict)
    assert more in found.more


def test_of_unlike_repeats_pairs_decide_and_not_means(tmp_path: Path) -> None:
    """The machine slows down: allreduce lacks the slow repeats, and is slower in all others."""
    base = {("none", 1): (400, 410, 420, 800, 810)}
    slowed = {("overlap", 4): (115, 118, 121, 230, 233), ("allreduce", 4): (175, 178, 181)}
    found = found_in(tmp_path / "made", {**base, **slowed})
    assert found.verdict.startswith(
        "With overlap, 4 ranks train 3.48 times as fast as one, and 1.51"
    )
    assert found.more == [
        "The next fastest, allreduce, takes 51 % longer, a significant difference."
    ]


def test_fewer_ranks_are_faster_only_if_they_train_more_samples_per_second(tmp_path: Path) -> None:
    """Without `none`, speedups are over each series' own run: onebit's is large, as it is slow."""
    own: Times = {
        **{("allreduce", 1): (100, 101, 102), ("allreduce", 4): (55, 56, 57)},
        **{
            ("onebit", 1): (200, 201, 202),
            ("onebit", 2): (62, 63, 64),
            ("onebit", 4): (60, 61, 62),
        },
    }
    found = found_in(tmp_path / "made", own)
    assert found.more == ["The next fastest, onebit, takes 8.9 % longer, a significant difference."]
    faster = {**own, ("onebit", 2): (50, 51, 52)}
    (_, told) = found_in(tmp_path / "faster", faster).more
    assert told == "Fewer ranks are faster: with onebit, 2 ranks train 1.10 times as fast."


def test_fewer_ranks_of_weak_scaling_train_fewer_samples_a_step(tmp_path: Path) -> None:
    for size, ms in ((2, 100), (4, 150)):
        for repeat in range(3):
            cell = f"overlap-n{size}-r{repeat}"
            seconds = 1e-3 * (ms + repeat)
            record = make_record("overlap", size, seconds, scaling="weak", repeat=repeat, cell=cell)
            leave(tmp_path / cell, record)
    found = finding(load(tmp_path).points, float("nan"), {})
    assert not any("Fewer ranks" in line for line in found.more)  # 2 / 100 ms is less than 4 / 150


def test_one_more_of_many_that_are_tied_is_one_other(tmp_path: Path) -> None:
    alike = ("allreduce", "overlap", "onebit", "int8", "topk", "ring")
    times = {(name, 4): (115, 114 + at, 116) for at, name in enumerate(alike)}
    (told, *_) = found_in(tmp_path / "made", times).more
    assert told.endswith(" and 1 other.")


def test_an_interval_is_lacking_for_the_true_reason(tmp_path: Path) -> None:
    found = found_in(tmp_path / "made", {("none", 1): (400, 404), ("overlap", 4): (115, 114)})
    assert found.figures[1].note == "fewer than 3 repeats, so no interval; ideal is 4"
    found = found_in(tmp_path / "few", {("none", 1): (400,), ("overlap", 4): (115, 114, 116)})
    expected = "fewer than 3 repeats have a one-rank run, so no interval; ideal is 4"
    assert found.figures[1].note == expected


def test_without_an_exchange_there_is_nothing_to_judge(tmp_path: Path) -> None:
    found = found_in(tmp_path / "made", {("none", 1): (400,), ("none", 4): (100,)})
    assert found.verdict.startswith("Only strategy=none was measured, at 2 points.")
    assert not found.figures


def test_parts_of_a_step_add_up_to_it(tmp_path: Path) -> None:
    """Where ranks gain more than their share, and where nothing was measured beside one rank."""
    one = {("none", 1): (400, 404, 402)}
    faster: Times = {**one, ("none", 4): (80, 81, 82), ("tree", 4): (160, 161, 162)}
    expected = {"faster": ("tree is 50 % even compute, 50 % exposed exchange", faster)}
    alone = "tree is 62 % even compute, 38 % all else"
    expected["alone"] = (alone, {**one, ("tree", 4): (160, 161, 162)})
    for name, (message, times) in expected.items():
        found_in(tmp_path / name, times)
        results = load(tmp_path / name)
        (tree,) = (p for p in results.points if p.strategy == "tree")
        drawn = time_split([gather(results, tree.one)], {tree.place: "tree"})
        assert drawn.message == f"A step of {message}"


def test_breakdowns_alone_have_finished_but_judge_nothing(tmp_path: Path) -> None:
    leave(tmp_path / "tree", make_record("tree", 2, 0.1, measure="breakdown"))
    results = load(tmp_path)
    found = finding(results.points, results.noise_floor, {})
    assert found.verdict == "No throughput run has finished."


def test_time_is_split_and_remedies_leave_out_what_was_measured(tmp_path: Path) -> None:
    for name, times in (("few", CLEAR), ("more", {**CLEAR, ("onebit", 4): (150, 151, 152)})):
        found_in(tmp_path / name, times)
    changes = dict[str, list[str]]()
    for name in ("few", "more"):
        results = load(tmp_path / name)
        (slow,) = (p for p in results.points if (p.strategy, p.world_size) == ("allreduce", 4))
        e = gather(results, slow.one)
        message = time_split([e], {slow.place: "allreduce"}).message
        assert message == "A step of allreduce is 57 % even compute, 42 % exposed exchange"
        changes[name] = [change for change, _ in best_remedies(e, judge(e), results.points)]
    assert "strategy=onebit" in changes["few"]
    assert "strategy=onebit" not in changes["more"]

"""Claims: quantities, checks, verdicts, files that are refused, and the page of the seeds."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from omegaconf import OmegaConf

from lab.claims.claims import Bounds, Claim, Paper
from lab.claims.findings import CHANGES, KINDS, ClaimVerdict, judge, tally
from lab.claims.metrics import ClaimPoint
from lab.claims.page import claims_tables
from lab.claims.predicted import Predicted
from lab.measure.statistics import UNKNOWN, Interval
from lab.settings.files import choices_of, conf_dir, read_file
from lab.simulate.hardware import parse
from tests.conftest import ROOT
from tests.support.seeds import claims_of, page
from tests.unit.claims.facts import Repeated, Table


@pytest.mark.parametrize(
    ("quantity", "at", "value"),
    [
        ("step_s", ClaimPoint("tree", 4), 0.23),
        ("speedup", ClaimPoint("tree", 4), 200 / 230),
        ("gain_over_tree", ClaimPoint("overlap", 4), 2.3),
        ("weak_speedup", ClaimPoint("tree", 4), 4 * 200 / 230),
        ("weak_efficiency", ClaimPoint("tree", 4), 200 / 230),
        ("samples_per_s", ClaimPoint("tree", 4, 230), 1000.0),
        ("speedup", ClaimPoint("tree", 4, over_ranks=2), 190 / 230),
        ("added_s", ClaimPoint("tree", 4), 0.18),
        ("bus_gb_per_s", ClaimPoint(world_size=4, num_bytes=100), None),
        ("transfer_s", ClaimPoint("tree", 4), 0.045),
        ("transfers", ClaimPoint("tree", 4), 4.0),
        ("transfer_share", ClaimPoint("tree", 4), 0.225),
        ("byte_share", ClaimPoint("onebit", 4), 1 / 32),
        ("speedup", ClaimPoint("onebit", 4), None),
        ("gradient_bytes", ClaimPoint(), 250e6),
        ("fc_share", ClaimPoint(), 0.95),
        ("operations", ClaimPoint(batch_size=2, layer="conv2"), 2000),
        ("operations", ClaimPoint(layer="conv9"), None),
    ],
)
def test_quantities(quantity: str, at: ClaimPoint, value: float | None) -> None:
    computed = Claim("says", "slide", quantity, Bounds(at_least=0), at=at).value(Table())
    assert computed == (value if value is None else pytest.approx(value))


PREDICTED = {"title": "p", "profile": "vgg16_p100", "hardware": "v100_10g"}
GRID: dict[str, Any] = {"strategies": ["overlap", "tree"], "over": "tree", "profiles": ["a", "b"]}
GRID |= {"world_sizes": [4], "per_rank_batch_sizes": [16, 32, 64]}


@pytest.mark.parametrize(
    ("quantity", "settings", "value"),
    [
        ("win_share", {}, 1.0),  # overlap takes 100 ms, tree 230
        ("win_share", {"margin": 1.4}, 0.0),
        ("best_gain", {}, 2.3),
        ("best_gain", {"strategies": ["tree"], "over": "overlap"}, 100 / 230),
        ("win_share", {"world_sizes": [2, 4]}, None),  # overlap on two ranks is not known
    ],
)
def test_statements_over_a_grid(quantity: str, settings: Any, value: float | None) -> None:
    entry = {"says": "often", "role": "own", "source": "s", "quantity": quantity}
    node = {**entry, "grid": {**GRID, **settings}, "check": {"at_least": 0}}
    paper = Paper.parse({**PREDICTED, "claims": [node]})
    computed = paper.claims[0].value(Table())
    assert computed == (value if value is None else pytest.approx(value))


def test_a_rate_of_a_grid_is_that_of_its_links() -> None:
    facts = Predicted("vgg16_p100", parse(read_file("hardware", "v100_10g")))
    times = [facts.step_s(ClaimPoint("overlap", 4, 128, rate_gbit=rate)) for rate in (1, 10, 100)]
    assert times[0] > 5 * times[1] > 5 * times[2]


def test_a_grid_needs_a_quantity_of_grids_and_cells() -> None:
    entry = {"says": "often", "role": "own", "source": "s", "check": {"at_least": 0}}
    for quantity, grid, message in [
        ("speedup", GRID, "quantity=speedup: no such quantity; allowed: win_share, best_gain"),
        ("win_share", {**GRID, "profiles": []}, r"grid.profiles=\(\): must be a list"),
        ("win_share", {**GRID, "margin": -1}, "grid.margin=-1: must not be negative"),
    ]:
        with pytest.raises(ValueError, match=message):
            Paper.parse({**PREDICTED, "claims": [{**entry, "quantity": quantity, "grid": grid}]})


def test_conditions_and_the_number_of_cells_are_printed() -> None:
    entry = {"says": "often", "role": "own", "source": "s", "check": {"at_least": 0}}
    node = {**entry, "quantity": "win_share", "grid": GRID, "conditions": "batch not given"}
    paper = Paper.parse({**PREDICTED, "claims": [node]})
    assert "* often: The grid has 6 cells. batch not given" in claims_tables(
        judge(paper, Table(), None)
    )


def test_parameters_of_a_profile_are_its_own() -> None:
    hardware = parse(read_file("hardware", "titanx_x4"))
    share = Claim("says", "slide", "fc_share", Bounds(at_least=0))
    vgg16 = Predicted("vgg16_p100", hardware)
    assert vgg16.counts().parameters == 138_357_544  # Simonyan and Zisserman say 138 million
    assert share.value(vgg16) == pytest.approx(123_642_856 / 138_357_544)


def test_without_layers_named_fc_their_share_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = {"name": "p", "source": "s", "reference_batch": 1}
    layer = {"name": "classifier_1", "parameters": 10, "forward_ms": 1.0, "backward_ms": 1.0}
    monkeypatch.setattr("lab.claims.predicted.read_file", lambda *_: {**profile, "layers": [layer]})
    hardware = parse(read_file("hardware", "titanx_x4"))
    measured_profile = Predicted("test_without_layers_named_fc", hardware)
    assert measured_profile.counts().parameters == 10
    assert Claim("says", "slide", "fc_share", Bounds(at_least=0)).value(measured_profile) is None


@pytest.mark.parametrize(
    ("check", "holds", "fails"),
    [
        (Bounds(about=4, within=0.1), 4.39, 4.41),
        (Bounds(at_least=1.1), 1.1, 1.0),
        (Bounds(at_most=1), 1.0, 1.01),
    ],
)
def test_checks(check: Bounds, holds: float, fails: float) -> None:
    assert check.outcome(Interval(math.nan, holds, math.nan)) == "holds"
    assert check.outcome(Interval(math.nan, fails, math.nan)) == "fails"
    assert check.outcome(UNKNOWN) == "unknown"


@pytest.mark.parametrize(
    ("ends", "outcome"),
    [
        ((3.7, 4.3), "holds"),
        ((3.5, 4.3), "within noise"),
        ((3.7, 4.5), "within noise"),
        ((3.0, 5.0), "within noise"),
        ((4.41, 5.0), "fails"),
        ((3.0, 3.59), "fails"),
    ],
)
def test_the_interval_decides(ends: tuple[float, float], outcome: str) -> None:
    lo, hi = ends
    assert Bounds(about=4, within=0.1).outcome(Interval(lo, (lo + hi) / 2, hi)) == outcome


@pytest.mark.parametrize(
    "path", sorted((conf_dir() / "claims").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_file_of_claims_can_be_read(path: object) -> None:
    paper = Paper.parse(OmegaConf.to_container(OmegaConf.load(str(path))))  # type: ignore[arg-type]
    assert paper.claims
    for claim in paper.claims:
        if claim.published is not None:  # a paper does not contradict itself
            published = Interval(math.nan, claim.published, math.nan)
            assert claim.check.outcome(published) == "holds", claim.says


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"role": "guess"}, "'s': role=guess: allowed: statement, input, own"),
        ({"kind": "count"}, "'s': .*kind"),
        ({"quantity": "luck"}, "'s': quantity=luck: no such quantity; allowed: step_s, speedup"),
        ({"check": {"about": 1}}, "'s': must give exactly one bound: 'at_least', "),
        ({"check": {"about": 1, "within": -0.1}}, "'s': check.within=-0.1: must be a number of at"),
        ({"check": {"at_least": math.nan}}, "'s': check.at_least=nan: must be a number"),
        ({"at": {"ranks": 4}}, "'s': .*ranks"),
        ({"quantity": "operations"}, "'s': quantity=operations: at.layer: is missing"),
    ],
)
def test_a_wrong_entry_is_named(entry: dict[str, object], message: str) -> None:
    right = {"says": "s", "role": "own", "source": "1"}
    right |= {"quantity": "speedup", "check": {"at_least": 1}}
    with pytest.raises(ValueError, match=message):
        Paper.parse({"claims": [right | entry]})


def test_what_is_no_claim_and_no_rate_is_named() -> None:
    series = {"says": "s", "source": "1", "strategy": "tree", "profile": "p", "within": 0.1}
    series |= {"per_rank_batch_size": 32, "samples_per_s": {1: 0, 2: 5}}
    for node, message in [
        ({"claims": "faster"}, "claims=faster: must be a list"),
        ({"claims": ["faster"]}, "claims: faster: must have the keys of a claim"),
        ({"title": "t", "series": [series]}, "t: samples_per_s.1=0: must be a number above 0"),
    ]:
        with pytest.raises(ValueError, match=f"^{message}"):
            Paper.parse({**PREDICTED, **node})


def test_a_ratio_to_nothing_names_its_claim() -> None:
    facts = Predicted("vgg16_p100", parse(read_file("hardware", "v100_10g")))
    alone = Claim("small", "1", "byte_share", Bounds(at_most=1), at=ClaimPoint("onebit", 1))
    with pytest.raises(ValueError, match="claim 'small': quantity=byte_share: would divide by 0"):
        alone.value(facts)


STUDY = {"study": "s", "hardware": "h", "bytes_scale": 1.0}
STUDY |= {"strategies": ["tree"], "world_sizes": [1], "batch_sizes": [1]}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"cells": 4}, "t: .*cells"),
        ({"rate_crossover": ["onebit"]}, r"t: rate_crossover=\('onebit',\): must name two"),
    ],
)
def test_a_wrong_key_of_a_reproduction_is_named(entry: dict[str, object], message: str) -> None:
    node = {"title": "t", "profile": "p", "hardware": "h"}
    assert Paper.parse({**node, "reproduction": STUDY}).reproduction
    with pytest.raises(ValueError, match=message):
        Paper.parse({**node, "reproduction": STUDY | entry})


def test_repeats_give_an_interval_and_two_of_them_none() -> None:
    at = ClaimPoint("tree", 4)
    claims = [Claim("s", "1", "speedup", Bounds(at_least=bound), at=at) for bound in (0.2, 0.8, 9)]
    verdicts = judge(Paper("t", tuple(claims), "p", "h"), Table(), Repeated(1.0, 1.1, 0.9))
    assert [verdict.outcome for verdict in verdicts] == ["holds", "within noise", "fails"]
    assert [verdict.num_repeats for verdict in verdicts] == [3] * 3
    cells = [line.split("|")[7].strip() for line in claims_tables(verdicts) if "| s |" in line]
    assert re.fullmatch(r"0\.87\d* \[0\.6\d+, 1\.1\d+\]", cells[0]), cells
    measured = tally(verdicts)["measured"]
    assert measured == {"holds": 1, "fails": 1, "within noise": 1, "unknown": 0}
    few = judge(Paper("t", (claims[0],), "p", "h"), Table(), Repeated(1.0, 1.1))
    assert any("(n = 2)" in line for line in claims_tables(few))


TREE = {"strategy": "tree", "world_size": 4, "batch_size": 256}
ALONE = {"strategy": "none", "batch_size": 256}


def claim(quantity: str, at: Any, published: float | None, check: Any, **own: Any) -> Any:
    entry = {"says": quantity, "source": "s", "quantity": quantity, "at": at, "check": check}
    return entry | ({} if published is None else {"published": published}) | own


@pytest.mark.parametrize(
    ("entry", "kind", "why"),
    [
        (claim("speedup", TREE, 1, {"about": 0.87, "within": 0.1}), "predicted", ""),
        (claim("speedup", TREE, None, {"at_most": 1}), "predicted", ""),
        (claim("speedup", TREE, None, {"at_most": 4}), "arithmetic", "range too wide"),
        (claim("speedup", TREE, None, {"at_least": 4}), "predicted", ""),  # a miss always counts
        (claim("speedup", TREE, None, {"about": 1, "within": 1}), "arithmetic", "prints no such"),
        (claim("samples_per_s", TREE, None, {"at_least": 1200}), "predicted", ""),
        (claim("samples_per_s", TREE, 1, {"at_least": 1}, role="input"), "input", ""),
        (claim("step_s", ALONE, None, {"at_least": 0.15}), "input", ""),
        (claim("gradient_bytes", {}, 1, {"at_least": 2e8}), "counted", ""),
        (claim("gradient_bytes", {}, 1, {"at_least": 1e7}), "arithmetic", "range too wide"),
        (claim("speedup", TREE, None, {"at_most": 1}, role="own"), "own", ""),
    ],
)
def test_kinds_follow_from_what_a_value_depends_on(entry: Any, kind: str, why: str) -> None:
    (found,) = kinds(entry)
    assert found.kind == kind and why in found.why


def test_a_claim_that_another_or_an_input_implies_is_arithmetic() -> None:
    below = claim("speedup", TREE, None, {"at_most": 1})
    step = claim("step_s", TREE, None, {"at_least": 0.2})
    same = claim("speedup", {**TREE, "strategy": "caffe"}, None, {"at_most": 1})
    first, *others = kinds(below, step, same)  # caffe's exchange takes as long as the tree
    assert first.kind == "predicted"
    assert [each.why for each in others] == ["says the same as “speedup”"] * 2
    assert others[0].words == "arithmetic: agrees"
    given = claim("transfer_s", TREE, 1, {"at_least": 0}, role="input")
    share = claim("transfer_share", TREE, 0.2, {"about": 0.2, "within": 0.5})
    assert kinds(given, share)[1].why == "follows from model inputs"


def kinds(*entries: Any) -> tuple[ClaimVerdict, ...]:
    """Judge claims on AlexNet over PCIe."""
    hardware = parse(read_file("hardware", "titanx_x4"))
    changed = [Predicted("alexnet_titanx", hardware, change=change) for change in CHANGES]
    paper = Paper.parse({"title": "t", "profile": "p", "hardware": "h", "claims": list(entries)})
    return judge(paper, Predicted("alexnet_titanx", hardware), None, changed=changed)


@pytest.mark.parametrize(
    ("check", "value", "machine", "words"),
    [
        (Bounds(about=1, within=0.1), 1.05, None, "predicted: agrees"),
        (Bounds(about=1, within=0.1), 1.38, None, "model misses by 38 %"),
        (Bounds(at_most=2), 3.0, None, "model misses by 50 %"),
        (Bounds(at_most=2), 1.0, "emulated", "measured on an emulated cluster: agrees"),
        (Bounds(at_most=2), 4.0, "gpu", "measured: differs by 100 %"),
        (Bounds(at_most=2), math.nan, "gpu", "not testable here: not measured"),
    ],
)
def test_words_say_what_was_done(
    check: Bounds, value: float, machine: str | None, words: str
) -> None:
    measured = Interval(math.nan, value, math.nan) if machine else UNKNOWN
    one = Claim("s", "1", "speedup", check, published=check.about)
    predicted = None if machine else value
    assert ClaimVerdict(one, predicted, measured=measured, machine=machine).words == words


def test_another_kind_of_device_decides_nothing() -> None:
    one = Claim("s", "1", "speedup", Bounds(at_most=2))
    elsewhere = ClaimVerdict(
        one, None, measured=Interval(4, 4, 4), machine="cpu", is_elsewhere=True
    )
    assert elsewhere.outcome == "unknown"
    assert elsewhere.words == "wrong kind of device: not testable here"
    assert replace(elsewhere, predicted=1.0).words == "predicted: agrees"


def test_kinds_have_tables_of_their_own() -> None:
    one = Claim("s", "1", "speedup", Bounds(at_least=0.1))
    found = [ClaimVerdict(one, 1.0, kind=kind) for kind in KINDS]
    lines = claims_tables(found)
    assert [line.split("**")[1] for line in lines if line.startswith("**")] == list(KINDS)
    others = "1 arithmetic check, 1 model input and 1 of our own statements"
    assert f"We do not count {others} as evidence." in lines


ONE_SIDED = re.compile("only|at most|at least|up to|as much as|than|no more")


def test_a_figure_of_two_sides_has_a_check_of_two() -> None:
    for name in choices_of("claims"):
        for each in Paper.parse(read_file("claims", name)).claims:
            if each.published is not None and each.role == "statement":
                assert each.check.about is not None or ONE_SIDED.search(each.says), each.says


def test_sizes_are_claims_on_bus_bandwidth_of_which_some_are_fitted() -> None:
    sizes = {"says": "eight", "source": "s", "hardware": "h100_x8", "world_size": 8, "within": 0.1}
    sizes |= {"gb_per_s": {1: 50, 1024: 480}, "fitted": [1]}
    paper = Paper.parse({**PREDICTED, "claims": [], "sizes": [sizes]})
    assert [claim.role for claim in paper.claims] == ["input", "statement"]
    facts = Predicted("vgg16_p100", parse(read_file("hardware", "v100_10g")))
    value = paper.claims[1].value(facts)
    assert value == pytest.approx(14 / 8 * 2**30 / facts.all_reduce_s(paper.claims[1].at) / 1e9)
    assert value == pytest.approx(480, rel=0.1)


def test_a_point_may_have_other_hardware_and_values_of_it() -> None:
    facts = Predicted("vgg16_p100", parse(read_file("hardware", "v100_10g")))
    there = ClaimPoint("overlap", 8, 512, hardware="v100_x8")
    assert facts.step_s(there) < facts.step_s(ClaimPoint("overlap", 8, 512))
    limited = ClaimPoint("overlap", 8, 512, hardware="v100_x8", values=("input_samples_per_s=100",))
    assert facts.step_s(limited) == pytest.approx(5.12)
    for text in ("speed=1", "host.speed=1", "jitter=fast", "jitter"):
        with pytest.raises(ValueError, match=f"at.values={text}: must be KEY=VALUE, with a key"):
            facts.step_s(ClaimPoint("overlap", 8, 512, hardware="v100_x8", values=(text,)))


def test_linear_scaling_is_beside_each_claim_of_scaling() -> None:
    series = {"says": "VGG", "source": "s", "strategy": "overlap", "profile": "vgg16_p100"}
    series |= {"per_rank_batch_size": 64, "within": 0.1, "samples_per_s": {1: 154, 8: 1120}}
    paper = Paper.parse({**PREDICTED, "claims": [], "series": [series]})
    facts = Predicted("vgg16_p100", parse(read_file("hardware", "v100_10g")))
    predicted, given = (
        line for line in claims_tables(judge(paper, facts, None)) if line.startswith("| claim |")
    )
    assert "error of linear scaling" in predicted and "error of linear scaling" not in given
    line = next(line for line in claims_tables(judge(paper, facts, None)) if "8 GPUs" in line)
    assert "+10.0 %" in line  # 8 over 1120 / 154


def test_every_statement_of_the_seeds_has_a_claim_or_a_reason() -> None:
    made = "\n".join(page(read_file("published", "seeds"))) + "\n"
    assert made == (ROOT / "docs/results/seeds.md").read_text()


def test_a_statement_without_either_or_with_an_unknown_claim_is_refused() -> None:
    for entry, message in [
        ({}, "slide 1, it is so: has neither claim nor reason"),
        ({"claims": ["nvidia2017: Keras is"]}, "slide 1: claims=nvidia2017: Keras is: no claim"),
    ]:
        with pytest.raises(ValueError, match=message):
            claims_of({"at": "slide 1", "says": "it is so", **entry})
    assert claims_of({"at": "1", "says": "s", "claims": ["nvidia2017: Keras'"]}) == [
        "nvidia2017 1",
        "nvidia2017 2",
    ]

"""Claims: quantities from step times and bytes, checks, and files that say what is wrong."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from matplotlib.patches import Rectangle
from omegaconf import OmegaConf

from lab.claims import figures
from lab.claims.claims import Check, Claim, Paper, Reproduction
from lab.claims.metrics import Facts, Missing, Point
from lab.claims.tables import claims_table
from lab.settings.config import conf_dir


class Table:
    """Step times in milliseconds by (strategy, ranks), at any batch."""

    STEP_MS = {("none", 1): 200, ("none", 2): 100, ("none", 4): 50, ("tree", 2): 190}
    STEP_MS |= {("tree", 4): 230, ("overlap", 4): 100}
    PAYLOAD = {"allreduce": 320.0, "onebit": 10.0}

    def __init__(self, tree: float = 1.0) -> None:
        self.factor = {"tree": tree}

    def step_s(self, at: Point) -> float:
        try:
            milliseconds = self.STEP_MS[at.strategy, at.world_size]
            return self.factor.get(at.strategy, 1.0) * milliseconds / 1000
        except KeyError:
            raise Missing from None

    def payload_bytes(self, at: Point) -> float:
        return self.PAYLOAD[at.strategy]

    def gradient_bytes(self) -> float:
        return 250e6

    def fc_share(self) -> float:
        return 0.95

    def conv2_operations(self, batch_size: int) -> float:
        raise Missing

    def repeats(self) -> list[Facts]:
        return [Table(0.5), Table(2.0)]

    def emulations(self) -> list[str]:
        return ["hosts"]

    def machines(self) -> list[str]:
        return ["one"]


@pytest.mark.parametrize(
    ("quantity", "at", "value"),
    [
        ("step_s", Point("tree", 4), 0.23),
        ("speedup", Point("tree", 4), 200 / 230),
        ("gain_over_tree", Point("overlap", 4), 2.3),
        ("weak_speedup", Point("tree", 4), 4 * 200 / 230),
        ("weak_efficiency", Point("tree", 4), 200 / 230),
        ("images_per_s", Point("tree", 4, 230), 1000.0),
        ("transfer_s", Point("tree", 4), 0.045),
        ("transfers", Point("tree", 4), 4.0),
        ("byte_share", Point("onebit", 4), 1 / 32),
        ("speedup", Point("onebit", 4), None),
        ("conv2_operations", Point(), None),
    ],
)
def test_quantities(quantity: str, at: Point, value: float | None) -> None:
    found = Claim("says", "slide", quantity, Check(at_least=0), at).value(Table())
    assert found == (value if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    ("check", "holds", "fails"),
    [
        (Check(about=4, within=0.1), 4.39, 4.41),
        (Check(at_least=1.1), 1.1, 1.0),
        (Check(at_most=1), 1.0, 1.01),
    ],
)
def test_checks(check: Check, holds: float, fails: float) -> None:
    assert check.verdict(holds) == "holds"
    assert check.verdict(fails) == "fails"
    assert check.verdict(None) == check.verdict(math.nan) == "unknown"


@pytest.mark.parametrize(
    "path", sorted((conf_dir() / "claims").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_file_of_claims_can_be_read(path: object) -> None:
    paper = Paper.parse(OmegaConf.to_container(OmegaConf.load(str(path))))  # type: ignore[arg-type]
    assert paper.claims
    for claim in paper.claims:
        if claim.published is not None:  # a paper does not contradict itself
            assert claim.check.verdict(claim.published) == "holds", claim.says


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"quantity": "luck"}, "'s': quantity=luck: allowed are step_s, speedup"),
        ({"check": {"about": 1}}, "'s': must give about and within, or at_least, or at_most"),
        ({"at": {"ranks": 4}}, "'s': .*ranks"),
    ],
)
def test_a_wrong_entry_is_named(entry: dict[str, object], message: str) -> None:
    right = {"says": "s", "source": "1", "quantity": "speedup", "check": {"at_least": 1}}
    with pytest.raises(ValueError, match=message):
        Paper.parse({"claims": [right | entry]})


MADE = Reproduction("s", "h", 1.0, "alexnet", ("tree", "none"), (1, 2, 4), (128, 512))


def test_a_wrong_key_of_a_reproduction_is_named() -> None:
    node = {"title": "t", "profile": "p", "hardware": "h", "reproduction": {"cells": 4}}
    with pytest.raises(ValueError, match="t: .*cells"):
        Paper.parse(node)


def test_repeats_that_differ_are_a_range() -> None:
    claims = [
        Claim("s", "1", quantity, Check(at_least=0.1), Point(strategy, 4))
        for quantity, strategy in (
            ("speedup", "tree"),
            ("speedup", "overlap"),
            ("fc_share", "none"),
        )
    ]
    table, verdicts = claims_table(Paper("t", "p", "h", tuple(claims)), Table(), Table())
    assert [row.split("|")[6].strip() for row in table[2:]] == [
        "0.8696 [0.4348, 1.739]",
        "2",
        "0.95",
    ]
    assert verdicts == ["holds"] * 3


def test_figures_show_what_is_measured_predicted_and_published(tmp_path: Path) -> None:
    claim = Claim("s", "1", "speedup", Check(at_most=1), Point("tree", 4, 128), published=0.9)
    paper = Paper("t", "p", "h", (claim,), MADE)
    tree, none = figures.speedup_bars(paper, MADE, Table(), Table(), []).axes
    # The table has no tree on one rank.
    for panel, num_bars in ((tree, 2 * 2), (none, 2 * 3)):
        bars = [bar for bar in panel.patches if isinstance(bar, Rectangle)]
        assert sum(bar.get_height() > 0 for bar in bars) == num_bars
    assert all(bar.get_hatch() for bar in tree.patches)  # emulated
    diamonds = [line.get_ydata() for line in tree.lines if line.get_marker() == "D"]
    assert [list(map(float, one)) for one in diamonds] == [[0.9]]  # type: ignore[arg-type]
    regimes = figures.regime_map(MADE, Table(), [])
    assert [panel.get_title() for panel in regimes.axes[:2]] == ["tree", "none"]
    rates = figures.speedup_over_rate(MADE, lambda rate: Table(), 1e8, [])
    assert [panel.get_title() for panel in rates.axes] == ["global batch 128", "global batch 512"]
    assert figures.save(rates, tmp_path, "rates") == f"![rates]({tmp_path.name}/rates.png)"
    assert (tmp_path / "rates.png").stat().st_size > 10_000

"""Published throughput over ranks, and terms of the cost model that are fitted to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lab.claims.claims import Paper
from lab.claims.page import terms_table
from lab.claims.predicted import Predicted, fit_terms
from lab.settings.files import read_file
from lab.simulate.hardware import parse

LINE: dict[str, Any] = {
    "says": "VGG-16, batch 64",
    "source": "a page",
    "strategy": "layerwise",
    "profile": "vgg16_p100",
    "per_rank_batch_size": 64,
    "samples_per_s": {1: 154, 2: 295, 8: 1081},
    "within": 0.1,
}
PAPER: dict[str, Any] = {"title": "t", "profile": "vgg16_p100", "hardware": "dgx1_p100"}


def test_a_series_is_a_calibrated_claim_and_an_emergent_one_for_each_further_point() -> None:
    one, two, eight = Paper.parse({**PAPER, "series": [LINE]}).claims
    assert (one.kind, one.published, one.at.world_size) == ("calibrated", 154, 1)
    assert (two.kind, two.at.batch_size, eight.at.batch_size) == ("emergent", 128, 512)
    assert eight.published == pytest.approx(1081 / 154) and eight.check.within == 0.1
    assert eight.says == "VGG-16, batch 64: 8 GPUs 1081, 7.02 times as many"
    with pytest.raises(ValueError, match="t: 'within'"):
        Paper.parse({**PAPER, "series": [{k: v for k, v in LINE.items() if k != "within"}]})


def test_fitted_terms_find_the_machine_and_carry_to_a_network_left_out() -> None:
    """Figures made by a machine that loses 8 ms with each further GPU."""
    preset = parse(read_file("hardware", "dgx1_p100"))
    lossy = Predicted("vgg16_p100", replace(preset, overhead_s_per_rank=8e-3))
    lines = []
    for profile, batch_size in (("vgg16_p100", 64), ("alexnet_p100", 512)):
        line = {**LINE, "profile": profile, "per_rank_batch_size": batch_size}
        points = Paper.parse({**PAPER, "series": [line]}).claims
        rates = {
            claim.at.world_size: claim.at.batch_size / lossy.step_s(claim.at) for claim in points
        }
        lines.append({**line, "samples_per_s": rates})
    paper = Paper.parse({**PAPER, "series": lines, "fit": ["overhead_s_per_rank"]})
    terms = fit_terms(paper, preset)
    assert terms and terms.values["overhead_s_per_rank"] == pytest.approx(8e-3, rel=0.02)
    assert terms.error("preset")[1] > 0.1
    assert terms.error("fitted")[1] < 0.01 and terms.error("left_out")[1] < 0.01
    assert terms_table(terms)[0].startswith("Fitted: overhead_s_per_rank = 0.008")
    assert len(terms_table(terms)) == 2 + 2 + 4 + 1
    assert fit_terms(replace(paper, fit=()), preset) is None
    with pytest.raises(ValueError, match="t: fit=speed: allowed are"):
        fit_terms(replace(paper, fit=("speed",)), preset)

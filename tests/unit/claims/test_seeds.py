"""The seeds' page: no statement without a claim or a reason, and the page is today's."""

from __future__ import annotations

import pytest

from lab.settings.files import read_file
from tests.conftest import ROOT
from tests.support.seeds import claims_of, page


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

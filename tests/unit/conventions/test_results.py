"""Pages of results: predicted ones are today's, measured ones say at which commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import verify
from tests.support.stale import MEASURED, PREDICTED, RESULTS, commit_of, is_marked


@pytest.mark.slow
@pytest.mark.parametrize("paper", PREDICTED)
def test_predicted_pages_are_todays(
    paper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert verify.main([paper, f"out={paper}.md"]) == 1  # peak rates explain neither page
    made = Path(f"{paper}.md").read_text()
    assert made == (RESULTS / f"{paper}.md").read_text().replace("docs/results/", "")


def test_measured_pages_say_at_which_commit_or_that_they_are_older() -> None:
    assert [page for page in MEASURED if not (commit_of(page) or is_marked(page))] == []

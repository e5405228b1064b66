"""Pages of results: predicted ones are today's, measured ones say at which commit."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from lab import load, verify
from tests.support.stale import MEASURED, PREDICTED, RESULTS, commit_of, is_marked


@pytest.mark.slow
@pytest.mark.parametrize(("page", "papers"), PREDICTED.items())
def test_predicted_pages_are_todays(
    page: str, papers: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert verify.main([*papers, f"out={page}.md"]) in (0, 1)  # whether or not all claims hold
    made = Path(f"{page}.md").read_text()
    command = f"out=docs/results/{page}.md"
    assert made == (RESULTS / f"{page}.md").read_text().replace(command, f"out={page}.md")


def test_measured_pages_say_at_which_commit_or_that_they_are_older() -> None:
    assert [page for page in MEASURED if not (commit_of(page) or is_marked(page))] == []


@pytest.mark.parametrize("packed", sorted(RESULTS.glob("records/*.tar.xz")), ids=lambda p: p.name)
def test_records_of_studies_can_be_read(packed: Path, tmp_path: Path) -> None:
    with tarfile.open(packed) as tar:
        tar.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    assert f"{folder.name}.tar.xz" == packed.name
    found = load(folder)
    assert not found.study.missing
    assert all(cell.status == "done" for cell in found.study.cells)

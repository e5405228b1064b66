"""Pages of results: predicted ones are today's, measured ones of today's code or they say so."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lab import verify
from tests.conftest import ROOT

RESULTS = ROOT / "docs/results"
PREDICTED = ("tf_benchmarks", "tf_parameter_server", "tf_benchmarks_real", "horovod")
MEASURED = sorted({path.stem for path in RESULTS.glob("*.md")} - {*PREDICTED, "README", "mutants"})
# A change here may change what was measured.
CODE = ("codec", "distributed", "exchange", "sync", "training", "cluster", "model/replay.py")


@pytest.mark.slow
@pytest.mark.parametrize("paper", PREDICTED)
def test_predicted_pages_are_todays(
    paper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert verify.main([paper, f"out={paper}.md"]) == 1  # peak rates explain neither page
    made = Path(f"{paper}.md").read_text()
    assert made == (RESULTS / f"{paper}.md").read_text().replace("docs/results/", "")


@pytest.mark.parametrize("page", MEASURED)
def test_measured_pages_are_of_todays_code_or_say_so(page: str) -> None:
    first, *lines = (RESULTS / f"{page}.md").read_text().splitlines()
    if "lder than the code" in first:
        return
    found = re.search(r"at commit `?([0-9a-f]{7,40})", "\n".join([first, *lines[:8]]))
    assert found, (
        f"{page}: its first line must say that it is older than the code, or its head at commit ..."
    )
    if shutil.which("git") and (ROOT / ".git").exists():
        paths = [f"lab/{part}" for part in CODE]
        changed = ["git", "-C", str(ROOT), "diff", "--name-only", found[1], "HEAD", "--", *paths]
        done = subprocess.run(changed, capture_output=True, text=True, check=True)
        assert not done.stdout, (
            f"{page}: measure it anew, or say in its first line that it is older"
        )

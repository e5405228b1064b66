"""The notebook runs from its first cell to its last, and shows what its stored outputs show.

    jupyter execute --inplace examples/notebook.ipynb

stores new outputs, and leaves the study in examples/runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import ROOT

NOTEBOOK = ROOT / "examples/notebook.ipynb"
LARGEST = 600_000  # bytes
SMALLER = {
    '"model.bytes_scale": 0.1': '"model.bytes_scale": 0.01, "model.time_scale": 0.1',
    "repeats=3": "repeats=1",
    "steps=15": "steps=8",
    "turns=5": "turns=3",
    'strategy=["none", "tree", "overlap", "onebit"]': 'strategy=["none", "tree"]',
    "world_size=[1, 2, 4]": "world_size=[1, 4]",
    'profile="resnet50_p100"': 'profile="alexnet_titanx"',
    "world_size=[8, 16, 32]": "world_size=[2]",
}


def shown(cell: Any) -> set[str]:
    """Return the types of what a code cell shows: `stdout`, `text/html`, `image/png` …

    Without `stderr`: a progress bar comes only where the machine takes long enough.
    """
    found = (output.get("data", {output.get("name", "error"): ""}) for output in cell.outputs)
    return {kind for each in found for kind in each} - {"stderr"}


def code_of(notebook: Any) -> list[Any]:
    """Return the code cells."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_a_smaller_study_shows_the_same_kinds_of_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stored, fresh = (nbformat.read(NOTEBOOK, as_version=4) for _ in range(2))
    for now, smaller in SMALLER.items():
        (cell,) = (cell for cell in code_of(fresh) if now in cell.source)
        cell.source = cell.source.replace(now, smaller)
    first, *_ = code_of(fresh)
    # Launchers and ranks fork from a process that has imported torch.
    first.source = f"import sys; sys.executable = {environment['PYTHON_EXEC']!r}\n{first.source}"
    NotebookClient(fresh, timeout=600, resources={"metadata": {"path": tmp_path}}).execute()
    assert [shown(cell) for cell in code_of(fresh)] == [shown(cell) for cell in code_of(stored)]


def test_outputs_are_stored_in_order_and_stay_small() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    counts = [cell.execution_count for cell in code_of(notebook)]
    assert counts == [*range(1, len(counts) + 1)]
    assert all("error" not in shown(cell) for cell in code_of(notebook))
    pictures = [cell for cell in code_of(notebook) if "image/png" in shown(cell)]
    assert len(pictures) == 2
    assert NOTEBOOK.stat().st_size < LARGEST

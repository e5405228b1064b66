"""What lab.verify prints, and the page that it writes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from lab.claims.claims import Paper
from lab.claims.metrics import MeasuredFacts
from lab.claims.predicted import Predicted
from lab.claims.tables import claims_table
from lab.settings.config import build, load
from lab.settings.files import read_file
from lab.simulate.hardware import Hardware


def verify(name: str, runs: Path | None, out: Path | None, command: str) -> tuple[str, bool]:
    """The table of a paper's claims, and whether one fails.

    Args:
        runs: the study that measured them; None: predictions alone.
        out: FILE.md for the page, which names `command`.

    Raises:
        ConfigError: there is no such paper.
        ValueError: the study cannot be read, or the paper has none.
        OSError: a file cannot be written.
    """
    paper = Paper.parse(read_file("claims", name))
    predicted = Predicted(paper.profile, Hardware.parse(read_file("hardware", paper.hardware)))
    measured = _measured(runs, paper) if runs else None
    table, verdicts = claims_table(paper, predicted, measured)
    lines = [f"# {paper.title}", "", *table, "", *_about(paper, measured)]
    if out:
        from lab.claims import page  # which takes pandas and matplotlib

        page.write(page.Page(out, lines, command, paper, predicted, measured), runs)
    return "\n".join(lines), "fails" in verdicts


def _measured(folder: Path, paper: Paper) -> MeasuredFacts:
    # Here, not above: without runs there is no need of pandas and torch.
    from lab.analysis.records import load_study
    from lab.claims.measured import Measured
    from lab.model.counts import parameters_of

    if not paper.reproduction:
        raise ValueError(f"runs={folder}: there is no study of {paper.title}")
    model = load([f"model={paper.reproduction.model}"]).model
    cells = load_study(folder).cells
    return Measured(cells, paper.profile, parameters_of(partial(build, model)))


def _about(paper: Paper, measured: MeasuredFacts | None) -> list[str]:
    """What the columns of the table are of."""
    predicted = f"Predicted: profile {paper.profile} on {paper.hardware}, nothing fitted."
    if measured:
        how = "; ".join([*measured.machines(), *measured.emulations()])
        brackets = "In brackets the lowest and the highest of its repeats."
        counted = "Parameters are counted in the lab's own model; what is replayed is scaled."
        return [predicted, "", f"Measured: {how}. {brackets} {counted}"]
    if not paper.reproduction:
        return [predicted]
    study = paper.reproduction.study
    how = f"`python -m lab.sweep study={study}` (root) measures it, then `runs=runs/{study}`"
    return [predicted, f"Measured: nothing; {how}."]

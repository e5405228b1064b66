"""Predictions beside measurements, and claims with their verdicts, as far as a study has them."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from lab.analysis.records import Study
from lab.settings.files import choices_of, read_file
from lab.simulate.request import DEFAULT_PROFILE
from lab.web.tables import Table, of_texts

HARDWARE = "emulated_1gbit"  # what a fit starts from, as in lab.score


def predictions_table(folder: Path, study: Study, prefix: str) -> list[Table]:
    """Fit hardware to a study's cells of one and two ranks, and predict all of its cells.

    Raises:
        ValueError: it cannot be fitted.
    """
    if not any(cell.profile for cell in study.cells):
        return []  # real layers, which only a profile of them would tell apart
    from lab.simulate.scorecard import of_study  # imports matplotlib

    profile, hardware = (
        read_file(group, name, None)
        for group, name in (("profile", DEFAULT_PROFILE), ("hardware", HARDWARE))
    )
    card = of_study(folder, profile, hardware)
    header = ["strategy", "profile", "links", "ranks", "batch", "measured ms", "predicted ms"]
    rows = [
        [
            *(cell.strategy, cell.profile, cell.conditions),
            *(str(cell.world_size), str(cell.batch_size)),
            *(f"{1e3 * median(cell.measured_s):.4g}", f"{1e3 * cell.predicted_s:.4g}"),
            *(f"{100 * cell.error:+.1f} %", cell.evidence),
        ]
        for cell in card.cells
    ]
    title = "Predicted beside measured steps; of fitted cells the error says little"
    return [of_texts(f"{prefix}predicted", title, [*header, "error", "cell"], rows)]


def claims_tables(folder: Path, study: Study, prefix: str) -> list[Table]:
    """Judge the published claims that the study measures, if there are claims of its name."""
    if study.name not in choices_of("claims"):
        return []
    from lab.claims.findings import verify  # imports torch
    from lab.claims.page import claim_line, header_of

    found = verify(study.name, folder)
    rows = [claim_line(verdict) for verdict in found.verdicts]
    title = f"Published claims: {found.paper.title}"
    return [of_texts(f"{prefix}claims", title, header_of(found.verdicts), rows)]

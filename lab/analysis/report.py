"""Everything `lab.plot` writes about a study."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from lab.analysis import style, summary
from lab.analysis.figures_convergence import convergence
from lab.analysis.figures_payload import payload
from lab.analysis.figures_speedup import scaling, speedup_bars, throughput
from lab.analysis.figures_step import step_time
from lab.analysis.records import SCALINGS, load_study
from lab.analysis.speedup import table
from lab.analysis.style import NothingToDraw, Sheet

FIGURES: tuple[Callable[[Sheet], Figure], ...] = (
    *(speedup_bars, scaling, throughput),
    *(step_time, payload, convergence),
)
# Without a date in it, a file depends on its records alone.
METADATA = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}


def report(folder: Path, out: Path, formats: Sequence[str], baseline: str | None = None) -> None:
    """Write summary.csv and all figures of the study in `folder` to `out`; print its table.

    Args:
        folder: `runs/<study>`.
        out: where files go; made if need be.
        formats: any of png, svg, pdf.
        baseline: as in `speedup.table`.

    Raises:
        ValueError: the study cannot be read, or has no such baseline.
        OSError: `out` cannot be written to.
    """
    study = load_study(folder)
    rows = table(study, baseline)
    out.mkdir(parents=True, exist_ok=True)
    summary.write_csv(rows, out / "summary.csv")
    print(summary.text(rows, study), end="\n\n")
    looks = style.looks(row.series for row in rows)
    present = [name for name in SCALINGS if any(row.scaling == name for row in rows)]
    for name in present:
        mine = tuple(row for row in rows if row.scaling == name)
        suffix = "_weak" if name == "weak" and len(present) > 1 else ""
        _draw_all(Sheet(study, name, mine, looks), out, suffix, formats)


def _draw_all(sheet: Sheet, out: Path, suffix: str, formats: Sequence[str]) -> None:
    for draw in FIGURES:
        stem = out / f"{draw.__name__}{suffix}"
        with matplotlib.rc_context(style.RC):
            try:
                figure = draw(sheet)
            except NothingToDraw as reason:
                print(f"skipped {stem.name}: {reason}")
                continue
            for kind in formats:
                path = stem.with_name(f"{stem.name}.{kind}")
                figure.savefig(path, dpi=150, bbox_inches="tight", metadata=METADATA[kind])
        print(f"wrote {', '.join(str(stem) + '.' + kind for kind in formats)}")

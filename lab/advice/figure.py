"""Advice as a figure and as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lab.advice.view import Row, about, best_rows
from lab.draw import style
from lab.draw.looks import Look, looks_of
from lab.draw.save import save
from lab.record.files import write_json

KINDS = ("exact", "lossy")
MOST = 5  # series of a panel: more cannot be told apart
APART = 1.03  # factor between the places of two series, so that their intervals are seen


def write(target: Path, result: Row) -> list[Path]:
    """Write the result as JSON and its figure next to it, or the figure alone into a PNG.

    Raises:
        OSError: a file cannot be written.
    """
    written = [] if target.suffix == ".png" else [target]
    for path in written:
        write_json(path, result)
    if result["rows"]:
        written.append(target.with_suffix(".png"))
        save(lambda: figure(result), written[-1])
    return written


def figure(result: Row) -> Figure:
    """Draw each rank's samples per second over ranks: the best series, at their best's batch."""
    kinds = [kind for kind in KINDS if result["best"][kind]]
    drawn, axes = style.canvas(1, len(kinds), 4.2 * len(kinds) + 2.4, 4.0, sharey=True)
    best = {kind: best_rows(result, kind)[:MOST] for kind in kinds}
    looks = looks_of(row["series"] for kind in kinds for row in best[kind])
    for panel, kind in zip(axes[0], kinds, strict=True):
        _panel(panel, result["rows"], best[kind], looks)
        panel.set_title(f"{kind}, {_batch_text(best[kind])}")
    axes[0][0].set_ylabel("samples per second and rank")
    title = f"Predicted throughput of the best options; target: {result['target']['text']}"
    handles: list[Any] = [
        Line2D([], [], label=f"{name} (predicted)", markerfacecolor="white", **_line(look))
        for name, look in looks.items()
    ]
    ideal = Line2D([], [], label="efficiency 1", color=style.GREY, linestyle=":")
    return style.frame(drawn, title, [*handles, ideal], about(result))


def _panel(panel: Axes, rows: list[Row], best: list[Row], looks: dict[str, Look]) -> None:
    sizes = style.unique(row["world_size"] for row in rows)
    first = best[0]
    alone = first["samples_per_s"] / (first["efficiency"] * first["world_size"])
    panel.axhline(alone, color=style.GREY, linestyle=":", linewidth=1)
    for number, row in enumerate(best):
        shift = APART ** (number - (len(best) - 1) / 2)
        _draw(panel, _same_batch(rows, row), shift, looks[row["series"]])
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes, [str(size) for size in sizes])
    panel.set_ylim(bottom=0)
    panel.minorticks_off()
    panel.set_xlabel("ranks")
    panel.grid(linewidth=0.4)


def _draw(panel: Axes, rows: list[Row], shift: float, look: Look) -> None:
    sizes = [row["world_size"] for row in rows]
    x = [shift * size for size in sizes]
    y = [row["samples_per_s"] / row["world_size"] for row in rows]
    ends = [row["samples_per_s_interval"] for row in rows]
    below = [rate - low / size for rate, size, (low, _) in zip(y, sizes, ends, strict=True)]
    above = [high / size - rate for rate, size, (_, high) in zip(y, sizes, ends, strict=True)]
    shape = {"linewidth": 1.2, "elinewidth": 0.8, "capsize": 2, "markersize": 5}
    panel.errorbar(x, y, [below, above], markerfacecolor="white", **shape, **_line(look))


def _line(look: Look) -> dict[str, Any]:
    return {"color": look.colour, "marker": look.marker, "linestyle": look.line}


def _same_batch(rows: list[Row], best: Row) -> list[Row]:
    """Return the rows of a series with the batch of its best one, by ranks."""
    key = _batch_key(best)
    alike = [row for row in rows if row["series"] == best["series"] and row[key] == best[key]]
    return sorted(alike, key=lambda row: row["world_size"])


def _batch_key(row: Row) -> str:
    return "per_rank_batch_size" if row["scaling"] == "weak" else "batch_size"


def _batch_text(rows: list[Row]) -> str:
    key = _batch_key(rows[0])
    sizes = ", ".join(str(size) for size in style.unique(row[key] for row in rows))
    return f"{'per-rank' if key.startswith('per') else 'global'} batch {sizes}"

"""Draw claims as a forest plot: values over what each claim allows, by kind."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullFormatter

from lab.claims.claims import KINDS, Check
from lab.claims.verdicts import Verdict
from lab.draw import style
from lab.draw.looks import BLACK, BLUE, GREEN, ORANGE, VERMILLION

COLOURS = dict(zip(KINDS, (VERMILLION, ORANGE, BLUE, style.GREY, GREEN), strict=True))
LIMITS = (0.2, 5.0)  # of the axis, in units of what a claim says
MARK = {"markersize": 4, "clip_on": False}


def verdicts(found: Sequence[Verdict], notes: list[str]) -> Figure:
    """Draw a line for each claim: the band that it allows, and the values that were found.

    Values are divided by the claim's figure or bound, so that all share an axis; those beyond the
    axis are drawn at its end.
    """
    ordered = [each for kind in KINDS for each in found if each.claim.kind == kind]
    known = [each for each in ordered if each.outcome != "unknown"]
    figure, axes = style.canvas(1, 1, 9.6, 0.32 * len(known) + 1.4)
    panel = axes[0][0]
    for place, verdict in enumerate(reversed(known)):
        _line(panel, place, verdict)
    panel.axvline(1, color=BLACK, linewidth=0.6)
    panel.set_xscale("log")
    panel.set_xlim(*LIMITS)
    panel.set_xticks([0.2, 0.5, 1, 2, 5], ["0.2", "0.5", "1", "2", "5"])
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_yticks(range(len(known)), [_label(each) for each in reversed(known)], fontsize=7)
    panel.set_ylim(-0.6, len(known) - 0.4)
    panel.set_xlabel("value / what the claim says")
    return style.frame(figure, "Claims: what was found, and what holds", _entries(known), notes)


def _line(panel: Axes, place: int, verdict: Verdict) -> None:
    unit, colour = _unit(verdict.claim.check), COLOURS[verdict.claim.kind]
    least, most = verdict.claim.check.allowed
    band = [_clip(least / unit), _clip(most / unit)]
    panel.barh(place, band[1] - band[0], 0.7, left=band[0], color=colour, alpha=0.25)
    if verdict.predicted is not None:
        face = "white" if verdict.evidence == "measured" else BLACK
        x = _clip(verdict.predicted / unit)
        panel.plot(x, place, "D", color=BLACK, markerfacecolor=face, **MARK)
        ends = verdict.predicted_ends or (verdict.predicted, verdict.predicted)
        panel.plot([_clip(end / unit) for end in ends], [place] * 2, color=style.GREY, linewidth=1)
    value = verdict.measured
    if not math.isnan(value.mid):
        panel.plot(_clip(value.mid / unit), place, "o", color=BLACK, **MARK)
    if not math.isnan(value.lo):
        panel.plot([_clip(value.lo / unit), _clip(value.hi / unit)], [place] * 2, color=BLACK)


def _unit(check: Check) -> float:
    """Return what the claim says: its figure, or its one bound; 1 where that is 0."""
    return next(x for x in (check.about, check.at_least, check.at_most) if x is not None) or 1.0


def _clip(value: float) -> float:
    return min(max(value, LIMITS[0]), LIMITS[1])


def _label(verdict: Verdict) -> str:
    says = verdict.claim.says
    return f"{says if len(says) <= 60 else says[:59] + '…'}: {verdict.outcome}"


def _entries(found: Sequence[Verdict]) -> list[Artist]:
    kinds = [kind for kind in KINDS if any(each.claim.kind == kind for each in found)]
    entries: list[Artist] = [
        Patch(color=COLOURS[k], alpha=0.25, label=f"{k}: allowed") for k in kinds
    ]
    mark = {"color": BLACK, "linestyle": "", "markersize": 4}
    predicted = [each for each in found if each.predicted is not None]
    if predicted:
        beside = any(each.evidence == "measured" for each in predicted)
        face = "white" if beside else BLACK
        label = "predicted or counted"
        entries.append(Line2D([], [], marker="D", markerfacecolor=face, label=label, **mark))
    if any(each.predicted_ends for each in predicted):
        entries.append(Line2D([], [], color=style.GREY, linewidth=1, label="as assumptions allow"))
    if any(each.evidence == "measured" for each in found):
        entries.append(Line2D([], [], marker="o", label="measured", **mark))
        entries.append(Line2D([], [], color=BLACK, label="95 % interval"))
    return entries

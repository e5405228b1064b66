"""The page of published scaling: predictions of each source by terms fitted to all others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lab.claims.page import made_by, write_csv, write_lines
from lab.claims.published import (
    FigureScore,
    HeldOut,
    TermsFit,
    figures,
    fitted,
    held_out,
    left_out,
    predicted,
    unseen,
)
from lab.draw.chart import BLUE, GREY, ORANGE, Chart, alt
from lab.draw.plots import ALONE
from lab.draw.text import in_words, markdown
from lab.settings.errors import ConfigError
from lab.simulate.hardware import Learned
from lab.simulate.terms import FREEDOM, LEVELS, TERMS, reach

WORST = 15  # figures on the page
KINDS = ["source left out of the fit", "never seen"]
HEADER = ("origin", "source", "figure", "from_gpus", "gpus", "published", "predicted")
HEADER += ("low_80", "high_80", "low_95", "high_95", "error", "linear_error")
SCORES = ("figures", "median error", "worst", "bias", "error of linear scaling", "skill")
SCORES += ("80 %", "95 %")


def report(out: Path | None, terms: Path | None, command: str) -> int:
    """Fit and score all published scaling; print the scores. Returns the exit code.

    Args:
        out: for the page. terms: for a file of conf/terms.

    Raises:
        ConfigError: a file cannot be read or written.
    """
    given = figures()
    fit = fitted(given)
    fits = left_out(given, fit.logarithms)
    rows, exam = held_out(given, fits), predicted(unseen(), fit)
    print("\n".join([*summary(rows, fit), "", *examination(exam)]))
    try:
        written = write(rows, exam, fit, out, command) if out else []
        if terms:
            write_terms(fit, fits, terms, command)
            written.append(terms)
    except OSError as error:
        raise ConfigError(str(error)) from None
    if written:
        print(f"wrote {', '.join(map(str, written))}")
    return 0


def summary(rows: Sequence[HeldOut], fit: TermsFit) -> list[str]:
    """List the scores by origin, and the terms."""
    origins = dict.fromkeys(row.figure.origin for row in rows)
    table = [_scores(name, [row for row in rows if row.figure.origin == name]) for name in origins]
    whole = FigureScore.of(rows)
    return [
        *markdown(["source left out", *SCORES], [*table, _scores("**all**", rows)]),
        "",
        "The skill is 1 − (median error / median error of linear scaling). Linear scaling means "
        "that N GPUs are N times as fast as one. Over all sources, the mean errors are "
        f"{100 * whole.mean:.1f} % for the predictions and {100 * whole.linear_mean:.1f} % for "
        "linear scaling. Computed from these mean errors instead of the median errors, the skill "
        f"is {whole.mean_skill:.2f}. The bias is the mean signed error. The last two columns give "
        "the percentages of published figures that are inside the 80 % intervals and the 95 % "
        "intervals of their predictions.",
        *_not_better(origins, rows),
        "",
        *terms_table(fit),
    ]


def examination(rows: Sequence[HeldOut]) -> list[str]:
    """Write the score of figures that were found once the model was final, and each of them."""
    score, origins = FigureScore.of(rows), {row.figure.origin for row in rows}
    narrow, wide = (sum(row.covered(level) for row in rows) for level in LEVELS)
    return [
        f"We found {len(rows)} more figures from {len(origins)} sources, and have never fitted "
        "anything to them. The predictions have a median error of "
        f"{_percent(score.median)} and a worst error of {_percent(score.worst)}. Linear scaling "
        f"has a median error of {_percent(score.linear_median)}, so the skill is "
        f"{score.skill:.2f}. Of the {len(rows)} figures, {narrow} are inside the 80 % interval and "
        f"{wide} are inside the 95 % interval.",
        "",
        *_worst(rows),
    ]


def _scores(name: str, rows: Sequence[HeldOut]) -> list[str]:
    score = FigureScore.of(rows)
    inside = (sum(row.covered(level) for row in rows) / len(rows) for level in LEVELS)
    return [
        *(name, str(score.number), _percent(score.median), _percent(score.worst)),
        *(_percent(score.bias, "+"), _percent(score.linear_median), f"{score.skill:.2f}"),
        *(f"{100 * share:.0f} %" for share in inside),
    ]


def _not_better(origins: Sequence[str] | dict[str, None], rows: Sequence[HeldOut]) -> list[str]:
    """Name the sources on which linear scaling is as good."""
    worse = [
        name
        for name in origins
        if FigureScore.of([row for row in rows if row.figure.origin == name]).skill <= 0
    ]
    better = "The predictions are no better than linear scaling for"
    return ["", f"**{better} {in_words(worse)}.**"] if worse else []


def terms_table(fit: TermsFit) -> list[str]:
    """Write each term as assumed and as learned, with the interval of a new source."""
    level, rows = LEVELS[0], []
    open_ = fit.of_a_new_source.diagonal()
    learned = zip(TERMS.items(), fit.logarithms, open_, strict=True)
    for (name, term), logarithm, variance in learned:
        before = reach(term.median, term.spread, level)
        after = reach(math.exp(logarithm), math.sqrt(variance), level)
        values = (term.median, before), (math.exp(logarithm), after)
        texts = [f"{point:.3g} [{low:.3g}, {high:.3g}]" for point, (low, high) in values]
        rows.append([name, *texts, term.source])
    host, link = fit.effects
    return [
        *markdown(["term", "assumed [80 %]", "learned [80 % for a new source]", "basis"], rows),
        "",
        "From source to source, the costs of hosts and kernels vary by a factor of "
        f"e^{host:.2f}, and the costs of links vary by a factor of e^{link:.2f}. The exponents are "
        "standard deviations. The remaining errors follow Student's t distribution with "
        f"{FREEDOM:.0f} degrees of freedom and a scale of {100 * fit.residual:.1f} %.",
    ]


def write(
    rows: Sequence[HeldOut], exam: Sequence[HeldOut], fit: TermsFit, path: Path, command: str
) -> list[Path]:
    """Write the page, and its picture beside it.

    Raises:
        OSError: a file cannot be written.
    """
    pictures = chart(rows, exam).write(path.with_suffix(""), ["png"])
    table = path.with_suffix(".csv")
    write_csv(table, HEADER, [_values(row) for row in (*rows, *exam)])
    lines = [
        "# Published scaling, predicted with terms fitted to other sources",
        "",
        "To predict the speedups that a source published, we use terms of the cost model that are "
        "fitted only to the other sources. The other inputs of a prediction are data sheets and "
        "the throughput that the source published for the smallest number of GPUs. We had already "
        "seen the published figures when we chose the structure of the cost model, so its errors "
        "on other figures may be larger.",
        "",
        *summary(rows, fit),
        "",
        f"![predicted and published]({pictures[0].name})",
        "",
        "## Figures that the model had never seen",
        "",
        *examination(exam),
        "",
        "## The worst figures",
        "",
        "Each speedup is relative to the smallest number of GPUs for which its source gives a "
        f"figure. Brackets give 80 % intervals. [{table.name}]({table.name}) lists all figures and "
        "their sources.",
        "",
        *_worst(rows),
        *made_by(command),
    ]
    write_lines(path, lines)
    return [path, *pictures, table]


def write_terms(fit: TermsFit, fits: Mapping[str, TermsFit], path: Path, command: str) -> None:
    """Write the terms as a file of conf/terms, and those that know nothing of a source's figures.

    Raises:
        OSError: the file cannot be written.
    """
    lines = [
        f"# Terms of GPUs, learned from published scaling by `{command}`",
        "# (docs/results/published.md): the medians, the covariance of the logarithms for a new",
        "# source, and the scale of the error that remains in the logarithm of a step time.",
        "# `without`: the same, fitted without one source, for predictions of its own claims.",
        *_terms(fit.prior),
        "without:",
    ]
    for origin, each in fits.items():
        lines += [f"  {origin}:", *(f"    {line}" for line in _terms(each.prior))]
    write_lines(path, lines)


def _terms(prior: Learned) -> list[str]:
    medians = zip(prior.keys, prior.means, strict=True)
    return [
        *("medians:", *(f"  {key}: {math.exp(mean):.6g}" for key, mean in medians)),
        "covariance:",
        *(f"  - [{', '.join(f'{v:.6g}' for v in row)}]" for row in prior.covariance),
        f"residual: {prior.residual:.6g}",
    ]


def _worst(rows: Sequence[HeldOut]) -> list[str]:
    header = ["source", "figure", "GPUs", "published", "predicted", "error"]
    header += ["error of linear scaling"]
    table = []
    for row in sorted(rows, key=lambda each: -abs(each.error))[:WORST]:
        figure, ends = row.figure, "–".join(f"{end:.3g}" for end in row.ends(LEVELS[0]))
        predicted = f"{figure.speedup(row.slowdown):.3g} [{ends}]"
        published = f"{figure.speedup(figure.slowdown):.3g}"
        errors = _percent(row.error, "+"), _percent(row.linear_error, "+")
        where = figure.origin, figure.says.partition(":")[0], str(figure.at.ranks)
        table.append([*where, published, predicted, *errors])
    return markdown(header, table)


def _values(row: HeldOut) -> list[object]:
    figure, ends = row.figure, (end for level in LEVELS for end in row.ends(level))
    speedups = map(figure.speedup, (figure.slowdown, row.slowdown))
    about = figure.origin, figure.source, figure.says, figure.start.ranks, figure.at.ranks
    return [*about, *speedups, *ends, row.error, row.linear_error]


def chart(rows: Sequence[HeldOut], exam: Sequence[HeldOut]) -> Chart:
    """Chart predicted over published efficiency, with 80 % intervals."""
    data: Any = pd.DataFrame(
        {
            "kind": kind,
            "source": row.figure.origin,
            "figure": row.figure.says,
            "published": _efficiency(row, row.figure.slowdown),
            "predicted": _efficiency(row, row.slowdown),
            "low": row.ends(LEVELS[0])[0] / _growth(row),
            "high": row.ends(LEVELS[0])[1] / _growth(row),
        }
        for kind, of_kind in zip(KINDS, (rows, exam), strict=True)
        for row in of_kind
    )
    ends = float(data[["published", "low"]].min().min()), float(data["high"].max())
    scale = alt.Scale(domain=ends, nice=False)
    x = alt.X("published:Q", scale=scale, title="published / linear speedup")
    y = alt.Y("predicted:Q", scale=scale, title="predicted / linear speedup")
    legend = alt.Legend(title=None, orient="bottom", symbolOpacity=1)
    colours = alt.Scale(domain=KINDS, range=[BLUE, ORANGE])
    base = alt.Chart(data).encode(x, alt.Color("kind:N", scale=colours, legend=legend))
    right = pd.DataFrame({"published": ends, "predicted": ends})
    linear = pd.DataFrame({"published": ends, "predicted": [1, 1], "text": ["linear scaling", ""]})
    words = {"align": "left", "baseline": "bottom", "dx": 4, "dy": -2, "color": GREY}
    body = alt.layer(
        base.mark_rule(opacity=0.2).encode(alt.Y("low:Q", scale=scale), alt.Y2("high:Q")),
        alt.Chart(right).mark_line(color=GREY, strokeWidth=1).encode(x, y),
        alt.Chart(linear).mark_line(color=GREY, strokeDash=[4, 3]).encode(x, y),
        alt.Chart(linear).mark_text(**words).encode(x, y, alt.Text("text:N")),
        base.mark_point(filled=True, size=30, opacity=0.8).encode(y, tooltip=list(data.columns)),
    ).properties(width=ALONE, height=ALONE)
    score = FigureScore.of(rows)
    message = (
        f"Predicted speedups are off by {100 * score.median:.1f} %, and linear scaling "
        f"by {100 * score.linear_median:.1f} % (medians)"
    )
    about = f"{len(rows)} figures, each predicted with terms fitted to the other sources"
    about += "; on the diagonal, prediction and publication agree; bars: 80 % intervals"
    return Chart("published", message, [about], body, ALONE)


def _growth(row: HeldOut) -> float:
    return row.figure.at.ranks / row.figure.start.ranks


def _efficiency(row: HeldOut, slowdown: float) -> float:
    return row.figure.speedup(slowdown) / _growth(row)


def _percent(share: float, sign: str = "") -> str:
    return f"{100 * share:{sign}z.1f} %"

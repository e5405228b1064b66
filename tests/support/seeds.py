"""The page of the documents that the project started from, statement by statement.

    python -m tests.support.seeds > docs/results/seeds.md

conf/published/seeds.yaml names each statement's claims, or why it can have none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Any

from lab.claims.claims import Paper
from lab.draw.text import markdown
from lab.settings.files import read_file

HEAD = """\
# The seeds, statement by statement

This project started from five documents, its seeds. This page lists every quantitative statement
and every chart or table in these documents. The last column of each table lists the claims that
check a statement: the name of a file in conf/claims, and the numbers of the claims in that file. If
no claim can check a statement, the column gives the reason instead. For each claim in a file,
`python -m lab.verify FILE` prints a verdict and shows whether the claim counts as evidence.

`python -m tests.support.seeds > docs/results/seeds.md` generates this page from
conf/published/seeds.yaml.
"""


def page(data: Mapping[str, Any]) -> list[str]:
    """Write the page: how many statements have claims or reasons, then a table per document.

    Raises:
        ValueError: a statement has neither claim nor reason, or names a claim that there is not.
    """
    reasons, documents = data["reasons"], data["documents"]
    tables: list[str] = []
    summary: list[list[str]] = []
    for document in documents:
        statements = document["statements"]
        rows = [_line(each) for each in statements]
        header = ["where", "statement", "claims"]
        tables += ["", f"## {document['title']}", "", *markdown(header, rows)]
        claims = {claim for each in statements for claim in claims_of(each)}
        checked = sum("claims" in each for each in statements)
        numbers = len(statements), checked, len(claims), len(statements) - checked
        summary.append([document["title"].partition(":")[0], *map(str, numbers)])
    totals = [str(sum(int(row[place]) for row in summary)) for place in range(1, 5)]
    header = ["document", "statements", "with claims", "claims", "with a reason instead"]
    why = Counter(each["why"] for each in _unclaimed(documents))
    listed = [f"* {key} ({why[key]} statements): {text}" for key, text in reasons.items()]
    counted = markdown(header, [*summary, ["all", *totals]])
    return [
        HEAD,
        *counted,
        "",
        "Many of the statements without a claim share one of these reasons:",
        "",
        *listed,
        *tables,
    ]


def claims_of(statement: Mapping[str, Any]) -> list[str]:
    """Return the claims of a statement, as FILE N.

    Raises:
        ValueError: it has neither claim nor reason, or names a claim that there is not.
    """
    if not statement.get("claims") and not statement.get("why"):
        raise ValueError(f"{statement['at']}, {statement['says']}: has neither claim nor reason")
    found: list[str] = []
    for text in statement.get("claims", ()):
        name, _, start = text.partition(": ")
        ours = [
            f"{name} {n}" for n, says in enumerate(_sentences(name), 1) if says.startswith(start)
        ]
        if not ours:
            raise ValueError(f"{statement['at']}: claims={text}: no claim begins so")
        found += ours
    return list(dict.fromkeys(found))


@cache
def _sentences(name: str) -> list[str]:
    return [claim.says for claim in Paper.parse(read_file("claims", name)).claims]


def _line(statement: Mapping[str, Any]) -> list[str]:
    claims = claims_of(statement)
    checked = _listed(claims) if claims else f"none: {statement['why']}"
    return [statement["at"], statement["says"], checked]


def _listed(claims: Sequence[str]) -> str:
    """Write kim2017 1, 3–5 for claims of one file, and so on for each file."""
    places: dict[str, list[int]] = {}
    for claim in claims:
        name, place = claim.split()
        places.setdefault(name, []).append(int(place))
    return "; ".join(f"{name} {_ranges(sorted(found))}" for name, found in places.items())


def _ranges(places: Sequence[int]) -> str:
    runs = [list(run) for _, run in groupby(enumerate(places), lambda pair: pair[1] - pair[0])]
    ends = [(run[0][1], run[-1][1]) for run in runs]
    return ", ".join(str(low) if low == high else f"{low}–{high}" for low, high in ends)


def _unclaimed(documents: list[Any]) -> list[Mapping[str, Any]]:
    every = (each for document in documents for each in document["statements"])
    return [each for each in every if "claims" not in each]


if __name__ == "__main__":
    print("\n".join(page(read_file("published", "seeds"))))

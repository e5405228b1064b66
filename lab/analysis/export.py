"""Everything that records hold as one table, records.csv and records.parquet: a row per cell."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from lab.analysis.records import Study
from lab.record.schema import read_record

FORMULA = re.compile(r"[=+@\t\r]|-(?!\s*[\d.])")  # how one begins; and not -1


def write_records(table: pd.DataFrame, out: Path) -> None:
    """Write a table of records as records.csv and records.parquet to the folder `out`.

    Raises:
        OSError: a file cannot be written.
    """
    without_formulas(table).to_csv(out / "records.csv", index=False)
    table.to_parquet(out / "records.parquet", index=False)


def records_table(study: Study) -> pd.DataFrame:
    """Return a row per cell: its folder, its series, and each value of its record.

    A column is named by the value's dotted key (`step_s.median`, `settings.optim.lr`). Lists, such
    as evaluations and values by rank, are JSON text. An unknown value is missing. A column whose
    values have several types, as settings may, is text.
    """
    rows = [
        {
            "folder": study.name_of(cell.folder),
            "series": cell.series,
            **dict(_flat(read_record(cell.folder / "record.json").to_json())),
        }
        for cell in study.cells
    ]
    table = pd.DataFrame(rows).convert_dtypes()
    for name in table.select_dtypes("object"):  # of several types, or unknown in all rows
        table[name] = table[name].map(_text, na_action="ignore").astype("string")
    return table


def without_formulas(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table in whose texts a spreadsheet finds no formula.

    Names come from others, and `=...` in one would be evaluated where the file is opened: an
    apostrophe before it makes it text. Numbers stay as they are.
    """
    texts = table.select_dtypes(["object", "string"])
    return table.assign(**{name: texts[name].map(_as_text, na_action="ignore") for name in texts})


def _as_text(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value) if isinstance(value, list) else value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)

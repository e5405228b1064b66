"""Text tables."""

from __future__ import annotations

import pytest

from lab.draw.chart import Chart
from lab.draw.text import aligned, markdown, plain, sentence, short_text


def test_markdown_is_plain_and_no_wider_than_a_terminal() -> None:
    claim = "even with large batches, the speedup of four GPUs is only around 1.5"
    rows = [[claim, "1.5", "–", "predicted: agrees"], ["small batches", "1", "–", "agrees"]]
    table = markdown(["claim", "published", "measured", "verdict"], rows)
    lines = plain(["# A paper", "", *table, "", "**counted**: " + 20 * "one two "], width=50)
    assert lines[:2] == ["A paper", "======="] and max(map(len, lines)) <= 50
    text = "\n".join(lines)
    assert "|" not in text and "*" not in text and "measured" not in text
    assert lines[3].split() == ["claim", "published", "verdict"]
    assert lines[5].startswith("even with large batches") and "1.5" in lines[5]
    assert lines[-4].startswith("counted: one two")


def test_tables_are_aligned_and_written_in_markdown() -> None:
    table = [["", "step"], ["ring", "1.5"], ["tree_double", "12.5"]]
    assert aligned(table) == ["             step", "ring          1.5", "tree_double  12.5"]
    assert markdown(["a", "b"], [["1", "2"]]) == ["| a | b |", "| --- | --- |", "| 1 | 2 |"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.25, "0.25"), (2.0, "2"), (12.345, "12.3"), (99.96, "100"), (12345.6, "12346"), (0, "0")],
)
def test_large_numbers_are_written_without_an_exponent(value: float, expected: str) -> None:
    assert short_text(value) == expected


@pytest.mark.parametrize(
    ("clause", "expected"),
    [
        ("dotted: ideal", "Dotted: ideal."),
        ("One stop.", "One stop."),
        ("n = 3 repeats", "n = 3 repeats."),
        ("python -m lab.bench step out=a.json", "python -m lab.bench step out=a.json"),
    ],
)
def test_a_line_below_a_title_is_a_sentence(clause: str, expected: str) -> None:
    assert sentence(clause) == expected
    assert Chart("name", "Message", [clause], None, 400).sentences == [expected]

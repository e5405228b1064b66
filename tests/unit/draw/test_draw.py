"""Text tables."""

from __future__ import annotations

from lab.draw.text import aligned, markdown


def test_tables_are_aligned_and_written_in_markdown() -> None:
    table = [["", "step"], ["ring", "1.5"], ["tree_double", "12.5"]]
    assert aligned(table) == ["             step", "ring          1.5", "tree_double  12.5"]
    assert markdown(["a", "b"], [["1", "2"]]) == ["| a | b |", "| --- | --- |", "| 1 | 2 |"]

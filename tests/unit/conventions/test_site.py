"""The documentation as a site: its menu, the way to each page, its length, and the built pages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.hooks import GENERATED
from tests.conftest import ROOT

DOCS = ROOT / "docs"
CLICKS = 2
LONGEST = 2000  # words of a page, without its code
# Pages to be divided; none may join.
LONG = {
    *("results/README.md", "results/kim2017.md", "results/beyond.md"),
    "results/nvidia.md",
    *("results/beyond_predictions.md", "results/links.md", "results/advice.md", "results/pays.md"),
    "results/seeds.md",  # a table to look things up in, which has to be whole
}
# What a browser would load from elsewhere when a page opens.
LOADED = re.compile(
    r"""<(?:script|img|iframe)[^>]*\bsrc=["']?(?:https?:)?//|<link[^>]*\bhref=["']?(?:https?:)?//"""
    r"""|@import|url\(["']?(?:https?:)?//"""
)


def in_menu(entry: Any) -> list[str]:
    """List the pages of an entry of the menu, and of those below it."""
    if isinstance(entry, str):
        return [entry]
    below = entry.values() if isinstance(entry, dict) else entry
    return [page for each in below for page in in_menu(each)]


PAGES = in_menu(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])


def text_of(page: str) -> str:
    """Return the Markdown of a page, written or generated, without code."""
    text = GENERATED[page]() if page in GENERATED else (DOCS / page).read_text()
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def linked(page: str) -> set[str]:
    """Return the pages to which the text of a page links."""
    targets = re.findall(r"\]\(([^)#:\s]+\.md)(?:#[^)]*)?\)", text_of(page))
    found = ((DOCS / page).parent / target for target in targets)
    return {str(path.resolve().relative_to(DOCS)) for path in found}


def test_the_menu_has_every_page_once() -> None:
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert sorted(PAGES) == sorted({*written, *GENERATED})


def test_every_page_is_two_clicks_away_without_the_menu() -> None:
    reached = {"index.md"}
    for _ in range(CLICKS):
        reached |= {page for each in reached for page in linked(each)}
    assert {*PAGES} - reached == set()


def test_no_page_is_longer_than_can_be_read_at_a_sitting() -> None:
    long = {page for page in PAGES if len(text_of(page).split()) > LONGEST}
    assert long == LONG, "a page that became shorter leaves LONG, and no page joins it"


@pytest.mark.slow
def test_the_site_is_built_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """Strictly: a link or an anchor that leads nowhere is an error."""
    line = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir"]
    line.append(str(tmp_path))
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in PAGES:
        built = tmp_path / re.sub(r"README\.md$", "index.md", page).replace(".md", ".html")
        assert not LOADED.search(built.read_text()), page
    assert [path for path in tmp_path.rglob("*.css") if LOADED.search(path.read_text())] == []

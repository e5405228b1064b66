"""A page whose names attack it, in a real browser: all stay text, and nothing runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from lab.web.page import parts_of, render, write
from tests.browser.conftest import open_page
from tests.support.studies import HOSTILE, make_study, name_by

# As a hole in the escaping would let them in.
INJECTED = {
    "img": """document.body.insertAdjacentHTML(
      "beforeend", "<img src=x onerror='window.ran = 1'>")""",
    "iframe": """document.body.insertAdjacentHTML(
      "beforeend", "<iframe srcdoc='<script>parent.ran = 1</script>'></iframe>")""",
    "script": """const script = document.createElement("script");
      script.textContent = "window.ran = 1";
      document.body.append(script);""",
}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_study(tmp_path_factory.mktemp("attacked") / "</title><script>alert(1)<")
    name_by(folder, HOSTILE)
    path = folder.parent / "report.html"
    write(render(parts_of([folder], f"python -m lab.report {folder.name}")), path)
    return path


@pytest.mark.slow
def test_names_of_others_run_nothing(browser: Browser, attacked: Path, report: Path) -> None:
    opened = open_page(browser, attacked.as_uri())
    assert opened.charts() == open_page(browser, report.as_uri()).charts()
    assert opened.requests == []
    assert opened.messages == []
    assert opened.page.locator("script").count() == 3  # data, the page's own, and Vega
    _rest_on_marks(opened.page)
    assert opened.messages == []


def _rest_on_marks(page: Page) -> None:
    """Show what a mark tells where the pointer rests, for a mark of each name."""
    marks = page.locator("figure[id$=speedup] .mark-symbol.role-mark path")
    for at in range(marks.count()):
        marks.nth(at).hover(force=True)
    assert page.locator(".tip").is_visible()


@pytest.mark.slow
def test_the_policy_admits_no_other_script(browser: Browser, attacked: Path) -> None:
    opened = open_page(browser, attacked.as_uri())
    for tag in ("img", "iframe", "script"):
        with opened.page.expect_console_message(lambda said: "Content Security" in said.text):
            opened.page.evaluate(INJECTED[tag])
    assert opened.page.evaluate("window.ran") is None
    answered = "fetch('http://127.0.0.1:9/').then(() => 'answered', () => 'refused')"
    assert opened.page.evaluate(answered) == "refused"

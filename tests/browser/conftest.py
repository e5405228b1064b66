"""A browser for pages: the distribution's Chromium, without any network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Dialog,
    Page,
    Request,
    expect,
    sync_playwright,
)

from lab.web.page import parts_of, render, write
from tests.support import HANG_S
from tests.support.studies import make_study

# A browser beside other tests is slow: 5 s, which `expect` waits by itself, are too few then.
expect.set_options(timeout=1e3 * HANG_S)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""


@dataclass
class Opened:
    """A page in a browser, and all that it asked for and said."""

    page: Page
    requests: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def charts(self) -> int:
        """Scroll to every chart, wait until all are interactive, and count them."""
        figures = self.page.locator("figure[data-chart]")
        for at in range(figures.count()):
            # Not `scroll_into_view_if_needed`, which waits for two frames that show the chart at
            # one place: Chromium without a screen may stop drawing frames when nothing changes.
            figures.nth(at).evaluate("figure => figure.scrollIntoView({block: 'center'})")
            self.page.wait_for_function(
                "at => document.querySelectorAll('figure[data-chart]')[at].dataset.live",
                arg=at,
                polling=50,
            )
        return figures.count()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if not CHROMIUM:
        pytest.skip("there is no Chromium here (Debian: chromium)")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(autouse=True)
def _close_pages(browser: Browser) -> Iterator[None]:
    """Close what a test opened: Chromium may stop drawing pages that lie behind others."""
    yield
    for context in browser.contexts:
        context.close()


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of a study of 150 runs, with the timeline of one."""
    folder = make_study(tmp_path_factory.mktemp("studies") / "made")
    path = folder / "report.html"
    write(render(parts_of([folder], "python -m lab.report made")), path)
    return path


def open_page(browser: Browser, url: str, **context: object) -> Opened:
    """Open a page, and keep what it asks for and says."""
    page = browser.new_context(**context).new_page()  # pyright: ignore[reportArgumentType]
    page.set_default_timeout(1e3 * HANG_S)
    opened = Opened(page)

    def asked(request: Request) -> None:
        if request.url != url:
            opened.requests.append(request.url)

    def said(message: ConsoleMessage) -> None:
        opened.messages.append(message.text)

    page.on("request", asked)
    page.on("console", said)

    def asks(dialog: Dialog) -> None:
        opened.messages.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    page.on("dialog", asks)
    page.on("pageerror", lambda error: opened.messages.append(str(error)))
    page.goto(url)
    return opened

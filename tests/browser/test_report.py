"""A report in a real browser: what it shows, how it answers, and that it asks for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser

from tests.browser.conftest import Opened, open_page
from tests.support.slow import some_of
from tests.support.studies import STRATEGIES

NUM_POINTS = len(STRATEGIES) * 3 * 2


@pytest.fixture
def opened(browser: Browser, report: Path) -> Opened:
    return open_page(browser, report.as_uri())


def test_it_asks_for_nothing_says_nothing_and_draws_every_chart(opened: Opened) -> None:
    assert opened.charts() >= 6
    marks = opened.page.locator("figure[id$=speedup]").get_attribute("data-marks")
    assert int(marks or 0) == NUM_POINTS
    sizes = opened.page.locator("figure .drawing svg, figure .drawing canvas").evaluate_all(
        "drawn => drawn.map(each => each.getBoundingClientRect().width)"
    )
    assert min(sizes) > 300
    assert opened.requests == []
    assert opened.messages == []


def test_lines_are_sorted_and_filtered(opened: Opened) -> None:
    table = opened.page.locator("#s1-points")
    head = table.locator("th", has_text="step ms")
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    place = 1 + table.locator("th").all_inner_texts().index("step ms")
    texts = table.locator(f"tbody tr td:nth-child({place})").all_inner_texts()
    times = [float(text.split(" ")[0]) for text in texts]
    assert times == sorted(times)
    head.locator("button").press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    opened.page.get_by_role("searchbox").first.fill("onebit 128")
    assert table.locator("tbody tr:visible").count() == 3


def test_a_mark_tells_its_numbers_and_its_command(opened: Opened) -> None:
    opened.charts()
    marks = opened.page.locator("figure[id$=speedup] .mark-symbol.role-mark path")
    marks.last.scroll_into_view_if_needed()
    marks.last.hover(force=True)
    text = opened.page.locator(".tip").inner_text()
    assert "python -m lab.sweep study=made" in text
    assert "repeats: 5" in text


def test_the_timeline_zooms_by_wheel_and_keyboard(opened: Opened) -> None:
    opened.charts()
    figure = opened.page.locator("figure.timeline .drawing")
    figure.scroll_into_view_if_needed()
    picture = figure.screenshot()
    figure.press("+")
    closer = figure.screenshot()
    assert closer != picture
    figure.press("0")
    assert figure.screenshot() == picture
    figure.hover()
    opened.page.mouse.wheel(0, -400)
    opened.page.wait_for_timeout(200)
    assert figure.screenshot() != picture


@pytest.mark.parametrize(
    ("width", "scheme"),
    some_of([(360, "light"), (360, "dark"), (1400, "light"), (1400, "dark")], every=4),
)
def test_anyone_can_read_it(browser: Browser, report: Path, width: int, scheme: str) -> None:
    size = {"width": width, "height": 800}
    opened = open_page(
        browser, report.as_uri(), viewport=size, color_scheme=scheme, bypass_csp=True
    )
    opened.charts()
    wider = "drawn => drawn.filter(each => each.scrollWidth > each.clientWidth + 1).length"
    assert opened.page.locator("figure[id$=speedup] .drawing").evaluate_all(wider) == 0
    found = Axe().run(opened.page)
    assert found.violations_count == 0, found.generate_report()
    wide = opened.page.evaluate("document.documentElement.scrollWidth")
    assert wide <= width


def test_without_javascript_it_holds_all_numbers_and_charts(browser: Browser, report: Path) -> None:
    opened = open_page(browser, report.as_uri(), java_script_enabled=False)
    assert opened.page.locator("#s1-points tbody tr").count() == NUM_POINTS
    drawings = opened.page.locator("figure .drawing > svg")
    assert drawings.count() == opened.page.locator("figure").count() >= 6


def test_it_prints(opened: Opened) -> None:
    opened.page.emulate_media(media="print")
    assert not opened.page.locator(".filter").first.is_visible()
    assert len(opened.page.pdf()) > 10_000

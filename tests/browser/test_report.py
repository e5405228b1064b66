"""A report in a real browser: what it shows, how it answers, and that it asks for nothing."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser

from lab.web.page import parts_of, render, write
from tests.browser.conftest import Opened, open_page
from tests.conftest import wait_for
from tests.support.records import leave, make_record
from tests.support.slow import some_of
from tests.support.studies import STRATEGIES

# Texts of charts that lie on others, or beyond what is shown of their chart; and of the page.
UNREADABLE = """width => {
  const texts = (svg) => [...svg.querySelectorAll("text")].filter((text) =>
    text.textContent.trim() && getComputedStyle(text).opacity !== "0");
  const found = [];
  for (const svg of document.querySelectorAll("figure svg")) {
    const room = svg.closest(".drawing").getBoundingClientRect();
    const boxes = texts(svg).map((text) => [text.textContent, text.getBoundingClientRect()]);
    boxes.forEach(([text, box], at) => {
      if (box.left < room.left - 1 || box.right > room.right + 1) found.push(`clipped: ${text}`);
      for (const [other, one] of boxes.slice(at + 1)) {
        const wide = Math.min(box.right, one.right) - Math.max(box.left, one.left);
        const high = Math.min(box.bottom, one.bottom) - Math.max(box.top, one.top);
        if (wide > 1 && high > 2) found.push(`${text} lies on ${other}`);
      }
    });
  }
  for (const part of document.querySelectorAll("h1, h2, h3, p, dt, dd, li, figcaption, summary")) {
    const box = part.getBoundingClientRect();
    if (box.right > width + 1 || part.scrollWidth > part.clientWidth + 1 && part.clientWidth > 1) {
      found.push(`too wide: ${part.textContent.slice(0, 40)}`);
    }
  }
  return found;
}"""
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


def test_the_verdict_and_the_first_chart_are_seen_at_once_and_no_text_lies_on_another(
    browser: Browser, report: Path
) -> None:
    opened = open_page(browser, report.as_uri(), viewport={"width": 1280, "height": 900})
    opened.page.locator("figure[data-live]").first.wait_for()
    first = opened.page.locator("figure .drawing").first.bounding_box()
    assert first
    assert first["y"] + first["height"] <= 900
    assert first["width"] >= 0.95 * 1280
    verdict = opened.page.locator(".verdict").bounding_box()
    table = opened.page.locator("table").first.bounding_box()
    assert verdict and table
    assert verdict["y"] < first["y"] < table["y"]
    assert opened.charts() >= 6
    assert opened.page.evaluate(UNREADABLE, 1280) == []


def test_on_a_phone_no_text_is_clipped_or_lies_on_another(browser: Browser, report: Path) -> None:
    size = {"width": 390, "height": 900}
    opened = open_page(browser, report.as_uri(), viewport=size)
    assert opened.charts() >= 6
    assert opened.page.evaluate(UNREADABLE, 390) == []


def test_on_a_phone_long_names_of_lines_stand_in_a_legend(browser: Browser, tmp_path: Path) -> None:
    for size, (at, hidden) in product((1, 2), enumerate(("[4096,4096]", "[1024,1024]"))):
        settings = {"model.hidden": hidden, "optim.schedule": f"a_schedule_with_a_long_name_{at}"}
        record = make_record("ring", size, 0.1 / size, variant=settings, settings=settings)
        leave(tmp_path / "made" / f"{at}-{size}", record)
    page = tmp_path / "page.html"
    write(render(parts_of([tmp_path / "made"], "python -m lab.report made")), page)
    opened = open_page(browser, page.as_uri(), viewport={"width": 390, "height": 900})
    assert opened.charts() >= 2
    drawing = opened.page.locator("figure .drawing").first
    assert drawing.evaluate("one => one.scrollWidth <= one.clientWidth")
    assert drawing.locator(".role-legend-label text").count() == 2


def test_lines_are_sorted_and_filtered_and_blank_where_the_one_above_has_the_same(
    opened: Opened,
) -> None:
    table = opened.page.locator("#s1-points")
    assert table.locator("tbody td.again").count() > NUM_POINTS
    assert table.locator("tbody tr").first.locator("td.again").count() == 0
    head = table.locator("th", has_text="step ms")
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    rows = table.locator("tbody tr").evaluate_all(
        "rows => rows.map(row => [row.cells[0].textContent, row.cells[0].className])"
    )
    for (above, _), (text, kind) in pairwise(rows):
        assert (kind == "again") == (above == text)
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
    marks.last.evaluate("mark => mark.scrollIntoView({block: 'center'})")
    marks.last.hover(force=True)
    text = opened.page.locator(".tip").inner_text()
    assert "python -m lab.sweep study=made" in text
    assert "repeats: 5" in text


def test_the_timeline_zooms_by_wheel_and_keyboard(opened: Opened) -> None:
    opened.charts()
    figure = opened.page.locator("figure.timeline .drawing")
    figure.evaluate("figure => figure.scrollIntoView({block: 'center'})")
    picture = figure.screenshot()
    figure.press("+")
    wait_for(lambda: figure.screenshot() != picture)
    figure.press("0")
    wait_for(lambda: figure.screenshot() == picture)
    figure.hover()
    opened.page.mouse.wheel(0, -400)
    wait_for(lambda: figure.screenshot() != picture)


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


def test_without_javascript_a_phone_scrolls_charts_whose_labels_stay_legible(
    browser: Browser, report: Path
) -> None:
    context = browser.new_context(java_script_enabled=False, viewport={"width": 390, "height": 800})
    page = context.new_page()
    page.goto(report.as_uri())
    box = page.locator(".chart .drawing svg").first.bounding_box()
    assert box and box["width"] >= 700
    context.close()


def test_it_prints_on_white(opened: Opened) -> None:
    opened.page.emulate_media(media="print", color_scheme="dark")
    for part, expected in {".verdict": "rgb(0, 0, 0)", ".note": "rgb(89, 89, 89)"}.items():
        colour = opened.page.locator(part).first.evaluate("part => getComputedStyle(part).color")
        assert colour == expected
    assert not opened.page.locator(".filter").first.is_visible()
    assert len(opened.page.pdf()) > 10_000

"""How fast a page is painted, and how smoothly its timeline zooms.

    python -m tests.browser.speed REPORT.html

Figures come from the browser itself: its paint timing, and its trace of drawn frames.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

from playwright.sync_api import Browser, sync_playwright

from tests.browser.conftest import CHROMIUM, open_page

REPEATS, TURNS = 5, 90  # of the wheel
CATEGORIES, DRAWN = ["blink.user_timing", "viz", "benchmark"], "Graphics.Pipeline.DrawAndSwap"
PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
# A turn of the wheel for each frame that the browser asks for, in and out again.
ZOOM = """turns => new Promise(done => {
  const canvas = document.querySelector("figure.timeline canvas");
  const { x, y, width, height } = canvas.getBoundingClientRect();
  const place = { clientX: x + width / 2, clientY: y + height / 2, cancelable: true };
  performance.mark("zoom begins");
  const turn = (left) => {
    if (!left) {
      performance.mark("zoom ends");
      return done();
    }
    canvas.dispatchEvent(new WheelEvent("wheel", { ...place, deltaY: left % 30 < 15 ? -40 : 40 }));
    requestAnimationFrame(() => turn(left - 1));
  };
  turn(turns);
})"""


def first_paint_ms(browser: Browser, url: str) -> float:
    """Return the milliseconds from opening a page to its first paint."""
    return float(open_page(browser, url).page.wait_for_function(PAINT).json_value())


def zoom_frames_per_s(browser: Browser, url: str) -> float:
    """Return how many frames the browser drew in a second while the wheel turned."""
    opened = open_page(browser, url)
    opened.charts()
    opened.page.locator("figure.timeline canvas").hover()  # Vega asks what lies under the pointer
    browser.start_tracing(page=opened.page, categories=CATEGORIES)
    opened.page.evaluate(ZOOM, TURNS)
    return _drawn_per_s(json.loads(browser.stop_tracing())["traceEvents"])


def _drawn_per_s(events: list[dict[str, object]]) -> float:
    def at(name: str) -> float:
        return next(float(str(e["ts"])) for e in events if e["name"] == name)

    begin, end = at("zoom begins"), at("zoom ends")
    drawn = [
        event
        for event in events
        if (event["name"], event["ph"]) == (DRAWN, "b") and begin <= float(str(event["ts"])) <= end
    ]
    return 1e6 * len(drawn) / (end - begin)


def main(path: str) -> None:
    url = Path(path).absolute().as_uri()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        paint = median(first_paint_ms(browser, url) for _ in range(REPEATS))
        zoom = median(zoom_frames_per_s(browser, url) for _ in range(REPEATS))
        print(f"first paint {paint:.0f} ms, zoom {zoom:.0f} frames/s; medians of {REPEATS}")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])

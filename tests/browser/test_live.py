"""A sweep's page while it runs, in a real browser: it follows, and its button stops the sweep."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.conftest import open_page
from tests.support import HANG_S
from tests.support.commands import begun

CELLS = ("study=watched", "strategy=none,allreduce,onebit", "world_size=1", "baselines=all")
RUN = ("device=cpu", "batch_size=24", "data.size=16", "optim.lr=0.01", "steps=200")


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    for line in process.stdout:
        if found := re.match(r"live: (\S+)", line):
            return found[1]
    raise AssertionError("the sweep printed no address")


@pytest.mark.slow
def test_a_sweep_is_followed_and_stopped(
    browser: Browser, environment: dict[str, str], tmp_path: Path
) -> None:
    process = begun(environment, tmp_path, "lab.sweep", *CELLS, *RUN, "report=live")
    address = address_of(process)
    opened = open_page(browser, address)
    status, bar = opened.page.get_by_role("status"), opened.page.locator("progress")
    expect(bar).not_to_have_attribute("value", "0")  # loaded anew by itself
    expect(opened.page.locator("#s1-points tbody tr")).not_to_have_count(0)
    opened.page.get_by_role("button", name="Stop the sweep").click()
    expect(status).to_have_text("The sweep has ended, or was stopped.")
    # Once the server has gone, the browser itself says that nothing answers.
    assert all("net::ERR_" in message for message in opened.messages)
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, output

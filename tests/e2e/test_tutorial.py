"""The tutorial's commands work in order, and print what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.settings.files import choices_of
from tests.support import tutorial
from tests.support.tutorial import LEFT_OUT, STEP, Step

LIMIT_S = 15 * 60  # the page promises it
MAY_VARY = 0.2  # of the lines, as what cannot be told apart in one run may be in another


def labels(text: str) -> set[str]:
    """Return the first words of the lines, but for strategies: which of them lead may vary."""
    first = {line.split()[0] for line in text.splitlines() if line.strip()}
    return {word for word in first if word not in choices_of("strategy")}


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_the_commands_work_in_order_and_print_what_the_page_shows(tmp_path: Path) -> None:
    steps = list[Step]()
    for step in tutorial.run(tmp_path):
        assert step.code == 0, f"{step.line}\n{step.err[-3000:]}"
        expected = labels(step.shown) - {LEFT_OUT}
        missing = expected - labels(step.out)
        assert len(missing) <= MAY_VARY * len(expected), f"{step.line}\n{missing}"
        steps.append(step)
    assert len(steps) == 8
    assert (tmp_path / "mine.html").stat().st_size > 10**5


def test_every_command_of_the_page_has_an_output() -> None:
    text = tutorial.PAGE.read_text()
    found = STEP.findall(text)
    assert len(found) == text.count("```sh\n") == text.count("```text\n")
    assert all(shown.strip() for _, shown in found)

"""docs/your_own.md as a user follows it: its listings are the examples, and its commands work."""

from __future__ import annotations

import difflib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.settings.files import choices_of
from tests.conftest import ROOT, Finished
from tests.support import HANG_S
from tests.support.ranks import CREW

PAGE = (ROOT / "docs/your_own.md").read_text()
EXAMPLES = ROOT / "examples"


def sections() -> dict[str, str]:
    """Return the text of each section that has an example, by the example's folder."""
    texts = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    named = ((re.search(r"examples/(\w+)/", text), text) for text in texts)
    return {match[1]: text for match, text in named if match}


def commands(section: str) -> list[str]:
    """Return the lines of a section's shell blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


LINES = [(folder, line) for folder, text in sections().items() for line in commands(text)]


def test_every_example_is_linked_or_listed_as_it_is() -> None:
    listings = re.findall(r"^```\w+\n# (examples/\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    linked = re.findall(r"\(\.\./(examples/[^)\s]+)\)", PAGE)
    assert {*(name for name, _ in listings), *linked} == {
        str(path.relative_to(ROOT)) for path in EXAMPLES.rglob("*.*") if path.suffix != ".pyc"
    }
    for name, text in listings:
        assert (ROOT / name).read_text() == text
    assert {folder for folder, _ in LINES} == {path.name for path in EXAMPLES.iterdir()}


def test_two_lines_more_make_the_script_one_bit_and_it_learns() -> None:
    plain, onebit = (
        (EXAMPLES / "own_loop" / name).read_text().rpartition('"""')[2].splitlines()
        for name in ("train.py", "train_onebit.py")
    )
    changes = [
        line[2:]
        for line in difflib.ndiff(plain, onebit)
        if line[:2] in ("+ ", "- ") and line[2:].strip()
    ]
    assert changes == ["import lab", '    lab.attach(model, "onebit")']
    path = EXAMPLES / "own_loop/train_onebit.py"
    for losses in CREW.call(2, run_script, path):
        assert losses[-1] < 0.8 * losses[0]


def run_script(path: Path) -> list[float]:
    """Run a script as a rank; return its losses."""
    return runpy.run_path(str(path))["main"]()


def shortened(word: str) -> str:
    """Leave the first and the last of a list of strategies: the others add only time."""
    found = re.fullmatch(r"strategy=(\w+),.*,(\w+)", word)
    return f"strategy={found[1]},{found[2]}" if found else word


@pytest.mark.slow
@pytest.mark.timeout(5 * HANG_S)
@pytest.mark.parametrize("folder", sorted({folder for folder, _ in LINES}))
def test_the_commands_of_a_section_work_in_order(
    command: Callable[..., Finished],
    real_environment: dict[str, str],
    tmp_path: Path,
    folder: str,
) -> None:
    named = {name for _, line in LINES for name in re.findall(r"strategy=(\S+)", line)}
    assert set(",".join(named).split(",")) <= set(choices_of("strategy"))
    shutil.copytree(EXAMPLES / folder, tmp_path, dirs_exist_ok=True)
    for line in (line for where, line in LINES if where == folder):
        words = [shortened(word) for word in shlex.split(line)]
        if words[0] == "torchrun":
            words = ["python", "-m", "torch.distributed.run", "--standalone", *words[1:]]
        if words[-1].endswith(".py"):  # a script, which forks of a warm process cannot run
            run = {"capture_output": True, "text": True, "cwd": tmp_path, "env": real_environment}
            script = subprocess.run([sys.executable, *words[1:]], timeout=HANG_S, **run)
            code, error = script.returncode, script.stderr
        else:
            done = command(*words[2:], timeout_s=4 * HANG_S)  # a sweep beside other tests is slow
            code, error = done.code, done.err
        assert code == 0, f"{line}\n{error[-3000:]}"

"""Guides on code of your own, as a user follows them: listings are the examples, commands work."""

from __future__ import annotations

import difflib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from lab.settings.files import choices_of
from tests.conftest import ROOT, Finished
from tests.support import HANG_S
from tests.support.ranks import CREW

GUIDES = ("own_model", "own_loop", "own_cluster", "trainers", "hydra")
PAGES = [ROOT / f"docs/how-to/{name}.md" for name in GUIDES]
EXAMPLES = ROOT / "examples"


def text_by_example() -> dict[str, str]:
    """Return the text of each page, by the folder of its example."""
    texts = [page.read_text() for page in PAGES]
    return {match[1]: text for text in texts if (match := re.search(r"examples/(\w+)/", text))}


def commands(page: str) -> list[str]:
    """Return the lines of a page's shell blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


LINES = [(folder, line) for folder, text in text_by_example().items() for line in commands(text)]


def test_every_example_is_named_or_listed_as_it_is() -> None:
    texts = "\n".join(text_by_example().values())
    listings = re.findall(r"^```\w+\n# (examples/\S+)\n(.*?)^```$", texts, re.MULTILINE | re.DOTALL)
    named = re.findall(r"`(examples/\S+)`", texts)
    # tests/e2e/test_ray.py runs Ray's example.
    folders = [path for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "ray"]
    assert {*(name for name, _ in listings), *named} == {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in folder.rglob("*.*")
        if path.suffix != ".pyc"
    }
    for name, text in listings:
        assert (ROOT / name).read_text() == text
    assert {folder for folder, _ in LINES} == {folder.name for folder in folders}


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
def test_the_commands_of_a_page_work_in_order(
    command: Callable[..., Finished],
    real_environment: dict[str, str],
    tmp_path: Path,
    folder: str,
) -> None:
    needed = re.findall(r"with_(\w+)\.py", " ".join(line for at, line in LINES if at == folder))
    if missing := [name for name in needed if find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)}: not installed here")
    named = {name for _, line in LINES for name in re.findall(r"strategy=(\S+)", line)}
    assert set(",".join(named).split(",")) <= set(choices_of("strategy"))
    shutil.copytree(EXAMPLES / folder, tmp_path, dirs_exist_ok=True)
    for line in (line for where, line in LINES if where == folder):
        words = [shortened(word) for word in shlex.split(line)]
        if words[0] == "torchrun":
            words = ["python", "-m", "torch.distributed.run", "--standalone", *words[1:]]
        if any(
            word.endswith(".py") for word in words
        ):  # a script, which forks of a warm process cannot run
            run = {"capture_output": True, "text": True, "cwd": tmp_path, "env": real_environment}
            script = subprocess.run([sys.executable, *words[1:]], timeout=HANG_S, **run)
            code, error = script.returncode, script.stderr
        else:
            done = command(*words[2:], timeout_s=4 * HANG_S)  # a sweep beside other tests is slow
            code, error = done.code, done.err
        assert code == 0, f"{line}\n{error[-3000:]}"

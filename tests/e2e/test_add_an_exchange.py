"""The README's example exchange, added to a copy of the tree exactly as the README prints it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.distributed.test_wire import OWN_NETWORK

# Without a network of their own, some generic tests count all bytes on the loopback interface.
pytestmark = [] if OWN_NETWORK else [pytest.mark.alone]

COPIED = ("lab", "conf", "tests", "docs", "launch", "README.md", "pyproject.toml")
FENCED = re.compile(r"^```\w+\n(?:# |<!-- )(\S+?)(?:, into (\w+))?\n(.*?)^```$", re.M | re.S)
# Generic tests that include a new exchange, by test file: one of each is enough.
GENERIC = {
    "tests/distributed/test_strategies.py": (
        "test_trains_and_keeps_replicas_equal[gossip-3]",
        "test_overlapped_is_blocking_bit_for_bit[gossip]",
    ),
    "tests/distributed/test_resume.py": ("test_resumed_run_ends_in_the_same_bits[gossip-2]",),
    "tests/distributed/test_wire.py": (
        "test_counted_bytes_are_those_that_crossed_and_the_cards[gossip-2]",
    ),
    "tests/unit/exchange/test_cards.py": (
        "test_sends_what_its_card_says_and_leaves_all_ranks_the_same[gossip-8]",
        "test_memory_grows_with_the_model_and_holds_gathered_gradients[gossip]",
        "test_allocates_what_its_card_says[gossip-1-4]",
    ),
    "tests/unit/exchange/test_exchanges.py": (
        "test_exact_exchanges_give_every_rank_the_mean[gossip-8-1000]",
    ),
    "tests/unit/simulate/test_simulate.py": (
        "test_overlap_is_never_worse_than_blocking[gossip-nccl]",
        "test_cards_take_time_where_bytes_move_and_say_what_is_staged[gossip]",
    ),
    "tests/unit/analysis/test_looks.py": ("test_figures_draw_a_strategy_as_its_look_says[gossip]",),
    "tests/unit/house/test_exchanges.py": (
        "test_bytes_of_the_readme_are_those_of_the_card[gossip]",
        "test_an_exchange_claims_what_its_bytes_allow[gossip]",
    ),
}
NAMES_WHO_LACKS = "tests/unit/house/test_exchanges.py::test_none_lacks_a_card_a_look_or_a_row"


def additions() -> list[tuple[str, str, str]]:
    """Parse each block of the section: path, table or section it goes into, and text."""
    section = (ROOT / "README.md").read_text().partition("## Add an exchange")[2]
    return FENCED.findall(section.partition("\n## ")[0])


def add(tree: Path, path: str, table: str, text: str) -> None:
    """Add a new file, or rows at the beginning of a table."""
    place = tree / path
    if not table:
        place.write_text(text)
        return
    begin = rf"^{table}\b.*= \{{\n" if path.endswith(".py") else rf"^## {table}\n[\s\S]*?\|---.*\n"
    content, count = re.subn(
        begin, lambda match: match[0] + text, place.read_text(), count=1, flags=re.M
    )
    assert count == 1, f"{path} has no {table}"
    place.write_text(content)


def tree_with(folder: Path, blocks: list[tuple[str, str, str]]) -> Path:
    tree = folder / "tree"
    tree.mkdir()
    for name in COPIED:
        ignored = shutil.ignore_patterns("__pycache__", "*.png")
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tree / name)
    for block in blocks:
        add(tree, *block)
    return tree


def run_pytest(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    return subprocess.run(line, cwd=tree, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_the_readme_says_all_that_a_new_exchange_needs(tmp_path: Path) -> None:
    blocks = additions()
    assert [bool(table) for _, table, _ in blocks] == 3 * [False] + 3 * [True]
    tree = tree_with(tmp_path, blocks)
    expected = {f"{path}::{test}" for path, tests in GENERIC.items() for test in tests}
    done = run_pytest(tree, *sorted(expected), NAMES_WHO_LACKS)
    assert done.returncode == 0, done.stdout[-3000:]
    assert {*expected, NAMES_WHO_LACKS} == set(re.findall(r"^PASSED (.*)$", done.stdout, re.M))


CARD, LOOK, ROW = "lab/simulate/costs.py", "lab/draw/looks.py", "README.md"
MESSAGES = {
    CARD: "exchange=gossip: lab/simulate/costs.py has no card Gossip in CARDS",
    ROW: "strategy=gossip: README.md, Strategies, has no row for it",
    LOOK: "strategy=gossip: lab/draw/looks.py has no row for it",
}


@pytest.mark.slow
def test_whatever_is_left_out_is_named_in_a_line(tmp_path: Path) -> None:
    tree = tree_with(tmp_path, [block for block in additions() if block[0] not in MESSAGES])
    done = run_pytest(tree, NAMES_WHO_LACKS)
    assert done.returncode == 1
    failures = done.stdout.partition("= FAILURES =")[2].partition("short test summary")[0]
    lines = [line for line in failures.splitlines() if "gossip" in line]
    assert lines == [*MESSAGES.values()]

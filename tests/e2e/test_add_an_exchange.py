"""The example exchange of the guide, added to a copy of the tree exactly as the guide prints it."""

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
FENCED = re.compile(r"^```\w+\n# (\S+?)\n(.*?)^```$", re.M | re.S)
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
        "test_exact_exchanges_give_every_rank_the_mean[gossip-8]",
    ),
    "tests/unit/simulate/test_simulate.py": (
        "test_overlap_is_never_worse_than_blocking[gossip-nccl]",
        "test_costs_take_time_where_bytes_move[gossip]",
    ),
    "tests/unit/conventions/test_exchanges.py": (
        "test_bytes_of_the_reference_are_those_of_the_card[gossip]",
        "test_an_exchange_claims_what_its_bytes_allow[gossip]",
    ),
}
NAMES_WHO_LACKS = "tests/unit/conventions/test_exchanges.py::test_the_table_is_made_of_the_presets"


def additions() -> list[tuple[str, str]]:
    """Parse each block of the guide: the path of a file, and its text."""
    return FENCED.findall((ROOT / "docs/how-to/add_an_exchange.md").read_text())


def tree_with(folder: Path, blocks: list[tuple[str, str]]) -> Path:
    tree = folder / "tree"
    tree.mkdir()
    for name in COPIED:
        ignored = shutil.ignore_patterns("__pycache__", "*.png")
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tree / name)
    for path, text in blocks:
        (tree / path).write_text(text)
    return tree


def run_pytest(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    return subprocess.run(line, cwd=tree, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_the_guide_says_all_that_a_new_exchange_needs(tmp_path: Path) -> None:
    blocks = additions()
    assert len(blocks) == 3
    tree = tree_with(tmp_path, blocks)
    expected = {f"{path}::{test}" for path, tests in GENERIC.items() for test in tests}
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    made = [sys.executable, "-m", "tests.support.strategy_table"]
    subprocess.run(made, cwd=tree, env=environment, check=True)
    done = run_pytest(tree, *sorted(expected), NAMES_WHO_LACKS)
    assert done.returncode == 0, done.stdout[-3000:]
    assert {*expected, NAMES_WHO_LACKS} == set(re.findall(r"^PASSED (.*)$", done.stdout, re.M))


@pytest.mark.slow
def test_a_preset_that_says_too_little_is_named_in_a_line(tmp_path: Path) -> None:
    said = [(path, text.replace("# Bytes sent", "# bytes")) for path, text in additions()]
    done = run_pytest(tree_with(tmp_path, said), NAMES_WHO_LACKS)
    assert done.returncode
    assert "conf/strategy/gossip.yaml: must say `# TEXT` and `# Bytes sent: FORMULA`" in done.stdout

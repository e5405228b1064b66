"""What the documents tell users to type: scripts that are there, settings that are accepted."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from lab.benchmarks import request
from lab.settings.config import load
from lab.study import grid
from tests.conftest import ROOT

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
STARTERS = (
    r"lab\.(train|sweep|bench|profile_layers)\b|launch/\S+\.(sh|sbatch)\b|docker run .*scaling-lab"
)


def blocks(path: Path) -> list[str]:
    """Commands that a document shows: fenced without a language, or indented."""
    text = path.read_text()
    fenced = re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"(?<=\n\n)((?:    \S.*\n)+)", re.sub(r"```.*?```", "", text, flags=re.S))
    return [*fenced, *indented]


def commands() -> list[str]:
    lines = [
        line.replace("…", "").strip()
        for path in DOCUMENTS
        for block in blocks(path)
        for line in block.splitlines()
    ]
    return sorted({line for line in lines if re.search(STARTERS, line)})


def settings(line: str) -> list[str]:
    """What follows the program's own options."""
    words = shlex.split(line.removesuffix("&"), comments=True)
    last = max(i for i, word in enumerate(words) if re.search(r"lab\.|launch/|^scaling-lab", word))
    return [word for word in words[last + 1 :] if re.fullmatch(r"[a-z_.]+=.+", word)]


def test_commands_are_found() -> None:
    assert len(commands()) > 25
    assert settings("torchrun -n 2 -m lab.train a=b 'c.d=[1,2]' # x=y") == ["a=b", "c.d=[1,2]"]
    assert settings("launch/node.sh --nodes 2 a=b &") == ["a=b"]


@pytest.mark.parametrize("line", commands())
def test_settings_in_documents_are_accepted(line: str) -> None:
    given = settings(line)
    if "lab.sweep" in line:
        assert grid.read(given).cells
    elif "lab.bench" in line:
        name = shlex.split(line.partition("lab.bench")[2])[0]
        others = [each for each in given if not each.startswith("out=")]
        assert request.read([name, *others]).variants
    else:
        load([each for each in given if not each.startswith("out=")])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_documents_name_are_there(path: Path) -> None:
    text = path.read_text()
    linked = re.findall(r"\]\(([^)#:]+)", text)
    assert [each for each in linked if not (path.parent / each).exists()] == []
    named = re.findall(r"\b(?:launch|docker|tests|lab|conf)/[\w./-]*\w", text)
    named = [each for each in named if "gossip" not in each]  # the example of a new exchange
    assert [each for each in named if not (ROOT / each).exists()] == []

"""Commands in the documents: their scripts exist, their settings are accepted."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from docs.hooks import GENERATED
from lab import explain, plot, score, verify
from lab.advice import request as advice
from lab.benchmarks import request
from lab.cluster import __main__ as cluster
from lab.device import profile_request
from lab.settings.command import read
from lab.settings.config import load
from lab.settings.fields import own_settings
from lab.settings.files import choices_of
from lab.simulate import predict as prediction
from lab.study import grid
from tests.conftest import ROOT

pytestmark = pytest.mark.xdist_group("compositions")  # which a process remembers

DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
STARTERS = (
    r"lab\.(train|sweep|bench|calibrate|profile_layers)\b"
    r"|launch/\S+\.(sh|sbatch)\b|docker run .*scaling-lab"
    r"|-m lab\.(predict|advise|score|verify|explain|plot|cluster)\b"
)
OF_FOLDERS = {
    "lab.plot": plot.COMMAND,
    "lab.explain": explain.COMMAND,
    "lab.score": score.COMMAND,
    "lab.verify": verify.COMMAND,
}


def blocks(path: Path) -> list[str]:
    """List the commands of a document: fenced without a language, or indented."""
    text = re.sub(r"^```\w+\n.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    fenced = re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"(?<=\n\n)((?:    \S.*\n)+)", re.sub(r"```.*?```", "", text, flags=re.S))
    return [*fenced, *indented]


def commands() -> list[str]:
    lines = [
        re.sub(r"\s+#.*", "", line.replace("…", "")).strip()  # try each command once
        for path in DOCUMENTS
        for block in blocks(path)
        for line in block.splitlines()
    ]
    return sorted({line for line in lines if re.search(STARTERS, line)})


def settings(line: str) -> list[str]:
    """Return the settings after the program's own options."""
    words = shlex.split(line.removesuffix("&"), comments=True)
    last = max(i for i, word in enumerate(words) if re.search(r"lab\.|launch/|^scaling-lab", word))
    return [word for word in words[last + 1 :] if re.fullmatch(r"[a-z_.]+=.+", word)]


def test_commands_are_found() -> None:
    assert len(commands()) > 25
    assert settings("torchrun -n 2 -m lab.train a=b 'c.d=[1,2]' # x=y") == ["a=b", "c.d=[1,2]"]
    assert settings("launch/node.sh --nodes 2 a=b &") == ["a=b"]


def check_study(given: list[str]) -> None:
    cells = grid.read(given).cells
    assert len({cell.name for cell in cells}) == len(cells) > 1


def test_studies_that_no_command_names_compose_too() -> None:
    named = re.findall(r"lab\.sweep.* study=(\w+)", "\n".join(commands()))
    for study in sorted({*choices_of("study")} - {*named}):
        check_study([f"study={study}"])


LARGE = r"study=(aa|pays|links|beyond|kim2017|advice|codecs|shi2016)\b|memory strategy=none,all"


def distinct(lines: list[str]) -> dict[str, list[str]]:
    """Return by command the lines that differ in more than the file that they write."""
    found = dict[str, dict[str, str]]()
    for line in lines:
        command = re.search(r"lab\.\w+.*", line)
        asked = re.sub(r" out=\S+", "", command[0]) if command else f"lab.train {settings(line)}"
        found.setdefault(asked.split()[0], {}).setdefault(asked, line)
    return {name: list(alike.values()) for name, alike in found.items()}


QUICK = distinct([line for line in commands() if not re.search(LARGE, line)])
SLOW = distinct([line for line in commands() if re.search(LARGE, line)])


@pytest.mark.parametrize(
    ("name", "lines"),
    [*QUICK.items(), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW.items())],
)
def test_settings_in_documents_are_accepted(name: str, lines: list[str]) -> None:
    for line in lines:
        try:
            check(name, line)
        except Exception as error:
            error.add_note(line)
            raise


def check(name: str, line: str) -> None:
    given = [each for each in settings(line) if not each.startswith("out=")]
    words = shlex.split(line.partition(name)[2], comments=True)
    if name in OF_FOLDERS:
        found = read(OF_FOLDERS[name], words)
        kept = [each for each in found.settings if not each.startswith("out=")]
        assert own_settings(OF_FOLDERS[name].settings, kept)
        assert name != "lab.verify" or {*found.words} <= {*choices_of("claims"), "all"}
    elif name == "lab.cluster":
        end = words.index("--") if "--" in words else len(words)
        line_of_hosts = read(cluster.COMMAND, words[:end])
        assert cluster.task_of(line_of_hosts, words[end + 1 :])[0].num_hosts > 1
    elif name == "lab.predict":
        assert prediction.read(given).cells
    elif name == "lab.advise":
        if not any(each.startswith("strategy=") for each in given):
            given.append("strategy=tree")  # composing all of them takes long, and adds nothing here
        assert advice.read(given).prediction.cells
    elif name == "lab.sweep":
        check_study(given)
    elif name == "lab.bench":
        assert request.read([words[0], *given]).variants
    elif name == "lab.calibrate":
        assert request.read(["calibrate", *given]).variants
    elif name == "lab.profile_layers":
        assert profile_request.read(given)
    else:
        load(given)


def test_files_that_documents_name_are_there() -> None:
    generated = [ROOT / "docs" / page for page in GENERATED]
    missing = list[Path]()
    for path in DOCUMENTS:
        text = re.sub(r"^```\w+\n.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        linked = [path.parent / each for each in re.findall(r"\]\((?!https:)([^)#:]+)", text)]
        named = re.findall(r"\b(?:launch|docker|tests|lab|conf)/[\w./-]*\w", text)
        named = [ROOT / each for each in named if "gossip" not in each]  # a new exchange's example
        missing += [each for each in (*linked, *named) if not each.exists()]
    assert [each for each in missing if each not in generated] == []

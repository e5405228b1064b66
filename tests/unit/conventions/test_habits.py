"""Files that the repository's hosts and tools read: of the published form, and of one version."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT

GITHUB = ROOT / ".github"
FORMS = {
    "github-workflows": sorted((GITHUB / "workflows").glob("*.yml")),
    "github-issue-forms": sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")),
    "citation-file-format": [ROOT / "CITATION.cff"],
}


def check(schema: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Compare files with a schema that check-jsonschema carries, so that no network is needed."""
    line = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    return subprocess.run([*line, *map(str, paths)], capture_output=True, text=True)


@pytest.mark.parametrize("schema", FORMS)
def test_files_have_the_form_that_their_readers_publish(schema: str) -> None:
    assert FORMS[schema]
    done = check(schema, *FORMS[schema])
    assert done.returncode == 0, done.stdout


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest[1] == version
    kustomization = yaml.safe_load((ROOT / "launch/kubernetes/kustomization.yaml").read_text())
    assert kustomization["images"][0]["newTag"] == version


def test_workflows_call_scripts_and_targets_that_are_there() -> None:
    texts = [path.read_text() for path in FORMS["github-workflows"]]
    steps = {run for text in texts for run in re.findall(r"run: (.*)", text)}
    assert steps == {".ci/run", "make docs"}
    assert (ROOT / ".ci/run").is_file()
    assert re.search(r"^docs: ", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_all_machines_get_the_packages_that_tests_would_be_skipped_without() -> None:
    files = (".ci/run", ".devcontainer/devcontainer.json", "docs/how-to/install.md")
    lists = [re.search(r"chromium [a-z0-9 -]+", (ROOT / name).read_text()) for name in files]
    assert len({found and found[0].strip() for found in lists}) == 1, lists

"""A virtual environment with links to packages that this Python has, in the place of copies."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

SCRIPT = "#!{python}\nimport sys\nfrom {module} import {attr}\nsys.exit({attr}())\n"


def make_environment(folder: Path, project: Path, *more: str) -> None:
    """Make a virtual environment with what a pyproject.toml requires, `more`, and nothing else.

    `pip` in it finds these installed, and takes a version that a constraint excludes from its
    index. The links lie outside the environment, so that it never removes what they lead to.
    """
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    required = tomllib.loads(project.read_text())["project"]["dependencies"]
    links = folder.with_name("links")
    links.mkdir()
    (packages,) = folder.glob("lib/*/site-packages")
    (packages / "links.pth").write_text(f"{links}\n")
    for found in required_by([*required, *more]):
        _link(found, links)
        _write_scripts(found, folder / "bin")


def required_by(requirements: list[str]) -> list[Distribution]:
    """List the installed distributions that `requirements` want, and those that these want."""
    found: dict[str, Distribution] = {}
    todo = [Requirement(each) for each in requirements]
    while todo:
        wanted = todo.pop()
        applies = not wanted.marker or wanted.marker.evaluate({"extra": ""})
        if applies and wanted.name not in found:
            found[wanted.name] = distribution(wanted.name)
            todo += map(Requirement, found[wanted.name].requires or [])
    return list(found.values())


def _link(found: Distribution, links: Path) -> None:
    tops = {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}
    for top in tops:
        if not (links / top).exists():  # folders of namespaces belong to several
            (links / top).symlink_to(str(found.locate_file(top)))


def _write_scripts(found: Distribution, folder: Path) -> None:
    for point in found.entry_points.select(group="console_scripts"):
        script = folder / point.name
        python = folder / "python"
        script.write_text(SCRIPT.format(python=python, module=point.module, attr=point.attr))
        script.chmod(0o755)

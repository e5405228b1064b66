"""The wheel and the source distribution, as a package index takes them and users install them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import ROOT, record
from tests.support import HANG_S
from tests.support.linked import make_environment


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_long_description_points_nowhere_but_to_the_source(hook: ModuleType) -> None:
    text = "![A plot](docs/a.png) of [it](docs/it.md), [there](https://a.b/c) and [here](#here)"
    kept = "[there](https://a.b/c) and [here](#here)"
    assert hook.absolute(text, None) == f" of it, {kept}"
    source = "https://github.com/us/lab"
    links = f"![A plot]({source}/raw/HEAD/docs/a.png) of [it]({source}/blob/HEAD/docs/it.md)"
    assert hook.absolute(text, source) == f"{links}, {kept}"
    readme = (ROOT / "README.md").read_text()
    targets = re.findall(r"\]\(([^)]+)\)", hook.absolute(readme, source))
    assert targets and all(each.startswith(("https://", "#")) for each in targets)


def test_anothers_package_of_the_same_name_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab/__init__.py").write_text('"""Downward Lab has a package of this name."""')
    (tmp_path / "lab/settings").symlink_to(ROOT / "lab/settings")
    (tmp_path / "lab/__main__.py").symlink_to(ROOT / "lab/__main__.py")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-m", "lab"], **run)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {tmp_path}/lab/__init__.py: belongs to another package")
    assert last.endswith("then install the lab again")


@pytest.mark.slow
@pytest.mark.timeout(5 * HANG_S)
def test_wheel_and_source_are_accepted_and_work_alone(tmp_path: Path) -> None:
    def run(*command: str | Path, cwd: Path = tmp_path) -> str:
        variables = {name: os.environ[name] for name in os.environ if "PYTHON" not in name}
        variables |= {"OMP_NUM_THREADS": "1", "PATH": f"{tmp_path}/venv/bin:/usr/bin:/bin"}
        run = {"cwd": cwd, "env": variables, "capture_output": True, "text": True}
        done = subprocess.run(command, timeout=2 * HANG_S, **run)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    python = Path(sys.executable)
    run(python, "-m", "hatchling", "build", "-d", tmp_path / "dist", cwd=ROOT)
    source, wheel = sorted((tmp_path / "dist").iterdir(), key=lambda path: path.suffix)
    uv = (python.with_name("uv"), "tool", "run", "--from", "twine>=6")
    assert run(*uv, "twine", "check", "--strict", wheel, source).count("PASSED") == 2
    make_environment(tmp_path / "venv", ROOT / "pyproject.toml", "hatchling", "pandas", "altair")
    pip = (tmp_path / "venv/bin/pip", "install", "--no-index", "--no-build-isolation")
    files = list[dict[str, int]]()
    for package in (source, wheel):
        run(*pip, "--force-reinstall", "--no-deps", package)
        (lab,) = tmp_path.glob("venv/lib/*/site-packages/lab")
        code = (path for path in lab.rglob("*") if path.suffix in (".py", ".yaml", ".h", ".cpp"))
        files.append({str(path.relative_to(lab)): path.stat().st_size for path in code})
    assert files[0] == files[1]  # also what is made from the source distribution
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("/METADATA"))
        metadata = archive.read(name).decode()
    assert "Author: scaling lab contributors" in metadata and "](docs/" not in metadata
    assert "lab.train" in run("lab", "--help")
    job = ("strategy=onebit", "batch_size=24", "data.size=16", "steps=4", "study=alone")
    torchrun = ("torchrun", "--standalone", "--nproc-per-node=2", "-m", "lab.train")
    run(*torchrun, *job, "device=cpu")
    (cell,) = (tmp_path / "runs/alone").glob("*/record.json")
    assert record(cell.parent)["status"] == "done"
    shown = run("python", "-c", "import lab; print(len(lab.load('runs/alone').frame))")
    assert shown.strip() == "1"

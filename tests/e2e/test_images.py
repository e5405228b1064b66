"""Container images without a Docker engine: linted, and the CPU image's steps run in a folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT, Finished, record
from tests.support import HANG_S
from tests.support.linked import make_environment
from tests.support.ports import free_port

DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile*"))
CPU, CUDA, HOROVOD = (ROOT / "docker" / f"Dockerfile{kind}" for kind in (".cpu", "", ".horovod"))
COMPOSE = ROOT / "docker" / "compose.yaml"
QUICK = ("batch_size=24", "data.size=16", "steps=3", "device=cpu")
TRAIN = ("strategy=onebit", *QUICK, "cell=image")

# Reads like root, because root's Python may be in its home, and writes like any other user.
NOBODY = [shutil.which("setpriv") or "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
NOBODY += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]


def run_tool(name: str, *arguments: str) -> str:
    """Run a tool installed next to this Python; return its findings."""
    path = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert path, f"{name} is not installed; it belongs to the extra `dev`"
    done = subprocess.run([path, *arguments], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def checkout() -> list[str]:
    """List every file and link of the checkout, also those not yet committed."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    names = (name for name in done.stdout.split("\0") if name)
    return sorted(name for name in names if (ROOT / name).is_file() or (ROOT / name).is_symlink())


def is_shell_script(path: Path) -> bool:
    if path.is_dir():  # by a link
        return False
    with path.open("rb") as file:
        return bool(re.match(rb"#!.*\b(ba)?sh\b", file.readline()))


def ignored(name: str) -> bool:
    """Apply Docker's rule: the last pattern that matches a path, or a parent, decides."""
    verdict = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = re.escape(line.lstrip("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if not line.startswith("#") and re.fullmatch(f"{pattern}(/.*)?", name):
            verdict = not line.startswith("!")
    return verdict


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Parse every instruction and its argument."""
    lines = [line for line in dockerfile.read_text().splitlines() if line and line[0] != "#"]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined)]


class Image:
    """An image of a one-stage Dockerfile, as a folder with a virtual environment.

    Packages of others are links to those here, which a CI run has installed under the same lock.
    """

    def __init__(self, root: Path, dockerfile: Path) -> None:
        self.root, self.workdir = root, root
        self.skipped: list[str] = []
        self.command: dict[str, list[str]] = {}
        make_environment(root / "venv", ROOT / "pyproject.toml", "hatchling")
        inherited = {name: os.environ[name] for name in os.environ if "PYTHON" not in name}
        self.environment = inherited | {"PATH": f"{root}/venv/bin:/usr/bin:/bin"}
        for word, rest in instructions(dockerfile):
            self._take(word, rest)

    def _take(self, word: str, rest: str) -> None:
        match word:
            case "ARG" | "ENV":
                self.environment |= dict(pair.split("=", 1) for pair in shlex.split(rest))
            case "WORKDIR":
                self.workdir = self.root / rest.lstrip("/")
                self.workdir.mkdir(parents=True, exist_ok=True)
            case "COPY":
                *sources, target = rest.split()
                for source in sources:
                    self._copy(source, self.workdir / target)
            case "RUN" if rest.startswith(("useradd ", "apt-get ")):
                self.skipped.append(rest)  # a container's users and system are its own
            case "RUN":
                self.run("sh", "-c", rest)
            case "ENTRYPOINT" | "CMD":
                self.command[word] = json.loads(rest)
            case "FROM" | "LABEL" | "USER" | "VOLUME":
                pass  # options of the container, not of the software in it
            case _:
                raise NotImplementedError(word)

    def _copy(self, source: str, target: Path) -> None:
        found = [name for name in checkout() if f"{name}/".startswith(f"{source}/")]
        found = [name for name in found if not ignored(name)]
        assert found, f"COPY {source}: not in the build context"
        for name in found:  # a folder's contents, or a file by its name
            copy = target / (Path(name).relative_to(source) if name != source else source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy, follow_symlinks=False)  # lab/conf is a link

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """Run a command in the image and return its standard output."""
        where = cwd or self.workdir
        done = subprocess.run(
            command, cwd=where, env=self.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start(self, *arguments: str) -> str:
        """Imitate `docker run IMAGE ARGUMENTS`."""
        return self.run(*self.command["ENTRYPOINT"], *(arguments or self.command["CMD"]))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Make Dockerfile.cpu's image."""
    return Image(tmp_path_factory.mktemp("image"), CPU)


@pytest.mark.slow
@pytest.mark.xdist_group("image")
def test_cpu_image_installs_and_trains_without_the_checkout(image: Image) -> None:
    assert [line.split()[0] for line in image.skipped] == ["useradd", "apt-get"]
    assert {"gcc", "g++", "libc6-dev"} <= set(image.skipped[1].split())
    package = image.run("python", "-c", "import lab; print(lab.__file__)").strip()
    assert Path(package).is_relative_to(image.root / "venv")
    assert "strategy=" in image.start()
    image.start(*TRAIN)
    assert image.workdir == image.root / "workspace"
    written = record(image.workdir / "runs/default/image")
    assert (written["status"], written["num_steps"]) == ("done", 3)


@pytest.fixture
def anybody(image: Image, tmp_path: Path) -> Callable[[str, Path], Finished]:
    """Run a command in the image's environment, with the wheel, as an unprivileged user.

    The user may write only in tmp_path/"work", and has neither compiler nor git.
    """
    image.run("python", "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path), cwd=ROOT)
    (wheel,) = map(str, tmp_path.glob("*.whl"))
    image.run("pip", "uninstall", "--yes", "scaling-lab")
    image.run("pip", "install", "--no-index", wheel)  # refused if the lock lacks what it requires
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir(mode=0o555)
    work.mkdir()
    is_root = os.getuid() == 0
    if is_root:
        os.chown(work, 65534, 65534)
    variables = {"PATH": f"{image.root}/venv/bin", "HOME": str(home), "OMP_NUM_THREADS": "1"}

    def run(line: str, cwd: Path) -> Finished:
        command = [*(NOBODY if is_root else []), *line.split()]
        done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True)
        return Finished(done.returncode, done.stdout, done.stderr)

    return run


@pytest.mark.slow
@pytest.mark.xdist_group("image")
def test_wheel_runs_without_root_home_compiler_and_git(
    anybody: Callable[[str, Path], Finished], image: Image, tmp_path: Path
) -> None:
    (carried,) = (image.root / "venv").glob("lib/*/site-packages/lab/slurm.sbatch")
    assert carried.read_text() == (ROOT / "launch" / "slurm.sbatch").read_text()
    home, work, job = tmp_path / "home", tmp_path / "work", " ".join(QUICK)
    sweep = anybody(f"python -m lab.sweep study=mine strategy=onebit world_size=2 {job}", work)
    assert sweep.code == 0, sweep.err
    (cell,) = work.glob("runs/mine/*/record.json")
    said = cell.with_name("output.log").read_text()
    assert said.count("plain torch is used") == said.count("Warning") == 1
    plot = anybody("python -m lab.plot runs/mine", work)  # ranks need none of what it draws with
    assert (plot.code, plot.err.count("\n")) == (2, 1) and "'scaling-lab[report]'" in plot.err
    for line in (f"lab.train {job}", "lab.bench codec out=a.json"):
        closed = anybody(f"python -m {line}", home)
        assert (closed.code, len(closed.err.splitlines())) == (2, 1)
        assert f": cannot write {home}" in closed.err


def test_the_wheel_holds_every_file_of_the_lab_and_of_conf(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    links = {name for name in checkout() if (ROOT / name).is_symlink()}
    assert links == {"lab/conf"}
    files = [
        name for name in checkout() if name.startswith(("lab/", "conf/")) and name not in links
    ]
    wanted = {name if name.startswith("lab/") else f"lab/{name}" for name in files}
    assert any(name.endswith(".h") for name in wanted) and wanted <= packed, wanted - packed


def test_images_install_alike() -> None:
    cpu, cuda, horovod = (instructions(file) for file in (CPU, CUDA, HOROVOD))
    assert [each for each in cpu if each[0] != "ARG"] == [each for each in cuda if each[0] != "ARG"]
    steps = [each for each in cpu if each[0] in ("COPY", "RUN")]
    assert steps == [each for each in horovod if each in steps]


def test_images_let_ranks_be_started_again() -> None:
    """Otherwise torchrun would give them the addresses of lost ranks."""
    for dockerfile in (CPU, CUDA):
        variables = [rest for word, rest in instructions(dockerfile) if word == "ENV"]
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in " ".join(variables)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfile(dockerfile: Path) -> None:
    assert run_tool("hadolint", str(dockerfile)) == ""
    steps = instructions(dockerfile)
    bases = [rest.split()[0] for word, rest in steps if word == "FROM"]
    stages = [rest.split()[2] for word, rest in steps if word == "FROM" and " AS " in rest]
    pinned = re.compile(r"\S+:\d+\.\d+\.\d+-\S+@sha256:[0-9a-f]{64}")
    assert all(base in stages or pinned.fullmatch(base) for base in bases)
    sources = steps.index(("COPY", "lab lab/"))
    assert all("--no-deps" in rest for word, rest in steps[sources:] if word == "RUN")
    assert [rest for word, rest in steps if word == "USER"] == ["1000"]


def test_shell_scripts() -> None:
    scripts = [str(ROOT / name) for name in checkout() if is_shell_script(ROOT / name)]
    assert str(ROOT / ".ci/run") in scripts
    assert run_tool("shellcheck", *scripts) == ""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (".env", True),
        (".git/config", True),
        ("runs/default/a/record.json", True),
        ("tests/conftest.py", True),
        ("docker/compose.yaml", True),
        ("lab/__pycache__/train.cpython-311.pyc", True),
        ("docker/horovod/build.sh", False),
        ("lab/exchange/paths.py", False),
        ("conf/train.yaml", False),
    ],
)
def test_build_context_is_what_an_image_is_made_of(name: str, expected: bool) -> None:
    assert ignored(name) == expected


def test_compose_file_keeps_to_the_specification() -> None:
    schema = ("--builtin-schema", "vendor.compose-spec")
    assert run_tool("check-jsonschema", *schema, str(COMPOSE)) == ""


def test_services_of_the_compose_file_train_together(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    services: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
    here = {"node0:29400": f"127.0.0.1:{free_port()}", "eth0": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "-m", "lab.train", *TRAIN]
    agents = []
    for service in services.values():
        settings = {name: str(value) for name, value in service["environment"].items()}
        settings = {name: here.get(value, value) for name, value in settings.items()}
        agents.append(subprocess.Popen(command, cwd=tmp_path, env=environment | settings))
    try:
        assert [agent.wait(HANG_S) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.kill()
    assert record(tmp_path / "runs/default/image")["world_size"] == len(services)

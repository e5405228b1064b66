"""The launch scripts refuse wrong options, and start the requested ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.conftest import ROOT, Finished
from tests.support import HANG_S

TEXT, OBJECT, WHOLE = {"type": "string"}, {"type": "object"}, {"type": "integer"}
# Of SkyPilot 0.14.1 (Apache-2.0), sky/utils/schemas.py: all keys of a task and some of those of its
# resources, with the types of those that a recipe may use.
SKYPILOT_TASK = {
    "additionalProperties": False,
    "properties": {
        **dict.fromkeys(("name", "event_callback", "setup", "run"), TEXT),
        **dict.fromkeys(("file_mounts", "service", "pool", "file_mounts_mapping"), OBJECT),
        **dict.fromkeys(("inputs", "outputs", "config", "_metadata"), OBJECT),
        "num_nodes": WHOLE,
        "workdir": {"anyOf": [TEXT, {**OBJECT, "required": ["url"]}]},
        "resources": {
            **OBJECT,
            "properties": {"accelerators": {"anyOf": [TEXT, {**OBJECT, "maxProperties": 1}]}},
        },
        "envs": {
            **OBJECT,
            "patternProperties": {"^[a-zA-Z_][a-zA-Z0-9_]*$": {"type": ["string", "null"]}},
            "additionalProperties": False,
        },
        "volumes": OBJECT,
        "volume_mounts": {"type": "array"},
        "secrets": {"oneOf": [OBJECT, {"type": "array"}]},
        "managed_secrets": {"type": "array"},
        "api_server_access": {"type": "boolean"},
    },
}
PLACE = "must be HOST:PORT, with a port from 1 to 65535"
NODE = ("node.sh", "--rendezvous", "a:1", "--job", "a", "--nodes", "1", "--ranks", "1")


def run(name: str, *arguments: str, path: str = os.environ["PATH"]) -> Finished:
    line = ["bash", str(ROOT / "launch" / name), *arguments]
    done = subprocess.run(line, env={"PATH": path}, capture_output=True, text=True, timeout=HANG_S)
    return Finished(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def launchers(tmp_path: Path) -> str:
    """Make a PATH with launchers that print their command line, on a host without GPUs."""
    for name in ("torchrun", "horovodrun"):
        put(tmp_path, name, 'printf "%s\\n" "$@"')
    put_python(tmp_path, 0)
    return f"{tmp_path}:{os.environ['PATH']}"


def put_python(folder: Path, num_gpus: int) -> None:
    """Make a python that counts GPUs, and as a launcher prints its command line."""
    line = f'[ "$1" = -m ] && printf "%s\\n" "$@" || echo {num_gpus}'
    put(folder, "python", line)


def put(folder: Path, name: str, line: str) -> None:
    """Make a program that runs `line`."""
    (folder / name).write_text(f"#!/bin/sh\n{line}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("local.sh", "--ranks", "abc"), "--ranks abc: must be a number from 1 to 9999"),
        (("local.sh", "--ranks", "0"), "--ranks 0: must be a number from 1 to 9999"),
        (("local.sh", "--rank", "2"), "--rank: no such option (--help)"),
        (("local.sh", "steps=2", "--ranks", "2"), "--ranks: options come before settings"),
        (("node.sh", "--nodes", "1"), "--rendezvous is missing (--help)"),
        ((*NODE, "--nodes", "2:1"), "--nodes 2:1: must be N or MIN:MAX"),
        ((*NODE, "--nodes", "0"), "--nodes 0: must be N or MIN:MAX"),
        ((*NODE, "--ranks", "x"), "--ranks x: must be a number from 1 to 9999"),
        ((*NODE, "--rendezvous", "a:b"), f"--rendezvous a:b: {PLACE}"),
        ((*NODE, "--rendezvous", "a:99999"), f"--rendezvous a:99999: {PLACE}"),
        (("local.sh", "--ranks", "10000"), "--ranks 10000: must be a number from 1 to 9999"),
        ((*NODE, "--wait", "x"), "--wait x: must be a number"),
        ((*NODE, "--restarts", "-1"), "--restarts -1: must be a number"),
        ((*NODE, "--job"), "--job needs a value"),
        (("local.sh", "steps=2"), "torch sees no GPU here; say how many ranks: --ranks N"),
        (("horovod.sh", "steps=2"), "--ranks is missing (--help)"),
        (("horovod.sh", "--ranks", "2", "--hosts", ""), "--hosts needs a list"),
        (("horovod.sh", "--ranks", "0"), "--ranks 0: must be a number from 1 to 9999"),
    ],
)
def test_wrong_options(launchers: str, line: tuple[str, ...], message: str) -> None:
    done = run(*line, path=launchers)
    assert done.code == 2
    assert done.err.splitlines() == [f"{line[0]}: error: {message}"]


def test_without_the_environment_it_is_named(tmp_path: Path) -> None:
    for tool in ("bash", "sed"):
        (tmp_path / tool).symlink_to(f"/bin/{tool}")
    for line in (("local.sh", "--ranks", "1"), NODE, ("horovod.sh", "--ranks", "1")):
        done = run(*line, path=str(tmp_path))
        assert done.code == 2
        assert "is not on the PATH; first: " in done.err


@pytest.mark.parametrize(
    "line", [("local.sh", "--ranks", "2"), NODE, ("horovod.sh", "--ranks", "2")]
)
def test_settings_reach_the_ranks_as_they_were_written(
    launchers: str, line: tuple[str, ...]
) -> None:
    nasty = ["model.hidden=[8, 8]", "data.path='it'", 'cell="a b"', "a=$HOME;`x`\\n*"]
    done = run(*line, *nasty, path=launchers)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-len(nasty) :] == nasty
    assert "lab.train" in done.out.splitlines()


def test_horovod_gets_hosts_and_works_in_macos_bash(launchers: str) -> None:
    line = ("horovod.sh", "--ranks", "2", "--hosts", "a:1,b:1", "steps=2")
    words = run(*line, path=launchers).out.split()
    assert words[:5] == ["--gloo", "-np", "2", "--hosts", "a:1,b:1"]
    text = (ROOT / "launch/horovod.sh").read_text(encoding="utf-8")
    assert not re.search(r"\[@\]|declare -A|@Q|mapfile", text)  # bash 3.2 lacks or refuses them


def test_ranks_are_as_many_as_torch_counts_gpus(launchers: str, tmp_path: Path) -> None:
    put_python(tmp_path, 3)
    assert "--nproc-per-node 3" in " ".join(run("local.sh", path=launchers).out.split())


@pytest.mark.parametrize(
    ("line", "num_nodes", "num_gpus", "bound"),
    [
        (("local.sh",), 2, 8, True),
        (("local.sh", "--ranks", "2", "steps=1"), 2, 2, True),
        ((*NODE, "steps=1"), 2, 1, True),
        (("local.sh",), 1, 8, False),
        (("local.sh",), None, 8, False),
        (("local.sh", "--ranks", "2", "share_gpus=true"), 2, 1, False),
        (("local.sh", "--ranks", "2", "steps=1", "device=cpu"), 2, 8, False),
    ],
)
def test_ranks_are_bound_to_the_cpus_beside_their_gpus(
    launchers: str,
    tmp_path: Path,
    line: tuple[str, ...],
    num_nodes: int | None,
    num_gpus: int,
    bound: bool,
) -> None:
    put_python(tmp_path, num_gpus)
    put(tmp_path, "numactl", f"echo 'available: {num_nodes} nodes'" if num_nodes else "exit 1")
    done = run(*line, path=launchers)
    assert done.code == 0, done.err
    words = done.out.split()
    assert ("--numa-binding node" in " ".join(words)) == bound
    assert words.count("lab.train") == 1


def test_make_takes_torch_alone_from_another_index_and_once(tmp_path: Path) -> None:
    index = "https://download.pytorch.org/whl/cu126"
    line = ["make", "--dry-run", "run", f"VENV={tmp_path}", f"TORCH_INDEX={index}", "RANKS=2"]

    def installs(*line: str) -> list[str]:
        said = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return re.findall(r"pip install .* constraints\.txt (.*)", said)

    both = [f"--force-reinstall --no-deps --index-url {index} torch", "--editable '.[report]'"]
    assert installs(*line) == both
    (tmp_path / "bin").mkdir()
    put(tmp_path / "bin", "pip", "")
    marker = tmp_path / ".torch-cu126"
    marker.write_text(index)
    *without_index, _, _ = line
    assert installs(*line) == installs(*without_index, "RANKS=2") == both[1:]
    os.utime(marker, (0, 0))  # the lock is newer
    assert installs(*without_index, "RANKS=2") == both


def test_torchrun_knows_the_binding() -> None:
    from torch.distributed.run import get_args_parser

    assert get_args_parser().parse_args(["--numa-binding", "node", "a.py"]).numa_binding == "node"


def test_node_that_has_the_rendezvous_hosts_it_however_it_is_spelled(launchers: str) -> None:
    for address, hosts in (("127.0.0.1", True), ("10.9.9.9", False)):
        addressed = (*NODE, "--rendezvous", "localhost:1", "--address", address)
        done = run(*addressed, path=launchers)
        assert done.code == 0, done.err
        (conf,) = re.findall(r"--rdzv-conf\n(.+)", done.out)
        assert ("is_host=true" in conf) == hosts
        assert "read_timeout=600" in conf  # the first node's own start may be minutes late


@pytest.mark.parametrize("name", ["local.sh", "node.sh", "horovod.sh"])
def test_help(name: str) -> None:
    done = run(name, "--help", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert done.code == 0
    assert f"launch/{name}" in done.out


def test_skypilot_recipe_keeps_to_its_schema_and_starts_node_sh(
    launchers: str, tmp_path: Path
) -> None:
    task = yaml.safe_load((ROOT / "launch/skypilot.yaml").read_text())
    jsonschema.validate(task, SKYPILOT_TASK)
    for wrong in ({"nodes": 2}, {"num_nodes": "2"}, {"envs": {"SETTINGS": 1}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(task | wrong, SKYPILOT_TASK)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    of_node = {"NODE_IPS": "10.0.0.1\n10.0.0.2", "NUM_NODES": "2", "NODE_RANK": "1"}
    of_node["NUM_GPUS_PER_NODE"] = "8"
    variables = {f"SKYPILOT_{name}": text for name, text in of_node.items()}
    variables |= {"PATH": launchers, "SKYPILOT_TASK_ID": "t1", "SETTINGS": "steps=2 device=cpu"}
    line = ["bash", "-c", task["run"]]
    done = subprocess.run(line, cwd=tmp_path, env=variables, capture_output=True, text=True)
    words = " ".join(done.stdout.split())
    assert "--nnodes 2 --nproc-per-node 8 " in words, done.stderr
    assert "--rdzv-endpoint 10.0.0.1:29400 --rdzv-id t1 --local-addr 10.0.0.2 " in words
    assert words.endswith("-m lab.train runs_dir=/runs steps=2 device=cpu")


def test_skypilot_recipe_sets_a_machine_up_again_and_may_fetch_python(tmp_path: Path) -> None:
    put(tmp_path, "pip", ":")
    real = Path(sys.executable).with_name("uv")
    put(tmp_path, "uv", f'echo $UV_PYTHON_DOWNLOADS; [ "$1" = pip ] || exec {real} "$@"')
    setup = yaml.safe_load((ROOT / "launch/skypilot.yaml").read_text())["setup"]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for _ in range(2):
        line = ["bash", "-ec", setup]
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stdout.split()) == (0, ["automatic"]), done.stderr

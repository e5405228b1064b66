"""Ranks that SLURM starts: the batch script, and sweeps whose cells are its jobs."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lab import sweep
from lab.study.grid import read
from tests.conftest import ROOT, Finished, record, wait_for
from tests.support import HANG_S, slurm
from tests.support.commands import begun, refusal
from tests.support.ranks import train

Command = Callable[..., Finished]
SCRIPT = ROOT / "launch/slurm.sbatch"
BASE = ("batch_size=24", "optim.lr=0.01", "device=cpu")
SMALL = (*BASE, "data.size=16")
QUICK = (*SMALL, "steps=6")
ENDLESS = (*SMALL, "steps=1000000")
QUEUE = ("squeue", "--array", "--noheader", "--format=%i")
JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node[1-2]"}
ARRAY = {**JOB, "SLURM_ARRAY_JOB_ID": "11", "SLURM_ARRAY_TASK_ID": "2"}
FIRST = {"SLURM_ARRAY_TASK_ID": "0"}
pytestmark = pytest.mark.xdist_group("slurm")


@pytest.fixture(scope="module")
def slurm_variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    missing = slurm.missing_program()
    if missing:
        pytest.skip(f"SLURM is not installed here: there is no {missing}")
    with slurm.running(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


@pytest.fixture
def cluster(
    environment: dict[str, str], slurm_variables: dict[str, str], tmp_path: Path
) -> Iterator[Callable[..., str]]:
    """Return a runner of SLURM's commands; commands of the lab find the same SLURM."""
    environment |= {**slurm_variables, "PYTHON": environment["PYTHON_EXEC"]}

    def run(*line: str) -> str:
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    yield run
    run("scancel", f"--user={getpass.getuser()}")
    wait_for(lambda: not run(*QUEUE), every_s=0.5)
    for output in tmp_path.glob("slurm-*.out"):
        print(output.read_text())  # pytest shows it if the test failed


@pytest.mark.parametrize(
    ("options", "threads"),
    [
        (("--ntasks=2", "--cpus-per-task=2", "--gpus-per-task=1"), 2),
        (("--gpus=2", "--ntasks-per-gpu=1"), 1),
    ],
)
def test_a_task_is_a_rank_and_sees_all_gpus_that_the_job_has_on_its_node(
    cluster: Callable[..., str],
    environment: dict[str, str],
    tmp_path: Path,
    options: tuple[str, ...],
    threads: int,
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nenv\n")
    program.chmod(0o755)
    del environment["OMP_NUM_THREADS"]
    export = f"--export=PYTHON={program}"  # and none of the user's other variables
    job = cluster("sbatch", "--wait", "--parsable", *options, export, str(SCRIPT))
    lines = (tmp_path / f"slurm-{job}.out").read_text().splitlines()
    for setting in (
        *("WORLD_SIZE=2", "LOCAL_WORLD_SIZE=2", "CUDA_VISIBLE_DEVICES=0,1"),
        f"OMP_NUM_THREADS={threads}",
        *("MASTER_ADDR=localhost", f"MASTER_PORT={20000 + int(job) % 12000}"),
        *("SLURM_DISTRIBUTION=block:block", "SLURM_CPU_BIND_TYPE=mask_cpu:"),  # by NUMA node
    ):
        assert lines.count(setting) == 2, setting
    for setting in ("RANK=0", "RANK=1", "LOCAL_RANK=0", "LOCAL_RANK=1"):
        assert lines.count(setting) == 1, setting


def test_a_bare_srun_starts_ranks_of_one_run(
    cluster: Callable[..., str], environment: dict[str, str], tmp_path: Path
) -> None:
    line = (environment["PYTHON"], "-m", "lab.train", "strategy=onebit", *QUICK)
    cluster("srun", "--ntasks=2", *line, "cell=srun")
    found = record(tmp_path / "runs/default/srun")
    expected = train(2, "strategy=onebit", *QUICK, f"runs_dir={tmp_path}/other")[0].record
    assert (found["launcher"], found["world_size"]) == ("srun", 2)
    assert found["replica_hash"] == expected["replica_hash"]


@pytest.mark.slow
def test_a_job_preempted_by_a_signal_ends_as_an_undisturbed_one(
    cluster: Callable[..., str], tmp_path: Path
) -> None:
    settings = ("strategy=onebit", *SMALL, "steps=200", "checkpoint_every=5")
    job = cluster("sbatch", "--parsable", "--ntasks=2", str(SCRIPT), *settings)
    run = tmp_path / f"runs/default/slurm-{job}"
    wait_for(lambda: list(run.glob("checkpoints/step_*/DONE")))
    cluster("scancel", "--signal=USR1", job)
    wait_for(lambda: not cluster(*QUEUE), every_s=0.5)

    output = (tmp_path / f"slurm-{job}.out").read_text()
    assert output.index("interrupted: strategy=onebit") < output.index("done: strategy=onebit")
    found = record(run)
    assert (found["status"], found["world_size"]) == ("done", 2)
    undisturbed = train(2, *settings, f"runs_dir={tmp_path}/undisturbed")[0].record
    assert found["replica_hash"] == undisturbed["replica_hash"]


def test_a_sweep_gives_the_same_records_as_a_local_one(
    cluster: Callable[..., str],
    command: Command,
    environment: dict[str, str],
    tmp_path: Path,
) -> None:
    environment["SBATCH_EXPORT"] = "NONE"  # of a site that wants clean jobs
    grid = ("strategy=onebit", "world_size=1,2", *QUICK)
    done = command("lab.sweep", "launcher=slurm", "study=s", *grid)
    assert done.code == 0, done.err
    assert "2 of 2 cells done" in done.out
    assert "ETA" in done.out
    assert re.search(r"SLURM job \d+: world_size=2, 1 to run", done.out)

    found = records(tmp_path / "runs/s")
    assert {*found} == {cell.name for cell in read(grid).cells}
    for name in found:
        size = found[name]["world_size"]
        alike = ("strategy=onebit", f"runs_dir={tmp_path}/local", f"cell={name}", *QUICK)
        assert outcome(found[name]) == outcome(train(size, *alike)[0].record)
        assert "done: strategy" in (tmp_path / "runs/s" / name / "output.log").read_text()

    again = command("lab.sweep", "launcher=slurm", "study=s", *grid)
    assert again.out.count("done already") == 2


@pytest.mark.slow
def test_cells_that_fail_or_are_killed_are_recorded_and_the_others_run(
    cluster: Callable[..., str], environment: dict[str, str], tmp_path: Path
) -> None:
    # Images of 8 x 8 are too small for the model; the one endless cell that runs is killed.
    grid = ("strategy=none", *BASE, "data.size=16,8", "steps=6,1000000")
    process = start_sweep(environment, tmp_path, *grid)
    runs = tmp_path / "runs/s"
    wait_for(lambda: list(runs.glob("*size_16*1000000*/config.yaml")))
    kill_rank(f"runs_dir='{tmp_path}/runs'", "steps=1000000", "data.size=16")
    out, _ = process.communicate(timeout=HANG_S)
    assert "1 of 4 cells done" in out
    found = records(runs)
    assert sorted(each["status"] for each in found.values()) == ["done", *["failed"] * 3]
    errors = " ".join(each["error"] for each in found.values() if each["error"])
    assert errors.count("images of 8x8 px are too small") == 2
    assert "Killed" in errors
    assert {each["world_size"] for each in found.values()} == {1}


def kill_rank(*settings: str) -> None:
    """Kill the rank that was started with `settings`, as a machine out of memory does."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if {"lab.train", *settings} <= set(process.cmdline()):
                process.kill()


def test_a_cell_that_runs_too_long_is_a_timeout(
    cluster: Callable[..., str], command: Command, tmp_path: Path
) -> None:
    grid = ("study=s", "strategy=none", *ENDLESS, "cell_timeout_s=1")
    done = command("lab.sweep", "launcher=slurm", *grid)
    assert "timeout: cell_timeout_s=1: still running" in done.out
    (found,) = records(tmp_path / "runs/s").values()
    assert found["status"] == "timeout"
    assert cluster(*QUEUE) == ""


@pytest.mark.slow
def test_no_second_sweep_beside_a_killed_ones_jobs_and_none_left_by_an_interrupted_one(
    cluster: Callable[..., str], environment: dict[str, str], command: Command, tmp_path: Path
) -> None:
    grid = ("strategy=none", *ENDLESS)
    killed = start_sweep(environment, tmp_path, *grid)
    wait_for(lambda: cluster(*QUEUE), every_s=0.5)
    killed.kill()
    killed.communicate()
    refused = command("lab.sweep", "launcher=slurm", "study=s", *grid)
    assert refused.code == 2
    (line,) = refused.error_lines
    job = cluster(*QUEUE).partition("_")[0]
    assert line.endswith(f"still queued or running; wait until they finish, or run scancel {job}")
    cluster("scancel", job)
    wait_for(lambda: not cluster(*QUEUE), every_s=0.5)

    interrupted = start_sweep(environment, tmp_path, *grid)
    wait_for(lambda: cluster(*QUEUE), every_s=0.5)
    interrupted.send_signal(signal.SIGINT)
    _, err = interrupted.communicate(timeout=HANG_S)
    assert interrupted.returncode == 130
    assert "cancelling SLURM job" in err
    assert "run the same command to continue" in err
    assert cluster(*QUEUE) == ""


def outcome(found: dict[str, Any]) -> tuple[Any, ...]:
    """Keep the part that two records of one cell share: all except times, places and names."""
    fields = ("status", "world_size", "cell", "repeat", "variant", "final", "replica_hash")
    return *(found[field] for field in (*fields, "payload_bytes_per_step")), sorted(found)


def records(study: Path) -> dict[str, dict[str, Any]]:
    return {path.parent.name: record(path.parent) for path in study.glob("*/record.json")}


def start_sweep(
    environment: dict[str, str], folder: Path, *arguments: str
) -> subprocess.Popen[str]:
    line = ("lab.sweep", "launcher=slurm", "study=s", *arguments)
    return begun(environment, folder, *line, stderr=subprocess.PIPE)


def test_sbatch_that_refuses_is_quoted(
    cluster: Callable[..., str], environment: dict[str, str], command: Command
) -> None:
    environment["SBATCH_PARTITION"] = "nowhere"
    done = command("lab.sweep", "launcher=slurm", *QUICK)
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert "launcher=slurm: sbatch: error: " in line
    assert "Invalid partition" in line


def test_without_slurm_or_with_an_unknown_launcher_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    for launcher, message in (
        ("slurm", "launcher=slurm: sbatch is not on the PATH"),
        ("pigeon", "launcher=pigeon: allowed: local, slurm, ray"),
    ):
        assert refusal(sweep.main, f"launcher={launcher}", *QUICK) == message
    assert not (tmp_path / "runs").exists()


def run_script(folder: Path, *arguments: str, **variables: str) -> Finished:
    """Run the batch script as a job would, with an srun that prints its command line."""
    for name, line in (
        ("srun", 'printf "%s\\n" "$LAB_JOB" "$@"'),
        ("scontrol", "echo node1; echo node2"),
    ):
        program = folder / name
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **variables}
    line = ["bash", str(SCRIPT), *arguments]
    done = subprocess.run(
        line, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def test_settings_reach_the_ranks_as_they_were_written(tmp_path: Path) -> None:
    nasty = ["model.hidden=[8, 8]", "data.path='it'", 'cell="a b"', "a=$HOME;`x`\\n*", 'b="', "-n"]
    cells = tmp_path / "my cells"
    cells.write_text(f"strategy=none\n{shlex.join(nasty)}\n")
    for arguments, variables in ((nasty, JOB), (["--cells", str(cells)], ARRAY)):
        done = run_script(tmp_path, *arguments, **variables)
        assert done.code == 0, done.err
        assert done.out.splitlines()[-len(nasty) :] == nasty


def test_a_restart_resumes_the_run_of_the_first_start(tmp_path: Path) -> None:
    first = run_script(tmp_path, "steps=6", **JOB).out.splitlines()
    again = run_script(tmp_path, "steps=6", **JOB, SLURM_RESTART_COUNT="1").out.splitlines()
    assert first == again  # the same LAB_JOB and settings: test_run_directory.py
    assert (first[0], first[-2:]) == ("slurm-12", ["cell=slurm-12", "steps=6"])
    other = run_script(tmp_path, **ARRAY).out.splitlines()
    assert (other[0], other[-1]) == ("slurm-11_2", "cell=slurm-11_2")


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (("steps=6",), {}, "submit this with sbatch"),
        (("--cells", "cells"), JOB, "--cells: takes an array"),
        (("--cells",), ARRAY, "--cells : must name one file"),
        (("--cells", "/nowhere"), ARRAY, "--cells /nowhere: must name one file"),
        (("--cells", "/tmp"), ARRAY, "--cells /tmp: must name one file"),
        (("--cells", "/dev/null"), ARRAY, "there is no cell in line 2"),
        (("--cells", "/dev/null"), ARRAY | FIRST, "there is no cell in line 0"),
        (("--cells", "cells"), ARRAY, "--cells cells: a quote in line 2 is not closed"),
    ],
)
def test_the_script_refuses_what_it_cannot_run(
    tmp_path: Path, arguments: tuple[str, ...], variables: dict[str, str], message: str
) -> None:
    (tmp_path / "cells").write_text("steps=6\ncell='a\n")
    done = run_script(tmp_path, *arguments, **variables)
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert line.startswith("slurm.sbatch: error: ")
    assert message in line


def test_the_script_has_help(tmp_path: Path) -> None:
    done = run_script(tmp_path, "--help")
    assert done.code == 0
    assert done.out.startswith("usage: sbatch --ntasks=N")

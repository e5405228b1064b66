"""A private SLURM for tests: controller and one node on this machine, in a temporary directory."""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.conftest import wait_for
from tests.support.ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
NUM_CPUS = 4  # pretended: SLURM allocates the configured number
# No cgroups and no accounting, so that it needs no privileges; short waits; and ranks are bound to
# CPUs only where the batch script says so.
CONFIGURATION = """
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={directory}/munge.socket,cred_expire=5
SlurmctldPort={controller_port}
SlurmdPort={node_port}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
FirstJobId={first_job}
JobRequeue=1
KillWait=5
GresTypes=gpu
NodeName=localhost NodeAddr=127.0.0.1 CPUs={num_cpus} Gres=gpu:2 CpuBind=none
PartitionName=all Nodes=ALL Default=YES
"""

# Two devices that exist on every machine, and on which nothing is computed.
GPUS = """
Name=gpu Flags=nvidia_gpu_env File=/dev/null
Name=gpu Flags=nvidia_gpu_env File=/dev/zero
"""


def missing_program() -> str | None:
    """Name a program of SLURM that is not installed."""
    return next((name for name in PROGRAMS if find(name) is None), None)


@contextlib.contextmanager
def running(directory: Path) -> Iterator[dict[str, str]]:
    """Start SLURM in `directory`; yield the variables by which commands find it.

    Nothing that it started is left afterwards.
    """
    variables = {"SLURM_CONF": str(directory / "slurm.conf")}
    environment = {**os.environ, **variables}
    _configure(directory)
    commands = (_munged(directory), ["slurmctld", "-D"], ["slurmd", "-D", "-N", "localhost"])
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            daemons.append(_start(command, directory, environment))
        wait_for(lambda: "idle" in _node_states(environment))
        yield variables
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.wait()
        _end_jobs(variables["SLURM_CONF"])


def find(program: str) -> str | None:
    """Return the path of a program; daemons are not on every user's PATH."""
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")


def _configure(directory: Path) -> None:
    for name in ("state", "spool"):
        (directory / name).mkdir()
    key = directory / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    text = CONFIGURATION.format(
        directory=directory,
        user=getpass.getuser(),
        controller_port=free_port(),
        node_port=free_port(),
        first_job=1000 + secrets.randbelow(50_000),  # MASTER_PORT is derived from the job's number
        num_cpus=NUM_CPUS,
    )
    (directory / "slurm.conf").write_text(text)
    (directory / "gres.conf").write_text(GPUS)


def _munged(directory: Path) -> list[str]:
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
    paths = [f"--{option}={directory}/munge.{ending}" for option, ending in files.items()]
    # munge requires a directory open to all; only this user has access here.
    return ["munged", "--foreground", "--force", *paths]


def _start(
    command: list[str], directory: Path, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    program = find(command[0])
    assert program is not None
    with (directory / f"{command[0]}.log").open("wb") as log:
        return subprocess.Popen(
            [program, *command[1:]],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _node_states(environment: dict[str, str]) -> str:
    command = ["sinfo", "--noheader", "--format=%T"]
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout


def _end_jobs(slurm_conf: str) -> None:
    """End processes that jobs left: all whose environment names this configuration file."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("SLURM_CONF") == slurm_conf:
                process.kill()
                processes.append(process)
    psutil.wait_procs(processes, timeout=10)

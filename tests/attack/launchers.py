"""The command lines that start a run's ranks, one for each way to start them."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence

from tests.conftest import ROOT
from tests.support import slurm
from tests.support.ports import free_port

SCHEDULER = """"$@" & "$@" &
wait -n && wait -n && exit
code=$?; sleep 20; kill -KILL $(jobs -p) 2>/dev/null; exit $code"""
Launcher = Callable[[int, Sequence[str]], list[str]]


def torchrun(size: int, settings: Sequence[str]) -> list[str]:
    """Start all ranks by torchrun."""
    options = ("--standalone", f"--nproc-per-node={size}", "-m", "lab.train")
    return [sys.executable, "-m", "torch.distributed.run", *options, *settings]


def nodes(size: int, settings: Sequence[str]) -> list[str]:
    """Start launch/node.sh: two nodes on this machine if the ranks divide, else one.

    Like a scheduler, the shell ends both some time after one has failed.
    """
    number = 2 if size % 2 == 0 else 1
    options = ("--rendezvous", f"localhost:{free_port()}", "--job", "a", "--nodes", f"{number}")
    line = [str(ROOT / "launch/node.sh"), *options, "--ranks", f"{size // number}", *settings]
    if number == 1:
        return line
    return ["bash", "-c", SCHEDULER, "nodes", *line]


def hosts(size: int, settings: Sequence[str]) -> list[str]:
    """Start ranks on hosts that are network namespaces."""
    emulated = ("cluster=emulated", f"cluster.hosts={size}")
    return [sys.executable, "-m", "lab.train", *emulated, *settings]


def job(size: int, settings: Sequence[str]) -> list[str]:
    """Submit launch/slurm.sbatch and wait for its end."""
    return ["sbatch", "--wait", f"--ntasks={size}", str(ROOT / "launch/slurm.sbatch"), *settings]


def horovod(size: int, settings: Sequence[str]) -> list[str]:
    """Start launch/horovod.sh."""
    return [str(ROOT / "launch/horovod.sh"), "--ranks", f"{size}", *settings]


LAUNCHERS: dict[str, Launcher] = {
    "torchrun": torchrun,
    "node.sh": nodes,
    "hosts": hosts,
    "SLURM": job,
    "Horovod": horovod,
}
# Ranks of these may be forks of a process that has imported torch.
FORKING = ("torchrun", "node.sh")


def missing() -> dict[str, str]:
    """Say by launcher why it cannot be used here."""
    reasons = {}
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        reasons["hosts"] = "no network namespaces"
    if (program := slurm.missing_program()) is not None:
        reasons["SLURM"] = f"there is no {program}"
    if importlib.util.find_spec("horovod") is None or shutil.which("horovodrun") is None:
        reasons["Horovod"] = "Horovod is not installed"
    return reasons

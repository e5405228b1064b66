"""The same weights for the same seed and strategy, whoever starts the ranks.

SLURM's srun has its own file, as it needs a cluster: tests/e2e/test_slurm.py; horovodrun is in
tests/distributed/test_horovod.py.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from lab.train import main
from tests.conftest import ROOT, record
from tests.support import HANG_S
from tests.support.ranks import CREW, train_once

RUN = ("strategy=onebit", "batch_size=24", "optim.lr=0.01", "data.size=16", "steps=6")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
RAY = (sys.executable, str(ROOT / "examples/ray/train.py"), "2")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of weights after the same run of ranks that torchrun's variables describe."""
    runs_dir = f"runs_dir={tmp_path_factory.mktemp('runs')}"
    return train_once(2, *RUN, runs_dir)[0].record["replica_hash"]


def in_a_thread(settings: list[str]) -> list[int]:
    codes: list[int] = []
    thread = Thread(target=lambda: codes.append(main(settings)))
    thread.start()
    thread.join()
    return codes


def test_lab_train_runs_outside_the_main_thread(expected: str, tmp_path: Path) -> None:
    settings = [*RUN, "device=cpu", "cell=thread", f"runs_dir={tmp_path}"]
    assert CREW.call(2, in_a_thread, settings) == [[0], [0]]
    assert record(tmp_path / "default/thread")["replica_hash"] == expected


def start(line: tuple[str, ...], environment: dict[str, str], folder: Path) -> dict[str, object]:
    """Run `line` with the settings of the run; return its record."""
    words = [*line, *RUN, "device=cpu", "cell=run", f"runs_dir={folder}/runs"]
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return record(folder / "runs/default/run")


def test_torchrun(expected: str, environment: dict[str, str], tmp_path: Path) -> None:
    line = (environment["PYTHON_EXEC"], *TORCHRUN, "-m", "lab.train")
    found = start(line, environment, tmp_path)
    assert (found["launcher"], found["replica_hash"]) == ("torchrun", expected)


needs_mpirun = pytest.mark.skipif(
    not shutil.which("mpirun"), reason="Open MPI is not installed: no mpirun"
)
LOOP = """
import sys, lab, torch
lab.grad_sync(torch.nn.Linear(4, 2), "allreduce")
sys.stdout.write(f"ranks: {torch.distributed.get_world_size()}\\n")  # whole: ranks share the output
"""


@needs_mpirun
def test_mpirun(expected: str, environment: dict[str, str], tmp_path: Path) -> None:
    line = (*MPIRUN, environment["PYTHON_EXEC"], "-m", "lab.train")
    found = start(line, environment, tmp_path)
    assert (found["launcher"], found["replica_hash"]) == ("mpirun", expected)


@needs_mpirun
def test_mpirun_starts_the_ranks_of_a_loop_that_leaves_it_to_the_lab(
    environment: dict[str, str],
) -> None:
    line = [*MPIRUN, environment["PYTHON_EXEC"], "-c", LOOP]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout.splitlines() == ["ranks: 2"] * 2, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: the extra ray"
)
def test_ray_train(expected: str, real_environment: dict[str, str], tmp_path: Path) -> None:
    own = {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(tmp_path)}
    found = start(RAY, real_environment | own, tmp_path)
    assert found["replica_hash"] == expected

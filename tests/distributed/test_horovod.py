"""The same strategies over Horovod, where it is installed (make horovod)."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor, nn

from lab.training import checkpoint
from tests.conftest import ROOT, Finished, record, wait_for
from tests.distributed.test_strategies import distance
from tests.support import HANG_S
from tests.support.ranks import refusals, spawn, train

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: make horovod"
)
SMALL = ("data.size=16", "batch_size=24", "optim.lr=0.01")
RUN = (*SMALL, "steps=20", "checkpoint_every=20")
# Long enough that a busy machine keeps no rank from its exchange until one is suspended.
ENDLESS = ("steps=100000", "checkpoint_every=5", "exchange_timeout_s=15")


def start(environment: dict[str, str], *settings: str, ranks: int = 2) -> subprocess.Popen[str]:
    """Start `launch/horovod.sh` and return without waiting."""
    python = environment.get("PYTHON_EXEC", sys.executable)  # the same that torchrun would start
    path = f"{Path(python).parent}:{Path(sys.executable).parent}:{environment['PATH']}"
    return subprocess.Popen(
        [str(ROOT / "launch" / "horovod.sh"), "--ranks", str(ranks), "device=cpu", *settings],
        env={**environment, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def horovodrun(environment: dict[str, str]) -> Callable[..., Finished]:
    """Run `launch/horovod.sh`; its ranks are forks of a process that has imported torch."""

    def run(*settings: str, ranks: int = 2) -> Finished:
        process = start(environment, *settings, ranks=ranks)
        out, err = process.communicate(timeout=HANG_S)
        return Finished(process.returncode, out, err)

    return run


def weights(cell: Path) -> dict[str, Tensor]:
    shared, _ = checkpoint.load(cell / "checkpoints" / "step_000020")
    return shared["model"]


def compare_with_gloo(cell: Path, *settings: str) -> None:
    """Compare weights and record of a run of 2 ranks with those of all-reduce over Gloo."""
    over_gloo = train(2, "strategy=allreduce", *RUN, *settings, "cell=gloo")
    assert distance(weights(cell), over_gloo[0].weights) < 1e-6
    ours, theirs = record(cell), over_gloo[0].record
    assert (ours["status"], ours["backend"], ours["launcher"]) == ("done", "horovod", "horovodrun")
    assert ours["world_size"] == 2
    assert ours["payload_bytes_per_step"] == theirs["payload_bytes_per_step"]
    assert ours.keys() == theirs.keys()


def test_onebit_is_the_same_over_horovod_bit_for_bit(horovodrun: Callable[..., Finished]) -> None:
    """Bits travel by all_to_all and all_gather and are summed here, so nothing depends on the
    library, except two small tensors in full precision, whose sum of two has one order."""
    done = horovodrun("strategy=onebit", *RUN, "cell=horovod")
    assert done.code == 0, done.err[-2000:]
    over_gloo = train(2, "strategy=onebit", *RUN, "cell=gloo")[0].record
    found = record(Path("runs/default/horovod"))
    assert (found["launcher"], found["replica_hash"]) == ("horovodrun", over_gloo["replica_hash"])


@pytest.mark.slow
def test_three_ranks_and_compression_and_accumulation(horovodrun: Callable[..., Finished]) -> None:
    fp16 = ("strategy=horovod", "sync.compression=fp16", "accumulate=2")
    done = horovodrun(*fp16, *RUN, "cell=horovod", ranks=3)
    assert done.code == 0, done.err[-2000:]
    over_gloo = train(3, "strategy=allreduce", *RUN, "cell=gloo")
    assert 1e-6 < distance(weights(Path("runs/default/horovod")), over_gloo[0].weights) < 1e-2
    theirs = over_gloo[0].record["payload_bytes_per_step"][0]
    assert record(Path("runs/default/horovod"))["payload_bytes_per_step"] == [theirs // 2] * 3


class Silent(nn.Linear):
    """A model with a weight that no rank's forward uses."""

    def __init__(self, *, input_shape: Sequence[int], output_size: int) -> None:
        super().__init__(math.prod(input_shape), output_size)
        self.unused = nn.Parameter(torch.ones(8, 8))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(1))


@pytest.mark.slow
def test_weight_decay_moves_no_weight_that_no_rank_used(
    horovodrun: Callable[..., Finished],
) -> None:
    settings = (f"model={__name__}.Silent", "optim.weight_decay=0.1")
    done = horovodrun("strategy=horovod", *RUN, *settings, "cell=horovod")
    assert done.code == 0, done.err[-2000:]
    assert (weights(Path("runs/default/horovod"))["unused"] == 1).all()
    compare_with_gloo(Path("runs/default/horovod"), *settings)


@pytest.mark.slow
def test_what_needs_send_and_recv_is_refused(horovodrun: Callable[..., Finished]) -> None:
    done = horovodrun("strategy=tree", *RUN)
    assert done.code != 0
    (line,) = done.error_lines
    assert "sends from rank to rank, but Horovod has only collectives; use comm=torch" in line
    assert not Path("runs/default").exists() or not list(Path("runs").rglob("record.json"))


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(real_environment: dict[str, str]) -> None:
    process = start(real_environment, "strategy=horovod", *SMALL, *ENDLESS)
    wait_for(lambda: list(Path("runs").rglob("step_*/DONE")))
    (second,) = [rank for rank in ranks_of(process) if rank.environ()["HOROVOD_RANK"] == "1"]
    second.suspend()
    process.communicate(timeout=HANG_S)
    assert process.returncode != 0
    (cell,) = Path("runs/default").iterdir()
    found = record(cell)
    assert found["status"] == "timeout"
    assert "exchange_timeout_s=15: rank 0 waits in" in found["error"]
    assert found["error"].endswith("rank 1 is lost")
    # It may remain as a zombie: not every machine's first process reaps its children.
    assert not second.is_running() or second.status() == psutil.STATUS_ZOMBIE


def ranks_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    processes = psutil.Process(launcher.pid).children(recursive=True)
    return [each for each in processes if "python" in each.name() and "lab.train" in each.cmdline()]


@pytest.mark.slow
def test_a_sweep_starts_cells_by_horovodrun_with_the_weights_of_gloo(
    command: Callable[..., Finished],
) -> None:
    settings = ("study=s", "strategy=horovod", "world_size=2", "device=cpu", *RUN)
    done = command("lab.sweep", *settings, f"cell_timeout_s={HANG_S:.0f}")
    assert done.code == 0, done.out + done.err
    (path,) = Path("runs/s").glob("*/record.json")
    compare_with_gloo(path.parent)
    refused = command("lab.sweep", *settings, "launcher=slurm")
    assert refused.code == 2
    (line,) = refused.error_lines
    assert line.endswith("launcher=slurm: cannot start ranks of comm=horovod; set launcher=local")


@pytest.mark.slow
def test_ranks_of_torchrun_are_refused() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, "-m", "lab.train", "device=cpu", "comm=horovod", *RUN],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "comm=horovod: torchrun started these ranks; start them with horovodrun" in done.stderr


WRONG = {
    ("comm=horovod", "backend=gloo"): "backend=gloo: comm=horovod has its own",
    ("strategy=horovod", "overlap=false"): "overlap=False bucket_mb=None: strategy=horovod",
    ("strategy=horovod", "comm=torch"): "strategy=horovod: runs only over comm=horovod",
    ("strategy=horovod", "exchange=onebit"): "exchange=OneBit: strategy=horovod has its own",
    ("strategy=horovod", "channels_last=true"): "strategy=horovod accepts only contiguous",
    ("strategy=horovod", "sync.compression=zip"): "sync.compression=zip: allowed: none",
}


def refusals_of_one_rank(runs: list[tuple[str, ...]]) -> list[str]:
    """Return what runs are refused with that no launcher has started."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    return refusals(runs)


def test_wrong_settings() -> None:
    runs = [("device=cpu", *settings, *RUN) for settings in WRONG]
    (found,) = spawn(1, refusals_of_one_rank, runs)
    for message, line in zip(WRONG.values(), found, strict=True):
        assert message in line and "\n" not in line

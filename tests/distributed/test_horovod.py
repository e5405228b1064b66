"""The same strategies over Horovod, where it is installed (make horovod)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import Tensor

from lab import checkpoint
from tests.conftest import ROOT, Finished, record
from tests.distributed.ranks import train
from tests.distributed.test_strategies import distance

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: make horovod"
)
RUN = ("data.size=16", "batch_size=24", "optim.lr=0.01", "steps=20", "checkpoint_every=20")


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def horovodrun(*settings: str, ranks: int = 2) -> Finished:
    binaries = Path(sys.executable).parent
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{binaries}:{environment['PATH']}"
    done = subprocess.run(
        [str(ROOT / "launch" / "horovod.sh"), "--ranks", str(ranks), "device=cpu", *settings],
        env=environment,
        capture_output=True,
        text=True,
        timeout=55,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def weights(cell: str) -> dict[str, Tensor]:
    shared, _ = checkpoint.load(Path(f"runs/default/{cell}/checkpoints/step_000020"))
    return shared["model"]


@pytest.mark.parametrize("strategy", ["allreduce", "overlap", "horovod"])
def test_weights_agree_with_those_over_gloo(strategy: str) -> None:
    done = horovodrun(f"strategy={strategy}", *RUN, "cell=horovod")
    assert done.code == 0, done.err[-2000:]
    over_gloo = train(2, "strategy=allreduce", *RUN, "cell=gloo")
    assert distance(weights("horovod"), over_gloo[0].weights) < 1e-6
    ours, theirs = record(Path("runs/default/horovod")), over_gloo[0].record
    assert (ours["backend"], ours["launcher"], ours["world_size"]) == ("horovod", "horovodrun", 2)
    assert ours["payload_bytes_per_step"] == theirs["payload_bytes_per_step"]
    assert ours.keys() == theirs.keys() | {"schema"}


def test_onebit_is_the_same_over_horovod_bit_for_bit() -> None:
    """Bits travel by all_to_all and all_gather, and sums are ours: nothing depends on the library,
    but for two small tensors in full precision, whose sum of two has one order."""
    done = horovodrun("strategy=onebit", *RUN, "cell=horovod")
    assert done.code == 0, done.err[-2000:]
    over_gloo = train(2, "strategy=onebit", *RUN, "cell=gloo")
    assert (
        record(Path("runs/default/horovod"))["replica_hash"] == over_gloo[0].record["replica_hash"]
    )


def test_three_ranks_and_compression_and_accumulation() -> None:
    fp16 = ("strategy=horovod", "sync.compression=fp16", "accumulate=2")
    done = horovodrun(*fp16, *RUN, "cell=horovod", ranks=3)
    assert done.code == 0, done.err[-2000:]
    over_gloo = train(3, "strategy=allreduce", *RUN, "cell=gloo")
    assert 1e-6 < distance(weights("horovod"), over_gloo[0].weights) < 1e-2
    theirs = over_gloo[0].record["payload_bytes_per_step"][0]
    assert record(Path("runs/default/horovod"))["payload_bytes_per_step"] == [theirs // 2] * 3


@pytest.mark.parametrize("strategy", ["tree", "ring", "star"])
def test_what_needs_send_and_recv_is_refused(strategy: str) -> None:
    done = horovodrun(f"strategy={strategy}", *RUN)
    assert done.code != 0
    (line,) = done.error_lines
    assert "sends from rank to rank; Horovod has collectives alone; use comm=torch" in line
    assert not Path("runs/default").exists() or not list(Path("runs").rglob("record.json"))


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("comm=horovod", "backend=gloo"), "backend=gloo: comm=horovod brings its own"),
        (("strategy=horovod", "overlap=false"), "overlap=False bucket_mb=None: strategy=horovod"),
        (("strategy=horovod", "comm=torch"), "strategy=horovod: runs over comm=horovod alone"),
        (("strategy=horovod", "exchange=onebit"), "exchange=OneBit: strategy=horovod has its own"),
        (("strategy=horovod", "sync.compression=zip"), "sync.compression=zip: allowed are none"),
    ],
)
def test_wrong_settings(settings: tuple[str, ...], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lab.train", "device=cpu", *settings, *RUN],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr

"""The package as users get it: commands from anywhere, configuration inside the wheel."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.config import choices_of
from tests.conftest import ROOT, Finished, record

SBATCH = ROOT / "launch" / "slurm.sbatch"
COMMANDS = ("lab.train", "lab.sweep", "lab.plot", "lab.bench")


@pytest.mark.parametrize("module", COMMANDS)
def test_help_names_settings_and_three_examples(
    command: Callable[..., Finished], module: str
) -> None:
    done = command(module, "--help")
    assert done.code == 0
    examples = done.out[done.out.index("examples:") :]
    assert examples.count(f"-m {module}") >= 3
    if module != "lab.plot":
        assert all(name in done.out for name in choices_of("strategy"))
        assert "exchange_timeout_s=300.0" in done.out


@pytest.mark.timeout(120)
def test_wheel_carries_what_commands_read_and_runs_without_the_checkout(
    tmp_path: Path,
) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True, timeout=60)
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    assert (installed / "lab" / "slurm.sbatch").read_text() == SBATCH.read_text()
    line = "from lab.config import conf_dir, load; print(conf_dir()); load(['strategy=onebit'])"
    done = subprocess.run(
        [sys.executable, "-c", line],
        cwd=tmp_path,
        env={"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(installed / "lab" / "conf")


def test_plain_python_is_one_rank_and_torchrun_reads_the_same(
    command: Callable[..., Finished], train: Callable[..., Finished], tmp_path: Path
) -> None:
    settings = ("strategy=onebit", "batch_size=24", "data.size=16", "steps=6")
    assert command("lab.train", *settings, "device=cpu", "cell=a").code == 0
    assert train(1, *settings, "cell=b").code == 0
    plain, launched = (record(tmp_path / "runs/default" / cell) for cell in "ab")
    assert plain["world_size"] == launched["world_size"] == 1
    assert plain["replica_hash"] == launched["replica_hash"]


def test_run_names_are_readable_and_never_reused(
    command: Callable[..., Finished], tmp_path: Path
) -> None:
    settings = ("strategy=tree", "batch_size=24", "data.size=16", "steps=6", "device=cpu")
    for _ in range(2):
        assert command("lab.train", *settings).code == 0
    names = sorted(path.name for path in (tmp_path / "runs/default").iterdir())
    assert names == [
        "tree-n1-b24-data.size_16-steps_6-device_cpu",
        "tree-n1-b24-data.size_16-steps_6-device_cpu-2",
    ]


def test_bench_pairs_two_strategies(command: Callable[..., Finished], tmp_path: Path) -> None:
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "lab.bench")
    small = ("batch_size=24", "data.size=16", "steps=8", "device=cpu")
    done = command(*launcher, "step", "strategy=overlap,ddp", "out=ratio.json", *small)
    assert done.code == 0, done.err
    ratio = json.loads((tmp_path / "ratio.json").read_text())
    assert ratio["num_pairs"] == 3
    assert [row["comm_settings"] for row in ratio["rows"]] == [{}, {}]  # NCCL would have some
    assert (tmp_path / "ratio.png").is_file() and "ratio to ddp" in done.out
    wrong = command("lab.bench", "step", "strategy=overlap")
    assert wrong.code == 2
    assert "a comparison needs two" in wrong.err


@pytest.mark.timeout(180)
def test_compiled_model_trains(command: Callable[..., Finished], tmp_path: Path) -> None:
    settings = ("model=mlp", "batch_size=24", "steps=6", "device=cpu", "strategy=overlap")
    for cell, switch in (("a", "compile=true"), ("b", "compile=false")):
        assert command("lab.train", *settings, switch, f"cell={cell}", timeout_s=150).code == 0
    compiled, eager = (record(tmp_path / "runs/default" / cell) for cell in "ab")
    assert (compiled["compile"], eager["compile"]) == ("regions", None)
    assert compiled["final"]["loss"] == pytest.approx(eager["final"]["loss"], rel=1e-3)

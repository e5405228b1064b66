"""Secrets are never written, and files that are read cannot run code."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.attack.acts import seal
from tests.attack.strangers import Malice
from tests.conftest import Finished
from tests.support.ranks import told
from tests.support.records import leave, make_record

Command = Callable[..., Finished]
QUICK = ("batch_size=24", "data.size=16", "optim.lr=0.01", "steps=6", "device=cpu")
KEY = "f00d" * 10  # the shape of a wandb key


def test_planted_keys_are_in_no_file_and_no_output(
    command: Command, environment: dict[str, str], tmp_path: Path
) -> None:
    planted = ("WANDB_API_KEY", "HOROVOD_SECRET_KEY", "NCCL_PASSWORD", "GLOO_TOKEN")
    environment |= dict.fromkeys(planted, KEY)
    done = command("lab.sweep", "study=s", "strategy=onebit", "recorder=wandb", *QUICK)
    assert done.code == 0, done.err
    assert list(tmp_path.rglob("*.wandb"))
    assert KEY not in done.out + done.err
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def test_pickle_in_a_checkpoint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert told((*QUICK, "cell=a", "checkpoint_every=3")) == [""]
    checkpoint = tmp_path / "runs/default/a/checkpoints/step_000006"
    content = pickle.dumps(Malice())
    (checkpoint / "shared.pt").write_bytes(content)
    seal(checkpoint / "shared.pt")  # an attacker who can write can also hash
    (line,) = told((*QUICK, "cell=b", f"resume={checkpoint}"))
    assert "corrupt checkpoint: shared.pt" in line and "\n" not in line
    assert not (tmp_path / "ran").exists()
    pickle.loads(content)  # unpickling runs the command
    assert (tmp_path / "ran").exists()


def test_modules_in_a_folder_of_results_do_not_run(
    tmp_path: Path, real_environment: dict[str, str]
) -> None:
    folder = tmp_path / "s"
    leave(folder / "a", make_record("none", 1, 0.1))
    for name in ("numpy", "json", "altair", "pandas", "random"):
        (folder / f"{name}.py").write_text("open('ran', 'w')")
    done = subprocess.run(
        [sys.executable, "-m", "lab.plot", ".", "format=svg"],
        cwd=folder, env=real_environment, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert list(folder.glob("figures/*.svg"))
    assert not (folder / "ran").exists()

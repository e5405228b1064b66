"""Runs that fail or are stopped: one clear line, a record, nothing lost, nothing hung."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lab.record.schema import SCHEMA, Record
from tests.attack.acts import seal
from tests.conftest import LAUNCHER, Finished, record, wait_for
from tests.support import HANG_S, ranks
from tests.support.ranks import told
from tests.support.slow import some_of

Train = Callable[..., Finished]
QUICK = ("batch_size=24", "data.size=16", "optim.lr=0.01", "steps=6")


# Refused after ranks have met: one process tries them all.
LATER = [
    (("model=alexnet",), r"model=alexnet.*63.*data.size"),
    (("strategy=fc1x1", "model=mlp"), r"strategy=fc1x1: .*lenet"),
    (("backend=nccl", "device=cpu"), r"backend=nccl: needs GPUs"),
    (("strategy=ddp", "overlap=false"), r"overlap=False .* strategy=ddp needs overlap=true"),
    (
        ("strategy=ddp", "sync.hook=bf16"),
        r"sync\.hook=bf16: torch supports this hook only with NCCL",
    ),
    (("strategy=ddp", "sync.hook=lab"), r"sync\.hook=lab: needs one of the lab's exchanges"),
    (
        ("strategy=ddp", "sync.hook=powersgd", "bucket_mb=0.01"),
        r"sync\.hook=powersgd bucket_mb=0\.01: over Gloo, .* use bucket_mb=\d+, or strategy=po",
    ),
    (("strategy=ddp", "exchange=onebit"), r"exchange=OneBit: strategy=ddp has its own"),
    (("optim.nesterov=maybe",), r"optim.nesterov=maybe: must be true or false"),
    (
        ("+optim.beta=1",),
        r"optim\.beta=1: no such setting; torch\.optim\.SGD has lr, .*; the lab adds decay_vec",
    ),
    (
        ("strategy=caffe", "optim=adamw"),
        r"strategy=caffe optim=torch\.optim\.AdamW: emulates a framework that updates with SGD "
        r"on the root; use optim=sgd$",
    ),
]


def test_settings_that_prove_wrong_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., Finished]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = told(*(settings for settings, _ in LATER))
    expected = [message for _, message in LATER]
    wrong = [(m, said) for m, said in zip(expected, found, strict=True) if not re.search(m, said)]
    assert wrong == []
    done = command("lab.train", "strategy=ddp", "overlap=false")
    assert done.code == 2 and "Traceback" not in done.err
    (line,) = done.error_lines
    assert line.endswith(found[expected.index(r"overlap=False .* strategy=ddp needs overlap=true")])
    assert not list(tmp_path.rglob("record.json"))


def test_batch_that_does_not_divide(train: Train) -> None:
    done = train(2, "batch_size=99")
    assert done.code != 0
    nearest = "must be a multiple of 2 for 2 ranks with accumulate=1, such as 98 or 100"
    assert done.error_lines == [f"lab.train: error: batch_size=99: {nearest}"]


def test_unwritable_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("a file stands where the directory should")
    (tmp_path / "loop").symlink_to("loop")
    places = ("runs", "loop", "/proc/self", "/proc/1/x", "/sys/kernel", "/dev/null")
    for place, refused in zip(
        places, told(*((*QUICK, f"runs_dir={p}") for p in places)), strict=True
    ):
        assert re.search(rf"runs_dir: cannot write .*{place}/default", refused)
    assert (tmp_path / "runs").read_text().startswith("a file")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("RaisesOnRank1", r"rank 1: RuntimeError: planted error"),
        ("NanOnRank1", r"rank \d: FloatingPointError: .*not finite at step \d"),
        ("DriftsOnRank1", r"rank \d: ReplicaMismatch: .*classifier\S* on ranks \[1\]"),
    ],
)
def test_faults_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = (f"exchange._target_=tests.support.faults.{fault}", "cell=bad")
    with pytest.raises(AssertionError, match="ended without an answer"):
        ranks.spawn(2, ranks.execute, *ranks.composed(*QUICK, *settings))
    result = record(tmp_path / "runs/default/bad")
    assert (result["schema"], result["status"]) == (SCHEMA, "failed")
    assert result.keys() == {"schema", *(field.name for field in fields(Record))}
    assert re.search(message, result["error"])
    assert (result["traceback"] is not None) == (fault == "RaisesOnRank1")  # the others are found
    assert (tmp_path / "runs/default/bad/config.yaml").exists()


def test_a_hang_ends_the_run_in_one_line(train: Train, tmp_path: Path) -> None:
    settings = ("exchange._target_=tests.support.faults.HangsOnRank1", "cell=bad")
    done = train(2, *QUICK, *settings, "exchange_timeout_s=8")
    assert done.code != 0
    result = record(tmp_path / "runs/default/bad")
    assert result["status"] == "timeout"
    waits = r"exchange_timeout_s=8: .*rank 0 waits in HangsOnRank1 of bucket \S+ and \d more"
    assert re.search(waits, result["error"])
    assert done.error_lines == [f"lab.train: error: {result['error']}"]


def test_out_of_memory_is_recorded_as_such(
    command: Callable[..., Finished], tmp_path: Path
) -> None:
    done = command(
        "lab.train", "model=mlp", "model.hidden=[1,900000000000000]", "cell=big", "steps=2"
    )
    assert done.code == 1
    result = record(tmp_path / "runs/default/big")
    assert result["status"] == "oom"
    assert len(done.error_lines) == 1


def start(environment: dict[str, str], folder: Path, *settings: str) -> subprocess.Popen[bytes]:
    line = [*LAUNCHER, "--nproc-per-node=2", "-m", "lab.train", "device=cpu", *settings]
    return subprocess.Popen(
        line, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


LONG = ("strategy=onebit", "batch_size=24", "data.size=16", "optim.lr=0.01", "steps=200")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The replica hash of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return ranks.train(2, *LONG, f"runs_dir={folder}")[0].record["replica_hash"]


@pytest.mark.parametrize("number", some_of([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], every=3))
def test_a_signal_checkpoints_and_resume_auto_ends_as_if_undisturbed(
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: str,
    number: signal.Signals,
) -> None:
    process = start(environment, tmp_path, *LONG, "cell=a", "checkpoint_every=20")
    checkpoints = tmp_path / "runs/default/a/checkpoints"
    wait_for(lambda: list(checkpoints.glob("step_*/DONE")))
    process.send_signal(number)
    assert process.wait(HANG_S) != 0
    stopped = record(tmp_path / "runs/default/a")
    assert stopped["status"] == "interrupted"
    assert stopped["error"].startswith("stopped by SIG")
    assert 20 <= stopped["num_steps"] < 200
    assert (checkpoints / f"step_{stopped['num_steps']:06d}" / "DONE").exists()

    monkeypatch.chdir(tmp_path)
    resumed = ranks.train(2, *LONG, "cell=a", "resume=auto")[0].record
    assert resumed["num_steps"] == 200
    assert resumed["replica_hash"] == undisturbed


def test_ranks_end_with_a_torchrun_that_is_killed(
    real_environment: dict[str, str], tmp_path: Path
) -> None:
    process = start(real_environment, tmp_path, *LONG)
    launcher = psutil.Process(process.pid)
    wait_for(lambda: len(launcher.children()) == 2)
    rank_processes = launcher.children()
    process.kill()  # before they have joined, when no watchdog sees that
    process.wait()
    gone, alive = psutil.wait_procs(rank_processes, timeout=HANG_S)
    assert len(gone) == 2
    assert alive == []


def test_kill_during_a_checkpoint_leaves_the_previous_one_usable(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = "exchange._target_=tests.support.faults.OneBitKilledWhileSaving"
    settings = (*LONG[:-1], "steps=60", "checkpoint_every=20", "cell=a", fault)
    assert train(2, *settings).code != 0
    checkpoints = tmp_path / "runs/default/a/checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == [".step_000040", "step_000020"]
    assert any((checkpoints / ".step_000040").iterdir())  # the file was being written
    assert not (checkpoints / ".step_000040/DONE").exists()

    monkeypatch.chdir(tmp_path)
    result = ranks.train(2, *settings, "resume=auto")[0].record
    assert (result["status"], result["num_steps"]) == ("done", 60)
    assert [attempt["first_step"] for attempt in result["attempts"]][-1] == 20


def test_killed_rank_is_started_again_by_plain_torchrun(
    command: Callable[..., Finished], environment: dict[str, str], tmp_path: Path
) -> None:
    environment["LAB_TEST_KILL"] = "1:30"
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    fault = (
        "exchange._target_=tests.support.faults.OneBitKilled",
        "checkpoint_every=20",
        "device=cpu",
    )
    done = command(*torchrun, "-m", "lab.train", *LONG[:-1], "steps=60", *fault)
    assert done.code == 0, done.err[-2000:]
    (run,) = (tmp_path / "runs/default").iterdir()
    assert [attempt["first_step"] for attempt in record(run)["attempts"]] == [0, 20]


def test_resume_never_writes_over_a_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs, first, tree = Path("runs/default"), (*QUICK, "cell=a"), (*QUICK, "strategy=tree")
    assert told((*first, "checkpoint_every=3"), tree) == ["", ""]
    before = {path: path.read_text() for path in runs.glob("*/record.json")}
    assert len(before) == 2
    middle = f"resume={runs / 'a/checkpoints/step_000003'}"
    refused, taken, *done = told(
        (*first, "resume=auto"), first, (*tree, middle), (*tree, "resume=auto")
    )
    assert "already contains a record (done)" in refused
    assert "cell=a" in taken
    assert done == ["", ""]
    assert len(list(runs.glob("*/record.json"))) == 4
    assert {path: path.read_text() for path in before} == before


def edited(name: str, change: Callable[[dict[str, Any]], object]) -> str:
    """Copy the checkpoint of step 3, change what all ranks share, and seal it anew."""
    shared = Path(shutil.copytree(CHECKPOINTS / "step_000003", name), "shared.pt")
    state = torch.load(shared, weights_only=True)
    change(state)
    torch.save(state, shared)
    seal(shared)
    return f"resume={name}"


CHECKPOINTS = Path("runs/default/a/checkpoints")


def test_resume_refuses_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onebit, middle = (*QUICK, "strategy=onebit"), f"resume={CHECKPOINTS}/step_000003"
    assert told((*onebit, "cell=a", "checkpoint_every=3")) == [""]
    whole = "not a complete checkpoint"
    wrong = {
        (middle, "exchange.granularity=block"): "contains residuals of exchange=",
        (middle, "strategy=allreduce"): "contains residuals of exchange=",
        (middle, "channels_last=true"): "the checkpoint was written with channels_last=False",
        (middle, "model=mlp"): "the checkpoint belongs to another model",
        (middle, "steps=2"): "is at step 3, but this run ends at step 2",
        (middle, "optim=torch.optim.Adam"): "contains the state of torch.optim.SGD",
        (edited("none", lambda state: state.pop("progress")),): "not a checkpoint of a run",
        **{
            (edited(f"at {step}", lambda state, step=step: state["progress"].update(step=step)),): (
                "must be integers of at least 0"
            )
            for step in (-5, "7", float("nan"))
        },
        **{(f"resume={CHECKPOINTS / place}",): whole for place in ("..", ".", "step_000003/DONE")},
        ("resume=Auto",): whole,
    }
    for said, line in zip(wrong.values(), told(*((*onebit, *more) for more in wrong)), strict=True):
        assert said in line and "\n" not in line
    assert told((*onebit, middle, "seed=5")) == [""]


def test_epochs_are_counted_in_samples_when_the_batch_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ("data.size=16", "optim.lr=0.01", "epochs=1")
    middle = "resume=runs/default/a/checkpoints/step_000020"
    first = (*settings, "batch_size=48", "checkpoint_every=10", "cell=a")
    assert told(first, (*settings, "batch_size=96", middle, "cell=b")) == ["", ""]
    assert record(tmp_path / "runs/default/a")["num_steps"] == 30  # 1437 images
    assert record(tmp_path / "runs/default/b")["num_steps"] == 20 + 5  # 960, then 477 more


def test_a_signal_while_a_rank_is_stuck_is_recorded(
    environment: dict[str, str], tmp_path: Path
) -> None:
    stuck = ("exchange._target_=tests.support.faults.HangsOnRank1", "cell=a", *QUICK)
    process = start(environment, tmp_path, *stuck)
    wait_for((tmp_path / "stuck").exists)
    process.send_signal(signal.SIGTERM)
    process.wait(HANG_S)
    result = record(tmp_path / "runs/default/a")
    assert result["status"] == "interrupted"
    assert re.match(r"stopped by SIGTERM while rank \d waits in HangsOnRank1", result["error"])

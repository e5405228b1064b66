"""Two hosts that were started with unlike settings, code, data or software do not train."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.torch_version import TorchVersion
from torch.utils.data import Dataset

import lab
from lab.distributed import world as worlds
from lab.settings.errors import ConfigError
from lab.training import rank_consistency
from tests.support.commands import Finished, run_module
from tests.support.ports import free_port
from tests.support.ranks import CREW, composed, execute

BASE = ("model=mlp", "data=synthetic", "data.num_images=64", "batch_size=8", "steps=2")
UNLIKE = {
    "batch_size": ("batch_size=4", "8 on rank 0, 4 on rank 1"),
    "seed": ("seed=1", "0 on rank 0, 1 on rank 1"),
    "precision": ("precision=bf16", "fp32 on rank 0, bf16 on rank 1"),
    "optim.lr": ("optim.lr=0.5", "on rank 0, 0.5 on rank 1"),
    "strategy": ("strategy=onebit", "none on rank 0, onebit on rank 1"),
    "exchange_timeout_s": ("exchange_timeout_s=9", "300.0 on rank 0, 9.0 on rank 1"),
    "bucket_mb": ("bucket_mb=3", "null on rank 0, 3.0 on rank 1"),
}


def executed(*by_rank: tuple[list[str], Any]) -> str:
    """Execute a run of which each rank has its own settings; return what it is refused with."""
    try:
        execute(*by_rank[int(os.environ["RANK"])])
    except ConfigError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        worlds.stop()
    return ""


def all_executed(runs: list[tuple[Any, Any]]) -> list[str]:
    return [executed(*by_rank) for by_rank in runs]


def test_unlike_settings_are_refused_on_all_ranks_by_name(tmp_path: Path) -> None:
    base = [*BASE, "strategy=none", f"runs_dir={tmp_path}"]
    runs = [(composed(*base), composed(*base, other)) for other, _ in UNLIKE.values()]
    first, second = CREW.call(2, all_executed, runs)
    assert first == second
    for (key, (_, words)), line in zip(UNLIKE.items(), first, strict=True):
        assert f"{key}: " in line and words in line
        assert line.startswith("SharedError: ")
        assert line.endswith("; must be equal on all ranks")
    assert not any(tmp_path.iterdir())


def test_hosts_may_have_paths_of_their_own(tmp_path: Path) -> None:
    one = composed(*BASE, "strategy=none", f"runs_dir={tmp_path / 'one'}")
    other = composed(*BASE, "strategy=none", f"runs_dir={tmp_path / 'other'}")
    assert CREW.call(2, executed, one, other) == ["", ""]


def joined(run: Any) -> list[str]:
    """Join as two ranks, of which the second one has something else installed, each in turn."""
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # of two hosts
    found = []
    for where, name, value in (
        (torch, "__version__", TorchVersion("2.0.0")),
        (lab, "__version__", "0.0.1"),
        (rank_consistency, "lab_code", lambda: "0123456789ab"),
    ):
        pretends = mock.patch.object(where, name, value)
        with pretends if os.environ["RANK"] == "1" else nullcontext():
            found.append(executed(run, run))
    return found


def test_unlike_software_is_refused_by_name() -> None:
    first, second = CREW.call(2, joined, composed(*BASE, "strategy=none"))
    assert first == second
    for line, software in zip(first, ("torch", "lab", "lab"), strict=True):
        assert line.startswith(f"SharedError: {software}: ")


class Turned(nn.Sequential):
    """A model whose layers the second rank has the other way round."""

    def __init__(self) -> None:
        layers = [nn.Linear(10, 10), nn.Linear(10, 10, bias=False)]
        order = 1 if os.environ.get("RANK", "0") == "0" else -1
        super().__init__(nn.Flatten(), nn.LazyLinear(10), *layers[::order])


def other_samples(seed: int) -> Any:
    """Make data of which each rank has other values, as where it read its own share alone."""
    chance = torch.Generator().manual_seed(seed + int(os.environ["RANK"]))
    return torch.randn(40, 1, 4, 4, generator=chance), torch.arange(40) % 10


def fewer_samples() -> Any:
    """Make data of which the second rank lacks a part."""
    number = 40 if os.environ["RANK"] == "0" else 30
    return torch.ones(number, 1, 4, 4), torch.arange(number) % 10


class RandomSamples(Dataset):
    """Samples that are changed at random as they are read, by a generator without a seed."""

    num_classes = 10
    chance = random.Random()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((1, 4, 4), self.chance.random()), index % 10


HERE = __name__
BUILT = [
    (
        f"model={HERE}.Turned",
        "parameter 3: 2.bias [10] float32 on rank 0, 3.weight [10, 10] float32 on rank 1",
    ),
    (f"data={HERE}.other_samples", "data's samples (digest): "),
    (f"data={HERE}.fewer_samples", "data's num_train: 36 on rank 0, 27 on"),
]


def test_unlike_models_and_data_are_refused_by_name_and_random_samples_not_compared(
    tmp_path: Path,
) -> None:
    base = ("model=mlp", "batch_size=8", "steps=2", f"runs_dir={tmp_path}")
    choices = [*(choice for choice, _ in BUILT), f"data={HERE}.RandomSamples"]
    runs = [composed(*base, choice) for choice in choices]
    first, second = CREW.call(2, all_executed, [(run, run) for run in runs])
    assert first == second
    *refused, at_random = first
    for line, (_, words) in zip(refused, BUILT, strict=True):
        assert words in line
        assert line.startswith("SharedError: ")
    assert at_random == ""


def test_comparing_leaves_generators_of_random_numbers_as_they_were() -> None:
    def drawn() -> list[float]:
        return [float(torch.rand(1)), random.random(), float(np.random.rand())]

    with rank_consistency._untouched_randomness():
        first = drawn()
    assert drawn() == first


def test_unlike_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    run = [*BASE, "strategy=none", f"runs_dir={tmp_path}"]
    first = composed(*run, "checkpoint_every=1", "cell=first")
    assert CREW.call(2, executed, first, first) == ["", ""]
    saved = tmp_path / "default/first/checkpoints/step_000001"
    resumed = composed(*run, f"resume={saved}")
    lines = CREW.call(2, resumed_elsewhere, saved, resumed)
    assert lines[0] == lines[1]
    assert "resume: step_000001 (" in lines[0]
    assert " on rank 0, none (" in lines[0]


def resumed_elsewhere(saved: Path, run: tuple[list[str], Any]) -> str:
    """Resume from a checkpoint that the second rank's host does not have."""
    if os.environ["RANK"] == "1":
        see = Path.read_bytes
        hidden = FileNotFoundError(2, "No such file or directory")

        def read_bytes(path: Path) -> bytes:
            if path.parent == saved:
                raise hidden
            return see(path)

        Path.read_bytes = read_bytes  # pyright: ignore[reportAttributeAccessIssue]
        try:
            return executed(run, run)
        finally:
            Path.read_bytes = see
    return executed(run, run)


def entered() -> list[str]:
    """Enter loops of one's own with what each rank has differently."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    found = []
    for enter in (
        lambda: lab.grad_sync(nn.Linear(4, 4), ("onebit", "int8")[rank]),
        lambda: lab.grad_sync(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + rank)), "onebit"),
        lambda: lab.attach(nn.parallel.DistributedDataParallel(nn.Linear(4, 4)), LOSSY[rank]),
    ):
        try:
            enter()
        except ConfigError as error:
            found.append(str(error))
    dist.destroy_process_group()
    return found


LOSSY = ("topk", "onebit")


def test_unlike_loops_are_refused_at_entry_by_name() -> None:
    first, second = CREW.call(2, entered)
    assert first == second
    strategy, shape, attached = first
    assert "exchange._target_: lab.exchange.compressed.OneBit on rank 0, lab." in strategy
    words = "parameter 2: 1.weight [4, 4] float32 on rank 0, 1.weight [5, 4] float32 on"
    assert words in shape
    assert "exchange._target_: lab.exchange.compressed.TopK on rank 0, lab." in attached


def test_the_first_rank_of_each_host_says_it_and_all_exit_with_code_2(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    port = str(free_port())

    def run(rank: int, batch: int) -> Finished:
        place = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2}
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        variables = {key: str(value) for key, value in {**place, **meet}.items()}
        settings = (*BASE, "device=cpu", "strategy=none", f"batch_size={batch}")
        return run_module("lab.train", settings, tmp_path, environment | variables)

    with ThreadPoolExecutor(4) as pool:
        ended = [*pool.map(run, range(4), (8, 8, 4, 4))]
    line = (
        "lab.train: error: batch_size: 8 on ranks 0-1, 4 on ranks 2-3; must be equal on all ranks\n"
    )
    assert [each.err for each in ended] == [line, "", line, ""]
    assert [each.code for each in ended] == [2] * 4

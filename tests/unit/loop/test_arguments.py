"""Arguments that a function of `import lab` does not take: each is refused in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lab

NET: Any = nn.Linear(2, 2)
ANY: Any = lab  # misused, which pyright would see


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: ANY.grad_sync([NET]), "model: has type list; must be an nn.Module"),
        (lambda: ANY.grad_sync(NET.parameters()), "model: has type generator; must be an nn.M"),
        (lambda: ANY.attach([NET], "onebit"), "ddp: has type list; must be an nn.Module"),
        (lambda: ANY.fsdp_reduce_scatter([NET]), "model: has type list; must be an nn.Module"),
        (lambda: ANY.grad_sync(NET, None), "strategy=None: must be the name of a strategy"),
        (lambda: ANY.attach(NET, strategy=3), "strategy=3: must be the name of a strategy"),
        (
            lambda: ANY.grad_sync(NET, group=[0, 1]),
            "group=[0, 1]: must be a process group that this rank is in",
        ),
        (
            lambda: ANY.grad_sync(NET, scaler=True),
            "scaler=True: must be a torch.amp.GradScaler, or None",
        ),
        (
            lambda: ANY.grad_sync(NET, "hierarchical", **{"exchange.inter": {"_target_": "Int8"}}),
            "exchange.inter={'_target_': 'Int8'}: must be no dict; set each key, as in exchange.i",
        ),
        (
            lambda: ANY.grad_sync(NET, **{"exchange.threshold": b"mean"}),
            "exchange.threshold=b'mean': has type bytes; must be a number, text, or a list of t",
        ),
        (
            lambda: ANY.grad_sync(NET, config_dir=Path("nowhere")),
            "config_dir=nowhere: there is no such folder",
        ),
        (
            lambda: ANY.attach(NET),
            "lab.attach: missing a required argument: 'strategy'; arguments: ddp, strategy, sc",
        ),
        (
            lambda: ANY.Run(study="a", model=NET, batchsize=8),
            "lab.Run: missing a required argument: 'batch_size'; arguments: study, model, batch_",
        ),
        (
            lambda: ANY.Run(study="a", model=NET, batch_size=8, batchsize=8),
            "lab.Run: got an unexpected keyword argument 'batchsize'; arguments: study, model,",
        ),
        (
            lambda: ANY.Run(study="a", model=[NET], batch_size=8, strategy="ddp"),
            "model: has type list; must be an nn.Module",
        ),
        (
            lambda: ANY.Run(study="a", model=NET, batch_size=8, sync="onebit"),
            "sync='onebit': must be what lab.attach or lab.grad_sync returned, or None",
        ),
        (
            lambda: torch.inference_mode()(ANY.grad_sync)(NET, "onebit"),
            "model: passed in torch.inference_mode(); pass it outside of it",
        ),
        (
            lambda: ANY.run({"seed": 1}),
            "config: has type dict; must be the DictConfig that Hydra composed",
        ),
    ],
)
def test_a_wrong_argument_is_one_line(call: Callable[[], object], line: str) -> None:
    with pytest.raises(lab.ConfigError, match=re.escape(line)) as caught:
        call()
    assert "\n" not in str(caught.value)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_an_evaluation_without_a_loss_is_one_line(tmp_path: Path) -> None:
    with lab.Run(study="a", model="m", batch_size=8, strategy="none", runs_dir=tmp_path) as run:
        with run.step() as step:
            step.loss = 1.0
        with pytest.raises(lab.ConfigError, match=r"^lab\.Run\.evaluated: missing .*: 'loss'"):
            ANY.Run.evaluated(run, accuracy=0.5)
    dist.destroy_process_group()


def repeats(runs: Path, *given: int | None) -> list[int]:
    """Record a run for each number given; return the numbers that they have."""
    found: list[int] = []
    for repeat in given:
        run = lab.Run(
            study="a", model="m", batch_size=8, strategy="ddp", runs_dir=runs, repeat=repeat
        )
        with run:
            for _ in range(3):
                with run.step() as step:
                    step.loss = 1.0
        found.append(run.record.repeat)
    return found


def test_runs_of_the_same_settings_are_counted(tmp_path: Path) -> None:
    assert repeats(tmp_path, None, None, 3, None) == [0, 1, 3, 2]
    assert len(lab.load(tmp_path / "a").study.cells) == 4
    with pytest.raises(lab.ConfigError, match=r"^repeat=1: .* finished run .*; .* set repeat=4$"):
        repeats(tmp_path, 1)
    dist.destroy_process_group()

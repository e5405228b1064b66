"""An optimizer's step is counted from its own code."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lab.settings.config import load
from lab.sync.pattern import MOMENTUM, Update
from lab.sync.update import update_of
from lab.training.optim import Optim


class Lion(torch.optim.Optimizer):
    """Keeps one value, though it has two betas (Chen et al. 2023)."""

    def __init__(self, params: Any, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": 1e-4, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
                momentum: Tensor = self.state[p]["momentum"]
                p.sub_(momentum.lerp(p.grad, 0.1).sign_(), alpha=group["lr"])
                momentum.lerp_(p.grad, 0.01)


def of(target: str, **settings: Any) -> Update | None:
    return update_of({"_target_": target, "schedule": "cosine", **settings})


def test_the_default_is_the_labs_sgd() -> None:
    assert update_of(load([]).optim) == MOMENTUM


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"_target_": "torch.optim.SGD"}, (3, 0)),  # reads weight and gradient, writes weight
        ({"_target_": "torch.optim.AdamW", "betas": [0.9, 0.99]}, (7, 2)),
        ({"_target_": "torch.optim.Adam", "amsgrad": True}, (9, 3)),
        # lerp 3, mul 2, addcmul 4, sqrt 2, division 2, sum 2, addcdiv 4, decay 2
        ({"_target_": "torch.optim.AdamW", "foreach": True}, (21, 2)),
        # mul 2, addcmul 4, sqrt 2, sum 2, addcdiv 4
        ({"_target_": "torch.optim.RMSprop"}, (14, 1)),
        # lerp 3, sign 2, sub 3, lerp 3
        ({"_target_": f"{__name__}.Lion"}, (11, 1)),
    ],
)
def test_passes_are_those_of_its_operations(
    settings: dict[str, Any], expected: tuple[float, float]
) -> None:
    found = update_of(settings)
    assert found and (found.passes, found.copies) == expected


def test_on_shards_only_adam_is_fused() -> None:
    adam, sgd = of("torch.optim.Adam"), of("torch.optim.SGD", momentum=0.9)
    assert adam and sgd
    assert adam.on_shards == adam.passes and sgd.on_shards > sgd.passes


@pytest.mark.parametrize("name", ["sgd", "adamw", "torch.optim.RMSprop"])
def test_it_is_counted_as_it_runs(name: str) -> None:
    node = load([f"optim={name}"]).optim
    (group,) = Optim(node, 8).optimizer(nn.Linear(2, 2)).param_groups
    ways = {"fused": True} if group.get("fused") else {}
    as_run, counted = update_of({**node, **ways}), update_of(node)
    assert as_run and counted and as_run.passes == counted.passes
    assert bool(ways) == (name != "torch.optim.RMSprop")


class NoOptimizer:
    def __init__(self, *_: Any, **__: Any) -> None:
        pytest.fail("it was called")


@pytest.mark.parametrize(
    "target", [f"{__name__}.NoOptimizer", "os.system", "this.Nothing", "", "torch.optim.LBFGS"]
)
def test_what_is_not_an_imported_optimizer_is_neither_imported_nor_called(target: str) -> None:
    assert of(target) is None and "this" not in sys.modules

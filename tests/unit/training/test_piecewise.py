"""Optimizers that may update one parameter after the other, and those that may not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lab.settings.config import ConfigError, load
from lab.training.optim import require_piecewise


class TrustAll(torch.optim.SGD):
    """Scales each step by the norm of all gradients together, as LAMB over all would."""

    def step(self, closure: None = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        total = nn.utils.get_total_norm([g for g in gradients if g is not None])
        for gradient in gradients:
            if gradient is not None:
                gradient /= total
        super().step()


class Counting(torch.optim.SGD):
    """Decays its rate by its own count of steps, which it keeps for a whole group."""

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.1 / group["count"]
        super().step()


class Failing(torch.optim.SGD):
    """Wants all parameters at each step."""

    def step(self, closure: None = None) -> None:
        if len(self.param_groups[0]["params"]) < 2:
            raise RuntimeError("where are the others?")


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 4))


@pytest.mark.parametrize(
    "optim",
    [
        ("optim=sgd",),
        ("optim=sgd", "optim.lr=0"),
        ("optim=adamw", "optim.decay_vectors=false"),
        ("optim=torch.optim.RMSprop",),
        ("optim=torch.optim.Adafactor",),
        ("optim=torch.optim.NAdam",),
    ],
)
def test_optimizers_that_treat_each_parameter_by_itself(optim: tuple[str, ...]) -> None:
    ours, state = model(), torch.get_rng_state()
    require_piecewise(load(["strategy=priority", *optim]), ours, 32)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("optim=tests.unit.training.test_piecewise.TrustAll",), "gives other weights"),
        (("optim=tests.unit.training.test_piecewise.Counting",), "gives other weights"),
        (("optim=tests.unit.training.test_piecewise.Failing",), "where are the others?"),
        (("clip_grad_norm=1",), "clip_grad_norm=1.0: needs all gradients at once"),
    ],
)
def test_others_are_refused_in_a_line(settings: tuple[str, ...], message: str) -> None:
    lr = ("optim.lr=0.1",) if settings[0].startswith("optim") else ()
    with pytest.raises(ConfigError) as refused:
        require_piecewise(load(["strategy=priority", *settings, *lr]), model(), 32)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)

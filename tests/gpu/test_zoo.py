"""Models of the zoo on one GPU, alone: every kind of exchange leaves each gradient as it was.

One rank's mean is its own gradient, so exact exchanges change no bit, and of lossy ones delivered
gradients and residuals add up to the true ones: kernels meet every layout and dtype.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lab
from lab.exchange.layout import dense, trainable, travel_shape, travelling
from tests.gpu.conftest import DEVICE
from tests.support.ranks import CREW
from tests.zoo.models import MODELS, Model, loss_of

STRATEGIES = ("overlap", "bf16", "onebit", "int8", "int4", "topk", "powersgd", "signsgd_ef")
STEPS = 2
FIXED = [n for n, m in MODELS.items() if not (m.slow or "always" in m.refused)]
ELSEWHERE = {"weight_norm_old", "lateparameter", "withdropout"}  # they cannot be copied or moved


def gradients_of(net: nn.Module, model: Model) -> list[dict[str, Tensor | None]]:
    """Return each step's own gradients."""
    found: list[dict[str, Tensor | None]] = []
    for batch in batches(model):
        net.zero_grad()
        loss_of(net(*batch)).backward()
        named = trainable(net).items()
        found.append({n: None if p.grad is None else dense(p.grad).clone() for n, p in named})
    return found


def batches(model: Model) -> list[tuple[Any, ...]]:
    chance = torch.Generator().manual_seed(7)
    drawn = [model.batch(chance, 0) for _ in range(STEPS)]
    return [tuple(v.to(DEVICE) if isinstance(v, Tensor) else v for v in each) for each in drawn]


def faults_of(name: str) -> list[str]:
    """Return what is wrong with a model under the strategies that take it."""
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend)
    torch.manual_seed(0)
    model, first = MODELS[name], MODELS[name].make().to(DEVICE)
    found = [
        f"{strategy}: {fault}"
        for strategy in STRATEGIES
        for fault in faults_under(strategy, copy.deepcopy(first), model)
    ]
    dist.destroy_process_group()
    return found


def faults_under(strategy: str, net: nn.Module, model: Model) -> list[str]:
    true = gradients_of(copy.deepcopy(net), model)
    off: dict[str, Tensor] = {}
    found: list[str] = []
    try:
        sync = lab.grad_sync(net, strategy, check=None)
    except lab.ConfigError:
        return [] if "compressed" in model.refused else ["refused"]
    with sync:
        for batch, due in zip(batches(model), true, strict=True):
            net.zero_grad()
            loss_of(net(*batch)).backward()
            sync.finish()
            for name, parameter in trainable(net).items():
                gradient, own = parameter.grad, due[name]
                if (gradient is None) != (own is None):
                    found.append(f"{name}: a gradient where there is none, or none")
                elif gradient is not None and own is not None:
                    change = travelling(gradient, parameter).double()
                    change = change - travelling(own, parameter).double()
                    off[name] = off.get(name, 0) + change
        shapes = {n: travel_shape(p) for n, p in trainable(net).items() if p.numel()}
        for name, start, values in sync.exchange.residuals(shapes, sync.comm):
            if name in off:
                off[name][start : start + values.numel()] += values.double().view(-1)
        every = (g for each in true for g in each.values() if g is not None and g.numel())
        largest = max(float(gradient.abs().max()) for gradient in every)
        bound = STEPS * sync.exchange.error_bound(largest, 1)
    for name, change in off.items():
        eps = torch.finfo(trainable(net)[name].dtype).eps
        allowed = 0.0 if sync.exchange.exact else bound + STEPS * largest * max(32 * eps, 1e-5)
        if change.numel() and not float(change.abs().max()) <= allowed:
            found.append(f"{name}: {float(change.abs().max()):.1e} off, {allowed:.1e} allowed")
    return found


@pytest.mark.parametrize("name", [name for name in FIXED if name not in ELSEWHERE])
def test_one_rank_keeps_its_gradients(name: str) -> None:
    assert CREW.call(1, faults_of, name) == [[]]

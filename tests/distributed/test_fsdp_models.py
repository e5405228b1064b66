"""Models that FSDP2 alone trains wrongly, or not at all, train as one process does, or are refused.

Each small module is a unit of its own, where it may be one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import lab
from lab.distributed.comm import Comm
from lab.distributed.replicas import gathered
from lab.distributed.torch_comm import TorchComm
from lab.distributed.worker import InlineWorker
from lab.distributed.world import stop
from lab.settings.config import build, load
from lab.sync.base import SyncParts
from tests.support.ranks import CREW, join, spawn
from tests.support.slow import some_of
from tests.zoo import models as zoo
from tests.zoo.models import Net

WIDTH, STEPS = 12, 3


def own_batch(chance: torch.Generator, rank: int) -> tuple[Tensor]:
    x = torch.randn(6, 8, generator=chance)
    x[:, 0] = x[:, 0].abs() * (-1 if rank else 1)
    return (x,)


class Layers(Net):
    """Two layers around a third, for modules to differ from.

    Args:
        run: a function of the model and its input; by default, each layer in turn.
        parts: more modules and parameters.
    """

    def __init__(
        self,
        middle: nn.Module | None = None,
        run: Callable[..., Tensor] | None = None,
        **parts: Any,
    ) -> None:
        layers: dict[str, nn.Module] = {"first": nn.Linear(8, WIDTH), "last": nn.Linear(WIDTH, 4)}
        layers["middle"] = middle or nn.Linear(WIDTH, WIDTH)
        super().__init__(run or in_turn, **layers, **parts)


def in_turn(net: Any, x: Tensor) -> Tensor:
    return net.last(net.middle(torch.tanh(net.first(x))))


def read_two_levels_up() -> nn.Module:
    inner = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.Tanh())
    return Layers(
        inner, lambda net, x: F.linear(net.middle(net.first(x)), net.middle[0][0].weight.T)
    )


def by_sibling(net: Any) -> None:
    first = net.first
    net.middle.forward = lambda x: x @ first.weight @ first.weight.T


def by_hook(net: Any) -> None:
    net.last.register_forward_hook(lambda *of: of[2] @ net.last.weight @ net.first.weight)


def in_training(net: Any, x: Tensor) -> Tensor:
    hidden = net.middle(torch.tanh(net.first(x)))
    return hidden @ net.first.weight if net.training else hidden


def two_types_in_a_layer() -> nn.Module:
    net: Any = Layers(
        run=lambda net, x: net.last(
            torch.tanh(net.first(x)) @ net.middle.weight + net.middle.bias.float()
        )
    )
    net.middle.bias = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
    return net


def unused() -> nn.Module:
    return Layers(rare=nn.Linear(WIDTH, WIDTH), own=nn.Parameter(torch.ones(5, 3)))


def experts() -> nn.Module:
    """Make a layer for the rows of each rank, by their first value's sign, and one for none."""

    def run(net: Any, x: Tensor) -> Tensor:
        hidden, out = torch.tanh(net.first(x)), []
        for row, positive in zip(hidden, x[:, 0] > 0, strict=True):
            out.append(net.experts[int(positive)](row) * net.scale[int(positive)])
        return net.last(torch.stack(out))

    scales = (nn.Parameter(torch.ones(WIDTH)) for _ in range(3))
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    return Layers(run=run, experts=layers, scale=nn.ParameterList(scales))


def other_paths(net: Any, x: Tensor) -> Tensor:
    """Use one layer on rank 0 and another on rank 1, which a sample in eval mode does not show."""
    x, path = torch.tanh(net.first(x)), x[0, 0] > 0
    if not net.training:
        return net.last(net.middle(x) + net.other(x))
    return net.last((net.middle if path else net.other)(x))


def changed(change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    """Return a maker of Layers that `change` has changed."""

    def make() -> nn.Module:
        net = Layers()
        change(net)
        return net

    return make


def empty(net: Any) -> None:
    net.nothing, net.middle.none = nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.ones(3, 0))
    net.register_forward_hook(lambda net, _, y: y + net.nothing.sum() + net.middle.none.sum())


def hold(net: Any) -> None:
    net.held = [net.first.weight]


def share_memory(net: Any) -> None:
    net.other = nn.Linear(WIDTH, WIDTH)
    net.other.weight.data = net.middle.weight.data


def running(run: Callable[..., Tensor], **parts: Callable[[], Any]) -> Callable[[], nn.Module]:
    """Return a maker of Layers with another forward, and parts that are made anew."""
    return lambda: Layers(run=run, **{name: make() for name, make in parts.items()})


OWN: dict[str, Callable[[], nn.Module]] = {
    "read by parent": running(
        lambda net, x: net.middle(torch.tanh(net.first(x))) @ net.first.weight
    ),
    "read two levels up": read_two_levels_up,
    "read by sibling": changed(by_sibling),
    "read by hook": changed(by_hook),
    "read by method": running(  # its first layer is never called
        lambda net, x: net.last(net.middle(torch.tanh(x @ net.first.weight.T)))
    ),
    "unused": unused,
    "experts": experts,
    "empty": changed(empty),
    "few rows": lambda: Layers(nn.Sequential(nn.Linear(WIDTH, 1), nn.Linear(1, WIDTH))),
}
BY_TORCH_ALONE = ("spectral", "float64")  # other reduce-scatters sum float32
OF_ZOO = (
    *("attention", "tiedmodules", "lowrankadapted", "sparsetable", "reused", "weight_norm_old"),
    *("weight_norm", "recomputed_twice", "recomputed_without_reentry", "channels_last"),
    *("columns", "column_major", "bfloat16", "mixed_bits", *BY_TORCH_ALONE),
)
RIGHT = {name: (make, own_batch) for name, make in OWN.items()}
RIGHT |= {name: (zoo.MODELS[name].make, zoo.MODELS[name].batch) for name in OF_ZOO}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    # Refused as it is made.
    "number": (
        changed(lambda net: setattr(net, "scale", nn.Parameter(torch.tensor(1.0)))),
        "scale is a single number of shape []; FSDP divides the first dimension, so give it shape",
    ),
    "hook": (
        changed(lambda net: net.last.weight.register_hook(lambda gradient: 2 * gradient)),
        "last.weight has a hook, which FSDP would not call",
    ),
    "held": (changed(hold), "first.weight is stored in a list, closure or other object"),
    "shared memory": (changed(share_memory), "other.weight shares memory with middle.weight"),
    "two types in a layer": (
        two_types_in_a_layer,
        "in a module that cannot be sent separately; FSDP sends one type for each module",
    ),
    # Refused in a step.
    "read in training": (
        running(in_training),
        "first.weight is read outside its module's forward pass",
    ),
    "other paths": (
        running(other_paths, other=lambda: nn.Linear(WIDTH, WIDTH)),
        "weight: another rank ran this parameter's module but this rank did not",
    ),
}
IN_A_STEP = ("read in training", "other paths")


def loss_of(net: nn.Module, batch: zoo.Batch, step: int, rank: int) -> Tensor:
    chance = torch.Generator().manual_seed(10 * step + rank)
    return zoo.loss_of(net(*batch(chance, rank)))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in net.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.05, foreach=False)


def alone(name: str, size: int) -> dict[str, Tensor]:
    make, batch = RIGHT[name]
    torch.manual_seed(0)
    net = make()
    optimizer = sgd(net)
    for step in range(STEPS):
        for rank in range(size):
            (loss_of(net, batch, step, rank) / size).backward()
        for parameter in net.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in net.named_parameters()}


@cache
def config_of(*settings: str) -> DictConfig:
    return load(["strategy=fsdp", "bucket_mb=1e-4", *settings])


def sharded(
    make: Callable[[], nn.Module], batch: zoo.Batch, comm: Any, *settings: str
) -> dict[str, Tensor] | str:
    """Train under FSDPSync; return whole weights, or the message of what it refuses."""
    torch.manual_seed(0)
    net, config = make(), config_of(*settings)
    parts = SyncParts(
        net, net, build(config.exchange), comm, InlineWorker(), True, config.bucket_mb,
        sample=batch(torch.Generator(), 0)[0][:1],
    )  # fmt: skip
    try:
        sync = build(config.sync, parts)
        optimizer = sgd(net)
        for step in range(STEPS):
            with sync.micro_batch(last=True):
                loss_of(net, batch, step, comm.rank).backward()
            sync.finish()
            sync.update(optimizer)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return {name: gathered(p.detach()) for name, p in net.named_parameters()}


def train_all(names: list[str], *settings: str) -> dict[str, dict[str, Tensor] | str]:
    comm = join().comm
    try:
        return {name: sharded(*RIGHT[name], comm, *settings) for name in names}
    finally:
        stop()


def assert_equal(name: str, found: dict[str, Tensor] | str, size: int) -> None:
    assert not isinstance(found, str), f"{name}: {found}"
    reference = alone(name, size)
    low = any(value.dtype in (torch.bfloat16, torch.float16) for value in reference.values())
    bound = 2e-2 if low else 2e-6
    for key, expected in reference.items():
        message = f"{name}: {key}"
        torch.testing.assert_close(found[key], expected, rtol=bound, atol=bound, msg=message)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "settings", some_of(["", "sync.reduce_scatter=lab exchange=allreduce"], every=2)
)
def test_any_model_trains_as_in_one_process(settings: str) -> None:
    names = [name for name in RIGHT if not settings or name not in BY_TORCH_ALONE]
    for name, found in CREW.call(2, train_all, names, *settings.split())[0].items():
        assert_equal(name, found, 2)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "settings", some_of(["sync.shard_size=2", "sync.reshard=2", "bucket_mb=null"])
)
def test_any_model_trains_in_two_levels_and_as_one_unit(settings: str) -> None:
    for name, found in CREW.call(4, train_all, list(RIGHT), settings)[0].items():
        assert_equal(name, found, 4)


def refused(names: list[str]) -> list[str | dict[str, Tensor]]:
    comm = join().comm
    return [sharded(REFUSED[name][0], own_batch, comm) for name in names]


# An error in backward may leave collectives under way: these ranks do nothing else.
@pytest.mark.parametrize(
    "names",
    [
        [name for name in REFUSED if name not in IN_A_STEP],
        ["other paths"],
        pytest.param(["read in training"], marks=pytest.mark.slow),
    ],
)
def test_what_fsdp_cannot_train_is_named(names: list[str]) -> None:
    for of_rank in spawn(2, refused, names):
        for name, found in zip(names, of_rank, strict=True):
            assert isinstance(found, str) and "\n" not in found
            assert REFUSED[name][1] in found


def by_codec() -> list[str | dict[str, Tensor]]:
    comm = join().comm
    settings = ("sync.reduce_scatter=lab", "exchange=onebit")
    return [sharded(*RIGHT[name], comm, *settings) for name in BY_TORCH_ALONE]


def test_a_type_that_the_lab_does_not_scatter_is_named() -> None:
    (found,) = CREW.call(1, by_codec)
    for text in found:
        assert "exchange=OneBit scatters only float32, bfloat16 and float16 gradients" in str(text)


def in_loops(exchanges: list[str]) -> list[tuple[float, bool]]:
    comm = join().comm
    return [in_a_loop(comm, exchange) for exchange in exchanges]


def in_a_loop(comm: Comm, exchange: str) -> tuple[float, bool]:
    """Return how far delivered gradients and residuals are from the sums, and if None stays."""
    assert isinstance(comm, TorchComm)
    torch.manual_seed(0)
    made: Any = unused()
    net, mesh = made, DeviceMesh.from_group(comm.group, "cpu")
    net.first.requires_grad_(False)
    for each in (net.middle, net):
        fully_shard(each, mesh=mesh)
    scatters = lab.fsdp_reduce_scatter(net, exchange)
    delivered = {name: torch.zeros(p.shape) for name, p in net.named_parameters()}
    none = True
    for step in range(STEPS):
        net.last.requires_grad_(step != 1)  # frozen for a step
        loss_of(net, own_batch, step, comm.rank).backward()
        for name, parameter in net.named_parameters():
            if parameter.grad is not None:
                delivered[name] += comm.size * gathered(parameter.grad)
        none = none and net.rare.weight.grad is None and net.own.grad is None
        net.zero_grad()
    residuals = scatters.state_dict().get("residual", {})
    off = 0.0
    for name in ("middle.weight", "last.weight"):
        rows = len(delivered[name])
        kept = residuals[name].flatten(0, 1)[:rows].clone() if residuals else torch.zeros(rows, 1)
        total = torch.zeros_like(delivered[name])
        kept = kept.reshape(rows, -1).expand_as(total).clone()
        comm.all_reduce(kept)
        off = max(off, float((delivered[name] + kept - due(name, comm.size)).abs().max()))
    return off, none


def due(name: str, size: int) -> Tensor:
    """Return the sum of the ranks' gradients over the steps, of weights that stay."""
    torch.manual_seed(0)
    net: Any = unused()
    for step in range(STEPS):
        net.last.requires_grad_(step != 1)
        for rank in range(size):
            loss_of(net, own_batch, step, rank).backward()
    gradient = net.get_parameter(name).grad
    assert gradient is not None
    return gradient


def test_in_a_loop_nothing_is_lost_where_parameters_are_frozen_or_unused() -> None:
    for of_rank in CREW.call(2, in_loops, ["allreduce", "onebit", "int4"]):
        for off, none in of_rank:
            assert off < 1e-5
            assert none

"""Models that FSDP2 alone trains wrongly, or not at all, train as one process does, or are refused.

Each small module is a unit of its own, where it may be one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint

import lab
from lab.distributed.sharded import whole
from lab.distributed.torch_comm import TorchComm
from lab.distributed.worker import InlineWorker
from lab.distributed.world import stop
from lab.settings.config import build, load
from lab.sync.base import SyncParts
from tests.support.ranks import CREW, join, spawn
from tests.support.slow import some_of

WIDTH, STEPS = 12, 3


class Layers(nn.Module):
    """Two layers around a third, for modules to differ from."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.middle = middle or nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.tanh(self.first(x))))


class ReadByParent(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.middle(torch.tanh(self.first(x))) @ self.first.weight


class ReadTwoLevelsUp(Layers):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        inner: Any = self.middle
        return F.linear(self.middle(self.first(x)), inner[0][0].weight.T)


class ReadBySibling(Layers):
    def __init__(self) -> None:
        super().__init__()
        first = self.first
        self.middle.forward = lambda x: x @ first.weight @ first.weight.T  # type: ignore[assignment]


class ReadByHook(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.last.register_forward_hook(lambda *of: of[2] @ self.last.weight @ self.first.weight)


class ReadByMethod(Layers):
    """Its first layer is never called."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.tanh(x @ self.first.weight.T)))


class ReadInTraining(Layers):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(torch.tanh(self.first(x)))
        return hidden @ self.first.weight if self.training else hidden


class Attention(Layers):
    """Its attention reads the weight of a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__(nn.MultiheadAttention(WIDTH, 2, batch_first=True))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)).unsqueeze(1).repeat(1, 3, 1)
        return self.last(self.middle(x, x, x)[0].mean(1))


class TwoTypes(Layers):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.tanh(self.first(x)).bfloat16()).float())


class TwoTypesInALayer(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.middle.bias = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        middle: Any = self.middle
        return self.last(torch.tanh(self.first(x)) @ middle.weight + middle.bias.float())


class Complex(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((torch.fft.fft(x) @ self.spectrum).real)


class Sparse(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(40, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.rows((10 * x.abs()).long().clamp(max=39)).mean(1)))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 4, 3)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.reshape(-1, 2, 2, 2).repeat(1, 1, 2, 2))))


class Recomputed(Layers):
    """A layer used twice, and recomputed each time."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for _ in range(2):
            x = torch.tanh(checkpoint(self.middle, x, use_reentrant=self.reentrant))  # type: ignore[arg-type]
        return self.last(x)


class Unused(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.rare, self.own = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(5, 3))


class Experts(Layers):
    """A layer for the rows of each rank, by their first value's sign, and one that no row needs."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden, out = torch.tanh(self.first(x)), []
        for row, positive in zip(hidden, x[:, 0] > 0, strict=True):
            at = int(positive)
            out.append(self.experts[at](row) * self.scale[at])
        return self.last(torch.stack(out))


class OtherPaths(Layers):
    """Rank 0 needs one layer and rank 1 another, which a sample in eval mode does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x, path = torch.tanh(self.first(x)), x[0, 0] > 0
        if not self.training:
            return self.last(self.middle(x) + self.other(x))
        return self.last((self.middle if path else self.other)(x))


def changed(change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    """Return a maker of Layers that `change` has changed."""

    def make() -> nn.Module:
        net = Layers()
        change(net)
        return net

    return make


def tie(net: Any) -> None:
    net.other = nn.Linear(WIDTH, WIDTH)
    net.other.weight = net.middle.weight
    net.middle = nn.Sequential(net.middle, nn.Tanh(), net.other)


def freeze(net: Any) -> None:
    net.first.weight.requires_grad_(False)
    net.middle.requires_grad_(False)


def lay_out(net: Any) -> None:
    net.first.weight = nn.Parameter(torch.randn(8, WIDTH).t())
    net.middle.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, WIDTH:])


def empty(net: Any) -> None:
    net.nothing, net.middle.none = nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.ones(3, 0))
    net.register_forward_hook(lambda net, _, y: y + net.nothing.sum() + net.middle.none.sum())


def hold(net: Any) -> None:
    net.kept = [net.first.weight]


def share_memory(net: Any) -> None:
    net.other = nn.Linear(WIDTH, WIDTH)
    net.other.weight.data = net.middle.weight.data


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "read by parent": ReadByParent,
    "read two levels up": ReadTwoLevelsUp,
    "read by sibling": ReadBySibling,
    "read by hook": ReadByHook,
    "read by method": ReadByMethod,
    "attention": Attention,
    "two types": TwoTypes,
    "complex": Complex,
    "double": lambda: Layers().double(),
    "bfloat16": lambda: Layers().bfloat16(),
    "sparse": Sparse,
    "channels last": Convolutions,
    "recomputed": lambda: Recomputed(reentrant=False),
    "recomputed, reentrant": lambda: Recomputed(reentrant=True),
    "unused": Unused,
    "experts": Experts,
    "tied": changed(tie),
    "frozen": changed(freeze),
    "other layouts": changed(lay_out),
    "empty": changed(empty),
    "reused": lambda: Layers(nn.Sequential(*[nn.Linear(WIDTH, WIDTH)] * 3)),
    "weight_norm": lambda: Layers(weight_norm(nn.Linear(WIDTH, WIDTH))),
    "parametrized": lambda: Layers(parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))),
    "few rows": lambda: Layers(nn.Sequential(nn.Linear(WIDTH, 1), nn.Linear(1, WIDTH))),
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "number": (
        changed(lambda net: setattr(net, "scale", nn.Parameter(torch.tensor(1.0)))),
        "scale: is a single number, shape []; FSDP divides the first dimension, so give it shape",
    ),
    "hook": (
        changed(lambda net: net.last.weight.register_hook(lambda gradient: 2 * gradient)),
        "last.weight: has a hook of its own, which FSDP would not call",
    ),
    "held": (changed(hold), "first.weight: is held in a list, closure or other object"),
    "shared memory": (changed(share_memory), "other.weight: shares memory with middle.weight"),
    "two types in a layer": (
        TwoTypesInALayer,
        "in a module that cannot be sent apart from others; FSDP sends one type for each module",
    ),
    "read in training": (ReadInTraining, "first.weight: is read while the forward of its module"),
    "other paths": (
        OtherPaths,
        "weight: another rank's forward ran its module and this rank's did",
    ),
}
BY_TORCH_ALONE = ("complex", "double")  # other reduce-scatters sum float32


def inputs(step: int, rank: int) -> Tensor:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    x[:, 0] = x[:, 0].abs() * (-1 if rank else 1)
    return x


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    dtype = next(net.parameters()).dtype
    y = net(x if dtype.is_complex else x.to(dtype))
    return (y if dtype == torch.float64 else y.float()).square().mean()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in net.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.05, foreach=False)


def alone(make: Callable[[], nn.Module], size: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net = make()
    optimizer = sgd(net)
    for step in range(STEPS):
        for rank in range(size):
            (loss_of(net, inputs(step, rank)) / size).backward()
        for parameter in net.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in net.named_parameters()}


def sharded(make: Callable[[], nn.Module], comm: Any, *settings: str) -> dict[str, Tensor] | str:
    """Train under FSDPSync; return whole weights, or the message of what it refuses."""
    torch.manual_seed(0)
    net, config = make(), load(["strategy=fsdp", "bucket_mb=1e-4", *settings])
    parts = SyncParts(
        net, net, build(config.exchange), comm, InlineWorker(), True, config.bucket_mb,
        sample=torch.zeros(1, 8, dtype=next(net.parameters()).dtype),
    )  # fmt: skip
    try:
        sync = build(config.sync, parts)
        optimizer = sgd(net)
        for step in range(STEPS):
            with sync.micro_batch(last=True):
                loss_of(net, inputs(step, comm.rank)).backward()
            sync.finish()
            sync.update(optimizer)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return {name: whole(p.detach()) for name, p in net.named_parameters()}


def train_all(names: list[str], *settings: str) -> dict[str, dict[str, Tensor] | str]:
    comm = join().comm
    try:
        return {name: sharded(RIGHT[name], comm, *settings) for name in names}
    finally:
        stop()


def assert_equal(name: str, found: dict[str, Tensor] | str, size: int) -> None:
    assert not isinstance(found, str), f"{name}: {found}"
    reference = alone(RIGHT[name], size)
    low = any(value.dtype == torch.bfloat16 for value in reference.values())
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


def refuse(name: str, settings: str) -> str | dict[str, Tensor]:
    return sharded(REFUSED[name][0], join().comm, *settings.split())


# An error in backward may leave collectives under way: these ranks do nothing else.
@pytest.mark.parametrize("name", some_of(REFUSED, every=3))
def test_what_fsdp_cannot_train_is_named(name: str) -> None:
    for found in spawn(2, refuse, name, ""):
        assert isinstance(found, str) and "\n" not in found
        assert REFUSED[name][1] in found


def by_codec(name: str) -> str | dict[str, Tensor]:
    comm = join().comm
    try:
        return sharded(RIGHT[name], comm, "sync.reduce_scatter=lab", "exchange=onebit")
    finally:
        stop()


@pytest.mark.parametrize("name", BY_TORCH_ALONE)
def test_a_type_that_the_lab_does_not_scatter_is_named(name: str) -> None:
    (found,) = CREW.call(1, by_codec, name)
    assert "exchange=OneBit scatters float32, bfloat16 and float16 gradients" in str(found)


def in_a_loop(exchange: str) -> tuple[float, bool]:
    """Return how far delivered gradients and residuals are from the sums, and if None stays."""
    comm = join().comm
    assert isinstance(comm, TorchComm)
    torch.manual_seed(0)
    net, mesh = Unused(), DeviceMesh.from_group(comm.group, "cpu")
    net.first.requires_grad_(False)
    for each in (net.middle, net):
        fully_shard(each, mesh=mesh)
    scatters = lab.fsdp_reduce_scatter(net, exchange)
    delivered = {name: torch.zeros(p.shape) for name, p in net.named_parameters()}
    none = True
    for step in range(STEPS):
        net.last.requires_grad_(step != 1)  # frozen for a step
        loss_of(net, inputs(step, comm.rank)).backward()
        for name, parameter in net.named_parameters():
            if parameter.grad is not None:
                delivered[name] += comm.size * whole(parameter.grad)
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
    stop()
    return off, none


def due(name: str, size: int) -> Tensor:
    """Return the sum of the ranks' gradients over the steps, of weights that stay."""
    torch.manual_seed(0)
    net = Unused()
    for step in range(STEPS):
        net.last.requires_grad_(step != 1)
        for rank in range(size):
            loss_of(net, inputs(step, rank)).backward()
    gradient = net.get_parameter(name).grad
    assert gradient is not None
    return gradient


@pytest.mark.parametrize("exchange", ["allreduce", "onebit", "int4"])
def test_in_a_loop_nothing_is_lost_where_parameters_are_frozen_or_unused(exchange: str) -> None:
    for off, none in CREW.call(2, in_a_loop, exchange):
        assert off < 1e-5
        assert none

"""Models of the zoo: each small, with its own inputs, and each unusual in one way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, rnn
from torch.utils.checkpoint import checkpoint

ROWS = 4
Batch = Callable[[torch.Generator, int], tuple[Any, ...]]  # of chance and a rank
RANDOM = threading.RLock()  # torch's own source of random numbers is one for all threads


def loss_of(outputs: Tensor) -> Tensor:
    """Return a loss of outputs of any dtype, real and in float32 at least."""
    real = torch.view_as_real(outputs) if outputs.is_complex() else outputs
    wide = real.float() if real.dtype in (torch.bfloat16, torch.float16) else real
    return (wide - 0.3).square().mean()


def draw(chance: torch.Generator, *shape: int) -> Tensor:
    """Return values of a normal distribution: the same whatever torch's default dtype is."""
    return torch.randn(*shape, generator=chance, dtype=torch.float32)


def normal(*shape: int) -> Batch:
    """Return inputs [ROWS, *shape]."""
    return lambda chance, _: (draw(chance, ROWS, *shape),)


def with_rank(*shape: int) -> Batch:
    """Return the same, and the rank."""
    return lambda chance, rank: (draw(chance, ROWS, *shape), rank)


def tokens(vocabulary: int, length: int) -> Batch:
    """Return token ids, [ROWS, length]."""
    return lambda chance, _: (torch.randint(vocabulary, (ROWS, length), generator=chance),)


@dataclass(frozen=True, eq=False)
class Model:
    """A model of the zoo.

    Attributes:
        make: builds it.
        batch: makes the arguments of its forward.
        wide: it also runs in float64, by torch's default dtype.
        refused: when a refusal is right: "always", or words of "compressed" (by exchanges that do
            more than add), "direction", "attach" (by DDP's hook), "overlap", "moved" (by syncs that
            move weights), "waits" (by those whose next forward waits) and "few" (too few values for
            a rank to own some); empty: never.
        decay: optimizers may use momentum and weight decay.
        uneven: ranks reach different parameters: local SGD, in which each rank updates what it has
            reached itself, is then another algorithm.
        ddp: arguments of DistributedDataParallel.
        slow: for the whole product alone.
    """

    make: Callable[[], nn.Module]
    batch: Batch
    wide: bool = True
    refused: str = ""
    decay: bool = True
    uneven: bool = False
    ddp: dict[str, Any] = field(default_factory=lambda: {"find_unused_parameters": True})
    slow: bool = False


MODELS: dict[str, Model] = {}
STATIC: dict[str, Any] = {"static_graph": True}  # DDP takes several growths of a gradient so alone


def animal(batch: Batch, **facts: Any) -> Callable[[Callable[[], nn.Module]], Any]:
    """Add a class or function that builds a model, under its name."""

    def add(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        MODELS[make.__name__.lower()] = Model(make, batch, **facts)
        return make

    return add


@animal(normal(70))
def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(70, 96), nn.Tanh(), nn.Linear(96, 5))


@animal(normal(3, 8, 8))
def images() -> nn.Module:
    head = nn.Flatten(), nn.Linear(8 * 16, 5)
    return nn.Sequential(
        *(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 8, 3), nn.ReLU()), *head
    )


@animal(normal(70))
class UnusedHead(nn.Module):
    """A head that no loss reaches, and a layer that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(70, 66), nn.Linear(66, 5), nn.Linear(66, 70)
        self.frozen = nn.Linear(70, 70).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.frozen(x))))


@animal(with_rank(64), uneven=True)
class Experts(nn.Module):
    """A mixture in which each rank uses an expert of its own, and one expert nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 64)
        self.experts = nn.ModuleList(nn.Linear(64, 72, bias=False) for _ in range(6))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        hidden = torch.tanh(self.gate(x))
        return self.experts[rank](hidden) + self.experts[4](hidden)


class Slice(nn.Module):
    """A weight that is a part of a larger tensor, [n, m]."""

    def __init__(self, part: Callable[[Tensor], Tensor], n: int, m: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(part(torch.randn(2 * n, 2 * m) / n**0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def _with_slice(part: Callable[[Tensor], Tensor]) -> nn.Module:
    return nn.Sequential(nn.Linear(70, 64), nn.ReLU(), Slice(part, 64, 32), nn.Linear(32, 5))


@animal(normal(70))
def columns() -> nn.Module:
    return _with_slice(lambda whole: whole[:64, 32:])


@animal(normal(80))
def one_parameter() -> nn.Module:
    return nn.Linear(80, 64, bias=False)


@animal(normal(7), refused="few")
class OneScalar(nn.Module):
    """Nothing to train but a number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


@animal(normal(70))
class EmptyOnes(nn.Module):
    """Parameters and buffers of no dimension, and without values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(())), nn.Linear(70, 66)
        self.none, self.rows = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(3, 0))
        self.unused = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("empty", torch.zeros(0, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.linear(x) + self.none.sum() + self.rows.sum()


@animal(normal(8), refused="always")
def without_parameters() -> nn.Module:
    return nn.Tanh()


@animal(normal(8), refused="always")
def all_frozen() -> nn.Module:
    return nn.Linear(8, 8).requires_grad_(False)


@animal(normal(4))
class TinyOnes(nn.Module):
    """Very many tiny parameters."""

    def __init__(self) -> None:
        super().__init__()
        values = [torch.randn(1 + n % 4) for n in range(60)]
        self.parts = nn.ParameterList(map(nn.Parameter, values))

    def forward(self, x: Tensor) -> Tensor:
        return x.mean() * torch.cat([part.tanh() for part in self.parts])


@animal(normal(1))
class Thresholds(nn.Module):
    """Sizes below, at and above those at which codecs begin to compress."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(3, 63), (3, 64), (3, 65), (1023,), (1024,), (1025,), (4095,), (64, 64), (4097,)]
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(s)) for s in [*shapes, (1, 70)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part.flatten().sin() for part in self.parts]) * x.mean()


@animal(normal(3, 8, 8))
def channels_last() -> nn.Module:
    net: Any = images()
    return net.to(memory_format=torch.channels_last)


@animal(normal(3, 6, 6))
def norms() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3), nn.GroupNorm(3, 12), nn.ReLU(), nn.Flatten(), nn.LayerNorm(12 * 16),
        nn.Linear(12 * 16, 6), nn.RMSNorm(6),
    )  # fmt: skip


@animal(normal(8, 6, 6))
def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(8, 16, 3, groups=4, padding=1), nn.ReLU(),
        nn.Conv2d(16, 16, 3, groups=16, padding=1), nn.Conv2d(16, 72, 1), nn.ReLU(),
        nn.ConvTranspose2d(72, 8, 2, stride=2, groups=2),
    )  # fmt: skip


@animal(normal(3, 10))
class OtherConvolutions(nn.Module):
    """In one dimension and in three."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.three = nn.Conv1d(3, 8, 3), nn.Conv3d(1, 6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.three(self.one(x).reshape(-1, 1, 4, 4, 4))


class Packed(nn.Module):
    """A recurrent network over sequences of several lengths."""

    def __init__(self, kind: Any, **settings: Any) -> None:
        super().__init__()
        self.core = kind(16, 24, batch_first=True, **settings)
        self.head = nn.Linear(24 * (1 + self.core.bidirectional), 4)

    def forward(self, x: Tensor) -> Tensor:
        packed = rnn.pack_padded_sequence(x, torch.tensor([6, 3, 5, 1]), True, False)
        return self.head(rnn.pad_packed_sequence(self.core(packed)[0], True)[0])


@animal(normal(6, 16))
def rnn_packed() -> nn.Module:
    return Packed(nn.RNN)


@animal(normal(6, 16))
def lstm_packed() -> nn.Module:
    return Packed(nn.LSTM, num_layers=2)


@animal(normal(6, 16))
def gru_both_ways() -> nn.Module:
    return Packed(nn.GRU, bidirectional=True)


@animal(tokens(30, 7))
class Attention(nn.Module):
    """Attention, with the embedding's weight as its head, by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(30, 72)
        self.attention, self.norm = nn.MultiheadAttention(72, 4, batch_first=True), nn.LayerNorm(72)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0]) @ self.tokens.weight.T


@animal(normal(5, 32))
def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)


@animal(lambda chance, rank: (draw(chance, ROWS, 70), rank))
class WithDropout(nn.Module):
    """Dropout, recomputed in backward as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(70, 66), nn.Linear(66, 5)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        with RANDOM:
            torch.manual_seed(rank)
            mask = F.dropout(torch.ones(ROWS, 66, dtype=torch.float32), 0.5, self.training)
        return self.second(torch.relu(self.first(x)) * mask)


@animal(tokens(50, 6), refused="attach", decay=False)
class SparseTable(nn.Module):
    """An embedding whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 64, sparse=True), nn.Linear(64, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


@animal(tokens(50, 6))
class Bag(nn.Module):
    """An EmbeddingBag, most of whose rows nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(90, 64), nn.Linear(64, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.bag(ids))


@animal(tokens(40, 5))
class TiedModules(nn.Module):
    """An embedding and a head with one weight; a block that two lists hold."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(40, 64), nn.Linear(64, 40)
        self.head.weight = self.tokens.weight
        block = nn.Linear(64, 64)
        self.blocks, self.again = nn.ModuleList([block, block]), nn.ModuleList([block])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in (*self.blocks, *self.again):
            x = torch.tanh(block(x))
        return self.head(x)


@animal(normal(64), wide=False, refused="always")
class TiedMemory(nn.Module):
    """Two Parameters with the same values in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)
        self.other.weight = nn.Parameter(self.one.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(self.one(x)))


@animal(normal(64))
class OneBlock(nn.Module):
    """Parameters that are parts of one block of memory: one after another, and columns of it."""

    def __init__(self) -> None:
        super().__init__()
        block, matrix = torch.randn(2, 64, 64) / 8, torch.randn(64, 128) / 8
        self.parts = nn.ParameterList(
            nn.Parameter(part) for part in (block[0], block[1], matrix[:, :64], matrix[:, 64:])
        )

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(x @ part)
        return x


@animal(normal(64))
class TwoOwners(nn.Module):
    """One Parameter under two names of two submodules, of which one reads it transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Module(), nn.Module()
        self.a.weight = self.b.kernel = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.a.get_parameter("weight"), self.b.get_parameter("kernel")
        return torch.tanh(x @ first) @ second.T


@animal(normal(64))
def weight_norm_old() -> nn.Module:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        first = nn.utils.weight_norm(nn.Linear(64, 66))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(66, 5))


@animal(normal(64))
def weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(64, 66)), nn.Linear(66, 5))


@animal(normal(64))
def spectral_norm_old() -> nn.Module:
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(64, 66)), nn.Linear(66, 5))


@animal(normal(64))
def spectral_norm() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(64, 66)), nn.Linear(66, 5))


@animal(normal(64))
def orthogonal() -> nn.Module:
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(64, 64)), nn.Linear(64, 5))


class Symmetric(nn.Module):
    """The symmetric matrix of the upper triangle."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@animal(normal(64))
def parametrized() -> nn.Module:
    linear = nn.Linear(64, 64)
    parametrize.register_parametrization(linear, "weight", Symmetric())
    parametrize.register_parametrization(linear, "weight", nn.Tanh())
    return nn.Sequential(linear, nn.Linear(64, 5))


@animal(normal(70))
class LowRankAdapted(nn.Module):
    """A frozen base with adapters of low rank, one of which begins at zero (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(70, 70).requires_grad_(False)
        self.down, self.up = nn.Linear(70, 4, bias=False), nn.Linear(4, 70, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@animal(with_rank(64), uneven=True)
class OtherOrders(nn.Module):
    """Branches that ranks run in different orders, so gradients arrive in different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        for number in range(4):
            x = torch.tanh(self.branches[(number + rank) % 4](x))
        return x


@animal(normal(64))
class Reused(nn.Module):
    """A list of layers, run twice and once backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers, self.layers[0]):
            x = torch.tanh(layer(x))
        return x


class Recomputed(nn.Module):
    """A block that is used `times`, each time recomputed in backward."""

    def __init__(self, reentrant: bool, times: int) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(64, 64), nn.Linear(64, 5)
        self.block = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
        self.reentrant, self.times = reentrant, times

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        for _ in range(self.times):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant, preserve_rng_state=False)
        return self.out(x)


@animal(normal(64), ddp=STATIC)
def recomputed_twice() -> nn.Module:
    return Recomputed(reentrant=True, times=2)


@animal(normal(64), ddp=STATIC)
def recomputed() -> nn.Module:
    return Recomputed(reentrant=True, times=1)


@animal(normal(64))
def recomputed_without_reentry() -> nn.Module:
    return Recomputed(reentrant=False, times=2)


@animal(normal(64))
class GradientPenalty(nn.Module):
    """Outputs that hold the gradient of others to the inputs: backward runs through backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 66), nn.Tanh(), nn.Linear(66, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.requires_grad_()
            out = self.net(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return torch.cat([out, slope], dim=1)


class Product(nn.Module):
    """A linear map by a weight of any layout, [n, m]."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@animal(normal(70))
def column_major() -> nn.Module:
    first, last = torch.randn(66, 70) / 8, torch.randn(66, 5) / 8
    return nn.Sequential(Product(first.t()), nn.Tanh(), Product(last))


@animal(normal(70))
def every_other_row() -> nn.Module:
    return _with_slice(lambda whole: whole[::2, :32])


@animal(normal(64))
def with_an_offset() -> nn.Module:
    block = torch.randn(64 * 64 + 5) / 8
    return nn.Sequential(Product(block[5:].view(64, 64)), nn.Linear(64, 3))


@animal(normal(70), refused="always", wide=False, decay=False)
class Expanded(nn.Module):
    """A bias whose values share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(70, 66), nn.Parameter(torch.zeros(1).expand(66))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.bias


@animal(normal(4, 6, 6))
class Permuted(nn.Module):
    """Convolutions whose kernels have other orders of dimensions."""

    def __init__(self) -> None:
        super().__init__()
        kernel, other = torch.randn(3, 3, 4, 10) / 6, torch.randn(10, 3, 8, 3) / 9
        self.first = nn.Parameter(kernel.permute(3, 2, 0, 1))
        self.second = nn.Parameter(other.permute(2, 0, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(torch.relu(F.conv2d(x, self.first, padding=1)), self.second)


@animal(normal(8, 8))
class Grid(nn.Module):
    """Buffers that are expanded views, or parts of others, in all layouts."""

    def __init__(self) -> None:
        super().__init__()
        rows, columns = torch.meshgrid(*[torch.arange(64.0)] * 2, indexing="ij")
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)
        noise = torch.randn(16, 16)
        for name, part in {"t": noise.t(), "c": noise[:, ::3], "r": noise[::2]}.items():
            self.register_buffer(name, part)
        self.hidden = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns, t, c, r = map(self.get_buffer, ("rows", "columns", "t", "c", "r"))
        weight = 1 + (columns - rows).abs()[:8, :8] + t[:8, :8] + c[:8, :1]
        return self.hidden((x * weight * r[:8, :8]).flatten(1) / 64)


@animal(normal(70))
class OddBuffers(nn.Module):
    """Buffers of all kinds of values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(70, 66)
        mask = torch.rand(66) < 0.5
        self.register_buffer("mask", mask)
        self.register_buffer("count", torch.randint(9, ()))
        self.register_buffer("byte", torch.randint(256, (9,), dtype=torch.uint8))
        self.register_buffer("phase", torch.randn(5, dtype=torch.complex64))
        self.register_buffer("conjugate", torch.randn(5, dtype=torch.complex64).conj())
        self.register_buffer("low", torch.randn(66).bfloat16())
        self.register_buffer("none", None)
        self.register_buffer("sparse", torch.randn(6, 6).relu().to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.mask + self.count + self.low + self.get_buffer("phase")[0].real


@animal(normal(64))
class Quantised(nn.Module):
    """A frozen weight of bytes, and a frozen one of bools."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randint(-90, 90, (64, 64), dtype=torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.mask = nn.Parameter(torch.rand(64) < 0.5, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(64))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.to(x.dtype)) / 90 * self.scale * self.mask


class Cast(nn.Module):
    """Inputs in another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def _in(dtype: torch.dtype) -> nn.Module:
    layers = nn.Linear(70, 66).to(dtype), nn.Tanh(), nn.Linear(66, 5).to(dtype)
    return nn.Sequential(Cast(dtype), *layers)


@animal(normal(70), wide=False)
def bfloat16() -> nn.Module:
    return _in(torch.bfloat16)


@animal(normal(70), wide=False)
def float16() -> nn.Module:
    return _in(torch.float16)


@animal(normal(70), wide=False, refused="compressed direction")
def float64() -> nn.Module:
    return _in(torch.float64)


@animal(normal(70), wide=False)
def mixed_bits() -> nn.Module:
    middle = Cast(torch.float32), nn.Linear(64, 66), Cast(torch.float16)
    return nn.Sequential(
        Cast(torch.bfloat16), nn.Linear(70, 64).bfloat16(), *middle, nn.Linear(66, 5).half()
    )


@animal(normal(70), wide=False, refused="compressed direction")
def partly_double() -> nn.Module:
    head = Cast(torch.float64), nn.Linear(66, 5).double()
    return nn.Sequential(nn.Linear(70, 66), nn.Tanh(), *head)


@animal(normal(64), wide=False, refused="direction moved")
class Spectral(nn.Module):
    """Complex weights, and real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64, dtype=torch.complex64) / 8)
        self.phase = nn.Parameter(torch.randn(64, dtype=torch.complex64))
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(((torch.fft.fft(x) / 8) @ self.weight * self.phase).abs())


@animal(normal(64), wide=False, refused="direction moved")
class Conjugate(nn.Module):
    """A complex weight that is a conjugate view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 66, dtype=torch.complex64).conj() / 8)
        self.phase = nn.Parameter(torch.randn(66, dtype=torch.complex64).conj())

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.weight.dtype) @ self.weight * self.phase


@animal(normal(64), wide=False, refused="compressed direction moved")
class DoubleSpectral(nn.Module):
    """Complex weights of twice the precision, in columns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(66, 64, dtype=torch.complex128).t() / 8)

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.weight.dtype) @ self.weight


@animal(normal(20), refused="always")
def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(64), nn.ReLU(), nn.LazyLinear(5))


@animal(normal(20))
def lazy_built() -> nn.Module:
    net = lazy()
    net(torch.zeros(1, 20))
    return net


@animal(normal(20), refused="always", wide=False)
def on_meta() -> nn.Module:
    return nn.Linear(20, 5, device="meta")


@animal(normal(64), refused="always")
class LateParameter(nn.Module):
    """A parameter that is there from the first forward on, when optimizers have been made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(5, dtype=x.dtype))
        return self.linear(x) * self.scale


@animal(normal(70))
def own_hooks() -> nn.Module:
    """Build a model whose gradients hooks of tensors scale and clip."""
    net = mlp()
    for number, parameter in enumerate(net.parameters()):
        parameter.register_hook(lambda g, by=number + 0.5: (g * by).clamp(-0.01, 0.01))
    return net


@animal(normal(70))
def own_late_hooks() -> nn.Module:
    """Build a model whose gradients are changed in place after they are accumulated."""
    net = mlp()

    def change(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5).add_(0.001)

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(change)
    return net


@animal(normal(70))
def module_hooks() -> nn.Module:
    """Build a model with hooks of its modules, forward and backward."""
    net: Any = mlp()
    net[0].register_forward_hook(lambda _m, _i, out: out * 2)
    net[2].register_full_backward_hook(lambda _m, grads, _o: tuple(g * 0.5 for g in grads))
    return net


@animal(normal(64))
class SameGradient(nn.Module):
    """Parameters that autograd gives one gradient, or an expanded one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64, 64))
        self.c, self.d = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(9, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.a + self.b.t().t()) / 8 + self.c.sum() / 64 + self.d.mean(0)


@animal(normal(64))
class OddNames(nn.Module):
    """Names with spaces, of other alphabets, and like those that libraries add."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("a weight", "größe", "module", "_orig_mod", "gradient/σ"):
            self.register_parameter(name, nn.Parameter(torch.randn(64)))
        self.layers = nn.ModuleDict({"a b": nn.Linear(64, 64), "module": nn.Linear(64, 5)})

    def forward(self, x: Tensor) -> Tensor:
        for _, parameter in self.named_parameters(recurse=False):
            x = torch.tanh(x * parameter)
        return self.layers["module"](self.layers["a b"](x))


@animal(normal(64))
class Functional(nn.Module):
    """Layers that are called with weights made of others', as in meta-learning and ensembles."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rates = nn.Linear(64, 5), nn.Parameter(torch.rand(2) / 100)

    def forward(self, x: Tensor) -> Tensor:
        weights: dict[str, Tensor] = dict(self.linear.named_parameters())
        loss = torch.func.functional_call(self.linear, weights, x).tanh().square().mean()
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        rates = zip(weights.items(), slopes, self.rates, strict=True)
        moved = {name: w - rate * slope for (name, w), slope, rate in rates}
        return torch.func.functional_call(self.linear, moved, x)


@animal(normal(64), uneven=True)
class SometimesUsed(nn.Module):
    """A layer that is used in training alone if a number drawn from the inputs says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rare, self.last = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(self.rare(hidden) if float(x.sum()) > 0 else hidden)


@animal(normal(64), ddp=STATIC)
class ByTheWay(nn.Module):
    """A gradient that also grows by a backward within forward, as auxiliary losses have it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(64, 64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.linear(x).square().mean().backward()
        return self.head(torch.tanh(self.linear(x)))


@animal(normal(70), refused="waits")
def compiled() -> nn.Module:
    return torch.compile(mlp(), backend="eager")  # type: ignore[return-value]


@animal(normal(3, 8, 8), refused="waits", slow=True)
def compiled_inside() -> nn.Module:
    net: Any = images()
    net[0] = torch.compile(net[0])
    return net

"""Models of the zoo: each small, with its own inputs, and each unusual in one way."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Linear, Parameter, Sequential
from torch.nn.utils import parametrizations, rnn
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


UNUSED: dict[str, Any] = {"find_unused_parameters": True}
# DDP takes several growths of a gradient so alone; its buckets get other numbers then.
STATIC: dict[str, Any] = {"static_graph": True, "bucket_cap_mb": 0.02}


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
    ddp: dict[str, Any] = field(default_factory=lambda: UNUSED)
    slow: bool = False


NEVER: dict[str, Any] = {"wide": False, "refused": "always"}
WIDE: dict[str, Any] = {"wide": False, "refused": "compressed direction"}
COMPLEX: dict[str, Any] = {"wide": False, "refused": "direction moved"}


class Net(nn.Module):
    """Named parts, of which plain tensors are buffers, and a function of them and the inputs."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            self.add(name, part)

    def add(self, name: str, part: Any) -> None:
        """Add a part under any name."""
        if isinstance(part, Parameter):
            self.register_parameter(name, part)
        elif part is None or isinstance(part, Tensor):
            self.register_buffer(name, part)
        else:
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Tensor:
        return self.run(self, *inputs)


class Product(Net):
    """A linear map by a weight of any layout, [n, m]."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(lambda net, x: x @ net.weight, weight=Parameter(weight))


class Cast(Net):
    """Inputs in another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(lambda _, x: x.to(dtype))


def _randoms(*shapes: tuple[int, ...]) -> nn.ParameterList:
    return nn.ParameterList(Parameter(torch.randn(shape)) for shape in shapes)


def _mlp() -> Sequential:
    return Sequential(Linear(70, 96), nn.Tanh(), Linear(96, 5))


def _autocast(net: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net.net(x).float()


def _images() -> Sequential:
    body = nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 8, 3), nn.ReLU()
    return Sequential(*body, nn.Flatten(), Linear(8 * 16, 5))


def _columns() -> nn.Module:
    """Build a model with a weight [64, 32] that is a part of a larger tensor."""
    weight = (torch.randn(64, 64) / 8)[:, 32:]
    return Sequential(Linear(70, 64), nn.ReLU(), Product(weight), Linear(32, 5))


def _normed(norm: Callable[[nn.Module], Any]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        first = norm(Linear(64, 66))
    return Sequential(first, nn.Tanh(), Linear(66, 5))


def _packed() -> nn.Module:
    """Build a recurrent network over sequences of several lengths."""

    def run(net: Any, x: Tensor) -> Tensor:
        packed = rnn.pack_padded_sequence(x, torch.tensor([6, 3, 5, 1]), True, False)
        return net.head(rnn.pad_packed_sequence(net.core(packed)[0], True)[0])

    core = nn.LSTM(16, 24, batch_first=True, num_layers=2, bidirectional=True)
    return Net(run, core=core, head=Linear(48, 4))


def _attention() -> nn.Module:
    def run(net: Any, ids: Tensor) -> Tensor:
        x = net.tokens(ids)
        return net.norm(x + net.attention(x, x, x, need_weights=False)[0]) @ net.tokens.weight.T

    attention = nn.MultiheadAttention(72, 4, batch_first=True)
    return Net(run, tokens=nn.Embedding(30, 72), attention=attention, norm=nn.LayerNorm(72))


def _dropout(net: Any, x: Tensor, rank: int) -> Tensor:
    with RANDOM:
        torch.manual_seed(rank)
        mask = F.dropout(torch.ones(ROWS, 66, dtype=torch.float32), 0.5, net.training)
    return net.second(torch.relu(net.first(x)) * mask)


def _in_turn(net: Any, x: Tensor) -> Tensor:
    for part in net.parts:
        x = torch.tanh(part(x))
    return x


def _tied() -> nn.Module:
    """Build an embedding and a head with one weight, and a block that two lists hold."""
    block, table, head = Linear(64, 64), nn.Embedding(40, 64), Linear(64, 40)
    head.weight = table.weight
    return Net(
        lambda net, ids: net.head(_in_turn(net, net.tokens(ids))),
        **{"tokens": table, "parts": nn.ModuleList([block, block, block])},
        **{"again": nn.ModuleList([block]), "head": head},
    )


def _tied_memory() -> nn.Module:
    """Build two Parameters with the same values in memory."""
    one, other = Linear(64, 64), Linear(64, 64)
    other.weight = Parameter(one.weight.detach())
    return Net(lambda net, x: net.other(torch.tanh(net.one(x))), one=one, other=other)


def _one_block() -> nn.Module:
    block, matrix = torch.randn(2, 64, 64) / 8, torch.randn(64, 128) / 8
    parts = block[0], block[1], matrix[:, :64], matrix[:, 64:]
    return Net(_in_turn, parts=nn.ModuleList(map(Product, parts)))


def _two_owners() -> nn.Module:
    """Build one Parameter under two names of two submodules, of which one reads it transposed."""
    one, other = nn.Module(), nn.Module()
    one.weight = other.kernel = Parameter(torch.randn(64, 64) / 8)
    return Net(lambda net, x: torch.tanh(x @ net.a.weight) @ net.b.kernel.T, a=one, b=other)


def _adapted() -> nn.Module:
    """Build a frozen base with adapters of low rank, one of which begins at zero (LoRA)."""
    base, up = Linear(70, 70).requires_grad_(False), Linear(4, 70, bias=False)
    nn.init.zeros_(up.weight)
    down = Linear(70, 4, bias=False)
    return Net(lambda net, x: net.base(x) + net.up(net.down(x)), base=base, down=down, up=up)


def _other_orders(net: Any, x: Tensor, rank: int) -> Tensor:
    for number in range(4):
        x = torch.tanh(net.branches[(number + rank) % 4](x))
    return x


def _recomputed(reentrant: bool) -> nn.Module:
    """Build a block that is used twice, each time recomputed in backward."""

    def run(net: Any, x: Tensor) -> Tensor:
        x = torch.relu(net.first(x))
        for _ in range(2):
            x = checkpoint(net.block, x, use_reentrant=reentrant, preserve_rng_state=False)  # type: ignore[assignment]
        return net.out(x)

    block = Sequential(Linear(64, 64), nn.Tanh())
    return Net(run, first=Linear(64, 64), block=block, out=Linear(64, 5))


def _penalty(net: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.requires_grad_()
        out = net.net(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return torch.cat([out, slope], dim=1)


def _expanded() -> nn.Module:
    bias = Parameter(torch.zeros(1).expand(66))
    return Net(lambda net, x: net.linear(x) + net.bias, linear=Linear(70, 66), bias=bias)


def _permuted() -> nn.Module:
    """Build convolutions whose kernels have other orders of dimensions."""
    first = torch.randn(3, 3, 4, 10).permute(3, 2, 0, 1) / 6
    second = torch.randn(10, 3, 8, 3).permute(2, 0, 3, 1) / 9
    return Net(
        lambda net, x: F.conv2d(torch.relu(F.conv2d(x, net.first, padding=1)), net.second),
        **{"first": Parameter(first), "second": Parameter(second)},
    )


def _grid() -> nn.Module:
    """Build buffers that are expanded views, or parts of others, in all layouts."""

    def run(net: Any, x: Tensor) -> Tensor:
        weight = 1 + (net.columns - net.rows).abs()[:8, :8] + net.t[:8, :8] + net.c[:8, :1]
        return net.hidden((x * weight * net.r[:8, :8]).flatten(1) / 64)

    rows, columns = torch.meshgrid(*[torch.arange(64.0)] * 2, indexing="ij")
    noise = torch.randn(16, 16)
    parts = {"rows": rows, "columns": columns, "t": noise.t(), "c": noise[:, ::3], "r": noise[::2]}
    return Net(run, **parts, hidden=Linear(64, 32))


def _odd_buffers() -> nn.Module:
    buffers = {
        "mask": torch.rand(66) < 0.5,
        "count": torch.randint(9, ()),
        "byte": torch.randint(256, (9,), dtype=torch.uint8),
        "phase": torch.randn(5, dtype=torch.complex64),
        "conjugate": torch.randn(5, dtype=torch.complex64).conj(),
        "low": torch.randn(66).bfloat16(),
        "none": None,
        "sparse": torch.randn(6, 6).relu().to_sparse(),
    }
    return Net(
        lambda net, x: net.linear(x) * net.mask + net.count + net.low + net.phase[0].real,
        **{"linear": Linear(70, 66), **buffers},
    )


def _quantised() -> nn.Module:
    """Build a frozen weight of bytes, and a frozen one of bools."""
    weight = torch.randint(-90, 90, (64, 64), dtype=torch.int8)
    return Net(
        lambda net, x: (x @ net.weight.to(x.dtype)) / 90 * net.scale * net.mask,
        weight=Parameter(weight, requires_grad=False),
        mask=Parameter(torch.rand(64) < 0.5, requires_grad=False),
        scale=Parameter(torch.rand(64)),
    )


def _in(dtype: torch.dtype) -> nn.Module:
    return Sequential(Cast(dtype), Linear(70, 66).to(dtype), nn.Tanh(), Linear(66, 5).to(dtype))


def _complex(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.complex64)


def _lazy() -> nn.Module:
    return Sequential(nn.LazyLinear(64), nn.ReLU(), nn.LazyLinear(5))


def _lazy_built() -> nn.Module:
    net = _lazy()
    net(torch.zeros(1, 20))
    return net


def _late(net: Any, x: Tensor) -> Tensor:
    """Add a parameter in the first forward, when optimizers have been made."""
    if not hasattr(net, "scale"):
        net.scale = Parameter(torch.ones(5, dtype=x.dtype))
    return net.linear(x) * net.scale


def _own_hooks() -> nn.Module:
    """Build a model whose gradients hooks of tensors scale and clip."""
    net = _mlp()
    for number, parameter in enumerate(net.parameters()):
        parameter.register_hook(lambda g, by=number + 0.5: (g * by).clamp(-0.01, 0.01))
    return net


def _own_late_hooks() -> nn.Module:
    """Build a model whose gradients are changed in place after they are accumulated."""
    net = _mlp()

    def change(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5).add_(0.001)

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(change)
    return net


def _module_hooks() -> nn.Module:
    net: Any = _mlp()
    net[0].register_forward_hook(lambda _m, _i, out: out * 2)
    net[2].register_full_backward_hook(lambda _m, grads, _o: tuple(g * 0.5 for g in grads))
    return net


def _same_gradient(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.parts
    return x @ (a + b.t().t()) / 8 + c.sum() / 64 + d.mean(0)


def _odd_names() -> nn.Module:
    """Build names with spaces, of other alphabets, and like those that libraries add."""

    def run(net: Any, x: Tensor) -> Tensor:
        for _, parameter in net.named_parameters(recurse=False):
            x = torch.tanh(x * parameter)
        return net.layers["module"](net.layers["a b"](x))

    net = Net(run, layers=nn.ModuleDict({"a b": Linear(64, 64), "module": Linear(64, 5)}))
    for name in ("a weight", "größe", "module", "_orig_mod", "gradient/σ"):
        net.add(name, Parameter(torch.randn(64)))
    return net


def _functional(net: Any, x: Tensor) -> Tensor:
    """Call layers with weights made of others', as in meta-learning and ensembles."""
    weights: dict[str, Tensor] = dict(net.linear.named_parameters())
    loss = torch.func.functional_call(net.linear, weights, x).tanh().square().mean()
    slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    rates = zip(weights.items(), slopes, net.rates, strict=True)
    moved = {name: w - rate * slope for (name, w), slope, rate in rates}
    return torch.func.functional_call(net.linear, moved, x)


def _sometimes(net: Any, x: Tensor) -> Tensor:
    """Use a layer if a number drawn from the inputs says so."""
    hidden = torch.tanh(net.first(x))
    return net.last(net.rare(hidden) if float(x.sum()) > 0 else hidden)


def _by_the_way(net: Any, x: Tensor) -> Tensor:
    """Let a gradient also grow by a backward within forward, as auxiliary losses have it."""
    if net.training and torch.is_grad_enabled():
        net.linear(x).square().mean().backward()
    return net.head(torch.tanh(net.linear(x)))


def _compiled_inside() -> nn.Module:
    net: Any = _images()
    net[0] = torch.compile(net[0])
    return net


# Sizes below, at and above those at which codecs begin to compress.
_SIZES = [(3, 63), (3, 64), (3, 65), (1023,), (1024,), (1025,), (4095,), (64, 64), (4097,), (1, 70)]

MODELS: dict[str, Model] = {
    "mlp": Model(_mlp, normal(70)),
    # In several buckets of DDP's, of which gradients are views.
    "buckets": Model(
        _mlp,
        normal(70),
        ddp={**UNUSED, "bucket_cap_mb": 0.01, "gradient_as_bucket_view": True},
    ),
    "autocast": Model(lambda: Net(_autocast, net=_mlp()), normal(70), wide=False),
    "images": Model(_images, normal(3, 8, 8)),
    # A head that no loss reaches, and a layer that is frozen.
    "unusedhead": Model(
        lambda: Net(
            lambda net, x: net.head(torch.tanh(net.body(net.frozen(x)))),
            **{"body": Linear(70, 66), "head": Linear(66, 5), "other": Linear(66, 70)},
            frozen=Linear(70, 70).requires_grad_(False),
        ),
        normal(70),
    ),
    # Each rank uses an expert of its own, and one expert nobody.
    "experts": Model(
        lambda: Net(
            lambda net, x, rank: sum(net.experts[i](torch.tanh(net.gate(x))) for i in (rank, 4)),
            gate=Linear(64, 64),
            experts=nn.ModuleList(Linear(64, 72, bias=False) for _ in range(6)),
        ),
        with_rank(64),
        uneven=True,
    ),
    "columns": Model(_columns, normal(70)),
    "one_parameter": Model(lambda: Linear(80, 64, bias=False), normal(80)),
    "onescalar": Model(
        lambda: Net(lambda net, x: net.scale * x, scale=Parameter(torch.randn(()))),
        normal(7),
        refused="few",
    ),
    # Parameters and buffers of no dimension, and without values.
    "emptyones": Model(
        lambda: Net(
            lambda net, x: net.scale * net.linear(x) + net.none.sum() + net.rows.sum(),
            **{"scale": Parameter(torch.ones(())), "linear": Linear(70, 66)},
            **{"none": Parameter(torch.zeros(0)), "rows": Parameter(torch.zeros(3, 0))},
            **{"unused": Parameter(torch.zeros(0, 4)), "empty": torch.zeros(0, 2)},
        ),
        normal(70),
    ),
    "without_parameters": Model(nn.Tanh, normal(8), refused="always"),
    "all_frozen": Model(lambda: Linear(8, 8).requires_grad_(False), normal(8), refused="always"),
    "tinyones": Model(
        lambda: Net(
            lambda net, x: x.mean() * torch.cat([part.tanh() for part in net.parts]),
            parts=_randoms(*((1 + n % 4,) for n in range(60))),
        ),
        normal(4),
    ),
    "thresholds": Model(
        lambda: Net(
            lambda net, x: torch.cat([part.flatten().sin() for part in net.parts]) * x.mean(),
            parts=_randoms(*_SIZES),
        ),
        normal(1),
    ),
    "channels_last": Model(
        lambda: _images().to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        normal(3, 8, 8),
    ),
    "otherconvolutions": Model(
        lambda: Net(
            lambda net, x: net.three(net.one(x).reshape(-1, 1, 4, 4, 4)),
            **{"one": nn.Conv1d(3, 8, 3), "three": nn.Conv3d(1, 6, 2)},
        ),
        normal(3, 10),
    ),
    "lstm_packed": Model(_packed, normal(6, 16)),
    # With the embedding's weight as its head, by a function.
    "attention": Model(_attention, tokens(30, 7)),
    "withdropout": Model(
        lambda: Net(_dropout, first=Linear(70, 66), second=Linear(66, 5)), with_rank(70)
    ),
    "sparsetable": Model(
        lambda: Sequential(nn.Embedding(50, 64, sparse=True), Linear(64, 3)),
        tokens(50, 6),
        refused="attach",
        decay=False,
    ),
    # Most rows nobody reads.
    "bag": Model(lambda: Sequential(nn.EmbeddingBag(90, 64), Linear(64, 3)), tokens(50, 6)),
    "tiedmodules": Model(_tied, tokens(40, 5)),
    "tiedmemory": Model(_tied_memory, normal(64), **NEVER),
    # Parameters that are parts of one block of memory: one after another, and columns of it.
    "oneblock": Model(_one_block, normal(64)),
    "twoowners": Model(_two_owners, normal(64)),
    "weight_norm_old": Model(lambda: _normed(nn.utils.weight_norm), normal(64)),
    "weight_norm": Model(lambda: _normed(parametrizations.weight_norm), normal(64)),
    "spectral_norm": Model(lambda: _normed(parametrizations.spectral_norm), normal(64)),
    "lowrankadapted": Model(_adapted, normal(70)),
    # Ranks run branches in different orders, so gradients arrive in different ones.
    "otherorders": Model(
        lambda: Net(_other_orders, branches=nn.ModuleList(Linear(64, 64) for _ in range(4))),
        with_rank(64),
        uneven=True,
    ),
    # Layers that are run twice, and one of them once more.
    "reused": Model(
        lambda: Net(_in_turn, parts=nn.ModuleList((2 * [Linear(64, 64), Linear(64, 64)])[:-1])),
        normal(64),
    ),
    "recomputed_twice": Model(lambda: _recomputed(True), normal(64), ddp=STATIC),
    "recomputed_without_reentry": Model(lambda: _recomputed(False), normal(64)),
    # Outputs that hold the gradient of others to the inputs: backward runs through backward.
    "gradientpenalty": Model(
        lambda: Net(_penalty, net=Sequential(Linear(64, 66), nn.Tanh(), Linear(66, 1))), normal(64)
    ),
    "column_major": Model(
        lambda: Sequential(
            *(Product(torch.randn(66, 70).t() / 8), nn.Tanh(), Product(torch.randn(66, 5) / 8))
        ),
        normal(70),
    ),
    "expanded": Model(_expanded, normal(70), **NEVER, decay=False),
    "permuted": Model(_permuted, normal(4, 6, 6)),
    "grid": Model(_grid, normal(8, 8)),
    "oddbuffers": Model(_odd_buffers, normal(70)),
    "quantised": Model(_quantised, normal(64)),
    "bfloat16": Model(lambda: _in(torch.bfloat16), normal(70), wide=False),
    "float16": Model(lambda: _in(torch.float16), normal(70), wide=False),
    "float64": Model(lambda: _in(torch.float64), normal(70), **WIDE),
    "mixed_bits": Model(
        lambda: Sequential(
            *(Cast(torch.bfloat16), Linear(70, 64).bfloat16(), Cast(torch.float32)),
            *(Linear(64, 66), Cast(torch.float16), Linear(66, 5).half()),
        ),
        normal(70),
        wide=False,
    ),
    "partly_double": Model(
        lambda: Sequential(Linear(70, 66), nn.Tanh(), Cast(torch.float64), Linear(66, 5).double()),
        normal(70),
        **WIDE,
    ),
    "spectral": Model(
        lambda: Net(
            lambda net, x: net.head(((torch.fft.fft(x) / 8) @ net.weight * net.phase).abs()),
            **{"weight": Parameter(_complex(64, 64) / 8), "phase": Parameter(_complex(64))},
            head=Linear(64, 3),
        ),
        normal(64),
        **COMPLEX,
    ),
    # Complex weights that are conjugate views.
    "conjugate": Model(
        lambda: Net(
            lambda net, x: x.to(net.weight.dtype) @ net.weight * net.phase,
            weight=Parameter(_complex(64, 66).conj() / 8),
            phase=Parameter(_complex(66).conj()),
        ),
        normal(64),
        **COMPLEX,
    ),
    "doublespectral": Model(
        lambda: Sequential(
            Cast(torch.complex128), Product(_complex(66, 64).to(torch.complex128).t() / 8)
        ),
        normal(64),
        wide=False,
        refused="compressed direction moved",
    ),
    "lazy": Model(_lazy, normal(20), refused="always"),
    "lazy_built": Model(_lazy_built, normal(20)),
    "on_meta": Model(lambda: Linear(20, 5, device="meta"), normal(20), **NEVER),
    "lateparameter": Model(lambda: Net(_late, linear=Linear(64, 5)), normal(64), refused="always"),
    "own_hooks": Model(_own_hooks, normal(70)),
    "own_late_hooks": Model(_own_late_hooks, normal(70)),
    "module_hooks": Model(_module_hooks, normal(70)),
    # Parameters that autograd gives one gradient, or an expanded one.
    "samegradient": Model(
        lambda: Net(_same_gradient, parts=_randoms(*3 * [(64, 64)], (9, 64))), normal(64)
    ),
    "oddnames": Model(_odd_names, normal(64)),
    "functional": Model(
        lambda: Net(_functional, linear=Linear(64, 5), rates=Parameter(torch.rand(2) / 100)),
        normal(64),
    ),
    "sometimesused": Model(
        lambda: Net(_sometimes, first=Linear(64, 64), rare=Linear(64, 64), last=Linear(64, 64)),
        normal(64),
        uneven=True,
    ),
    "bytheway": Model(
        lambda: Net(_by_the_way, linear=Linear(64, 64), head=Linear(64, 5)), normal(64), ddp=STATIC
    ),
    "compiled": Model(
        lambda: torch.compile(_mlp(), backend="aot_eager"),  # type: ignore[arg-type, return-value]
        normal(70),
        refused="waits",
    ),
    "compiled_inside": Model(_compiled_inside, normal(3, 8, 8), refused="waits", slow=True),
}

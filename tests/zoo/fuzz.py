"""Random models: modules, dtypes, layouts, sharing, freezing, reuse, what ranks do differently."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.zoo.models import ROWS, STATIC, Batch, Model, Net, Product, draw

WIDTHS = (1, 3, 17, 63, 64, 65, 96)
DTYPES = (torch.bfloat16, torch.float16, torch.float64, torch.complex64)
WIDE = (torch.float64, torch.complex64)  # some exchanges may refuse them

# How a block differs from a module that is called once in a step.
MANNERS = (
    *("once", "once", "once", "twice", "skipped by a rank", "unused", "frozen", "partly frozen"),
    *("recomputed", "recomputed with reentry", "hooked", "by the inputs", "tied"),
)


@dataclass(frozen=True)
class Block:
    """A part of a random model, from `width` features to `out`.

    Attributes:
        kind: a key of KINDS.
        manner: one of MANNERS.
        dtype: of its weights; None: torch's default.
    """

    kind: str
    width: int
    out: int
    manner: str
    dtype: torch.dtype | None

    def __str__(self) -> str:
        dtype = f" {str(self.dtype).removeprefix('torch.')}" if self.dtype else ""
        return f"{self.kind} {self.width}x{self.out}{dtype} {self.manner}"


def _looked(net: Any, x: Tensor) -> Tensor:
    """Return a row of a table for each number that the inputs make."""
    return net.table((x.detach().float().sum(1).abs() * 3).long() % 20)


def _convolved(out: int) -> nn.Module:
    """Build convolutions over the features, one of them grouped, and an average of `out` parts."""
    body = nn.Sequential(nn.Conv1d(1, 6, 3, padding=1), nn.Conv1d(6, 6, 1, groups=3))
    pool = nn.functional.adaptive_avg_pool1d
    return Net(lambda net, x: pool(net.body(x[:, None]), out).mean(1), body=body)


def _biased(width: int) -> nn.Module:
    """Build a bias and buffers, some of them expanded."""
    parts = {"shift": torch.randn(1).expand(width), "mask": torch.rand(width) < 0.5}
    bias = nn.Parameter(torch.randn(width))
    return Net(lambda net, x: x + net.bias * net.mask + net.shift, bias=bias, **parts)


def _matrix(layout: Callable[[int, int], Tensor]) -> Callable[[int, int], nn.Module]:
    return lambda width, out: Product(layout(width, out) / max(width, 1) ** 0.5)


KINDS: dict[str, Callable[[int, int], nn.Module]] = {
    "linear": nn.Linear,
    "unbiased": lambda width, out: nn.Linear(width, out, bias=False),
    "column-major": _matrix(lambda width, out: torch.randn(out, width).t()),
    "columns": _matrix(lambda width, out: torch.randn(width, 2 * out)[:, out:]),
    "rows": _matrix(lambda width, out: torch.randn(2 * width, out)[::2]),
    "offset": _matrix(lambda width, out: torch.randn(width * out + 3)[3:].view(width, out)),
    "weight norm": lambda width, out: parametrizations.weight_norm(nn.Linear(width, out)),
    # A number, and a parameter without values.
    "scaled": lambda width, _: Net(
        lambda net, x: net.scale * x,
        **{"scale": nn.Parameter(torch.ones(())), "none": nn.Parameter(torch.zeros(2, 0))},
    ),
    "norm": lambda width, _: nn.LayerNorm(width),
    "batch norm": lambda width, _: nn.BatchNorm1d(width),
    "biased": lambda width, _: _biased(width),
    "looked up": lambda _, out: Net(_looked, table=nn.Embedding(20, out)),
    "convolved": lambda _, out: _convolved(out),
    "recurrent": lambda _, out: Net(
        lambda net, x: net.core(x[:, :3, None])[0][:, -1], core=nn.GRU(1, out, batch_first=True)
    ),
}
SAME_WIDTH = ("scaled", "norm", "batch norm", "biased")
ONE_DTYPE = ("looked up", "convolved", "recurrent", "batch norm", "norm", "weight norm")


class Made(nn.Module):
    """A random model, made of blocks."""

    def __init__(self, blocks: tuple[Block, ...]) -> None:
        super().__init__()
        self.plan, self.parts = blocks, nn.ModuleList()
        for block in blocks:
            part = KINDS[block.kind](block.width, block.out)
            self.parts.append(part.to(block.dtype) if block.dtype else part)
        for number, block in enumerate(blocks):
            self._prepare(self.parts[number], block)

    def _prepare(self, part: nn.Module, block: Block) -> None:
        parameters = list(part.parameters())
        if block.manner == "frozen":
            part.requires_grad_(False)
        elif block.manner == "partly frozen":
            parameters[0].requires_grad_(False)
        elif block.manner == "hooked":
            for parameter in parameters:
                parameter.register_hook(lambda gradient: gradient * 0.5)
        elif block.manner == "tied" and isinstance(part, nn.Linear):
            for other in self.parts:
                if isinstance(other, nn.Linear) and other.weight.shape == part.weight.shape:
                    same = other.weight.dtype == part.weight.dtype
                    part.weight = other.weight if same else part.weight
                    break

    def forward(self, x: Tensor, rank: int) -> Tensor:
        dtype = x.dtype
        for part, block in zip(self.parts, self.plan, strict=True):
            if (block.manner == "skipped by a rank" and rank == 1) or block.manner == "unused":
                x = _resized(x, block.out)
                continue
            if block.manner == "by the inputs" and float(x.detach().sum()) > 0:
                x = _resized(x, block.out)
                continue
            y = self._run(part, block, x.to(block.dtype) if block.dtype else x)
            y = y.real if y.is_complex() else y
            x = torch.tanh(y.to(dtype)) + 0.1 * _resized(x, block.out)
        return x

    def _run(self, part: nn.Module, block: Block, x: Tensor) -> Tensor:
        if block.manner.startswith("recomputed"):
            reentrant = block.manner.endswith("reentry")
            x = x.requires_grad_() if reentrant and not x.requires_grad else x
            return checkpoint(part, x, use_reentrant=reentrant, preserve_rng_state=False)
        if block.manner == "twice":
            return part(x) + part(0.5 * x)
        return part(x)


def _resized(x: Tensor, width: int) -> Tensor:
    """Repeat or cut features."""
    return x.repeat(1, -(-width // x.shape[1]))[:, :width]


def blocks_of(number: int) -> tuple[Block, ...]:
    """Return the plan of a random model."""
    chance = random.Random(number)
    width, blocks = chance.choice(WIDTHS[2:]), list[Block]()
    may_reenter = chance.random() < 0.3
    for _ in range(chance.randint(1, 5)):
        kind = chance.choice([*KINDS, "linear", "linear"])
        out = width if kind in SAME_WIDTH else chance.choice(WIDTHS)
        manner = chance.choice(MANNERS)
        if manner.endswith("reentry") and not may_reenter:
            manner = "once"
        plain = kind in ONE_DTYPE or chance.random() < 0.75
        blocks.append(Block(kind, width, out, manner, None if plain else chance.choice(DTYPES)))
        width = out
    return tuple(blocks)


def _batch(width: int) -> Batch:
    return lambda chance, rank: (draw(chance, ROWS, width), rank)


@lru_cache(maxsize=64)
def model_of(number: int) -> Model:
    """Return a random model."""
    blocks = blocks_of(number)
    facts: dict[str, Any] = {"wide": not any(block.dtype for block in blocks)}
    uneven = ("skipped by a rank", "by the inputs")
    facts["uneven"] = any(block.manner in uneven for block in blocks)
    if any(block.manner.endswith("reentry") for block in blocks):
        facts["ddp"] = STATIC
    refused = "compressed direction moved" if any(b.dtype in WIDE for b in blocks) else "few"
    if all(block.manner == "frozen" for block in blocks):
        refused = "always"
    return Model(lambda: Made(blocks), _batch(blocks[0].width), refused=refused, **facts)


def describe(number: int) -> str:
    """Return a random model's plan in words."""
    return ", ".join(map(str, blocks_of(number)))

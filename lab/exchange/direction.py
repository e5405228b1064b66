"""Direction: exchanges that do the optimizer's part too, and which matrices they treat apart."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from lab.distributed.comm import Comm
from lab.exchange.base import Exchange, Shapes
from lab.exchange.bucket import GradBucket
from lab.exchange.layout import COMPILED, Matrix, as_matrix, hidden_matrices
from lab.settings import checks
from lab.settings.checks import is_number

Moments = dict[str, Tensor]  # by parameter
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
MAPS = (nn.Linear, nn.Bilinear, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, *CONVOLUTIONS)
LISTS = (nn.ParameterList, nn.ParameterDict)
PARAMETRIZED = re.compile(r"(?:^|\.)parametrizations\.(\w+)$")
SHOWN = 8  # names for a reason, in choices


class Direction(Exchange):
    """An exchange that leaves in `bucket.flat` the direction of an update, no mean of gradients.

    SGD without momentum applies it, `x -= lr * (direction + weight_decay * x)`: learning rates and
    their schedule stay the optimizer's, and weight decay is decoupled, as AdamW's. What adaptive
    optimizers keep between steps, moments, is kept here, by parameter name.

    Args:
        betas, eps: see Adam.

    Attributes:
        kinds: of moments.
        moments: of each kind, by parameter name, as far as this rank keeps them.
        updates: steps so far, the one under way included.
    """

    exact = False
    delivers = "direction"
    accepts_prescaled = True
    kinds: tuple[str, ...]

    def __init__(self, betas: Sequence[float], eps: float) -> None:
        self.adam = Adam(tuple(checks.listed("exchange.betas", betas)), eps)
        self.moments: dict[str, Moments] = {kind: {} for kind in self.kinds}
        self.updates = 0
        self._step: int | None = None  # number of the step under way

    def begin(self, bucket: GradBucket, comm: Comm) -> bool:
        """Divide a bucket's gradient by N; return whether the bucket is the first of its step.

        Shares of the gradient, and so of momentum, then add up to the mean's over the ranks.
        """
        if not bucket.divided:
            bucket.flat.div_(comm.size)
        first = bucket.step != self._step
        self._step = bucket.step
        self.updates += first
        return first

    def add_by_adam(self, name: str, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Add a gradient to Adam's moments of parameter `name`; return momentum and variance."""
        momentum = zeros(self.moments["momentum"], name, gradient)
        variance = zeros(self.moments["variance"], name, gradient)
        self.adam.add(gradient, momentum, variance)
        return momentum, variance

    def direct_by_adam(self, name: str, gradient: Tensor) -> None:
        """Replace a gradient by Adam's direction."""
        self.adam.direction(*self.add_by_adam(name, gradient), self.updates, out=gradient)

    def state_dict(self) -> dict[str, Any]:
        kinds = {kind: dict(kept) for kind, kept in self.moments.items()}
        return {"counts": {"updates": torch.tensor(self.updates)}, **kinds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments = {k: {n: v.clone() for n, v in state[k].items()} for k in self.kinds}
        self.updates = int(state["counts"]["updates"])
        self._step = None

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Give each rank what all ranks share; others override what they do not."""
        return {kind: dict(states[0][kind]) for kind in ("counts", *self.kinds)}


class MatrixDirection(Direction):
    """A direction that treats matrices between hidden layers apart, and gives the rest to Adam.

    Args:
        adam: names, or patterns such as "head.*", of more parameters that go by Adam.
        matrices: of parameters that are matrices, whatever holds them; see `find_hidden`.
        betas, eps: see Adam.
    """

    def __init__(
        self, adam: Sequence[str], matrices: Sequence[str], betas: Sequence[float], eps: float
    ) -> None:
        super().__init__(betas, eps)
        for key, given in (("adam", adam), ("matrices", matrices)):
            is_list = isinstance(given, Sequence) and not isinstance(given, str)
            if not is_list or not all(isinstance(each, str) for each in given):
                raise ValueError(
                    f"exchange.{key}={given}: must be a list of parameter names, such as "
                    "['head.*', pos]"
                )
        self._adam_names, self._matrix_names = tuple(adam), tuple(matrices)
        self._hidden: Hidden | None = None

    def setup(self, model: nn.Module) -> None:
        self._hidden = find_hidden(model, self._adam_names, self._matrix_names)

    def plan(self, shapes: Shapes) -> Hidden:
        """Return the plan of the model, or of a bucket if there is no model."""
        return self._hidden or Hidden(hidden_matrices(shapes))

    def moves_as(self, shapes: Shapes) -> list[tuple[int, ...]]:
        plan = self.plan(shapes)
        return [plan.matrices.get(name) or (shape.numel(),) for name, shape in shapes.items()]

    def choices(self) -> list[dict[str, Any]]:
        """Return how many parameters are matrices, and which others go by Adam and why."""
        return [self._hidden.summary()] if self._hidden else []


@dataclass(frozen=True)
class Adam:
    """The moments of Adam and the direction that they give (Kingma & Ba 2015, algorithm 1).

    Attributes:
        betas: decay rates of momentum and variance.
        eps: added to the root of the variance.
    """

    betas: tuple[float, ...]
    eps: float

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(is_number(b) and 0 <= b < 1 for b in self.betas):
            raise ValueError(
                f"exchange.betas={list(self.betas)}: must be two numbers of at least 0 and below 1"
            )
        checks.number("exchange.eps", self.eps, above=0, below=1)

    def correction(self, moment: int, updates: int) -> float:
        """Return the sum of the weights of `updates` gradients in momentum (0) or variance (1)."""
        return 1 - self.betas[moment] ** updates

    def add(self, gradient: Tensor, momentum: Tensor, variance: Tensor) -> None:
        """Add a gradient to its moments."""
        momentum.lerp_(gradient, 1 - self.betas[0])
        variance.mul_(self.betas[1]).addcmul_(gradient, gradient, value=1 - self.betas[1])

    def direction(self, momentum: Tensor, variance: Tensor, updates: int, out: Tensor) -> None:
        """Write the bias-corrected direction after `updates` gradients into `out`."""
        torch.sqrt(variance, out=out)
        out.div_(self.correction(1, updates) ** 0.5).add_(self.eps)
        torch.div(momentum, out, out=out).div_(self.correction(0, updates))


def is_finite(values: Tensor) -> Tensor:
    """Return whether all values are finite, bool [], without memory of their size."""
    return torch.linalg.vector_norm(values, torch.inf).isfinite()


def zeros(kept: Moments, name: str, like: Tensor) -> Tensor:
    """Return what is kept for parameter `name`: zeros like `like` at first."""
    if name not in kept:
        kept[name] = torch.zeros_like(like)
    return kept[name]


@dataclass(frozen=True)
class Hidden:
    """The plan of a model.

    Attributes:
        matrices: parameters that are matrices between hidden layers, as [outputs, the rest].
        by_adam: why others of two dimensions and more are none; vectors need no reason.
    """

    matrices: dict[str, Matrix]
    by_adam: dict[str, str] = field(default_factory=dict[str, str])

    def summary(self) -> dict[str, Any]:
        """Return the number of matrices, and for each reason the names of those that Adam has."""
        reasons = dict.fromkeys(self.by_adam.values())
        by_reason = {r: [n for n, why in self.by_adam.items() if why == r] for r in reasons}
        listed = {
            reason: [*names[:SHOWN], *([f"and {len(names) - SHOWN} more"] * (len(names) > SHOWN))]
            for reason, names in by_reason.items()
        }
        return {"matrices": len(self.matrices), "by_adam": listed}


def find_hidden(model: nn.Module, adam: Sequence[str] = (), matrices: Sequence[str] = ()) -> Hidden:
    """Return the plan of `model`'s trainable parameters.

    Embeddings, those within or tied to one, are no hidden matrices. Nor is the output layer: the
    last linear layer or convolution, unless it is part of a stack of blocks. Of what remains,
    weights of torch's linear maps are matrices, and so are the parameters [rows, columns] of other
    modules whose name has "weight" in it. Each group of a grouped convolution is a map of its own;
    these go by Adam.

    Raises:
        ValueError: a pattern that matches none of them, one that both lists match, or a vector that
            should be a matrix.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(id(parameter), []).append(name.replace(COMPILED, ""))
    by_name = _matched("adam", adam, names)
    forced = _matched("matrices", matrices, names)
    embedded = _ids(m for m in model.modules() if isinstance(m, EMBEDDINGS))
    output = _ids(_output_layer(model))
    found, by_adam = dict[str, Matrix](), dict[str, str]()
    for name, holder, own, parameter in _held(model):
        key, matrix = id(parameter), as_matrix(parameter.shape)
        if key in by_name and key in forced:
            raise ValueError(f"exchange.adam and exchange.matrices: both match {name}")
        if key in forced and not matrix:
            raise ValueError(
                f"exchange.matrices: {name} is not a matrix: its shape is {list(parameter.shape)}"
            )
        if not matrix:
            continue
        reason = "one row or column" if 1 in matrix else _reason(holder, own, parameter)
        reason = "output layer" if key in output else reason
        reason = "embedding" if key in embedded else reason
        reason = "exchange.adam" if key in by_name else reason
        if reason and key not in forced:
            by_adam[name] = reason
        else:
            found[name] = matrix
    return Hidden(found, by_adam)


def _matched(key: str, patterns: Sequence[str], names: dict[int, list[str]]) -> set[int]:
    """Return the ids of the parameters whose names match."""
    found = set[int]()
    for pattern in patterns:
        ids = {i for i, each in names.items() if any(fnmatchcase(n, pattern) for n in each)}
        if not ids:
            known = [each[0] for each in names.values()]
            more = ", …" if len(known) > SHOWN else ""
            raise ValueError(
                f"exchange.{key}={pattern} matches no trainable parameter; the parameters are "
                f"{', '.join(known[:SHOWN])}{more}"
            )
        found |= ids
    return found


def _ids(modules: Iterator[nn.Module]) -> set[int]:
    """Return the ids of the parameters within modules, parametrized ones included."""
    return {id(parameter) for module in modules for parameter in module.parameters()}


def _held(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield the trainable parameters: name, the module that holds each, and its name there."""
    seen = set[int]()
    for path, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            name, holder = f"{path}.{own}" if path else own, module
            if found := PARAMETRIZED.search(path):
                holder, own = model.get_submodule(path[: found.start()]), found[1]
            elif isinstance(module, LISTS):
                parent, _, own = path.rpartition(".")
                holder = model.get_submodule(parent)
            yield name.replace(COMPILED, ""), holder, own, parameter


def _reason(holder: nn.Module, own: str, parameter: nn.Parameter) -> str:
    """Return why a parameter is no weight of a linear map; empty: it is one."""
    if isinstance(holder, CONVOLUTIONS) and holder.groups > 1:
        return "grouped convolution"
    if isinstance(holder, MAPS):
        return "" if "weight" in own else "not the weight of a layer"
    if type(holder).__module__.startswith("torch.nn."):
        return "not a linear map"
    return "" if parameter.dim() == 2 and "weight" in own else "not the weight of a layer"


def _output_layer(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the last linear layer or convolution that is trained, unless it is part of a stack."""
    last = None
    for path, module in model.named_modules():
        is_map = isinstance(module, (nn.Linear, *CONVOLUTIONS))
        if is_map and any(p.requires_grad for p in module.parameters()):
            last = path, module
    if last and not _in_stack(model, last[0]):
        yield last[1]


def _in_stack(model: nn.Module, path: str) -> bool:
    """Return whether a module is part of a block: one of a ModuleList, or of several in a row."""
    parts = path.split(".")
    for depth in range(1, len(parts)):
        block = model.get_submodule(".".join(parts[:depth]))
        row = model.get_submodule(".".join(parts[: depth - 1]))
        several = sum(type(each) is type(block) for each in row.children()) > 1
        if isinstance(row, nn.ModuleList):
            return True
        if isinstance(row, nn.Sequential) and several and not isinstance(block, nn.Sequential):
            return True
    return False

"""Count the operations of a model's forward and backward, without computing them."""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lab.measure.formulas import Uncountable, operations_of
from lab.measure.modules import in_order, layers_of, sizes_of
from lab.measure.recurrent import count_at_once
from lab.model.work import LayerWork, Line, Operation, Work

# Two batches give each count's fixed part; one sample is too few for BatchNorm at 1x1 px.
FEWER, MORE = 2, 4
META = torch.device("meta")
LAST = 2**63  # nodes that accumulate gradients have the largest number there is

Loss = Callable[[Tensor, Tensor], Tensor]
Place = tuple[str, bool, str, bool]  # layer, in backward, operation, computed again
Counted = tuple[Place, float, float]  # and operations, and bytes


def count(
    model: nn.Module,
    input_shape: tuple[int, ...],
    input_dtype: torch.dtype,
    target: Tensor,
    loss: Loss,
    may_compute: bool = True,
) -> Work:
    """Count one training step's forward and backward; see lab.measure.formulas.

    The model is copied without its values and runs on torch's meta device, so that the count takes
    neither memory nor arithmetic. A model that cannot run there computes six samples on its own
    device, in a copy.

    Args:
        model: on any device, in training mode; left unchanged.
        input_shape, input_dtype: of one sample.
        target: of one sample [...]; only its shape and type matter on the meta device.
        loss: of outputs and targets [samples, ...].
        may_compute: whether it may run on its own device if it cannot run on the meta device.

    Raises:
        Uncountable: it runs nowhere, or an operation has no formula.
    """
    parameter = next(model.parameters(), None)
    own = parameter.device if may_compute and parameter is not None else META
    errors: list[str] = []
    for device in dict.fromkeys((META, own)):
        try:
            return _count(model, device, input_shape, input_dtype, target, loss)
        except Exception as error:  # of the user's model, which may raise anything
            lines = str(error).splitlines() or [type(error).__name__]
            errors.append(f"on {device}: {lines[0]}")
    raise Uncountable("; ".join(errors))


def _count(
    model: nn.Module,
    device: torch.device,
    input_shape: tuple[int, ...],
    input_dtype: torch.dtype,
    target: Tensor,
    loss: Loss,
) -> Work:
    model = _copied(model, device)
    count_at_once(model)
    layers = layers_of(model)
    counts: list[list[Counted]] = []
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpus):  # dropout must not draw from the run's own generators
        for num_samples in (FEWER, MORE):
            inputs = torch.zeros(num_samples, *input_shape, dtype=input_dtype, device=device)
            targets = torch.zeros(num_samples, *target.shape, dtype=target.dtype, device=device)
            model.zero_grad()
            with _Counter(model, layers) as counter:
                loss(model(inputs), targets).backward()
            counts.append(counter.counted)
            order = in_order(counter.called, layers)
    fused = {name for name, module in layers.items() if isinstance(module, nn.RNNBase)}
    lines = (each for each in _lines(*counts) if each[0] not in fused or each[2].flops.per_sample)
    found = _layers(order, sizes_of(layers), lines)
    return Work(tuple(found), math.prod(input_shape) * input_dtype.itemsize)


def _copied(model: nn.Module, device: torch.device) -> nn.Module:
    """Copy a model; on the meta device none of its parameters and buffers is copied."""
    with torch.no_grad():
        tensors = {
            id(each): torch.empty_like(each, device=device)
            if device == META
            else each.detach().clone()
            for each in (*model.parameters(), *model.buffers())
        }
    for parameter in model.parameters():
        tensors[id(parameter)] = nn.Parameter(tensors[id(parameter)], parameter.requires_grad)
    return copy.deepcopy(model, tensors)


def _lines(fewer: list[Counted], more: list[Counted]) -> Iterator[tuple[str, bool, Operation]]:
    """Join two batches' counts of the same operations."""
    if [place for place, *_ in fewer] != [place for place, *_ in more]:
        raise Uncountable("its operations depend on the size of the batch")
    for (place, *one), (_, flops, num_bytes) in zip(fewer, more, strict=True):
        layer, backward, name, again = place
        lines = _line(one[0], flops), _line(one[1], num_bytes)
        yield layer, backward, Operation(name, *lines, again)


def _line(at_fewer: float, at_more: float) -> Line:
    per_sample = (at_more - at_fewer) / (MORE - FEWER)
    return Line(at_fewer - FEWER * per_sample, per_sample)


def _layers(
    order: list[str], sizes: dict[str, int], counted: Iterable[tuple[str, bool, Operation]]
) -> Iterator[LayerWork]:
    found: dict[tuple[str, bool], list[Operation]] = {}
    for layer, backward, operation in counted:
        found.setdefault((layer, backward), []).append(operation)
    for name in order:
        ways = (tuple(found.get((name, backward), ())) for backward in (False, True))
        yield LayerWork(name, sizes[name], *ways)


class _Counter(TorchDispatchMode):
    """Note each operation with its layer.

    In forward a layer lasts until the next one begins, as in lab.measure.layers. Autograd numbers
    its nodes as forward creates them, so in backward a node's number tells its layer.
    """

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self._stack = ExitStack()
        self._layers = layers
        self._starts: list[int] = []
        self.called: list[str] = []
        self.counted: list[Counted] = []
        self._tasks: list[int] = []  # which backward each is part of

    def __enter__(self) -> _Counter:
        for name, module in self._layers.items():
            hook = module.register_forward_pre_hook(lambda *_, name=name: self._begin(name))
            self._stack.callback(hook.remove)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()
        # Backward computes again with gradients on, in an activation checkpoint, and else without;
        # a backward that is to be differentiated itself does all with them, and nothing again.
        every = list(zip(self.counted, self._tasks, strict=True))
        plain = {task for (place, *_), task in every if not place[3]}
        self.counted = [
            ((*place[:3], place[3] and task in plain), flops, num_bytes)
            for (place, flops, num_bytes), task in every
        ]

    def _begin(self, name: str) -> None:
        if torch._C._current_autograd_node() is not None:
            return  # computed again
        self._starts.append(torch.autograd._get_sequence_nr())
        self.called.append(name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.is_view:
            return out
        node = torch._C._current_autograd_node()
        flops = operations_of(func._overloadpacket, args, kwargs, out)
        tensors = (each for each in tree_leaves((args, kwargs, out)) if isinstance(each, Tensor))
        num_bytes = sum(math.prod(each.shape) * each.itemsize for each in tensors)
        again = node is not None and torch.is_grad_enabled()
        self._tasks.append(torch._C._current_graph_task_id())  # pyright: ignore[reportPrivateUsage]
        place = self._layer(node), node is not None, func._overloadpacket.__name__, again
        self.counted.append((place, flops, num_bytes))
        return out

    def _layer(self, node: Any) -> str:
        """Return the layer that an operation belongs to; `node` is None in forward."""
        if not self.called:
            return next(iter(self._layers))
        number = LAST if node is None else node._sequence_nr()
        if node is not None and number >= LAST:
            return self.counted[-1][0][0]
        return self.called[max(0, bisect_right(self._starts, number) - 1)]

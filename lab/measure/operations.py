"""Count the operations of a model's forward and backward, without computing them."""

from __future__ import annotations

import copy
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lab.measure.layers import in_order, layers_of, sizes_of
from lab.model.work import Counts, LayerWork, Line, Operation, Work

# Two batches give each count's fixed part; one sample is too few for BatchNorm at 1x1 px.
FEWER, MORE = 2, 4
META = torch.device("meta")
LAST = 2**63  # nodes that accumulate gradients have the largest number there is

IMAGENET: dict[str, Any] = {"input_shape": (3, 224, 224), "output_size": 1000}
LAYERS: dict[type[nn.Module], str] = {nn.Conv2d: "conv", nn.Linear: "fc"}

Loss = Callable[[Tensor, Tensor], Tensor]
Place = tuple[str, bool, str, bool]  # layer, in backward, operation, computed again
Counted = tuple[Place, float, float]  # and operations, and bytes
NAMESPACES = ("aten", "prim", "prims")
# Products by the names that torch gives them; one without a formula must not count as nothing.
PRODUCT = re.compile(
    r"\w*(mm|mv|dot)(_v2|_for_cpu)?|\w*conv(?!ert)\w*|\w*rnn\w*|\w*attention\w*"
    r"|_transformer_encoder_layer_fwd|_trilinear|_euclidean_dist"
)
KINDS = ("efficient_attention", "flash_attention", "cudnn_attention", "flash_attention_for_cpu")
State = Tensor | tuple[Tensor, Tensor]
PARAMETERS = ("weight_ih", "bias_ih", "weight_hh", "bias_hh", "weight_hr")


def count(
    model: nn.Module,
    input_shape: tuple[int, ...],
    input_dtype: torch.dtype,
    target: Tensor,
    loss: Loss,
    may_compute: bool = True,
) -> Work:
    """Count one training step's forward and backward; see lab.measure.operations.

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


def counts_of(make_model: Callable[..., nn.Module]) -> Counts:
    """Count a model for ImageNet; fully connected layers are nn.Linear.

    Args:
        make_model: called with input_shape and output_size. Nothing is allocated or computed.

    Raises:
        Uncountable: see `count`.
    """
    with META:
        model, label = make_model(**IMAGENET), torch.empty(())
    work = count(model, IMAGENET["input_shape"], torch.float32, label, lambda y, _: y.sum())
    forward = {layer.name: layer.forward_flops_per_sample for layer in work.layers}
    layers = [(name, layer) for name, layer in layers_of(model).items() if type(layer) in LAYERS]
    operations = {
        f"{LAYERS[type(layer)]}{number}": int(forward[name])
        for number, (name, layer) in enumerate(layers, start=1)
    }
    whole, connected = (
        sum(tensor.numel() for module in modules for tensor in module.parameters())
        for modules in ([model], [layer for _, layer in layers if isinstance(layer, nn.Linear)])
    )
    return Counts(whole, connected, operations)


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
            with _LayerCounter(model, layers) as counter:
                loss(model(inputs), targets).backward()
            counts.append(counter.counted)
            order = in_order(counter.called, layers)
    if [place for place, *_ in counts[0]] != [place for place, *_ in counts[1]]:
        raise Uncountable("its operations depend on the batch size")
    fused = {name for name, module in layers.items() if isinstance(module, nn.RNNBase)}
    found: dict[tuple[str, bool], list[Operation]] = {}
    for ((layer, backward, name, again), *few), (_, *many) in zip(*counts, strict=True):
        flops, num_bytes = map(_line, few, many)
        if layer not in fused or flops.per_sample:
            operation = Operation(name, flops, num_bytes, again)
            found.setdefault((layer, backward), []).append(operation)
    sizes = sizes_of(layers)
    works = (
        LayerWork(name, sizes[name], *(tuple(found.get((name, way), ())) for way in (False, True)))
        for name in order
    )
    return Work(tuple(works), math.prod(input_shape) * input_dtype.itemsize)


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


def _line(at_fewer: float, at_more: float) -> Line:
    per_sample = (at_more - at_fewer) / (MORE - FEWER)
    return Line(at_fewer - FEWER * per_sample, per_sample)


class _LayerCounter(TorchDispatchMode):
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

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see lab.simulate.recorded.Passes

    def __enter__(self) -> _LayerCounter:
        for name, module in self._layers.items():
            begin = partial(self._begin, name)
            self._stack.enter_context(module.register_forward_pre_hook(begin))
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

    def _begin(self, name: str, *_: Any) -> None:
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


class Uncountable(Exception):
    """A model's operations cannot be counted; the message says why."""


def operations_of(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """Return the operations of a call: a multiply-add is two, one of complex numbers eight.

    Only matrix products, convolutions and attention count. Attention counts whole, also where it
    is masked; a convolution also where its filter meets padding.

    Args:
        packet: the called operation, without its overload, such as torch.ops.aten.mm.
        out: what it returned.

    Raises:
        Uncountable: it has no formula, and is a product or not one of torch's.
    """
    name = packet.__name__.removesuffix("_")  # in place, as addmm_
    namespace = packet._qualified_op_name.split("::")[0]
    not_in_place = getattr(torch.ops.aten, name, None) if namespace == "aten" else None
    if namespace == "aten" and name in FORMULAS:
        operations = FORMULAS[name](*args, **kwargs)
    elif formula := flop_registry.get(packet) or flop_registry.get(not_in_place):
        operations = formula(*args, **kwargs, out_val=out)
    elif namespace in NAMESPACES and not PRODUCT.fullmatch(name):
        return 0
    else:
        raise Uncountable(
            f"{namespace}.{packet.__name__} has no formula; register one with "
            "torch.utils.flop_counter"
        )
    tensors = (each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
    return operations * (4 if any(each.is_complex() for each in tensors) else 1)


def _product(matrix: Tensor, _vector: Tensor, **_: Any) -> float:
    return 2 * matrix.numel()


def _grouped(left: Tensor, right: Tensor, *_: Any, **__: Any) -> float:
    """Count a product for each group; a matrix that has no dimension of groups is divided."""
    groups = len(left) if left.ndim == right.ndim == 3 else 1
    return 2 * groups * math.prod(left.shape[-2:]) * right.shape[-1]


def _along_time(inputs: Tensor, weight: Tensor, _bias: Tensor, pad: int = 0) -> float:
    """Count a convolution of [time, batch, channels] with [kernel, channels, filters]."""
    steps = len(inputs) + 2 * pad - len(weight) + 1
    return 2 * steps * inputs.shape[1] * weight.numel()


def _convolution_backward(
    grad: Tensor,
    inputs: Tensor,
    weight: Tensor,
    _bias: Any,
    _stride: Any,
    _padding: Any,
    _dilation: Any,
    transposed: bool,
    _output_padding: Any,
    _groups: int,
    wanted: Sequence[bool],
) -> float:
    """Count as much as forward for each gradient that is `wanted`: of inputs, weight (and bias).

    In forward each weight meets each pixel of the output once, or of the inputs if transposed.
    """
    pixels = (inputs if transposed else grad).shape[2:]
    return 2 * len(inputs) * math.prod(pixels) * weight.numel() * sum(wanted[:2])


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> float:
    """Count both products of attention over [batch, heads, tokens, width]."""
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    return 2 * pairs * (query.shape[-1] + value.shape[-1])


FORMULAS: dict[str, Callable[..., float]] = {
    **dict.fromkeys(("mv", "dot", "vdot"), _product),
    "addmv": lambda _sum, matrix, vector, **_: _product(matrix, vector),
    "addbmm": lambda _sum, left, right, **_: 2 * left.numel() * right.shape[-1],
    "_grouped_mm": _grouped,
    # A product of [..., n, width] and [..., m, width], from which distances are made.
    "_euclidean_dist": lambda left, right: 2 * left.numel() * right.shape[-2],
    "conv_tbc": _along_time,
    "convolution_backward": _convolution_backward,
    **{f"_scaled_dot_product_{kind}": _attention for kind in KINDS},
    **{
        f"_scaled_dot_product_{kind}_backward": lambda _grad, *rest, **_: 2 * _attention(*rest)
        for kind in KINDS
    },
}


def count_at_once(model: nn.Module) -> None:
    """Replace forward of every LSTM, GRU and RNN in `model` by the same products without a loop.

    Step by step, a sequence takes as many operations as it has steps, and seconds to count; fused
    kernels have no formula. The outputs are meaningless and have the shapes of the layer's own;
    element-wise operations among them do not count, as a fused kernel's move no memory.
    """
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.forward = MethodType(_at_once, module)


def _at_once(layer: nn.RNNBase, inputs: Tensor, _state: Any = None) -> tuple[Tensor, State]:
    """Return outputs [..., directions * width] and the state [layers * directions, ..., width]."""
    width = layer.proj_size or layer.hidden_size
    names = ("", "_reverse") if layer.bidirectional else ("",)
    for number in range(layer.num_layers):
        outputs = [_direction(layer, inputs, f"_l{number}{name}", width) for name in names]
        inputs = torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0]
    time = 1 if layer.batch_first and inputs.dim() == 3 else 0
    last = inputs.select(time, -1).unflatten(-1, (len(names), width)).movedim(-2, 0)
    state = torch.cat([last] * layer.num_layers)
    if isinstance(layer, nn.LSTM):
        return inputs, (state, state.new_zeros(*state.shape[:-1], layer.hidden_size))
    return inputs, state


def _direction(layer: nn.RNNBase, inputs: Tensor, suffix: str, width: int) -> Tensor:
    weight: dict[str, Any] = {name: getattr(layer, f"{name}{suffix}", None) for name in PARAMETERS}
    gates = linear(inputs, weight["weight_ih"], weight["bias_ih"])
    gates = gates + linear(gates[..., :width], weight["weight_hh"], weight["bias_hh"])
    outputs = gates[..., : layer.hidden_size].tanh()
    return linear(outputs, weight["weight_hr"]) if layer.proj_size else outputs

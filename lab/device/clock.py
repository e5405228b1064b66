"""Clocks of a model's modules, and of the parts of a layer's backward apart from the model."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from lab.benchmarks.harness import seconds_of
from lab.measure.clock import Mark, PassMarks, mark, seconds
from lab.measure.layers import in_order, layers_of, marked_layers, owners_of, sizes_of, spin_stream

WAYS = ("forward", "backward")
OUTSIDE = ""  # no module: its time is not counted
ACCUMULATE = "AccumulateGrad"  # torch's node that stores a parameter's gradient
NUM_MODULES, COST_ROUNDS = 200, 21  # on which the clock's own cost is measured
ROUNDS, BIAS_ROUNDS = 5, 15  # of a layer apart from the model
TOGETHER = 1.3  # both alone take so much longer than both at once: one kernel computes them


@dataclass
class ModulePass:
    """Spans of one forward and backward, each with the module that worked.

    Attributes:
        forward, backward: name, begin and end.
        creators: modules that created nodes of the graph.
    """

    forward: list[tuple[str, Mark, Mark]] = field(default_factory=list)
    backward: list[tuple[str, Mark, Mark]] = field(default_factory=list)
    creators: set[str] = field(default_factory=set)

    def seconds(self, span_s: float = 0.0) -> dict[str, tuple[float, float]]:
        """Return each module's seconds of forward and backward.

        Args:
            span_s: what clocks add to each span of forward.
        """
        totals = defaultdict[str, list[float]](lambda: [0.0, 0.0])
        for way, (spans, added_s) in enumerate(((self.forward, span_s), (self.backward, 0.0))):
            for name, begin, end in spans:
                totals[name][way] += seconds(begin, end) - added_s
        return {name: (forward, backward) for name, (forward, backward) in totals.items()}


class ModuleClock:
    """A clock of all modules of a model, in the passes inside its context.

    A module's own forward is its call without the calls of modules inside it, so functions between
    them, such as a residual's sum, belong to the module that calls them. Its backward is what the
    nodes compute that this forward added to the graph. What the engine does between nodes belongs
    to nobody, and neither does what the clock does between spans of forward.

    Each module's forward is replaced while the context lasts: torch's hooks of modules would add
    several microseconds to each span.

    Args:
        model: not compiled; its modules are called, each by one thread.
        device: see lab.measure.clock.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self.passes: list[ModulePass] = []
        self._timed: list[tuple[nn.Module, Callable[..., Tensor] | None]] = []
        self._callers: list[str] = [OUTSIDE]
        self._since: Mark = 0.0
        self._made: list[tuple[str, Node]] = []
        self._seen: set[Node] = set()

    def __enter__(self) -> Self:
        self.passes.append(ModulePass())
        for path, module in self._model.named_modules():
            self._timed.append((module, vars(module).get("forward")))
            module.forward = self.around(path or "model", module.forward)
        return self

    def __exit__(self, *_: object) -> None:
        for module, own in self._timed:
            del module.forward
            if own is not None:  # a transform replaced it before
                module.forward = own
        self._timed.clear()
        self._callers = [OUTSIDE]
        self._made.clear()
        self._seen.clear()

    def around(self, name: str, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap a function so that it counts as a module, such as the loss after the model."""

        def timed(*args: Any, **kwargs: Any) -> Tensor:
            if not self._timed:
                return call(*args, **kwargs)
            self._close_span(mark(self._device))
            self._note(args)
            self._callers.append(name)
            self._since = mark(self._device)
            result = call(*args, **kwargs)
            self._close_span(mark(self._device))
            self._note(result)
            self._callers.pop()
            if self._callers[-1] == OUTSIDE:
                self._claim_nodes()
            self._since = mark(self._device)
            return result

        return timed

    def _close_span(self, end: Mark) -> None:
        if self._callers[-1] != OUTSIDE:
            self.passes[-1].forward.append((self._callers[-1], self._since, end))

    def _note(self, tensors: Any) -> None:
        """Note that nodes which lead to these tensors, and have no owner yet, are the caller's."""
        made = (each.grad_fn for each in tree_leaves(tensors) if isinstance(each, Tensor))
        self._made += [(self._callers[-1], node) for node in made if node is not None]

    def _claim_nodes(self) -> None:
        """Watch the nodes of all modules; only once the model ends, to disturb it less."""
        for owner, node in self._made:
            found = [node]
            while found:
                node = found.pop()
                if node in self._seen or node.name().endswith(ACCUMULATE):
                    continue
                self._seen.add(node)
                if owner != OUTSIDE:
                    self._watch(node, owner)
                found += [before for before, _ in node.next_functions if before is not None]
        self._made.clear()

    def _watch(self, node: Node, owner: str) -> None:
        one, began = self.passes[-1], list[Mark]()
        one.creators.add(owner)

        def begin(_: Any) -> None:
            began.append(mark(self._device))

        def end(_inputs: Any, _outputs: Any) -> None:
            one.backward.append((owner, began.pop(), mark(self._device)))

        node.register_prehook(begin)
        node.register_hook(end)


class _Negate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.neg()  # one node in the graph


def clock_cost() -> dict[str, float]:
    """Run a chain of small modules with and without clocks in turns; medians decide.

    On a GPU clocks are queued with the kernels, so what they cost the host need not show there.

    Returns:
        Seconds that clocks add on a CPU: span_s, to each span of forward; node_s, to backward,
        inside and outside its spans, for each node of the graph.
    """

    def forward_and_backward_s() -> tuple[float, float]:
        x = torch.zeros(1, requires_grad=True)
        began = time.perf_counter()
        y = model(x)
        between = time.perf_counter()
        y.backward()
        return between - began, time.perf_counter() - between

    model = nn.Sequential(*(_Negate() for _ in range(NUM_MODULES)))
    clock, costs = ModuleClock(model, torch.device("cpu")), list[tuple[float, float]]()
    for _ in range(COST_ROUNDS):
        forward_s, backward_s = forward_and_backward_s()
        with clock:
            _, clocked_s = forward_and_backward_s()
        spans = clock.passes[-1].forward
        in_spans = sum(seconds(begin, end) for _, begin, end in spans)
        costs.append(((in_spans - forward_s) / len(spans), (clocked_s - backward_s) / NUM_MODULES))
    span_s, node_s = np.maximum(0.0, np.median(costs, axis=0)).tolist()
    return {"span_s": span_s, "node_s": node_s}


@dataclass(frozen=True)
class Call:
    """A call of a layer in a step.

    Attributes:
        needs_data: the step needs the gradient of its input.
        autocast: dtype in which the step computes products; None: that of its tensors.
    """

    layer: nn.Module
    inputs: Tensor
    needs_data: bool
    autocast: torch.dtype | None = None

    def again(self, inputs: Tensor) -> Any:
        """Call the layer as the step does."""
        device, enabled = inputs.device.type, self.autocast is not None
        with torch.autocast(device, dtype=self.autocast, enabled=enabled):
            return self.layer(inputs)


@contextmanager
def noting_calls(model: nn.Module, calls: dict[str, Call]) -> Iterator[None]:
    """Note the last call of each layer of one input that has weights, and no layers inside."""

    def note(name: str, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if len(inputs) == 1 and isinstance(inputs[0], Tensor):
            (tensor,), device = inputs, inputs[0].device.type
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            calls[name] = Call(layer, tensor.detach(), tensor.requires_grad, dtype)

    with ExitStack() as stack:
        for name, module in model.named_modules():
            has_weights = any(weight.requires_grad for weight in module.parameters())
            if has_weights and not any(True for _ in module.children()):
                hook = module.register_forward_pre_hook(partial(note, name or "model"))
                stack.enter_context(hook)
        yield


def share_of_data(call: Call) -> float | None:
    """Return backward data's share of a layer's backward; None: they cannot be told apart.

    Both gradients are computed alone and together, in turns; medians decide.
    """
    if not call.needs_data:
        return 0.0
    if not call.inputs.is_floating_point():
        return None
    inputs = call.inputs.detach().clone().requires_grad_()
    weights = [weight for weight in call.layer.parameters() if weight.requires_grad]
    with torch.enable_grad():
        output = call.again(inputs)
    if not isinstance(output, Tensor):
        return None
    gradient = torch.randn_like(output)
    wanted: list[list[Tensor]] = [[inputs], [*weights], [inputs, *weights]]
    calls = [partial(torch.autograd.grad, output, of, gradient, retain_graph=True) for of in wanted]
    times = _in_turns(calls, ROUNDS, call.inputs.device)
    data, of_weights, both = np.median(times, axis=0)
    if data + of_weights > TOGETHER * both:
        return None
    return float(data / (data + of_weights))


def seconds_of_bias(call: Call) -> NDArray[np.float64] | None:
    """Return what a product's bias takes as operations of their own; None: it has no bias.

    Libraries compute both with the product, so its time does not show them.

    Returns:
        Seconds of adding it to the output in place, and of summing the output's gradient, shape
        (BIAS_ROUNDS, 2).
    """
    layer = call.layer
    weight, bias = (getattr(layer, name, None) for name in ("weight", "bias"))
    if weight is None or weight.dim() < 2 or not isinstance(bias, Tensor):
        return None
    with torch.no_grad():
        output = call.again(call.inputs)
        channel = output.dim() - 1 if isinstance(layer, nn.Linear) else 1
        others = [dim for dim in range(output.dim()) if dim != channel]
        added = bias.to(output.dtype).view(
            [1 if dim in others else -1 for dim in range(output.dim())]
        )
        calls = [partial(output.add_, added), partial(torch.sum, output, others)]
        return _in_turns(calls, BIAS_ROUNDS, call.inputs.device)


def _in_turns(
    calls: Sequence[Callable[[], object]], rounds: int, device: torch.device
) -> NDArray[np.float64]:
    """Return the seconds of each call, shape (rounds, calls), after a round that prepares."""
    times = [[seconds_of(call, device) for call in calls] for _ in range(rounds + 1)]
    return np.array(times[1:])


class LayerClock:
    """A clock for each layer, that is each module with its own parameters, in every pass.

    All times add up to the whole pass (see lab.measure.clock.PassMarks.spans).

    On a GPU the stream is held until the host has queued a whole pass, so a layer lasts as long as
    its kernels.

    It is a context manager: hooks live between `__enter__` and `__exit__`.

    Args:
        model: on its device.
        device: see lab.measure.clock.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._modules = layers_of(model)
        self.parameters = sizes_of(self._modules)
        self._passes: list[PassMarks] = []
        self._open = ExitStack()
        # Host times: begin of a pass, its last gradient, and the shortest pass.
        self._begun_s, self._noted_s, self._launch_s = 0.0, math.inf, math.inf

    def __enter__(self) -> Self:
        self._open.enter_context(self._model.register_forward_pre_hook(self._begin))
        self._open.enter_context(marked_layers(self._model, self._device, lambda: self._passes))
        for parameter in owners_of(self._modules):
            self._open.enter_context(parameter.register_post_accumulate_grad_hook(self._note))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def times_ms(self, warmup: int) -> tuple[list[str], NDArray[np.float64]]:
        """Return the layers in the order of forward, and how long each took in every pass.

        Args:
            warmup: number of first passes to leave out.

        Returns:
            names, and milliseconds [passes, WAYS, layers].
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        order = in_order((name for name, _ in self._passes[0].forward), self._modules)
        position = {name: index for index, name in enumerate(order)}
        times = np.zeros((len(self._passes) - warmup, len(WAYS), len(order)))
        for number, one in enumerate(self._passes[warmup:]):
            for way, name, begin, end in one.spans():
                times[number, WAYS.index(way), position[name]] += 1000 * seconds(begin, end)
        return order, times

    def _begin(self, *_: Any) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # or the host runs further ahead at each pass
            self._launch_s = min(self._launch_s, self._noted_s - self._begun_s)
            spin_stream(self._launch_s)
        self._begun_s = time.perf_counter()

    def _note(self, _parameter: torch.Tensor) -> None:
        self._noted_s = time.perf_counter()

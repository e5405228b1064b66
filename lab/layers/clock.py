"""Module clock: time of every module's own work in forward and backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from lab.measure.clock import Mark, mark, seconds

OUTSIDE = ""  # no module: its time is not counted
ACCUMULATE = "AccumulateGrad"  # torch's node that stores a parameter's gradient


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
        made = (each.grad_fn for each in _tensors(tensors))
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


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, (tuple, list)):
        return [tensor for value in values for tensor in _tensors(value)]
    return []

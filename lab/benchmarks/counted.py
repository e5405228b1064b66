"""The program that is counted: each layer of each model, forward and backward, between marks.

lab.benchmarks.counters runs it, under callgrind and once more without it. It prints JSON: for
each count its layer, its pass and its seconds.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from lab.benchmarks.filled import VALUE, filled
from lab.problem.build import blueprint
from lab.settings.config import load

Call = Callable[[], object]
EMPTY = ""  # the name of a call that does nothing


def main(arguments: list[str]) -> None:
    """Count all layers for each JSON list of settings.

    Args:
        arguments: the library of callgrind's marks, and the lists.
    """
    torch.set_num_threads(1)
    library, *variants = arguments
    count = partial(counted, ctypes.CDLL(library))
    count(int)  # Python warms up too
    found = [{"variant": -1, "layer": EMPTY, "kind": "", "pass": "", "seconds": count(int)}]
    for number, text in enumerate(variants):
        config = load(json.loads(text))
        for row in _model(config, count):
            found.append({"variant": number, **row})
    print(json.dumps(found))


def counted(marks: ctypes.CDLL, call: Call) -> float:
    """Call between callgrind's marks; return the seconds of all that."""
    began = time.perf_counter()
    marks.begin()
    result = call()
    marks.end()
    del result  # to free it is no part of the call
    return time.perf_counter() - began


def _model(config: DictConfig, count: Callable[[Call], float]) -> Iterator[dict[str, Any]]:
    model, inputs = filled(blueprint(config), config.batch_size)
    # All are prepared first: at each mark valgrind translates anew whatever runs next.
    prepared = [
        (name, layer, _passes(layer, given)) for name, layer, given in _calls(model, inputs)
    ]
    for name, layer, passes in prepared:
        about = {"layer": name, "kind": type(layer).__name__}
        for label, call in passes.items():
            yield {**about, "pass": label, "seconds": count(call)}


def _calls(model: nn.Module, inputs: Tensor) -> list[tuple[str, nn.Module, Tensor]]:
    """Run the model; return its innermost modules of one input in the order of their calls.

    This is also each layer's warm-up: oneDNN makes its kernels at a shape's first call.
    """
    calls: list[tuple[str, nn.Module, Tensor]] = []

    def noting(name: str) -> Callable[[nn.Module, Any], None]:
        def note(layer: nn.Module, given: Any) -> None:
            if len(given) == 1 and isinstance(given[0], Tensor):
                calls.append((name, layer, given[0].detach().clone()))

        return note

    for name, module in model.named_modules():
        if not any(True for _ in module.children()):
            module.register_forward_pre_hook(noting(name))
    model(inputs)
    for module in model.modules():
        module._forward_pre_hooks.clear()
    return list({name: (name, layer, given) for name, layer, given in calls}.values())


def _passes(layer: nn.Module, given: Tensor) -> dict[str, Call]:
    """Return a layer's passes by name, warmed up."""
    inputs = given.requires_grad_() if given.is_floating_point() else given
    entering = inputs.clone()  # a ReLU may work in place; backward of a copy is free
    passes: dict[str, Call] = {"forward": lambda: layer(entering)}
    output = layer(inputs.clone())
    if isinstance(output, Tensor) and output.requires_grad:
        weights = [weight for weight in layer.parameters() if weight.requires_grad]
        wanted = [each for each in (inputs, *weights) if each.requires_grad]
        gradient = torch.full_like(output, VALUE)
        passes["backward"] = lambda: torch.autograd.grad(
            output, wanted, gradient, retain_graph=True
        )
        passes["backward"]()
    return passes


if __name__ == "__main__":
    main(sys.argv[1:])

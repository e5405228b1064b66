"""Time of a step by layer, forward and backward, and the rest of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig
from torch import nn

from lab.benchmarks import interleave
from lab.benchmarks.compiling import compiling_each
from lab.benchmarks.request import Request
from lab.distributed import world as worlds
from lab.distributed.world import World
from lab.layers.clock import ModuleClock
from lab.layers.clock_cost import ClockCost, clock_cost
from lab.layers.passes import Call, noting_calls, seconds_of_bias, share_of_data
from lab.measure.spans import PHASES
from lab.measure.turns import order
from lab.settings.names import class_name
from lab.training.assemble import Assembly, assembled, join
from lab.training.identity import surroundings

WARMUP = 4
LOSS = "(loss)"
PLAIN, CLOCKED, WITHOUT = "plain", "clocked", "without input's gradient"


@dataclass
class Candidate:
    """One set of settings, and the numbers of its steps of each kind.

    Attributes:
        steps: numbers of the trainer's steps by kind.
        input_grad: the model's input needs a gradient, but in steps WITHOUT.
        calls: of layers with weights, in a step of the warm-up.
    """

    label: str
    part: Assembly
    step: Callable[[], object]
    clock: ModuleClock
    input_grad: bool
    compiled: bool
    num_steps: int = 0
    steps: dict[str, list[int]] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)

    @property
    def kinds(self) -> list[str]:
        """The kinds of steps that take turns."""
        kinds = [PLAIN] if self.compiled else [PLAIN, CLOCKED]
        return [*kinds, WITHOUT] if self.input_grad else kinds


def measure(request: Request) -> dict[str, Any]:
    """Measure all variants in turns, on one rank.

    Raises:
        ConfigError: a setting does not fit the data and devices at hand.
    """
    configs = [variant.config for variant in request.variants]
    rounds, input_grad = request.own["rounds"], request.own["input_grad"]
    for config in configs:
        # As lab.profile_layers: a rate of 0 keeps the weights.
        config.measure, config.steps, config.optim.lr = "breakdown", WARMUP + 3 * rounds, 0.0
    try:
        world = join(configs[0])
        torch.set_num_threads(request.own["threads"])
        with ExitStack() as stack:
            stack.enter_context(compiling_each(configs, 1))
            candidates = [
                _candidate(variant.label, stack.enter_context(assembled(config, world)), input_grad)
                for variant, config in zip(request.variants, configs, strict=True)
            ]
            gc.freeze()  # spans are many objects: without it, clocked steps wait for the collector
            turns = [(one, kind) for one in candidates for kind in one.kinds]
            for number in interleave.progress(range(rounds), 0):
                for index in order(len(turns), number):
                    _take(*turns[index])
            rows = [_row(one, world) for one in candidates]
        return {
            "rows": rows,
            "num_rounds": rounds,
            "input_grad": input_grad,
            "models": [_model_of(config) for config in configs],
            **surroundings(world, *configs),
        }
    finally:
        gc.unfreeze()
        worlds.stop()


def _model_of(config: DictConfig) -> str:
    return class_name(config.model["_target_"])


def _candidate(label: str, part: Assembly, input_grad: bool) -> Candidate:
    trainer = part.trainer
    clock = ModuleClock(trainer.model, trainer.world.device)
    loop = trainer.steps()
    one = Candidate(
        label, part, lambda: next(loop), clock, input_grad, bool(trainer.config.compile)
    )
    if not one.compiled:
        trainer.task.loss = clock.around(LOSS, trainer.task.loss)
    for number in range(WARMUP):
        noting = (
            noting_calls(trainer.model, one.calls) if number == 1 and not one.compiled else None
        )
        with noting or nullcontext():
            _take(one, CLOCKED if number == WARMUP - 1 and not one.compiled else PLAIN)
    one.steps.clear()
    one.clock.passes.clear()
    return one


def _take(one: Candidate, kind: str) -> None:
    """Take one step, and note its number."""
    model = one.part.trainer.model
    wants = one.input_grad and kind != WITHOUT
    hook = model.register_forward_pre_hook(_with_gradient) if wants else None
    with one.clock if kind == CLOCKED else nullcontext():
        one.step()
    if hook:
        hook.remove()
    one.steps.setdefault(kind, []).append(one.num_steps)
    one.num_steps += 1


def _with_gradient(_model: nn.Module, inputs: tuple[Any, ...]) -> None:
    if inputs[0].is_floating_point():
        inputs[0].requires_grad_()


def _row(one: Candidate, world: World) -> dict[str, Any]:
    trainer = one.part.trainer
    trainer.clock.pause()
    all_s, phases_s = trainer.clock.step_seconds(), trainer.clock.phase_seconds()
    step_s = {kind: all_s[numbers] for kind, numbers in one.steps.items()}
    phases = dict(zip(PHASES, phases_s[one.steps[PLAIN]].T, strict=True))
    row: dict[str, Any] = {
        "name": one.label,
        "batch_size": trainer.batch_size,
        "compiled": one.compiled,
        "step_s": interleave.middle(step_s[PLAIN]),
        "phases_s": {name: interleave.middle(np.nan_to_num(s)) for name, s in phases.items()},
        "input_grad_s": None,
        "layers": [],
    }
    if WITHOUT in step_s:
        differ = interleave.interval(lambda a, b: a - b, step_s[PLAIN], step_s[WITHOUT])
        row["input_grad_s"] = differ
    return row if one.compiled else row | _layers(one, world, step_s, phases, phases_s)


def _layers(
    one: Candidate,
    world: World,
    step_s: dict[str, NDArray[np.float64]],
    phases: Mapping[Any, NDArray[np.float64]],
    all_phases_s: NDArray[np.float64],
) -> dict[str, Any]:
    """Return the modules' times, the rest, and how their sum compares with a plain step."""
    cost = clock_cost() if world.device.type == "cpu" else ClockCost(0.0, 0.0)
    passes = [each.seconds(cost.span_s) for each in one.clock.passes]
    hooks_s = np.array([cost.node_s * len(each.backward) for each in one.clock.passes])
    names = list(dict.fromkeys(name for each in passes for name in each))
    times = np.array([[each.get(name, (0.0, 0.0)) for name in names] for each in passes])
    creators = set[str]().union(*(each.creators for each in one.clock.passes))
    working = np.array([name in creators for name in names])
    clocked = all_phases_s[one.steps[CLOCKED]]
    backward_s = clocked[:, PHASES.index("backward")]
    rest = {
        "around layers": times[:, ~working].sum(axis=(1, 2)),
        "autograd": backward_s - times[:, working, 1].sum(axis=1) - hooks_s,
        "optimizer": np.nan_to_num(phases["update"]),
        "data": np.nan_to_num(phases["data"]),
    }
    other = step_s[PLAIN] - np.nansum(np.array(list(phases.values())), axis=0)
    rest["host"] = other + np.nan_to_num(phases["exchange"])
    total = times[:, working].sum(axis=(1, 2)) + sum(rest.values())
    modules = dict(one.part.trainer.model.named_modules())
    return {
        "layers": list(_modules(one, world, modules, names, times, working)),
        "clock_cost_s": asdict(cost),
        "rest_s": {name: interleave.middle(values) for name, values in rest.items()},
        "sum_s": interleave.middle(total),
        "sum_ratio": interleave.ratio(total, step_s[PLAIN]),
    }


def _modules(
    one: Candidate,
    world: World,
    modules: dict[str, nn.Module],
    names: list[str],
    times: NDArray[np.float64],
    working: NDArray[np.bool_],
) -> Iterator[dict[str, Any]]:
    synchronize = partial(_synchronize, world.device)
    for place, name in enumerate(names):
        if not working[place]:
            continue
        module = modules.get(name) if name != "model" else one.part.trainer.model
        call = one.calls.get(name)
        yield {
            "name": name,
            "kind": type(module).__name__ if module else "loss",
            "forward_s": interleave.interval(lambda s: s, times[:, place, 0]),
            "backward_s": interleave.interval(lambda s: s, times[:, place, 1]),
            "data_share": share_of_data(call, synchronize) if call else None,
            "bias_s": _bias_seconds(call, synchronize) if call else None,
            "has_weights": call is not None,
        }


def _bias_seconds(call: Call, synchronize: Callable[[], None]) -> dict[str, Any] | None:
    times_s = seconds_of_bias(call, synchronize)
    if times_s is None:
        return None
    ways = zip(("forward", "backward"), times_s.T, strict=True)
    return {way: interleave.interval(lambda s: s, values) for way, values in ways}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

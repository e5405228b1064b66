"""Time of a step by layer, forward and backward, and the rest of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import nn

from lab.benchmarks import interleave
from lab.benchmarks.present import about, ranged
from lab.benchmarks.request import Request
from lab.device.alone import compiling_each, medians_of, on_one_rank, span
from lab.device.clock import (
    Call,
    ClockCost,
    ModuleClock,
    clock_cost,
    noting_calls,
    seconds_of_bias,
    share_of_data,
)
from lab.draw.chart import GREY, Chart
from lab.draw.looks import COLOURS, GREEN, ORANGE, SKY, VERMILLION
from lab.draw.plots import bars
from lab.measure.spans import PHASES
from lab.settings.names import class_name
from lab.training.assemble import Assembly, assembled
from lab.training.recording import surroundings

WARMUP = 4
LOSS = "(loss)"
PLAIN, CLOCKED, WITHOUT = "plain", "clocked", "without input's gradient"
PASSES: tuple[str, ...] = ("forward", "backward data", "backward weights", "backward, both at once")
CONVOLUTIONS = ("Conv1d", "Conv2d", "Conv3d")
MS = 1e3
NAMED_KINDS = 4
OTHERS, REST = "other layers", "rest of the step"
MOST_BARS = 60  # layers; of more, kinds are drawn
HEADER = ["", "", *(f"{name} (ms)" for name in PASSES), "of the step %"]

Row = Mapping[str, Any]


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
    with ExitStack() as stack:
        world = stack.enter_context(on_one_rank(configs[0], request.own["threads"]))
        stack.enter_context(compiling_each(configs, 1))
        candidates = [
            _candidate(variant.label, stack.enter_context(assembled(config, world)), input_grad)
            for variant, config in zip(request.variants, configs, strict=True)
        ]
        gc.freeze()  # spans are many objects: without it, clocked steps wait for the collector
        stack.callback(gc.unfreeze)
        taken = [(one, kind) for one in candidates for kind in one.kinds]
        shown = interleave.progress(range(rounds), 0)
        for index, _ in interleave.turns(len(taken), shown):
            _take(*taken[index])
        return {
            "rows": [_row(one) for one in candidates],
            "num_rounds": rounds,
            "input_grad": input_grad,
            "models": [class_name(config.model["_target_"]) for config in configs],
            **surroundings(world, *configs),
        }


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


def _row(one: Candidate) -> dict[str, Any]:
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
    return row if one.compiled else row | _layers(one, step_s[PLAIN], phases, phases_s)


def _layers(
    one: Candidate,
    step_s: NDArray[np.float64],
    phases: Mapping[Any, NDArray[np.float64]],
    all_phases_s: NDArray[np.float64],
) -> dict[str, Any]:
    """Return the modules' times, the rest, and how their sum compares with a plain step."""
    on_cpu = one.part.trainer.world.device.type == "cpu"
    cost = clock_cost() if on_cpu else ClockCost(0.0, 0.0)
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
    other = step_s - np.nansum(np.array(list(phases.values())), axis=0)
    rest["host"] = other + np.nan_to_num(phases["exchange"])
    total = times[:, working].sum(axis=(1, 2)) + sum(rest.values())
    worked = [name for name, works in zip(names, working, strict=True) if works]
    return {
        "layers": list(_modules(one, worked, times[:, working])),
        "clock_cost_s": asdict(cost),
        "rest_s": {name: interleave.middle(values) for name, values in rest.items()},
        "sum_s": interleave.middle(total),
        "sum_ratio": interleave.ratio(total, step_s),
    }


def _modules(
    one: Candidate, names: list[str], times: NDArray[np.float64]
) -> Iterator[dict[str, Any]]:
    """Yield what was measured of each module; times: [passes, names, forward and backward]."""
    modules = dict(one.part.trainer.model.named_modules()) | {"model": one.part.trainer.model}
    for place, name in enumerate(names):
        module, call = modules.get(name), one.calls.get(name)
        bias_s = seconds_of_bias(call) if call else None
        yield {
            "name": name,
            "kind": type(module).__name__ if module else "loss",
            **{f"{way}_s": value for way, value in _both_ways(times[:, place]).items()},
            "data_share": share_of_data(call) if call else None,
            "bias_s": None if bias_s is None else _both_ways(bias_s),
            "has_weights": call is not None,
        }


def _both_ways(times_s: NDArray[np.float64]) -> dict[str, Any]:
    ways = zip(("forward", "backward"), times_s.T, strict=True)
    return {way: interleave.interval(lambda s: s, values) for way, values in ways}


def passes_of(layer: Row) -> dict[str, float]:
    """Divide a measured layer's seconds into PASSES.

    A layer without weights has backward data alone; one whose kernel computes both has them in
    "backward, both at once".
    """
    forward, backward = layer["forward_s"]["median"], layer["backward_s"]["median"]
    share = layer["data_share"] if layer["has_weights"] else 1.0
    if share is None:
        return dict(zip(PASSES, (forward, 0.0, 0.0, backward), strict=True))
    parts = (forward, share * backward, (1 - share) * backward, 0.0)
    return dict(zip(PASSES, parts, strict=True))


def by_kind(layers: Iterable[Row]) -> dict[str, dict[str, float]]:
    """Add up the seconds of all layers of one kind, the slowest kind first."""
    kinds: dict[str, dict[str, float]] = {}
    for layer in layers:
        sums = kinds.setdefault(layer["kind"], dict.fromkeys(PASSES, 0.0))
        for name, value in passes_of(layer).items():
            sums[name] += value
    return dict(sorted(kinds.items(), key=lambda item: -sum(item[1].values())))


def backward_ratio(layers: Iterable[Row], kinds: Container[str]) -> float | None:
    """Divide backward of all layers of some kinds by their forward; None: there are none."""
    chosen = [layer for layer in layers if layer["kind"] in kinds]
    forward, backward = (
        sum(layer[f"{way}_s"]["median"] for layer in chosen) for way in ("forward", "backward")
    )
    return backward / forward if forward else None


def bias_seconds(layers: Iterable[Row]) -> float:
    """Add up what biases take as operations of their own, where they were measured."""
    measured = [each["bias_s"] for each in layers if each.get("bias_s")]
    return sum(one[way]["median"] for one in measured for way in ("forward", "backward"))


def table(result: dict[str, Any]) -> list[list[str]]:
    """List the layers and the rest, or for several sets of settings their kinds."""
    rows = result["rows"]
    lines = [HEADER]
    for row in rows:
        step_s = row["step_s"]["median"]
        if len(rows) > 1:
            lines.append([_label(result, row), *[""] * (len(HEADER) - 1)])
        else:
            lines += [
                _line(each["name"], each["kind"], passes_of(each), step_s) for each in row["layers"]
            ]
        kinds = by_kind(row["layers"])
        lines += [_line("all", kind, passes, step_s) for kind, passes in kinds.items()]
        rest = row["phases_s"] if row["compiled"] else row["rest_s"]
        lines += [_whole(f"({name})", value, step_s) for name, value in rest.items()]
        lines += [_whole("step", row["step_s"], step_s)]
    return lines


def _line(name: str, kind: str, passes: dict[str, float], step_s: float) -> list[str]:
    times = [f"{MS * passes[each]:.3f}" if passes[each] else "-" for each in PASSES]
    return [name, kind, *times, f"{100 * sum(passes.values()) / step_s:.1f}"]


def _whole(name: str, value: dict[str, float], step_s: float) -> list[str]:
    blank = [""] * (len(PASSES) - 1)
    share = f"{100 * value['median'] / step_s:.1f}"
    return [name, "", f"{MS * value['median']:.3f}", *blank, share]


def notes(result: dict[str, Any]) -> list[str]:
    """Compare sums with steps, and explain the columns."""
    several = len(result["rows"]) > 1
    named = [(f"{_label(result, row)}: " if several else "", row) for row in result["rows"]]
    return [
        *(f"{name}{line}" for name, row in named for line in _findings(row)),
        f"medians of {result['num_rounds']} rounds, steps with and without clocks in turns; "
        "[95 % intervals]",
        "a module's own work; backward is divided by the times of both parts measured alone, or "
        "stays whole where one kernel computes both",
    ]


def _findings(row: Row) -> Iterator[str]:
    step_s, layers = row["step_s"]["median"], row["layers"]
    if layers:
        yield (
            f"layers and rest add up to {ranged(row['sum_ratio'])} of a step without clocks on its "
            "modules"
        )
    if ratio := backward_ratio(layers, CONVOLUTIONS):
        kinds = by_kind(layers)
        seconds = sum(sum(kinds.get(kind, {}).values()) for kind in CONVOLUTIONS)
        yield (
            f"convolutions take {100 * seconds / step_s:.3g} % of the step, backward {ratio:.3g} "
            "times as long as forward"
        )
    if biases := bias_seconds(layers):
        yield (
            f"biases take {MS * biases:.3g} ms as operations of their own, "
            f"{100 * biases / step_s:.2g} % of the step; libraries compute them with the products"
        )
    if row["input_grad_s"]:
        yield f"the gradient of the model's input costs {ranged(row['input_grad_s'], MS)} ms"


def chart(result: dict[str, Any]) -> Chart:
    """Draw a bar for each layer, or for each set of settings."""
    rows = result["rows"]
    if len(rows) > 1 or not rows[0]["layers"]:
        return _chart_of_kinds(result)
    (row,), step_s = rows, rows[0]["step_s"]["median"]
    layers = {f"{each['name']} {each['kind']}": passes_of(each) for each in row["layers"]}
    if len(layers) > MOST_BARS:
        layers = by_kind(row["layers"])
    used = [name for name in PASSES if any(passes[name] for passes in layers.values())]
    data = pd.DataFrame(
        {
            "name": layer,
            "part": name,
            "value": MS * passes[name],
            "text": f"{100 * sum(passes.values()) / step_s:.0f} %" if name == used[0] else "",
        }
        for layer, passes in layers.items()
        for name in used
    )
    colours = dict(zip(PASSES, (SKY, ORANGE, GREEN, VERMILLION), strict=True))
    body, width = bars(data, "ms per step", {name: colours[name] for name in used})
    kind, passes = next(iter(by_kind(row["layers"]).items()))
    message = (
        f"{kind} takes {100 * sum(passes.values()) / step_s:.0f} % of a step of "
        f"{result['models'][0]} at a batch of {row['batch_size']}"
    )
    whole = f"step of {MS * step_s:.4g} ms, of which bars end with their share"
    return Chart(
        "layers", message, [f"{medians_of(result)} · {whole}", *about(result)], body, width
    )


def _chart_of_kinds(result: dict[str, Any]) -> Chart:
    rows, models = result["rows"], list(dict.fromkeys(result["models"]))
    largest = list(by_kind(layer for row in rows for layer in row["layers"]))
    # Models differ in time by orders of magnitude, so they are compared by shares.
    one_model = len(models) == 1
    steps = [row["step_s"]["median"] for row in rows]
    units = [MS if one_model else 100 / step_s for step_s in steps]
    parts = [_parts(row, largest[:NAMED_KINDS]) for row in rows]
    names = sorted(dict.fromkeys(name for each in parts for name in each), key=_is_rest)
    data = pd.DataFrame(
        {
            "name": _label(result, row),
            "part": name,
            "value": unit * each.get(name, 0.0),
            "mark": unit * step_s if name == names[0] else None,
        }
        for row, each, unit, step_s in zip(rows, parts, units, steps, strict=True)
        for name in names
    )
    colours = dict(zip(names, COLOURS, strict=False)) | {REST: GREY}
    title = "ms per step" if one_model else "% of a step without clocks"
    body, width = bars(data, title, colours, marks="step, no clocks")
    subject = f"a step of {models[0]}" if one_model else "a step of each model"
    message = f"Time of {subject} by kind of layer"
    if largest:
        shares = [100 * each.get(largest[0], 0.0) / s for each, s in zip(parts, steps, strict=True)]
        message = f"{largest[0]} takes {span(shares, '.0f')} % of {subject}"
    if any(row["compiled"] for row in rows) and one_model:
        message = f"A step of {models[0]} takes {span([MS * s for s in steps])} ms"
    return Chart("layers", message, [medians_of(result), *about(result)], body, width)


def _is_rest(name: str) -> bool:
    return name in (OTHERS, REST)


def _parts(row: Row, named: list[str]) -> dict[str, float]:
    """Return seconds by kind of layer, and of all the rest; of a compiled step by phase."""
    if row["compiled"]:
        parts = {
            f"{way}, compiled": row["phases_s"][way]["median"] for way in ("forward", "backward")
        }
        return parts | {REST: max(0.0, row["step_s"]["median"] - sum(parts.values()))}
    parts = dict[str, float]()
    for kind, passes in by_kind(row["layers"]).items():
        name = kind if kind in named else OTHERS
        parts[name] = parts.get(name, 0.0) + sum(passes.values())
    return parts | {REST: sum(value["median"] for value in row["rest_s"].values())}


def _label(result: dict[str, Any], row: Row) -> str:
    """Name a row by its model and batch if no two have the same, and else by its settings."""
    models = result["models"]
    if len(models) > 1 and len(set(models)) == len(models):
        return f"{models[result['rows'].index(row)]}, batch {row['batch_size']}"
    return row["name"] if "=" in row["name"] else f"batch_size={row['name']}"

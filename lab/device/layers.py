"""Time of a step by layer, forward and backward, and the rest of it."""

from __future__ import annotations

import gc
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import nn

from lab.benchmarks import harness
from lab.benchmarks.present import Drawn, Row, decimals, medians_of, ranged, span
from lab.benchmarks.request import BenchRequest
from lab.device.clock import (
    WAYS,
    Call,
    ModuleClock,
    clock_cost,
    noting_calls,
    seconds_of_bias,
    share_of_data,
)
from lab.distributed.world import World
from lab.draw.chart import COLOURS, GREEN, GREY, ORANGE, SKY, VERMILLION
from lab.draw.plots import bars
from lab.measure import PHASES
from lab.settings.names import class_name
from lab.training.assemble import Assembly, assembled

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

Values = NDArray[np.float64]


@harness.on_one_rank
def measure(request: BenchRequest, world: World) -> dict[str, Any]:
    configs = [variant.config for variant in request.variants]
    rounds, input_grad = request.own["rounds"], request.own["input_grad"]
    for config in configs:
        # As lab.profile_layers: a rate of 0 keeps the weights.
        config.measure, config.steps, config.optim.lr = "breakdown", WARMUP + 3 * rounds, 0.0
    with ExitStack() as stack:
        candidates = [
            LayerCandidate(variant.label, stack.enter_context(assembled(config, world)), input_grad)
            for variant, config in zip(request.variants, configs, strict=True)
        ]
        gc.freeze()  # spans are many objects: without it, clocked steps wait for the collector
        stack.callback(gc.unfreeze)
        takes = [partial(one.take, kind) for one in candidates for kind in one.kinds]
        harness.take_turns(takes, rounds)
        return {
            "rows": [_row(one) for one in candidates],
            "num_rounds": rounds,
            "input_grad": input_grad,
            "models": [class_name(config.model["_target_"]) for config in configs],
        }


class LayerCandidate:
    """One set of settings, warmed up, and the numbers of its steps of each kind.

    Attributes:
        kinds: of the steps that take turns. The model's input needs a gradient if there are steps
            WITHOUT, and only in the others.
        steps: numbers of the trainer's steps by kind.
        calls: of layers with weights, in a step of the warm-up.
    """

    def __init__(self, label: str, part: Assembly, input_grad: bool) -> None:
        self.label, self.trainer = label, part.trainer
        self.clock = ModuleClock(self.trainer.model, self.trainer.world.device)
        self.compiled = bool(self.trainer.config.compile)
        self.kinds = [PLAIN, *([] if self.compiled else [CLOCKED])]
        self.kinds += [WITHOUT] if input_grad else []
        self.steps: dict[str, list[int]] = {}
        self.calls: dict[str, Call] = {}
        self._loop, self._num_steps = self.trainer.steps(), 0
        if not self.compiled:
            self.trainer.task.loss = self.clock.around(LOSS, self.trainer.task.loss)
        self.take(PLAIN)
        with nullcontext() if self.compiled else noting_calls(self.trainer.model, self.calls):
            self.take(PLAIN)
        for _ in range(WARMUP - 3):
            self.take(PLAIN)
        self.take(PLAIN if self.compiled else CLOCKED)
        self.steps.clear()
        self.clock.passes.clear()

    def take(self, kind: str) -> None:
        """Take one step, and note its number."""
        wants = WITHOUT in self.kinds and kind != WITHOUT
        model = self.trainer.model
        with (
            model.register_forward_pre_hook(_with_gradient) if wants else nullcontext(),
            self.clock if kind == CLOCKED else nullcontext(),
        ):
            next(self._loop)
        self.steps.setdefault(kind, []).append(self._num_steps)
        self._num_steps += 1


def _with_gradient(_model: nn.Module, inputs: tuple[Any, ...]) -> None:
    if inputs[0].is_floating_point():
        inputs[0].requires_grad_()


def _row(one: LayerCandidate) -> dict[str, Any]:
    trainer = one.trainer
    trainer.clock.pause()
    all_s, phases_s = trainer.clock.step_seconds(), trainer.clock.phase_seconds()
    step_s = {kind: all_s[numbers] for kind, numbers in one.steps.items()}
    phases = dict(zip(PHASES, phases_s[one.steps[PLAIN]].T, strict=True))
    row: dict[str, Any] = {
        "name": one.label,
        "batch_size": trainer.batch_size,
        "compiled": one.compiled,
        "step_s": harness.middle(step_s[PLAIN]),
        "phases_s": {name: harness.middle(np.nan_to_num(s)) for name, s in phases.items()},
        "input_grad_s": None,
        "layers": [],
    }
    if WITHOUT in step_s:
        row["input_grad_s"] = harness.difference(step_s[PLAIN], step_s[WITHOUT])
    return row if one.compiled else row | _layers(one, step_s[PLAIN], phases, phases_s)


def _layers(
    one: LayerCandidate, step_s: Values, phases: Mapping[Any, Values], all_phases_s: Values
) -> dict[str, Any]:
    """Return the modules' times, the rest, and how their sum compares with a plain step."""
    on_cpu = one.trainer.world.device.type == "cpu"
    cost = clock_cost() if on_cpu else {"span_s": 0.0, "node_s": 0.0}
    passes = [each.seconds(cost["span_s"]) for each in one.clock.passes]
    hooks_s = np.array([cost["node_s"] * len(each.backward) for each in one.clock.passes])
    names = list(dict.fromkeys(name for each in passes for name in each))
    # [passes, names, forward and backward]
    times = np.array([[each.get(name, (0.0, 0.0)) for name in names] for each in passes])
    creators = set[str]().union(*(each.creators for each in one.clock.passes))
    working = np.array([name in creators for name in names])
    backward_s = all_phases_s[one.steps[CLOCKED], PHASES.index("backward")]
    rest = {
        "around layers": times[:, ~working].sum(axis=(1, 2)),
        "autograd": backward_s - times[:, working, 1].sum(axis=1) - hooks_s,
        "optimizer": np.nan_to_num(phases["update"]),
        "data": np.nan_to_num(phases["data"]),
    }
    other = step_s - np.nansum(np.array(list(phases.values())), axis=0)
    rest["host"] = other + np.nan_to_num(phases["exchange"])
    total = times[:, working].sum(axis=(1, 2)) + sum(rest.values())
    return {
        "layers": [
            _layer(one, name, times[:, place]) for place, name in enumerate(names) if working[place]
        ],
        "clock_cost_s": cost,
        "rest_s": {name: harness.middle(values) for name, values in rest.items()},
        "sum_s": harness.middle(total),
        "sum_ratio": harness.ratio(total, step_s),
    }


def _layer(one: LayerCandidate, name: str, times: Values) -> dict[str, Any]:
    """Return what was measured of a module; times: [passes, forward and backward]."""
    model, call = one.trainer.model, one.calls.get(name)
    module = model if name == "model" else dict(model.named_modules()).get(name)
    bias_s = seconds_of_bias(call) if call else None
    of_bias = None if bias_s is None else map(harness.level, bias_s.T)
    return {
        "name": name,
        "kind": type(module).__name__ if module else "loss",
        **{f"{way}_s": harness.level(each) for way, each in zip(WAYS, times.T, strict=True)},
        "data_share": share_of_data(call) if call else None,
        "bias_s": of_bias and dict(zip(WAYS, of_bias, strict=True)),
        "has_weights": call is not None,
    }


def passes_of(layer: Row) -> dict[str, float]:
    """Divide a measured layer's seconds into PASSES.

    A layer without weights has backward data alone; one whose kernel computes both has them in
    "backward, both at once".
    """
    forward, backward = layer["forward_s"]["median"], layer["backward_s"]["median"]
    share = layer["data_share"] if layer["has_weights"] else 1.0
    parts = (forward, 0.0, 0.0, backward)
    if share is not None:
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
    forward, backward = (sum(layer[f"{way}_s"]["median"] for layer in chosen) for way in WAYS)
    return backward / forward if forward else None


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
    times = [decimals(passes[each] or None, MS, 3) for each in PASSES]
    return [name, kind, *times, f"{100 * sum(passes.values()) / step_s:.1f}"]


def _whole(name: str, value: dict[str, float], step_s: float) -> list[str]:
    blank = [""] * (len(PASSES) - 1)
    share = f"{100 * value['median'] / step_s:.1f}"
    return [name, "", f"{MS * value['median']:.3f}", *blank, share]


def notes(result: dict[str, Any]) -> list[str]:
    several = len(result["rows"]) > 1
    named = [(f"{_label(result, row)}: " if several else "", row) for row in result["rows"]]
    return [
        *(f"{name}{line}" for name, row in named for line in _findings(row)),
        f"medians of {result['num_rounds']} rounds, alternating steps with and without timers; "
        "[95 % intervals]",
        "times are those of a module's own work; the backward time is divided in the ratio of its "
        "two parts, which are measured separately; it is not divided where one kernel computes "
        "both",
    ]


def _findings(row: Row) -> Iterator[str]:
    step_s, layers = row["step_s"]["median"], row["layers"]
    if layers:
        yield (
            f"layers and rest add up to {ranged(row['sum_ratio'])} of a step without timers on its "
            "modules"
        )
    if ratio := backward_ratio(layers, CONVOLUTIONS):
        kinds = by_kind(layers)
        seconds = sum(sum(kinds.get(kind, {}).values()) for kind in CONVOLUTIONS)
        yield (
            f"convolutions take {100 * seconds / step_s:.3g} % of the step, backward {ratio:.3g} "
            "times as long as forward"
        )
    of_biases = [layer["bias_s"] for layer in layers if layer.get("bias_s")]
    if biases := sum(one[way]["median"] for one in of_biases for way in WAYS):
        yield (
            f"biases take {MS * biases:.3g} ms as separate operations, "
            f"{100 * biases / step_s:.2g} % of the step; libraries compute them with the products"
        )
    if row["input_grad_s"]:
        yield f"the gradient of the model's input takes {ranged(row['input_grad_s'], MS)} ms"


def chart(result: dict[str, Any]) -> Drawn:
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
    drawn = bars(data, "ms per step", {name: colours[name] for name in used})
    kind, passes = next(iter(by_kind(row["layers"]).items()))
    message = (
        f"{kind} takes {100 * sum(passes.values()) / step_s:.0f} % of a step of "
        f"{result['models'][0]} at a batch of {row['batch_size']}"
    )
    whole = f"step of {MS * step_s:.4g} ms; each bar ends with its share of it"
    return message, [f"{medians_of(result)} · {whole}"], drawn


def _chart_of_kinds(result: dict[str, Any]) -> Drawn:
    rows, models = result["rows"], list(dict.fromkeys(result["models"]))
    largest = list(by_kind(layer for row in rows for layer in row["layers"]))
    # Models differ in time by orders of magnitude, so they are compared by shares.
    one_model = len(models) == 1
    steps = [row["step_s"]["median"] for row in rows]
    units = [MS if one_model else 100 / step_s for step_s in steps]
    parts = [_parts(row, largest[:NAMED_KINDS]) for row in rows]
    names = dict.fromkeys(name for each in parts for name in each)
    names = sorted(names, key=lambda name: name in (OTHERS, REST))
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
    title = "ms per step" if one_model else "% of a step without timers"
    drawn = bars(data, title, colours, marks="step, no clocks")
    subject = f"a step of {models[0]}" if one_model else "each model's step"
    message = f"Time of {subject} by layer type"
    if largest:
        shares = [100 * each.get(largest[0], 0.0) / s for each, s in zip(parts, steps, strict=True)]
        message = f"{largest[0]} takes {span(shares, '.0f')} % of {subject}"
    if any(row["compiled"] for row in rows) and one_model:
        message = f"A step of {models[0]} takes {span([MS * s for s in steps])} ms"
    return message, [medians_of(result)], drawn


def _parts(row: Row, named: list[str]) -> dict[str, float]:
    """Return seconds by kind of layer, and of all the rest; of a compiled step by phase."""
    if row["compiled"]:
        parts = {f"{way}, compiled": row["phases_s"][way]["median"] for way in WAYS}
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

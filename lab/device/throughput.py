"""Samples per second in training and in inference, and the batch from which on they flatten.

Beside counted operations stand those of published formulae (D. Levinthal, Performance analysis of
deep neural networks, 2018, slides 4 to 6: convolutions, LSTM cells, the Transformer). All are
floating-point operations of one sample; a multiply-add is two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lab.benchmarks import harness, present
from lab.benchmarks.request import BenchRequest, Variant
from lab.convolution.layer import convolutions_of
from lab.distributed.world import World
from lab.draw.chart import BLUE, COLOURS, VERMILLION, Look, looks_of
from lab.draw.plots import Axis, dots, lines
from lab.draw.text import number_of
from lab.measure.peaks import arithmetic_of, gpu_peak, measured_rates
from lab.model.lstm import LSTM
from lab.model.transformer import Transformer
from lab.problem import blueprint
from lab.settings.config import ConfigError
from lab.settings.names import class_name
from lab.simulate.estimate import work_of
from lab.training.assemble import Assembly, assembled
from lab.training.trainer import AUTOCAST

WARMUP = 3  # steps of each batch, one of them under the profiler
WAYS = ("training", "inference")
FLAT = 0.95  # from the first batch with this share of the best rate on, a larger one gains little
G = 1e-9
DEFAULT = "default"  # the series that changes nothing but the batch
# Names of torch's operations that multiply matrices; what is inside a fused one counts with it.
PRODUCT = re.compile(
    r"aten::_?((b?add|grouped_)?b?mm_?|(add)?mv_?|v?dot|.*convolution.*|.*rnn.*|.*lstm.*"
    r"|scaled_dot_product_.*_attention.*|flash_attention.*|efficient_attention.*)"
)
MARKS = ("ProfilerStep", "Optimizer.", "enumerate(", "autograd::")  # spans, not operations
SAMPLES = 2  # one is too few for BatchNorm at 1x1 px
# H·W of the output; C are the channels that a filter sees: lab.convolution.
CONVOLUTION = "2·N·K·C·R·S·H·W of each convolution"
# Four gates, each with two products of a vector and a matrix of hidden x hidden.
CELL = "16·hidden² per token per layer"
TRANSFORMER = "3·2·(L²·d + L·d²/heads) + 64·L·d² per module"


@harness.on_one_rank
def measure(request: BenchRequest, world: World) -> dict[str, Any]:
    configs, num_rounds = [each.config for each in request.variants], request.own["rounds"]
    for config in configs:
        config.steps = WARMUP + num_rounds
    with ExitStack() as stack:
        parts = [stack.enter_context(assembled(config, world)) for config in configs]
        candidates = [
            ThroughputCandidate(*each) for each in zip(request.variants, parts, strict=True)
        ]
        taken = harness.take_turns([each.take for each in candidates], num_rounds)
        rows = [one.row(times) for one, times in zip(candidates, taken, strict=True)]
        return {
            "rows": rows,
            "knees": knees(rows),
            "unit": parts[0].trainer.data.unit,
            "num_rounds": num_rounds,
        }


class ThroughputCandidate:
    """One set of settings, warmed up, and the share of products in a step of it."""

    def __init__(self, variant: Variant, part: Assembly) -> None:
        self.variant, self.trainer, config = variant, part.trainer, variant.config
        self.device = self.trainer.world.device
        self.step = partial(next, self.trainer.steps())
        batch = self.trainer.batch_size
        inputs, _ = next(iter(self.trainer.data.test_batches(0, 1, batch)))
        if len(inputs) < batch:
            raise ConfigError(
                f"batch_size={batch}: the test set has only {number_of(len(inputs), 'sample')}, "
                "which is too few for one batch of inference"
            )
        self.inputs = inputs.contiguous(
            memory_format=torch.channels_last if config.channels_last else torch.contiguous_format
        )
        for _ in range(WARMUP - 1):
            self.step()
            self.infer()
        on_gpu = self.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=activities) as profiler:
            self.step()
        self.products = share_of_products(profiler.key_averages(), on_gpu)

    def infer(self) -> None:
        """Compute the outputs of one batch, without gradients."""
        half = AUTOCAST.get(self.variant.config.precision)
        model, kind = self.trainer.model, self.device.type
        model.eval()
        with torch.no_grad(), torch.autocast(kind, half, enabled=half is not None):
            self.trainer.sync.module(self.inputs)  # the compiled form, if there is one
        model.train()

    def take(self) -> tuple[float, float]:
        """Return the seconds of a step, and of forward alone."""
        return harness.seconds_of(self.step, self.device), harness.seconds_of(
            self.infer, self.device
        )

    def row(self, taken: list[tuple[float, float]]) -> dict[str, Any]:
        """Return rates, and how they compare with operations and peak."""
        config, batch = self.variant.config, self.trainer.batch_size
        step_s, infer_s = zip(*taken, strict=True)
        training, peak = harness.interval(lambda s: batch / s, step_s), _peak(config, self.device)
        operations = _operations(config)
        flops = operations["flops_per_sample"]
        flops_per_s = flops * training["median"] if flops and training["median"] else None
        return {
            "name": self.variant.label,
            "series": series_of(self.variant.label),
            "model": class_name(config.model["_target_"]),
            "batch_size": batch,
            "step_s": harness.middle(step_s),
            "training": training,
            "inference": harness.interval(lambda s: batch / s, infer_s),
            **operations,
            "flops_per_s": flops_per_s,
            "peak": peak,
            "utilisation": flops_per_s / peak["flops_per_s"] if flops_per_s and peak else None,
            "products_share": self.products,
        }


def series_of(label: str) -> str:
    """Return what a label says besides the batch: the rows that have it in common are a series."""
    words = [word for word in label.split() if "=" in word]
    return " ".join(word for word in words if not word.startswith("batch_size="))


def knees(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the knee of training and of inference in each series of several batches."""
    series: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        series.setdefault(row["series"], []).append(row)
    return {
        name: {way: knee(each, way) for way in WAYS}
        for name, each in series.items()
        if len(each) > 1
    }


def knee(rows: Sequence[dict[str, Any]], way: str) -> int:
    """Return the smallest batch whose rate is at least FLAT of the best one."""
    best = max(row[way]["median"] for row in rows)
    ordered = sorted(rows, key=lambda row: row["batch_size"])
    return next(row["batch_size"] for row in ordered if row[way]["median"] >= FLAT * best)


def _operations(config: DictConfig) -> dict[str, Any]:
    """Return operations of a sample: of a step and of forward as counted, and by a formula."""
    keys = ("flops_per_sample", "forward_flops", "formula_flops", "formula")
    found: dict[str, Any] = dict.fromkeys(keys)
    if "profile" in config.model:
        return found  # model=replay waits and computes nothing
    try:
        work = work_of(config)
    except ConfigError:
        return found
    found |= {"flops_per_sample": work.flops_per_sample}
    found |= {"forward_flops": work.forward_flops_per_sample}
    plan = blueprint(config)
    if next(plan.model.parameters()).is_meta:
        found |= estimate(plan.model, plan.data.input_shape, plan.data.input_dtype)
    return found


def _peak(config: DictConfig, device: torch.device) -> dict[str, Any] | None:
    """Return the rate that utilisation is a share of: a GPU's datasheet, or measured on a CPU."""
    if device.type == "cpu":
        threads = torch.get_num_threads()
        source = f"measured: a large matrix product, {number_of(threads, 'thread')}"
        return {"flops_per_s": measured_rates(threads).product, "source": source}
    found = gpu_peak(torch.cuda.get_device_name(device))
    rate = found and found.flops_per_s.get(arithmetic_of(config.precision, config.tf32))
    return {"flops_per_s": rate, "source": found.source} if found and rate else None


def share_of_products(averages: Iterable[Any], on_gpu: bool) -> float | None:
    """Return the share of all operations' own time that products take; None without any time.

    Args:
        averages: torch.profiler's events, summed by name.
        on_gpu: take the time of kernels instead of the host's.
    """
    products_us = all_us = 0.0
    for each in averages:
        if each.device_type != DeviceType.CPU or each.key.startswith(MARKS):
            continue  # kernels count with the operation that launched them
        own_us = each.self_device_time_total if on_gpu else each.self_cpu_time_total
        all_us += own_us
        products_us += own_us if PRODUCT.fullmatch(each.key) else 0.0
    return products_us / all_us if all_us else None


def estimate(
    model: nn.Module, input_shape: tuple[int, ...], input_dtype: torch.dtype
) -> dict[str, Any]:
    """Estimate the operations of one sample's forward by a published formula.

    Args:
        model: on the meta device.
        input_shape, input_dtype: of one sample.

    Returns:
        formula_flops, and the formula, which leaves out layers of other kinds; {}: there is none.
    """
    if isinstance(model, LSTM):
        layers, hidden = model.lstm.num_layers, model.lstm.hidden_size
        return {"formula_flops": input_shape[0] * layers * 16 * hidden**2, "formula": CELL}
    if isinstance(model, Transformer):
        layers, heads, width = model.size
        flops = layers * transformer_module(input_shape[0], width, heads)
        return {"formula_flops": flops, "formula": TRANSFORMER}
    problems = convolutions_of(model, input_shape, input_dtype, SAMPLES).values()
    flops = sum(problem.operations for problem in problems) / SAMPLES
    return {"formula_flops": flops, "formula": CONVOLUTION} if flops else {}


def transformer_module(length: int, width: int, heads: int) -> float:
    """Return 3·2·(L²·d + L·d²/heads) + 64·L·d² of a module, as printed (slide 6).

    A module is a layer of the encoder with one of the decoder, so it has three attentions; the
    slide has six modules. docs/device.md holds its terms to a count.

    Args:
        length: L, tokens of a sequence. width: d, values of a token.
    """
    attention = 2 * (length**2 * width + length * width**2 / heads)
    return 3 * attention + 64 * length * width**2


def columns(result: dict[str, Any]) -> dict[str, present.Column]:
    return {
        **({"": _name} if _is_named(result) else {}),
        "batch": present.text("batch_size"),
        **present.medians("step (ms)", "step_s", 1e3, 2),
        "training (1/s)": present.intervals("training"),
        "inference (1/s)": present.intervals("inference"),
        "GFLOP/s": present.number("flops_per_s", G, 2),
        "of the peak %": present.number("utilisation", 100),
        "products %": present.number("products_share", 100),
    }


def notes(result: dict[str, Any]) -> list[str]:
    peaks = [row["peak"] for row in result["rows"] if row["peak"]]
    texts = [f"{G * peak['flops_per_s']:.4g} GFLOP/s, {peak['source']}" for peak in peaks]
    rate = f" ({'; '.join(dict.fromkeys(texts))})" if texts else ""
    return [
        *_knees(result),
        *dict.fromkeys(_formula(row, result["unit"]) for row in result["rows"] if row["formula"]),
        f"medians of {result['num_rounds']} interleaved rounds, 95 % intervals; GFLOP/s: counted "
        f"operations of training; of the peak{rate}",
        "products: percentage of the step's own time in matrix products, convolutions, attention "
        "and recurrent layers, by torch.profiler in one step",
    ]


def _knees(result: dict[str, Any]) -> Iterator[str]:
    for name, of_ways in result["knees"].items():
        knees_ = " and ".join(f"{batch} in {way}" for way, batch in of_ways.items())
        series = f" ({name or DEFAULT})" if _is_named(result) else ""
        yield (
            f"knee{series}: the smallest batch that reaches 95 % of the highest {result['unit']}s "
            f"per second is {knees_}"
        )


def _formula(row: present.Row, unit: str) -> str:
    counted, by_formula = row["forward_flops"], row["formula_flops"]
    return (
        f"{row['model']}: the forward pass of one {unit} takes {G * counted:.4g} GFLOP by count; "
        f"{row['formula']} (published) gives {G * by_formula:.4g}, {by_formula / counted:.3f} × "
        "the count"
    )


def _is_named(result: dict[str, Any]) -> bool:
    return any(row["series"] for row in result["rows"])


def _name(row: present.Row) -> str:
    return row["series"] or DEFAULT


def chart(result: dict[str, Any]) -> present.Drawn:
    """Draw both rates over the batch with their knees; or by settings, if no batches differ."""
    message, drawn = (_over_batches if result["knees"] else _by_settings)(result)
    return message, [f"{present.medians_of(result)}, 95 % intervals"], drawn


def _over_batches(result: dict[str, Any]) -> tuple[str, tuple[Any, int]]:
    """Draw a line for each way, or where there are several series a panel with all of them."""
    rows, several = result["rows"], _is_named(result)
    data = pd.DataFrame(
        {
            "series": _name(row) if several else way,
            "x": row["batch_size"],
            "panel": WAYS.index(way) if several else 0,
            **present.ends(row[way]),
        }
        for row in rows
        for way in WAYS
    )
    looks = looks_of(data["series"])
    labels = {name: name for name in looks}
    if not several:
        looks = {WAYS[0]: Look(BLUE, "-", "o"), WAYS[1]: Look(VERMILLION, "--", "s")}
        ((_, knees_of),) = result["knees"].items()
        labels = {way: f"{way}, knee {knees_of[way]}" for way in WAYS}
    batches = sorted({row["batch_size"] for row in rows})
    drawn = lines(
        *(data, Axis("batch", log=2, ticks=batches), Axis(f"{result['unit']}s per second"), looks),
        *(labels, WAYS.__getitem__ if several else None),
        size=(300, 300) if several else (460, 300),
    )
    flat = [of_ways[WAYS[0]] for of_ways in result["knees"].values()]
    message = (
        f"Training {_models(rows)} gains less than 5 % beyond a batch of {present.span(flat, 'g')}"
    )
    if flat == [max(batches)]:
        message = f"Training {_models(rows)} still becomes faster at a batch of {flat[0]}"
    return message, drawn


def _by_settings(result: dict[str, Any]) -> tuple[str, tuple[Any, int]]:
    rows = result["rows"]
    one_batch = len({row["batch_size"] for row in rows}) == 1
    names = [_name(row) + ("" if one_batch else f", batch {row['batch_size']}") for row in rows]
    panels = {way: f"{way} ({result['unit']}s per second)" for way in WAYS}
    data = pd.DataFrame(
        {"name": name, "panel": panels[way], **present.ends(row[way])}
        for way in WAYS
        for name, row in zip(names, rows, strict=True)
    )
    looks = {name: Look(COLOURS[at % len(COLOURS)], "-", "o") for at, name in enumerate(names)}
    ordered = sorted(rows, key=lambda row: row["training"]["median"])
    least, best = ordered[0], ordered[-1]
    rate = best["training"]["median"]
    factor = rate / least["training"]["median"]
    message = f"Training {_models(rows)}: {_name(best)} is {factor:.2f} × as fast as {_name(least)}"
    if best is least:
        message = f"Training {_models(rows)} reaches {rate:.3g} {result['unit']}s per second"
    return message, dots(data, looks)


def _models(rows: Iterable[present.Row]) -> str:
    return ", ".join(dict.fromkeys(row["model"] for row in rows))

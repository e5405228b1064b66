"""Samples per second in training and in inference, and the batch from which on they flatten."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from omegaconf import DictConfig
from torch.profiler import ProfilerActivity, profile

from lab.benchmarks import interleave
from lab.benchmarks.compiling import compiling_each
from lab.benchmarks.request import Request
from lab.distributed import world as worlds
from lab.layers.products import share_of_products
from lab.layers.published import estimate
from lab.measure.peaks import arithmetic_of, gpu_peak
from lab.measure.rates import measured_rates
from lab.measure.turns import order
from lab.problem.build import blueprint
from lab.settings.config import ConfigError
from lab.settings.names import class_name
from lab.simulate.source import work_of
from lab.training.assemble import Assembly, assembled, join
from lab.training.identity import surroundings
from lab.training.trainer import AUTOCAST

WARMUP = 3  # steps of each batch, one of them under the profiler
WAYS = ("training", "inference")
FLAT = 0.95  # from the first batch with this share of the best rate on, a larger one gains little


@dataclass
class Candidate:
    """One set of settings, its parts, and the seconds of its steps and of its forward alone."""

    label: str
    config: DictConfig
    part: Assembly
    step: Callable[[], object]
    infer: Callable[[], object]
    products: float | None = None
    step_s: list[float] = field(default_factory=list)
    infer_s: list[float] = field(default_factory=list)


def measure(request: Request) -> dict[str, Any]:
    """Measure all variants in turns, on one rank.

    Raises:
        ConfigError: a setting does not fit the data and devices at hand.
    """
    configs = [variant.config for variant in request.variants]
    for config in configs:
        config.steps = WARMUP + request.own["rounds"]
    try:
        world = join(configs[0])
        torch.set_num_threads(request.own["threads"])
        with ExitStack() as stack:
            stack.enter_context(compiling_each(configs, len(WAYS)))
            candidates = [
                _candidate(variant.label, stack.enter_context(assembled(config, world)), config)
                for variant, config in zip(request.variants, configs, strict=True)
            ]
            for number in interleave.progress(range(request.own["rounds"]), 0):
                for index in order(len(candidates), number):
                    _take_turn(candidates[index], world.device)
        rows = [_row(each, world.device) for each in candidates]
        return {
            "rows": rows,
            "knees": knees(rows),
            "unit": candidates[0].part.trainer.data.unit,
            "num_rounds": request.own["rounds"],
            **surroundings(world, *configs),
        }
    finally:
        worlds.stop()


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


def _candidate(label: str, part: Assembly, config: DictConfig) -> Candidate:
    """Warm up one set of settings, and profile a step of it."""
    trainer = part.trainer
    loop, infer = trainer.steps(), _inference(part, config)
    one = Candidate(label, config, part, lambda: next(loop), infer)
    for _ in range(WARMUP - 1):
        one.step()
        infer()
    on_gpu = trainer.world.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        one.step()
    one.products = share_of_products(profiler.key_averages(), on_gpu)
    return one


def _inference(part: Assembly, config: DictConfig) -> Callable[[], None]:
    """Return a call that computes the outputs of one batch, without gradients."""
    trainer = part.trainer
    inputs, _ = next(iter(trainer.data.test_batches(0, 1, trainer.batch_size)))
    if len(inputs) < trainer.batch_size:
        raise ConfigError(
            f"batch_size={trainer.batch_size}: the test part has {len(inputs)} samples, too few "
            "for a batch of inference"
        )
    if config.channels_last:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    half = AUTOCAST.get(config.precision)

    def infer() -> None:
        trainer.model.eval()
        with torch.no_grad(), torch.autocast(inputs.device.type, half, enabled=half is not None):
            trainer.sync.module(inputs)  # the compiled form, if there is one
        trainer.model.train()

    return infer


def _take_turn(one: Candidate, device: torch.device) -> None:
    for call, times in ((one.step, one.step_s), (one.infer, one.infer_s)):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)


def _row(one: Candidate, device: torch.device) -> dict[str, Any]:
    batch, peak = one.part.trainer.batch_size, _peak(one.config, device)
    training = interleave.interval(lambda s: batch / s, one.step_s)
    operations = _operations(one.config)
    flops = operations["flops_per_sample"]
    flops_per_s = flops * training["median"] if flops and training["median"] else None
    return {
        "name": one.label,
        "series": series_of(one.label),
        "model": class_name(one.config.model["_target_"]),
        "batch_size": batch,
        "step_s": interleave.middle(one.step_s),
        "training": training,
        "inference": interleave.interval(lambda s: batch / s, one.infer_s),
        **operations,
        "flops_per_s": flops_per_s,
        "peak": peak,
        "utilisation": flops_per_s / peak["flops_per_s"] if flops_per_s and peak else None,
        "products_share": one.products,
    }


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
        by_formula = estimate(plan.model, plan.data.input_shape, plan.data.input_dtype)
        if by_formula:
            found |= {"formula_flops": by_formula.flops, "formula": by_formula.formula}
    return found


def _peak(config: DictConfig, device: torch.device) -> dict[str, Any] | None:
    """Return the rate that utilisation is a share of: a GPU's datasheet, or measured on a CPU."""
    if device.type == "cpu":
        threads = torch.get_num_threads()
        source = f"measured: a large matrix product, {threads} thread{'s' if threads > 1 else ''}"
        return {"flops_per_s": measured_rates(threads).product, "source": source}
    found = gpu_peak(torch.cuda.get_device_name(device))
    rate = found and found.flops_per_s.get(arithmetic_of(config.precision, config.tf32))
    return {"flops_per_s": rate, "source": found.source} if found and rate else None

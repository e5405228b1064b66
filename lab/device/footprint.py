"""Memory of a training step by kind, computed without computing the step, and measured if asked.

The model trains two steps on tensors that have shapes and no values (torch's FakeTensorMode), and
torch's MemTracker follows each storage from its allocation to its release.

`python -m lab.device.footprint SETTINGS` is the program whose memory is measured: it trains a few
steps, and prints the peak of one in bytes.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import sys
import warnings
from bisect import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.optim import Optimizer

from lab.benchmarks.harness import here
from lab.benchmarks.present import Column, Drawn, decimals, number, span, tabulate, text
from lab.benchmarks.request import BenchRequest
from lab.device.callgrind import filled, output_of
from lab.draw.chart import BLUE, BROWN, GREEN, ORANGE, PURPLE, SKY, VERMILLION
from lab.draw.plots import bars
from lab.exchange.bucket import plan
from lab.exchange.cost import Sizes, of_buckets
from lab.measure.memory import peak_bytes, reset_peak
from lab.problem import Blueprint, blueprint
from lab.settings.config import ConfigError, check_batch, load
from lab.settings.errors import as_config_error
from lab.settings.names import class_name
from lab.simulate.strategy import most_sync_bytes
from lab.training.optim import Optim
from lab.training.trainer import AUTOCAST

NUM_STEPS = 2  # the optimizer's state is made in the first
NAMES = {
    "PARAM": "parameters",
    "GRAD": "gradients",
    "OPT": "optimizer",
    "ACT": "activations",
    "TEMP": "temporaries",  # of backward and the update
    "BUFFER": "other",
    "OTH": "other",
}
EXCHANGE = "exchange"
KINDS = (*dict.fromkeys(NAMES.values()), EXCHANGE)
PROGRAM = (sys.executable, "-m", "lab.device.footprint")
CPU = torch.device("cpu")
WARMUP, MEASURED = 2, 3  # steps of the measured program
MB = 1e-6
COLOURS = dict(zip(KINDS, (BLUE, SKY, GREEN, ORANGE, VERMILLION, PURPLE, BROWN), strict=True))


def measure(request: BenchRequest) -> dict[str, Any]:
    memory_gb, measured = request.own["memory_gb"], request.own["measured"]
    num_ranks = request.own["num_ranks"]
    if measured and num_ranks > 1:
        raise ConfigError(
            f"num_ranks={num_ranks}: measured=true trains on one rank only; for more, use "
            "lab.bench memory"
        )
    rows = [_row(each.label, each.config, memory_gb, num_ranks) for each in request.variants]
    for row, variant in zip(rows, request.variants, strict=True) if measured else ():
        row["measured_bytes"] = _resident(variant.arguments)
    return {"rows": rows, "memory_gb": memory_gb, **here(asks_tools=False)}


def _row(label: str, config: DictConfig, memory_gb: int | None, num_ranks: int) -> dict[str, Any]:
    check_batch(config, num_ranks)
    parts = blueprint(config)
    step = _step_of(config, parts)
    sharing = num_ranks if config.scaling == "strong" else 1  # ranks that divide batch_size
    per_rank = config.batch_size // sharing
    exchange = exchange_bytes(parts.model, config, num_ranks)
    with as_config_error(f"model={config.model['_target_']}: "):
        found = footprint(parts.model, step, per_rank, exchange)
        most = memory_gb and largest_batch(parts.model, step, 1e9 * memory_gb, exchange)
    return {
        "name": label if "=" in label else f"batch_size={label}",
        "model": class_name(config.model["_target_"]),
        "batch_size": config.batch_size,
        "per_rank_batch_size": per_rank,
        "num_parameters": sum(each.numel() for each in parts.model.parameters()),
        "bytes": dict(found.kinds),
        "total_bytes": found.total_bytes,
        "modules": found.modules,
        "measured_bytes": None,
        "largest_batch": most and sharing * most,
    }


def exchange_bytes(model: nn.Module, config: DictConfig, num_ranks: int) -> int:
    """Count what exchange and sync hold on the rank that needs most (lab.simulate.strategy).

    Raises:
        ConfigError: it is not known.
    """
    if num_ranks == 1:
        return 0
    buckets = plan(model, config.bucket_mb)
    of_model = sum(bucket.num_values for bucket in buckets)
    backend = "nccl" if config.device == "cuda" else "gloo"
    settings: Any = OmegaConf.to_container(config, resolve=True)
    sent = of_buckets([bucket.shapes for bucket in buckets])
    found = most_sync_bytes(
        Sizes(of_model, *sent, 0, num_ranks, backend, local=num_ranks), settings
    )
    if math.isnan(found):
        raise ConfigError(f"strategy={config.strategy}: its memory cannot be computed")
    return round(found)


def _resident(settings: tuple[str, ...]) -> int:
    """Measure a step's peak in a fresh process.

    Raises:
        ConfigError: it failed.
    """
    # glibc then returns freed blocks at once, so that resident memory is memory in use.
    variables = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    what = f"measured=true: {' '.join(settings)}: "
    return int(output_of([*PROGRAM, *settings], variables, what))


def main(settings: list[str]) -> None:
    """Print the median peak of steps above the memory that was resident before the model was."""
    torch.set_num_threads(1)
    config = load(settings)
    plan = blueprint(config)
    step = _step_of(config, plan)
    small = nn.Conv2d(1, 1, 3)
    small(torch.zeros(1, 1, 8, 8)).sum().backward()
    step.optimizer(small).step()  # what all this loads is no memory of the model's step
    reset_peak(CPU)
    before = peak_bytes(CPU)
    model, inputs = filled(plan, config.batch_size)
    optimizer = step.optimizer(model)
    targets = torch.zeros(config.batch_size, *plan.target.shape, dtype=plan.target.dtype)
    peaks = []
    for _ in range(WARMUP + MEASURED):
        reset_peak(CPU)
        _train(model, optimizer, step, inputs, targets)
        peaks.append(peak_bytes(CPU) - before)
    print(int(median(peaks[WARMUP:])))


def _step_of(config: DictConfig, plan: Blueprint) -> StepSettings:
    optim = Optim(config.optim, config.batch_size)
    return StepSettings(
        *(plan.data.input_shape, plan.data.input_dtype, plan.target, plan.task.loss),
        *(optim.optimizer, config.precision),
    )


def _train(
    model: nn.Module, optimizer: Optimizer, step: StepSettings, inputs: Tensor, targets: Tensor
) -> None:
    half = AUTOCAST.get(step.precision)
    with torch.autocast("cpu", half) if half else contextlib.nullcontext():
        outputs = model(inputs)
    step.loss(outputs.float() if half else outputs, targets).backward()
    optimizer.step()
    optimizer.zero_grad()


@dataclass(frozen=True)
class StepSettings:
    """A training step, apart from its model and batch.

    Attributes:
        input_shape, input_dtype: of one sample. target: of one sample; only its shape and type
            matter.
        loss: of outputs and targets. optimizer: makes one for a model.
        precision: fp32, bf16 or fp16, as in training: by autocast.
    """

    input_shape: tuple[int, ...]
    input_dtype: torch.dtype
    target: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[nn.Module], Optimizer]
    precision: str = "fp32"


@dataclass(frozen=True)
class Footprint:
    """Memory of a step.

    Attributes:
        kinds: bytes of each of KINDS at the moment that needs most.
        modules: name of each innermost module that holds anything, in the order of forward, and
            bytes of its parameters and of the outputs of one call.
    """

    kinds: Mapping[str, int]
    modules: list[dict[str, Any]]

    @property
    def total_bytes(self) -> int:
        return sum(self.kinds.values())


def footprint(
    model: nn.Module, step: StepSettings, batch: int, exchange_bytes: int = 0
) -> Footprint:
    """Compute the memory of a training step of one rank.

    Workspaces of libraries are not known, and come on top.

    Args:
        model: on the meta device, in training mode.
        batch: samples of this rank.
        exchange_bytes: what an exchange holds all the time.

    Raises:
        ValueError: it cannot run without values; the message says why.
    """
    model = copy.deepcopy(model)  # its parameters will have shapes alone
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MemTracker looks at addresses, which there are not
            kinds, modules = _peak(model, step, batch)
            return Footprint({**kinds, EXCHANGE: exchange_bytes}, modules)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise ValueError(f"cannot run on tensors without values: {lines[0]}") from None


def largest_batch(
    model: nn.Module, step: StepSettings, num_bytes: float, exchange_bytes: int = 0
) -> int:
    """Return the largest batch whose step fits into so many bytes; 0: none does.

    Memory grows with the batch, so the search halves its interval.
    """

    def exceeds(batch: int) -> bool:
        return footprint(model, step, batch, exchange_bytes).total_bytes > num_bytes

    too_large = 1
    while not exceeds(too_large):
        too_large *= 2
    fitting = too_large // 2
    return fitting + bisect(range(fitting + 1, too_large), False, key=exceeds)


def _peak(
    model: nn.Module, step: StepSettings, batch: int
) -> tuple[Mapping[str, int], list[dict[str, Any]]]:
    fake = model.to_empty(device="cpu")
    optimizer = step.optimizer(fake)
    tracker = MemTracker()
    tracker.track_external(fake, optimizer)
    modules = list[dict[str, Any]]()
    with tracker:
        inputs = torch.empty(batch, *step.input_shape, dtype=step.input_dtype)
        targets = torch.empty(batch, *step.target.shape, dtype=step.target.dtype)
        for _ in range(NUM_STEPS):
            _train(fake, optimizer, step, inputs, targets)
            modules = [
                {"name": name or "model", "parameters": h.parameter_mem, "outputs": h.output_mem}
                for name, module in fake.named_modules()
                if not any(True for _ in module.children())
                and (h := tracker.memory_tracking.get(module))
            ]
            tracker.reset_mod_stats()
    return _by_kind(tracker.get_tracker_snapshot("peak")), modules


def _by_kind(snapshot: Mapping[torch.device, Mapping[Any, int]]) -> Mapping[str, int]:
    found = dict.fromkeys(NAMES.values(), 0)
    for of_device in snapshot.values():
        for kind, num_bytes in of_device.items():
            name = NAMES.get(getattr(kind, "name", ""))
            if name:
                found[name] += num_bytes
    return found


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, and a line for each set of settings, in MB; of a single one its modules."""
    rows, memory_gb = result["rows"], result["memory_gb"]
    columns: dict[str, Column] = {
        "": text("name"),
        "parameters (M)": number("num_parameters", 1e-6, 3),
        **{f"{kind} (MB)": number(f"bytes.{kind}", MB) for kind in KINDS},
        "peak (MB)": number("total_bytes", MB),
    }
    if any(row["measured_bytes"] for row in rows):
        columns["measured (MB)"] = number("measured_bytes", MB)
        columns["computed %"] = lambda row: decimals(
            100 * row["total_bytes"] / row["measured_bytes"]
        )
    if memory_gb:
        columns[f"batch in {memory_gb} GB"] = text("largest_batch")
    lines = tabulate(rows, columns)
    if len(rows) > 1:
        return lines
    modules = [
        [f"  {each['name']}", "", *(decimals(each[key], MB) for key in ("parameters", "outputs"))]
        for each in rows[0]["modules"]
    ]
    head = ["by module", "", "parameters (MB)", "outputs (MB)"]
    return [*lines, *([*each, *[""] * (len(columns) - 4)] for each in (head, *modules))]


def notes(result: dict[str, Any]) -> list[str]:
    measured = (
        "measured: peak resident memory as Linux reports it, less what was resident before the "
        "model was built; on one thread, with a fresh process for each row"
    )
    return [
        "computed, not measured: memory of a step's tensors at its peak on one rank, and of its "
        "exchange (num_ranks=); library workspaces are not included",
        *([measured] if any(row["measured_bytes"] for row in result["rows"]) else []),
    ]


def chart(result: dict[str, Any]) -> Drawn:
    """Draw a bar for each set of settings, divided by kind, and a mark where it was measured."""
    rows = result["rows"]
    used = [kind for kind in KINDS if any(row["bytes"][kind] for row in rows)]
    data = pd.DataFrame(
        {
            "name": row["name"],
            "part": kind,
            "value": MB * row["bytes"][kind],
            "mark": MB * (row["measured_bytes"] or math.nan) if kind == used[0] else math.nan,
            "text": f"{MB * row['total_bytes']:,.0f}" if kind == used[-1] else "",
        }
        for row in rows
        for kind in used
    )
    if not any(row["measured_bytes"] for row in rows):
        del data["mark"]
    colours = {kind: COLOURS[kind] for kind in used}
    models = ", ".join(dict.fromkeys(row["model"] for row in rows))
    peaks = span([MB * row["total_bytes"] for row in rows], ",.0f")
    shares = span([100 * row["bytes"]["activations"] / row["total_bytes"] for row in rows], ".0f")
    message = f"A step of {models} takes {peaks} MB, {shares} % of it activations"
    sample = f"bars are computed (torch {result['environment']['torch']}), not measured"
    return message, [sample], bars(data, "peak of a step (MB)", colours, marks="measured")


if __name__ == "__main__":
    main(sys.argv[1:])

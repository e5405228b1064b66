"""Calibrate a cluster: measure what a hardware file of lab.predict needs, and check predictions.

The ranks measure, each part within its share of `minutes`:

* all-reduces of the library and of `exchange=` by size: on two ranks of a node, on two nodes, on
  all ranks and on three quarters of them (`lab.bench collective`);
* host time of a parameter, a bucket and a codec (`lab.bench host`), and the rate of codecs and of
  memory (`lab.bench codec`);
* rates of matrix products by precision, their spread from one to the next on each rank, and how
  much longer they take beside an all-reduce, and beside other ranks' work on shared cores;
* steps of a model whose layers wait, with each exchange, on the same ranks.

Links, sums and codecs are fitted to collectives and steps of two ranks
(lab/simulate/calibration.py). All that more ranks measured is held out, and shows how well larger
numbers are predicted.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import yaml
from omegaconf import DictConfig

from lab.benchmarks import compute, host
from lab.benchmarks.catalogue import NUM_RANKS
from lab.benchmarks.collective import (
    LIBRARY,
    CollectiveCandidate,
    axis_of,
    make_candidates,
    measure_size,
)
from lab.benchmarks.harness import joined
from lab.benchmarks.present import (
    Column,
    Drawn,
    IntervalJson,
    decimals,
    machine,
    number,
    on_ranks_of,
    tabulate,
    text,
    text_of,
    write,
)
from lab.benchmarks.request import BenchRequest, read
from lab.benchmarks.straggler import trained
from lab.cluster.settings import EMULATION
from lab.distributed.launcher import Nodes, is_first_rank
from lab.distributed.torch_comm import group_of
from lab.distributed.world import World, check_gpus
from lab.draw.chart import looks_of
from lab.draw.plots import Axis, lines
from lab.draw.text import markdown, number_of
from lab.measure.environment import num_cores
from lab.measure.statistics import order
from lab.model.profile import Profile
from lab.settings.config import build, load
from lab.settings.errors import ConfigError, as_config_error
from lab.settings.files import read_file
from lab.settings.storage import write_text
from lab.simulate import calibration
from lab.simulate.calibration import CalibratedRanks
from lab.simulate.costs import stages_of
from lab.simulate.hardware import parse
from lab.simulate.network import Network
from lab.simulate.predict import plain
from lab.simulate.score import NONE
from lab.simulate.strategy import Strategy
from lab.training.recording import benchmark_environment

# Shares of the time; what remains is for starting, joining, and what has a fixed number of rounds.
COLLECTIVES_SHARE, STEPS_SHARE, SPREAD_SHARE = 0.4, 0.35, 0.05
SIZES = {  # bytes: as many as fit in the time
    "cpu": (2**12, 2**15, 2**18, 2**21, 2**24, 2**26),
    "cuda": (2**12, 2**15, 2**18, 2**21, 2**24, 2**27, 2**30),
}
FEWEST_SIZES, ROUNDS = 4, 10
HELD_OUT = (0.75, 1.0)  # of all ranks
REPEATS = 3  # of the steps of each strategy, in turns
FEWEST_STEPS, MOST_STEPS, WARMUP = 10, 30, 5
STEP_S = 0.15  # assumed, to divide the time among steps
FULL_S = 0.03  # an all-reduce of the whole model: about as long as the layers it runs beside
LEAST_SCALE = 1e-3  # of the model's gradients
LEAST_EXPOSED = 0.02  # share of a step below which its exposed exchange is not scored
MODULES = 24  # of a model, for the host's time: enough to tell a bucket's from a parameter's
SOURCE = "measured by lab.calibrate"
TERMS = (  # of the page
    "* A cell is one strategy on one number of ranks: a row of the next table. The exposed "
    "exchange is the time by which an exchange makes a step longer. Linear scaling means that N "
    "ranks are N times as fast as one. The skill is 1 − (median error of the predictions / median "
    "error of linear scaling)."
)
T = TypeVar("T")


def measure(request: BenchRequest) -> dict[str, Any] | None:
    """Measure all parts, and return the hardware and the predictions that it makes.

    Raises:
        ConfigError: an exchange does not average, or a setting does not fit the ranks at hand.
    """
    configs = [variant.config for variant in request.variants]
    with as_config_error():
        on_gpu = check_gpus(configs[0].device, 1)
        for config in configs:  # refused now, and not after minutes
            Strategy.of(plain(config))
    with joined(configs[0]) as world:  # what only ranks together can refuse
        _candidates(request, world)
    # In a process group of its own, before the ranks join again.
    host_s = _host_seconds("cuda" if on_gpu else "cpu") if is_first_rank() else {}
    with joined(configs[0]) as world:
        found = _measured(request, world, 60 * request.own["minutes"])
        found |= benchmark_environment(world, *configs)
        found |= {"world_size": world.size, "backend": world.comm.backend}
        return _concluded(request, world, found, host_s) if world.rank == 0 else None


def _measured(request: BenchRequest, world: World, seconds: float) -> dict[str, Any]:
    """Measure everything that takes all ranks."""
    groups = groups_of(world.comm.nodes)
    share_s = COLLECTIVES_SHARE * seconds / len(groups)
    measure = partial(_collectives, request, share_s)
    places = [
        CalibratedRanks(link, len(members), _among(members, world, measure) or [])
        for link, members in groups
    ]
    size, all_reduce_s = json.loads(world.broadcast_text(json.dumps(largest(places))))
    contended = compute.contention(world, size, all_reduce_s)
    on_cpu = world.device.type == "cpu"
    beside = dict[str, IntervalJson]()
    for link, members in groups if on_cpu else ():
        if link == "inter" and len(members) == NUM_RANKS:
            beside |= _among(members, world, compute.of_hosts) or {}
    if shared := on_cpu and (world.num_hosts == 1 or EMULATION in os.environ):
        beside["crowding"] = compute.crowding(world)
    spread = compute.spread(world, SPREAD_SHARE * seconds)
    rates, factors = compute.rates(world.device)
    of_codec = compute.codec_rates(world.device) if world.rank == 0 else {}
    world.barrier()
    configs = _with_steps(request, FULL_S * size / all_reduce_s)
    pairs = [members for _, members in groups if len(members) == NUM_RANKS]
    checked = [*pairs[-1:], *(members for _, members in groups if members not in pairs)]
    if shared:
        step_cpu = partial(compute.step_cpu, configs[NONE])
        if measured := _among(pairs[-1], world, step_cpu):
            beside["step_cpu_s"] = measured
    share_s = STEPS_SHARE * seconds / len(checked)
    steps = {
        len(members): _among(members, world, partial(_steps, configs, share_s)) or []
        for members in checked
    }
    return {
        "places": places,
        "steps": steps,
        "configs": configs,
        "values": {"contention": contended, **beside, "jitter": spread["jitter"], **of_codec},
        "num_cores": num_cores() if shared else None,
        **{"spread": spread, "rates": rates, "factors": factors},
    }


def groups_of(nodes: Nodes) -> list[tuple[str, Sequence[int]]]:
    """List the pairs that links are fitted to, and the larger groups that are held out.

    All have rank 0. Larger groups fill one node after the other.

    Returns:
        "intra" or "inter", the slowest link that a group uses; and its ranks.
    """
    first, others = nodes[0], nodes[1:]
    found = [("intra", first[:NUM_RANKS])] if len(first) >= NUM_RANKS else []
    found += [("inter", [first[0], others[0][0]])] if others else []
    ranks = [rank for node in nodes for rank in node]
    for size in sorted({math.ceil(share * len(ranks)) for share in HELD_OUT}):
        if size > NUM_RANKS:
            found.append(("inter" if size > len(first) else "intra", ranks[:size]))
    return found


def _among(members: Sequence[int], world: World, measure: Callable[[World], T]) -> T | None:
    """Measure among some of the ranks, while the others wait; these return None."""
    part = part_of(world, members)
    found = measure(part) if part else None
    world.barrier()
    return found


def part_of(world: World, members: Sequence[int]) -> World | None:
    """Return the world of some ranks, as they see it; None on others. All ranks call this."""
    if len(members) == world.size:
        return world
    if reason := world.comm.no_split:
        raise ConfigError(f"comm: must be able to split ranks into groups: {reason}")
    inside = world.rank in members
    comm = world.comm.split(int(inside))
    if not inside:
        return None
    control = group_of([*members], "gloo", None)
    place = replace(world.place, rank=comm.rank, size=comm.size)
    store = dist.PrefixStore("-".join(map(str, members)), world.store)
    return replace(world, place=place, comm=comm, control=control, store=store)


def _candidates(request: BenchRequest, world: World) -> list[CollectiveCandidate]:
    """Make what is measured. ConfigError: an exchange does not average, or cannot run here."""
    exchanges = {each.label: build(each.config.exchange) for each in request.variants}
    return make_candidates(exchanges, world.comm)


def _collectives(request: BenchRequest, seconds: float, world: World) -> list[dict[str, Any]]:
    """Measure collectives of growing size until the time is over, at least of FEWEST_SIZES."""
    candidates = _candidates(request, world)
    sizes, until = SIZES[world.device.type], time.perf_counter() + seconds
    rows = list[dict[str, Any]]()
    for place, size in enumerate(sizes, start=1):
        began = time.perf_counter()
        rows += measure_size(size, world, ROUNDS, candidates)
        now = time.perf_counter()
        # The next one takes as much longer as it is larger, at most.
        following = size if place == len(sizes) else sizes[place]
        left = until - now - (now - began) * following / size
        if float(world.broadcast_text(str(left))) < 0 and place >= FEWEST_SIZES:
            break
    return rows


def largest(places: Sequence[CalibratedRanks]) -> tuple[int, float]:
    """Return the bytes and the seconds of the largest all-reduce of the library, of most ranks."""
    rows = [row for row in places[-1].rows if row["algorithm"] == LIBRARY]
    return (rows[-1]["size_bytes"], rows[-1]["time_s"]["median"]) if rows else (0, 0.0)


def _host_seconds(device: str) -> dict[str, IntervalJson]:
    """Measure the host's time of a parameter, a bucket and a codec's call, by lab.bench host.

    Two runs of one exchange have one bucket and one for each module; a third one has a codec too.
    """
    words = ["host", "model=mlp", f"model.hidden={[64] * MODULES}", f"rounds={ROUNDS}"]
    words += [f"device={device}", "a=strategy=overlap bucket_mb=null"]
    words += ["b=strategy=overlap bucket_mb=0", "c=strategy=onebit bucket_mb=null"]
    request = read(words)
    found = host.measure(request)
    one, each, coded = (row["added_s"] for row in found["rows"][1:])
    parameters = found["num_parameters"]
    bucket_s = _less(each, one, MODULES)  # which the model has beside the last one
    shapes = [(1, 1)] * parameters
    network = Network(parse(calibration.base_of("gloo", emulated=True)), host.NUM_RANKS)
    stages = stages_of(shapes, plain(request.variants[-1].config.exchange), network)
    calls = sum(stage.calls for stage in stages)
    values = {
        "host.bucket_s": bucket_s,
        "host.parameter_s": _less(one, bucket_s, parameters),
        "host.codec_s": _less(coded, one, calls),
    }
    if device == "cuda":  # forward and backward of a sum, and of what adds it to others
        kernel_s = found["plain_s"]["median"] / (4 * parameters)
        values["host.kernel_s"] = {"median": kernel_s, "low": kernel_s / 2, "high": 2 * kernel_s}
    return values


def _less(first: IntervalJson, second: IntervalJson, count: float) -> IntervalJson:
    """Return (first - second) / count, at least 0, with the widest interval that theirs allow."""
    ends = {"median": ("median", "median"), "low": ("low", "high"), "high": ("high", "low")}
    return {
        key: max(0.0, ((first[own] or 0.0) - (second[other] or 0.0)) / count)
        for key, (own, other) in ends.items()
    }


def _with_steps(request: BenchRequest, num_bytes: float) -> dict[str, DictConfig]:
    """Return settings of the steps to check by name: `none`, and exchanges after and in backward.

    Args:
        num_bytes: of the model's gradients, at most.
    """
    first = request.variants[0]
    words = [each for each in first.arguments if not each.startswith("exchange=")]
    configs = {NONE: load([*words, "exchange=none"])}
    for variant in request.variants:
        for overlap in (False, True):
            config = variant.config.copy()
            config.overlap = overlap
            configs[f"{variant.label}{'_overlap' * overlap}"] = config
    profile = Profile.parse(plain(first.config.profile))
    scale = min(1.0, max(LEAST_SCALE, num_bytes / profile.gradient_bytes))
    for config in configs.values():
        config.model.bytes_scale = float(f"{scale:.3g}")
        config.warmup_steps = WARMUP
    return configs


def _steps(configs: dict[str, DictConfig], seconds: float, world: World) -> list[list[float]]:
    """Measure steps of each strategy, and repeat all in turns until the time is over.

    Returns:
        Medians of each repeat, in the order of `configs`.
    """
    fitting = int(seconds / STEP_S / (REPEATS * len(configs))) - WARMUP
    num_steps = WARMUP + min(max(FEWEST_STEPS, fitting), MOST_STEPS)
    until, found = time.perf_counter() + seconds, list[list[float]]()
    for repeat in range(REPEATS):
        if repeat and float(world.broadcast_text(str(until - time.perf_counter()))) < 0:
            break
        found.append([0.0] * len(configs))
        for place in order(len(configs), repeat):
            config = list(configs.values())[place]
            config.steps = num_steps
            _, step_s = trained(config, world)
            found[-1][place] = float(np.median(step_s.max(axis=0)))
    return [list(each) for each in zip(*found, strict=True)]


def _concluded(
    request: BenchRequest, world: World, found: dict[str, Any], host_s: dict[str, IntervalJson]
) -> dict[str, Any]:
    """Make the hardware of what was measured, and compare its predictions with the rest."""
    names = {each.label: plain(each.config.exchange) for each in request.variants}
    exchanges = {LIBRARY: dict(read_file("exchange", LIBRARY)), **names}
    places, configs = found.pop("places"), found.pop("configs")
    steps = [
        calibration.observation(name, ranks, plain(configs[name]), seconds)
        for ranks, of_ranks in found.pop("steps").items()
        for name, seconds in zip(configs, of_ranks, strict=True)
    ]
    values = {**found["values"], **host_s}
    base = calibration.base_of(
        "nccl" if world.device.type == "cuda" else "gloo", EMULATION in os.environ
    )
    node = calibration.hardware_of(base, _about(world, found, base), values, places, exchanges)
    of_two = [each for each in steps if each.world_size == NUM_RANKS]
    calibration.put_overhead(node, next(each for each in of_two if each.name == NONE))
    # Collectives repeated alone are compared with the fit to such; steps then correct it.
    rows = calibration.predicted_rows(places, exchanges, parse(node))
    calibration.refine(node, of_two, next(p.link for p in places[::-1] if p.ranks == NUM_RANKS))
    hardware = parse(node)
    of_steps = calibration.predicted_steps(steps, hardware)
    scores = {
        name: calibration.scored(of_steps, held, LEAST_EXPOSED)
        for name, held in (("two_ranks", False), ("held_out", True))
    }
    return {
        **found,
        **{"hardware": node, "rows": rows, "steps": of_steps, "scores": scores},
        "num_rounds": ROUNDS,
        "bytes_scale": configs[NONE].model.bytes_scale,
    }


def _about(world: World, found: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Return what a hardware file says of the machine, beside measured values."""
    environment = found["environment"]
    on_gpu = world.device.type == "cuda"
    name = torch.cuda.get_device_name(world.device) if on_gpu else environment["cpu"]
    rates = {key: float(f"{value:.4g}") for key, value in found["rates"].items()}
    factors = {key: float(f"{value:.3g}") for key, value in found["factors"].items()}
    device = {**base.get("device", {}), "name": name, "source": SOURCE, "peak_flops_per_s": rates}
    about: dict[str, Any] = {
        "name": "calibrated",
        "source": f"{SOURCE}; {machine(found)}; {found['emulation']}",
        "ranks_per_node": _ranks_of_node(world, base),
        "device": {**device, "op_efficiency": factors} if factors else device,
    }
    if on_gpu:  # terms that others' figures gave are measured here
        return {**about, "published_terms": False}
    return {**about, "num_cores": found["num_cores"]}


def _ranks_of_node(world: World, base: dict[str, Any]) -> int:
    """Return how many ranks a node has, or a single one could have: more can be predicted then."""
    here = max(map(len, world.comm.nodes))
    if len(world.comm.nodes) > 1:
        return here
    could = torch.cuda.device_count() if world.device.type == "cuda" else base["ranks_per_node"]
    return max(here, could)


COLUMNS: dict[str, Column] = {
    "link": text("link"),
    "ranks": text("ranks"),
    "algorithm": text("algorithm"),
    "size (B)": text("size_bytes"),
    "time (us)": number("time_s.median", 1e6, 1),
    "predicted": number("predicted_s", 1e6, 1),
    "error (%)": number("error", 100, 1),
}


def notes(result: dict[str, Any]) -> list[str]:
    lines = [
        f"The cost model of collectives was fitted to collectives on {NUM_RANKS} ranks. "
        f"Collectives on more than {NUM_RANKS} ranks were held out of the fit.",
        f"Measured times are medians over {result['num_rounds']} rounds {on_ranks_of(result)}.",
    ]
    for name, words in (
        ("two_ranks", f"Steps on {NUM_RANKS} ranks were used in the fit."),
        ("held_out", f"Steps on more than {NUM_RANKS} ranks were held out of the fit."),
    ):
        score = result["scores"][name]
        if score["num_cells"]:
            lines.append(f"{words} {_told_in_sentences(score)}")
    return lines


def chart(result: dict[str, Any]) -> Drawn:
    """Draw predicted times of collectives by size, with what was measured, for each group."""
    rows = result["rows"]
    groups = list(dict.fromkeys((row["link"], row["ranks"]) for row in rows))
    data: Any = pd.DataFrame(
        {
            **{"series": row["algorithm"], "x": row["size_bytes"], "hollow": True},
            **{"value": 1e3 * row["predicted_s"], "low": math.nan, "high": math.nan},
            "measured": 1e3 * row["time_s"]["median"],
            "panel": groups.index((row["link"], row["ranks"])),
        }
        for row in rows
    )
    x, y = axis_of(sorted(set(data["x"]))), Axis("all-reduce (ms)", log=10)

    def title(panel: int) -> str:
        link, ranks = groups[panel]
        return f"{ranks} ranks, {'within a node' if link == 'intra' else 'across nodes'}"

    held = [abs(row["error"]) for row in rows if row["ranks"] > NUM_RANKS]
    fitted = [abs(row["error"]) for row in rows if row["ranks"] == NUM_RANKS]
    message = f"Fitted times of collectives on two ranks are off by {100 * np.median(fitted):.0f} %"
    if held:
        message += (
            f"; predicted times on more ranks, held out, are off by {100 * np.median(held):.0f} %"
        )
    about = ["Lines: predicted. Filled marks: measured.", machine(result)]
    drawn = lines(data, x, y, looks_of(data["series"]), panels=title)
    return f"{message} (medians)", about, drawn


def present(result: dict[str, Any], out: Path | None) -> None:
    """Print a result; write the hardware to `out`, and JSON, figure and page next to it."""
    print(text_of(result))
    if out is None:
        return
    head = f"# Made by `{result['command']}`.\n"
    hardware = head + yaml.safe_dump(result["hardware"], sort_keys=False, default_flow_style=None)
    write_text(out, hardware)
    written = write(out.with_suffix(".json"), result)
    about = page(result, out.with_suffix(".png").name)
    write_text(out.with_suffix(".md"), about)
    print(f"wrote {', '.join(map(str, [out, out.with_suffix('.md'), *written]))}")


def page(result: dict[str, Any], figure: str) -> str:
    """Write a page: held-out steps, values with their intervals, and the spread of compute.

    Its figure shows the collectives, whose times are in the JSON file.

    Args:
        figure: the name of the picture.
    """
    node, spread = result["hardware"], result["spread"]
    values = [[key, *(f"{end:.4g}" for end in ends)] for key, ends in node["assumed"].items()]
    quantiles = ", ".join(f"{value:.3f} ({key} %)" for key, value in spread["quantiles"].items())
    rates = " and ".join(
        f"{rate / 1e9:.4g} GFLOP/s ({key})" for key, rate in result["rates"].items()
    )
    header, *steps = tabulate(result["steps"], STEPS)
    commit = f" at commit {at['commit']}" if (at := result["git_commit"]) else ""
    about = [f"The measurements ran on {machine(result)}.", ""]
    if result["emulation"] != "none":
        emulated = (f"* {each}" for each in result["emulation"].split("; "))
        about += ["The cluster was emulated as follows:", "", *emulated, ""]
    parts = [
        [
            f"# A calibrated cluster of {result['world_size']} ranks",
            "",
            f"This page is generated by `{result['command']}`{commit}.",
        ],
        [*about, f"![collectives]({figure})"],
        ["## Errors of the predictions", "", TERMS, *(f"* {line}" for line in notes(result))],
        markdown(header, steps),
        ["## Hardware values and their intervals", ""],
        markdown(["value", "low", "high"], values),
        ["## Compute", "", f"The measured rates of matrix products are {rates}."],
        [
            f"Each rank ran {spread['num_calls']} matrix products to measure how much their times "
            "vary. The ratios of these times to the median on the same rank have the quantiles "
            f"{quantiles}. On all ranks together, {spread['num_stalls']} products stalled: their "
            "ratio was 2 or more."
        ],
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _told_in_sentences(score: dict[str, Any]) -> str:
    def errors(key: str) -> str:
        middle, worst = (f"{100 * error:.1f} %" for error in score[key])
        return f"has a median error of {middle} and a largest error of {worst}"

    cells = f"For {number_of(score['num_cells'], 'cell')} with an exchange"
    told = [f"{cells}, the predicted step time {errors('step')}."]
    if num_exposed := score["num_exposed"]:
        scored = number_of(num_exposed, "cell")
        told.append(f"The predicted exposed exchange ({scored}) {errors('exposed')}.")
    if not math.isnan(mean := score["signed_error"]):
        told.append(
            "The mean signed error of steps that overlap the exchange with the backward pass is "
            f"{100 * mean:+z.1f} %."
        )
    if not math.isnan(score["skill"]):
        told += [f"Linear scaling {errors('linear')}.", f"The skill is {score['skill']:.2f}."]
    inside = " and ".join(
        f"{100 * share:.0f} % are inside the {level} % interval"
        for level, share in sorted(score["coverage"].items())
    )
    return f"{' '.join(told)} Of the measured step times, {inside}."


STEPS: dict[str, Column] = {
    "strategy": text("strategy"),
    "ranks": text("world_size"),
    "measured ms": number("measured_s", 1e3),
    "predicted ms": number("predicted_s", 1e3),
    "95 %": lambda row: " to ".join(f"{1e3 * end:.1f}" for end in row["intervals"]["95"]),
    "error": lambda row: _off(row["error"]),
    "exposed ms": lambda row: decimals(row["exposed_s"][0], 1e3),
    "predicted exposed ms": lambda row: decimals(row["exposed_s"][1], 1e3),
    "error of linear scaling": lambda row: _off(row["linear_s"] / row["measured_s"] - 1),
}


def _off(error: float) -> str:
    return f"{100 * error:+z.1f} %"

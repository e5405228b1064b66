"""Hardware as it was measured, with intervals, and how well it predicts steps on more ranks.

lab.calibrate measures (lab/benchmarks/calibrate.py). Links, sums and codecs are fitted to
collectives of two ranks, and then, from there, to their steps; all else is taken as measured. The
interval of a value holds what the fit or the median leaves open, so that predictions can be drawn
from a file's `assumed` as from any other's. What the model itself misses, two ranks cannot tell:
`residual` is that of published scaling (lab/simulate/terms.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import median
from typing import Any

from lab.model.profile import replayed
from lab.settings.files import read_file
from lab.simulate.costs import stages_of
from lab.simulate.fit import collective_s, fit, fit_collectives, get, link_keys
from lab.simulate.hardware import CODEC_RATES, Hardware, parse, uncertainty_samples
from lab.simulate.network import Network
from lab.simulate.score import (
    LARGEST_FITTED,
    NONE,
    Group,
    Observation,
    ScoredCell,
    held_out,
    score,
    scored_cell,
)
from lab.simulate.strategy import Strategy
from lab.simulate.terms import interval, published, residual_of

NORMAL_95 = 1.96
LARGEST_ERROR = 1.0  # of a logarithm: a value that nothing determines is open by a factor of 7
START = {"latency_s": 5e-5, "bandwidth_bytes_per_s": 1e9}  # of a search for a link
START_SUM = 1e9  # of a search for the rate at which a core adds what arrives
INTERVALS = {"95": 0.95, "80": 0.8}  # by their names in a result
LEAST_SPREAD = 0.2  # of the overhead between a few repeats, which may agree by chance
SEND_RECV = "sendrecv"  # a row of lab.bench collective
LEAST_SENT = 2**18  # bytes
# See `fit`: about by how much steps differ from repeat to repeat, and from what collectives tell.
COLLECTIVES_PRIOR = 0.1
# What steps of two ranks tell, beside a link and codecs.
TOLD_BY_STEPS = ("reduce_bytes_per_s", "overhead_s", "crowding", "codec_s")
WAYS = ("intra", "inter")
COMPUTE_TERMS = ("contention", "jitter")  # which layers that wait do not have
UNMEASURED_ON_GPUS = {  # what is not measured: as the presets of NVIDIA's machines have it
    **{"codec_s": 5e-6, "codec_contention": 1.0, "engage": 0.03, "incast": 0.05},
    "assumed": {
        **{"codec_s": [2e-6, 1e-5], "codec_contention": [0.5, 1.0]},
        **{"engage": [0.01, 0.1], "incast": [0.01, 0.2]},
    },
}

Ends = tuple[float, float]
Node = dict[str, Any]


@dataclass(frozen=True)
class CalibratedRanks:
    """Ranks whose collectives were measured.

    Attributes:
        link: "intra" or "inter", the slowest that they use.
        rows: of lab.bench collective.
    """

    link: str
    ranks: int
    rows: Sequence[Mapping[str, Any]]


def base_of(library: str, emulated: bool) -> Node:
    """Return what a calibration starts from: it measures no burst, duplex or cache."""
    if library == "nccl":
        return {"library": library, "codec_bytes_per_s": 1e12, **UNMEASURED_ON_GPUS}
    node = read_file("hardware", "emulated_1gbit" if emulated else "this_machine")
    return {"reduce_bytes_per_s": START_SUM, **node}


def hardware_of(
    base: Node,
    about: Node,
    values: Mapping[str, Mapping[str, float | None]],
    places: Sequence[CalibratedRanks],
    exchanges: Mapping[str, Mapping[str, Any]],
) -> Node:
    """Return the content of a hardware file.

    Args:
        base: see `base_of`. about: keys that replace its own.
        values: median, low and high of what was measured directly, by dotted key.
        places: those of two ranks are fitted to.
        exchanges: settings of each row's algorithm.
    """
    node: Node = {"overhead_s": 0.0, **base, **about, "assumed": {**base.get("assumed", {})}}
    for key, value in values.items():
        _put(node, key, float(value["median"] or 0.0), _ends(value))
    links = {place.link for place in places}
    for way in WAYS:
        node[way] = {**START, **(base.get(way) or {})} if way in links else None
    if "intra" not in links:
        node["ranks_per_node"] = 1
    hardware = parse(_plausible(node))
    pairs = {place.link: place for place in places if place.ranks == LARGEST_FITTED}
    ways = [way for way in WAYS if way in pairs]
    for way in ways:  # within a node first, where codecs are a larger part of the time
        hardware = _fitted(node, hardware, pairs[way], exchanges, first=way == ways[0])
    kept = {**_plausible(node), "residual": published().residual}
    return {each.name: kept[each.name] for each in fields(Hardware) if each.name in kept}


def _fitted(
    node: Node,
    hardware: Hardware,
    place: CalibratedRanks,
    exchanges: Mapping[str, Mapping[str, Any]],
    first: bool,
) -> Hardware:
    """Fit a pair's link, and with the first one sums and codecs too; write them into `node`."""
    pair = replace(hardware, ranks_per_node=2 if place.link == "intra" else 1)
    # Of sends only long ones, which tell the link's rate apart from that of adding what arrives:
    # short ones are timed several together, and so hide each other's latency.
    rows = [
        row
        for row in place.rows
        if row["algorithm"] in exchanges
        or (row["algorithm"] == SEND_RECV and row["size_bytes"] >= LEAST_SENT)
    ]
    keys = link_keys(pair)
    if first:
        codecs = _codecs(rows, exchanges, Network(pair, LARGEST_FITTED))
        keys += ["reduce_bytes_per_s"] if hardware.reduce_bytes_per_s else []
        keys += ["codec_s", *(f"{CODEC_RATES}.{name}" for name in codecs)] if codecs else []
    found, errors = fit_collectives(rows, exchanges, LARGEST_FITTED, pair, keys)
    for key, error in errors.items():
        factor = math.exp(NORMAL_95 * min(error, LARGEST_ERROR))
        value = get(found, key)
        assert value is not None  # it was fitted
        _put(node, key, value, (value / factor, value * factor))
    return replace(found, ranks_per_node=hardware.ranks_per_node)


def _codecs(
    rows: Iterable[Mapping[str, Any]], exchanges: Mapping[str, Mapping[str, Any]], pair: Network
) -> list[str]:
    """Name the codecs of the rows' exchanges, by class."""
    shapes = {row["algorithm"]: tuple(row["shape"]) for row in rows}
    stages = [
        stage
        for name, exchange in exchanges.items()
        if name in shapes
        for stage in stages_of([shapes[name]], exchange, pair)
    ]
    return sorted({stage.codec for stage in stages if stage.codec})


def _put(node: Node, key: str, value: float, ends: Ends) -> None:
    """Write a value of a dotted key, and its interval, to four digits."""
    way, _, name = key.rpartition(".")
    part: Node = node.setdefault(way, {}) if way else node
    part[name] = _digits(value)
    low, high = (_digits(end) for end in ends)
    node["assumed"][key] = [min(low, part[name]), max(high, part[name])]


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def _ends(value: Mapping[str, float | None]) -> Ends:
    middle = float(value["median"] or 0.0)
    low, high = (value.get(end) for end in ("low", "high"))
    return middle if low is None else low, middle if high is None else high


def _plausible(node: Node) -> Node:
    """Return the node without intervals of links that it lacks."""
    kept = {
        key: ends
        for key, ends in node["assumed"].items()
        if (way := key.rpartition(".")[0]) not in WAYS or node[way]
    }
    return {**node, "assumed": kept}


def put_overhead(node: Node, steps: Observation) -> None:
    """Write the time of a step beside its layers, of steps that exchange nothing."""
    predicted_s = steps.predicted_s(replace(waiting(parse(node)), overhead_s=0.0))
    found = sorted(max(0.0, seconds - predicted_s) for seconds in steps.steps_s)
    middle = median(found)
    spread = max(found[-1] - found[0], LEAST_SPREAD * middle)
    _put(node, "overhead_s", middle, (max(0.0, found[0] - spread), found[-1] + spread))


def refine(node: Node, steps: Sequence[Observation], link: str) -> None:
    """Fit anew to steps of two ranks, where an exchange meets more than a collective alone.

    Ranges stay as wide as the fit to collectives left them.

    Args:
        steps: of two ranks, those that exchange nothing too.
        link: that they use.
    """
    hardware = waiting(parse(node))
    start = replace(hardware, ranks_per_node=2 if link == "intra" else 1)
    found, _ = fit(start, steps, COLLECTIVES_PRIOR)
    codecs = (f"{CODEC_RATES}.{name}" for name, _ in found.codec_rates)
    for key in [*link_keys(start), *TOLD_BY_STEPS, *codecs]:
        value = get(found, key)
        if key not in node["assumed"] or value is None:
            continue
        low, high = node["assumed"][key]
        if low > 0:
            factor = math.sqrt(high / low)
            low, high = value / factor, value * factor
        _put(node, key, value, (low, high))


def predicted_rows(
    places: Sequence[CalibratedRanks],
    exchanges: Mapping[str, Mapping[str, Any]],
    hardware: Hardware,
) -> list[Node]:
    """Return a row for each measured collective of an exchange, with its prediction."""
    found: list[Node] = []
    for place in places:
        spanned = place.link == "inter" and place.ranks == LARGEST_FITTED
        ranks = replace(hardware, ranks_per_node=1) if spanned else hardware
        network = Network(ranks, place.ranks)
        for row in place.rows:
            if exchange := exchanges.get(row["algorithm"]):
                seconds = collective_s(row, exchange, network)
                error = seconds / row["time_s"]["median"] - 1
                told = {"link": place.link, "ranks": place.ranks, "predicted_s": seconds}
                found.append({**row, **told, "error": error})
    return found


def observation(
    name: str, ranks: int, settings: Mapping[str, Any], steps_s: Sequence[float]
) -> Observation:
    """Return the steps of one strategy on one number of ranks, as cells that are predicted.

    Args:
        name: "none", or the exchange and how it runs.
        settings: of the run, composed, whose model is a replay.
        steps_s: median of each repeat.
    """
    profile = replayed(settings)
    assert profile  # its model is a replay
    point = ranks, settings["batch_size"], tuple(steps_s)
    return Observation(name, profile, Strategy.of(settings), *point)


def waiting(hardware: Hardware) -> Hardware:
    """Return the hardware for replayed layers: they wait, so nothing slows their computing."""
    assumed = tuple(each for each in hardware.assumed if each.key not in COMPUTE_TERMS)
    return replace(hardware, contention=0.0, jitter=0.0, assumed=assumed)


def predicted_steps(steps: Iterable[Observation], hardware: Hardware) -> list[Node]:
    """Return a row for each strategy and number of ranks: measured, predicted, and intervals."""
    own = waiting(hardware)
    group = Group("", tuple(steps), own, tuple(uncertainty_samples(own)), fitted=False)
    return [_row(group, each) for each in group.observations]


def _row(group: Group, each: Observation) -> Node:
    cell = scored_cell(group, each)
    drawn = [each.predicted_s(machine) for machine in group.draws]
    residual = residual_of(group.hardware, each.strategy, each.world_size) or 0.0
    ends = {
        name: interval(cell.predicted_s, drawn, residual, level)
        for name, level in INTERVALS.items()
    }
    return {
        **asdict(cell),
        "measured_s": each.step_s,
        "repeats_s": list(each.steps_s),
        "error": cell.error,
        "exposed_s": cell.exposed_s,
        "exposed_error": cell.exposed_error,
        "intervals": ends,
        "inside": {level: low <= each.step_s <= high for level, (low, high) in ends.items()},
    }


def scored(rows: Iterable[Mapping[str, Any]], held: bool, least_exposed: float) -> Node:
    """Summarise the rows of `predicted_steps` on more ranks than two (`held`), or on two.

    Args:
        least_exposed: share of a step below which its exposed exchange is not scored.
    """
    chosen = [row for row in rows if (row["world_size"] > LARGEST_FITTED) == held]
    names = ScoredCell.__dataclass_fields__
    cells = (
        ScoredCell(**{key: row[key] for key in names} | {"measured_s": row["repeats_s"]})
        for row in chosen
    )
    found = score(held_out(cells), least_exposed)
    with_exchange = [row for row in chosen if row["strategy"] != NONE]
    coverage = {
        level: sum(row["inside"][level] for row in with_exchange) / max(1, len(with_exchange))
        for level in INTERVALS
    }
    return {**asdict(found), "skill": found.skill, "coverage": coverage}

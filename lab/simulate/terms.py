"""Terms of GPUs that no data sheet gives, learned from published scaling, and their uncertainty.

`lab.score published` fits them (lab/claims/published.py) to all published figures at hand and
writes conf/terms/published.yaml, which is the prior of every GPU's hardware: its median is the
point of a prediction, and its covariance, which includes how much sources differ, makes the
interval.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

import numpy as np

from lab.settings.files import read_file
from lab.simulate.hardware import Hardware, Learned, Range, with_value
from lab.simulate.strategy import Strategy

# Degrees of freedom of errors: some figures have causes of their own, as a slow input pipeline.
FREEDOM = 4.0  # `reach` has its quantiles
LEVELS = (0.8, 0.95)
FEW = 0.25  # of draws: fewer on one side of a prediction are not the half of a symmetric error
LINKS = ("intra", "inter", "server")
RATE = "bandwidth_bytes_per_s"
WIRE = "wire"  # a byte's time inside a node, relative to the nominal; no field of Hardware


@dataclass(frozen=True)
class Term:
    """A term before any figure is seen: its logarithm is normal.

    Attributes:
        median: of the prior. spread: standard deviation of its logarithm.
        varies: which random effect of a source multiplies it: "host" or "link".
        source: of the prior.
    """

    median: float
    spread: float
    varies: str
    source: str


TERMS = {
    "engage": Term(0.03, 0.6, "host", "PyTorch's DDP benchmark: 3 to 6 % from one GPU to two"),
    "wire_passes": Term(1.0, 0.7, "host", "a sum reads two values and writes one per value sent"),
    "jitter": Term(0.01, 0.7, "host", "range that the presets declare, 0 to 2 %"),
    "incast": Term(0.05, 0.8, "link", "assumed to be small, and uncertain by a factor of two"),
    WIRE: Term(1.15, 0.2, "link", "nccl-tests reach 70 to 100 % of nominal rates"),
}
EFFECTS = ("host", "link")


def with_terms(hardware: Hardware, values: Mapping[str, float]) -> Hardware:
    """Return the hardware with values of terms; `wire` divides the rates of some links."""
    own = {key: value for key, value in values.items() if key != WIRE}
    changed = replace(hardware, **own)
    for way in _slowed(hardware) if WIRE in values else ():
        rate = getattr(changed, way).bandwidth_bytes_per_s / values[WIRE]
        changed = with_value(changed, f"{way}.{RATE}", rate)
    return changed


def _slowed(hardware: Hardware) -> list[str]:
    """List the kinds of unmeasured links that `wire` slows: those inside a node.

    Between nodes, the files give the rate of a message's payload, and a ring's all-reduces reach
    it: on 10 Gb/s Ethernet, 97 % from 2 to 8 nodes (HKBU-HPML/ddl-benchmarks, BERT-large).
    """
    return [way for way in unmeasured(hardware) if way != "inter"]


def unmeasured(hardware: Hardware) -> list[str]:
    """List the kinds of links that the hardware has, and that neither a log nor a fit covers."""
    covered = {
        "inter" if curve.ranks > hardware.ranks_per_node else "intra" for curve in hardware.measured
    } | {way for way in LINKS if f"{way}.{RATE}" in hardware.fitted}
    return [way for way in LINKS if getattr(hardware, way) and way not in covered]


def learned(
    hardware: Hardware, given: Collection[str] = (), left_out: str | None = None
) -> Hardware:
    """Return a GPU's hardware with the learned terms, but for those that are `given`.

    They stand for the contention and the jitter that its file assumes. What a log has measured of
    links needs no term.

    Args:
        left_out: the source whose figures the terms must not know; see `published`.
    """
    if not (hardware.on_gpu and hardware.published_terms):
        return hardware
    slowed, open_links = _slowed(hardware), unmeasured(hardware)
    measured = {"incast"} if hardware.measured and "inter" not in open_links else set[str]()
    measured |= set() if slowed else {WIRE}
    prior = published(left_out).without({*given, *measured})
    values = {key: math.exp(mean) for key, mean in zip(prior.keys, prior.means, strict=True)}
    wire = values.get(WIRE, 1.0)
    replaced = {"contention"} if "wire_passes" in values else set[str]()
    replaced |= values.keys()
    moved = {f"{way}.{RATE}" for way in slowed}
    assumed = tuple(
        Range(each.key, each.low / wire, each.high / wire) if each.key in moved else each
        for each in hardware.assumed
        if each.key not in replaced
    )
    if "contention" in replaced:
        hardware = replace(hardware, contention=0.0)
    hardware = with_terms(hardware, values)
    return replace(hardware, assumed=assumed, learned=prior, residual=prior.residual)


def as_fitted(hardware: Hardware, keys: Collection[str]) -> Hardware:
    """Return the hardware with values that a fit found: neither ranges nor learned terms of them.

    Terms that the fit does not determine stay, and so does the rate of other links.

    Args:
        keys: dotted, of those values.
    """
    assumed = tuple(each for each in hardware.assumed if each.key not in keys)
    once = tuple(dict.fromkeys((*hardware.fitted, *keys)))  # a fit may start from another one
    found = replace(hardware, assumed=assumed, fitted=once)
    if found.learned:
        known = {*keys} if _slowed(found) else {*keys, WIRE}
        found = replace(found, learned=found.learned.without(known))
    return found


def drawn(hardware: Iterable[Hardware]) -> Iterator[Hardware]:
    """Draw the learned terms of each anew, jointly, the same each time."""
    chance = random.Random(3)
    for each in hardware:
        if (prior := each.learned) is None:
            yield each
            continue
        normal = np.array([chance.gauss(0, 1) for _ in prior.keys])
        moved = np.linalg.cholesky(np.array(prior.covariance)) @ normal
        values = dict(zip(prior.keys, np.exp(np.array(prior.means) + moved).tolist(), strict=True))
        if WIRE in values:  # the links have its median already
            values[WIRE] /= math.exp(prior.means[prior.keys.index(WIRE)])
        yield with_terms(each, values)


@cache
def published(left_out: str | None = None) -> Learned:
    """Read conf/terms/published.yaml.

    Args:
        left_out: a source whose claims are to be predicted: terms fitted to all others. None, or
            none of the fit's: those fitted to all.

    Raises:
        ConfigError: there is no such file.
    """
    node = read_file("terms", "published")
    node = node["without"].get(left_out, node)
    covariance = tuple(tuple(map(float, row)) for row in node["covariance"])
    means = (math.log(value) for value in node["medians"].values())
    return Learned(tuple(node["medians"]), tuple(means), covariance, float(node["residual"]))


def residual_of(hardware: Hardware, strategy: Strategy, world_size: int) -> float | None:
    """Return the error that remains in a step's prediction: only of steps that exchange."""
    return hardware.residual if world_size > 1 and strategy.exchanges else None


def interval(point: float, others: Iterable[float], residual: float, level: float) -> list[float]:
    """Return the interval of a prediction: what is open, and what the model misses.

    Args:
        point: the prediction, which is the median.
        others: the same with drawn values of what is open.
        residual: scale of the logarithm's error that remains.
        level: share of values inside.
    """
    errors = [math.log(each / point) for each in others]
    ends = zip((-1, 1), (min, max), strict=True)
    return [
        end(reach(point, math.hypot(_spread(errors, sign), residual), level)) for sign, end in ends
    ]


def _spread(errors: Sequence[float], sign: int) -> float:
    """Return the scale of errors to one side: of all errors, unless few lie on that side.

    What can only be worse than it is assumed to be, such as a part that does not scale, makes no
    better end.
    """
    of_sign = [error for error in errors if sign * error > 0]
    if len(of_sign) < FEW * len(errors):
        return math.sqrt(2 * sum(error**2 for error in of_sign) / len(errors))
    return math.sqrt(fmean(error**2 for error in errors))


def reach(point: float, scale: float, level: float) -> list[float]:
    """Return the ends around a median whose logarithm has Student's t errors of such a scale.

    With 4 degrees of freedom its quantiles have a closed form (Shaw, J. Comput. Finance 2006,
    section 3.3); scipy, which has all of them, takes longer to load than a prediction.
    """
    tails = math.sqrt(1 - level**2)
    quantile = 2 * math.sqrt(math.cos(math.acos(tails) / 3) / tails - 1)
    factor = math.exp(quantile * scale)
    return [point / factor, point * factor]

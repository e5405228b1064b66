"""The rules that explain why a multi-rank run is not faster.

A step is divided into the time of evenly divided computing (`ideal`) and losses. The verdict is the
largest loss:

    input      waiting for data (breakdown)                                   input-bound
    straggler  the slowest rank's own work less the others' median, if it     straggler-bound, or
               stands out from noise (lab.measure.stragglers)
               compute-bound if ranks share processors and none stands out
    exchange   the step less that of `none` on as many ranks                  bandwidth-bound, or
               latency-bound if messages are small; compute-bound if encoding is most of it
    fixed      the rest: compute that did not shrink as ranks were added      launch-bound, or
               compute-bound if ranks share processors or each has a batch of the same size

and compute-bound, as it should be, if no loss counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lab.diagnosis.evidence import Evidence
from lab.measure.stragglers import Slow
from lab.record.schema import SHARED, worded

# Kinds of own work that are no phase of a step, in words.
WHERE = {"between": "between steps", "input": "to load its input", "update": "to update"}
# A loss below this share of the step does not count: without it, speedup would be at most a
# ninth higher. Nor does one below the study's noise floor.
LOSS_SHARE = 0.1
# A second loss of this share of the largest is named with it.
CLOSE = 0.8
# Bytes below which a message's cost hardly depends on its size: all-reduces of 4 and of
# 64 KiB take equally long (docs/results/exchange/collective_2.json and collective_4.json).
SMALL_MESSAGE_BYTES = 2**16
# Encoding that takes this share of the exposed communication is its cause.
CODEC_SHARE = 0.5


@dataclass(frozen=True)
class Loss:
    """Time of a step beyond ideal compute.

    Attributes:
        part: "input", "straggler", "exchange" or "fixed".
        verdict: the verdict on a run whose largest loss this is.
        seconds: time lost per step.
        what: the end of a sentence that begins "… of the step".
    """

    part: str
    verdict: str
    seconds: float
    what: str


@dataclass(frozen=True)
class Verdict:
    """The explanation of a run.

    Attributes:
        losses: the losses that count, the largest first; the `named` ones are too close to be
            told apart. Empty for a run that is compute-bound or undecided.
        decided: False if the records can neither tell exchange from compute nor name a slow rank.
    """

    losses: tuple[Loss, ...]
    decided: bool

    @property
    def named(self) -> tuple[Loss, ...]:
        """The losses that the verdict names."""
        return tuple(x for x in self.losses if x.seconds >= CLOSE * self.losses[0].seconds)

    @property
    def name(self) -> str:
        """The verdict's name: "bandwidth-bound" or two such, "compute-bound" or "undecided"."""
        if not self.decided:
            return "undecided"
        return " and ".join(dict.fromkeys(x.verdict for x in self.named)) or "compute-bound"


def judge(evidence: Evidence) -> Verdict:
    """Apply the rules."""
    known = [loss for loss in _losses(evidence) if not math.isnan(loss.seconds)]
    least = evidence.step_s * max(LOSS_SHARE, 0 if math.isnan(evidence.floor) else evidence.floor)
    counting = [loss for loss in known if loss.seconds >= least]
    if math.isnan(evidence.exposed_s):  # own times tell a slow rank without it
        counting = [loss for loss in counting if loss.part == "straggler" and evidence.slow]
        return Verdict(tuple(counting), decided=bool(counting))
    return Verdict(tuple(sorted(counting, key=lambda loss: -loss.seconds)), decided=True)


def worded_phase(slow: Slow) -> str:
    """Say where a rank is slow: "in backward"."""
    return WHERE.get(slow.phase, f"in {slow.phase}")


def _losses(e: Evidence) -> Iterator[Loss]:
    yield Loss("input", "input-bound", e.input_s, "waits for data")
    yield Loss("straggler", *_straggler(e))
    yield Loss("exchange", *_exchange(e))
    yield Loss("fixed", *_fixed(e))


def _straggler(e: Evidence) -> tuple[str, float, str]:
    clause = f"waits for rank {e.slowest_rank}"
    if phases := [worded_phase(slow) for slow in e.slow if slow.rank == e.slowest_rank]:
        # Ranks that share processors share them alike: this one stands out from the others.
        return "straggler-bound", e.straggler_s, f"{clause}, slow {' and '.join(phases)}"
    if _shared(e):
        return "compute-bound", e.straggler_s, f"{clause} while {worded(e.one.emulation)}"
    return "straggler-bound", e.straggler_s, clause


def _shared(e: Evidence) -> bool:
    """Tell whether ranks share processors."""
    return any(one.kind in SHARED for one in e.one.emulation)


def _exchange(e: Evidence) -> tuple[str, float, str]:
    if e.codec_s >= CODEC_SHARE * e.exposed_s:
        return "compute-bound", e.exposed_s, "waits for gradients, mostly to be encoded and decoded"
    if e.payload_bytes < SMALL_MESSAGE_BYTES * e.messages:
        return "latency-bound", e.exposed_s, "waits for gradients in small messages"
    return "bandwidth-bound", e.exposed_s, "waits for gradients"


def _fixed(e: Evidence) -> tuple[str, float, str]:
    if _shared(e):
        return "compute-bound", e.fixed_s, f"is lost because {worded(e.one.emulation)}"
    if e.one.scaling == "weak":
        return "compute-bound", e.fixed_s, "is lost because ranks slow each other's compute"
    return "launch-bound", e.fixed_s, "is compute that did not shrink with the batch of a rank"

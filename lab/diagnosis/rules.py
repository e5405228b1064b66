"""The rules that explain why a multi-rank run is not faster, and what would remedy it.

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from lab.analysis.records import number
from lab.diagnosis.evidence import Evidence
from lab.draw.text import number_of, short_text
from lab.measure.stragglers import Slow
from lab.record.schema import SHARED, worded
from lab.sync.pattern import Begin, Transfer, local

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
class Explanation:
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


def judge(evidence: Evidence) -> Explanation:
    """Apply the rules."""
    known = [loss for loss in _losses(evidence) if not math.isnan(loss.seconds)]
    least = evidence.step_s * max(
        LOSS_SHARE, 0 if math.isnan(evidence.noise_floor) else evidence.noise_floor
    )
    counting = [loss for loss in known if loss.seconds >= least]
    if math.isnan(evidence.exposed_s):  # own times tell a slow rank without it
        counting = [loss for loss in counting if loss.part == "straggler" and evidence.slow]
        return Explanation(tuple(counting), decided=bool(counting))
    return Explanation(tuple(sorted(counting, key=lambda loss: -loss.seconds)), decided=True)


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
        return "compute-bound", e.straggler_s, f"{clause} while {worded(e.one.record.emulation)}"
    return "straggler-bound", e.straggler_s, clause


def _shared(e: Evidence) -> bool:
    """Tell whether ranks share processors."""
    return any(one.kind in SHARED for one in e.one.record.emulation)


def _exchange(e: Evidence) -> tuple[str, float, str]:
    may_be_none = e.point.exposed_exchange_s.lo <= 0  # False if it has no interval
    unsure = " (which may be noise: the interval includes 0)" if may_be_none else ""
    if e.codec_s >= CODEC_SHARE * e.exposed_s:
        return "compute-bound", e.exposed_s, "waits for gradients, mostly to be encoded and decoded"
    if e.payload_bytes < SMALL_MESSAGE_BYTES * e.messages:
        return "latency-bound", e.exposed_s, f"waits for gradients in small messages{unsure}"
    return "bandwidth-bound", e.exposed_s, f"waits for gradients{unsure}"


def _fixed(e: Evidence) -> tuple[str, float, str]:
    if _shared(e):
        return "compute-bound", e.fixed_s, f"is lost because {worded(e.one.record.emulation)}"
    if e.one.scaling == "weak":
        return "compute-bound", e.fixed_s, "is lost because ranks slow each other's compute"
    return "launch-bound", e.fixed_s, "is compute that did not shrink with the batch per rank"


# Share of backward that can hide an exchange: the first gradients come a little later.
HIDING_SHARE = 0.8
BACKWARD_SHARE = 2 / 3  # share of compute: one pass forward, two backward (Kim et al., slide 11)
ONEBIT_SHARE = 1 / 32  # share of the bytes
ROUND = 10  # steps, H of strategy=local_sgd
MORE_THAN_RING = 1.2  # factor by which the busiest rank sends more than in a ring
MANY_RANKS = 8  # ranks from which a tree's 2·log2 N messages are well below a ring's 2(N-1)
# An exact remedy is preferred to an inexact one that saves at most this factor more.
GOOD_ENOUGH = 0.8


@dataclass(frozen=True)
class Remedy:
    """A change to try.

    `lab.train` accepts it with the run's other settings, without those of a choice that it
    replaces (`strategy=` replaces exchange, sync, overlap and bucket_mb).

    Attributes:
        switch: settings, as typed; empty if only the number of ranks changes.
        why: the reason, as a clause.
        saves_s: estimated saving per step; NaN is unknown.
        num_ranks: number of ranks to start; None: as many as before.
    """

    switch: str
    why: str
    saves_s: float = math.nan
    num_ranks: int | None = None

    @property
    def text(self) -> str:
        """The change as a user reads it: "8 ranks", "overlap=true bucket_mb=25"."""
        if self.num_ranks is None:
            return self.switch
        ranks = number_of(self.num_ranks, "rank")
        return f"{ranks} with {self.switch}" if self.switch else ranks


def remedies(evidence: Evidence, verdict: Explanation) -> list[Remedy]:
    """List changes to try: the best for each loss that the verdict names, then all others."""
    if not verdict.decided:
        return []
    if not verdict.losses:
        if math.isnan(evidence.fixed_s):  # whether compute shrinks is unknown
            return []
        ranks = 2 * evidence.one.world_size
        return [_ranks(evidence, ranks, "compute still shrinks with each added rank")]
    firsts, others = list[Remedy](), list[Remedy]()
    for loss in verdict.named:
        several = list(BY_VERDICT[loss.part, loss.verdict](evidence, loss))
        most = max((r.saves_s for r in several if not math.isnan(r.saves_s)), default=0.0)
        good = [remedy for remedy in several if remedy.saves_s >= GOOD_ENOUGH * most]
        first = (good or several)[:1]
        firsts += first
        others += [remedy for remedy in several if remedy not in first]
    once: dict[str, Remedy] = {}  # one change may help against two losses
    for remedy in [*firsts, *others]:
        once.setdefault(remedy.text, remedy)
    return list(once.values())


def _for_bandwidth(e: Evidence, loss: Loss) -> Iterator[Remedy]:
    """List remedies against bandwidth: exact ones, then fewer bits, then other algorithms."""
    size = e.one.world_size
    ring_bytes = 2 * number(e.one.record.gradient_bytes) * (size - 1) / size
    if e.pattern.takes_exchanges and e.payload_bytes > MORE_THAN_RING * ring_bytes:
        saves = loss.seconds * (1 - ring_bytes / e.payload_bytes)
        why = f"no rank would send more than {short_text(ring_bytes / 1e6)} MB"
        if e.pattern.takes_any_exchange:
            yield Remedy("exchange=allreduce", why, saves)
        else:
            yield from _strategy(e, "allreduce", why, saves)
    if e.pattern.begins is Begin.AFTER_BACKWARD and not e.pattern.no_overlap:
        backward_s = BACKWARD_SHARE * (e.step_s - e.exposed_s)
        if not math.isnan(e.backward_s):
            backward_s = e.backward_s
        hidden = min(loss.seconds, HIDING_SHARE * backward_s)
        yield Remedy("overlap=true bucket_mb=25", "the backward pass would hide it", hidden)
    if e.payload_bytes > ring_bytes / 4:
        saves = loss.seconds * (1 - ONEBIT_SHARE)
        yield from _strategy(e, "onebit", "sends 1/32 of the bytes, but has to encode them", saves)
    yield from _rounds(e, loss.seconds)
    if e.one.transform == "" and e.one.settings.get("model", "").startswith("alexnet"):
        yield Remedy(
            "transform=fc1x1", "most bytes are in fully connected layers; this changes the model"
        )
    yield _larger_batch(e, f"each exchange serves more {e.one.record.unit}s")


def _for_latency(e: Evidence, loss: Loss) -> Iterator[Remedy]:
    bucket_mb = e.settings.get("bucket_mb")
    if bucket_mb is not None and bucket_mb < 25:
        yield Remedy("bucket_mb=25", "fewer, larger messages")
    size = e.one.world_size
    # Ranks cannot send to each other over Horovod, nor from GPUs over Gloo.
    exchange, comm = (e.settings.get(x, {}).get("_target_", "") for x in ("exchange", "comm"))
    from_gpus = e.one.settings.get("device") == "cuda" and e.settings.get("backend") == "gloo"
    can_send = "horovod" not in comm and not from_gpus
    sums_alone = (
        Transfer.PARTS_OF_GRADIENTS in e.pattern.transfers
    )  # which its sync scatters itself
    takes_tree = e.pattern.takes_exchanges and not sums_alone and can_send
    if size >= MANY_RANKS and takes_tree and not exchange.endswith("Tree"):
        steps = 2 * math.ceil(math.log2(size))
        why = f"{steps} messages in sequence instead of {2 * (size - 1)}"
        yield Remedy("exchange=tree", why, loss.seconds * (1 - steps / (2 * (size - 1))))
    yield from _rounds(e, loss.seconds)
    yield _larger_batch(e, f"the same number of messages serves more {e.one.record.unit}s")


def _rounds(e: Evidence, seconds: float, then: str = "") -> Iterator[Remedy]:
    """List remedies that exchange less often. `seconds`: present cost per step; NaN is unknown."""
    every = 2 * e.pattern.every if e.pattern.own_replicas else ROUND
    why = f"ranks exchange weights every {every} steps{then}"
    if e.pattern.own_replicas:
        yield Remedy(f"sync.every={every}", why, seconds / 2)
    elif e.pattern.transfers and not (
        e.settings.get("precision") == "fp16" and local(every).no_fp16
    ):
        yield from _strategy(e, "local_sgd", why, seconds * (1 - 1 / every))


def _for_codec(e: Evidence, loss: Loss) -> Iterator[Remedy]:
    yield from _strategy(e, "auto", "tries all exchanges and chooses the fastest")
    yield from _strategy(e, "bf16", "half the bytes, and almost no time to encode")


def _for_input(e: Evidence, loss: Loss) -> Iterator[Remedy]:
    data = e.settings.get("data", {})
    if "workers" in data:
        more = max(1, 2 * data["workers"])
        yield Remedy(f"data.workers={more}", "more processes decode", loss.seconds / 2)
    if "size" in data:
        channels = 3 if "workers" in data else 1  # decoded images, or the lab's digits
        shape = f"data.shape=[{channels},{data['size']},{data['size']}]"
        yield Remedy(
            f"data=synthetic {shape}", "shows the rate without loading input", loss.seconds
        )


def _for_straggler(e: Evidence, loss: Loss) -> Iterator[Remedy]:
    yield from _rounds(e, math.nan, "; find what slows that rank first")


def _for_fixed(e: Evidence, loss: Loss) -> Iterator[Remedy]:
    yield _larger_batch(e, f"more {e.one.record.unit}s for the same fixed cost")
    if e.settings.get("compile") is False:
        yield Remedy("compile=true", "fewer, larger kernels")


def _for_shared(e: Evidence, loss: Loss) -> Iterator[Remedy]:
    fewer = max(1, e.one.world_size // 2)
    yield _ranks(e, fewer, "ranks that share cores or slow each other down gain little")


def _strategy(e: Evidence, name: str, why: str, saves_s: float = math.nan) -> Iterator[Remedy]:
    """List another strategy for the same model; nothing if the run uses it already."""
    if e.one.strategy != name:
        transform = " transform=fc1x1" if e.one.transform else ""  # there is no alternative
        yield Remedy(f"strategy={name}{transform}", why, saves_s)


def _ranks(e: Evidence, number: int, why: str) -> Remedy:
    """List another number of ranks, with the nearest batch that divides among them."""
    unit = e.settings.get("accumulate", 1) * (number if e.one.scaling == "strong" else 1)
    batch = max(1, round(e.one.fixed_batch_size / unit)) * unit
    switch = "" if batch == e.one.fixed_batch_size else f"batch_size={batch}"
    return Remedy(switch, why, num_ranks=number)


def _larger_batch(e: Evidence, why: str) -> Remedy:
    return Remedy(f"batch_size={2 * e.one.fixed_batch_size}", why)


BY_VERDICT: Mapping[tuple[str, str], Callable[[Evidence, Loss], Iterator[Remedy]]] = {
    ("input", "input-bound"): _for_input,
    ("straggler", "straggler-bound"): _for_straggler,
    ("straggler", "compute-bound"): _for_shared,
    ("exchange", "bandwidth-bound"): _for_bandwidth,
    ("exchange", "latency-bound"): _for_latency,
    ("exchange", "compute-bound"): _for_codec,
    ("fixed", "launch-bound"): _for_fixed,
    ("fixed", "compute-bound"): _for_shared,
}

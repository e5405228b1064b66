"""Which switch would help a run, by what it loses, and by about how much."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from lab.diagnosis.evidence import Evidence
from lab.diagnosis.rules import Loss, Verdict

# Of backward, in which an overlapped exchange can hide: the first gradients come a little later.
HIDING_SHARE = 0.8
BACKWARD_SHARE = 2 / 3  # of compute: one pass forward, two backward (Kim et al., slide 11)
ONEBIT_SHARE = 1 / 32  # of the bytes
ROUND = 10  # steps, H of strategy=local_sgd
MORE_THAN_RING = 1.2  # a busiest rank that sends this much more than around a ring
MANY_RANKS = 8  # from here on a tree's 2·log2 N messages are well below a ring's 2(N-1)
# A remedy that keeps gradients exact is preferred to one that saves no more than this much more.
GOOD_ENOUGH = 0.8


@dataclass(frozen=True)
class Remedy:
    """A switch.

    Attributes:
        switch: settings, as typed.
        why: a clause.
        saves_s: of the step, estimated; NaN is unknown.
    """

    switch: str
    why: str
    saves_s: float = math.nan


def remedies(evidence: Evidence, verdict: Verdict) -> list[Remedy]:
    """What to try: the best for each loss that the verdict names, then what else there is."""
    if not verdict.decided:
        return []
    if not verdict.losses:
        ranks = 2 * evidence.one.world_size
        return [Remedy(f"world_size={ranks}", "compute still shrinks with every rank")]
    ranked = [_ranked(evidence, loss) for loss in verdict.named]
    firsts = [best for best, *_ in ranked]
    others = [remedy for _, *rest in ranked for remedy in rest]
    once: dict[str, Remedy] = {}  # one switch may help against two losses
    for remedy in [*firsts, *others]:
        once.setdefault(remedy.switch, remedy)
    return list(once.values())


def _ranked(evidence: Evidence, loss: Loss) -> list[Remedy]:
    """What helps against one loss, the best first, the others as they come."""
    found = list(BY_VERDICT[loss.part, loss.verdict](evidence, loss))
    most = max((remedy.saves_s for remedy in found if not math.isnan(remedy.saves_s)), default=0.0)
    best = next((remedy for remedy in found if remedy.saves_s >= GOOD_ENOUGH * most), found[0])
    return [best, *(remedy for remedy in found if remedy is not best)]


def _bandwidth(e: Evidence, loss: Loss) -> Iterator[Remedy]:
    """Exact ones first, then fewer bits, then other algorithms."""
    size = e.one.world_size
    ring_bytes = 2 * e.one.gradient_bytes * (size - 1) / size
    if e.payload_bytes > MORE_THAN_RING * ring_bytes:
        saves = loss.seconds * (1 - ring_bytes / e.payload_bytes)
        why = f"no rank would send more than {ring_bytes / 1e6:.3g} MB"
        yield Remedy("exchange=allreduce", why, saves)
    if e.settings.get("overlap") is False and e.one.strategy != "local_sgd":
        hidden = min(loss.seconds, HIDING_SHARE * _backward_s(e))
        yield Remedy("overlap=true bucket_mb=25", "backward would hide it", hidden)
    if e.payload_bytes > ring_bytes / 4:
        saves = loss.seconds * (1 - ONEBIT_SHARE)
        yield Remedy("strategy=onebit", "sends 1/32 of the bytes, and encodes them", saves)
    yield from _rounds(e, loss)
    if e.one.transform == "" and e.one.settings.get("model", "").startswith("alexnet"):
        yield Remedy("transform=fc1x1", "most bytes are fully connected; another model")
    yield _larger_batch(e, "the same exchange for more images")


def _backward_s(e: Evidence) -> float:
    compute_s = e.step_s - e.exposed_s
    return BACKWARD_SHARE * compute_s if math.isnan(e.backward_s) else e.backward_s


def _latency(e: Evidence, loss: Loss) -> Iterator[Remedy]:
    if e.settings.get("bucket_mb") is not None:
        yield Remedy("bucket_mb=25", "fewer, larger messages (null: one bucket)")
    size = e.one.world_size
    if size >= MANY_RANKS and "tree" not in e.one.strategy:
        steps = 2 * math.ceil(math.log2(size))
        why = f"{steps} messages one after the other instead of {2 * (size - 1)}"
        yield Remedy("exchange=tree", why, loss.seconds * (1 - steps / (2 * (size - 1))))
    yield from _rounds(e, loss)
    yield _larger_batch(e, "the same messages for more images")


def _rounds(e: Evidence, loss: Loss) -> Iterator[Remedy]:
    every = e.settings.get("sync", {}).get("every")
    if every:
        yield Remedy(f"sync.every={2 * every}", "half as many exchanges", loss.seconds / 2)
    else:
        saves = loss.seconds * (1 - 1 / ROUND)
        yield Remedy("strategy=local_sgd", f"exchanges weights every {ROUND} steps", saves)


def _codec(e: Evidence, loss: Loss) -> Iterator[Remedy]:
    yield Remedy("strategy=auto", "compresses a bucket only where that is faster")
    yield Remedy("strategy=bf16", "half the bytes for next to no encoding")


def _input(e: Evidence, loss: Loss) -> Iterator[Remedy]:
    workers = e.settings.get("data", {}).get("workers")
    if workers is not None:
        more = max(1, 2 * workers)
        yield Remedy(f"data.workers={more}", "more processes that decode", loss.seconds / 2)
    yield Remedy("data=synthetic", "shows the rate without input", loss.seconds)


def _straggler(e: Evidence, loss: Loss) -> Iterator[Remedy]:
    yield Remedy(
        "strategy=local_sgd", f"ranks meet every {ROUND} steps; find what slows that rank first"
    )


def _fixed(e: Evidence, loss: Loss) -> Iterator[Remedy]:
    yield _larger_batch(e, "more images for the same fixed cost")
    if e.settings.get("compile") is False:
        yield Remedy("compile=true", "fewer, larger kernels")


def _shared(e: Evidence, loss: Loss) -> Iterator[Remedy]:
    fewer = max(1, e.one.world_size // 2)
    yield Remedy(f"world_size={fewer}", "ranks that share or starve each other gain little")


def _larger_batch(e: Evidence, why: str) -> Remedy:
    return Remedy(f"batch_size={2 * e.one.batch}", why)


BY_VERDICT: Mapping[tuple[str, str], Callable[[Evidence, Loss], Iterator[Remedy]]] = {
    ("input", "input-bound"): _input,
    ("straggler", "straggler-bound"): _straggler,
    ("straggler", "compute-bound"): _shared,
    ("exchange", "bandwidth-bound"): _bandwidth,
    ("exchange", "latency-bound"): _latency,
    ("exchange", "compute-bound"): _codec,
    ("fixed", "launch-bound"): _fixed,
    ("fixed", "compute-bound"): _shared,
}

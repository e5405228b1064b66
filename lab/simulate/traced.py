"""Profile of a step from a trace of torch.profiler (Kineto): one rank of a data-parallel run.

A trace has kernels by stream, the calls that launched them, and NCCL's kernels with their sizes. It
has neither parameters nor layers, so a layer here is what backward computes between two
all-reduces, and its parameters are those of the bucket that is then ready
(docs/how-to/predict_from_trace.md).
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from lab.draw.text import number_of
from lab.model.profile import VALUE_BYTES, Layer, Profile
from lab.settings.errors import ConfigError
from lab.settings.storage import events_of, number, read_trace

KEY = "profile.from"
MICRO = 1e-6
Event = Mapping[str, Any]
STEP = re.compile(r"ProfilerStep ?#\d+")
BACKWARD = re.compile(r"backward|autograd::", re.IGNORECASE)
# Categories in lower case: until 2022 they began with a capital.
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset")
ON_HOST = ("cpu_op", "operator", "user_annotation")
CALLS = ("cuda_runtime", "cuda_driver", "runtime")
TYPE_BYTES = {"float": 4, "half": 2, "bfloat16": 2, "double": 8, "int": 4, "long": 8}
PARTS = ("forward", "backward", "exposed exchange", "rest")  # of a step, in the order of time
ALL_REDUCE, REDUCE_SCATTER = "allreduce", "reducescatter"
COLLECTIVES = (ALL_REDUCE, REDUCE_SCATTER, "allgather", "broadcast", "reduce", "sendrecv")


@dataclass(frozen=True)
class Launch:
    """A kernel or copy on the device; times are seconds since the trace began."""

    launched_s: float  # by the host
    begin_s: float
    end_s: float
    backward: bool
    collective: str  # of COLLECTIVES, or "nccl"; "": it computes or copies
    args: Event  # also those of the operation that launched it


@dataclass(frozen=True)
class TracedStep:
    """A step as the device saw it; buckets are in the order in which backward fills them."""

    bucket_bytes: tuple[int, ...]
    computed_s: tuple[float, ...]  # forward, and backward until each bucket's gradients were ready
    gaps_s: tuple[float, ...]  # parts of these in which nothing computed
    exposed_s: float  # from the end of backward to that of the last all-reduce
    rest_s: float  # from then on until the next step began
    num_kernels: int  # of forward and backward

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return sum(self.computed_s) + self.exposed_s + self.rest_s


@dataclass(frozen=True)
class Traced:
    """The step of median length among `num_steps`, its profile, and the ranks; None: not known."""

    profile: Profile
    step: TracedStep
    num_steps: int
    num_ranks: int | None

    def __str__(self) -> str:
        step = self.step
        forward_s, *backward_s = step.computed_s
        seconds = (forward_s, sum(backward_s), step.exposed_s, step.rest_s)
        parts = ", ".join(f"{name} {1e3 * s:.2f}" for name, s in zip(PARTS, seconds, strict=True))
        sizes = ", ".join(f"{size / 2**20:.3g}" for size in step.bucket_bytes)
        ranks = number_of(self.num_ranks, "rank") if self.num_ranks else "unknown ranks"
        return (
            f"{self.profile.source}, {ranks}, median of {number_of(self.num_steps, 'step')}: "
            f"{1e3 * step.step_s:.2f} ms ({parts}); MiB reduced: {sizes}"
        )


def read_profile(path: Path, changes: Mapping[str, Any]) -> Traced:
    """Read the profile of a trace's steps, with the keys that `changes` give.

    Raises:
        ConfigError: the file is no trace, lacks a piece, or a change is wrong.
    """
    trace = read_trace(KEY, path)
    events = events_of(KEY, path, trace)
    about = trace if isinstance(trace, dict) else {}
    try:
        if not changes.get("reference_batch"):
            raise ValueError(
                "contains no batch size; give profile.reference_batch=, in samples per rank"
            )
        timed = [e for e in events if None not in map(number, (e.get("ts"), e.get("dur")))]
        launches, marks = _launches(timed)
        steps = sorted(_steps(launches, marks), key=lambda each: each.step_s)
        step = steps[len(steps) // 2]
        sums = (each.args.get("Group size") for each in launches if each.collective == ALL_REDUCE)
        ranks = next(sums) or about.get("distributedInfo", {}).get("world_size")
        device = (about.get("deviceProperties") or [{}])[0].get("name", "an unnamed device")
        profile = _profile(path.name.partition(".")[0], f"trace of {device}", step)
        node = {**vars(profile), "layers": [vars(layer) for layer in profile.layers], **changes}
        return Traced(Profile.parse(node), step, len(steps), int(ranks) if ranks else None)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        text = str(error) if isinstance(error, ValueError) else f"is damaged ({error!r})"
        raise ConfigError(f"{KEY}={path}: {text}") from None


def _profile(name: str, source: str, step: TracedStep) -> Profile:
    """Make a layer of each bucket; the last bucket is the first layer.

    Gaps, the update and the host do not depend on the batch. Forward is divided as backward is: a
    trace does not say which kernel uses which parameter.
    """
    (forward_s, *backward_s), (gap_s, *gaps_s) = step.computed_s, step.gaps_s
    per_backward, rest_ms = 1 / sum(backward_s), 1e3 * step.rest_s
    layers = [
        Layer(
            *(f"bucket{i + 1}", round(num_bytes / VALUE_BYTES)),
            *(1e3 * forward_s * backward_s[i] * per_backward, 1e3 * backward_s[i]),
            *(1e3 * gap_s * backward_s[i] * per_backward, 1e3 * gaps_s[i]),
        )
        for i, num_bytes in enumerate(step.bucket_bytes)
    ]
    bare = Profile(name, source, 1, tuple(layers[::-1]), num_kernels=step.num_kernels)
    return replace(bare, rest_ms=rest_ms, fixed_rest_ms=rest_ms)


def _launches(events: Sequence[Event]) -> tuple[list[Launch], list[float]]:
    """Return what ran on the device, in the order of launching, and when the host began steps.

    Of streams that compute, only that of most launches counts: others copy batches ahead.
    """
    origin = min((Decimal(each["ts"]) for each in events), default=Decimal(0))

    def span(event: Event) -> tuple[float, float]:
        begin_s = MICRO * float(Decimal(event["ts"]) - origin)
        return begin_s, begin_s + MICRO * float(event.get("dur", 0))

    on_host = [each for each in events if _category(each) in ON_HOST]
    marks = [each for each in on_host if STEP.fullmatch(str(each.get("name")))]
    if not marks:
        raise ValueError(
            "contains no ProfilerStep#; give the profiler a schedule= and call its step()"
        )
    named = [each for each in on_host if BACKWARD.search(str(each.get("name")))]
    main = marks[0].get("tid")
    engine = {each.get("tid") for each in named} - {main}  # threads of autograd
    inside = [span(each) for each in named if each.get("tid") == main]
    operations = {_args(each).get("External id"): each for each in on_host}
    calls = {_args(each).get("correlation"): each for each in events if _category(each) in CALLS}
    streams: dict[Any, list[Launch]] = defaultdict(list)
    for event in events:
        own = _args(event)
        call = calls.get(own.get("correlation")) if _category(event) in ON_DEVICE else None
        if call is not None:
            operation = operations.get(own.get("External id", own.get("external id")), {})
            args, (launched_s, _) = {**_args(operation), **own}, span(call)
            marked = any(begin_s <= launched_s < end_s for begin_s, end_s in inside)
            backward = marked or call.get("tid") in engine
            collective = _collective(str(event.get("name")), operation, args)
            launch = Launch(launched_s, *span(event), backward, collective, args)
            streams[None if collective else own.get("stream", event.get("tid"))].append(launch)
    collectives = streams.pop(None, [])
    if not streams:
        raise ValueError(
            "contains no kernels linked to the calls that launched them; record "
            "both CPU and CUDA activities"
        )
    chosen = [*collectives, *max(streams.values(), key=len)]
    return sorted(chosen, key=lambda each: each.launched_s), sorted(span(each)[0] for each in marks)


def _collective(name: str, operation: Event, args: Event) -> str:
    if "nccl" not in name.lower():
        return ""
    for text in (args.get("Collective name"), name, operation.get("name")):
        plain = str(text).lower().replace("_", "")
        if found := next((each for each in COLLECTIVES if each in plain), None):
            return found
    return "nccl"


def _steps(launches: Sequence[Launch], marks: Sequence[float]) -> list[TracedStep]:
    """Return the steps with the most common buckets: DDP makes new ones after its first step."""
    if any(each.collective == REDUCE_SCATTER for each in launches):
        raise ValueError(
            "contains reduce-scatters, such as those of FSDP; only traces of DDP can be read"
        )
    begun = [each.launched_s for each in launches]
    places = [bisect_left(begun, mark) for mark in marks] + [len(launches)]
    parts = [launches[begin:end] for begin, end in pairwise(places)]
    begins = [[each.begin_s for each in part if not each.collective] for part in parts]
    last_s = max(each.end_s for each in launches)
    # A step ends where the next begins on the device, so the last one is used only if alone.
    ends = [min(begin, default=last_s) for begin in begins[1:]] or [last_s]
    found = [step for part, end in zip(parts, ends, strict=False) if (step := _step(part, end))]
    if not any(each.backward for each in launches):
        raise ValueError(
            "contains no backward pass: no autograd thread, and no annotation with backward "
            "in its name"
        )
    if not found:
        raise ValueError("contains no NCCL all-reduce in a backward pass; record several GPUs")
    common = Counter(step.bucket_bytes for step in found).most_common(1)[0][0]
    return [step for step in found if step.bucket_bytes == common]


def _step(launches: Sequence[Launch], end_s: float) -> TracedStep | None:
    """Return a step; None: without gradients to exchange."""
    computed = [each for each in launches if not each.collective]
    first = next((place for place, each in enumerate(computed) if each.backward), 0)
    begun = [each.launched_s for each in computed]
    sums = [each for each in launches if each.collective == ALL_REDUCE]
    reduced = [each for each in sums if first and each.launched_s >= begun[first]]
    if not reduced:
        return None
    # All-reduces began after what had been launched before them: that many kernels and copies.
    numbers = (0, first, *(bisect_left(begun, each.launched_s) for each in reduced))
    until_s = [computed[0].begin_s, *accumulate((each.end_s for each in computed), max)]
    busy_s = [0.0, *accumulate(each.end_s - each.begin_s for each in computed)]
    computed_s = [until_s[to] - until_s[of] for of, to in pairwise(numbers)]
    works_s = [busy_s[to] - busy_s[of] for of, to in pairwise(numbers)]
    gaps_s = [max(0.0, whole - work) for whole, work in zip(computed_s, works_s, strict=True)]
    backward_s = until_s[numbers[-1]]
    done_s = max(backward_s, *(each.end_s for each in reduced))
    sizes, rest_s = tuple(map(_num_bytes, reduced)), max(0.0, end_s - done_s)
    others = tuple(computed_s), tuple(gaps_s), done_s - backward_s, rest_s, numbers[-1]
    return TracedStep(sizes, *others)


def _num_bytes(reduced: Launch) -> int:
    """Return what an all-reduce reduces; sizes are args of its own, or shapes of its operation."""
    args, kind = reduced.args, reduced.args.get("dtype")
    count = args.get("In msg nelems")
    if count is None and args.get("Input Dims") and args.get("Input type"):
        shape, kind = args["Input Dims"][0], args["Input type"][0]
        count = sum(map(math.prod, shape if isinstance(shape[0], list) else [shape]))
    size = TYPE_BYTES.get(str(kind).lower().removeprefix("c10::"))
    if count is None or size is None:
        raise ValueError(
            "does not contain the sizes of all-reduces; record with PyTorch 2.2 or later, or with "
            "record_shapes=True"
        )
    return int(count) * size


def _category(event: Event) -> str:
    return str(event.get("cat")).lower()


def _args(event: Event) -> dict[str, Any]:
    found = event.get("args")
    return found if isinstance(found, dict) else {}

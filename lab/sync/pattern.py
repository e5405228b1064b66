"""Pattern: when a sync exchanges, what it sends, and what cannot be combined with it or is idle.

Both the syncs and the programs that only reason about them (simulator, diagnosis) read these facts,
so nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, cast

from lab.exchange.grouping import MIB, Sized
from lab.measure import OWN
from lab.settings import checks
from lab.settings.names import class_name

STRIDED, SEQUENTIAL = "strided", "sequential"  # orders of fragments
ORDERS = (STRIDED, SEQUENTIAL)
GATHERS = ("torch", "int8")  # ways to move weights of FSDP2's units
SCATTERS = ("torch", "lab", "two_levels")  # and their gradients
Layer = list[Sized]
# Exchanges in which a rank works for others: a root, a parent, or a matrix's owner.
FOR_OTHERS = ("Tree", "DoubleTree", "Star", "Muon")
UNEVEN = 1.05  # ranks of which one sends so many times as much as another differ in their work


class Begin(Enum):
    """When the exchange of a step begins."""

    NEVER = "never"
    DURING_BACKWARD = "during backward, as each bucket fills"
    AFTER_BACKWARD = "after backward"
    NEXT_STEP = "after backward, and runs during the next step"
    AFTER_UPDATE = "after the update"
    NEXT_STEPS = "after the update, and runs during the next steps"


class Transfer(Enum):
    """The data that moves between ranks at once. An exchange has one or several, of equal size."""

    MEAN_OF_GRADIENTS = "mean of gradients to all ranks"
    MEAN_OF_CHANGES = "mean of weight changes to all ranks"
    MEAN_OF_STATES = "mean of weights and of the optimizer's moments to all ranks"
    GRADIENTS_TO_ROOT = "mean of gradients to the root"
    WEIGHTS_FROM_ROOT = "weights from the root"
    PARTS_OF_GRADIENTS = "a part of the mean of gradients to each rank"
    PARTS_OF_WEIGHTS = "a part of the weights from each rank"
    WEIGHTS_OF_UNITS = "a part of a unit's weights from each rank, before forward and backward"
    MEAN_OF_PARTS = "mean of a part of the gradients to the ranks that hold this part of a copy"


@dataclass(frozen=True)
class Pattern:
    """The communication pattern of a sync.

    Attributes:
        begins: when an exchange starts.
        transfers: in the order in which they run.
        every: steps from one exchange to the next, of the same parameters; the steps of a round.
        num_exchanges: in `every` steps, each as large as the model.
        fragments: parts of the model that are exchanged at different steps of `every`.
        fragment_order: how parameters are divided among them, see lab.sync.pattern.
        delay: steps during which an exchange runs, if it begins with NEXT_STEPS.
        shard_size: ranks that share a copy of the weights, where WEIGHTS_OF_UNITS are transferred;
            None: all; "node": those of a host.
        all_gather, reduce_scatter, reshard: of FSDP2's units; see conf/sync/fsdp.yaml.
        by_library: another library exchanges the gradients, on a schedule of its own.
        waits_in_backward: backward returns when the exchange is done, so it includes its time.
        waits_in_forward: the next forward waits for each layer's exchange, and updates the layer.
        no_overlap, needs_overlap, no_fp16, no_graph: why `overlap=true`, `overlap=false`,
            `precision=fp16` (which skips steps that overflow) and `graph=true` (which repeats one
            step without the host) are refused; empty: it is accepted, here and below.
        only_sgd, only_elementwise: why optimizers other than SGD are refused, and those that treat
            a tensor as a whole.
        only_exact, no_auto: why an exchange that is not exact is refused, and one that chooses by
            measurement.
    """

    begins: Begin
    transfers: tuple[Transfer, ...]
    every: int = 1
    num_exchanges: int = 1
    fragments: int = 1
    fragment_order: str = STRIDED
    delay: int = 0
    shard_size: int | str | None = None
    all_gather: str = "torch"
    reduce_scatter: str = "torch"
    reshard: int | str | None = None
    by_library: bool = False
    waits_in_backward: bool = False
    waits_in_forward: bool = False
    no_overlap: str = ""
    needs_overlap: str = ""
    no_fp16: str = ""
    no_graph: str = "its steps are not known to run without the host"
    only_sgd: str = ""
    only_elementwise: str = ""
    only_exact: str = ""
    no_auto: str = ""

    @property
    def overlaps(self) -> bool:
        """True if exchanges run while the rank computes."""
        return self.begins is Begin.DURING_BACKWARD or self.outlasts_step

    @property
    def outlasts_step(self) -> bool:
        """True if exchanges of one step run during later ones."""
        return self.begins in (Begin.NEXT_STEP, Begin.NEXT_STEPS)

    @property
    def gathers_units(self) -> bool:
        """True if weights are gathered where they are used, and freed afterwards."""
        return Transfer.WEIGHTS_OF_UNITS in self.transfers

    @property
    def parts_the_update(self) -> bool:
        """True if each rank updates its part of the weights, and keeps that of the state."""
        return not {Transfer.PARTS_OF_WEIGHTS, Transfer.WEIGHTS_OF_UNITS}.isdisjoint(self.transfers)

    @property
    def own_replicas(self) -> bool:
        """True if each rank has its own weights and momentum between exchanges."""
        return not {Transfer.MEAN_OF_CHANGES, Transfer.MEAN_OF_STATES}.isdisjoint(self.transfers)

    @property
    def takes_exchanges(self) -> bool:
        """True if one of the lab's exchanges moves the data."""
        return bool(self.transfers) and not self.by_library

    @property
    def takes_any_exchange(self) -> bool:
        """True if any exchange that averages will do; False if the sync needs one of a kind."""
        choosy = {Transfer.WEIGHTS_FROM_ROOT, Transfer.PARTS_OF_GRADIENTS}
        return self.takes_exchanges and choosy.isdisjoint(self.transfers)


def refuse(pattern: Pattern, overlap: bool, precision: str) -> None:
    """Refuse settings of a run with which a sync cannot be combined. ValueError: says why."""
    if overlap and pattern.no_overlap:
        raise ValueError(f"overlap=true: {pattern.no_overlap}")
    if not overlap and pattern.needs_overlap:
        raise ValueError(f"overlap=false: {pattern.needs_overlap}")
    if precision == "fp16" and pattern.no_fp16:
        raise ValueError(
            f"precision=fp16: skips steps that overflow, but {pattern.no_fp16}; allowed: fp32, bf16"
        )


@dataclass(frozen=True)
class Update:
    """An optimizer's step, by float32 value of the weights; lab.sync.update counts it.

    Attributes:
        passes: values that are read and written. SGD with momentum, fused, reads weight, gradient
            and momentum, and writes weight and momentum: 5. Operations one by one read and write
            what is in between as well.
        on_shards: the same where parameters are FSDP2's, for which torch fuses only Adam's.
        copies: values that the optimizer keeps.
        operations: of matrix products, by value and by row of a square matrix: Muon's five
            Newton-Schulz iterations of three products each have 30.
    """

    passes: float
    on_shards: float
    copies: float
    operations: float = 0.0


MOMENTUM = Update(5.0, 11.0, 1.0)  # of SGD, which optim=sgd is


def gradsync(overlap: bool, *transfers: Transfer) -> Pattern:
    """Average gradients in every step."""
    begins = Begin.DURING_BACKWARD if overlap else Begin.AFTER_BACKWARD
    return Pattern(begins, transfers or (Transfer.MEAN_OF_GRADIENTS,), no_graph="")


def priority(overlap: bool, chunk_mb: float = 8, trials: int = 3) -> Pattern:
    """Average gradients in every step; with `overlap` the next forward waits, layer by layer."""
    checks.number("sync.chunk_mb", chunk_mb, above=0)
    checks.integer("sync.trials", trials, 0, 10**6)
    pattern = replace(gradsync(overlap), no_auto="sync=priority also chooses by measurement")
    if not overlap:
        return pattern
    no_graph = "an exchange ends only during the forward pass of the next step"
    no_fp16 = "a step cannot be skipped once the next forward has applied parts of it"
    return replace(pattern, waits_in_forward=True, no_fp16=no_fp16, no_graph=no_graph)


def local(every: int) -> Pattern:
    """Average weights after every `every` steps."""
    checks.integer("sync.every", every, 1)
    return Pattern(
        Begin.AFTER_UPDATE,
        (Transfer.MEAN_OF_CHANGES,),
        every,
        no_overlap="must be false; weights are exchanged after the update",
        no_fp16="each rank would skip different steps",
        no_graph="weights are exchanged in some steps only, but a graph repeats the same step",
    )


def streaming(every: int, fragments: int, order: str, delay: int) -> Pattern:
    """Average the weights of one fragment after another, or (`delay`) during the next steps."""
    checks.integer("sync.every", every, 1)
    checks.integer("sync.fragments", fragments, 1, every)
    checks.one_of("sync.fragment_order", order, ORDERS)
    checks.integer("sync.delay", delay, 0, every // fragments)  # until the next one's begins
    parts = {"fragments": fragments, "fragment_order": order, "delay": delay}
    if not delay:
        no_overlap = "must be false with sync.delay=0; weights are exchanged after the update"
        return replace(local(every), no_overlap=no_overlap, **parts)
    ways = {"no_overlap": "", "needs_overlap": f"must be true with sync.delay={delay}"}
    return replace(local(every), begins=Begin.NEXT_STEPS, **ways, **parts)


def des_loc(every: int, first_every: int, second_every: int | None) -> Pattern:
    """Average weights and an optimizer's moments at periods of their own."""
    periods = {"every": every, "first_every": first_every}
    if second_every is not None:
        periods["second_every"] = second_every
    for key, period in periods.items():
        checks.integer(f"sync.{key}", period, 1)
    whole = math.lcm(*periods.values())
    num_exchanges = sum(whole // period for period in periods.values())
    return replace(
        local(whole),
        transfers=(Transfer.MEAN_OF_STATES,),
        num_exchanges=num_exchanges,
        only_exact="second moments need an exact exchange",
    )


def root_update(overlap: bool) -> Pattern:
    """Reduce gradients to the root, which updates, and broadcast its weights."""
    return replace(
        gradsync(overlap, Transfer.GRADIENTS_TO_ROOT, Transfer.WEIGHTS_FROM_ROOT),
        no_fp16="only the root would know which steps to skip",
        no_graph="emulates a framework that had no CUDA graphs",
        only_sgd="emulates a framework that updates with SGD on the root",
    )


def zero1(overlap: bool) -> Pattern:
    """Send each rank its part of the mean gradient, which updates that part and sends it to all."""
    pattern = gradsync(overlap, Transfer.PARTS_OF_GRADIENTS, Transfer.PARTS_OF_WEIGHTS)
    return replace(pattern, only_elementwise="each rank updates slices of parameters")


def double_buffer(buffered: bool) -> Pattern:
    """Average gradients after backward, or (`buffered`) during the next step."""
    checks.truth("sync.double_buffer", buffered)
    if buffered:
        no_fp16 = "a step cannot be skipped once the next one is under way"
        no_fp16 += " (sync.double_buffer=true)"
        no_graph = "an exchange ends only during the next step (sync.double_buffer=true)"
        return Pattern(
            Begin.NEXT_STEP,
            (Transfer.MEAN_OF_GRADIENTS,),
            needs_overlap="must be true, because sync.double_buffer is true",
            no_fp16=no_fp16,
            no_graph=no_graph,
        )
    no_overlap = (
        "must be false, because sync.double_buffer is false: nothing is exchanged during backward"
    )
    return replace(gradsync(overlap=False), no_overlap=no_overlap)


def ddp(hook: str) -> Pattern:
    """Leave gradients to DistributedDataParallel.

    Its hook "noop" moves nothing; "lab" hands its buckets to one of the lab's exchanges.
    """
    transfers = () if hook == "noop" else (Transfer.MEAN_OF_GRADIENTS,)
    no_graph = f"torch's hook continues in separate threads (sync.hook={hook})"
    if hook == "lab":
        no_graph = (
            "the hook makes the host wait (sync.hook=lab); use strategy=onebit, which needs no DDP"
        )
    return Pattern(
        Begin.DURING_BACKWARD,
        transfers,
        by_library=hook != "lab",
        waits_in_backward=True,
        no_graph="" if hook in ("none", "noop") else no_graph,
    )


def fsdp(
    reduce_scatter: str,
    shard_size: int | str | None,
    all_gather: str = "torch",
    reshard: int | str | None = None,
) -> Pattern:
    """Leave weights and gradients to torch's FSDP2, or scatter gradients by an exchange."""
    checks.one_of("sync.all_gather", all_gather, GATHERS)
    checks.one_of("sync.reduce_scatter", reduce_scatter, SCATTERS)
    if reshard is not None and shard_size is not None:
        raise ValueError(
            f"sync.reshard={reshard}: sync.shard_size={shard_size} already gathers within groups; "
            "set only one of them"
        )
    among_copies = () if shard_size is None else (Transfer.MEAN_OF_PARTS,)
    return Pattern(
        Begin.DURING_BACKWARD,
        (Transfer.WEIGHTS_OF_UNITS, Transfer.PARTS_OF_GRADIENTS, *among_copies),
        shard_size=shard_size,
        all_gather=all_gather,
        reduce_scatter=reduce_scatter,
        reshard=reshard,
        by_library=reduce_scatter == "torch",
        waits_in_backward=True,
        needs_overlap="must be true; strategy=fsdp always exchanges during backward",
        no_graph="the host gathers and frees weights during a step",
    )


def horovod() -> Pattern:
    """Leave gradients to Horovod's DistributedOptimizer."""
    no_graph = "a Horovod thread sends the gradients, outside the graph"
    return Pattern(
        Begin.DURING_BACKWARD, (Transfer.MEAN_OF_GRADIENTS,), by_library=True, no_graph=no_graph
    )


def none() -> Pattern:
    """Exchange nothing."""
    return Pattern(Begin.NEVER, (), no_graph="")


def _of(sync: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Return those of `keys` that a sync's settings have; earlier versions had fewer."""
    return {key: sync[key] for key in keys if key in sync}


# A user's own sync is treated as one with its own schedule.
UNKNOWN = Pattern(
    Begin.AFTER_BACKWARD, (Transfer.MEAN_OF_GRADIENTS,), by_library=True, no_overlap="unknown"
)

# Keyed by the names of the lab's classes, in configurations and records of any age.
OF_CLASS: dict[str, Callable[[Mapping[str, Any], bool], Pattern]] = {
    "GradSync": lambda _, overlap: gradsync(overlap),
    "PrioritySync": lambda sync, overlap: priority(overlap, **_of(sync, "chunk_mb", "trials")),
    "LocalSync": lambda sync, _: local(sync["every"]),
    "StreamingSync": lambda sync, _: streaming(
        sync["every"], sync["fragments"], sync["fragment_order"], sync["delay"]
    ),
    "DesLoc": lambda sync, _: des_loc(sync["every"], sync["first_every"], sync["second_every"]),
    "RootUpdate": lambda _, overlap: root_update(overlap),
    "Zero1": lambda _, overlap: zero1(overlap),
    "DoubleBuffer": lambda sync, _: double_buffer(sync["double_buffer"]),
    "DDPSync": lambda sync, _: ddp(sync.get("hook", "none")),
    "FSDPSync": lambda sync, _: fsdp(
        sync["reduce_scatter"], sync["shard_size"], **_of(sync, "all_gather", "reshard")
    ),
    "HorovodSync": lambda _sync, _overlap: horovod(),
    "NoSync": lambda _sync, _overlap: none(),
}


def pattern_of(settings: Mapping[str, Any]) -> Pattern:
    """Return the pattern of a run, by `sync` and `overlap` of its composed settings."""
    name = class_of(settings)
    overlap = bool(settings.get("overlap", False))
    return OF_CLASS[name](settings["sync"], overlap) if name in OF_CLASS else UNKNOWN


def class_of(settings: Mapping[str, Any]) -> str:
    """Return the class name of a run's sync, such as "GradSync"; "" if there is none.

    A user's own is known by its path.
    """
    return class_name(settings.get("sync", {}).get("_target_", ""))


def fragments(parameters: Sequence[Sized], number: int, order: str) -> list[list[str]]:
    """Return the parameter names of each fragment, none empty, of sizes as equal as layers allow.

    Args:
        parameters: in the order of the model; those of one module are a layer and stay together.
        number: of fragments.
        order: "strided": each layer goes to the smallest fragment so far, which deals equal layers
            out in turns (Douillard et al. 2025, section 2.2). "sequential": runs of layers.

    Raises:
        ValueError: the model has fewer layers.
    """
    modules: dict[str, Layer] = {}
    for name, size in parameters:
        modules.setdefault(name.rpartition(".")[0], []).append((name, size))
    layers = list(modules.values())
    if number > len(layers):
        raise ValueError(
            f"sync.fragments={number}: must be at most {len(layers)}, the number of layers"
        )
    if order == STRIDED:
        parts: list[list[Layer]] = [[] for _ in range(number)]
        for layer in layers:
            min(parts, key=_size).append(layer)
    else:
        parts = _sequential(layers, number)
    return [[name for layer in part for name, _ in layer] for part in parts]


def _size(layers: Sequence[Layer]) -> float:
    return sum(size for layer in layers for _, size in layer)


def _sequential(layers: list[Layer], number: int) -> list[list[Layer]]:
    """Take for each part half a layer more than its share of what is left, at most."""
    parts: list[list[Layer]] = []
    rest = list(layers)
    for following in range(number - 1, -1, -1):
        share, part = _size(rest) / (following + 1), [rest.pop(0)]
        while len(rest) > following and _size(part) + _size(rest[:1]) / 2 <= share:
            part.append(rest.pop(0))
        parts.append(part)
    return parts


def send_order(
    ready_s: Sequence[float], send_s: Sequence[float], needed: Sequence[int]
) -> list[int]:
    """Return the places of all parts in the order in which they begin to travel, one at a time.

    Args:
        ready_s: when each part's gradient is there, in seconds from any moment.
        send_s: seconds that it travels.
        needed: its rank in the order in which the next forward needs them; equal ones leave in
            the order given.
    """
    waiting = sorted(range(len(ready_s)), key=lambda part: (needed[part], part))
    order: list[int] = []
    now_s = min(ready_s, default=0.0)
    while waiting:
        part = next((p for p in waiting if ready_s[p] <= now_s), None)
        if part is None:
            now_s = min(ready_s[p] for p in waiting)
            continue
        waiting.remove(part)
        order.append(part)
        now_s += send_s[part]
    return order


def ineffective(
    pattern: Pattern,
    *,
    strategy: str,
    world_size: int,
    num_steps: int,
    bucket_mb: float | None,
    accumulate: int,
    bucket_bytes: Sequence[int],
) -> list[str]:
    """List what does nothing, or less than its name says. Each line names a setting and the cause.

    Args:
        bucket_bytes: size of each bucket; empty if a library plans them.
    """
    if not pattern.transfers:  # none: it exchanges nothing on purpose
        return []
    if world_size == 1:
        return [f"one rank: strategy={strategy} has nothing to exchange"]
    lines = list[str]()
    in_backward = pattern.begins is Begin.DURING_BACKWARD
    if len(bucket_bytes) == 1:
        size = f"all {float(f'{bucket_bytes[0] / 1e6:.3g}'):g} MB of gradients are in one bucket"
        quarter = float(f"{bucket_bytes[0] / MIB / 4:.2g}")
        smaller = f"set bucket_mb={quarter:g} to divide them"
        if in_backward:
            lines = [
                f"overlap=true: nothing overlaps, because {size}, which is full only when backward "
                f"ends; {smaller}"
            ]
        elif bucket_mb is not None:
            lines = [f"bucket_mb={bucket_mb:g}: divides nothing, because {size}"]
    elif in_backward and accumulate > 1:
        lines = [
            f"accumulate={accumulate}: exchanges overlap only the backward of the last micro-batch"
        ]
    if num_steps < pattern.every:
        once = f"ranks exchange once, after the last step ({num_steps})"
        lines.append(f"sync.every={pattern.every}: {once}")
    return lines


def comparable_phases(
    settings: Mapping[str, Any], payload_bytes: Sequence[float] = ()
) -> list[str]:
    """List those of OWN in which a rank that takes longer is slow, and does not merely do more.

    Args:
        settings: a run's composed settings; `exchange`, `sync` and `overlap` are read.
        payload_bytes: of each rank in a step, if known. Two levels on nodes of different sizes give
            some ranks more to send than others.
    """
    pattern = pattern_of(settings)
    unlike = set[str]()
    if Transfer.WEIGHTS_FROM_ROOT in pattern.transfers:
        unlike |= {"exchange", "update"}  # the root alone updates
    if pattern.gathers_units:
        unlike |= {"update"}  # ranks have whole rows: of a small matrix some have none
    classes = [class_name(path) for path in _targets(settings.get("exchange", {})) if path]
    if (
        any(name in FOR_OTHERS or "." in name for name in classes)  # a user's may do anything
        or max(payload_bytes, default=0) > UNEVEN * min(payload_bytes, default=0)
    ):
        unlike |= {"exchange"}
    return [name for name in OWN if name not in unlike]


def _targets(exchange: Mapping[str, Any]) -> Iterator[str]:
    """Yield the class of an exchange, and those of the exchanges that it is made of."""
    yield f"{exchange.get('_target_', '')}"
    for part in exchange.values():
        if isinstance(part, Mapping):
            yield from _targets(cast(Mapping[str, Any], part))


def sharing_ranks(
    key: str, setting: int | str | None, ranks: int, of_a_node: Callable[[], int]
) -> int:
    """Return how many ranks share what FSDP shards: so many, those of a "node", or None, all.

    Raises:
        ValueError: the number does not divide `ranks`.
    """
    if setting == "node" and ranks % (local := of_a_node()):
        raise ValueError(
            f"sync.{key}=node: {ranks} ranks cannot be divided into nodes of {local}; must be null "
            f"or a divisor of {ranks}"
        )
    size = of_a_node() if setting == "node" else ranks if setting is None else setting
    if not checks.is_whole(size) or size < 1 or ranks % size:
        raise ValueError(
            f"sync.{key}={setting}: must be node, null, or a divisor of the {ranks} ranks"
        )
    return size


def ranks_of_second_shard(
    reshard: int | str | None, ranks: int, of_a_node: Callable[[], int]
) -> int | None:
    """Return how many ranks keep a second shard of gathered weights; None: nothing does.

    Raises:
        ValueError: the number does not divide `ranks`, or leaves all weights on each.
    """
    size = sharing_ranks("reshard", reshard, ranks, of_a_node)
    if size == ranks:
        return None
    if size == 1:
        raise ValueError(
            f"sync.reshard={reshard}: each rank would store all weights; use groups of 2 or more "
            "ranks"
        )
    return size

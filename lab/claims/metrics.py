"""Define the quantities of claims, once for measurements and predictions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Protocol

from lab.analysis.records import RecordedCell, commits_of
from lab.model.profile import VALUE_BYTES
from lab.model.work import Counts
from lab.settings import checks
from lab.settings.config import build, load
from lab.settings.overrides import own_choices

if TYPE_CHECKING:  # torch takes seconds, and few papers need it
    import torch

    from lab.distributed.comm import Comm
    from lab.exchange.base import Exchange

RANKS, STEPS, SHAPE = 2, 64, (32, 2048)  # of exchanges whose gradients are added up


class Missing(LookupError):
    """The facts at hand do not give a quantity."""


@dataclass(frozen=True)
class ClaimPoint:
    """The point where a quantity is taken: a cell of a study, perhaps another model or a layer.

    Attributes:
        batch_size: global.
        profile: replaces the paper's.
        layer: the layer whose operations are counted, as lab.model.work.Counts names it.
        rate_gbit: rate of the links between nodes; None: the hardware's.
        hardware: replaces the paper's.
        values: KEY=VALUE of the hardware, where the source's differ from the file's.
        over_ranks: a speedup is over so many ranks of the same strategy; 1: over one without it.
        num_bytes: of a tensor that is all-reduced.
    """

    strategy: str = "none"
    world_size: int = 1
    batch_size: int = 256
    profile: str | None = None
    layer: str | None = None
    rate_gbit: float | None = None
    hardware: str | None = None
    values: tuple[str, ...] = ()
    over_ranks: int = 1
    num_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("world_size", "batch_size", "over_ranks"):
            checks.integer(f"at.{name}", getattr(self, name), 1)
        if self.num_bytes is not None:
            checks.integer("at.num_bytes", self.num_bytes, 1)
        if self.rate_gbit is not None:
            checks.number("at.rate_gbit", self.rate_gbit, above=0)


class Facts(Protocol):
    """Facts that a study has measured or a model predicts. Methods raise Missing otherwise."""

    def step_s(self, at: ClaimPoint) -> float:
        """Return the seconds of a step."""
        ...

    def payload_bytes(self, at: ClaimPoint) -> float:
        """Return the bytes that the busiest rank sends in a step."""
        ...

    def all_reduce_s(self, at: ClaimPoint) -> float:
        """Return the seconds of an all-reduce of `num_bytes` by the library."""
        ...

    def counts(self) -> Counts:
        """Return the counts of the published model, before any scaling of bytes."""
        ...


class MeasuredFacts(Facts, Protocol):
    """Facts from runs."""

    def repeats(self) -> Sequence[Facts]:
        """Return the facts of each single repeat."""
        ...


@dataclass(frozen=True)
class Conditions:
    """The machines, the emulations and the lab's commits of a study, sorted; () if not known."""

    machines: tuple[str, ...]
    emulations: tuple[str, ...]
    commits: tuple[str, ...]


class MeasuredRuns:
    """Facts from finished throughput runs with strong scaling: the median of their repeats.

    Args:
        cells: all cells of the study.
        profile: the paper's.
        counts: of the paper's network, because cells replay a scaled one.
    """

    def __init__(self, cells: Sequence[RecordedCell], profile: str, counts: Counts) -> None:
        self._all_cells, self._profile, self._counts = cells, profile, counts
        self._cells: dict[ClaimPoint, list[RecordedCell]] = {}
        for cell in cells:
            if (cell.status, cell.measure, cell.scaling) == ("done", "throughput", "strong"):
                replayed = cell.settings.get("profile", profile)
                other = None if replayed == profile else replayed
                at = ClaimPoint(cell.strategy, cell.world_size, cell.batch_size, other)
                self._cells.setdefault(at, []).append(cell)

    def repeats(self) -> Sequence[Facts]:
        by_repeat: dict[int, list[RecordedCell]] = {}
        for cell in self._all_cells:
            by_repeat.setdefault(cell.repeat, []).append(cell)
        return [
            MeasuredRuns(by_repeat[repeat], self._profile, self._counts)
            for repeat in sorted(by_repeat)
        ]

    def step_s(self, at: ClaimPoint) -> float:
        """Return the seconds of a step: the median over steps of the slowest rank."""
        return self._median(at, lambda cell: cell.step_s)

    def payload_bytes(self, at: ClaimPoint) -> float:
        """Return the bytes that the busiest rank handed to the network in a step."""
        return self._median(at, lambda cell: max(cell.payload_bytes_per_step, default=math.nan))

    def all_reduce_s(self, at: ClaimPoint) -> float:
        """Raise Missing: runs time steps."""
        raise Missing

    def counts(self) -> Counts:
        return self._counts

    def conditions(self) -> Conditions:
        """Return the conditions of the finished runs."""
        cells = [cell for each in self._cells.values() for cell in each]
        known = [cell.environment for cell in cells if cell.environment]
        machines = {f"{e['cpu']}, {e['num_cores']} cores, torch {e['torch']}" for e in known}
        emulations = {one.detail for cell in cells for one in cell.record.emulation}
        commits = commits_of(self._all_cells)
        return Conditions(tuple(sorted(machines)), tuple(sorted(emulations)), commits)

    def _median(self, at: ClaimPoint, value: Callable[[RecordedCell], float]) -> float:
        values = [value(cell) for cell in self._cells.get(at, ())]
        finite = [one for one in values if math.isfinite(one)]
        if not finite:
            raise Missing
        return statistics.median(finite)


def speedup(facts: Facts, at: ClaimPoint) -> float:
    """Compute the speedup over one rank, which exchanges nothing, at the same global batch.

    Or over `over_ranks` ranks, which exchange as the others do.
    """
    if at.over_ranks > 1:
        return facts.step_s(replace(at, world_size=at.over_ranks)) / facts.step_s(at)
    return facts.step_s(ClaimPoint(batch_size=at.batch_size)) / facts.step_s(at)


def weak_speedup(facts: Facts, at: ClaimPoint) -> float:
    """Compute the throughput relative to one rank without exchange, at the same per-rank batch."""
    if at.batch_size < at.world_size:
        raise Missing
    alone = replace(at, strategy="none", world_size=1, batch_size=at.batch_size // at.world_size)
    return at.world_size * facts.step_s(alone) / facts.step_s(at)


def gain(over: str, facts: Facts, at: ClaimPoint) -> float:
    """Divide the step time of the strategy `over` by this one's."""
    return facts.step_s(replace(at, strategy=over)) / facts.step_s(at)


def added_s(facts: Facts, at: ClaimPoint) -> float:
    """Return the time that a strategy adds to a step."""
    return facts.step_s(at) - facts.step_s(replace(at, strategy="none"))


def bus_gb_per_s(facts: Facts, at: ClaimPoint) -> float:
    """Compute an all-reduce's bus bandwidth as nccl-tests does: what a link of a ring would carry.

    Raises:
        Missing: the point says no size.
    """
    if at.num_bytes is None:
        raise Missing
    share = 2 * (at.world_size - 1) / at.world_size
    return share * at.num_bytes / facts.all_reduce_s(at) / 1e9


def of_linear_scaling(quantity: str, at: ClaimPoint) -> float | None:
    """Return what a quantity is if N ranks are N times as fast, the null model of scaling.

    Returns:
        None: the quantity is none of scaling.
    """
    if quantity in ("speedup", "weak_speedup"):
        return at.world_size / at.over_ranks
    return 1.0 if quantity == "weak_efficiency" else None


def transfer_s(facts: Facts, at: ClaimPoint) -> float:
    """Return the time to send all gradients to another rank: half the tree's cost on two ranks."""
    return added_s(facts, replace(at, strategy="tree", world_size=2)) / 2


def transfers(facts: Facts, at: ClaimPoint) -> float:
    """Express the time that a blocking strategy adds to a step in transfers of all gradients."""
    return added_s(facts, at) / transfer_s(facts, at)


def transfer_share(facts: Facts, at: ClaimPoint) -> float:
    """Divide the time of one transfer by that of forward and backward on one rank."""
    return transfer_s(facts, at) / facts.step_s(ClaimPoint(batch_size=at.batch_size))


def byte_share(facts: Facts, at: ClaimPoint) -> float:
    """Divide the bytes on the wire by those of the all-reduce."""
    reference = replace(at, strategy="allreduce", profile=None)
    return facts.payload_bytes(at) / facts.payload_bytes(reference)


def added_share(facts: Facts, at: ClaimPoint) -> float:
    """Divide the time that a strategy adds to a step by what `overlap` adds."""
    return added_s(facts, at) / added_s(facts, replace(at, strategy="overlap"))


def fc_share(facts: Facts, _at: ClaimPoint) -> float:
    """Compute the share of parameters in fully connected layers.

    Raises:
        Missing: the kinds of layers are not known.
    """
    counts = facts.counts()
    if counts.fully_connected is None:
        raise Missing
    return counts.fully_connected / counts.parameters


def operations(facts: Facts, at: ClaimPoint) -> float:
    """Count multiplications and additions in a layer's forward pass over a whole batch.

    Raises:
        Missing: the model is not known, or has no such layer.
    """
    counted = facts.counts().operations
    if at.layer is None or at.layer not in counted:
        raise Missing
    return counted[at.layer] * at.batch_size


@cache
def delivered_error(strategy: str) -> float:
    """Return how far the mean of the delivered gradients is from that of the true ones.

    Two ranks exchange the same random gradients STEPS times: what one step leaves out, later steps
    must deliver.

    Returns:
        The norm of the difference, relative to that of the true mean.
    """
    import torch

    from lab.distributed.comm import run_ranks
    from lab.exchange.bucket import GradBucket

    chance = torch.Generator().manual_seed(0)
    gradients = torch.randn(RANKS, SHAPE[0] * SHAPE[1], generator=chance)
    chosen = load(own_choices([f"strategy={strategy}"])).exchange

    def rank_main(comm: Comm) -> torch.Tensor:
        exchange: Exchange = build(chosen)
        total = torch.zeros_like(gradients[0])
        bucket = GradBucket({"weight": torch.Size(SHAPE)}, total.clone())
        for step in range(STEPS):
            bucket.step = step
            bucket.flat.copy_(gradients[comm.rank])
            exchange.average(bucket, comm)
            total += bucket.flat
        return total / STEPS

    delivered = run_ranks(RANKS, rank_main)[0]
    true = gradients.mean(dim=0)
    return float((delivered - true).norm() / true.norm())


QUANTITIES: dict[str, Callable[[Facts, ClaimPoint], float]] = {
    "step_s": lambda facts, at: facts.step_s(at),
    "speedup": speedup,
    "weak_speedup": weak_speedup,
    "weak_efficiency": lambda facts, at: weak_speedup(facts, at) / at.world_size,
    "samples_per_s": lambda facts, at: at.batch_size / facts.step_s(at),
    "gain_over_tree": partial(gain, "tree"),
    "gain_over_allreduce": partial(gain, "allreduce"),
    "gain_over_overlap": partial(gain, "overlap"),
    "added_s": added_s,
    "bus_gb_per_s": bus_gb_per_s,
    "transfer_s": transfer_s,
    "transfers": transfers,
    "transfer_share": transfer_share,
    "byte_share": byte_share,
    "added_share": added_share,
    "gradient_bytes": lambda facts, at: VALUE_BYTES * facts.counts().parameters,
    "fc_share": fc_share,
    "delivered_error": lambda _facts, at: delivered_error(at.strategy),
    "operations": operations,
}

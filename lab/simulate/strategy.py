"""Steps as the simulator sees them: buckets, who exchanges them, the update, and memory.

Memory of a rank is weights, gradients, the optimizer's state and the exchange's buffers;
activations are left out, as a profile does not know them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lab.exchange.cost import Shape, Sizes, of_buckets
from lab.exchange.grouping import cut, group
from lab.model.profile import VALUE_BYTES, Profile, shapes
from lab.settings.errors import ConfigError
from lab.settings.names import class_name
from lab.simulate.costs import (
    OPERATIONS_PER_BYTE,
    Settings,
    exchange_of,
    extra_bytes,
    in_shares,
    phases_of,
)
from lab.simulate.hardware import Hardware
from lab.simulate.network import Network
from lab.sync.pattern import (
    MOMENTUM,
    Pattern,
    Transfer,
    Update,
    class_of,
    fragments,
    gradsync,
    pattern_of,
    sharing_ranks,
)

NONE = {"_target_": "lab.exchange.allreduce.NoExchange"}
EXACT = {"_target_": "lab.exchange.allreduce.AllReduce", "dtype": "float32"}
Bucket = dict[str, Shape]  # shapes of parameters by name, or of parts: name[start:stop]


@dataclass(frozen=True)
class Strategy:
    """A way to exchange gradients.

    Attributes:
        exchange: `_target_` and its arguments, as configured.
        pattern: the pattern of the strategy's sync.
        accumulate: micro-batches of a step; gradients are exchanged in the last one.
        chunk_mb: size of buckets, and of parts of large parameters, where the next forward waits.
        tries: the run times steps in which it does not wait as well, and keeps the faster schedule.
        update: the optimizer's step; None: not known.
    """

    exchange: Mapping[str, Any]
    bucket_mb: float | None = None
    pattern: Pattern = gradsync(overlap=False)
    accumulate: int = 1
    chunk_mb: float | None = None
    tries: bool = False
    update: Update | None = MOMENTUM

    @property
    def exchanges(self) -> bool:
        """Whether several ranks exchange anything."""
        return self.pattern.gathers_units or self.exchange != NONE

    def without_exchange(self) -> Strategy:
        """Return the same steps without any exchange."""
        return replace(CEILING, accumulate=self.accumulate, update=self.update)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Strategy:
        """Read the strategy from a run's composed settings.

        Raises:
            ValueError: the strategy has no cost model.
        """
        pattern = pattern_of(settings)
        name = f"strategy={settings['strategy']}"
        if pattern.by_library and not pattern.gathers_units:
            sync = class_of(settings)
            raise ValueError(f"{name}: {sync} has its own schedule, which has no cost model")
        if settings["transform"]:
            raise ValueError(
                f"{name}: changes the model; set transform=none, and give the profile of the "
                "changed model"
            )
        exchange = in_shares(settings["exchange"], settings["steps"])
        if not pattern.gathers_units:
            for _, way in phases_of(exchange):
                made = exchange_of(way)
                if Transfer.WEIGHTS_FROM_ROOT in pattern.transfers:
                    from lab.sync.zero1 import require_reduce_broadcast  # with torch, as above

                    require_reduce_broadcast(made)
        elif class_name(exchange["_target_"]) != "NoExchange":
            from lab.exchange import scatter  # with torch, as above

            scatter.scatter_of(made := exchange_of(exchange))
            if pattern.reduce_scatter == "two_levels":
                scatter.require_no_residuals(made)
        strategy = cls(exchange, settings["bucket_mb"], pattern, settings["accumulate"])
        strategy = replace(strategy, update=update_of(settings["optim"]))
        if pattern.gathers_units:  # by torch, whatever exchange there is
            return replace(strategy, exchange=NONE) if pattern.by_library else strategy
        if not pattern.waits_in_forward:
            return strategy
        sync = settings["sync"]
        return replace(strategy, chunk_mb=sync["chunk_mb"], tries=sync["trials"] > 0)

    @property
    def lossy(self) -> bool:
        """True if ranks do not take every step with the mean of their gradients."""
        if self.pattern.all_gather != "torch":  # gradients at rounded weights
            return True
        if self.pattern.by_library:
            return False
        late = self.pattern.outlasts_step
        return late or self.pattern.own_replicas or not exchange_of(self.exchange).exact


CEILING = Strategy(NONE)


def messages_of_fragments(
    profile: Profile, strategy: Strategy, on_gpu: bool = False
) -> list[list[Bucket]]:
    """Divide a profile's parameters among fragments, and each of these among messages.

    Args:
        on_gpu: gradients lie on GPUs.

    Raises:
        ValueError: the profile has fewer layers than the strategy has fragments.
    """
    pattern = strategy.pattern
    if pattern.waits_in_forward:
        return [_chunks(profile, strategy, on_gpu)]
    if pattern.fragments == 1:
        return [buckets(profile, strategy.bucket_mb, on_gpu)]
    sizes = [(name, VALUE_BYTES * math.prod(shape)) for name, shape in parameters(profile).items()]
    parts = fragments(sizes, pattern.fragments, pattern.fragment_order)
    return [buckets(profile, strategy.bucket_mb, on_gpu, names) for names in parts]


def buckets(
    profile: Profile,
    bucket_mb: float | None,
    on_gpu: bool = False,
    only: Container[str] | None = None,
) -> list[Bucket]:
    """Divide a profile's parameters, or `only` some, among buckets: shapes of each, by name."""
    known = parameters(profile)
    arriving = [
        (name, VALUE_BYTES * math.prod(known[name]))
        for name in reversed(known)
        if only is None or name in only
    ]
    planned = group(arriving, bucket_mb, profile.bytes_scale, on_gpu)
    return [{name: known[name] for name in names} for names in planned]


def parameters(profile: Profile) -> Bucket:
    """Return the shapes of a profile's parameters by name, in the order of forward."""
    return {
        f"{layer.name}.{kind}": shape
        for layer in profile.layers
        for kind, shape in shapes(profile.values(layer)).items()
    }


def _chunks(profile: Profile, strategy: Strategy, on_gpu: bool) -> list[Bucket]:
    """Return buckets of at most `chunk_mb`, and larger parameters in parts, if sums allow it."""
    planned = buckets(profile, strategy.chunk_mb, on_gpu)
    if not exchange_of(strategy.exchange).accepts_prescaled:  # it does more than add values
        return planned
    chunks: list[Bucket] = []
    for bucket in planned:
        (name, shape), *others = bucket.items()
        parts = [] if others else cut(math.prod(shape), strategy.chunk_mb, profile.bytes_scale)
        pieces: list[Bucket] = [{f"{name}[{p.start}:{p.stop}]": (len(p),)} for p in parts]
        chunks += pieces if len(pieces) > 1 else [bucket]
    return chunks


def ranks_of_a_copy(pattern: Pattern, network: Network) -> int:
    """Return the number of ranks that share a copy of the weights.

    Raises:
        ValueError: it does not divide all ranks.
    """
    return sharing_ranks("shard_size", pattern.shard_size, network.size, lambda: network.local)


def _local(s: Sizes, sync: Settings, e: Settings) -> float:
    """Add the anchor, and the outer momentum."""
    return extra_bytes(s, e) + 4 * s.n * (1 + (sync["outer_momentum"] > 0))


def _only_exchange(s: Sizes, sync: Settings, e: Settings) -> float:
    return extra_bytes(s, e)


# Bytes besides weights, gradients and momentum, by class of sync: of the sizes, the sync's settings
# and the exchange.
SYNCS: dict[str, Callable[[Sizes, Settings, Settings], float]] = {
    "NoSync": lambda s, sync, e: 0,
    "GradSync": _only_exchange,
    # Its parts are views of gradients, which live until the next forward has applied them.
    "PrioritySync": _only_exchange,
    "LocalSync": _local,
    "StreamingSync": _local,
    "DesLoc": _only_exchange,
    # Only the root holds momentum.
    "RootUpdate": lambda s, sync, e: extra_bytes(s, e) - (4 * s.n if s.rank else 0),
    # Gradients in buckets, and what a reduce-scatter needs.
    "Zero1": lambda s, sync, e: _zero1(s, e),
    # A second gradient, which is under way during the step.
    "DoubleBuffer": lambda s, sync, e: extra_bytes(s, e) + 4 * s.n * bool(sync["double_buffer"]),
    "DDPSync": lambda s, sync, e: _ddp(s, sync),
}


def _zero1(s: Sizes, e: Settings) -> float:
    from lab.exchange.scatter import scatter_of  # with torch, which settings and help do not need

    return 4 * s.gathered + scatter_of(exchange_of(e)).memory_bytes(s)


def _ddp(s: Sizes, sync: Settings) -> float:
    """Count DDP's buckets, if gradients are copied to them; the memory of its hooks is torch's."""
    if sync.get("hook", "none") != "none":
        return math.nan
    return 0 if sync.get("gradient_as_bucket_view") else 4 * s.n


def update_of(optim: Mapping[str, Any]) -> Update | None:
    """Return an optimizer's step, by the group `optim`; None: it is not known."""
    from lab.sync import update  # with torch, which settings and help do not need

    return update.update_of(optim)


def sync_bytes(sizes: Sizes, settings: Mapping[str, Any]) -> float:
    """Count the bytes that a rank needs besides weights, gradients and the whole optimizer's state.

    Args:
        settings: of a run, composed; `sync`, `exchange` and `optim` are read.

    Returns:
        NaN for a sync or an exchange of unknown memory, such as a user's own.
    """
    name = class_of(settings)
    if name not in SYNCS:
        return math.nan
    try:
        needed = SYNCS[name](sizes, settings["sync"], settings["exchange"])
    except ConfigError:
        raise
    except ValueError:  # no exchange of the lab's
        return math.nan
    if pattern_of(settings).parts_the_update:  # others keep their part of the state
        needed -= VALUE_BYTES * sizes.n * state_copies(settings["optim"]) * (1 - 1 / sizes.N)
    return needed


def most_sync_bytes(sizes: Sizes, settings: Mapping[str, Any]) -> float:
    """Return `sync_bytes` of the rank that needs most, whichever rank `sizes` is of."""
    first_and_last = {0, sizes.N - 1}  # a root, and a rank that is none
    return max(sync_bytes(replace(sizes, rank=rank), settings) for rank in first_and_last)


def rank_bytes(
    profile: Profile,
    strategy: Strategy,
    settings: Mapping[str, Any],
    world_size: int,
    hardware: Hardware,
) -> float:
    """Count the bytes of the rank that needs most, without activations; NaN if unknown.

    Args:
        settings: of the run, composed; `optim`, `sync` and `exchange` are read.
        hardware: over whose library ranks talk, and whose nodes they share.
    """
    values = profile.gradient_bytes // VALUE_BYTES
    of_model = VALUE_BYTES * values * (2 + state_copies(settings["optim"]))
    sent = buckets(profile, strategy.bucket_mb, hardware.on_gpu)
    local = min(world_size, hardware.ranks_per_node)
    sizes = Sizes(values, *of_buckets(sent), 0, world_size, hardware.library, local=local)
    return of_model + most_sync_bytes(sizes, settings)


def state_copies(optim: Mapping[str, Any]) -> float:
    """Count the values that an optimizer keeps of each parameter: Adam two. NaN: not known."""
    update = update_of(optim)
    return update.copies if update else math.nan


def update_beside(profile: Profile, hardware: Hardware, update: Update) -> tuple[Update, float]:
    """Return the passes over memory that are beside a profile's times, and their rate.

    A measured step contains an update, with SGD if the profile does not say what it reads and
    writes, of all weights even if each rank updates its part alone. What other optimizers read and
    write beyond that is beside it, or comes off.

    Returns:
        passes: may be negative. rate: bytes per second; infinite: not known, so they take no time.
    """
    if profile.update_bytes_per_s is not None:
        return update, profile.update_bytes_per_s
    contained = profile.update_passes
    if contained is None and profile.rest_ms is None and hardware.update_bytes_per_s is not None:
        return update, hardware.update_bytes_per_s
    difference = update.passes - (MOMENTUM.passes if contained is None else contained)
    return Update(difference, difference, update.copies), _rate(profile, hardware)


def _rate(profile: Profile, hardware: Hardware) -> float:
    if hardware.update_bytes_per_s is not None:
        return hardware.update_bytes_per_s
    num_bytes = MOMENTUM.passes * profile.gradient_bytes
    return hardware.device.rate_of(num_bytes) if hardware.device else math.inf


def products_s(profile: Profile, hardware: Hardware, update: Update) -> float:
    """Return the seconds of an update's matrix products that are beside a profile's times.

    They are those of a square matrix, which has the most; an update of as many passes as the
    profile's has the same products.
    """
    if not update.operations or update.passes == profile.update_passes:
        return 0.0
    shapes = (shape for shape in parameters(profile).values() if len(shape) > 1)
    rows = sum(math.prod(shape) * min(shape) for shape in shapes)
    rate = OPERATIONS_PER_BYTE[hardware.library] * hardware.codec_bytes_per_s
    return update.operations * rows / rate


def update_note(optim: str, profile: Profile, hardware: Hardware, strategy: Strategy) -> str:
    """Say how an optimizer counts beside a measured profile, which contains another one's update.

    Args:
        optim: its path.
    """
    passes = MOMENTUM.passes if profile.update_passes is None else profile.update_passes
    contained = f"{profile.name} contains an update of {passes:g} passes"
    if profile.update_passes is None:
        contained = f"{profile.name} is assumed to contain SGD's update of {passes:g} passes"
    if (update := strategy.update) is None:
        unknown = "the time of its update is not predicted, because its passes are unknown"
        return f"optim={optim}: {unknown}; {contained}"
    beside, rate = update_beside(profile, hardware, update)
    if update.passes == passes or beside == update:
        return ""
    note = f"optim={optim}: an update makes {update.passes:g} passes over memory; {contained}"
    if seconds := products_s(profile, hardware, update):
        note += f"; its matrix products add {1e3 * seconds:.2f} ms"
    if math.isinf(rate):
        return (
            f"{note}; the difference is not predicted; to predict it, set "
            "hardware.update_bytes_per_s="
        )
    seconds = beside.passes * profile.gradient_bytes / rate
    change = f"the difference changes a step by {1e3 * seconds:+.2f} ms"
    return f"{note}; {change}, at {rate / 1e9:.4g} GB/s"

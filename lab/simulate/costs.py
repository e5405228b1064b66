"""One cost card per exchange: its stages, payload bytes and memory, and whether it is exact.

The simulator, lab.bench memory, and the tests of payload and documents all read these cards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lab.exchange.chunks import chunk_mb_over
from lab.exchange.topology import binomial_node, in_order_node
from lab.simulate import codecs, directions, hierarchy
from lab.simulate.load import Load, Relay, Settings, Shape, Sizes, Stage, class_of
from lab.simulate.network import Network
from lab.simulate.phases import phases_of, ways_of


def _nothing(sizes: Sizes, exchange: Settings) -> float:
    return 0


def _never(exchange: Settings) -> bool:
    return False


def _always(exchange: Settings) -> bool:
    return True


def _rounds(exchange: Settings) -> bool:
    return exchange["dtype"] != "float32"


@dataclass(frozen=True)
class Card:
    """The cost of an exchange.

    Attributes:
        add_stages: appends a bucket's stages, and with them its payload bytes, to a Load.
        staged: the exchange is written in stages (lab.exchange.base.Staged), so that over Gloo it
            takes turns with backward on one thread; others have a thread of their own.
        scratch: bytes of memory that a rank needs while it exchanges. Gradients that were gathered
            into a buffer leave free memory behind, which serves as scratch.
        kept: bytes in addition to that: residuals, buffers, and messages under way.
        sums: whether an exchange adds values one by one and does no more, so that parts of a
            parameter may travel alone.
        lossy: whether an exchange delivers something else than the mean up to rounding.
        relay: what two levels do with it between nodes; None: they send values inside the nodes.
    """

    add_stages: Callable[[Load], None]
    staged: bool = False
    sums: Callable[[Settings], bool] = _never
    scratch: Callable[[Sizes, Settings], float] = _nothing
    kept: Callable[[Sizes, Settings], float] = _nothing
    lossy: Callable[[Settings], bool] = _never
    relay: Relay | None = None


def card_of(exchange: Settings) -> Card:
    """Return the card of an exchange.

    Args:
        exchange: `_target_` and its arguments, as configured.

    Raises:
        ValueError: the exchange has no card.
    """
    name = class_of(exchange)
    if name not in CARDS:
        raise ValueError(f"exchange={name}: has no cost card; allowed are {', '.join(CARDS)}")
    return CARDS[name]


def stages_of(shapes: Sequence[Shape], exchange: Settings, network: Network) -> list[Stage]:
    """List the stages of one bucket of parameters of `shapes`. ValueError as in `card_of`."""
    load = Load(shapes, exchange, network)
    card_of(exchange).add_stages(load)
    return load.stages


def payload_bytes(shapes: Sequence[Shape], exchange: Settings, network: Network) -> float:
    """Count the bytes that the busiest rank sends for one bucket. ValueError as in `card_of`."""
    return sum(stage.payload_bytes for stage in stages_of(shapes, exchange, network))


def extra_bytes(sizes: Sizes, exchange: Settings) -> float:
    """Count the bytes a rank needs besides weights, gradients and the optimizer's state.

    Raises:
        ValueError: as in `card_of`.
    """
    card = card_of(exchange)
    return max(4 * sizes.gathered, card.scratch(sizes, exchange)) + card.kept(sizes, exchange)


def _auto(load: Load) -> None:
    """Take the fastest exchange for this bucket by itself; see simulate() for whole steps."""
    ways = ways_of(load.exchange).values()
    tried = [stages_of(load.shapes, way, load.network) for way in ways]
    load.stages += min(tried, key=lambda stages: sum(stage.seconds for stage in stages))


def _schedule(load: Load) -> None:
    """Take each phase's stages for its share of the run."""
    for share, way in phases_of(load.exchange):
        for stage in stages_of(load.shapes, way, load.network):
            load.stages.append(stage.scaled(share))


def _in_messages(load: Load, part: str = "whole") -> None:
    from lab.simulate import recorded  # with torch, which settings and help do not need

    recorded.add_stages(load, part)


def _message_bytes(load: Load) -> float:
    from lab.simulate import recorded

    return recorded.message_bytes(load)


def _hierarchical(load: Load) -> None:
    inter = card_of(load.exchange["inter"])
    hierarchy.add_stages(load, inter.add_stages, inter.relay)


def _hierarchical_kept(sizes: Sizes, exchange: Settings) -> float:
    inter = card_of(exchange["inter"])
    return hierarchy.kept(sizes, inter.kept, exchange["inter"], inter.relay)


def is_staged(exchange: Settings) -> bool:
    """Return whether an exchange takes turns with backward over Gloo, in all of its parts."""
    parts = [*ways_of(exchange).values()] or [exchange.get("inter", exchange)]
    return all(card_of(way).staged for way in parts)


def _dearest(sizes: Sizes, exchange: Settings) -> Settings:
    """Return whichever of the chosen exchanges needs more memory."""
    ways = ways_of(exchange)
    used = [
        way
        for name, way in ways.items()
        if not sizes.chosen or sizes.chosen & {name, class_of(way)}
    ]
    return max(used or ways.values(), key=lambda way: extra_bytes(sizes, way))


def _tree_scratch(s: Sizes, tree: Settings) -> float:
    whole = chunk_mb_over(tree["chunk_mb"], s.backend) is None
    return 4 * s.largest if whole and binomial_node(s.rank, s.N).children else 0


def _tree_kept(s: Sizes, tree: Settings) -> float:
    if chunk_mb_over(tree["chunk_mb"], s.backend) is None:
        return 0
    return s.chunks(s.largest, tree, len(binomial_node(s.rank, s.N).children))


def _double_tree_kept(s: Sizes, exchange: Settings) -> float:
    children = [len(in_order_node(s.rank, s.N, tree).children) for tree in (0, 1)]
    return sum(s.chunks(s.largest / 2, exchange, number) for number in children)


def _of_parts(add_stages: Callable[[Load], None]) -> Card:
    """Return the card of an exchange that is made of others: memory is that of the dearest."""
    return Card(
        add_stages,
        lossy=lambda e: any(card_of(way).lossy(way) for way in ways_of(e).values()),
        scratch=lambda s, e: card_of(_dearest(s, e)).scratch(s, _dearest(s, e)),
        kept=lambda s, e: card_of(_dearest(s, e)).kept(s, _dearest(s, e)),
    )


def _auto_scratch(s: Sizes, auto: Settings) -> float:
    """Count a copy of the largest bucket as well, which rehearsals need."""
    way = _dearest(s, auto)
    return card_of(way).scratch(s, way) + (0 if s.chosen else 4 * s.largest)


# By class name; each exchange has one entry.
CARDS: dict[str, Card] = {
    "NoExchange": Card(lambda load: None, staged=True, lossy=_always),
    "AllReduce": Card(
        codecs.all_reduce,
        staged=True,
        sums=_always,
        kept=lambda s, e: 2 * s.n if _rounds(e) and s.N > 1 else 0,
        lossy=_rounds,
    ),
    "Star": Card(
        lambda load: load.wire(load.network.star(load.num_bytes)),
        sums=_always,
        scratch=lambda s, e: 0 if s.rank else 4 * s.largest,
    ),
    "Tree": Card(
        lambda load: load.wire(load.network.tree_pipelined(load.num_bytes, load.chunk_bytes)),
        sums=_always,
        scratch=_tree_scratch,
        kept=_tree_kept,
    ),
    "DoubleTree": Card(
        lambda load: load.wire(load.network.tree_double(load.num_bytes, load.chunk_bytes)),
        sums=_always,
        kept=_double_tree_kept,
    ),
    "Ring": Card(
        lambda load: load.wire(load.network.ring(load.num_bytes, load.chunk_bytes)),
        sums=_always,
        kept=lambda s, e: s.chunks(s.largest / s.N, e),
    ),
    "OneBit": Card(
        _in_messages,
        staged=True,
        lossy=_always,
        # Both residuals, and three messages: sent, later all sums; received; the shard's.
        kept=lambda s, e: 4 * s.n * (1 + 1 / s.N) + s.n / 8 * (2 + 1 / s.N),
        relay=Relay(
            partial(_in_messages, part="sum"),
            _message_bytes,
            partial(_in_messages, part="decode"),
            kept=lambda num_values: num_values / 8,
        ),
    ),
    "Int8": Card(
        _in_messages,
        staged=True,
        lossy=_always,
        # Messages: sent, received, and this rank's part of the mean.
        kept=lambda s, e: s.n * (2 + 1 / s.N) * (1 + 8 / e["block_size"]),
    ),
    "SignSGD": Card(
        _in_messages,
        staged=True,
        lossy=_always,
        kept=lambda s, e: 4 * s.n + s.n / 8 * (1 + s.N),
    ),
    "Int4": Card(
        _in_messages,
        staged=True,
        lossy=_always,
        kept=lambda s, e: (
            (4 * s.n * (1 + 1 / s.N) if e["error_feedback"] else 0)
            + s.n * (1 / 2 + 8 / e["block_size"]) * (2 + 1 / s.N)
        ),
    ),
    "TopK": Card(
        _in_messages,
        staged=True,
        lossy=_always,
        # An int32 index and a value each, of this rank and of all.
        kept=lambda s, e: 4 * s.n + 8 * e["ratio"] * s.n * (1 + s.N),
    ),
    "RandomK": Card(
        codecs.randomk,
        staged=True,
        lossy=_always,
        kept=lambda s, e: 4 * s.n * (1 + e["ratio"]),
    ),
    "PowerSGD": Card(codecs.powersgd, staged=True, lossy=_always, kept=lambda s, e: 4 * s.n),
    "Hierarchical": Card(
        _hierarchical,
        staged=True,
        sums=lambda e: card_of(e["inter"]).sums(e["inter"]),
        lossy=lambda e: card_of(e["inter"]).lossy(e["inter"]),
        scratch=lambda s, e: hierarchy.scratch(s, card_of(e["inter"]).scratch, e["inter"]),
        kept=_hierarchical_kept,
    ),
    "OneBitAdam": Card(
        directions.onebit_adam, staged=True, lossy=_always, kept=directions.onebit_adam_kept
    ),
    "OneBitLamb": Card(
        directions.onebit_lamb, staged=True, lossy=_always, kept=directions.onebit_adam_kept
    ),
    "ZeroOneAdam": Card(
        directions.zero_one_adam, staged=True, lossy=_always, kept=directions.zero_one_adam_kept
    ),
    "Muon": Card(directions.muon, staged=True, lossy=_always, kept=directions.muon_kept),
    "Dion": Card(directions.dion, lossy=_always, kept=directions.dion_kept),
    "Auto": replace(_of_parts(_auto), scratch=_auto_scratch),
    "Schedule": _of_parts(_schedule),
}

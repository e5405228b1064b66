"""One cost card per exchange: its stages, payload bytes and memory, and whether it is exact.

The simulator, lab.bench memory, and the tests of payload and documents all read these cards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lab.exchange import compressible
from lab.exchange.chunks import chunk_mb_over
from lab.exchange.topology import binomial_node, in_order_node
from lab.simulate.load import Load, Settings, Shape, Sizes, Stage, class_of
from lab.simulate.network import Cost, Network


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
        sums: it adds values one by one, so that parts of a parameter may travel alone
            (Exchange.takes_divided).
        lossy: whether an exchange delivers something else than the mean up to rounding.
    """

    add_stages: Callable[[Load], None]
    staged: bool = False
    sums: bool = False
    scratch: Callable[[Sizes, Settings], float] = _nothing
    kept: Callable[[Sizes, Settings], float] = _nothing
    lossy: Callable[[Settings], bool] = _never


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


def _library(load: Load) -> None:
    if load.exchange["dtype"] == "float32" or load.N == 1:  # one rank keeps what it has
        load.wire(load.exact(load.n))
        return
    half, cast = load.num_bytes / 2, 1.5 * load.num_bytes
    load.codec(cast)
    load.wire(load.network.all_reduce(half))
    load.codec(cast)


def _onebit(load: Load) -> None:
    """Count reads and writes as lab/benchmarks/codec.py does: gradient, residuals, message.

    There are three calls per matrix, as in lab/exchange/onebit.py: encode, sum and decode.
    """
    rule = [load.exchange[key] for key in ("granularity", "block_size", "min_columns")]
    matrices = [matrix for shape in load.shapes if (matrix := compressible.quantised(shape, *rule))]
    n = sum(rows * columns for rows, columns in matrices)
    message = sum(rows * (columns / 8 + 8) for rows, columns in matrices)  # and two scales a row
    exact = load.exact(load.n - n)
    if not n:
        load.wire(exact)
        return
    load.codec(12 * n + message, len(matrices))
    load.wire(exact + load.network.all_to_all(message / load.N))
    load.codec(12 * n / load.N + message, len(matrices))
    load.wire(load.network.all_gather(message / load.N))
    load.codec(4 * n + message, len(matrices))


def _int8(load: Load) -> None:
    """Count the memory passes of lab/codec/int8.py."""
    encode, decode, add = 29 * load.n, 13 * load.n, 12 * load.n
    message = load.n * (1 + 8 / load.exchange["block_size"])
    load.codec(encode)
    load.wire(load.network.all_to_all(message / load.N))
    load.codec(decode + add + encode / load.N)
    load.wire(load.network.all_gather(message / load.N))
    load.codec(decode)


def _signsgd(load: Load) -> None:
    """Count the memory passes of lab/codec/signsgd.py and of its residual."""
    least = load.exchange["min_values"]
    n = sum(math.prod(shape) for shape in load.shapes if compressible.signed(shape, least))
    load.codec(48 * n)
    load.wire(load.exact(load.n - n) + (load.network.all_gather(n / 8) if n else Cost()))
    load.codec(8 * n * load.N)


def _topk(load: Load) -> None:
    """Count the memory passes of the residual and of lab/codec/topk.py on a CPU."""
    sent = sum(compressible.num_sent(shape, load.exchange["ratio"]) for shape in load.shapes)
    load.codec(40 * load.n)
    load.wire(load.network.all_gather(8 * sent))  # an int32 index and a value
    load.codec(16 * sent * load.N)


def _randomk(load: Load) -> None:
    sent = sum(compressible.num_sent(shape, load.exchange["ratio"]) for shape in load.shapes)
    load.codec(20 * load.n + 40 * sent)
    load.wire(load.exact(sent))
    load.codec(16 * sent)


def _powersgd(load: Load) -> None:
    rank = load.exchange["rank"]
    low = [matrix for shape in load.shapes if (matrix := compressible.low_rank(shape, rank))]
    n = sum(rows * columns for rows, columns in low)
    load.codec(16 * n)
    load.wire(load.exact(load.n - n) + load.exact(rank * sum(rows for rows, _ in low)))
    load.codec(12 * n)
    load.wire(load.exact(rank * sum(columns for _, columns in low)))
    load.codec(4 * n)


def _auto(load: Load) -> None:
    """Take the faster exchange for this bucket; training finds it by trying both."""
    tried = [stages_of(load.shapes, way, load.network) for way in _ways(load.exchange)]
    load.stages += min(tried, key=lambda stages: sum(stage.seconds for stage in stages))


def _ways(auto: Settings) -> tuple[Settings, Settings]:
    return auto["compressed"], auto["plain"]


def _dearest(sizes: Sizes, auto: Settings) -> Settings:
    """Return whichever of the chosen exchanges needs more memory."""
    ways = [way for way in _ways(auto) if not sizes.chosen or class_of(way) in sizes.chosen]
    return max(ways, key=lambda way: extra_bytes(sizes, way))


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


# By class name; each exchange has one entry.
CARDS: dict[str, Card] = {
    "NoExchange": Card(lambda load: None, staged=True, lossy=_always),
    "AllReduce": Card(
        _library,
        staged=True,
        sums=True,
        scratch=lambda s, e: 2 * s.n if _rounds(e) else 0,
        lossy=_rounds,
    ),
    "Star": Card(
        lambda load: load.wire(load.network.star(load.num_bytes)),
        sums=True,
        scratch=lambda s, e: 0 if s.rank else 4 * s.largest,
    ),
    "Tree": Card(
        lambda load: load.wire(load.network.tree_pipelined(load.num_bytes, load.chunk_bytes)),
        sums=True,
        scratch=_tree_scratch,
        kept=_tree_kept,
    ),
    "DoubleTree": Card(
        lambda load: load.wire(load.network.tree_double(load.num_bytes, load.chunk_bytes)),
        sums=True,
        kept=_double_tree_kept,
    ),
    "Ring": Card(
        lambda load: load.wire(load.network.ring(load.num_bytes, load.chunk_bytes)),
        sums=True,
        kept=lambda s, e: s.chunks(s.largest / s.N, e),
    ),
    "OneBit": Card(
        _onebit,
        staged=True,
        lossy=_always,
        # Both residuals, and four messages: sent, received, the shard's sum, and all sums.
        kept=lambda s, e: 4 * s.n * (1 + 1 / s.N) + s.n / 8 * (3 + 1 / s.N),
    ),
    "Int8": Card(
        _int8,
        staged=True,
        lossy=_always,
        scratch=lambda s, e: s.n * (2 + 1 / s.N) + 4 * s.largest / s.N,
    ),
    "SignSGD": Card(_signsgd, staged=True, lossy=_always, kept=lambda s, e: 4 * s.n),
    "TopK": Card(
        _topk,
        staged=True,
        lossy=_always,
        # For each value sent: an int64 index; int32 index and value, on this rank and from all.
        kept=lambda s, e: 4 * s.n + e["ratio"] * s.n * (8 + 8 + 8 * s.N),
    ),
    "RandomK": Card(
        _randomk,
        staged=True,
        lossy=_always,
        kept=lambda s, e: 4 * s.n + e["ratio"] * s.n * (8 + 4),
    ),
    "PowerSGD": Card(_powersgd, lossy=_always, kept=lambda s, e: 4 * s.n),
    "Auto": Card(
        _auto,
        lossy=lambda e: any(card_of(way).lossy(way) for way in _ways(e)),
        scratch=lambda s, e: card_of(_dearest(s, e)).scratch(s, _dearest(s, e)),
        kept=lambda s, e: card_of(_dearest(s, e)).kept(s, _dearest(s, e)),
    ),
}

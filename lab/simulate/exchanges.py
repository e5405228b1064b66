"""What each exchange does to one bucket: work on the rank's own memory, and collectives.

A profile knows how many values a layer has, not how they are shaped: where that matters (rows that
share scales, matrices of low rank) it counts as one square matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lab.exchange.grouping import MB
from lab.simulate.network import Network

VALUE_BYTES = 4  # gradients are float32


@dataclass(frozen=True)
class Stage:
    """Seconds in which a rank computes (row "codec") or its links are busy (row "exchange")."""

    row: str
    seconds: float


@dataclass
class Load:
    """One bucket and the exchange that averages it; collects stages.

    Attributes:
        values: numbers of float32 values of its parameters.
        exchange: the exchange's own settings.
        network: the ranks and their links.
    """

    values: tuple[int, ...]
    exchange: Mapping[str, Any]
    network: Network
    stages: list[Stage] = field(default_factory=list)

    @property
    def n(self) -> int:
        return sum(self.values)

    @property
    def N(self) -> int:
        return self.network.size

    @property
    def chunk_bytes(self) -> float:
        return self.exchange["chunk_mb"] * MB if self.exchange["chunk_mb"] else math.inf

    def codec(self, num_bytes: float) -> None:
        """Read and write so many bytes of memory."""
        hardware = self.network.hardware
        seconds = hardware.host_factor(self.N) * num_bytes / hardware.codec_bytes_per_s
        self.stages.append(Stage("codec", seconds))

    def wire(self, seconds: float) -> None:
        """Wait for a collective."""
        self.stages.append(Stage("exchange", seconds))


@dataclass(frozen=True)
class Model:
    """What is known of an exchange.

    Attributes:
        add_stages: appends a bucket's stages to its Load.
        staged: it is written in stages (lab.exchange.exchange.Staged), so that over Gloo it takes
            turns with backward on one thread; others have a thread of their own.
    """

    add_stages: Callable[[Load], None]
    staged: bool = False


def stages_of(
    values: tuple[int, ...], exchange: Mapping[str, Any], network: Network
) -> list[Stage]:
    """The stages of one bucket.

    Args:
        values: numbers of values of its parameters.
        exchange: as configured: `_target_` and its arguments.

    Raises:
        ValueError: nobody has said what this exchange costs.
    """
    load = Load(values, exchange, network)
    model_of(exchange).add_stages(load)
    return load.stages


def model_of(exchange: Mapping[str, Any]) -> Model:
    """The line of MODELS for an exchange.

    Raises:
        ValueError: there is none.
    """
    name = exchange["_target_"].rpartition(".")[2]
    if name not in MODELS:
        raise ValueError(f"exchange={name}: has no cost model; allowed are {', '.join(MODELS)}")
    return MODELS[name]


def _library(load: Load) -> None:
    width = 4 if load.exchange["dtype"] == "float32" else 2
    cast = 0 if width == 4 else (VALUE_BYTES + width) * load.n
    load.codec(cast)
    load.wire(load.network.all_reduce(width * load.n))
    load.codec(cast)


def _tree(load: Load) -> None:
    load.wire(load.network.tree_pipelined(VALUE_BYTES * load.n, load.chunk_bytes))


def _onebit(load: Load) -> None:
    """Reads and writes as in lab/benchmarks/codec.py: gradient, residual in and out, message."""
    by_block = load.exchange["granularity"] == "block"
    columns = [load.exchange["block_size"] if by_block else math.sqrt(v) for v in load.values]
    least = 1 if by_block else load.exchange["min_columns"]
    shapes = [(v, c) for v, c in zip(load.values, columns, strict=True) if v >= c >= least]
    quantised = sum(v for v, _ in shapes)
    message = sum(v / 8 + 8 * v / c for v, c in shapes)  # two float32 scales a row
    exact = load.network.all_reduce(VALUE_BYTES * (load.n - quantised)) if load.n > quantised else 0
    if not quantised:
        load.wire(exact)
        return
    load.codec(12 * quantised + message)
    load.wire(exact + load.network.all_to_all(message / load.N))
    load.codec(12 * quantised / load.N + message)
    load.wire(load.network.all_gather(message / load.N))
    load.codec(4 * quantised + message)


def _int8(load: Load) -> None:
    """Bytes of memory: the passes of lab/codec/minmax.py."""
    encode, decode, add = 29 * load.n, 13 * load.n, 12 * load.n
    message = load.n * (1 + 8 / load.exchange["block_size"])
    load.codec(encode)
    load.wire(load.network.all_to_all(message / load.N))
    load.codec(decode + add + encode / load.N)
    load.wire(load.network.all_gather(message / load.N))
    load.codec(decode)


def _signsgd(load: Load) -> None:
    signed = sum(v for v in load.values if v >= load.exchange["min_values"])
    exact = load.network.all_reduce(VALUE_BYTES * (load.n - signed)) if load.n > signed else 0
    load.codec(48 * signed)
    load.wire(exact + (load.network.all_gather(signed / 8) if signed else 0))
    load.codec(8 * signed * load.N)


def _topk(load: Load) -> None:
    sent = math.ceil(load.exchange["ratio"] * load.n)
    load.codec(40 * load.n)
    load.wire(load.network.all_gather(8 * sent))  # an int32 index and a value
    load.codec(16 * sent * load.N)


def _randomk(load: Load) -> None:
    sent = math.ceil(load.exchange["ratio"] * load.n)
    load.codec(20 * load.n + 40 * sent)
    load.wire(load.network.all_reduce(VALUE_BYTES * sent))
    load.codec(16 * sent)


def _powersgd(load: Load) -> None:
    rank = load.exchange["rank"]
    sides = [math.sqrt(v) for v in load.values if 2 * rank < math.sqrt(v)]
    low = sum(side * side for side in sides)
    factor = VALUE_BYTES * rank * sum(sides)  # of P, and of Q
    exact = load.network.all_reduce(VALUE_BYTES * (load.n - low)) if load.n > low else 0
    load.codec(16 * low)
    load.wire(exact + load.network.all_reduce(factor))
    load.codec(12 * low)
    load.wire(load.network.all_reduce(factor))
    load.codec(4 * low)


def _auto(load: Load) -> None:
    """Per bucket, whichever is faster, as it will have found out."""
    ways = [load.exchange[way] for way in ("compressed", "plain")]
    tried = [stages_of(load.values, way, load.network) for way in ways]
    load.stages += min(tried, key=lambda stages: sum(stage.seconds for stage in stages))


# By class; a new exchange is a line.
MODELS: dict[str, Model] = {
    "NoExchange": Model(lambda load: None, staged=True),
    "AllReduce": Model(_library, staged=True),
    "Tree": Model(_tree),
    "DoubleTree": Model(
        lambda load: load.wire(load.network.tree_double(VALUE_BYTES * load.n, load.chunk_bytes))
    ),
    "Ring": Model(
        lambda load: load.wire(load.network.ring(VALUE_BYTES * load.n, load.chunk_bytes))
    ),
    "Star": Model(lambda load: load.wire(load.network.star(VALUE_BYTES * load.n))),
    "OneBit": Model(_onebit, staged=True),
    "Int8": Model(_int8, staged=True),
    "SignSGD": Model(_signsgd, staged=True),
    "TopK": Model(_topk, staged=True),
    "RandomK": Model(_randomk, staged=True),
    "PowerSGD": Model(_powersgd),
    "Auto": Model(_auto),
}

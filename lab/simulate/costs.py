"""What each exchange does to one bucket: work on the rank's own memory, and collectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.exchange.chunks import chunk_mb_over
from lab.exchange.grouping import MB
from lab.model.profile import VALUE_BYTES
from lab.simulate.network import Cost, Network

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stage:
    """Seconds in which a rank computes (row "codec") or its links are busy (row "exchange")."""

    row: str
    seconds: float
    payload_bytes: float = 0.0


@dataclass
class Load:
    """One bucket and the exchange that averages it; collects stages.

    Attributes:
        shapes: of its parameters.
        exchange: the exchange's own settings.
        network: the ranks and their links.
    """

    shapes: Sequence[Shape]
    exchange: Mapping[str, Any]
    network: Network
    stages: list[Stage] = field(default_factory=list)

    @property
    def n(self) -> int:
        """Values of the bucket."""
        return sum(map(math.prod, self.shapes))

    @property
    def N(self) -> int:
        """Ranks."""
        return self.network.size

    @property
    def num_bytes(self) -> int:
        """Of the gradient as it is."""
        return VALUE_BYTES * self.n

    @property
    def chunk_bytes(self) -> float:
        """Largest chunk; infinite where the exchange has none."""
        chunk_mb = chunk_mb_over(self.exchange["chunk_mb"], self.network.hardware.library)
        return chunk_mb * MB if chunk_mb else math.inf

    def codec(self, num_bytes: float, calls: int = 1) -> None:
        """Read and write so many bytes of memory, in so many calls."""
        hardware = self.network.hardware
        seconds = calls * hardware.codec_s + num_bytes / hardware.codec_bytes_per_s
        self.stages.append(Stage("codec", hardware.host_factor(self.N) * seconds))

    def wire(self, cost: Cost) -> None:
        """Wait for a collective."""
        self.stages.append(Stage("exchange", cost.seconds, cost.payload_bytes))

    def exact(self, num_values: int) -> Cost:
        """Of values that travel as they are, in an all-reduce of their own."""
        return self.network.all_reduce(VALUE_BYTES * num_values)


@dataclass(frozen=True)
class Model:
    """What is known of an exchange.

    Attributes:
        add_stages: appends a bucket's stages to its Load.
        staged: it is written in stages (lab.exchange.base.Staged), so that over Gloo it takes
            turns with backward on one thread; others have a thread of their own.
    """

    add_stages: Callable[[Load], None]
    staged: bool = False


def stages_of(
    shapes: Sequence[Shape], exchange: Mapping[str, Any], network: Network
) -> list[Stage]:
    """The stages of one bucket.

    Args:
        shapes: of its parameters.
        exchange: as configured: `_target_` and its arguments.

    Raises:
        ValueError: nobody has said what this exchange costs.
    """
    load = Load(shapes, exchange, network)
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
    if load.exchange["dtype"] == "float32":
        load.wire(load.exact(load.n))
        return
    half, cast = load.num_bytes / 2, 1.5 * load.num_bytes
    load.codec(cast)
    load.wire(load.network.all_reduce(half))
    load.codec(cast)


def _onebit(load: Load) -> None:
    """Reads and writes as in lab/benchmarks/codec.py: gradient, residual in and out, message.

    Calls as in lab/exchange/onebit.py: to encode, sum and decode each matrix.
    """
    matrices = [matrix for shape in load.shapes if (matrix := _quantised(shape, load.exchange))]
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


def _quantised(shape: Shape, onebit: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a parameter that share scales by row, or None: it travels exactly."""
    if onebit["granularity"] == "block":
        rows, columns = math.prod(shape) // onebit["block_size"], onebit["block_size"]
        return (rows, columns) if rows else None
    rows, columns = shape[0], math.prod(shape[1:])
    return (rows, columns) if len(shape) > 1 and columns >= onebit["min_columns"] else None


def _int8(load: Load) -> None:
    """Bytes of memory: the passes of lab/codec/int8.py."""
    encode, decode, add = 29 * load.n, 13 * load.n, 12 * load.n
    message = load.n * (1 + 8 / load.exchange["block_size"])
    load.codec(encode)
    load.wire(load.network.all_to_all(message / load.N))
    load.codec(decode + add + encode / load.N)
    load.wire(load.network.all_gather(message / load.N))
    load.codec(decode)


def _signsgd(load: Load) -> None:
    """Bytes of memory: the passes of lab/codec/signsgd.py and of its residual."""
    n = sum(v for v in map(math.prod, load.shapes) if v >= load.exchange["min_values"])
    load.codec(48 * n)
    load.wire(load.exact(load.n - n) + (load.network.all_gather(n / 8) if n else Cost()))
    load.codec(8 * n * load.N)


def _topk(load: Load) -> None:
    """Bytes of memory: the residual's and those of lab/codec/topk.py on a CPU."""
    sent = math.ceil(load.exchange["ratio"] * load.n)
    load.codec(40 * load.n)
    load.wire(load.network.all_gather(8 * sent))  # an int32 index and a value
    load.codec(16 * sent * load.N)


def _randomk(load: Load) -> None:
    sent = math.ceil(load.exchange["ratio"] * load.n)
    load.codec(20 * load.n + 40 * sent)
    load.wire(load.exact(sent))
    load.codec(16 * sent)


def _powersgd(load: Load) -> None:
    rank = load.exchange["rank"]
    pairs = [(s[0], math.prod(s[1:])) for s in load.shapes if len(s) > 1]
    low = [(rows, columns) for rows, columns in pairs if rank * (rows + columns) < rows * columns]
    n = sum(rows * columns for rows, columns in low)
    load.codec(16 * n)
    load.wire(load.exact(load.n - n) + load.exact(rank * sum(rows for rows, _ in low)))
    load.codec(12 * n)
    load.wire(load.exact(rank * sum(columns for _, columns in low)))
    load.codec(4 * n)


def _auto(load: Load) -> None:
    """Per bucket, whichever is faster, as it will have found out."""
    ways = [load.exchange[way] for way in ("compressed", "plain")]
    tried = [stages_of(load.shapes, way, load.network) for way in ways]
    load.stages += min(tried, key=lambda stages: sum(stage.seconds for stage in stages))


# By class; a new exchange is a line.
MODELS: dict[str, Model] = {
    "NoExchange": Model(lambda b: None, staged=True),
    "AllReduce": Model(_library, staged=True),
    "Tree": Model(lambda b: b.wire(b.network.tree_pipelined(b.num_bytes, b.chunk_bytes))),
    "DoubleTree": Model(lambda b: b.wire(b.network.tree_double(b.num_bytes, b.chunk_bytes))),
    "Ring": Model(lambda b: b.wire(b.network.ring(b.num_bytes, b.chunk_bytes))),
    "Star": Model(lambda b: b.wire(b.network.star(b.num_bytes))),
    "OneBit": Model(_onebit, staged=True),
    "Int8": Model(_int8, staged=True),
    "SignSGD": Model(_signsgd, staged=True),
    "TopK": Model(_topk, staged=True),
    "RandomK": Model(_randomk, staged=True),
    "PowerSGD": Model(_powersgd),
    "Auto": Model(_auto),
}

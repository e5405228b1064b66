"""Stages of the reduce-scatters of a unit's gradients: torch's own, and the first halves of codecs.

Those are the counterparts of lab/exchange/scatter.py; bytes of memory are those of its passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from lab.simulate.load import FSDP, Load, Settings, class_of

WORD = 16  # bytes, as in lab/codec/layout.py


def scatter_of(exchange: Settings) -> Callable[[Load], None]:
    """Return what appends the stages of a reduce-scatter to a Load of padded shapes.

    Args:
        exchange: NoExchange: torch's own.

    Raises:
        ValueError: the exchange has no reduce-scatter.
    """
    name = class_of(exchange)
    if name not in SCATTERS or exchange.get("warmup_steps"):
        allowed = (
            "none (torch's), allreduce, bf16, fp16, int8, int4, and onebit without warmup_steps"
        )
        raise ValueError(f"exchange={name}: has no reduce-scatter; allowed are {allowed}")
    return SCATTERS[name]


def in_two_levels(load: Load) -> None:
    """Append a reduce-scatter inside each node and then one between nodes (ZeRO++'s qgZ).

    Before them parts are laid out by local rank, as lab/exchange/two_levels.py does.
    """
    scatter, network = scatter_of(load.exchange), load.network
    Load(load.shapes, FSDP, network, load.stages).codec(2 * load.num_bytes)
    first = Load(load.shapes, load.exchange, network.inside())
    scatter(first)
    load.stages += [replace(stage, inside=True) for stage in first.stages]
    sums = [(load.n // network.local,)]
    scatter(Load(sums, load.exchange, network.rail(network.local), load.stages))


def line_bytes(num_values: int, block_size: int, bits: int) -> int:
    """Count the bytes of values that a codec of blocks sends to one rank.

    As lab/codec/layout.py lays them out: headers of 8 bytes and payloads each fill whole words.
    """
    rows, rest = divmod(num_values, block_size)
    pieces = [(rows, block_size), (1, rest)] if rest else [(rows, block_size)]
    each = [(8 * number, number * math.ceil(bits * width / 8)) for number, width in pieces]
    return sum(math.ceil(part / WORD) * WORD for piece in each for part in piece)


def _of_torch(load: Load) -> None:
    """Over Gloo it is an all-reduce, of which each rank keeps a part."""
    if load.network.hardware.library == "gloo":
        load.wire(load.network.all_reduce(load.num_bytes))
    else:
        load.wire(load.network.reduce_scatter(load.num_bytes / load.N))


def _exact(load: Load) -> None:
    part = load.num_bytes / load.N
    if load.exchange["dtype"] == "float32":
        load.wire(load.network.reduce_scatter(part))
        return
    load.codec(1.5 * load.num_bytes)
    load.wire(load.network.all_to_all(part / 2))
    load.codec(load.num_bytes / 2 + part)


def _eight_bit(load: Load) -> None:
    line = line_bytes(load.n // load.N, load.exchange["block_size"], bits=8)
    message = line * load.N
    load.codec(4 * load.n + message, in_torch=29 * load.n)
    load.wire(load.network.all_to_all(line))
    load.codec(16 * load.n + message, in_torch=25 * load.n)


def _four_bit(load: Load) -> None:
    block, n = load.exchange["block_size"], load.n
    kept = 62 * n if load.exchange["error_feedback"] else 0  # decoded again, and subtracted
    line = line_bytes(n // load.N, block, bits=4)
    load.codec(50 * n + kept)
    load.wire(load.network.all_to_all(line))
    load.codec((22 + 12) * n)


def _sign_bit(load: Load) -> None:
    block = load.exchange["block_size"]
    line = line_bytes(load.n // load.N, block, bits=1)
    message = line * load.N
    load.codec((8 + 12) * load.n + message)
    load.wire(load.network.all_to_all(line))
    load.codec(12 * load.n + message)


SCATTERS: dict[str, Callable[[Load], None]] = {
    "NoExchange": _of_torch,
    "AllReduce": _exact,
    "Int8": _eight_bit,
    "Int4": _four_bit,
    "OneBit": _sign_bit,
}

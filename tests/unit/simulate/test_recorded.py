"""Costs of exchanges that say none: recorded from their code, also a user's own."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.codec.base import Codec
from lab.codec.codecs import Int8
from lab.codec.layout import RowBytes
from lab.distributed.comm import Collective, Comm
from lab.exchange.base import Exchange, Staged
from lab.exchange.bucket import GradBucket
from lab.exchange.compressed import Lossy, TwoStage
from lab.exchange.cost import Costs, Needs, Sizes
from lab.exchange.memory import Memory
from lab.exchange.paths import Star, Tree
from lab.settings.errors import ConfigError
from lab.settings.files import read_file
from lab.simulate.costs import Load, exchange_of, extra_bytes, stages_of
from lab.simulate.hardware import Hardware, Link, parse
from lab.simulate.network import Network
from lab.simulate.strategy import sync_bytes
from tests.support.cases import exchange_settings

LINK = Link(1e-4, 1e8)
HARDWARE = Hardware("any", "made up", "gloo", 1, None, LINK, 1e9)
SHAPES = [(64, 100), (9,)]
NUM_BYTES = 4 * (6400 + 9)


class Halves(Codec):
    """Values as bfloat16."""

    block_size = 100

    def row_bytes(self, columns: int) -> RowBytes:
        return RowBytes(0, 2 * columns)

    def write(self, values: Tensor, header: Tensor, payload: Tensor) -> None:
        payload.view(torch.bfloat16).copy_(values)

    def read(self, header: Tensor, payload: Tensor, columns: int) -> Tensor:
        return payload.view(torch.bfloat16).float()


class InHalves(TwoStage):
    def __init__(self) -> None:
        super().__init__(Halves(), Memory())


class Unsaid:
    def add_cost(self, costs: Costs) -> bool:
        return False


class OwnStar(Unsaid, Star):
    pass


class OwnTree(Unsaid, Tree):
    pass


class Gossip(Staged):
    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        heard = bucket.flat.new_empty(comm.size, len(bucket.flat))
        yield comm.iall_gather(heard, bucket.flat)
        torch.mean(heard, dim=0, out=bucket.flat)


class InNumpy(Exchange):
    def average(self, bucket: GradBucket, comm: Comm) -> None:
        bucket.flat.numpy()


class Logging(InNumpy):
    def __init__(self) -> None:
        self.log = sys.stdout  # of which there is no copy


class Peeking(Exchange):
    def average(self, bucket: GradBucket, comm: Comm) -> None:
        if bucket.flat.abs().max() > 1:
            comm.all_reduce(bucket.flat)


class Deaf(Exchange):
    def average(self, bucket: GradBucket, comm: Comm) -> None:
        comm.recv(bucket.flat, (comm.rank + 1) % comm.size)


class Lost(Exchange):
    def average(self, bucket: GradBucket, comm: Comm) -> None:
        raise KeyError("table")


class LostInFormula(Peeking):
    def add_cost(self, costs: Costs) -> bool:
        raise KeyError("table")


class LostInMemory(Peeking):
    def memory_bytes(self, sizes: Sizes) -> Needs:
        raise KeyError("table")


def of(kind: type) -> dict[str, str]:
    return {"_target_": f"{__name__}.{kind.__qualname__}"}


def seconds(exchange: Exchange, size: int, hardware: Hardware = HARDWARE) -> float:
    load = Load(SHAPES, "mine", Network(hardware, size))
    return load.add(exchange)


def test_a_users_exchange_is_predicted_from_its_code() -> None:
    for size in (2, 5):
        network = Network(HARDWARE, size)
        wire, adding = stages_of(SHAPES, of(Gossip), network)
        assert wire.seconds == network.all_gather(NUM_BYTES).seconds
        assert wire.payload_bytes == (size - 1) * NUM_BYTES
        assert adding.seconds == pytest.approx((size + 1) * NUM_BYTES / 1e9)
        assert adding.codec == f"{__name__}.Gossip"


def test_a_users_codec_is_predicted_from_its_messages() -> None:
    encode, send, _, back, _ = stages_of(SHAPES, of(InHalves), Network(HARDWARE, 2))
    half, cast = 2 * 6409, 6  # bytes of a value that is read as float32 and written in half of them
    # Plain torch adds the residual, encodes, decodes, and subtracts.
    assert encode.seconds == pytest.approx(6409 * (12 + cast + cast + 12) / 1e9)
    assert send.payload_bytes == back.payload_bytes == pytest.approx(half / 2, rel=0.04)
    sizes = Sizes(n=10**6, gathered=0, largest=10**6, rank=0, N=2)
    assert extra_bytes(sizes, of(InHalves)) == 10**6 * (4 * 1.5 + 2 * 2.5)
    assert math.isnan(extra_bytes(sizes, of(Gossip)))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_messages_one_by_one_take_as_long_as_the_formulas_of_stars_and_trees(size: int) -> None:
    for recorded, formula in ((OwnStar(), Star()), (OwnTree(), Tree())):
        expected = seconds(formula, size)
        adding = size * 3 * NUM_BYTES / 1e9  # which formulas count by another rate
        assert expected <= seconds(recorded, size) <= expected + adding + 1e-12


def test_links_inside_nodes_carry_what_stays_there() -> None:
    inside = Hardware("any", "made up", "gloo", 4, Link(0.0, 1e12), LINK, 1e12)
    assert seconds(OwnStar(), 4, inside) < seconds(OwnStar(), 4) / 100


class YieldsNothing(Lossy):
    """An exchange whose stages yield no collectives."""

    def __init__(self) -> None:
        super().__init__(Memory())

    def stages(self, bucket: GradBucket, comm: Comm) -> Any:
        yield None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Peeking, "exchange=Peeking: cannot be predicted from its code, which cannot run"),
        (InNumpy, "exchange=InNumpy: cannot be predicted .*numpy.*implement add_cost"),
        (YieldsNothing, "exchange=YieldsNothing: cannot be predicted .* stages yields NoneType"),
        (Logging, "exchange=Logging: cannot be predicted .*pickle.*implement add_cost"),
        (Deaf, "exchange=.*Deaf: a rank waits for a message that no rank sends"),
    ],
)
def test_code_that_cannot_be_recorded_is_named(kind: type, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        stages_of(SHAPES, of(kind), Network(HARDWARE, 2))


@pytest.mark.parametrize("kind", [Lost, LostInFormula])
def test_an_error_of_a_users_exchange_is_one_line_that_names_it(kind: type) -> None:
    line = (
        rf"^exchange=.*\.{kind.__name__}: fails in a prediction: KeyError: 'table' \(test_rec.*\)$"
    )
    with pytest.raises(ConfigError, match=line):
        stages_of(SHAPES, of(kind), Network(HARDWARE, 2))


def test_an_error_of_a_users_count_of_memory_does_not_pass_for_an_unknown_one() -> None:
    settings = {"sync": {"_target_": "lab.sync.gradsync.GradSync"}, "exchange": of(LostInMemory)}
    with pytest.raises(ConfigError, match=r"LostInMemory: fails in a prediction: KeyError"):
        sync_bytes(Sizes(n=8, gathered=8, largest=8, rank=0, N=2), settings)


def test_recording_leaves_an_exchange_as_it_was() -> None:
    exchange = InHalves()
    before = seconds(exchange, 2), seconds(exchange, 3)
    assert (seconds(exchange, 2), seconds(exchange, 3)) == before
    assert exchange.state_dict()["residual"] == {} and "kernels" not in vars(exchange.codec)


def test_an_old_record_may_name_a_codec_like_an_exchange_by_its_earlier_path() -> None:
    codec = {"_target_": "lab.codec.levels.Int8", "block_size": 64}
    memory = {"_target_": "lab.exchange.memory.Memory", "keeps": False}
    old = {"_target_": "lab.exchange.coded.TwoStage", "codec": codec, "memory": memory}
    made = exchange_of(old)
    assert isinstance(made, TwoStage) and isinstance(made.codec, Int8)


def test_more_ranks_than_can_be_laid_out_are_refused_at_once() -> None:
    many = parse(read_file("hardware", "h200_nvlink_400g"))
    with pytest.raises(ValueError, match=r"world_size=100000: exchange=OneBit .* at most 16384"):
        stages_of([(2048, 1024)], exchange_settings("onebit"), Network(many, 100_000))
    assert stages_of([(2048, 1024)], exchange_settings("allreduce"), Network(many, 10**6))

"""Every strategy has a true row in the reference, and sends what its class says."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from lab.certificate.traffic import formula_bytes
from lab.distributed.comm import Comm, Handle, ThreadComm, run_ranks
from lab.draw.chart import LOOKS
from lab.exchange.bucket import GradBucket
from lab.exchange.cost import Sizes
from lab.settings.config import build, load
from lab.settings.names import computation
from lab.simulate.costs import payload_bytes, stages_of
from lab.simulate.network import Network
from lab.simulate.strategy import sync_bytes
from lab.sync.pattern import OF_CLASS, UNKNOWN, comparable_phases, pattern_of
from tests.conftest import ROOT
from tests.support import cases, strategy_table
from tests.support.cases import (
    ALL_STRATEGIES,
    EXCHANGES,
    LIBRARIES,
    LINKS,
    exchange_settings,
    steps_of_a_round,
)
from tests.support.slow import some_of

pytestmark = pytest.mark.xdist_group("compositions")  # which a process remembers

ROWS, COLUMNS = 1024, 2048
TABLE = {name: strategy_table.about(name)[1] for name in ALL_STRATEGIES}
OTHERS = (ROOT / "docs/exchanges/compression.md").read_text().partition("## Other codecs")[2]
CODECS = dict(re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*) \| [^|]* \| [^|]* \|$", OTHERS, re.M))


def test_the_table_is_made_of_the_presets() -> None:
    written = strategy_table.PAGE.read_text()
    assert strategy_table.table() in written, "python -m tests.support.strategy_table writes it"


def test_looks_and_cases_are_of_what_there_is() -> None:
    named = {*cases.RESUMED, *cases.COUNTED, *cases.BY_THE_CLOCK, *LIBRARIES, *cases.BETWEEN_NODES}
    named |= {*cases.COMPRESSES_LITTLE, *cases.TEMPORARIES}
    assert named <= {*ALL_STRATEGIES, *EXCHANGES}
    assert LOOKS.keys() <= {*ALL_STRATEGIES}


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_exchange_claims_what_its_bytes_allow(exchange: str) -> None:
    """Or else the tests that hold it to its claims would pass it over."""
    made, sent = cases.maker(exchange)(), cases.bytes_per_value(exchange)
    exact = sent >= 4 and made.delivers == "mean"
    assert (made.exact, made.keeps_replicas_equal) == (exact, sent > 0)


@pytest.mark.parametrize("name", ["Star", "OneBit", "Unheard"])
def test_a_users_exchange_is_never_taken_for_the_labs(name: str) -> None:
    """Nor is its code imported because settings name it."""
    mine = {"_target_": f"mine.{name}"}
    inside = {**exchange_settings("hierarchical"), "inter": mine}
    for exchange in (mine, inside):
        with pytest.raises(ValueError, match=rf"^exchange=mine\.{name} is neither one of the lab"):
            stages_of([(8, 8)], exchange, Network(LINKS, 4))
        assert formula_bytes(exchange, [([(8, 8)], 4)], 4) is None
        assert "exchange" not in comparable_phases({"exchange": exchange, "sync": {}})
    sync = {"_target_": "lab.sync.gradsync.GradSync"}
    kept = sync_bytes(Sizes(64, 64, 64, 0, 2), {"sync": sync, "exchange": mine})
    assert math.isnan(kept)
    assert computation({"exchange._target_": mine["_target_"], "sync._target_": "x"}) is None


@pytest.mark.parametrize("name", OF_CLASS)
def test_a_users_sync_is_never_taken_for_the_labs(name: str) -> None:
    settings = {"sync": {"_target_": f"mine.{name}"}, "overlap": False}
    assert pattern_of(settings) is UNKNOWN
    assert math.isnan(sync_bytes(Sizes(64, 64, 64, 0, 2), {**settings, "exchange": {}}))
    star, sync = exchange_settings("star")["_target_"], settings["sync"]["_target_"]
    assert computation({"exchange._target_": star, "sync._target_": sync}) is None


def value_of(formula: str, **names: float) -> float:
    """Evaluate a formula of the documents, without its remarks in words."""
    text = re.sub(r" \([a-z][^)]*[a-z0-9 :]\)$", "", formula)  # (a leaf sends 4n)
    text = text.replace("−", "-").replace("·", "*").replace("⌈log₂N⌉", "hops")
    text = re.sub(r"(?<=[\d)N])\s*(?=[a-zA-Z(])", "*", text)
    text = re.sub(r"\b(n|k|r)\(", r"\1*(", text).replace("LM", "L*M")
    assert re.fullmatch(r"[\w\s.+*/(),-]+", text), formula
    hops = math.ceil(math.log2(names["N"]))
    return eval(text, {"__builtins__": {}}, {**names, "hops": hops, "min": min})


def formula_of(strategy: str) -> str:
    """Return a strategy's cell of the table, or that of the strategy that it refers to."""
    cell = TABLE[strategy]
    reference = re.match(r"as `(\w+)`", cell)
    return formula_of(reference[1]) if reference else cell


# auto sends the bytes of the chosen exchange; a library chooses its own.
EVALUATED = [s for s in ALL_STRATEGIES if s not in (*LIBRARIES, *cases.BY_THE_CLOCK)]


@pytest.mark.parametrize("strategy", EVALUATED)
def test_bytes_of_the_reference_are_those_of_the_card(strategy: str) -> None:
    config = load([f"strategy={strategy}"])
    exchange, pattern = config.exchange, pattern_of(config)
    every = steps_of_a_round(strategy)
    for local, nodes in ((1, 2), (1, 3), (1, 4), (1, 8), (2, 2), (4, 2), (2, 3)):
        size = local * nodes
        names = {"n": ROWS * COLUMNS, "rows": ROWS, "columns": COLUMNS, "H": every}
        names |= {"N": size, "L": local, "M": nodes}
        network = Network(replace(LINKS, ranks_per_node=local, intra=LINKS.inter), size)
        expected = payload_bytes([(ROWS, COLUMNS)], exchange, network)
        expected *= pattern.num_exchanges / pattern.every
        assert value_of(formula_of(strategy), **names) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("exchange", CODECS)
def test_bytes_of_the_design_are_those_of_the_card(exchange: str) -> None:
    settings = exchange_settings(exchange)
    n = ROWS * COLUMNS
    known = {"n": n, "a": ROWS, "b": COLUMNS, "r": settings.get("rank", 0)}
    for size in (2, 4):
        names = known | {"N": size, "k": math.ceil(settings.get("ratio", 0) * n)}
        expected = payload_bytes([(ROWS, COLUMNS)], settings, Network(LINKS, size))
        assert value_of(CODECS[exchange], **names) == pytest.approx(expected, rel=0.01)


def test_the_design_has_the_codecs() -> None:
    assert {"fp16", "int8", "int4", "signsgd_ef", "topk", "randomk", "powersgd"} == set(CODECS)


SENDING = [strategy for strategy in ALL_STRATEGIES if strategy not in LIBRARIES]


@pytest.mark.parametrize("strategy", some_of(SENDING, every=4))
def test_an_exchange_says_whether_it_sends_from_rank_to_rank(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = cases.OVER_TIME.get(strategy, ())
    node = load([f"strategy={strategy}", *(f"exchange.{each}" for each in more)]).exchange
    begin, used = ThreadComm._isend_irecv, set()

    def isend_irecv(comm: ThreadComm, sends: Any, receives: Any) -> Handle:
        used.add(comm.rank)
        return begin(comm, sends, receives)

    def rank_main(comm: Comm) -> bool:
        exchange = build(node)
        for step in range(3):  # `auto` takes turns from the second one on
            bucket = GradBucket({"w": torch.Size((8, 100))}, torch.randn(800), step)
            exchange.average(bucket, comm)
        return exchange.needs_send_recv

    monkeypatch.setattr(ThreadComm, "_isend_irecv", isend_irecv)
    needs, *_ = run_ranks(3, rank_main)
    assert used == ({0, 1, 2} if needs else set())


def test_the_guides_exchange_is_a_mean_and_sends_what_its_preset_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = (ROOT / "docs/how-to/add_an_exchange.md").read_text()
    blocks = re.findall(r"^```\w+\n# (\S+?)\n(.*?)^```$", page, re.M | re.S)
    (_, code), (_, exchange), (path, strategy) = blocks
    module = ModuleType("lab.exchange.gossip")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(code, module.__dict__)
    settings: Any = OmegaConf.create(exchange)

    def rank_main(comm: Comm) -> int:
        flat = torch.full((6,), float(comm.rank))
        build(settings).average(GradBucket({"w": flat.shape}, flat), comm)
        assert flat.eq(1).all()
        return comm.traffic.payload_bytes

    preset = yaml.safe_load(strategy)
    assert (Path(path).stem, preset["strategy"]) == ("gossip", "gossip")
    assert {"/exchange": "gossip"} in preset["defaults"]
    _, formula = strategy_table.about_of(strategy, path)
    assert run_ranks(3, rank_main) == [value_of(formula, n=6, N=3)] * 3

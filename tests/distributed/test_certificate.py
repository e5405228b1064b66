"""check="first" among processes: in loops of one's own and in the trainer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lab.record.run_directory import RunDirectory
from lab.record.schema import read_record
from tests.distributed.misused import MISTAKES, lines_of_clean_loops, lines_of_mistakes
from tests.support.hosts import enter_network, has_own_network, own_network
from tests.support.ranks import CREW, Crew, Outcome, composed, execute, spawn


# Exceptions leave backward, after which these ranks do nothing else.
def test_each_mistake_in_a_loop_is_named_on_every_rank() -> None:
    first, *others = spawn(4, lines_of_mistakes)
    assert all(other == first for other in others)
    wrong = {
        name: first[name]
        for name, (fault, _) in MISTAKES.items()
        if not first[name].removeprefix("certificate: ").startswith(fault)
    }
    assert wrong == {}


def test_right_loops_have_a_certificate_and_a_file(tmp_path: Path) -> None:
    first, *_ = CREW.call(3, lines_of_clean_loops, tmp_path)
    assert len(first) == 8
    for name, line in first.items():
        proven = "gradients averaged once over 3 of 3 ranks, for 6 of 6 parameters"
        assert line.startswith(f"certificate: weights equal on 3 ranks; {proven}"), name
        assert json.loads((tmp_path / f"{name}.json").read_text())["line"] == line


@pytest.mark.parametrize("strategy", ["ddp", "onebit"])
def test_a_run_records_its_certificate(strategy: str) -> None:
    settings = (f"strategy={strategy}", "steps=4", "batch_size=32", "accumulate=2", "cell=a")
    first, second = CREW.call(2, execute, *composed(*settings, "check=first"))
    assert first.code == 0
    found = first.record["certificate"]
    assert found == second.record["certificate"]
    assert (found["holds"], found["proven"], found["num_exchanges"]) == (True, 8, 3)
    directory = RunDirectory(Path("runs/default/a"))
    recorded = read_record(directory.record_path).certificate
    assert recorded and recorded.line == found["line"]
    assert json.loads((directory.path / "certificate.json").read_text()) == found


def test_a_run_with_a_fault_fails_and_its_record_says_why() -> None:
    fault = "exchange=tests.support.misaveraged.Summed"
    settings = ("strategy=overlap", fault, "steps=4", "check=first", "cell=bad")
    with pytest.raises(AssertionError, match="ended without an answer"):
        spawn(2, execute, *composed(*settings))
    record = read_record(Path("runs/default/bad/record.json"))
    line = "certificate: summed, not averaged: ranks 0, 1 hold 2x the mean in"
    assert record.status == "failed"
    assert f"CertificateError: {line}" in str(record.error)
    assert record.certificate and record.certificate.line.startswith(line)
    assert not record.certificate.holds


def on_network(network: int, *arguments: Any) -> Outcome:
    enter_network(network)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # the test's store is outside
    return execute(*arguments)


@pytest.mark.skipif(not has_own_network(), reason="needs root and iproute2")
def test_an_interface_that_nobody_else_uses_confirms_the_factor() -> None:
    crew = Crew()
    try:
        with own_network() as network:
            settings = composed("strategy=onebit", "steps=4", "check=first")
            first, _ = crew.call(2, on_network, network, *settings)
    finally:
        crew.dismiss()
    found = first.record["certificate"]
    assert found["counted_factor"] == pytest.approx(found["factor"], rel=0.15)
    assert f"(counted on lo: {found['counted_factor']:.1f}x)" in found["line"]

"""Every path x codec x memory under every sync: trained with a certificate, or refused in a line.

The certificate of a run holds what was delivered and what is kept against true sums, and bytes
against the exchange's cost (lab.certificate). The combinations are those of conf/: no file is one.
"""

from __future__ import annotations

import itertools
import re

import pytest

from lab.settings.config import choices_of
from tests.support.ranks import told, train, train_on_two_nodes
from tests.support.slow import some_of

RUN = ("data.size=16", "batch_size=24", "optim.lr=0.01", "steps=4", "warmup_steps=1")
# Settings with which each sync is used as it is meant to be.
SYNCS = {
    "overlap": (),
    "onebit": ("overlap=false", "accumulate=2"),
    "priority": ("sync.trials=0", "sync.chunk_mb=0.05"),
    "cntk": ("sync.double_buffer=true",),
    "local_sgd": ("sync.every=2",),
    "diloco": ("sync.every=2",),
    "streaming_diloco": ("sync.every=4", "sync.delay=1"),
    "des_loc": ("sync.every=2", "sync.first_every=2", "sync.second_every=4"),
    "fsdp": ("sync.reduce_scatter=lab",),
    "zero1": (),
    "caffe": (),
}
# Syncs that take no messages: they sum values themselves, or average second moments.
REFUSED = {
    "caffe": "must send to the root and back",
    "des_loc": "is not exact, but second moments need an exact exchange",
}
# They scatter sums; fsdp has two levels of its own, sync.reduce_scatter=two_levels.
SCATTERING = ("fsdp", "zero1")
PATHS, CODECS, MEMORIES = (choices_of(group) for group in ("path", "codec", "memory"))
MATRIX = [*itertools.product(SYNCS, PATHS, CODECS, MEMORIES)]


def refusal_of(sync: str, path: str) -> str | None:
    if sync in SCATTERING and path == "hierarchical":
        return "has no reduce-scatter; allowed:"
    return REFUSED.get(sync)


def settings_of(sync: str, path: str, codec: str, memory: str) -> tuple[str, ...]:
    parts = (f"path={path}", f"codec={codec}", f"memory={memory}")
    return f"strategy={sync}", *parts, *SYNCS[sync], *RUN


TRAINED = [case for case in MATRIX if not refusal_of(*case[:2])]
SCATTERED = [path for path in PATHS if path != "hierarchical"]
# Both that scatter take each codec, by one path or another.
EACH_CODEC = [
    (sync, SCATTERED[number % len(SCATTERED)], codec, MEMORIES[number % len(MEMORIES)])
    for sync in SCATTERING
    for number, codec in enumerate(CODECS)
]


@pytest.mark.parametrize(
    ("sync", "path", "codec", "memory"), some_of(TRAINED, every=37, also=EACH_CODEC)
)
def test_trains_with_a_certificate(sync: str, path: str, codec: str, memory: str) -> None:
    run = train_on_two_nodes if path == "hierarchical" else train
    outcomes = run(3, *settings_of(sync, path, codec, memory))
    record = outcomes[0].record
    assert record["status"] == "done"
    assert record["certificate"]["holds"] or sync == "zero1"  # see test_zero1
    if sync != "fsdp":  # ranks have shards, whose sums the certificate compares
        assert len({outcome.record["replica_hash"] for outcome in outcomes}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("first", range(4))
def test_one_rank_trains_too(first: int) -> None:
    cases = TRAINED[first::4]
    lines = told(*(settings_of(*case) for case in cases))
    assert {case: line for case, line in zip(cases, lines, strict=True) if line} == {}


@pytest.mark.parametrize("every", some_of([13, 1], also=[13]))
def test_what_a_sync_does_not_take_is_refused_in_a_line(every: int) -> None:
    cases = [case for case in MATRIX if refusal_of(*case[:2])][::every]
    found = told(*(settings_of(*case) for case in cases))
    for case, line in zip(cases, found, strict=True):
        assert re.match(f"exchange=.*{refusal_of(*case[:2])}", line), case

"""Every path x codec x memory under every sync: trained with a certificate, or refused in a line.

The certificate of a run holds what was delivered and what is kept against true sums, and bytes
against the exchange's cost (lab.certificate). The combinations are those of conf/: no file is one.
"""

from __future__ import annotations

import itertools

import pytest

from lab.settings.config import choices_of
from tests.support.ranks import train, train_on_two_nodes
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
    "caffe": "allowed are",
    "des_loc": "is not exact; second moments need one that is",
}
# They scatter sums; fsdp has two levels of its own, sync.reduce_scatter=two_levels.
SCATTERING = {"fsdp", "zero1"}
PARTS = list(itertools.product(*(choices_of(group) for group in ("path", "codec", "memory"))))
MATRIX = [pytest.param(s, *p, id=" ".join((s, *p))) for s in SYNCS for p in PARTS]


@pytest.mark.parametrize("size", some_of([3, 1], also=[3]))
@pytest.mark.parametrize(("sync", "path", "codec", "memory"), some_of(MATRIX, every=13))
def test_trains_or_is_refused(sync: str, path: str, codec: str, memory: str, size: int) -> None:
    parts = (f"path={path}", f"codec={codec}", f"memory={memory}")
    settings = (f"strategy={sync}", *parts, *SYNCS[sync], *RUN)
    refused = REFUSED.get(sync)
    if sync in SCATTERING and path == "hierarchical":
        refused = "has no reduce-scatter; allowed are"
    if refused:
        with pytest.raises(AssertionError, match=f"ConfigError: exchange=.*{refused}"):
            train(size, *settings)
        return
    outcomes = (train_on_two_nodes if path == "hierarchical" else train)(size, *settings)
    record = outcomes[0].record
    assert record["status"] == "done"
    assert size == 1 or record["certificate"]["holds"] or sync == "zero1"  # see test_zero1
    if sync != "fsdp":  # ranks have shards, whose sums the certificate compares
        assert len({outcome.record["replica_hash"] for outcome in outcomes}) == 1

"""Every remedy for every shipped strategy is accepted as `lab.train` accepts settings, and trains.

The remedies come from records as runs leave them. The distinct combinations of a run and a remedy
then take two steps each on two ranks, all of them in one pair of processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf
from PIL import Image

from lab.analysis.results import load as load_results
from lab.diagnosis.evidence import Evidence, gather
from lab.diagnosis.rules import BY_VERDICT, Explanation, Loss, Remedy, remedies
from lab.distributed import world as worlds
from lab.settings.config import ConfigError, check_batch, choices_of, load
from lab.training import assemble
from lab.training.assemble import assembled
from tests.conftest import Finished
from tests.support.ranks import join, spawn
from tests.unit.diagnosis.test_explain import write

RANKS = 8
RUN = ("model=mlp", "model.hidden=[16]", "batch_size=24")
ALEXNET = ("model=alexnet_small", "data.size=32", "batch_size=24")
RUNS = [
    *((f"strategy={name}", *RUN) for name in choices_of("strategy") if "fc1x1" not in name),
    *((f"strategy={name}", *RUN, "precision=fp16") for name in ("allreduce", "overlap", "cntk")),
    *((f"strategy={name}", *ALEXNET) for name in ("ddp", "cntk", "fc1x1_onebit", "diloco")),
    ("strategy=cntk", "sync.double_buffer=true", *RUN),
    ("strategy=ddp", "sync.hook=noop", *RUN),
    ("strategy=overlap", "bucket_mb=0", "accumulate=3", *RUN),
    ("strategy=diloco", "sync.every=5", "scaling=weak", *RUN),
]
# A choice replaces earlier settings of its group; a strategy replaces these.
REPLACED = {"strategy": ("exchange", "sync", "overlap", "bucket_mb")}


# Syncs and exchanges ignore these: they are composed for all strategies, and train with two.
FOR_ANY_SYNC = {"batch_size", "compile", "data", "data.shape"}
TWO = {"strategy=overlap", "strategy=ddp"}


def evidence_of(study: Path, run: tuple[str, ...], payload_bytes: int) -> Evidence:
    """Make evidence of a run of 8 ranks with the settings that it would record."""
    config = load(list(run))
    transform = config.transform.get("_target_", "").rpartition(".")[2]
    folder = write(
        study,
        config.strategy,
        RANKS,
        0.5,
        settings=OmegaConf.to_container(config, resolve=True),
        model=next(x.partition("=")[2] for x in run if x.startswith("model=")),
        batch_size=config.batch_size,
        per_rank_batch_size=config.batch_size,
        scaling=config.scaling,
        transform=transform or None,
        payload_bytes_per_step=[payload_bytes] * RANKS,
    )
    results = load_results(study)
    cells = results.study.cells
    evidence = gather(results, next(cell for cell in cells if cell.folder == folder))
    return replace(evidence, exposed_s=0.2, ceiling_s=0.3, one_s=1.2)


def remedies_of(study: Path, run: tuple[str, ...]) -> set[Remedy]:
    """List remedies against every loss, for large and small payloads."""
    found = set()
    for number, payload_bytes in enumerate((10**9, 10**3)):
        evidence = evidence_of(study / str(number), run, payload_bytes)
        verdicts = [Explanation((Loss(*key, 0.2, "is lost"),), True) for key in BY_VERDICT]
        for verdict in [*verdicts, Explanation((), True)]:
            found |= {replace(remedy, why="", saves_s=0) for remedy in remedies(evidence, verdict)}
    return found


def switched(run: tuple[str, ...], remedy: Remedy) -> tuple[str, ...]:
    """Apply a remedy's settings to the run's, without those that it replaces."""
    switch = tuple(remedy.switch.split())
    keys = [setting.partition("=")[0] for setting in switch]
    gone = {group for key in keys for group in (key, *REPLACED.get(key, ()))}
    choices = {key for key in gone if key in ("data", "exchange", "sync", "strategy")}
    kept = [
        setting
        for setting in run
        if (key := setting.partition("=")[0]) not in gone and key.split(".")[0] not in choices
    ]
    return *kept, *switch


def different(results: dict[str, DictConfig]) -> dict[str, DictConfig]:
    """Leave one of those that differ only in the name of a strategy whose choices are replaced."""
    by_choices: dict[str, str] = {}
    for settings, config in sorted(results.items()):
        choices = str({key: config[key] for key in config if key != "strategy"})
        by_choices.setdefault(choices, settings)
    return {settings: results[settings] for settings in by_choices.values()}


def train(configs: dict[str, DictConfig]) -> list[str]:
    """Train one rank for two steps of each of `configs`; return refusals."""
    assemble.BACKEND = "eager"  # does not depend on a compiler
    world, refused = join(), []
    for settings, config in configs.items():
        try:
            with assembled(config, world) as part:
                assert list(islice(part.trainer.steps(), 3)) == [1, 2]
        except ConfigError as error:
            refused.append(f"{settings}: {error}")
    worlds.stop()
    return refused


@pytest.mark.slow
def test_every_remedy_is_accepted_and_trains(tmp_path: Path) -> None:
    results: dict[str, DictConfig] = {}
    for number, run in enumerate(RUNS):
        for remedy in remedies_of(tmp_path / str(number), run):
            settings = switched(run, remedy)
            check_batch(load(list(settings)), remedy.num_ranks or RANKS)
            changed = {setting.partition("=")[0] for setting in remedy.switch.split()}
            if not changed <= FOR_ANY_SYNC or run[0] in TWO:
                two_steps = (*settings, "device=cpu", "steps=2", "warmup_steps=0")
                results[" ".join(settings)] = load(two_steps)
    assert len(results) > 3 * len(choices_of("strategy"))
    # Horovod need not be installed: remedies that keep it change no setting that it checks.
    assert not any("strategy=horovod" in settings for settings in results)
    assert spawn(2, train, different(results)) == [[], []]


@pytest.mark.slow
def test_remedies_for_slow_input_train(command: Callable[..., Finished], tmp_path: Path) -> None:
    for name in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / name).mkdir(parents=True)
        for number in range(12):
            pixels = np.full((40, 40, 3), 10 * number, dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    data = ("data=imagefolder", f"data.path={tmp_path}", "data.size=32", "data.workers=1")
    run = ("strategy=allreduce", *RUN, *data)
    evidence = evidence_of(tmp_path / "runs", run, 10**6)
    verdict = Explanation((Loss("input", "input-bound", 0.2, "waits"),), True)
    found = {remedy.switch: switched(run, remedy) for remedy in remedies(evidence, verdict)}
    assert sorted(found) == ["data.workers=2", "data=synthetic data.shape=[3,32,32]"]
    for settings in found.values():
        done = command("lab.train", *settings, "steps=2", "device=cpu")
        assert done.code == 0, done.err


def switches(study: Path, run: tuple[str, ...]) -> set[str]:
    return {remedy.text for remedy in remedies_of(study, run)}


@pytest.mark.parametrize("strategy", ["local_sgd", "diloco", "cntk", "ddp", "horovod", "overlap"])
def test_overlap_is_not_advised_where_it_is_refused_or_there(tmp_path: Path, strategy: str) -> None:
    advised = switches(tmp_path, (f"strategy={strategy}", *RUN))
    assert not any(switch.startswith("overlap=") for switch in advised)


@pytest.mark.parametrize(
    ("run", "advised", "not_advised"),
    [
        ("strategy=caffe", "overlap=true bucket_mb=25", "exchange=allreduce"),
        ("strategy=torch7", "strategy=allreduce", "exchange=allreduce"),
        ("strategy=torch7", "exchange=tree", "sync.every=2"),
        ("strategy=caffe", "strategy=local_sgd", "exchange=tree"),  # it has one
        ("strategy=diloco", "sync.every=20", "strategy=local_sgd"),
        ("strategy=allreduce precision=fp16", "strategy=onebit", "strategy=local_sgd"),
        ("strategy=onebit", "strategy=auto", "strategy=onebit"),
        ("strategy=none", "batch_size=48", "strategy=local_sgd"),
        ("strategy=ddp", "strategy=onebit", "exchange=tree"),
        ("strategy=overlap comm=horovod", "exchange=allreduce", "exchange=tree"),
        ("strategy=allreduce", "16 ranks with batch_size=32", "16 ranks"),
        ("strategy=allreduce", "4 ranks", "8 ranks"),
    ],
)
def test_what_is_advised(tmp_path: Path, run: str, advised: str, not_advised: str) -> None:
    texts = switches(tmp_path, (*run.split(), *RUN))
    assert advised in texts
    assert not_advised not in texts

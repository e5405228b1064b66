"""`import lab`: its names, its version, and the settings that it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import lab
from lab import __main__ as lister
from lab.loop.setup import compose
from lab.settings.config import ConfigError, choices_of, load
from lab.sync.pattern import class_of
from tests.conftest import ROOT
from tests.support.commands import refusal, said
from tests.support.slow import some_of

COMMANDS = [path.stem for path in (ROOT / "lab").glob("*.py") if path.stem[0] != "_"]


def test_names_are_there_but_imported_when_used() -> None:
    check = (
        "import sys, lab; heavy = {'torch', 'hydra', 'numpy'} & set(sys.modules); "
        "assert not heavy, heavy; import lab.sync.pattern; assert 'torch' not in sys.modules; "
        "assert all(callable(getattr(lab, n)) for n in lab.__all__ if n != '__version__'); "
        "assert {*lab.__all__} <= {*dir(lab)}"
    )
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_the_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert lab.__version__ == project["version"]
    with pytest.raises(AttributeError, match="no attribute 'torch_comm'"):
        lab.__getattr__("torch_comm")


def test_commands_are_listed_each_in_a_line() -> None:
    listed = re.findall(r"^  lab\.(\w+) +(\S.*)\.$", said(lister.main), re.MULTILINE)
    assert [name for name, _ in listed] == sorted([*COMMANDS, "cluster", "gpu_report"])
    assert max(len(sentence) for _, sentence in listed) < 140
    assert "trian: no such command; allowed: advise, bench" in refusal(lister.main, "trian")


@pytest.mark.parametrize("strategy", some_of(choices_of("strategy"), every=6))
def test_every_strategy_that_only_averages_gradients_works_and_no_other(strategy: str) -> None:
    config = load([f"strategy={strategy}"])
    averages = class_of(config) == "GradSync" and "_target_" not in config.transform
    if averages:
        assert compose(strategy, {}).exchange == config.exchange
        return
    with pytest.raises(ConfigError, match=rf"strategy={strategy}: .*; in your own loop, use any"):
        compose(strategy, {})


def test_a_users_exchange_may_have_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quiet.py").write_text(
        "from lab.exchange.allreduce import AllReduce\n\nclass NoExchange(AllReduce):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert compose("quiet.NoExchange", {}).exchange._target_ == "quiet.NoExchange"


@pytest.mark.parametrize(
    ("strategy", "overrides", "line"),
    [
        ("twobit", {}, "strategy=twobit: there is no such strategy or exchange; in your own loop"),
        ("overlap", {"exchange": "none"}, "strategy=overlap: exchanges nothing; in your own"),
        ("ddp", {}, "strategy=ddp: has a sync of its own (DDPSync), which only lab.train runs; in"),
        (
            "onebit",
            {"optim.lr": 1},
            "optim.lr=1: not allowed in your own loop; allowed: exchange, path, codec, memory, e",
        ),
        ("onebit", {"exchange.levels": 3}, "exchange.levels=3: no such setting"),
    ],
)
def test_a_wrong_setting_is_one_line(
    strategy: str, overrides: dict[str, object], line: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(line)) as caught:
        compose(strategy, overrides)
    assert "\n" not in str(caught.value)


def test_overrides_are_python_values() -> None:
    given = {"exchange.threshold": "mean", "exchange.error_feedback": False, "bucket_mb": None}
    config = compose("onebit", given, own=("bucket_mb",))
    assert (config.exchange.threshold, config.exchange.error_feedback) == ("mean", False)
    assert config.bucket_mb is None
    assert compose("tree", {"exchange.chunk_mb": 2.5}).exchange.chunk_mb == 2.5
    parts = compose("overlap", {"path": "all_gather", "codec": "int4", "codec.block_size": 64})
    assert parts.exchange.codec.block_size == 64


def test_a_hydra_application_may_use_it() -> None:
    """Composing leaves the application's own Hydra as it was."""
    program = (
        "import hydra\n"
        "from hydra.core.global_hydra import GlobalHydra\n"
        "from lab.loop.setup import compose\n"
        "@hydra.main(version_base='1.3', config_path=None)\n"
        "def main(config):\n"
        "    before = GlobalHydra.instance().hydra\n"
        "    assert compose('int8', {}).strategy == 'int8' and before is not None\n"
        "    assert GlobalHydra.instance().hydra is before\n"
        "main()\n"
    )
    run = [sys.executable, "-c", program, "hydra.run.dir=.", "hydra.output_subdir=null"]
    assert subprocess.run([*run, "hydra/job_logging=none"]).returncode == 0


def test_what_is_no_ddp_is_told_what_to_use() -> None:
    with pytest.raises(ConfigError, match=r"Linear: must be a Distr.*use lab\.grad_sync"):
        lab.attach(nn.Linear(2, 2), "onebit")
    module = nn.Linear(2, 2)
    module.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})  # as fully_shard does
    with pytest.raises(ConfigError, match=r"FSDP has .* use lab\.fsdp_reduce_scatter"):
        lab.attach(module, "onebit")


def test_a_model_in_another_dtype_is_refused_before_ranks_meet() -> None:
    with pytest.raises(ConfigError, match=r"weight: is float64; exchange=OneBit accepts float32"):
        lab.grad_sync(nn.Linear(2, 2, dtype=torch.float64))

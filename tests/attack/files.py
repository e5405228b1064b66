"""One file of every kind that the lab reads."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd

from lab.settings.files import conf_dir
from tests.attack.acts import save_checkpoint
from tests.conftest import ROOT
from tests.support.records import leave, make_record
from tests.support.studies import write_curve, write_timeline

STUDY, CELL = "runs/made", "overlap-n2-0"


def make_files(folder: Path) -> None:
    """Leave a small study and files of all other kinds in a folder."""
    for strategy in ("none", "allreduce", "overlap"):
        for size in (1, 2):
            for repeat in range(2):
                name = f"{strategy}-n{size}-{repeat}"
                seconds = 0.1 / size + 0.001 * repeat
                record = make_record(
                    strategy, size, seconds, study="made", cell=name, repeat=repeat
                )
                leave(folder / STUDY / name, record)
    cell = folder / STUDY / CELL
    write_timeline(cell, 2)
    write_curve(cell, 2)
    (cell / "config.yaml").write_text(
        "strategy: overlap\nmodel:\n  hidden: [8]\noptim:\n  lr: 0.1\n"
    )
    starts = [{"started_at": f"2026-11-01T1{n}:00:00+00:00", "world_size": 2} for n in range(3)]
    (cell / "attempts.json").write_text(json.dumps(starts))
    save_checkpoint(cell / "checkpoints")
    grid = {"when": "2026-11-01T10:00:00+00:00", "arguments": ["study=made", "strategy=none,tree"]}
    (folder / STUDY / "study.json").write_text(json.dumps({"grids": [grid]}))
    for group, name in (("profile", "lenet_p100"), ("hardware", "eth10g")):
        source = next((conf_dir() / group).glob(f"{name}*"), None) or next(
            (conf_dir() / group).iterdir()
        )
        shutil.copy(source, folder / f"{group}.yaml")
    (folder / "mine/strategy").mkdir(parents=True)
    shutil.copy(conf_dir() / "strategy/onebit.yaml", folder / "mine/strategy/my.yaml")
    shutil.copy(ROOT / "docs/results/layers/layers_alexnet.json", folder / "layers.json")
    shutil.copy(conf_dir() / "claims/onebit_adam.yaml", folder / "claims.yaml")
    _write_traces(folder)
    values = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    np.savez(folder / "arrays.npz", inputs=values, targets=values[:, :1])
    pd.DataFrame(values, columns=["a", "b", "targets"]).to_parquet(folder / "table.parquet")


def _write_traces(folder: Path) -> None:
    kernel = {"ph": "X", "cat": "cuda_profiler_range", "name": "gemm", "ts": 1.0, "dur": 2.0}
    events = [{**kernel, "args": {"sm__inst.sum": 10 * n, "dram__bytes.sum": n}} for n in range(20)]
    text = json.dumps({"traceEvents": events})
    (folder / "trace.json").write_text(text)
    (folder / "trace.json.gz").write_bytes(gzip.compress(text.encode()))

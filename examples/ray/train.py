"""Train with the lab in Ray Train's workers, on the machines of a Ray cluster.

    python examples/ray/train.py 2 strategy=onebit model=alexnet_small

The first argument is the number of workers, with one rank each. The others are settings of
lab.train. With device=cuda, each worker requests a GPU. Rank 0 writes the run directory, so
runs_dir must be on a file system that all machines share. If a worker is lost, Ray restarts all
workers, up to MOST_FAILURES times. They continue from the newest checkpoint, so set
checkpoint_every.
"""

import os
import sys
import uuid
from pathlib import Path
from typing import Any

from ray import train
from ray.train.torch import TorchTrainer

MOST_FAILURES = 2


def worker(config: dict[str, Any]) -> None:
    """Train as one rank. Ray calls this in a thread, after it has set RANK and others."""
    from lab.train import main

    os.chdir(config["folder"])  # for paths in settings
    os.environ["LAB_JOB"] = config["job"]  # lets a restart find its run
    if code := main(config["settings"]):
        raise RuntimeError(f"lab.train ended with exit code {code}")


def fit(num_workers: int, settings: list[str]) -> None:
    """Train on `num_workers` ranks; raises ray.train.TrainingFailedError if they fail."""
    job = f"ray-{uuid.uuid4().hex[:12]}"
    use_gpu = "device=cuda" in settings
    TorchTrainer(
        worker,
        train_loop_config={"settings": settings, "folder": str(Path.cwd()), "job": job},
        scaling_config=train.ScalingConfig(num_workers=num_workers, use_gpu=use_gpu),
        run_config=train.RunConfig(
            name=job, failure_config=train.FailureConfig(max_failures=MOST_FAILURES)
        ),
    ).fit()


if __name__ == "__main__":
    if not "".join(sys.argv[1:2]).isdecimal():
        sys.exit(__doc__)
    fit(int(sys.argv[1]), sys.argv[2:])

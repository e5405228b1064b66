"""One rank of one run: `torchrun -m lab.train strategy=onebit`, or `python -m lab.train ...`.

With cluster=emulated it is what starts the ranks, each of them again this command.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from omegaconf import DictConfig

from lab.cluster import sandbox
from lab.cluster.settings import cluster_of
from lab.distributed.launcher import is_first_rank, was_launched, world_size
from lab.settings.command_line import answer_help, report_error
from lab.settings.config import ConfigError, check_batch, load

EXAMPLES = (
    "torchrun --nproc-per-node 2 -m lab.train strategy=onebit",
    "torchrun --nproc-per-node 4 -m lab.train strategy=tree overlap=true bucket_mb=4 model=mlp",
    "python -m lab.train strategy=tree cluster=emulated cluster.hosts=4 cluster.rate=1gbit",
    "python -m lab.train model=alexnet_small batch_size=256 optim.lr=0.02 eval_every=50",
)


def main(arguments: list[str]) -> int:
    """Run one rank.

    Returns:
        The process's exit code: 0 done, 1 failed, 2 a wrong setting, 75 stopped by a signal after
        it had made steps.
    """
    if answer_help("lab.train", "Train on 1 to N ranks and record it.", EXAMPLES, arguments):
        return 0
    for number in (signal.SIGTERM, signal.SIGUSR1):  # until the run's watch takes them
        signal.signal(number, _stopped_early)
    try:
        config = load(arguments)
        cluster = cluster_of(config, world_size() if was_launched() else None)
        check_batch(config, cluster.num_ranks if cluster else world_size())
        if cluster and not was_launched():
            return sandbox.run(cluster, ["run", "-m", "lab.train", *arguments])
        return _run(config, arguments)
    except ConfigError as error:
        if is_first_rank():
            report_error("lab.train", error)
        else:
            time.sleep(1)  # a launcher ends all ranks with the first: let rank 0 say why
        return 2
    except KeyboardInterrupt:
        return 130


def _stopped_early(number: int, _frame: object) -> None:
    line = f"lab.train: error: stopped by {signal.Signals(number).name} before the run had begun"
    if is_first_rank():
        os.write(sys.stderr.fileno(), line.encode() + b"\n")
    os._exit(1)  # and not 75: a job whose time ends here would be requeued for ever


def _run(config: DictConfig, arguments: list[str]) -> int:
    # Only now is torch imported: help and wrong settings have been answered without it.
    from lab.distributed import world
    from lab.training.assemble import join
    from lab.training.run import Run, claim_directory

    ranks = join(config)
    try:
        directory = claim_directory(config, arguments, ranks)
        return Run(config, arguments, ranks, directory).execute() if directory else 0
    finally:
        world.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""One rank of one run: `torchrun -m lab.train strategy=onebit`; with cluster=emulated, all."""

from __future__ import annotations

from lab.cluster import sandbox
from lab.cluster.settings import adopt_ranks, cluster_of, num_launched, straggler_of
from lab.distributed import launcher
from lab.settings.command import Command, CommandLine, answers, show
from lab.settings.config import ConfigError, check_batch, load
from lab.settings.errors import SharedError
from lab.settings.streams import output_as_messages
from lab.study.grid import refuse_bare_study
from lab.study.run import sweep

COMMAND = Command(
    "lab.train",
    "Train on one or more ranks, and record the run.",
    (
        "torchrun --nproc-per-node 2 -m lab.train strategy=onebit",
        "torchrun --nproc-per-node 4 -m lab.train strategy=tree overlap=true bucket_mb=4 model=mlp",
        "python -m lab.train strategy=tree cluster=emulated cluster.hosts=4 cluster.rate=1gbit",
        "python -m lab.train model=alexnet_small batch_size=256 optim.lr=0.02 eval_every=50",
        "python -m lab.train --config-dir conf strategy=mine --cfg job",
    ),
    runs=True,
    sweeps=True,
    stopped="",  # each rank would print it
)


def _refuse(error: ConfigError) -> int | None:
    if isinstance(error, SharedError):
        return None if launcher.reports_for_host() else 2
    return launcher.let_first_rank_report()


@answers(COMMAND, _refuse)
def main(line: CommandLine) -> int:
    """Run one rank, or with `--multirun` a grid, as lab.sweep does.

    Returns:
        The exit code: 0 done, 1 failed, 2 a wrong setting, 75 stopped by a signal after steps.
    """
    # torch is imported only where it is needed: wrong settings are answered without it.
    adopt_ranks()
    if "--multirun" in line.flags:
        if launcher.was_launched():
            raise ConfigError("--multirun: starts its own ranks; leave the launcher out")
        from lab.web.live import served

        return sweep(line, served)
    refuse_bare_study(line.settings)
    launcher.end_on_signals(COMMAND.name)
    config = load(line.settings)
    cluster = cluster_of(config, num_launched() if launcher.was_launched() else None)
    check_batch(config, num_ranks := cluster.num_ranks if cluster else num_launched())
    straggler_of(config, num_ranks)
    if line.shows_settings:
        from lab.training.assemble import check

        check(config)
        return show([config] if launcher.is_first_rank() else [], line.flags)
    if cluster and not launcher.was_launched():
        return sandbox.run(cluster, ["run", "-m", "lab.train", *line.settings])
    from lab.training.run import start

    with output_as_messages():
        return start(config, line.settings)


if __name__ == "__main__":
    launcher.run_as_process(main)

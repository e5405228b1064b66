"""Emulated clusters: `python -m lab.cluster run hosts=4 -- -m lab.train strategy=tree`."""

from __future__ import annotations

import sys

from lab.cluster import sandbox
from lab.cluster.settings import Cluster, cluster_of
from lab.settings.command import Command, CommandLine, answer, report_error
from lab.settings.config import load
from lab.settings.errors import ConfigError
from lab.settings.files import conf_dir

COMMAND = Command(
    "lab.cluster",
    """\
Emulate several hosts on this machine. Each host is a network namespace with a link of its own. run
starts torchrun on each host, with the arguments after --. check measures the links. No processes or
network interfaces remain when the command ends.

Settings and their defaults:
"""
    + "\n".join(
        (conf_dir() / "cluster" / "emulated.yaml").read_text(encoding="utf-8").splitlines()[2:]
    ),
    (
        "python -m lab.cluster run hosts=4 rate=1gbit -- -m lab.train strategy=tree",
        "python -m lab.cluster run hosts=2 'rates=[1gbit,100mbit]' -- -m lab.train strategy=ring",
        "python -m lab.cluster check hosts=4 rate=100mbit",
    ),
    word="run|check",
    stopped="",
)


def main(arguments: list[str]) -> int:
    """Run one subcommand.

    Returns:
        The exit code of h0's torchrun; for check, 1 if a link is off; 2 for a wrong setting.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    rest = arguments[end + 1 :]
    return answer(COMMAND, arguments[:end], lambda line: sandbox.run(*task_of(line, rest)), _refuse)


def _refuse(error: ConfigError) -> int:
    report_error(COMMAND.name, ConfigError(str(error).replace("cluster.", "")))
    return 2


def task_of(line: CommandLine, rest: list[str]) -> tuple[Cluster, list[str]]:
    """Parse a command line into a cluster and the task to run on it; `rest` is torchrun's."""
    if line.word not in ("run", "check"):
        raise ConfigError(f"{line.word}: the first word must be run or check")
    if bool(rest) != (line.word == "run"):
        raise ConfigError(
            "run needs torchrun's arguments after --, as in -- -m lab.train; check takes none"
        )
    config = load(["cluster=emulated", *(f"cluster.{setting}" for setting in line.settings)])
    cluster = cluster_of(config)
    assert cluster
    return cluster, [line.word, *rest]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

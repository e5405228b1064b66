"""Emulated clusters: `python -m lab.cluster run hosts=4 -- -m lab.train strategy=tree`."""

from __future__ import annotations

import sys

from lab.cluster import sandbox
from lab.cluster.settings import Cluster, cluster_of
from lab.settings.command_line import report_error
from lab.settings.config import ConfigError, conf_dir, load

USAGE = """\
usage: python -m lab.cluster run [setting=value ...] -- TORCHRUN-ARGUMENTS
       python -m lab.cluster check [setting=value ...]

Hosts on this machine, each a network namespace behind a link of its own. run starts a torchrun on
each; check measures the links. Nothing is left behind, however it ends.

settings:
{}
examples:
  python -m lab.cluster run hosts=4 rate=1gbit -- -m lab.train strategy=tree
  python -m lab.cluster run hosts=2 'rates=[1gbit,100mbit]' -- -m lab.train strategy=ring
  python -m lab.cluster check hosts=4 rate=100mbit"""


def main(arguments: list[str]) -> int:
    """Run one subcommand.

    Returns:
        The exit code of h0's torchrun; for check, 1 if a link is off; 2 for a wrong setting.
    """
    if {"-h", "--help"} & set(arguments[: _end(arguments)]):
        settings = (conf_dir() / "cluster" / "emulated.yaml").read_text().splitlines()[2:]
        print(USAGE.format("".join(f"  {line}\n" for line in settings)))
        return 0
    try:
        return sandbox.run(*_read(arguments))
    except ConfigError as error:
        report_error("lab.cluster", ConfigError(str(error).replace("cluster.", "")))
        return 2


def _read(arguments: list[str]) -> tuple[Cluster, list[str]]:
    """Parse a command line into a cluster and the task to run on it."""
    task, *settings = arguments[: _end(arguments)] or [""]
    rest = arguments[_end(arguments) + 1 :]
    if task not in ("run", "check"):
        raise ConfigError(f"{task or '(nothing)'}: the first word must be run or check")
    if bool(rest) != (task == "run"):
        raise ConfigError("after -- stand torchrun's arguments for run, as in -- -m lab.train")
    config = load(["cluster=emulated", *(f"cluster.{setting}" for setting in settings)])
    cluster = cluster_of(config)
    assert cluster
    return cluster, [task, *rest]


def _end(arguments: list[str]) -> int:
    return arguments.index("--") if "--" in arguments else len(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

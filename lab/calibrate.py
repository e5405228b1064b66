"""Measure this cluster and write its hardware file: `torchrun ... -m lab.calibrate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lab.benchmarks.request import measure, read
from lab.distributed.launcher import let_first_rank_report, run_as_process
from lab.settings.command import Command, CommandLine, answers, show
from lab.settings.fields import file_setting, parsed, setting, split


@dataclass(frozen=True)
class CalibrateSettings:
    """The settings of lab.calibrate beside a run's."""

    out: Path | None = file_setting(
        "FILE.yaml for the hardware; FILE.json, FILE.md and FILE.png go into the same folder",
        ".yaml",
    )
    minutes: float = setting(5.0, "approximate total time", above=0, at_most=600, unit="min")
    world_size: int | None = setting(None, "ranks to start without a launcher; null: 2")


COMMAND = Command(
    "lab.calibrate",
    """\
Measure links, host time, codecs and compute of this cluster, and write a hardware file with
intervals. lab.predict and lab.advise read it. The fit uses two ranks. Measurements on more
ranks are held out, and show how well times on more ranks are predicted. For each exchange in
exchange=A,B, the command measures its codec and checks the predicted times of its steps.""",
    (
        "torchrun --nproc-per-node 8 -m lab.calibrate out=mycluster.yaml",
        "srun python -m lab.calibrate exchange=allreduce,onebit minutes=3 out=mycluster.yaml",
        "python -m lab.calibrate world_size=4 cluster=emulated cluster.rate=1gbit out=gbit.yaml",
        "python -m lab.predict hardware=./mycluster.yaml world_size=16,64 strategy=overlap",
    ),
    CalibrateSettings,
    runs=True,
)


@answers(COMMAND, let_first_rank_report)
def main(line: CommandLine) -> int:
    """Measure, print a table, and write the files of `out=`.

    Returns:
        0; 1 if a rank failed; 2 for a wrong setting; 130 after Ctrl-C.
    """
    texts, words = split(line.settings, ("out",))
    out = parsed(CalibrateSettings, texts).out
    request = read(["calibrate", *words])
    if line.shows_settings:
        return show((variant.config for variant in request.variants), line.flags)
    result = measure(request)
    if result is not None:
        from lab.benchmarks.calibrate import present  # imports Altair

        present({"bench": request.bench, "command": line.text, **result}, out)
    return 0


if __name__ == "__main__":
    run_as_process(main)

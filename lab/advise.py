"""Advise on how to train: `python -m lab.advise model=... hardware=... target=throughput`."""

from __future__ import annotations

import sys

from lab.advice.request import OF_PREDICTION, AdviseSettings, read
from lab.settings.command import Command, CommandLine, answers, show
from lab.study.grid import WORLD_SIZE

COMMAND = Command(
    "lab.advise",
    """\
Rank options for training (strategy, number of ranks, batch size) by their predicted performance.
Exact and lossy strategies are ranked separately. The settings are those of lab.predict. If you do
not set strategy=, world_size= or batch_size=, the command tries a grid: all strategies that have a
cost model and work with the other settings, and numbers of ranks up to the hardware's size.""",
    (
        "python -m lab.advise profile=resnet50_p100 hardware=eth25g",
        "python -m lab.advise hardware=titanx_x4 batch_size=256 target=hours samples=1281167 "
        "epochs=90",
        "python -m lab.advise hardware=h200_nvlink_400g 'target=efficiency>=0.8' batch_size=4096",
        "python -m lab.advise hardware=eth10g target=cost price_per_hour=12 price_of=node",
        "python -m lab.advise study=links fit=runs/links hardware=emulated_1gbit world_size=4",
    ),
    AdviseSettings,
    runs=True,
    grid=(*OF_PREDICTION.values(), WORLD_SIZE),
)


@answers(COMMAND)
def main(line: CommandLine) -> int:
    """Print the advice; write it to `out=`. The exit code is 2 for bad input."""
    advice = read(line.settings)
    if line.shows_settings:
        return show((cell.config for cell in advice.prediction.cells), line.flags)
    # Imported here: a wrong setting is answered before numpy, pandas and Altair load.
    from lab.advice import view
    from lab.advice.advise import advised
    from lab.simulate.view import write

    result = {"command": line.text, **advised(advice)}
    print(view.text(result))
    if out := advice.prediction.own.out:
        figure = view.chart(result) if result["rows"] else None
        print(f"wrote {', '.join(map(str, write(out, result, figure)))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

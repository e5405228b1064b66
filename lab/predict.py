"""Predict step times on other hardware: `python -m lab.predict strategy=tree,overlap`."""

from __future__ import annotations

import sys

from lab.settings.command import Command, CommandLine, answers, show
from lab.simulate.predict import PredictSettings, predicted, read
from lab.study.grid import WORLD_SIZE

COMMAND = Command(
    "lab.predict",
    """\
Predict step times for a grid of settings. Any setting of lab.train accepts a list. profile=...
names a file of measured layer times, and profile.from=trace.json.gz takes the times from a
torch.profiler trace of several GPUs. Without a profile, the times of model=... are estimated from
its operation counts and the hardware's device. Without a profile or a model, profile=alexnet_titanx
is used. hardware.KEY=... and profile.KEY=... change individual values.""",
    (
        "python -m lab.predict strategy=none,tree,overlap,onebit world_size=1,2,4 "
        "batch_size=128,256",
        "python -m lab.predict model=alexnet data=synthetic 'data.shape=[3,224,224]' "
        "hardware=dgx1_p100 world_size=1,8",
        "python -m lab.predict hardware=h200_nvlink_400g scaling=weak world_size=8,64,512,4096",
        "python -m lab.predict strategy=allreduce,onebit world_size=2,4 hardware=eth10g "
        "hardware.inter.bandwidth_bytes_per_s=1e9 out=slow.json",
        "python -m lab.predict study=kim2017 hardware=emulated_1gbit fit=runs/kim2017",
        "python -m lab.predict strategy=overlap world_size=4 batch_size=512 trace=step.json",
    ),
    PredictSettings,
    runs=True,
    grid=(WORLD_SIZE,),
)


@answers(COMMAND)
def main(line: CommandLine) -> int:
    """Print the table of predictions; write them to `out=`. The exit code is 2 for bad input."""
    request = read(line.settings)
    if line.shows_settings:
        return show((cell.config for cell in request.cells), line.flags)
    # Imported here: a wrong setting is answered before pandas and Altair load.
    from lab.simulate import view

    result, spans = predicted(request)
    result = {"command": line.text, **result}
    print(view.table(result))
    own = request.own
    written = view.write(own.out, result, view.chart(result)) if own.out else []
    written += view.write_timeline(own.trace, result, spans) if own.trace else []
    if written:
        print(f"wrote {', '.join(map(str, written))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

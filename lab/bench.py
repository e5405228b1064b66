"""Benchmarks: `python -m lab.bench step strategy=overlap,ddp`."""

from __future__ import annotations

from lab.benchmarks.catalogue import BENCHES
from lab.benchmarks.request import REFUSED, BenchSettings, hand_over, measure, read, was_asked
from lab.distributed.launcher import let_first_rank_report, run_as_process
from lab.settings.command import Command, CommandLine, answers, show
from lab.settings.errors import ConfigError, Failed

COMMAND = Command(
    "lab.bench",
    "Compare exchanges, codecs, steps, memory or layers on this machine, with intervals.\n"
    + "\n".join(f"{name}: {bench.text}." for name, bench in BENCHES.items())
    + """

A benchmark compares the listed values of one setting, or sets of settings: a='...' b='...'.""",
    (
        "python -m lab.bench collective 'sizes=[4KiB,1MiB,64MiB]' exchange=ring,tree world_size=4",
        "python -m lab.bench codec num_values=25_000_000 threads=2 out=codec.json",
        "python -m lab.bench step strategy=none,onebit,ddp model=mlp 'model.hidden=[4096]' steps=9",
        "python -m lab.bench hook model=mlp 'model.hidden=[1024]' steps=60 out=hook.json",
        "python -m lab.bench convolution model=lenet batch_size=16 threads=1 out=convolution.json",
        "python -m lab.bench footprint model=lenet optim=sgd,adamw memory_gb=12",
        "torchrun --nproc-per-node 2 -m lab.bench step strategy=onebit,bf16 model=alexnet_small",
    ),
    BenchSettings,
    word="|".join(BENCHES),
    runs=True,
)


def _refuse(error: ConfigError) -> int | None:
    return hand_over({REFUSED: str(error)}) if was_asked() else let_first_rank_report()


@answers(COMMAND, _refuse)
def main(line: CommandLine) -> int:
    """Run one benchmark; print its table, and write the result and a figure to `out=FILE.json`.

    Returns:
        0; 1 if a rank failed, or the benchmarked operation gave wrong values; 2 for a wrong
        setting; 130 after Ctrl-C.
    """
    request = read([line.word, *line.settings])
    if line.shows_settings:
        return show((variant.config for variant in request.variants), line.flags)
    result = measure(request)
    if result is None:
        return 0
    if was_asked():
        return hand_over(result)
    from lab.benchmarks.present import present  # imports Altair

    if not present(request, result):
        raise Failed("the benchmark found wrong values; see #wrong above")
    return 0


if __name__ == "__main__":
    run_as_process(main)

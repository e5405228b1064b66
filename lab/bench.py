"""Paired benchmarks of strategies: `torchrun -m lab.bench step strategy=overlap,ddp`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lab.cli import answer_help, report_error
from lab.config import ConfigError, check_batch, load, parse_overrides
from lab.distributed.launcher import is_first_rank, world_size

PURPOSE = (
    "step: step times of two strategies, strategy=A,B, as the ratio A/B with its interval.\n"
    "recording: what the lab's own book-keeping adds to a step."
)
EXAMPLES = (
    "torchrun --nproc-per-node 2 -m lab.bench step strategy=overlap,ddp model=mlp "
    "'model.hidden=[4096,4096]' steps=60",
    "torchrun --nproc-per-node 2 -m lab.bench step strategy=onebit,bf16 model=alexnet_small",
    "python -m lab.bench recording steps=2000",
)
OWN = {"out": ("null", "a JSON file for the result")}


def main(arguments: list[str]) -> int:
    """Run one benchmark on all ranks; rank 0 prints the result, and writes it to `out=FILE`."""
    if answer_help("lab.bench step|recording", PURPOSE, EXAMPLES, arguments, OWN):
        return 0
    try:
        bench, *settings = arguments or [""]
        out = [text[4:] for text in settings if text.startswith("out=")]
        settings = [text for text in settings if not text.startswith("out=")]
        result = _run(bench, _runs_of(bench, settings))
    except ConfigError as error:
        if is_first_rank():
            report_error("lab.bench", error)
        return 2
    if result:
        text = json.dumps({**result, "settings": settings}, indent=2)
        print(text)
        if out:
            Path(out[-1]).write_text(text + "\n")
    return 0


def _runs_of(bench: str, settings: list[str]) -> list[list[str]]:
    """The command lines of the runs that a benchmark needs."""
    if bench == "recording":
        return [[*settings, "strategy=none"]]
    if bench != "step":
        raise ConfigError(f"{bench or '(nothing)'}: the first word must be step or recording")
    for override in parse_overrides(settings):
        if override.key_or_group == "strategy" and override.is_choice_sweep():
            names = list(map(str, override.sweep_string_iterator()))
            others = [text for text in settings if text != override.input_line]
            if len(names) == 2:
                return [[*others, f"strategy={name}"] for name in names]
    raise ConfigError("strategy: a comparison needs two, as in strategy=overlap,ddp")


def _run(bench: str, runs: list[list[str]]) -> dict[str, Any] | None:
    """The result, on rank 0."""
    configs = [load(arguments) for arguments in runs]
    for config in configs:
        check_batch(config, world_size())

    # Only now is torch imported: help and wrong settings have been answered without it.
    from lab.assemble import join
    from lab.benchmarks import compare_steps, time_recording
    from lab.distributed import world

    worlds = [join(config) for config in configs]
    try:
        result = (compare_steps if bench == "step" else time_recording)(configs, worlds)
        return result if worlds[0].rank == 0 else None
    finally:
        world.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

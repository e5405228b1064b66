"""Benchmarks: `python -m lab.bench step strategy=overlap,ddp`."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Iterator
from typing import Any

from lab.benchmarks.ranks import (
    REFUSED,
    RanksFailed,
    answer,
    ask_ranks,
    is_rank,
    was_asked,
    with_world_size,
)
from lab.benchmarks.request import BENCHES, OWN, Request, read
from lab.distributed.launcher import is_first_rank
from lab.settings.command_line import answer_help, report_error
from lab.settings.config import ConfigError

PURPOSE = """\
collective: all-reduces by size, exchange=A,B,..., with nccl-tests' columns.
codec: encode and decode, against torch.add on the same tensors.
step: step times of strategy=A,B,... in turns, as ratios to the last.
memory: peak memory of strategy=A,B,... beside theory.
recording: what the lab's own book-keeping adds to a step.

What is compared is the one setting with a list, or sets of settings: a='...' b='...'."""
EXAMPLES = (
    "python -m lab.bench collective 'sizes=[4kb,1mb,64mb]' exchange=ring,tree world_size=4",
    "python -m lab.bench codec num_values=25_000_000 threads=2 out=codec.json",
    "python -m lab.bench step strategy=none,onebit,ddp model=mlp 'model.hidden=[4096,4096]' "
    "steps=60",
    "python -m lab.bench step a='strategy=overlap bucket_mb=4' b='strategy=ddp' steps=60",
    "python -m lab.bench memory strategy=overlap,onebit model=mlp 'model.hidden=[4096,4096]'",
    "torchrun --nproc-per-node 2 -m lab.bench step strategy=onebit,bf16 model=alexnet_small",
)


class WrongResult(RuntimeError):
    """What was timed does not do what it should."""


def main(arguments: list[str]) -> int:
    """Run one benchmark; print its table, and write the result and a figure to `out=FILE.json`.

    Returns:
        0; 1 if a rank failed, or what was timed is wrong; 2 for a wrong setting; 130 after Ctrl-C.
    """
    if answer_help(f"lab.bench {'|'.join(BENCHES)}", PURPOSE, EXAMPLES, arguments, OWN):
        return 0
    try:
        request = read(arguments)
        result = _measure(request)
        return _present(request, result) if result else 0
    except ConfigError as error:
        if was_asked():
            answer({REFUSED: str(error)})
            return 0
        if is_first_rank():
            report_error("lab.bench", error)
        return 2
    except (RanksFailed, WrongResult) as error:
        report_error("lab.bench", error)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


def _measure(request: Request) -> dict[str, Any] | None:
    """The result, on rank 0, or where the ranks were started from."""
    # Only now is torch imported: help and wrong settings have been answered without it.
    benchmark = importlib.import_module(f"lab.benchmarks.{request.bench}")
    if is_rank():
        return benchmark.measure(request)
    request = with_world_size(request)
    if BENCHES[request.bench].apart:
        return benchmark.combine(list(_one_by_one(request)))
    if request.own.get("world_size", 1) == 1 and not request.cluster():
        return benchmark.measure(request)
    return ask_ranks(request)


def _one_by_one(request: Request) -> Iterator[dict[str, Any]]:
    for number, variant in enumerate(request.variants, start=1):
        print(f"[{number}/{len(request.variants)}] {variant.label}", file=sys.stderr)
        yield ask_ranks(request, variant)


def _present(request: Request, result: dict[str, Any]) -> int:
    if was_asked():
        answer(result)
        return 0
    from lab.benchmarks.views import show
    from lab.record.files import write_json

    command = shlex.join(["python", "-m", "lab.bench", *request.arguments])
    result = {"bench": request.bench, "command": command, **result}
    print(show.table(result))
    if request.own["out"]:
        write_json(request.own["out"], result)
        print(f"wrote {request.own['out']} and {show.draw(request.own['out'])}")
    if any(row.get("wrong") for row in result["rows"]):
        raise WrongResult("what was timed gives wrong values: see #wrong in the table")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

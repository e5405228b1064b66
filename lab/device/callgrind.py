"""Counting a model's layers under callgrind: the command, the program that it runs, its files.

Virtual machines rarely have hardware counters, so valgrind executes the program instead
(J. Weidendorfer, Sequential Performance Analysis with Callgrind and KCachegrind, 2008). Its second
level of cache is the last one. It simulates between the marks alone, from empty caches: the rest of
a program, such as importing torch and making kernels, would take most of the time.

`python -m lab.device.callgrind` is the program that is counted: each layer of each model, forward
and backward, between marks. It imports little, as it does so under callgrind.
"""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from lab.problem import Blueprint, blueprint
from lab.settings.config import ConfigError, load

Call = Callable[[], object]
LEVEL = re.compile(r"\d+,\d+,\d+")
MARKS = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_TOGGLE_COLLECT; }
void end(void) { CALLGRIND_TOGGLE_COLLECT; CALLGRIND_STOP_INSTRUMENTATION; CALLGRIND_DUMP_STATS; }
"""
# By callgrind's names, what is counted. Instructions that read or write memory are loads and
# stores; some are not found in the first level of data cache, and of these some not in the second.
EVENTS = {
    **{"Ir": "instructions", "Dr": "loads", "Dw": "stores"},
    **{"D1mr": "l1_load_misses", "D1mw": "l1_store_misses"},
    **{"DLmr": "l2_load_misses", "DLmw": "l2_store_misses"},
}
VALUE = 0.01  # drawing values would take minutes under callgrind
EMPTY = ""  # the name of a call that does nothing


def build_marks(folder: Path) -> Path:
    """Compile a library with `begin` and `end`, which do nothing outside callgrind.

    Raises:
        ConfigError: there is no C compiler, or valgrind's header is missing.
    """
    source, library = folder / "marks.c", folder / "marks.so"
    source.write_text(MARKS, encoding="utf-8")
    build = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)]
    try:
        subprocess.run(build, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise ConfigError("counters: needs a C compiler (cc)") from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or ["no message"]
        raise ConfigError(f"counters: cc failed: {lines[0]}") from None
    return library


def command(out: Path, l1: str, l2: str) -> list[str]:
    """Return the words before a program that runs it under callgrind, counting once it asks.

    Args:
        out: the files of its counts are OUT.1, OUT.2, ...
        l1, l2: of data caches: bytes, associativity and bytes of a line, as in 32768,8,64.

    Raises:
        ConfigError: valgrind is not installed, or a cache is no such text.
    """
    for key, level in (("l1", l1), ("l2", l2)):
        if not LEVEL.fullmatch(level):
            raise ConfigError(f"{key}={level}: must be BYTES,WAYS,LINE, as in 32768,8,64")
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise ConfigError("counters: needs valgrind, which is not installed (apt install valgrind)")
    return [
        *(valgrind, "--tool=callgrind", "--cache-sim=yes"),
        *("--collect-atstart=no", "--instr-atstart=no"),
        *(f"--D1={l1}", f"--LL={l2}", f"--callgrind-out-file={out}"),
    ]


def output_of(program: Sequence[str], variables: Mapping[str, str], what: str) -> str:
    """Run a program with these variables of the environment, and return what it prints.

    Raises:
        ConfigError: `what` failed, with the last line of its errors.
    """
    done = subprocess.run(program, capture_output=True, text=True, env=variables, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(f"{what}{lines[-1]}")
    return done.stdout


def read(path: Path) -> dict[str, int]:
    """Read the totals of one of callgrind's files, by the names of EVENTS.

    Raises:
        ConfigError: it is no such file, or it was counted without caches.
    """
    lines = dict(
        re.findall(r"^(events|totals): (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    )
    names = lines.get("events", "").split()
    if "totals" not in lines or not EVENTS.keys() <= set(names):
        raise ConfigError(f"{path}: not a callgrind file with cache counts")
    totals = dict(zip(names, map(int, lines["totals"].split()), strict=False))
    return {name: totals.get(event, 0) for event, name in EVENTS.items()}


def filled(plan: Blueprint, batch_size: int) -> tuple[nn.Module, Tensor]:
    """Return the plan's model on the CPU, and inputs [batch_size, ...]; token ids are 0."""
    model = plan.model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(VALUE)
    inputs = torch.zeros(batch_size, *plan.data.input_shape, dtype=plan.data.input_dtype)
    return model, inputs.fill_(VALUE)


def main(arguments: list[str]) -> None:
    """Count all layers for each JSON list of settings.

    Args:
        arguments: the library of callgrind's marks, and the lists.
    """
    torch.set_num_threads(1)
    library, *variants = arguments
    count = partial(counted, ctypes.CDLL(library))
    count(int)  # Python warms up too
    found = [{"variant": -1, "layer": EMPTY, "kind": "", "pass": "", "seconds": count(int)}]
    for number, text in enumerate(variants):
        config = load(json.loads(text))
        for row in _model(config, count):
            found.append({"variant": number, **row})
    print(json.dumps(found))


def counted(marks: ctypes.CDLL, call: Call) -> float:
    """Call between callgrind's marks; return the seconds of all that."""
    began = time.perf_counter()
    marks.begin()
    result = call()
    marks.end()
    del result  # to free it is no part of the call
    return time.perf_counter() - began


def _model(config: DictConfig, count: Callable[[Call], float]) -> Iterator[dict[str, Any]]:
    model, inputs = filled(blueprint(config), config.batch_size)
    # All are prepared first: at each mark valgrind translates anew whatever runs next.
    prepared = [(name, layer, _passes(layer, x)) for name, layer, x in _calls(model, inputs)]
    for name, layer, passes in prepared:
        about = {"layer": name, "kind": type(layer).__name__}
        for label, call in passes.items():
            yield {**about, "pass": label, "seconds": count(call)}


def _calls(model: nn.Module, inputs: Tensor) -> list[tuple[str, nn.Module, Tensor]]:
    """Run the model; return its innermost modules of one input in the order of their calls.

    This is also each layer's warm-up: oneDNN makes its kernels at a shape's first call.
    """
    calls: dict[str, tuple[str, nn.Module, Tensor]] = {}

    def note(name: str, layer: nn.Module, given: Any) -> None:
        if len(given) == 1 and isinstance(given[0], Tensor):
            calls[name] = name, layer, given[0].detach().clone()

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if not any(True for _ in module.children()):
                hooks.enter_context(module.register_forward_pre_hook(partial(note, name)))
        model(inputs)
    return list(calls.values())


def _passes(layer: nn.Module, given: Tensor) -> dict[str, Call]:
    """Return a layer's passes by name, warmed up."""
    inputs = given.requires_grad_() if given.is_floating_point() else given
    entering = inputs.clone()  # a ReLU may work in place; backward of a copy is free
    passes: dict[str, Call] = {"forward": lambda: layer(entering)}
    output = layer(inputs.clone())
    if isinstance(output, Tensor) and output.requires_grad:
        weights = [weight for weight in layer.parameters() if weight.requires_grad]
        wanted = [each for each in (inputs, *weights) if each.requires_grad]
        gradient = torch.full_like(output, VALUE)
        passes["backward"] = lambda: torch.autograd.grad(
            output, wanted, gradient, retain_graph=True
        )
        passes["backward"]()
    return passes


if __name__ == "__main__":
    main(sys.argv[1:])

"""Memory of a training step by kind, without computing the step.

The model trains two steps on tensors that have shapes and no values (torch's FakeTensorMode), and
torch's MemTracker follows each storage from its allocation to its release.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.optim import Optimizer

NUM_STEPS = 2  # the optimizer's state is made in the first
NAMES = {
    "PARAM": "parameters",
    "GRAD": "gradients",
    "OPT": "optimizer",
    "ACT": "activations",
    "TEMP": "temporaries",  # of backward and the update
    "BUFFER": "other",
    "OTH": "other",
}
EXCHANGE = "exchange"
KINDS = (*dict.fromkeys(NAMES.values()), EXCHANGE)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

MakeOptimizer = Callable[[nn.Module], Optimizer]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Step:
    """A training step, apart from its model and batch.

    Attributes:
        input_shape, input_dtype: of one sample. target: of one sample; only its shape and type
            matter.
        loss: of outputs and targets. optimizer: makes one for a model.
        precision: fp32, bf16 or fp16, as in training: by autocast.
    """

    input_shape: tuple[int, ...]
    input_dtype: torch.dtype
    target: Tensor
    loss: Loss
    optimizer: MakeOptimizer
    precision: str = "fp32"


@dataclass(frozen=True)
class ModuleBytes:
    """The bytes that one call of an innermost module holds: its parameters, and its outputs."""

    name: str
    parameters: int
    outputs: int


@dataclass(frozen=True)
class Footprint:
    """Memory of a step.

    Attributes:
        kinds: bytes of each of KINDS at the moment that needs most.
        modules: those that hold anything, in the order of forward.
    """

    kinds: Mapping[str, int]
    modules: tuple[ModuleBytes, ...]

    @property
    def total_bytes(self) -> int:
        return sum(self.kinds.values())


def footprint(model: nn.Module, step: Step, batch: int, exchange_bytes: int = 0) -> Footprint:
    """Compute the memory of a training step of one rank.

    Workspaces of libraries are not known, and come on top.

    Args:
        model: on the meta device, in training mode.
        batch: samples of this rank.
        exchange_bytes: what an exchange holds all the time.

    Raises:
        ValueError: it cannot run without values; the message says why.
    """
    model = copy.deepcopy(model)  # its parameters will have shapes alone
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MemTracker looks at addresses, which there are not
            kinds, modules = _peak(model, step, batch)
            return Footprint({**kinds, EXCHANGE: exchange_bytes}, modules)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise ValueError(f"cannot run without values: {lines[0]}") from None


def largest_batch(model: nn.Module, step: Step, num_bytes: float, exchange_bytes: int = 0) -> int:
    """Return the largest batch whose step fits into so many bytes; 0: none does.

    Memory grows with the batch, so the search halves its interval.
    """

    def fits(batch: int) -> bool:
        return footprint(model, step, batch, exchange_bytes).total_bytes <= num_bytes

    fitting, too_large = 0, 1
    while fits(too_large):
        fitting, too_large = too_large, 2 * too_large
    while too_large - fitting > 1:
        middle = (fitting + too_large) // 2
        fitting, too_large = (middle, too_large) if fits(middle) else (fitting, middle)
    return fitting


def _peak(
    model: nn.Module, step: Step, batch: int
) -> tuple[Mapping[str, int], tuple[ModuleBytes, ...]]:
    fake = model.to_empty(device="cpu")
    optimizer = step.optimizer(fake)
    tracker = MemTracker()
    tracker.track_external(fake, optimizer)
    half = DTYPES.get(step.precision)
    modules: tuple[ModuleBytes, ...] = ()
    with tracker:
        inputs = torch.empty(batch, *step.input_shape, dtype=step.input_dtype)
        targets = torch.empty(batch, *step.target.shape, dtype=step.target.dtype)
        for _ in range(NUM_STEPS):
            with torch.autocast("cpu", half) if half else contextlib.nullcontext():
                outputs = fake(inputs)
            step.loss(outputs.float() if half else outputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            modules = tuple(_modules(tracker, fake))
            tracker.reset_mod_stats()
    return _by_kind(tracker.get_tracker_snapshot("peak")), modules


def _modules(tracker: MemTracker, model: nn.Module) -> Iterator[ModuleBytes]:
    """Read what each innermost module held in the last forward."""
    for name, module in model.named_modules():
        found = tracker.memory_tracking.get(module)
        if found and not any(True for _ in module.children()):
            yield ModuleBytes(name or "model", found.parameter_mem, found.output_mem)


def _by_kind(snapshot: Mapping[torch.device, Mapping[Any, int]]) -> Mapping[str, int]:
    found = dict.fromkeys(NAMES.values(), 0)
    for of_device in snapshot.values():
        for kind, num_bytes in of_device.items():
            name = NAMES.get(getattr(kind, "name", ""))
            if name:
                found[name] += num_bytes
    return found

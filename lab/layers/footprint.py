"""Memory of a training step by kind, without computing the step.

The model trains two steps on tensors that have shapes and no values (torch's FakeTensorMode), and
torch's MemTracker follows each storage from its allocation to its release.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Mapping
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
KINDS = tuple(dict.fromkeys(NAMES.values()))
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


def peak_bytes(model: nn.Module, step: Step, batch: int) -> Mapping[str, int]:
    """Return the bytes of each of KINDS at the moment of a step that needs most.

    Workspaces of libraries are not known, and come on top.

    Args:
        model: on the meta device, in training mode.

    Raises:
        ValueError: it cannot run without values; the message says why.
    """
    model = copy.deepcopy(model)  # its parameters will have shapes alone
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MemTracker looks at addresses, which there are not
            return _peak(model, step, batch)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise ValueError(f"cannot run without values: {lines[0]}") from None


def largest_batch(model: nn.Module, step: Step, num_bytes: float) -> int:
    """Return the largest batch whose step fits into so many bytes; 0: none does.

    Memory grows with the batch, so the search halves its interval.
    """

    def fits(batch: int) -> bool:
        return sum(peak_bytes(model, step, batch).values()) <= num_bytes

    fitting, too_large = 0, 1
    while fits(too_large):
        fitting, too_large = too_large, 2 * too_large
    while too_large - fitting > 1:
        middle = (fitting + too_large) // 2
        fitting, too_large = (middle, too_large) if fits(middle) else (fitting, middle)
    return fitting


def _peak(model: nn.Module, step: Step, batch: int) -> Mapping[str, int]:
    fake = model.to_empty(device="cpu")
    optimizer = step.optimizer(fake)
    tracker = MemTracker()
    tracker.track_external(fake, optimizer)
    half = DTYPES.get(step.precision)
    with tracker:
        inputs = torch.empty(batch, *step.input_shape, dtype=step.input_dtype)
        targets = torch.empty(batch, *step.target.shape, dtype=step.target.dtype)
        for _ in range(NUM_STEPS):
            with torch.autocast("cpu", half) if half else contextlib.nullcontext():
                outputs = fake(inputs)
            step.loss(outputs.float() if half else outputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            tracker.reset_mod_stats()
    return _by_kind(tracker.get_tracker_snapshot("peak"))


def _by_kind(snapshot: Mapping[torch.device, Mapping[Any, int]]) -> Mapping[str, int]:
    found = dict.fromkeys(KINDS, 0)
    for of_device in snapshot.values():
        for kind, num_bytes in of_device.items():
            name = NAMES.get(getattr(kind, "name", ""))
            if name:
                found[name] += num_bytes
    return found

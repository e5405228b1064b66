"""A CPU as a mock GPU, to record calls that would make the host wait for the device.

On a GPU torch's own sync debug mode does it (tests/gpu/test_host_waits.py).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(f"{ROOT / folder}/" for folder in ("lab", "tests"))

READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.cpu)
MAKES = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
aten = torch.ops.aten
# Their result, or its size, depends on values.
WAITING = (aten.nonzero, aten.masked_select, aten.equal, aten._unique2, aten.unique_consecutive)
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)


@dataclass(frozen=True)
class Wait:
    """A call that waits.

    Attributes:
        place: file and function.
        line: line in that file.
        call: the function called.
    """

    place: str
    line: int
    call: str

    def __str__(self) -> str:
        file, _, function = self.place.partition(" ")
        return f"{file}:{self.line} in {function}: {self.call}"


class Guard:
    """A monitor of one thread's tensor calls, including hooks and exchanges within backward.

    A copy by `to("cpu", non_blocking=True)` may be read from the next step on, when the device has
    finished it; tensors that were on the host before the steps may be read at any time.

    Attributes: waits: calls that made the host wait within steps.
    """

    def __init__(self) -> None:
        self.waits: list[Wait] = []
        self.armed = False
        self.num_steps = 0
        self._modes = ExitStack()

    def __enter__(self) -> Self:
        self._modes.enter_context(_Functions(self))
        self._modes.enter_context(_Operations(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._modes.close()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Enclose a step, in which the host must not wait."""
        self.num_steps += 1
        self.armed = True
        yield
        self.armed = False

    def note(self, call: Any, direct: bool = False) -> None:
        """Record a wait by `call`; with `direct`, only if the lab and not torch called it."""
        if not self.armed:
            return
        frames = [f for f in traceback.extract_stack() if f.filename != __file__]
        ours = [f for f in frames if f.filename.startswith(OURS)]
        if direct and ours[-1] is not frames[-1]:
            return
        file = Path(ours[-1].filename).relative_to(ROOT).as_posix()
        name = getattr(call, "__name__", str(call))
        self.waits.append(Wait(f"{file} {ours[-1].name}", ours[-1].lineno or 0, name))

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        copy.read_after = self.num_steps if self.armed else -1  # type: ignore[attr-defined]
        return copy

    def is_readable(self, tensor: Tensor) -> bool:
        return getattr(tensor, "read_after", self.num_steps) < self.num_steps


class _Functions(TorchFunctionMode):
    """A monitor of Python calls, some of which never become operations."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:  # torch calls it with this mode off, but hooks must be seen
            with self:
                return _backward(args[0])
        if func in READS and not self._guard.is_readable(args[0]):
            self._guard.note(func)
        if func in MAKES and not isinstance(args[-1], Tensor | np.ndarray):
            self._guard.note(func)
        if func in (Tensor.to, Tensor.cpu) and _names_device(func, args, kwargs):
            if not kwargs.get("non_blocking") and func is Tensor.to:
                self._guard.note("to(device)", direct=True)  # torch's own has no way to go here
            return self._guard.copy_to_host(func(*args, **kwargs))
        return func(*args, **kwargs)


def _backward(loss: Tensor) -> None:
    """Call what `loss.backward()` calls."""
    engine, ones = torch.autograd.Variable._execution_engine, torch.ones_like(loss)
    how = {"allow_unreachable": True, "accumulate_grad": True}
    engine.run_backward((loss,), (ones,), False, False, (), **how)


def _names_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    values = (*args[1:], *kwargs.values())
    return func is Tensor.cpu or any(isinstance(value, str | torch.device) for value in values)


class _Operations(TorchDispatchMode):
    """A monitor of the operations of any caller: `item`, bool(tensor), float(tensor), ..."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        packet = func.overloadpacket
        if packet is aten._local_scalar_dense and not self._guard.is_readable(args[0]):
            self._guard.note("item")
        if packet in WAITING:
            self._guard.note(packet)
        if packet in INDEXING and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self._guard.note("index with a mask")
        return func(*args, **(kwargs or {}))

"""Helpers that several tests share."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch._ops

from lab.distributed.world import is_available

# Kernels for GPUs run in Triton's interpreter where there is none; it asks when it is imported,
# which some of torch does, too.
if not is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# A longer run hangs. Beside busy processes on a slow machine, two cells have taken five minutes.
HANG_S = 600.0


def round_products_once() -> None:
    """Let Triton's interpreter round x * y + z once, as GPUs do where kernels ask for it.

    A product of float32 is exact in float64, so only a sum is rounded twice, and very rarely felt.
    And let it replace the language's functions once for each module whose functions kernels call:
    at each call it is half of the time.
    """
    if find_spec("triton") is None:
        return
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

    def fused(_: Any, x: Any, y: Any, z: Any) -> Any:
        wide = np.float64 if z.data.dtype == np.float32 else np.longdouble
        total = x.data.astype(wide) * y.data.astype(wide) + z.data.astype(wide)
        return TensorHandle(total.astype(z.data.dtype), z.dtype.scalar)

    seen = set[int]()

    def called(self: Any, *arguments: Any, **named: Any) -> Any:
        if (module := id(self.fn.__globals__)) not in seen:
            seen.add(module)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*arguments, **named)

    builder: Any = InterpreterBuilder
    builder.create_fma = fused
    InterpretedFunction.__call__ = called


def lock_lookups() -> None:
    """Let one thread at a time look up an operation that has no Python object yet.

    Two ranks that are threads would each make one, the second of which replaces the first. If a
    dispatch mode asked for the first, torch keeps its address and calls freed memory later on.
    """
    lock = threading.RLock()

    def locked(find: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def getattr_once(self: Any, name: str) -> Any:
            with lock:
                return self.__dict__[name] if name in self.__dict__ else find(self, name)

        return getattr_once

    for kind in (torch._ops._OpNamespace, torch._ops.OpOverloadPacket):
        type.__setattr__(kind, "__getattr__", locked(kind.__getattr__))


@contextmanager
def refusing(begin: str) -> Iterator[None]:
    """Expect an error whose message is one line that begins so."""
    with pytest.raises(ValueError) as caught:
        yield
    line = str(caught.value)
    assert line.startswith(begin) and "\n" not in line

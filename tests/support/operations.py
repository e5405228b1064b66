"""One object for each of torch's operations, though ranks be threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch._ops


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

"""A graph on a CPU: a step's operations and collectives, noted with their addresses, to repeat.

As with CUDA's graphs, a replay runs no Python of the step: hooks and exchanges are not called, and
each operation reads and writes the addresses that it had while it was captured. So a step whose
memory moves, or that needs a number of the host's, repeats with other bits than it would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lab.training.graph import CudaGraph

Memory = dict[tuple[str, int], torch.UntypedStorage]
NOT_WORK = ("profiler",)  # operations that only mark


@dataclass(frozen=True)
class Lies:
    """Where a tensor lies: in memory from before the step, by address, or made in it, by number."""

    memory: tuple[str, int]
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def overlaps(self, other: Lies) -> bool:
        """Return whether both may share a byte."""
        (begin, end), (other_begin, other_end) = self._bytes(), other._bytes()
        return self.memory == other.memory and begin < other_end and other_begin < end

    def _bytes(self) -> tuple[int, int]:
        length = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        size = self.dtype.itemsize
        return self.offset * size, (self.offset + length + 1) * size


@dataclass(frozen=True)
class Entry:
    """One operation, with tensors as Lies, in its arguments and in its result."""

    operation: Any
    arguments: Any
    named: Any
    result: Any

    def run(self, memory: Memory) -> Any:
        """Repeat the operation, and add the memory of its result to `memory`."""
        given, named = tree_map(
            lambda x: tensor_at(memory, x), (self.arguments, self.named), is_leaf=_is_lies
        )
        result = self.operation(*given, **named)
        pairs = zip(tree_leaves(self.result, is_leaf=_is_lies), tree_leaves(result), strict=True)
        for lies, leaf in pairs:
            if isinstance(leaf, Tensor):
                memory.setdefault(lies.memory, leaf.untyped_storage())
        return result


@dataclass
class Tape:
    """The operations of a step.

    Attributes:
        memory: from before the step, by address, with the bytes that it had then.
    """

    entries: list[Entry] = field(default_factory=list[Entry])
    memory: dict[tuple[str, int], tuple[torch.UntypedStorage, torch.UntypedStorage]] = field(
        default_factory=dict[Any, Any]
    )
    _made: dict[int, tuple[str, int]] = field(default_factory=dict[int, tuple[str, int]])
    _held: list[torch.UntypedStorage] = field(default_factory=list[torch.UntypedStorage])

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note all operations of this thread, which run as ever."""
        with _Noting(self):
            yield

    def undo(self) -> None:
        """Put all memory from before the step back to what it was."""
        for storage, before in self.memory.values():
            storage.copy_(before)

    def run(self) -> Memory:
        """Repeat the operations; return all memory, old and new."""
        memory = {key: storage for key, (storage, _) in self.memory.items()}
        coming: list[tuple[Work, list[Lies]]] = []  # collectives under way
        with torch.no_grad():
            for entry in self.entries:
                touched = [*_lies(entry.arguments, entry.named)]
                coming = [each for each in coming if not _waited_for(*each, touched)]
                result = entry.run(memory)
                if entry.operation.namespace == "c10d":
                    works = (x for x in tree_leaves(result) if isinstance(x, torch.ScriptObject))
                    coming += [(Work.unbox(work), touched) for work in works]
        for work, _ in coming:
            work.wait()
        return memory

    def lies(self, x: Any) -> Any:
        """Return where a tensor lies; anything else as it is."""
        if not isinstance(x, Tensor):
            return x
        memory = self._memory_of(x.untyped_storage())
        return Lies(memory, int(x.storage_offset()), (*x.shape,), (*x.stride(),), x.dtype)

    def make(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        """Number the memory of a result, unless it is an argument's."""
        address = storage.data_ptr()
        if address not in before and address not in self._made:
            self._made[address] = "made", len(self._held)
            self._held.append(storage)  # so that nothing else gets this address

    def _memory_of(self, storage: torch.UntypedStorage) -> tuple[str, int]:
        address = storage.data_ptr()
        if address in self._made:
            return self._made[address]
        if (key := ("before", address)) not in self.memory:
            self.memory[key] = storage, storage.clone()
        return key


class _Noting(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in NOT_WORK:
            return func(*args, **kwargs)
        tape = self._tape
        given, named = tree_map(tape.lies, (list(args), kwargs))
        before = {x.untyped_storage().data_ptr() for x in _tensors(args, kwargs)}
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            tape.make(tensor.untyped_storage(), before)
        is_tensor = tree_map(lambda x: tape.lies(x) if isinstance(x, Tensor) else None, result)
        tape.entries.append(Entry(func, given, named, is_tensor))
        return result


class TapeGraph(CudaGraph):
    """A graph of a CPU, as lab.training.graph.CudaGraph is one of a GPU."""

    def __init__(self) -> None:
        self.tape = Tape()
        self._result = torch.empty(0)

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        random = torch.get_rng_state()
        with self.tape.noting():
            self._result = work()
        self.tape.undo()  # a CUDA graph's kernels do not run while they are captured
        torch.set_rng_state(random)
        self._lies = self.tape.lies(self._result)
        return self._result

    def close(self) -> None:
        self.tape = Tape()

    def replay(self) -> None:
        memory = self.tape.run()
        self._result.copy_(tensor_at(memory, self._lies))


def tensor_at(memory: Memory, x: Any) -> Any:
    """Return the tensor that lies somewhere; anything else as it is."""
    if not isinstance(x, Lies):
        return x
    empty = torch.empty(0, dtype=x.dtype)
    return empty.set_(memory[x.memory], x.offset, x.shape, x.strides)  # type: ignore[arg-type]


def differences(one: Tape, other: Tape) -> list[str]:
    """Return what two steps do differently, a line each: operations, numbers or addresses."""
    if len(one.entries) != len(other.entries):
        return [f"{len(one.entries)} operations, then {len(other.entries)}"]
    pairs = zip(map(_plain, one.entries), map(_plain, other.entries), strict=True)
    return [f"{a}, then {b}" for a, b in pairs if a != b]


def _plain(entry: Entry) -> str:
    """Return an operation as text; script objects, such as a process group, by their type."""
    plain = tree_map(
        lambda x: type(x).__name__ if isinstance(x, torch.ScriptObject) else x,
        (entry.arguments, entry.named, entry.result),
        is_leaf=_is_lies,
    )
    return f"{entry.operation.name()} {plain}"


def _waited_for(work: Work, its: list[Lies], touched: list[Lies]) -> bool:
    """Wait for a collective if an operation touches its memory, as its caller has done."""
    if not any(one.overlaps(other) for one in its for other in touched):
        return False
    work.wait()
    return True


def _is_lies(x: Any) -> bool:
    return isinstance(x, Lies)


def _lies(*trees: Any) -> Iterator[Lies]:
    return (x for tree in trees for x in tree_leaves(tree, is_leaf=_is_lies) if _is_lies(x))


def _tensors(*trees: Any) -> Iterator[Tensor]:
    return (x for tree in trees for x in tree_leaves(tree) if isinstance(x, Tensor))

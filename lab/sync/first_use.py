"""Where a forward reads its parameters: what may wait until then, and what must be there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lab.exchange.layout import named

NO_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class _Watch(TorchDispatchMode):
    """Sees each read of a parameter, as all operations on tensors pass through it.

    So a parameter is found wherever it is read: by its module, by another one (a tied weight,
    `out_proj` within nn.MultiheadAttention), by an operation on a view, or before its module
    begins. Not found are reads of raw memory, such as those of a foreign library.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._name_of = {id(parameter): name for name, parameter in named(model).items()}
        self._at: dict[int, list[str]] = {}  # parameters, by their memory
        for name, parameter in named(model).items():
            self._at.setdefault(_memory_of(parameter), []).append(name)

    def _note_read(self, name: str) -> None:
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for tensor in cast(list[object], tree_leaves((args, kwargs))):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                for name in self._at.get(_memory_of(tensor), ()):
                    self._note_read(name)
        return func(*args, **(kwargs or {}))


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() or id(tensor)  # an empty one has none


class FirstReads(_Watch):
    """Watches one forward: the order in which modules begin, and each parameter's first read.

    A parameter whose reads are not found counts as read when the first module that has it begins.

    Args:
        model: its modules' hooks tell when they begin.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        # A shared module has its first name; a shared parameter has several modules.
        self._modules = dict(cast(Iterator[tuple[str, nn.Module]], model.named_modules()))
        self._holders: dict[str, list[str]] = {name: [] for name in self._name_of.values()}
        for module_name, module in self._modules.items():
            for parameter in module.parameters(recurse=False):
                self._holders[self._name_of[id(parameter)]].append(module_name)
        self._begun: dict[str, int] = {}  # module -> its place among those that have begun
        self._read: dict[str, int] = {}  # parameter -> number of modules that had begun by then
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> FirstReads:
        for name, module in self._modules.items():
            self._hooks.append(before(module, partial(self._note_begin, name)))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # pyright: ignore[reportUnknownMemberType]
        for hook in self._hooks:
            hook.remove()

    def _note_begin(self, module: str) -> None:
        self._begun.setdefault(module, len(self._begun))

    def _note_read(self, name: str) -> None:
        self._read.setdefault(name, len(self._begun))

    def waits(self) -> dict[str, list[str]]:
        """Return the parameters to wait for as each module begins, in the order of forward.

        A parameter is waited for by the last module to begin before its first read, of those that
        have it and those that these are in. One that nothing reads is waited for by the modules
        that have it, as another forward may run them.
        """
        begun = list(self._begun)
        found: dict[str, list[str]] = {name: [] for name in begun}
        for parameter, holders in self._holders.items():
            own = [self._begun[module] for module in holders if module in self._begun]
            read = self._read.get(parameter, min(own) + 1 if own else None)
            if read is None or not begun:
                for module in holders:
                    found.setdefault(module, []).append(parameter)
                continue
            around = {name for module in holders for name in _upwards(module)}
            places = [self._begun[name] for name in around & self._begun.keys()]
            found[begun[max((p for p in places if p < read), default=0)]].append(parameter)
        return {module: parameters for module, parameters in found.items() if parameters}


def _upwards(module: str) -> Iterator[str]:
    """Yield a module's name and those of all that it is in; the model's is empty."""
    yield module
    while module:
        module = module.rpartition(".")[0]
        yield module


class Reads(_Watch):
    """Watches one forward: which modules are under way when an operation takes a parameter.

    Gradients are enabled, as in training: without them torch's attention layers take another path.

    Args:
        inputs: that the model takes. It sees them in eval mode.
    """

    def __init__(self, model: nn.Module, inputs: Tensor) -> None:
        super().__init__(model)
        self._ran = set[nn.Module]()
        self._under_way: list[nn.Module] = []
        self._readers: dict[str, set[nn.Module]] = {}  # under way at all reads, by parameter
        training = {module: module.training for module in model.modules()}
        hooks = list[RemovableHandle]()  # where FSDP would gather and free
        for module in training:
            hooks.append(before(module, partial(self._begin, module)))
            hooks.append(after(module, partial(self._under_way.remove, module)))
        try:
            with self:
                model.eval()(inputs)
        finally:
            for hook in hooks:
                hook.remove()
            for module, mode in training.items():
                module.training = mode
        self._routed = {
            inner for module in training if self._routes(module) for inner in module.modules()
        }

    def are_enclosed_by(self, module: nn.Module) -> bool:
        """Return whether `module` runs on every rank, around all reads of its parameters.

        Of a list of which the forward ran some modules, a rank may run others.
        """
        if module not in self._ran or module in self._routed:
            return False
        names = [self._name_of[id(parameter)] for parameter in module.parameters()]
        return all(module in self._readers.get(name, {module}) for name in names)

    def _routes(self, module: nn.Module) -> bool:
        with_own = [c for c in module.children() if next(c.parameters(), None) is not None]
        return isinstance(module, NO_FORWARD) and not self._ran.issuperset(with_own)

    def _begin(self, module: nn.Module) -> None:
        self._ran.add(module)
        self._under_way.append(module)

    def _note_read(self, name: str) -> None:
        self._readers[name] = self._readers.get(name, set(self._under_way)).intersection(
            self._under_way
        )


def before(module: nn.Module, call: Callable[[], None]) -> RemovableHandle:
    """Call `call()` as `module` begins, before its other hooks, which may read its parameters."""
    return module.register_forward_pre_hook(lambda _module, _inputs: call(), prepend=True)


def after(module: nn.Module, call: Callable[[], None]) -> RemovableHandle:
    """Call `call()` when `module`'s forward has ended."""
    return module.register_forward_hook(lambda _module, _inputs, _outputs: call())

"""A fingerprint of a model's code, by which runs of different code are told apart."""

from __future__ import annotations

import hashlib
import inspect

from torch import nn

LENGTH = 8  # hexadecimal digits


def source_hash(model: nn.Module) -> str:
    """Hash the source of all of the model's classes that are not torch's own.

    Shapes and options of layers are settings and do not count. A class without source, as one
    typed at a prompt, counts by its name.
    """
    kinds = {_as_written(type(module)) for module in model.modules()}
    own = (kind for kind in kinds if kind.__module__.partition(".")[0] != "torch")
    sources = sorted(_source(kind) for kind in own)
    return hashlib.sha256("\n".join(sources).encode()).hexdigest()[:LENGTH]


def _as_written(kind: type) -> type:
    """Return the class that FSDP2's fully_shard has replaced, or the class itself."""
    _, *bases = kind.__mro__
    return bases[1] if bases[0].__name__ == "FSDPModule" else kind


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return kind.__qualname__

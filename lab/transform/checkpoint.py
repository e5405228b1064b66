"""Compute activations again in backward instead of keeping them."""

from __future__ import annotations

import re
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint


class Checkpoint:
    """A transform that keeps only the inputs of some modules, and runs their forward twice.

    (T. Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.) Parameters and their
    names stay, and so do results, to the bit: dropout draws the same numbers again.

    Args:
        modules: a regular expression for the paths of the modules, as named_modules() has them.

    Raises:
        ValueError: it is no regular expression, or none is given.
    """

    def __init__(self, modules: str | None = None) -> None:
        if modules is None:
            raise ValueError(
                "transform.modules=null: must be a regular expression for paths of modules, as "
                r"transform.modules='blocks\.\d+'"
            )
        try:
            self._modules = re.compile(str(modules))
        except re.error as error:
            raise ValueError(f"transform.modules={modules}: {error}") from None

    def __call__(self, model: nn.Module) -> nn.Module:
        """Change the modules of `model` in place, and return it.

        Raises:
            ValueError: no module's path matches.
        """
        found = {p: m for p, m in model.named_modules() if p and self._modules.fullmatch(p)}
        if not found:
            paths = [path for path, _ in model.named_modules() if path]
            raise ValueError(
                f"transform.modules={self._modules.pattern}: matches none of {len(paths)} modules: "
                f"{', '.join(paths[:6])}, ..."
            )
        for module in found.values():
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        return model

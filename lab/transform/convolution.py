"""Compute a model's convolutions by other algorithms than the library's own choice."""

from __future__ import annotations

from torch import nn

from lab.convolution.layer import Chooser, ChosenConv2d, fixed, heuristic, profile
from lab.settings import checks

CHOICES = ("fixed", "heuristic", "profile")


class Convolution:
    """A transform that gives each convolution the algorithms that `choose` finds.

    Parameters and their names stay, so checkpoints do. Results are equal up to rounding.

    Args:
        choose: "fixed" takes `algorithm`, and the library where that one refuses; "heuristic" the
            fewest counted operations and bytes; "profile" the fastest in trials at the first
            forward of each shape, so that two runs may differ by rounding.
        algorithm: a name of lab.convolution.algorithms.ALGORITHMS, or "winograd".

    Raises:
        ValueError: an argument that is not allowed.
    """

    def __init__(self, choose: str = "profile", algorithm: str = "gemm") -> None:
        checks.one_of("transform.choose", choose, CHOICES)
        try:
            fixed_one = fixed(algorithm)
        except ValueError as error:
            raise ValueError(f"transform.{error}") from None
        ways: dict[str, Chooser] = {"heuristic": heuristic, "profile": profile}
        self._choose = ways.get(choose, fixed_one)

    def __call__(self, model: nn.Module) -> nn.Module:
        """Replace the convolutions of `model` in place, and return it.

        Raises:
            ValueError: it has none that the algorithms know.
        """
        found = [
            (parent, name, layer)
            for parent in model.modules()
            for name, layer in parent.named_children()
            if ChosenConv2d.can_replace(layer)
        ]
        if not found:
            raise ValueError(
                f"transform=convolution: {type(model).__name__} has no 2-d convolution without "
                "dilation"
            )
        for parent, name, layer in found:
            assert isinstance(layer, nn.Conv2d)
            setattr(parent, name, ChosenConv2d(layer, self._choose))
        return model

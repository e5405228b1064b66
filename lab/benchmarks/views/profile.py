"""Show the profile of a model."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

from lab.draw.text import aligned
from lab.model.profile import Layer, Profile
from lab.record.files import write_atomically

KERNELS = "kernels of a step but the optimizer's, by torch.profiler:"


def present(profile: Profile, kernels_ms: float | None, out: Path | None) -> None:
    """Print a table of the layers, and write the profile to `out`, or print it too.

    Args:
        kernels_ms: time of a step's kernels by torch.profiler; None: not measured.

    Raises:
        OSError: the file cannot be written.
    """
    print(table(profile))
    if kernels_ms is not None:
        whole_ms = sum(layer.forward_ms + layer.backward_ms for layer in profile.layers)
        print(f"\nlayers {whole_ms:.3f} ms; {KERNELS} {kernels_ms:.3f} ms")
    if out is None:
        print(f"\n{profile.to_yaml()}", end="")
        return
    write_atomically(out, lambda temporary: temporary.write_text(profile.to_yaml()))
    print(f"wrote {out}")


def table(profile: Profile) -> str:
    """List the times of each layer, and of the step around them."""
    header = ["layer", "parameters", "forward ms", "of it fixed", "backward ms", "of it fixed"]
    lines = aligned([header, *map(_line, profile.layers), _line(_sum(profile.layers))])
    return "\n".join([*lines, *_step_lines(profile)])


def _step_lines(profile: Profile) -> list[str]:
    if profile.step_ms is None or profile.rest_ms is None:
        return []
    return [
        "",
        f"step {profile.step_ms:.3f} ms without clocks on its layers; besides them "
        f"{profile.rest_ms:.3f} ms (optimizer, data, host), of which "
        f"{profile.fixed_rest_ms:.3f} fixed",
    ]


def _line(layer: Layer) -> list[str]:
    times = (
        *(layer.forward_ms, layer.fixed_forward_ms),
        *(layer.backward_ms, layer.fixed_backward_ms),
    )
    return [layer.name, f"{layer.parameters:,}", *(f"{each:.3f}" for each in times)]


def _sum(layers: tuple[Layer, ...]) -> Layer:
    _, *columns = zip(*(astuple(layer) for layer in layers), strict=True)
    return Layer("all", *map(sum, columns))

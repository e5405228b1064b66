"""Show the profile of a model."""

from __future__ import annotations

from pathlib import Path

from lab.benchmarks.profile import Measurement
from lab.benchmarks.views.text import ranged
from lab.draw.text import aligned
from lab.model.fits import ALL, BOTH, REST, STEP, Fit
from lab.model.profile import Layer, Profile
from lab.settings.whole import write_atomically

KERNELS = "kernels of a step but the optimizer's, by torch.profiler:"
HEADER = [
    *("layer", "parameters"),
    *("forward ms", "of it fixed", "us per sample"),
    *("backward ms", "of it fixed", "us per sample"),
]
US_PER_MS = 1e3


def present(measured: Measurement, out: Path | None) -> None:
    """Print a table of the layers, and write the profile to `out`, or print it too.

    Raises:
        OSError: the file cannot be written.
    """
    profile = measured.profile
    print(table(profile))
    print("\n".join(["", *_notes(measured)]))
    if out is None:
        print(f"\n{profile.to_yaml()}", end="")
        return
    write_atomically(out, lambda temporary: temporary.write_text(profile.to_yaml()))
    print(f"wrote {out}")


def table(profile: Profile) -> str:
    """List the times of each layer at the reference batch, and the lines that they are on."""
    fits = {(fit.layer, fit.way): fit for fit in profile.fits}
    lines = [_line(layer, fits) for layer in profile.layers]
    parameters = sum(layer.parameters for layer in profile.layers)
    forward_ms = sum(layer.forward_ms for layer in profile.layers)
    backward_ms = sum(layer.backward_ms for layer in profile.layers)
    total = ["all", f"{parameters:,}", f"{forward_ms:.3f}", "", "", f"{backward_ms:.3f}", "", ""]
    return "\n".join(aligned([HEADER, *lines, total]))


def _line(layer: Layer, fits: dict[tuple[str, str], Fit]) -> list[str]:
    forward, backward = (_parts(fits[layer.name, way]) for way in ("forward", "backward"))
    times = (f"{layer.forward_ms:.3f}", *forward, f"{layer.backward_ms:.3f}", *backward)
    return [layer.name, f"{layer.parameters:,}", *times]


def _parts(fit: Fit) -> tuple[str, str]:
    return ranged(fit.fixed_ms), ranged(fit.per_sample_ms, US_PER_MS)


def _notes(measured: Measurement) -> list[str]:
    profile = measured.profile
    lines = []
    for fit in profile.fits:
        if (fit.layer, fit.way) in ((ALL, BOTH), (REST, STEP)):
            fixed, per_sample = _parts(fit)
            lines.append(f"{fit.layer}: {fixed} ms fixed, {per_sample} us per sample")
    for batch, step_ms in measured.steps_ms.items():
        by_lines = 1000 * (profile.compute_s(batch) + (profile.rest_s(batch) or 0.0))
        lines.append(
            f"batch {batch}: step {step_ms:.3f} ms without clocks on its layers; by the lines "
            f"{by_lines:.3f} ({100 * (by_lines / step_ms - 1):+.1f} %)"
        )
    lines.append("(rest): optimizer, data, host; [95 % intervals]")
    if measured.kernels_ms is not None:
        whole_ms = sum(layer.forward_ms + layer.backward_ms for layer in profile.layers)
        lines.append(f"layers {whole_ms:.3f} ms; {KERNELS} {measured.kernels_ms:.3f} ms")
    return lines

"""A paper's claims beside what the model predicts and what was measured: `lab.verify kim2017`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

from lab.analysis.claims import Claim, Paper
from lab.analysis.quantities import Facts, MeasuredFacts, Missing, Point
from lab.cli import report_error
from lab.config import ConfigError, choices_of, load, read_file
from lab.measure.profile import VALUE_BYTES, Profile
from lab.simulate.hardware import Hardware
from lab.simulate.step import Strategy, simulate

EXAMPLES = """examples:
  python -m lab.verify kim2017                           predicted beside published
  python -m lab.sweep study=kim2017                      measures them (root, some 30 minutes)
  python -m lab.verify kim2017 --runs runs/kim2017       measured beside both
  python -m lab.verify kim2017 --out claims.md
"""
CONV2_OPERATIONS = 2 * 96 * 27 * 27 * 5 * 5 * 256  # of one image; slide 8: C, H, W, R, S, K


class Predicted:
    """What the cost model says of a profile on some hardware."""

    def __init__(self, profile: Profile, hardware: Hardware) -> None:
        self._profile, self._hardware = profile, hardware

    def step_s(self, at: Point) -> float:
        """Seconds of a step."""
        return self._step(at)[0]

    def payload_bytes(self, at: Point) -> float:
        """What the busiest rank sends in a step."""
        return self._step(at)[1]

    def gradient_bytes(self) -> float:
        """Of the profile's model, unscaled."""
        return VALUE_BYTES * sum(layer.parameters for layer in self._profile.layers)

    def fc_share(self) -> float:
        """Of the profile's parameters, those of layers named fc."""
        sizes = {layer.name: layer.parameters for layer in self._profile.layers}
        return sum(sizes[name] for name in sizes if name.startswith("fc")) / sum(sizes.values())

    def conv2_operations(self, batch_size: int) -> float:
        """Multiplications and additions of AlexNet's second convolution, forward."""
        return CONV2_OPERATIONS * batch_size

    def _step(self, at: Point) -> tuple[float, float]:
        profile = Profile.parse(read_file("profile", at.profile)) if at.profile else self._profile
        if at.batch_size % at.world_size:
            raise Missing(f"{at.world_size} ranks cannot share a batch of {at.batch_size}")
        try:
            own = at.batch_size // at.world_size
            step = simulate(profile, self._hardware, _strategy(at.strategy), at.world_size, own)
        except ValueError as error:
            raise Missing(str(error)) from None
        return step.step_s, step.payload_bytes


@cache  # settings take longer to compose than a step to simulate
def _strategy(name: str) -> Strategy:
    return Strategy.of(load([f"strategy={name}"]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of claims.

    Returns:
        0 if no claim fails, by what was measured or else by what is predicted; 1 if one does; 2 for
        a wrong argument.
    """
    asked = _parser().parse_args(arguments)
    try:
        paper = Paper.parse(read_file("claims", asked.paper))
        predicted = Predicted(
            Profile.parse(read_file("profile", paper.profile)),
            Hardware.parse(read_file("hardware", paper.hardware)),
        )
        measured = _measured(asked.runs, paper.profile) if asked.runs else None
        lines, verdicts = _table(paper, predicted, measured)
        print("\n".join(lines))
        if asked.figures:
            _draw(asked.figures, paper, predicted, measured)
        if asked.out:
            asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except (ConfigError, ValueError, OSError) as error:
        report_error("lab.verify", error)
        return 2
    return int("fails" in verdicts)


def _measured(folder: Path, profile: str) -> MeasuredFacts:
    from lab.analysis.measured import Measured  # which takes pandas
    from lab.analysis.records import load_study

    return Measured(load_study(folder), profile)


def _draw(folder: Path, paper: Paper, predicted: Facts, measured: MeasuredFacts | None) -> None:
    from lab.analysis import figures_paper

    folder.mkdir(parents=True, exist_ok=True)
    notes = [f"{paper.title}; predicted: profile {paper.profile} on {paper.hardware}"]
    notes += [f"measured, emulated: {how}" for how in (measured.emulations() if measured else ())]
    bars = partial(figures_paper.speedup_bars, paper, predicted, measured, notes)
    wider = read_file("hardware", paper.map_hardware)
    scaled = Profile.parse(read_file("profile", paper.profile)).scaled(paper.map_bytes_scale)
    notes = [f"{paper.title}; profile {paper.profile}, {paper.map_bytes_scale:g} of its bytes, on "]
    notes[0] += f"{paper.map_hardware}, a rank each"
    predicted = Predicted(scaled, Hardware.parse(wider))
    regimes = partial(figures_paper.regime_map, paper, predicted, notes)
    for name, draw in (("speedup", bars), ("regimes", regimes)):
        figures_paper.write(draw, folder / f"{name}.png")
        print(f"wrote {folder / f'{name}.png'}")


def _table(
    paper: Paper, predicted: Facts, measured: MeasuredFacts | None
) -> tuple[list[str], list[str]]:
    """A table in Markdown, and the verdicts in it."""
    lines = [f"# {paper.title}", ""]
    lines += [
        "| claim | where | holds if | published | predicted | measured | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    verdicts = []
    for claim in paper.claims:
        values = [claim.published, claim.value(predicted), measured and claim.value(measured)]
        verdict = claim.check.verdict(values[2] if values[2] is not None else values[1])
        by = "measured" if values[2] is not None else "predicted"
        verdicts.append(verdict)
        cells = [claim.says, claim.source, f"{_what(claim)} {claim.check}", *map(_text, values)]
        lines.append(f"| {' | '.join(cells)} | {verdict} ({by}) |")
    lines += ["", f"predicted: profile {paper.profile} on {paper.hardware}"]
    if measured is None:
        lines.append(
            f"measured: nothing; python -m lab.sweep study={paper.study} (root) measures it, then "
            f"--runs runs/{paper.study}"
        )
    else:
        lines += [f"measured, emulated: {how}" for how in measured.emulations()]
    return lines, verdicts


def _what(claim: Claim) -> str:
    return claim.quantity.replace("_", " ")


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lab.verify",
        description="Check a paper's claims against predictions and measurements.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paper", choices=choices_of("claims"))
    parser.add_argument("--runs", type=Path, help="study folder with the measured cells")
    parser.add_argument("--figures", type=Path, help="folder for speedup.png and regimes.png")
    parser.add_argument("--out", type=Path, help="file to write the table to, in Markdown")
    return parser


if __name__ == "__main__":
    sys.exit(main())

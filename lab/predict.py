"""Step times on hardware that one does not have: `python -m lab.predict strategy=tree,overlap`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lab.measure.spans import Span
from lab.model.profile import Profile, replayed
from lab.settings.command_line import answer_help, report_error
from lab.settings.config import ConfigError, parse_overrides, read_file
from lab.settings.names import AXES
from lab.simulate.calibrate import calibrate
from lab.simulate.hardware import Hardware
from lab.simulate.step import Prediction, Strategy, predict
from lab.study.grid import SWEEP_SETTINGS, Cell, read

PURPOSE = """\
Predict the step time of a grid of cells. Any setting of lab.train takes a list, as in lab.sweep;
profile=... says what the model's layers cost (alexnet_titanx), and hardware.KEY=... and
profile.KEY=... change a figure of theirs. Cells of model=replay have the profile they replay."""
EXAMPLES = (
    "python -m lab.predict strategy=none,tree,overlap,onebit world_size=1,2,4 batch_size=128,256",
    "python -m lab.predict hardware=h200_nvlink_400g scaling=weak world_size=8,64,512,4096",
    "python -m lab.predict strategy=allreduce,onebit world_size=2,4 hardware=eth10g "
    "hardware.inter.beta_bytes_per_s=1e9 out=slow.json",
    "python -m lab.predict study=kim2017 hardware=emulated_1gbit fit=runs/kim2017",
    "python -m lab.predict strategy=overlap world_size=4 batch_size=512 trace=step.json",
)
DEFAULT_PROFILE = "alexnet_titanx"
OWN = {
    "hardware": ("titanx_x4", "a file of conf/hardware"),
    "fit": (
        "null",
        "runs/STUDY: fit the hardware to its cells of 1 and 2 ranks, score on others; "
        "or FILE.json of lab.bench collective or codec",
    ),
    "out": ("null", "FILE.json for the result, and its figure beside it; or FILE.png alone"),
    "trace": ("null", "FILE.json for the one cell's timeline (ui.perfetto.dev), and its figure"),
}


@dataclass(frozen=True)
class Request:
    """What a command line asks for."""

    cells: list[Cell]
    profiles: list[Profile]  # of each cell
    hardware: Hardware
    fit: Path | None
    out: Path | None
    trace: Path | None


def main(arguments: list[str]) -> int:
    """Print the table of predictions; write them to `out=`. The exit code is 2 for bad input."""
    help_settings = OWN | {key: SWEEP_SETTINGS[key] for key in ("world_size",)}
    if answer_help("lab.predict", PURPOSE, EXAMPLES, arguments, help_settings):
        return 0
    try:
        request = read_request(arguments)
        result, spans = predicted(request)
    except ConfigError as error:
        report_error("lab.predict", error)
        return 2
    # Here, not above: a wrong setting is answered before pandas and matplotlib load.
    from lab.simulate import view

    result = {"command": shlex.join(["python", "-m", "lab.predict", *arguments]), **result}
    print(view.table(result))
    written = []
    if request.out:
        written += view.write(request.out, result)
    if request.trace:
        written += view.write_timeline(request.trace, result, spans)
    if written:
        print(f"wrote {', '.join(map(str, written))}")
    return 0


def read_request(arguments: list[str]) -> Request:
    """The cells, the profile and the hardware that a command line names.

    Raises:
        ConfigError: any of its settings is wrong.
    """
    own, others = dict[str, list[str]](), list[str]()
    for override in parse_overrides(arguments):
        key = override.get_key_element()
        line = str(override.input_line)
        if key.split(".")[0] not in OWN:
            others.append(line)
        elif override.is_sweep_override():
            raise ConfigError(f"{line}: takes one value")
        else:
            own.setdefault(key.split(".")[0], []).append(line)
    paths = {key: _path(own.get(key, [])) for key in ("fit", "out", "trace")}
    _check_file("out", paths["out"], (".json", ".png"))
    _check_file("trace", paths["trace"], (".json",))
    cells = [cell for cell in read(others).cells if cell.repeat == 0]
    if paths["trace"] and len(cells) > 1:
        raise ConfigError(f"trace={paths['trace']}: takes one cell, and these are {len(cells)}")
    try:
        hardware = Hardware.parse(_hardware(own.get("hardware", [])))
        profiles = [_profile(_plain(cell.config)) for cell in cells]
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return Request(cells, profiles, hardware, **paths)


def predicted(request: Request) -> tuple[dict[str, Any], tuple[Span, ...]]:
    """The result: a row for each cell, and the hardware that they are of. Spans of the last cell.

    Raises:
        ConfigError: a strategy has no cost model, the hardware has too few ranks, or the study to
            fit to cannot be read or does not fit.
    """
    try:
        strategies = [Strategy.of(_plain(cell.config)) for cell in request.cells]
        hardware, score = request.hardware, None
        if request.fit and request.fit.suffix == ".json":
            hardware = calibrate(request.fit, hardware)
        elif request.fit:
            from lab.simulate.score import Score  # which takes pandas

            score = Score(request.fit, request.profiles[0], request.hardware)
            hardware = score.hardware
        rows, spans = [], ()
        for cell, profile, strategy in zip(
            request.cells, request.profiles, strategies, strict=True
        ):
            weak = cell.config.scaling == "weak"
            what = profile, strategy, cell.world_size, cell.config.batch_size
            found = predict(profile, hardware, *what[1:], weak)
            spans = found.step.spans
            own = _row(cell, _series(cell, request.cells), found)
            rows.append(own | (score.of(*what, weak, found.step.step_s) if score else {}))
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None
    result = {
        "rows": rows,
        "profiles": {each.name: each.gradient_bytes for each in request.profiles},
        "hardware": asdict(hardware),
        "fit": str(request.fit) if request.fit else None,
    }
    return result, spans


def _row(cell: Cell, series: str, found: Prediction) -> dict[str, Any]:
    return {
        "series": series,
        "strategy": cell.strategy,
        "world_size": cell.world_size,
        "batch_size": cell.config.batch_size,
        "scaling": cell.config.scaling,
        "step_s": found.step.step_s,
        "exposed_s": found.exposed_s,
        "speedup": found.speedup,
        "efficiency": found.efficiency,
        "payload_bytes": found.step.payload_bytes,
        "evidence": "extrapolated",
    }


def _series(cell: Cell, cells: list[Cell]) -> str:
    """The strategy, and those of its settings in which cells differ."""
    varying = [
        f"{key}={value}"
        for key, value in cell.variant.items()
        if key not in AXES and any(other.variant.get(key) != value for other in cells)
    ]
    return " ".join([cell.strategy, *varying])


def _profile(settings: Mapping[str, Any]) -> Profile:
    """What a cell's layers cost."""
    named = settings["profile"] or read_file("profile", DEFAULT_PROFILE)
    return replayed(settings) or Profile.parse(named)


def _hardware(lines: list[str]) -> Mapping[str, Any]:
    """What a file of conf/hardware holds, with `hardware.key=value` in place of its figures.

    Raises:
        ConfigError: there is no such file, or a value cannot be read.
    """
    chosen = [line.partition("=")[2] for line in lines if line.startswith("hardware=")]
    choice = chosen[-1] if chosen else OWN["hardware"][0]
    changed = [line.removeprefix("hardware.") for line in lines if line.startswith("hardware.")]
    try:
        node = OmegaConf.create(read_file("hardware", choice))
        merged = OmegaConf.merge(node, OmegaConf.from_dotlist(changed))
    except (OmegaConfBaseException, TypeError) as error:
        raise ConfigError(f"{' '.join(lines)}: {str(error).splitlines()[0]}") from None
    return _plain(merged)


def _path(lines: list[str]) -> Path | None:
    text = lines[-1].partition("=")[2] if lines else "null"
    return None if text == "null" else Path(text)


def _check_file(key: str, path: Path | None, suffixes: tuple[str, ...]) -> None:
    if path and (path.suffix not in suffixes or not path.parent.is_dir()):
        allowed = " or ".join(f"FILE{suffix}" for suffix in suffixes)
        raise ConfigError(f"{key}={path}: must name {allowed} in a folder that is there")


def _plain(node: Any) -> dict[str, Any]:
    plain = OmegaConf.to_container(node, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

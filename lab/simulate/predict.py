"""Predict a grid of cells: the command line, the source of each model's times, and the result."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lab.measure import Span
from lab.model.profile import Profile, replayed
from lab.settings.errors import ConfigError
from lab.settings.fields import fields_of, file_setting, parsed, setting, split
from lab.settings.files import read_file
from lab.settings.overrides import config_dir_of
from lab.settings.storage import escaped
from lab.simulate.collectives import read_log
from lab.simulate.costs import class_of, exchange_of, phases_of, refuse_unknown_rates
from lab.simulate.estimate import ESTIMATE, Estimate, Source, profile_on, source_of
from lab.simulate.hardware import Hardware, places, uncertainty_samples
from lab.simulate.hardware import parse as parse_hardware
from lab.simulate.ineffective import ineffective_settings, refuse_ineffective
from lab.simulate.score import (
    Group,
    ScoredCell,
    comparison,
    held_out,
    measured_steps,
    score,
    scored_cell,
)
from lab.simulate.step import Prediction, predict, simulate
from lab.simulate.strategy import Strategy, update_note
from lab.simulate.terms import LEVELS, drawn, interval, learned, residual_of
from lab.simulate.traced import KEY as TRACED
from lab.simulate.traced import Traced, read_profile
from lab.study.grid import Cell, series_of
from lab.study.grid import read as read_grid
from lab.sync.pattern import MOMENTUM, refuse

DEFAULT_PROFILE = "alexnet_titanx"
LOG = "hardware.from"  # a setting
AS_DDP = "overlap"  # a strategy: what DDP does, whose traces are read
SGD = "torch.optim.SGD"
EXTRAPOLATED = "extrapolated"  # the evidence of a cell that was not measured


@dataclass(frozen=True)
class PredictSettings:
    """The settings of lab.predict beside a grid's; hardware.KEY=... is read apart."""

    hardware: str = setting(
        "titanx_x4",
        "a file in conf/hardware; hardware.KEY=... changes one of its values, and "
        "hardware.from=LOG reads collective times from an nccl-tests or PARAM log",
    )
    fit: Path | None = setting(
        None,
        "runs/STUDY: fit the hardware to its cells on 1 and 2 ranks, and score predictions of the "
        "others; or FILE.json from lab.bench collective or codec",
    )
    measured: Path | None = setting(
        None, "runs/STUDY: compare with its cells that have these settings, without a fit"
    )
    out: Path | None = file_setting(
        "FILE.json for the result, with its figure in the same folder; or FILE.png for the "
        "figure alone",
        ".json",
        ".png",
    )
    trace: Path | None = file_setting(
        "FILE.json for the timeline of a single cell (for ui.perfetto.dev), and its figure", ".json"
    )


@dataclass(frozen=True)
class PredictRequest:
    """The cells to predict, and their hardware.

    Attributes:
        profiles: one for each cell; None: its model has none, and is estimated.
        by_default: neither a model nor a profile was given.
        traced: the trace that gave all profiles, and its own step.
        without: the hardware as it is without each value that a command line gives, by setting.
    """

    cells: list[Cell]
    profiles: list[Profile | None]
    by_default: bool
    traced: Traced | None
    hardware: Hardware
    own: PredictSettings
    without: Mapping[str, Hardware] = field(default_factory=dict[str, Hardware])


def read(arguments: Sequence[str], moving: Collection[str] = ()) -> PredictRequest:
    """Read the cells, profiles and hardware that a command line names.

    Args:
        moving: settings that change the result of the caller, but no prediction.

    Raises:
        ConfigError: a setting is wrong.
    """
    traced, others = _traced(arguments)
    texts, run = split(others, fields_of(PredictSettings))
    own = parsed(PredictSettings, texts)
    fit = own.fit
    cells = [cell for cell in read_grid([*run, "baselines=all"]).cells if cell.repeat == 0]
    if own.trace and len(cells) > 1:
        raise ConfigError(f"trace={own.trace}: needs one cell, but there are {len(cells)}")
    config_dir = config_dir_of(run)
    try:
        hardware = _machine(own.hardware, texts, config_dir)
        refuse_unknown_rates(hardware)
        profiles = [traced.profile if traced else _profile(cell) for cell in cells]
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if fit and fit.suffix != ".json" and None in profiles:
        raise ConfigError(
            f"fit={fit}: an exchange cannot be fitted if the model's times are estimated; measure "
            "them with lab.profile_layers out=FILE.yaml and give profile=FILE.yaml"
        )
    if fit and own.measured:
        raise ConfigError(
            f"fit={fit} measured={own.measured}: fit= already compares with measured cells; set "
            "only one of them"
        )
    if not (fit or own.measured):  # whose cells ran with all their settings
        moving = {*moving, *_moving(cells, profiles)}
        refuse_ineffective(run, config_dir, moving)
    by_default = not traced and not any(map(_is_given, cells))
    without = dict[str, Hardware]()
    for key in texts.keys() - {LOG}:
        rest = {other: text for other, text in texts.items() if other != key}
        with suppress(ValueError):  # the file lacks what this setting gives
            if key.startswith("hardware.") and not fit:
                without[key] = _machine(own.hardware, rest, config_dir)
    return PredictRequest(cells, profiles, by_default, traced, hardware, own, without)


def _machine(name: str, texts: Mapping[str, str], config_dir: str | None) -> Hardware:
    """Return the hardware of a file with changed values, a log, and terms that GPUs have learned.

    Raises:
        ValueError: a value is wrong.
    """
    hardware = parse_hardware(_hardware(name, texts, config_dir))
    if LOG in texts:
        hardware = _with_log(hardware, texts[LOG])
    given = {key.removeprefix("hardware.") for key in texts}
    return learned(hardware, given | ({"wire_passes"} if "contention" in given else set[str]()))


def _moving(cells: Sequence[Cell], profiles: Sequence[Profile | None]) -> set[str]:
    """Return the settings that move some predictions alone."""
    estimated = {"precision", "tf32"} if None in profiles else set[str]()
    phased = any(class_of(plain(cell.config)["exchange"]) == "Schedule" for cell in cells)
    return estimated | ({"steps"} if phased else set[str]())


def _traced(arguments: Sequence[str]) -> tuple[Traced | None, list[str]]:
    """Read the trace of `profile.from=`, if it is given, and return the other words.

    Words of `profile.KEY=` change its profile, as they change a file's.
    """
    texts, others = split(arguments, ["profile"])
    if TRACED not in texts:
        return None, list(arguments)
    path = Path(texts.pop(TRACED))
    if name := texts.get("profile"):
        raise ConfigError(f"profile={name} {TRACED}={path}: set only one of them")
    dotted = [f"{key.removeprefix('profile.')}={text}" for key, text in texts.items()]
    return read_profile(path, plain(OmegaConf.from_dotlist(dotted))), others


def _with_log(hardware: Hardware, path: str) -> Hardware:
    """Return the hardware with the collectives of a log, on as many ranks as it can have."""
    if not path:
        raise ConfigError(f"{LOG}=: must be the path of a log")
    curves = read_log(Path(path))
    most = max(curve.ranks for curve in curves)
    if most > hardware.ranks_per_node and not hardware.inter:
        raise ConfigError(
            f"{LOG}={path}: has {most} ranks; hardware={hardware.name} has a single node, with "
            f"ranks_per_node={hardware.ranks_per_node}"
        )
    return replace(hardware, measured=curves)


def plain(node: Any) -> dict[str, Any]:
    """Convert a node of settings to a dict, with references resolved."""
    container = OmegaConf.to_container(node, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _profile(cell: Cell) -> Profile | None:
    """Return the profile of a cell's layers; None if its model is given without one."""
    settings = plain(cell.config)
    if node := settings["profile"]:
        files = [word.partition("=")[2] for word in cell.arguments if word.startswith("profile=")]
        settings["profile"] = {"name": Path(files[-1]).stem, **node} if files else node
        return replayed(settings) or Profile.parse(settings["profile"])
    for word in cell.arguments:
        if word.startswith("profile=") and word not in ("profile=none", "profile=null"):
            raise ConfigError(f"{word}: the file is empty; a profile has a name, and layers")
    if _is_given(cell):
        return replayed(settings)  # refuses model=replay, which needs one
    return Profile.parse(read_file("profile", DEFAULT_PROFILE))


def _is_given(cell: Cell) -> bool:
    """Return whether a cell's settings name a model or a profile, or change one."""
    keys = (word.lstrip("+~").partition("=")[0] for word in cell.arguments)
    return any(key.partition(".")[0] in ("model", "profile") for key in keys)


def _hardware(name: str, texts: Mapping[str, str], config_dir: str | None) -> Mapping[str, Any]:
    """Read a file of conf/hardware and apply `hardware.key=value` to it."""
    changes = {key: text for key, text in texts.items() if key.startswith("hardware.")}
    changes.pop(LOG, None)
    dotted = [f"{key.removeprefix('hardware.')}={text}" for key, text in changes.items()]
    try:
        node: Any = OmegaConf.create(escaped(read_file("hardware", name, config_dir)))
        for key in changes:  # a value that is given is not assumed
            of_file = key.removeprefix("hardware.")
            assumed = node.get("assumed", {})
            is_gone = changes[key] == "null"  # as in hardware.inter=null
            for each in [*assumed]:
                if each == of_file or (is_gone and each.startswith(f"{of_file}.")):
                    assumed.pop(each)
            if key.endswith(".num_links"):  # a map replaces the file's, of other numbers of ranks
                node.get(key.split(".")[1], {}).pop("num_links", None)
        return plain(OmegaConf.merge(node, OmegaConf.from_dotlist(dotted)))
    except (OmegaConfBaseException, TypeError) as error:
        lines = " ".join(f"{key}={text}" for key, text in changes.items())
        raise ConfigError(f"{lines}: {str(error).splitlines()[0]}") from None


def predicted(request: PredictRequest) -> tuple[dict[str, Any], tuple[Span, ...]]:
    """Return the result, a row per cell and their hardware, and the spans of the last cell.

    Raises:
        ConfigError: a strategy has no cost model, the hardware has too few ranks, or the study to
            fit to cannot be read or does not fit.
    """
    try:
        return _predicted(request)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None


def _predicted(request: PredictRequest) -> tuple[dict[str, Any], tuple[Span, ...]]:
    sources = zip(request.cells, sources_of(request), strict=True)
    points = [(cell, source, strategy_of(request, cell, source)) for cell, source in sources]
    names = series_of(request.cells)
    own, groups = request.own, groups_of(request)
    known: dict[str, Profile] = {}
    rows, scores, updates, spans = [], [], dict[str, None](), ()
    for group in groups:
        scored = []
        for name, (cell, source, strategy) in zip(names, points, strict=True):
            profile = profile_on(source, group.hardware)
            known[profile.name] = profile
            updates[note_of_update(cell, source, strategy, group.hardware)] = None
            prediction, row = _predict(group, cell, source, strategy)
            observed = group.observed(profile, strategy, cell.world_size, _per_rank(cell))
            scored += [scored_cell(group, observed)] if observed else []
            series = " ".join([name, *group.conditions.split()])
            rows.append({"series": series, **row, **_measured(scored[-1] if observed else None)})
            rows[-1].update(_of_trace(request.traced, cell, prediction))
            spans = prediction.step.spans
        found = score(held_out(scored))
        scores.append({"conditions": group.conditions, **asdict(found), "text": str(found)})
    result = {
        "rows": rows,
        "profiles": {name: profile.gradient_bytes for name, profile in known.items()},
        "open_profiles": [name for name, profile in known.items() if profile.is_open],
        "sources": {name: profile.source for name, profile in known.items()},
        "updates": [*filter(None, updates)],
        "idle": unread(request) + _ineffective(request, points, [row["step_s"] for row in rows]),
        "by_default": request.by_default,
        "logs": [f"from the log: {curve}" for curve in request.hardware.measured]
        + [f"from the trace: {traced}" for traced in (request.traced,) if traced],
        "hardware": [{"conditions": g.conditions, **asdict(g.hardware)} for g in groups],
        "scores": scores,
        "fit": str(own.fit) if own.fit else None,
        "measured": str(own.measured) if own.measured else None,
    }
    if own.measured:
        steps = measured_steps(own.measured, request.cells)
        for row, seconds in zip(rows, steps, strict=True):
            row.update(comparison(seconds, row["step_s"]) if seconds else {})
    return result, spans


def unread(request: PredictRequest) -> list[str]:
    """List the settings of models, data and machines that are typed in vain beside profiles."""
    if None in request.profiles or request.own.fit or request.own.measured:
        return []
    idle = ineffective_settings(word for cell in request.cells for word in cell.arguments)
    replays = idle and any(replayed(plain(cell.config)) for cell in request.cells)
    return [] if replays else idle


def _ineffective(
    request: PredictRequest,
    points: Sequence[tuple[Cell, Source, Strategy]],
    steps_s: Sequence[float],
) -> list[str]:
    """List the values of hardware that a command line gives, and that move no step."""

    def step_s(hardware: Hardware, cell: Cell, source: Source, strategy: Strategy) -> float:
        point = strategy, cell.world_size, _per_rank(cell)
        return simulate(profile_on(source, hardware), hardware, *point).step_s

    idle = list[str]()
    for key, hardware in sorted(request.without.items()):
        with suppress(ValueError):  # without it, some cell cannot be predicted
            others = [step_s(hardware, *point) for point in points]
            idle += [key] if others == [*steps_s] else []
    return idle


def sources_of(request: PredictRequest) -> list[Source]:
    """Return the source of each cell's times."""
    return [
        source_of(cell.config, profile, (_per_rank(cell), cell.batch_size))
        for cell, profile in zip(request.cells, request.profiles, strict=True)
    ]


def strategy_of(request: PredictRequest, cell: Cell, source: Source) -> Strategy:
    """Read a cell's strategy.

    What is counted includes the transform, which a profile cannot; and a trace the update.
    """
    counted = {"transform": {}} if isinstance(source, Estimate) else {}
    strategy = Strategy.of({**plain(cell.config), **counted})
    refuse_impossible(cell, strategy)
    if strategy.update is None and isinstance(source, Estimate):
        raise ConfigError(
            f"optim={cell.config.optim['_target_']}: its step cannot be counted, because it does "
            "not run on a small matrix alone; leave optim= out, or give profile= of a measured step"
        )
    return replace(strategy, update=MOMENTUM) if request.traced else strategy


def note_of_update(cell: Cell, source: Source, strategy: Strategy, hardware: Hardware) -> str:
    """Say how an optimizer other than SGD counts beside measured times; empty: there is none."""
    if isinstance(source, Estimate):
        return ""
    optim, profile = cell.config.optim["_target_"], profile_on(source, hardware)
    return update_note(optim, profile, hardware, strategy)


def refuse_impossible(cell: Cell, strategy: Strategy) -> None:
    """Refuse a cell that lab.train would refuse, or with an idle exchange. ValueError: says why."""
    # Imported here, with torch: a wrong setting is answered before.
    from lab.sync.refusals import (
        refuse_exchange,
        refuse_optimizer,
        require_elementwise,
        require_piecewise,
    )
    from lab.sync.update import maker_of

    optim, pattern = cell.config.optim, strategy.pattern
    refuse(pattern, cell.config.overlap, cell.config.precision)
    if pattern.by_library and (name := class_of(plain(cell.config)["exchange"])) != "NoExchange":
        raise ValueError(
            f"exchange={name}: strategy={cell.strategy} has its own exchange; leave exchange=none, "
            "or set sync.reduce_scatter=lab"
        )
    settings = plain(cell.config)
    momentum = optim.get("momentum", 0.0) if optim["_target_"] == SGD else None
    for _, way in phases_of(strategy.exchange):
        exchange = exchange_of(way)
        refuse_exchange(pattern, exchange)
        refuse_optimizer(pattern, exchange.delivers, settings, momentum)
    if not (strategy.update and (make := maker_of(settings["optim"]))):
        return
    if why := pattern.only_elementwise:
        require_elementwise(optim["_target_"], why, lambda weights: make(weights.parameters()))
    if pattern.waits_in_forward:
        require_piecewise(settings, lambda weights: make(weights.parameters()))


def groups_of(request: PredictRequest) -> tuple[Group, ...]:
    """Return the hardware to predict on: as its file says, or fitted."""
    hardware = request.hardware
    if fit := request.own.fit:
        from lab.simulate.fit import fit_result, fitted_groups  # imports pandas

        try:
            if fit.suffix != ".json":
                assert request.profiles[0]  # or the request would have been refused
                groups = fitted_groups(fit, request.profiles[0], hardware)
                return tuple(replace(each, draws=tuple(drawn(each.draws))) for each in groups)
            hardware = fit_result(fit, hardware)
        except (ValueError, OSError) as error:
            why = str(error).removeprefix(f"fit={fit}: ").removeprefix(f"{fit}: ")
            raise ConfigError(f"fit={fit}: {why}") from None
    return (Group("", (), hardware, tuple(drawn(uncertainty_samples(hardware))), fitted=False),)


def machines(group: Group, source: Source) -> list[tuple[Profile, Hardware]]:
    """Return a group's hardware, then each of its draws, with the profile that holds on it."""
    drawn = zip(places(len(group.draws)), group.draws, strict=True)
    return [
        (profile_on(source, group.hardware), group.hardware),
        *((profile_on(source, each).drawn(place), each) for place, each in drawn),
    ]


def _predict(
    group: Group, cell: Cell, source: Source, strategy: Strategy
) -> tuple[Prediction, dict[str, Any]]:
    """Predict a cell, and what the hardware's open values make of it."""
    point = strategy, cell.world_size, cell.batch_size, cell.config.scaling == "weak"
    every = [predict(*machine, *point) for machine in machines(group, source)]
    prediction = every[0]
    across_bytes = prediction.step.across_bytes
    residual = residual_of(group.hardware, strategy, cell.world_size)
    steps = [each.step.step_s for each in every]
    exposed = sorted(each.exposed_s for each in every)
    return prediction, {
        "conditions": group.conditions,
        "basis": "profile" if isinstance(source, Profile) else ESTIMATE,
        "strategy": cell.strategy,
        "world_size": cell.world_size,
        "batch_size": cell.batch_size,
        "per_rank_batch_size": _per_rank(cell),
        "scaling": cell.config.scaling,
        "step_s": prediction.step.step_s,
        **intervals("step_s", steps, residual),
        "exposed_s": prediction.exposed_s,
        "exposed_s_interval": (exposed[0], exposed[-1]),
        "speedup": prediction.speedup,
        **intervals("speedup", [each.speedup for each in every], residual),
        "efficiency": prediction.efficiency,
        "payload_bytes": prediction.step.payload_bytes,
        "across_bytes": None if math.isnan(across_bytes) else across_bytes,
    }


def intervals(key: str, values: Sequence[float], residual: float | None) -> dict[str, Any]:
    """Return the columns of a value's intervals.

    Args:
        values: as predicted, and with drawn values of what is open.
        residual: what remains beside these; None: nothing is known of it, and all draws are inside.
    """
    if residual is None:
        return {f"{key}_interval": (min(values), max(values))}
    point, *others = values
    wide, narrow = (tuple(interval(point, others, residual, level)) for level in LEVELS[::-1])
    return {f"{key}_interval": wide, f"{key}_interval_80": narrow}


def _measured(scored: ScoredCell | None) -> dict[str, Any]:
    """Return what was measured of a cell, and the errors of its prediction."""
    if scored is None:
        return {"evidence": EXTRAPOLATED}
    exposed_s, _ = scored.exposed_s
    return {
        "measured_s": median(scored.measured_s),
        "error": scored.error,
        "measured_exposed_s": exposed_s,
        "exposed_error": scored.exposed_error,
        "evidence": scored.evidence,
    }


def _of_trace(traced: Traced | None, cell: Cell, prediction: Prediction) -> dict[str, Any]:
    """Return what a trace measured, of a cell that does what it did."""
    point = cell.strategy, cell.world_size, _per_rank(cell)
    if not traced or point != (AS_DDP, traced.num_ranks, traced.profile.reference_batch):
        return {}
    exposed_s = traced.step.exposed_s
    return {
        **comparison([traced.step.step_s], prediction.step.step_s),
        "measured_exposed_s": exposed_s,
        **({"exposed_error": prediction.exposed_s / exposed_s - 1} if exposed_s else {}),
    }


def _per_rank(cell: Cell) -> int:
    return cell.batch_size // cell.world_size

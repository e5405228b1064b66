"""Fit hardware to measurements: to a study's cells of one and two ranks, or to a benchmark.

A study's cells are divided by machine and links, each group of which gets hardware of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lab.analysis.records import RecordedCell, load_study
from lab.cluster.settings import Cluster, bits_per_s, emulated
from lab.model.profile import VALUE_BYTES, Profile, replayed
from lab.record.run_directory import SETTINGS, read_settings
from lab.settings.config import choices_of, load
from lab.settings.overrides import own_choices
from lab.settings.storage import read_json
from lab.simulate.costs import exchange_of, longest_phase, stages_of
from lab.simulate.hardware import CODEC_RATES, DRAWS, LINK, Hardware, with_value
from lab.simulate.hardware import uncertainty_samples as draws_of
from lab.simulate.network import Network
from lab.simulate.score import LARGEST_FITTED, Group, Observation, used_by_fit
from lab.simulate.step import stages_of_step
from lab.simulate.strategy import Strategy
from lab.simulate.terms import as_fitted

MOST_APART = 0.01  # relative difference in parameters; beyond it model or bytes_scale differ
OUTLIER = 0.01  # residuals beyond it weigh less: no codec should bend what all cells share
PRIOR = 1e-3  # pulls values that the cells do not determine towards the preset
FARTHEST = 10.0  # of a logarithm from its start: a wild step must not make a rate of zero
# Start of the search where the preset has 0, because the search multiplies.
START = {
    "latency_s": 1e-4,
    "contention": 0.05,
    "overhead_s": 1e-4,
    "overhead_s_per_rank": 1e-3,
    "crowding": 0.05,
    "codec_s": 1e-4,
    "jitter": 0.01,
    "input_samples_per_s": 1e4,
}
NAMES = ("reduce_bytes_per_s", "contention", "overhead_s", "crowding", "codec_s")
# Of the terms that GPUs have learned, those of which two ranks tell; `wire_passes` slows compute as
# `contention` does, of which one is enough.
OF_GPUS = {"engage", "wire_passes"}
MEASURED_CODEC = "onebit"  # codec_bytes_per_s is the rate of this codec


def fit(
    preset: Hardware,
    cells: Sequence[Observation],
    prior: float = PRIOR,
    before: Group | None = None,
) -> tuple[Hardware, tuple[Hardware, ...]]:
    """Fit the hardware to cells of at most two ranks.

    Least squares of predicted - measured over the logarithms of the values in NAMES that the preset
    has, of the link that joins the first two ranks, and of OF_GPUS those that are learned.

    Args:
        prior: share of a step by which a prediction may miss before a value of the preset changes
            by a factor of e.
        before: an earlier fit, to other cells of the same hosts, whose values the preset has: the
            surer it was of one, the more it takes to change it.

    Returns:
        The best, and draws from the values that fit as well.

    Raises:
        ValueError: there is no cell of two ranks.
    """
    used = used_by_fit(cells)
    if not any(cell.world_size == LARGEST_FITTED for cell in used):
        raise ValueError(
            "there is no finished throughput run on 2 ranks that the cost model can predict"
        )
    measured = np.array([cell.step_s for cell in used])
    typical = np.median(measured)
    told = OF_GPUS & {*preset.learned.keys} if preset.learned else set[str]()
    names = {*NAMES, *told} - ({"contention"} if "wire_passes" in told else set[str]())
    keys = [*link_keys(preset), *(key for key in (*NAMES, *sorted(told)) if key in names)]
    keys = [key for key in keys if get(preset, key) is not None]
    keys += sorted(f"{CODEC_RATES}.{name}" for name in _codecs(used, preset))

    def errors(hardware: Hardware) -> np.ndarray:
        return ([cell.predicted_s(hardware) for cell in used] - measured) / typical

    best, covariance = _search(preset, keys, errors, _weights(keys, before, prior))
    chance = np.random.default_rng(0)
    drawn = chance.multivariate_normal(best, covariance, DRAWS, method="eigh")
    drawn = np.clip(drawn, best - 1, best + 1)  # at most a factor of e away
    known = as_fitted(preset, keys)
    return with_values(known, keys, np.exp(best)), tuple(
        with_values(machine, keys, np.exp(x))
        for machine, x in zip(draws_of(known), drawn, strict=True)
    )


def _weights(keys: Sequence[str], before: Group | None, prior: float) -> np.ndarray:
    """Return the prior of each value, as `fit` has it; of one that is known from `before`, an error
    as large as that fit's weighs as much as a change by the value's standard deviation there.
    """
    weights = np.full(len(keys), prior)
    if before is None:
        return weights
    used = used_by_fit(before.observations)
    missed = np.std([cell.predicted_s(before.hardware) / cell.step_s - 1 for cell in used])
    known = {*NAMES, *(f"{CODEC_RATES}.{name}" for name, _ in before.hardware.codec_rates)}
    for place, key in enumerate(keys):
        if key in known:
            spread = np.std([np.log(get(machine, key) or 1.0) for machine in before.draws])
            weights[place] = max(prior, missed / spread) if spread else prior
    return weights


def _codecs(cells: Iterable[Observation], hardware: Hardware) -> set[str]:
    """Name the codecs of cells that delay backward, one of each level of an exchange."""
    return {
        stage.codec
        for cell in cells
        if exchange_of(cell.strategy.exchange).staged
        for stage in stages_of_step(cell.profile, cell.strategy, Network(hardware, cell.world_size))
        if stage.codec
    }


def get(hardware: Hardware, key: str) -> float | None:
    """Return the value of a dotted key; None: this hardware has no such limit."""
    way, _, name = key.rpartition(".")
    if way == CODEC_RATES:
        return hardware.codec_rate(name)
    return getattr(getattr(hardware, way) if way else hardware, name)


def with_values(hardware: Hardware, keys: Sequence[str], values: Iterable[float]) -> Hardware:
    """Return the hardware with new values of dotted keys."""
    for key, value in zip(keys, values, strict=True):
        hardware = with_value(hardware, key, float(value))
    return replace(hardware, codec_rates=tuple(sorted(hardware.codec_rates)))


def link_keys(hardware: Hardware, world_size: int = 2) -> list[str]:
    """Return the keys of the slowest link among the first ranks."""
    way = "intra" if hardware.ranks_per_node >= world_size else "inter"
    return [f"{way}.{name}" for name in LINK]


def _search(
    preset: Hardware,
    keys: Sequence[str],
    errors: Callable[[Hardware], np.ndarray],
    prior: float | np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Find the logarithms of values by least squares of `errors`, and their covariance.

    Args:
        keys: of the values, as `get` takes them.
        prior: an error that weighs as much as a change of a preset's value by a factor of e; one
            for all values, or for each its own.
    """
    start = np.log([get(preset, key) or START[key.rpartition(".")[2]] for key in keys])

    def residuals(x: np.ndarray) -> np.ndarray:
        near = np.exp(np.clip(x, start - FARTHEST, start + FARTHEST))
        return np.concatenate([errors(with_values(preset, keys, near)), prior * (x - start)])

    return least_squares(residuals, start)


def least_squares(
    residuals: Callable[[np.ndarray], np.ndarray], x: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Find the least sum of squares near `x` [n].

    Returns:
        x, and its covariance [n, n], as far as the residuals determine it.
    """
    from scipy import optimize  # takes half a second to import, which only fits need

    found = optimize.least_squares(residuals, x, x_scale="jac", loss="soft_l1", f_scale=OUTLIER)
    freedom = max(1, len(found.fun) - 2 * len(x))  # a residual of each value is its prior
    variance = 2 * found.cost / freedom
    return found.x, variance * np.linalg.pinv(found.jac.T @ found.jac)


def fit_result(path: Path, preset: Hardware) -> Hardware:
    """Replace the preset's figures by those that a result of lab.bench contains.

    Raises:
        ValueError: the file is not a result about links or codecs. Values that were fitted before
            are none: rates of codecs hold for the costs of their time alone.
        OSError: the file cannot be read.
    """
    try:
        result = read_json(path)
        if "hardware" in result:
            raise ValueError(
                f"fit={path}: its hardware was fitted with the cost model of an earlier version; "
                "give the measured study, runs/STUDY, to fit it again"
            )
        fit = {"collective": _links, "codec": _codec}[result["bench"]]
        return fit(result, preset)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"fit={path}: must be a study, or a result of lab.bench collective or codec: "
            f"{type(error).__name__}: {error}"
        ) from None


def _links(result: Mapping[str, Any], preset: Hardware) -> Hardware:
    """Fit latency and bandwidth of the slowest links that the ranks used, to all sizes."""
    known = [row for row in result["rows"] if row["algorithm"] in choices_of("exchange")]
    names = {row["algorithm"] for row in known}
    exchanges = {name: load(own_choices([f"exchange={name}"])).exchange for name in names}
    size = result["world_size"]
    keys = link_keys(preset, size)
    return as_fitted(fit_collectives(known, exchanges, size, preset, keys)[0], keys)


def fit_collectives(
    rows: Sequence[Mapping[str, Any]],
    exchanges: Mapping[str, Mapping[str, Any]],
    world_size: int,
    preset: Hardware,
    keys: Sequence[str],
) -> tuple[Hardware, dict[str, float]]:
    """Fit values of the hardware to rows of lab.bench collective.

    Least squares of the logarithm of predicted / measured, because sizes span orders of magnitude.

    Args:
        exchanges: settings of each row's algorithm; of SEND_RECV there are none.
        keys: of the values, as `get` takes them.

    Returns:
        The best, and the standard deviation of the logarithm of each value, by key.
    """
    measured = np.log([row["time_s"]["median"] for row in rows])

    def errors(hardware: Hardware) -> np.ndarray:
        network = Network(hardware, world_size)
        predicted = [collective_s(row, exchanges.get(row["algorithm"]), network) for row in rows]
        return np.log(predicted) - measured

    best, covariance = _search(preset, keys, errors, PRIOR)
    spread = np.sqrt(np.diag(covariance)).tolist()
    return with_values(preset, keys, np.exp(best)), dict(zip(keys, spread, strict=True))


def collective_s(
    row: Mapping[str, Any], exchange: Mapping[str, Any] | None, network: Network
) -> float:
    """Predict the seconds of a row of lab.bench collective.

    Args:
        exchange: settings of its algorithm; None: a plain send, which adds nothing.
    """
    if exchange is None:
        return network.slowest.seconds(row["size_bytes"])
    shape = tuple(row.get("shape", (row["size_bytes"] // VALUE_BYTES,)))
    return sum(stage.seconds for stage in stages_of([shape], exchange, network))


def _codec(result: Mapping[str, Any], preset: Hardware) -> Hardware:
    """Set codec_bytes_per_s: bytes of memory that encoding and decoding move, over their time."""
    rows = [row for row in result["rows"] if row["codec"] == MEASURED_CODEC]
    rate = sum(row["bytes"] for row in rows) / sum(row["time_s"]["median"] for row in rows)
    return as_fitted(replace(preset, codec_bytes_per_s=rate), ["codec_bytes_per_s"])


def fitted_groups(folder: Path, profile: Profile, preset: Hardware) -> tuple[Group, ...]:
    """Divide a study's cells by machine and links, and fit the hardware to each group.

    A group without cells of two ranks is predicted from the one that has some: over its own links,
    as the settings of its emulated cluster tell.

    Args:
        profile: of cells with a real model; cells of model=replay name their own profile.

    Raises:
        ValueError: the study cannot be read, is of another model, or a group has no cell of two
            ranks and nothing to be predicted from.
    """
    cells: dict[str, list[RecordedCell]] = {}
    for cell in load_study(folder).cells:
        timed = cell.status == "done" and cell.measure == "throughput"
        if timed and not math.isnan(cell.step_s):
            cells.setdefault(cell.circumstances, []).append(cell)
    try:
        if not cells:
            raise ValueError("there is no finished throughput run")
        return _groups({name: cells[name] for name in sorted(cells)}, profile, preset)
    except ValueError as error:
        raise ValueError(f"fit={folder}: {error}") from None
    except KeyError as key:
        raise ValueError(
            f"fit={folder}: a cell's settings lack {key}, because an earlier version measured "
            "it; measure it again"
        ) from None


def _groups(
    cells: dict[str, list[RecordedCell]], profile: Profile, preset: Hardware
) -> tuple[Group, ...]:
    fitted = [
        name
        for name, group in cells.items()
        if any(cell.world_size == LARGEST_FITTED for cell in group)
    ]
    groups = dict[str, Group]()
    for name in sorted(fitted or cells, key=lambda name: _ranks_per_host(cells[name])):
        others = [(groups[g], cells[g]) for g in groups]
        start, before = _with_hosts(preset, cells[name], others)
        groups[name] = _fitted(name, cells[name], profile, start, before)
    for name in cells.keys() - groups.keys():
        alike = [g for g in fitted if _ranks_per_host(cells[g]) == _ranks_per_host(cells[name])]
        if len(alike) != 1:
            raise ValueError(
                f"{name}: has no cell on 2 ranks, so it needs exactly one other group with such "
                f"cells and the same number of ranks per host; there are {len(alike)}"
            )
        (source,) = alike
        groups[name] = _transferred(name, cells[name], groups[source], cells[source], profile)
    return tuple(groups[name] for name in cells)


def _with_hosts(
    preset: Hardware, cells: list[RecordedCell], others: Sequence[tuple[Group, list[RecordedCell]]]
) -> tuple[Hardware, Group | None]:
    """Return what a fit starts from, with as many ranks on a node as the cells have on a host, and
    the fit that told its values, if one did.

    Of several on a host, two ranks tell the links within it alone. Those between hosts are known
    from a group with one rank on each, or else as the preset says.
    """
    local = _ranks_per_host(cells)
    if local == 1 or preset.ranks_per_node > 1:
        return preset, None
    if preset.intra is None:
        raise ValueError(
            f"cluster.ranks_per_host={local}: hardware={preset.name} has no intra link"
        )
    start, before = preset, None
    if known := next((pair for pair in others if _ranks_per_host(pair[1]) == 1), None):
        start = over_links(known[0].hardware, _cluster(known[1]), _cluster(cells))
        before = known[0]
    start = replace(start, ranks_per_node=local, intra=preset.intra, assumed=preset.assumed)
    return start, before


def _fitted(
    name: str,
    cells: list[RecordedCell],
    profile: Profile,
    preset: Hardware,
    before: Group | None,
) -> Group:
    observations = _observations(cells, profile)
    num_cores = [c.environment["num_cores"] for c in cells if "num_cores" in c.environment]
    if preset.num_cores and num_cores:  # emulated, on the machine on which these cells ran
        preset = replace(preset, num_cores=min(num_cores))
    try:
        return Group(name, tuple(observations), *fit(preset, observations, before=before))
    except ValueError as error:
        raise ValueError(f"{name}: {error}" if name else str(error)) from None


def _transferred(
    name: str,
    cells: list[RecordedCell],
    source: Group,
    source_cells: list[RecordedCell],
    profile: Profile,
) -> Group:
    """Predict a group's cells from hardware that was fitted to others."""
    machines = (source.hardware, *source.draws)
    try:
        clusters = _cluster(source_cells), _cluster(cells)
        best, *moved = [over_links(machine, *clusters) for machine in machines]
    except ValueError as error:
        raise ValueError(
            f"{name}: has no cell on 2 ranks, and the fit of another group cannot be used ({error})"
        ) from None
    return Group(name, tuple(_observations(cells, profile)), best, tuple(moved), fitted=False)


def _ranks_per_host(cells: list[RecordedCell]) -> int:
    """Return the ranks on each host of an emulated cluster; 1 without one."""
    return _cluster_settings(cells[0]).get("ranks_per_host", 1)


def _cluster(cells: list[RecordedCell]) -> Cluster:
    """Return the emulated cluster of the cell of most ranks. ValueError: there is none."""
    cell = max(cells, key=lambda cell: cell.world_size)
    settings = _cluster_settings(cell)
    if not settings:
        raise ValueError("the cells did not run on an emulated cluster")
    try:  # not `build`, which would call whatever a stranger's file names
        return emulated(**settings, world_size=cell.world_size)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{cell.folder / SETTINGS}: cluster: {error}") from None


def _cluster_settings(cell: RecordedCell) -> dict[str, Any]:
    found = read_settings(cell.folder).get("cluster")
    if not isinstance(found, dict):
        return {}
    settings = {key: value for key, value in found.items() if key != "_target_"}
    # Earlier versions recorded a factor without a slow host, too.
    return settings if settings.get("slow_host") else {**settings, "slow_factor": None}


def _observations(cells: list[RecordedCell], profile: Profile) -> list[Observation]:
    """Collect the cells whose strategy has a cost model; others cannot be scored."""
    alike: dict[str, Observation] = {}
    for cell in cells:
        settings = read_settings(cell.folder)
        try:
            strategy = Strategy.of(settings)
        except ValueError:
            continue
        except (KeyError, TypeError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"{cell.folder / SETTINGS} does not contain the settings of a run: {why}"
            ) from None
        replay = replayed(settings)
        if not replay:
            _check_model(cell, profile)
        strategy = replace(strategy, exchange=longest_phase(strategy.exchange))
        point = cell.world_size, cell.per_rank_batch_size
        found = Observation(cell.strategy, replay or profile, strategy, *point, ())
        steps_s = *alike.get(repr(found), found).steps_s, cell.step_s
        alike[repr(found)] = replace(found, steps_s=steps_s)
    return [*alike.values()]


def _check_model(cell: RecordedCell, profile: Profile) -> None:
    num_parameters = profile.gradient_bytes / VALUE_BYTES
    if abs(cell.num_parameters / num_parameters - 1) > MOST_APART:
        raise ValueError(
            f"{cell.name} has {cell.num_parameters:.0f} parameters, but profile={profile.name} has "
            f"{num_parameters:.0f}; give the profile of the cell's model, or "
            f"profile.bytes_scale={profile.bytes_scale * cell.num_parameters / num_parameters:.4g}"
        )


def over_links(hardware: Hardware, fitted: Cluster, other: Cluster) -> Hardware:
    """Return hardware that was fitted to cells of one cluster as it is on another.

    Links reach the same share of their nominal rate, and a delay adds to their latency.

    Raises:
        ValueError: links without a rate, that lose packets or that change have no cost model.
    """
    assert hardware.inter is not None  # emulated hosts are nodes
    if None in (*fitted.rates, *other.rates) or len(set(fitted.rates)) > 1:
        raise ValueError(
            "cluster.rates: every link needs a rate; all links of the fitted cells must have the "
            "same rate"
        )
    if other.loss_percent or other.changes:
        raise ValueError("cluster.loss_percent, cluster.changes have no cost model")
    nominal = bits_per_s(str(fitted.rates[0]))
    carried = hardware.inter.bandwidth_bytes_per_s / nominal
    rates = tuple(carried * bits_per_s(str(rate)) for rate in other.rates)
    slow = other.slow_host is not None
    return replace(
        hardware,
        inter=replace(
            hardware.inter,
            bandwidth_bytes_per_s=min(rates),
            latency_s=hardware.inter.latency_s + (other.delay_ms - fitted.delay_ms) / 1000,
        ),
        node_rates=rates if len(set(rates)) > 1 else (),
        num_slow=other.ranks_per_host if slow else 0,
        slow_factor=other.slow_factor if slow else 1.0,
    )

"""Read a study's measurements: cells that share machine and links, and hardware for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.analysis.records import Cell, load_study
from lab.cluster.settings import Cluster, bits_per_s, emulated
from lab.model.profile import VALUE_BYTES, Profile, replayed
from lab.record.run_directory import SETTINGS, read_settings
from lab.simulate.costs import longest_phase
from lab.simulate.fit import LARGEST_FITTED, Group, Observation, fit
from lab.simulate.hardware import Hardware
from lab.simulate.strategy import Strategy

MOST_APART = 0.01  # relative difference in parameters; beyond it model or bytes_scale differ


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
    cells: dict[str, list[Cell]] = {}
    for cell in load_study(folder).cells:
        timed = cell.status == "done" and cell.measure == "throughput"
        if timed and not math.isnan(cell.step_s):
            cells.setdefault(cell.circumstances, []).append(cell)
    try:
        if not cells:
            raise ValueError("no finished throughput run")
        return _groups({name: cells[name] for name in sorted(cells)}, profile, preset)
    except ValueError as error:
        raise ValueError(f"fit={folder}: {error}") from None
    except KeyError as key:
        raise ValueError(
            f"fit={folder}: settings of a cell lack {key}, as it was measured by an earlier "
            "version; measure it anew"
        ) from None


def _groups(cells: dict[str, list[Cell]], profile: Profile, preset: Hardware) -> tuple[Group, ...]:
    fitted = [
        name
        for name, group in cells.items()
        if any(cell.world_size == LARGEST_FITTED for cell in group)
    ]
    groups = dict[str, Group]()
    for name in sorted(fitted or cells, key=lambda name: _ranks_per_host(cells[name])):
        start = _with_hosts(preset, cells[name], [(groups[g], cells[g]) for g in groups])
        groups[name] = _fitted(name, cells[name], profile, start)
    for name in cells.keys() - groups.keys():
        alike = [g for g in fitted if _ranks_per_host(cells[g]) == _ranks_per_host(cells[name])]
        if len(alike) != 1:
            raise ValueError(
                f"{name}: no cell of two ranks, and {len(alike)} groups with as many ranks on a "
                "host have some"
            )
        (source,) = alike
        groups[name] = _transferred(name, cells[name], groups[source], cells[source], profile)
    return tuple(groups[name] for name in cells)


def _with_hosts(
    preset: Hardware, cells: list[Cell], others: Sequence[tuple[Group, list[Cell]]]
) -> Hardware:
    """Return what a fit starts from, with as many ranks on a node as the cells have on a host.

    Of several on a host, two ranks tell the links within it alone. Those between hosts are known
    from a group with one rank on each, or else as the preset says.

    Raises:
        ValueError: the preset has no links inside nodes.
    """
    local = _ranks_per_host(cells)
    if local == 1 or preset.ranks_per_node > 1:
        return preset
    if preset.intra is None:
        raise ValueError(f"cluster.ranks_per_host={local}: hardware={preset.name} has no intra")
    known = next((pair for pair in others if _ranks_per_host(pair[1]) == 1), None)
    start = _moved(known[0].hardware, known[1], cells) if known else preset
    return replace(start, ranks_per_node=local, intra=preset.intra, assumed=preset.assumed)


def _fitted(name: str, cells: list[Cell], profile: Profile, preset: Hardware) -> Group:
    observations = _observations(cells, profile)
    num_cores = [c.environment["num_cores"] for c in cells if "num_cores" in c.environment]
    if preset.num_cores and num_cores:  # emulated, on the machine on which these cells ran
        preset = replace(preset, num_cores=min(num_cores))
    try:
        found = fit(preset, observations)
    except ValueError as error:
        raise ValueError(f"{name}: {error}" if name else str(error)) from None
    return Group(name, tuple(observations), found.hardware, found.draws)


def _transferred(
    name: str, cells: list[Cell], source: Group, source_cells: list[Cell], profile: Profile
) -> Group:
    """Predict a group's cells from hardware that was fitted to others."""
    machines = (source.hardware, *source.draws)
    try:
        moved = [_moved(machine, source_cells, cells) for machine in machines]
    except ValueError as error:
        raise ValueError(f"{name}: no cell of two ranks, and {error}") from None
    observations = tuple(_observations(cells, profile))
    return Group(name, observations, moved[0], tuple(moved[1:]), fitted=False)


def _moved(hardware: Hardware, fitted: list[Cell], other: list[Cell]) -> Hardware:
    """Return hardware that was fitted to some cells with the links of others.

    Raises:
        ValueError: no cluster was emulated, or one without a cost model.
    """
    clusters = [_cluster(max(cells, key=lambda cell: cell.world_size)) for cells in (fitted, other)]
    if None in clusters:
        raise ValueError("no emulated cluster")
    return over_links(hardware, *filter(None, clusters))


def _ranks_per_host(cells: list[Cell]) -> int:
    """Return the ranks on each host of an emulated cluster; 1 without one."""
    return _cluster_settings(cells[0]).get("ranks_per_host", 1)


def _cluster(cell: Cell) -> Cluster | None:
    """Return the emulated cluster on which a cell ran."""
    settings = _cluster_settings(cell)
    if not settings:
        return None
    try:  # not `build`, which would call whatever a stranger's file names
        return emulated(**settings, world_size=cell.world_size)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{cell.folder / SETTINGS}: cluster: {error}") from None


def _cluster_settings(cell: Cell) -> dict[str, Any]:
    found = read_settings(cell.folder).get("cluster")
    return {k: v for k, v in found.items() if k != "_target_"} if isinstance(found, dict) else {}


def _observations(cells: list[Cell], profile: Profile) -> list[Observation]:
    """Collect the cells whose strategy has a cost model; others cannot be scored."""
    alike: dict[str, list[Observation]] = {}
    for cell in cells:
        observation = _observation(cell, profile)
        if observation:
            alike.setdefault(repr(replace(observation, steps_s=())), []).append(observation)
    return [
        replace(same[0], steps_s=tuple(time for each in same for time in each.steps_s))
        for same in alike.values()
    ]


def _observation(cell: Cell, profile: Profile) -> Observation | None:
    settings = read_settings(cell.folder)
    try:
        strategy = Strategy.of(settings)
    except ValueError:
        return None
    except (KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{cell.folder / SETTINGS}: holds no run's settings: {why}") from None
    replay = replayed(settings)
    if not replay:
        _check_model(cell, profile)
    return Observation(
        cell.strategy,
        replay or profile,
        replace(strategy, exchange=longest_phase(strategy.exchange)),
        cell.world_size,
        cell.per_rank_batch_size,
        (cell.step_s,),
    )


def _check_model(cell: Cell, profile: Profile) -> None:
    num_parameters = profile.gradient_bytes / VALUE_BYTES
    if abs(cell.num_parameters / num_parameters - 1) > MOST_APART:
        raise ValueError(
            f"{cell.name} has {cell.num_parameters:.0f} parameters, profile="
            f"{profile.name} {num_parameters:.0f}; give its profile, or profile.bytes_scale="
            f"{profile.bytes_scale * cell.num_parameters / num_parameters:.4g}"
        )


def over_links(hardware: Hardware, fitted: Cluster, other: Cluster) -> Hardware:
    """Return hardware that was fitted to cells of one cluster as it is on another.

    Links reach the same share of their nominal rate, and a delay adds to their latency.

    Raises:
        ValueError: links without a rate, that lose packets or that change have no cost model.
    """
    assert hardware.inter is not None  # emulated hosts are nodes
    if None in (*fitted.rates, *other.rates) or len(set(fitted.rates)) > 1:
        raise ValueError("cluster.rates: must be limited, and alike where cells are fitted")
    if other.loss_percent or other.changes:
        raise ValueError("cluster.loss_percent, cluster.changes: have no cost model")
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

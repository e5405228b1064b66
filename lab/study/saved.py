"""The grids of a study, saved in its folder, so that `study=mine` alone goes on with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab.record.files import write_json
from lab.settings.errors import ConfigError
from lab.settings.fields import split
from lab.settings.files import choices_of, is_file
from lab.settings.overrides import config_dir_of, one_value
from lab.settings.reading import read_json
from lab.study.grid import DEFAULTS, NOT_OF_GRID, Study
from lab.study.grid import read as read_grid

FILE = "study.json"
NOT_ALONE = (*NOT_OF_GRID, "repeats", "turns", "config_dir")  # no grid by themselves


def read(arguments: Sequence[str]) -> tuple[Study, str]:
    """Read the study that a command line asks for, and say in words where its grid comes from.

    A study of conf/studies, or of a file by path, keeps that file's grid, and settings on the
    command line are a grid. Without either, the study goes on with the grids saved in its folder.

    Raises:
        ConfigError: a wrong setting, or a saved file that cannot be read.
    """
    given, _ = split(arguments, DEFAULTS)
    name, runs_dir = (one_value(key, DEFAULTS | given) for key in DEFAULTS)
    if is_file(name):
        return read_grid(arguments), f"study={Path(name).stem}: the grid of {name}"
    saved = load(Path(runs_dir) / name)
    where = f"study={name}: the grid of"
    if name in choices_of("study", config_dir_of(arguments)):
        return read_grid(arguments), f"{where} conf/studies/{name}.yaml"
    asks_by_name = any(each.startswith("study=") for each in arguments)
    sets_a_grid = any(each.partition("=")[0] not in NOT_ALONE for each in arguments)
    if not saved or not asks_by_name or sets_a_grid:
        beside = f", beside {len(saved)} saved in {runs_dir}/{name}/{FILE}" if saved else ""
        return read_grid(arguments), f"{where} this command{beside}"
    grids = [read_grid([*grid, *arguments]) for grid in saved]
    several = f"{len(saved)} grids" if len(saved) > 1 else "grid"
    return _joined(grids), f"study={name}: the {several} saved in {runs_dir}/{name}/{FILE}"


def load(root: Path) -> list[list[str]]:
    """Read the arguments of each saved grid of the study in `root`; none if nothing is saved.

    Raises:
        ConfigError: the file holds something else.
    """
    return [[str(each) for each in grid["arguments"]] for grid in _grids(root)]


def save(root: Path, study: Study) -> None:
    """Add a study's grids to those saved in `root`, unless they are there."""
    known = load(root)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    new = [{"when": when, "arguments": list(g)} for g in study.grids if list(g) not in known]
    if new:
        write_json(root / FILE, {"grids": [*_grids(root), *new]})


def _grids(root: Path) -> list[dict[str, Any]]:
    path = root / FILE
    try:
        grids = read_json(path)["grids"]
        if all(isinstance(each["arguments"], list) for each in grids):
            return grids
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        pass
    raise ConfigError(f"{path}: is not a list of a study's grids; delete or repair it")


def _joined(grids: Sequence[Study]) -> Study:
    """Join grids of one study: their cells in order, each of them once."""
    cells = {cell.name: cell for grid in grids for cell in grid.cells}
    arguments = tuple(one for grid in grids for one in grid.grids)
    return dataclasses.replace(grids[0], cells=list(cells.values()), grids=arguments)

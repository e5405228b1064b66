"""Run the missing cells of a study: one fresh torchrun per cell, here, on SLURM or on Ray.

The study's grids are saved in its folder, so that `study=mine` alone goes on with them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import random
import shlex
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.cluster import sandbox
from lab.settings.command import CommandLine, show
from lab.settings.errors import ConfigError, as_config_error
from lab.settings.fields import split
from lab.settings.files import choices_of, is_file
from lab.settings.names import root_of
from lab.settings.overrides import config_dir_of, one_value
from lab.settings.storage import from_here, lock, open_lock, read_json, write_json
from lab.study.grid import DEFAULTS, NOT_OF_GRID, Cell, Study
from lab.study.grid import read as read_grid

if TYPE_CHECKING:
    from lab.record.schema import Record

LOCK_WAIT_S = 60.0
FILE = "study.json"  # of the saved grids, in the study's folder
NOT_ALONE = (*NOT_OF_GRID, "repeats", "turns", "baselines", "config_dir")  # no grid by themselves
CellEnded = Callable[[bool], None]  # is told of each cell, and whether it was run now
Serve = Callable[[Study, Path], AbstractContextManager[CellEnded]]
# What the ranks of a start have in common: the work, and all that a process has only once.
SHARED = (
    *("model", "profile", "data", "task", "precision", "accumulate", "straggler", "cluster"),
    *("device", "backend", "share_gpus", "threads", "tf32", "deterministic", "benchmark_limit"),
    "code",
)


def sweep(line: CommandLine, serve: Serve) -> int:
    """Run the missing cells of a study; with `--cfg` or `dry_run`, print its cells instead.

    Args:
        serve: shows a study while it runs, if it is to be shown (lab.web.live).

    Returns:
        The exit code: 0; 1 if no cell of the study is done; 130 after Ctrl-C.

    Raises:
        ConfigError: a wrong setting, or a study that cannot be run here.
    """
    study, source = read(line.settings)
    if line.shows_settings:
        return show((cell.config for cell in study.cells), line.flags)
    if study.own.dry_run:
        from lab.study import dry_run  # records need numpy: a wrong setting is answered without it

        print(source)
        for text in dry_run.lines(study):
            print(text)
        return 0
    _check_launcher(study)
    study = dataclasses.replace(study, cells=shuffled(study.cells))
    root = _make_root(study)
    print(source, flush=True)
    is_live = study.own.report == "live"
    page = serve(study, root) if is_live else contextlib.nullcontext(lambda _was_run: None)
    try:
        with _alone(root) as descriptor, page as ended:
            save(root, study)
            statuses = list(_run_missing(study, root, descriptor, ended))
    except KeyboardInterrupt:
        print("\nstopped; run the same command to continue from here", file=sys.stderr)
        return 130
    num_done = statuses.count("done")
    figures = f"python -m lab.plot {shlex.quote(str(from_here(root)))}"
    print(f"{num_done} of {len(statuses)} cells done; figures: {figures}")
    return 0 if num_done else 1


def _run_missing(study: Study, root: Path, descriptor: int, ended: CellEnded) -> Iterator[str]:
    """Run every cell that has no record yet; yield the status of each cell as it ends."""
    from lab.study.launch import recorded  # imports torch

    numbered, total = enumerate(study.cells, start=1), len(study.cells)
    labels = {cell.name: f"[{number}/{total}] {cell.name}:" for number, cell in numbered}
    missing = list[Cell]()
    for cell in study.cells:
        if (record := recorded(root, cell, study.retries)) is None:
            missing.append(cell)
            continue
        again = "" if record.status == "done" else " (retry=failed runs it again)"
        print(labels[cell.name], f"{record.status} already{again}", flush=True)
        ended(False)
        yield record.status
    began, num_ended = time.monotonic(), 0
    with contextlib.closing(_groups(study, root, missing, descriptor, labels)) as groups:
        for group in groups:
            num_ended += len(group)
            remaining_s = (time.monotonic() - began) / num_ended * (len(missing) - num_ended)
            eta = timedelta(seconds=round(remaining_s))
            for cell, record in group:
                print(labels.pop(cell.name, ""), f"{outcome_text(record)}, ETA {eta}", flush=True)
                ended(True)
                yield record.status


def _groups(
    study: Study, root: Path, cells: list[Cell], descriptor: int, labels: dict[str, str]
) -> Generator[list[tuple[Cell, Record]], None, None]:
    """Run cells with the study's launcher; yield those that have ended together.

    The label of a cell that runs here alone is printed, and removed, as it begins.
    """
    own = study.own
    if own.launcher != "local":
        if own.launcher == "ray":
            from lab.study.ray import run_cells
        else:
            from lab.study.slurm import run_cells

        with contextlib.closing(run_cells(root, cells, own.cell_timeout_s)) as jobs:
            for job in jobs:  # in any order
                yield [job]
        return
    from lab.study import launch

    for together in starts(dataclasses.replace(study, cells=cells)):
        if len(together) > 1:
            print(f"{len(together)} cells take turns:", flush=True)
        else:
            print(labels.pop(together[0].name), end="", flush=True)
        records = launch.run_cells(root, together, own.turns, own.cell_timeout_s, descriptor)
        yield list(zip(together, records, strict=True))


def outcome_text(record: Record) -> str:
    """Say how a cell ended, with its speed if steps were timed."""
    if record.status != "done":
        return f"{record.status}: {record.error}"
    if not record.step_s or not record.wall_samples_per_s:
        return "done, but no step was timed: all were warm-up"
    rates = record.rates(record.wall_samples_per_s)
    return f"{1000 * record.step_s.median:.2f} ms/step, {rates}"


def _check_launcher(study: Study) -> None:
    """Refuse cells that cannot be started, for lack of a program or of GPUs, before any runs."""
    launcher, turns = study.own.launcher, study.own.turns
    if any(cell.over_horovod for cell in study.cells):
        if launcher == "slurm":
            raise ConfigError(
                "launcher=slurm: cannot start ranks of comm=horovod; set launcher=local"
            )
        if importlib.util.find_spec("horovod") is None:
            raise ConfigError("comm=horovod: Horovod is not installed; run make horovod")
    clusters = set(filter(None, (cell.cluster for cell in study.cells)))
    if turns and launcher != "local":
        raise ConfigError(
            f"turns={turns}: launcher={launcher} starts each cell alone; set turns=null"
        )
    if clusters and launcher != "local":
        raise ConfigError(
            f"launcher={launcher}: cannot start emulated clusters; leave out cluster="
        )
    if turns and max(map(len, starts(study))) < 2:
        raise ConfigError(
            f"turns={turns}: only cells that differ in nothing but strategy= can take turns, and "
            "this grid has no two such cells; set turns=null"
        )
    for cluster in clusters:
        sandbox.find(cluster)
    if launcher == "slurm" and shutil.which("sbatch") is None:
        raise ConfigError("launcher=slurm: sbatch is not on the PATH")
    if launcher == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError("launcher=ray: Ray is not installed; run pip install 'scaling-lab[ray]'")
    if launcher != "local":
        return
    from lab.distributed.world import check_gpus

    for cell in study.cells:
        with as_config_error(f"world_size={cell.world_size}: "):
            check_gpus(cell.config.device, 1 if cell.config.share_gpus else cell.world_size)


def _make_root(study: Study) -> Path:
    root = Path(study.runs_dir).absolute() / study.name
    try:
        root.mkdir(parents=True, exist_ok=True)
        open_lock(root / ".lock").close()
    except OSError as error:
        message = f"runs_dir={study.runs_dir}: cannot write {root}: {error.strerror}"
        raise ConfigError(message) from None
    return root


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[int]:
    """Hold the study's lock and yield its descriptor. A killed sweep's launcher still holds it."""
    with open_lock(root / ".lock") as file:
        if not lock(file, LOCK_WAIT_S):
            raise ConfigError(f"study={root.name}: another sweep of this study is running")
        yield file.fileno()


def shuffled(cells: Sequence[Cell]) -> list[Cell]:
    """Draw the order in which the cells of each repeat run, with the repeat's number as seed.

    Cells that differ in strategy alone stay together, in an order of their own, as compared runs
    should be close in time; the rest of the grid is drawn as such groups. So what a place within a
    repeat costs favours neither a strategy nor a number of ranks.
    """
    drawn = list[Cell]()
    for repeat, of_repeat in itertools.groupby(cells, key=lambda cell: cell.repeat):
        groups: defaultdict[object, list[Cell]] = defaultdict(list)
        for cell in of_repeat:
            rest = [each for each in cell.arguments if not each.startswith("strategy=")]
            groups[(*rest, cell.world_size)].append(cell)
        draw = random.Random(repeat)
        blocks = [draw.sample(group, len(group)) for group in groups.values()]
        draw.shuffle(blocks)
        drawn += itertools.chain(*blocks)
    return drawn


def starts(study: Study) -> list[list[Cell]]:
    """Group the cells in order: each by itself, or if they take turns those of the same work."""
    if study.own.turns is None:
        return [[cell] for cell in study.cells]
    groups: defaultdict[object, list[Cell]] = defaultdict(list)
    for cell in study.cells:
        groups[_shared(cell)].append(cell)
    return [*groups.values()]


def _shared(cell: Cell) -> object:
    config = cell.config
    settings = {k: str(v) for k, v in cell.settings.items() if root_of(k) in SHARED}
    axes = cell.world_size, cell.repeat, cell.batch_size, config.scaling, config.measure
    return axes, str(config.comm), tuple(sorted(settings.items()))


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
        beside = f", in addition to {len(saved)} saved in {runs_dir}/{name}/{FILE}" if saved else ""
        return read_grid(arguments), f"{where} this command{beside}"
    grids = [_saved(grid, arguments, Path(runs_dir) / name / FILE) for grid in saved]
    several = f"{len(saved)} grids" if len(saved) > 1 else "grid"
    return _joined(grids), f"study={name}: the {several} saved in {runs_dir}/{name}/{FILE}"


def _saved(grid: Sequence[str], arguments: Sequence[str], path: Path) -> Study:
    try:
        return read_grid([*grid, *arguments])
    except ConfigError:
        try:
            read_grid(grid)
        except ConfigError as error:  # what is wrong was not typed now
            raise ConfigError(f"{path}: {error}; edit or delete this file") from None
        raise


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
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        pass
    raise ConfigError(f"{path}: not a list of a study's grids; delete or repair it")


def _joined(grids: Sequence[Study]) -> Study:
    """Join grids of one study: their cells in order, each of them once."""
    cells = {cell.name: cell for grid in grids for cell in grid.cells}
    arguments = tuple(one for grid in grids for one in grid.grids)
    return dataclasses.replace(grids[0], cells=list(cells.values()), grids=arguments)

"""Grids: settings under conditions, shared runs of one rank, and saved grids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab import sweep
from lab.settings.errors import ConfigError
from lab.settings.files import conf_dir
from lab.study import run
from lab.study.grid import Cell, read
from lab.study.run import starts
from tests.support.commands import refusal


def cells(*arguments: str) -> list[tuple[str, ...]]:
    """The arguments of each cell, and its world size."""
    study = read(["study=s", *arguments])
    return [(*cell.arguments, f"N={cell.world_size}") for cell in study.cells]


def test_a_setting_under_a_condition_is_for_its_cells_alone() -> None:
    assert cells(
        *("strategy=allreduce,onebit", "steps=5", "world_size=2"),
        "strategy=onebit:exchange.threshold=zero,mean",
    ) == [
        ("strategy=allreduce", "steps=5", "N=2"),
        ("strategy=onebit", "steps=5", "exchange.threshold=zero", "N=2"),
        ("strategy=onebit", "steps=5", "exchange.threshold=mean", "N=2"),
    ]


def test_it_replaces_the_grids_own_list_and_conditions_multiply() -> None:
    assert cells(
        *("strategy=ring,onebit", "bucket_mb=1,4", "batch_size=8", "world_size=2"),
        *("strategy=onebit:bucket_mb=2", "strategy=onebit:exchange.threshold=zero,mean"),
    ) == [
        ("strategy=ring", "bucket_mb=1", "batch_size=8", "N=2"),
        ("strategy=onebit", "batch_size=8", "bucket_mb=2", "exchange.threshold=zero", "N=2"),
        ("strategy=onebit", "batch_size=8", "bucket_mb=2", "exchange.threshold=mean", "N=2"),
        ("strategy=ring", "bucket_mb=4", "batch_size=8", "N=2"),
    ]


def test_conditions_on_ranks_and_on_the_default_strategy() -> None:
    assert cells("world_size=1,2", "world_size=2:steps=7", "strategy=allreduce:tf32=true") == [
        ("strategy=allreduce", "tf32=true", "N=1"),
        ("strategy=allreduce", "steps=7", "tf32=true", "N=2"),
    ]


def test_a_study_file_has_conditions(tmp_path: Path) -> None:
    (tmp_path / "studies").mkdir()
    text = "strategy: tree,onebit\nworld_size: 2\nstrategy=onebit:bucket_mb: 1,4\n"
    (tmp_path / "studies/mine.yaml").write_text(text)
    given = [f"config_dir={tmp_path}", "study=mine"]
    strategies = [cell.strategy for cell in read(given).cells]
    assert strategies == ["tree", "onebit", "onebit"]
    replaced = read([*given, "strategy=onebit:bucket_mb=9"])
    assert [cell.config.bucket_mb for cell in replaced.cells] == [None, 9]
    narrower = read([*given, "strategy=tree"])  # leaves out whom the file's condition is for
    assert [cell.strategy for cell in narrower.cells] == ["tree"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "strategy=ring:exchange.chunk_mb=1",
            "strategy=ring:exchange.chunk_mb=1: no cell has strategy=ring; cells have "
            "strategy=none, strategy=onebit",
        ),
        ("model=mlp:steps=3", "no cell has model=mlp; the grid does not set model"),
        ("strategy=onebit:world_size=4", "a condition cannot set world_size"),
        ("strategy=onebit:cell=mine", "a condition cannot set cell"),
        ("strategy=onebit:exchange.tresh=1", "did you mean exchange.threshold?"),
        ("strategy=onebit:bucket_mb=1,1", "bucket_mb=1,1: a value is listed twice"),
        ("batch_size=8,8", "batch_size=8,8: a value is listed twice"),
        ("bucket_mb=4,4.0", "bucket_mb=4,4.0: a value is listed twice"),
        ("seed=1,01", "seed=1,01: a value is listed twice"),
        ("batch_size=range(8,1)", "batch_size=range(8,1): must list from 1 to 10000 values"),
        ("world_size=range(8,1)", "world_size=range(8,1): must list from 1 to 10000 values"),
        ("batch_size=range(1,8,0)", "range(1,8,0): must list from 1 to 10000 values"),
        ("seed=range(0,1e9)", "seed=range(0,1e9): must list from 1 to 10000 values"),
        ("batch_size=range(0,inf)", "range(0,inf): must list from 1 to 10000 values"),
        ("batch_size=glob(8*)", "glob(8*) matches no choice; write the values as a list, a,b,c"),
        ("optim=glob(zz*)", "optim=glob(zz*) matches no choice; allowed: adam"),
        ("optim.lr=interval(0,1)", "interval(0,1): a grid needs values: a,b,c or range(1,9,2)"),
    ],
)
def test_wrong_conditions_and_lists_are_named(argument: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        cells("strategy=none,onebit", argument)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_grid_that_would_never_end_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="^seed steps strategy: these lists span 2,000,000 cells"):
        cells("strategy=none,onebit", "seed=range(0,1000)", "steps=range(1,1001)")
    assert len(cells("seed=9007199254740992,9007199254740993")) == 2  # one, as floats
    assert len(cells("steps=range(9,1,-4)")) == 2


def test_a_glob_lists_the_choices_of_a_group(tmp_path: Path) -> None:
    (tmp_path / "strategy").mkdir()
    of_ring = (conf_dir() / "strategy" / "ring.yaml").read_text()
    text = of_ring.replace("strategy: ring", "strategy: tree_mine")
    (tmp_path / "strategy" / "tree_mine.yaml").write_text(text)
    given = f"config_dir={tmp_path}", "strategy=glob([tree*,star],exclude=*_p*)"
    found = read(["study=s", "world_size=2", *given]).cells
    names = ["star", "tree", "tree_double", "tree_mine", "tree_overlap"]
    assert [cell.strategy for cell in found] == names


def test_a_file_may_set_null_and_truths_as_yaml_has_them(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("strategy: overlap\nbucket_mb: null\noverlap: true\nsteps: 3,4\n")
    found = [cell.config for cell in read([f"study={path}"]).cells]
    assert [(c.bucket_mb, c.overlap, c.steps) for c in found] == [(None, True, 3), (None, True, 4)]


def alone(*arguments: str) -> list[str]:
    """The names of the cells of one rank."""
    study = read(["study=s", "world_size=1,2", *arguments])
    assert {cell.world_size for cell in study.cells} == {1, 2}
    return [cell.name for cell in study.cells if cell.world_size == 1]


def test_one_run_of_one_rank_serves_all_that_compute_the_same_there() -> None:
    lossless = "strategy=allreduce,tree,ring,overlap,star,caffe"
    assert alone(lossless) == ["allreduce-n1-r0"]
    assert len(alone(lossless, "baselines=all")) == 6
    assert alone("strategy=tree,overlap,none") == ["none-n1-r0"]
    assert alone("strategy=tree,overlap", "repeats=2") == ["tree-n1-r0", "tree-n1-r1"]


def test_what_differs_on_one_rank_has_its_own_run() -> None:
    assert alone("strategy=allreduce,onebit,int8,ddp,local_sgd,fc1x1,auto") == [
        f"{name}-n1-r0"
        for name in ("allreduce", "onebit", "int8", "ddp", "local_sgd", "fc1x1", "auto")
    ]
    assert len(alone("strategy=allreduce,tree", "batch_size=8,16")) == 2
    assert len(alone("strategy=allreduce,tree", "model=mlp,lenet")) == 2
    assert len(alone("strategy=allreduce,tree", "scaling=strong,weak")) == 2
    assert len(alone("strategy=overlap", "bucket_mb=1,4")) == 1
    assert len(alone("strategy=onebit", "bucket_mb=1,4")) == 2
    # A compiled model that overlaps is compiled by buckets.
    assert len(alone("strategy=overlap", "bucket_mb=1,4", "compile=true")) == 2


def test_a_study_alone_goes_on_with_its_saved_grids(tmp_path: Path) -> None:
    place = [f"runs_dir={tmp_path}", "study=mine"]
    first, source = run.read([*place, "strategy=tree,ring", "world_size=2", "launcher=slurm"])
    assert source == "study=mine: the grid of this command"
    (tmp_path / "mine").mkdir()
    run.save(tmp_path / "mine", first)
    run.save(tmp_path / "mine", first)
    second, source = run.read([*place, "strategy=onebit", "strategy=onebit:steps=3,4"])
    assert source.endswith(f"this command, in addition to 1 saved in {tmp_path}/mine/study.json")
    run.save(tmp_path / "mine", second)

    again, source = run.read([*place, "retry=failed"])
    assert source == f"study=mine: the 2 grids saved in {tmp_path}/mine/study.json"
    assert names(again.cells) == names(first.cells) + names(second.cells)
    assert (again.own.launcher, again.retries) == ("local", True)
    longer, _ = run.read([*place, "repeats=2", "baselines=all"])
    assert len(longer.cells) == 2 * len(again.cells)
    assert names(run.read([*place, "baselines=all"])[0].cells) == names(again.cells)
    assert run.load(tmp_path / "mine") == [
        ["world_size=2", "strategy=tree,ring"],
        ["strategy=onebit", "strategy=onebit:steps=3,4"],
    ]


def names(of: list[Cell]) -> list[str]:
    return [cell.name for cell in of]


def test_a_study_of_conf_keeps_its_files_grid(tmp_path: Path) -> None:
    place = [f"runs_dir={tmp_path}", "study=codecs"]
    (tmp_path / "codecs").mkdir()
    run.save(tmp_path / "codecs", read([*place, "strategy=tree"]))
    study, source = run.read(place)
    assert source == "study=codecs: the grid of conf/studies/codecs.yaml"
    assert names(study.cells) == names(read(["study=codecs"]).cells)


def test_a_file_that_holds_no_grids_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for wrong in ("[]", "{", json.dumps({"grids": [{"arguments": "steps=3"}]})):
        (tmp_path / "mine/study.json").write_text(wrong)
        with pytest.raises(ConfigError, match=r"mine/study\.json: not a list"):
            run.read([f"runs_dir={tmp_path}", "study=mine"])
    (tmp_path / "mine/study.json").write_text(json.dumps({"grids": [{"arguments": ["gone=3"]}]}))
    with pytest.raises(ConfigError, match=r"mine/study\.json: gone=3: no such setting"):
        run.read([f"runs_dir={tmp_path}", "study=mine"])


def test_a_new_name_alone_is_no_study(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="study=mine: no such study; allowed: .* or a new name"):
        run.read([f"runs_dir={tmp_path}", "study=mine", "dry_run=true"])


def test_cells_of_the_same_work_share_a_start_if_they_take_turns() -> None:
    grid = ("study=s", "strategy=none,onebit", "world_size=1,2", "batch_size=8,16", "repeats=2")
    alone, shared = (starts(read([*grid, turns])) for turns in ("turns=null", "turns=4"))
    assert {len(each) for each in alone} == {1}
    assert [[cell.strategy for cell in each] for each in shared] == [["none", "onebit"]] * 8
    assert len({(c.world_size, c.batch_size, c.repeat) for each in shared for c in each}) == 8
    # A process has one value of these, and trains one model.
    of_process = ("deterministic=false,true", "tf32=false,true", "benchmark_limit=1,10")
    for apart in (*of_process, "threads=1,2", "model=mlp,lenet", "precision=fp32,bf16"):
        assert len(starts(read(["study=s", "strategy=none,onebit", apart, "turns=4"]))) == 2


def test_a_cell_that_would_take_turns_with_none_is_refused(tmp_path: Path) -> None:
    grid = (f"runs_dir={tmp_path}", "strategy=none", "world_size=1", "repeats=2", "turns=4")
    assert refusal(sweep.main, *grid).startswith("turns=4: only cells")
    line = refusal(sweep.main, "runs_dir=/dev/null", *grid[1:3])
    assert line.startswith("runs_dir=/dev/null: cannot write")


def test_a_study_keeps_its_turns(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    given = read([f"runs_dir={tmp_path}", "study=s", "strategy=none,onebit", "turns=4"])
    run.save(tmp_path / "s", given)
    again, _ = run.read([f"runs_dir={tmp_path}", "study=s"])
    assert again.own.turns == 4
    other, _ = run.read([f"runs_dir={tmp_path}", "study=s", "turns=2"])
    assert other.own.turns == 2

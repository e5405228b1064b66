"""A user's own code and files as choices: found, checked, and part of a run's identity."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.settings.config import build, load
from lab.settings.own_code import HASH_LENGTH, fingerprint, names_code, source_hashes
from lab.study import grid
from tests.support import refusing
from tests.support.misaveraged import Summed

NETS = """\
from layers import Wide

class Net(Wide):
    def __init__(self, input_shape, output_size, width=8, depth=2):
        self.made = dict(input_shape=input_shape, width=width, depth=depth)

class Needs:
    def __init__(self, width): ...

class Open:
    def __init__(self, **anything):
        self.made = anything

class Ternary:
    def __init__(self, levels=3):
        self.levels = levels

class Star:
    def __init__(self, codec, memory, root=0): ...

size = 3
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder with a user's modules, as the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "layers.py").write_text("class Wide: ...\n")
    before, paths = set(sys.modules), list(sys.path)
    yield tmp_path
    sys.path[:] = paths
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_path_of_code_is_told_from_names_and_files() -> None:
    assert all(map(names_code, ("nets.Net", "pkg.sub.Net", "nets:Net", "torch.optim.AdamW")))
    others = ("lenet", "./nets.yaml", "nets.yaml", "resnet-1.5", "a/b.py")
    assert not any(map(names_code, others))


@pytest.mark.parametrize("path", ["nets.Net", "nets:Net"])
def test_a_class_gets_its_settings_and_what_it_asks_for(project: Path, path: str) -> None:
    config = load([f"model={path}", "model.width=4"])
    net = build(config.model, input_shape=(1, 2), output_size=3, num_classes=3)
    assert net.made == {"input_shape": (1, 2), "width": 4, "depth": 2}


def test_arguments_that_take_anything_are_not_filled_in(project: Path) -> None:
    config = load(["model=nets.Open", "model.colour=[red,blue]"])
    assert build(config.model, input_shape=(1, 2)).made == {"colour": ["red", "blue"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model=nets.Net", "model.widht=4"], "model.widht: no such argument; allowed: "),
        (["model=nets.Needs"], "model.width has no default"),
        (["codec=nets.Ternary", "codec.lvels=4"], "codec.lvels: no such argument; allowed: codec"),
        (["path=nets.Star", "path.num=2"], "path.num: no such argument; allowed: path.root"),
        (["codec=nets.Ternery"], "codec=nets.Ternery: nets has no Ternery; did you mean Ternary?"),
        (["memory=nets.Needs"], "memory.width has no default"),
        (["model=nets.Nets"], "model=nets.Nets: nets has no Nets; did you mean Net?"),
        (["model=nots.Net"], "model=nots.Net: no module nots in "),
        (["model=nets.size"], "model=nets.size has type int; it must be a class or function"),
        (["model=./none.yaml"], "model=./none.yaml: there is no such file"),
        (["code.nets_py=0"], "code.nets_py=0: the lab sets this itself"),
    ],
)
def test_what_is_wrong_with_a_users_code_takes_one_line(
    project: Path, arguments: list[str], message: str
) -> None:
    with refusing(message):
        load(arguments)


PARTS = """\
from lab.codec.base import Codec
from lab.exchange.base import Exchange
from lab.exchange.compressed import TwoStage
from lab.exchange.memory import Memory

class Bits(Codec): ...
class Way(TwoStage): ...
class Open(TwoStage):
    def __init__(self, **parts): ...
class Kept(Memory): ...
class Whole(Exchange): ...
"""


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("exchange=parts.Way", "is a path; use path=parts.Way"),
        ("exchange=parts.Bits", "is a codec; use codec=parts.Bits"),
        ("exchange=parts.Kept", "is a memory; use memory=parts.Kept"),
        ("codec=parts.Way", "is a path; use path=parts.Way"),
        ("path=parts.Whole", "is an exchange; use exchange=parts.Whole"),
        ("path=parts.Way", ""),
        ("path=parts.Open", ""),
        ("exchange=parts.Open", ""),
        ("exchange=parts.Whole", ""),
    ],
)
def test_a_part_of_an_exchange_in_the_place_of_another_is_refused(
    project: Path, given: str, meant: str
) -> None:
    (project / "parts.py").write_text(PARTS)
    if not meant:
        load([given])
        return
    with refusing(f"{given}: {meant}"):
        load([given])


def test_a_part_of_an_exchange_takes_settings(project: Path) -> None:
    config = load(["codec=nets.Ternary", "codec.levels=5"])
    assert config.exchange.codec == {"_target_": "nets.Ternary", "levels": 5}


@pytest.mark.parametrize("choice", ["model=nets.Net", "codec=nets.Ternary"])
def test_an_edit_makes_other_cells(project: Path, choice: str) -> None:
    def name() -> str:
        sys.modules.pop("nets", None)  # as in another process
        (cell,) = grid.read(["study=mine", choice]).cells
        return cell.name

    first = name()
    assert name() == first and "code_" in first
    (project / "layers.py").write_text("class Wide: pass\n")  # imported by nets
    assert name() != first


def test_a_file_that_is_edited_while_it_is_imported_has_the_hash_of_what_ran(project: Path) -> None:
    edit = "import pathlib\nfile = pathlib.Path(__file__)\nfile.write_text('class Net: pass')\n"
    (project / "slow.py").write_text(f"{edit}class Net: ...\n")
    ran = hashlib.sha256((project / "slow.py").read_bytes()).hexdigest()
    assert load(["model=slow.Net"]).code == {"slow_py": ran[:HASH_LENGTH]}


def test_code_of_the_lab_and_of_packages_has_no_hash() -> None:
    assert load([]).code == {} and fingerprint({}) == ""
    beside_it = source_hashes(Summed)  # which imports it
    assert list(beside_it) == ["tests/support/misaveraged_py"]
    assert load(["task=torch.nn.SmoothL1Loss"]).code == {}


def test_code_is_found_in_the_folder_of_choices(project: Path, tmp_path: Path) -> None:
    folder = tmp_path / "choices"
    (folder / "model").mkdir(parents=True)
    (folder / "others.py").write_text("class Net: ...\n")
    (folder / "model" / "mine.yaml").write_text("_target_: others.Net\n")
    config = load([f"config_dir={folder}", "model=mine"])
    assert list(config.code) == ["others_py"]


def test_files_are_choices_of_groups_and_studies(project: Path) -> None:
    (project / "net.yaml").write_text("_target_: nets.Net\nwidth: 16\n")
    strategy = "# @package _global_\ndefaults:\n  - /exchange: tree\n  - _self_\nstrategy: mine\n"
    (project / "own.yaml").write_text(strategy)
    (project / "grid.yaml").write_text("model: ./net.yaml\nstrategy: ./own.yaml,ring\n")
    study = grid.read(["study=./grid.yaml", "model.width=32", "world_size=2"])
    assert study.name == "grid"
    assert [cell.config.strategy for cell in study.cells] == ["mine", "ring"]
    assert [cell.config.model.width for cell in study.cells] == [32, 32]
    assert study.cells[0].config.exchange._target_.endswith("Tree")


@pytest.mark.parametrize("inner", ["parts.Mine", "./mine.yaml"])
def test_code_is_found_in_an_exchange_of_the_labs(project: Path, inner: str) -> None:
    (project / "parts.py").write_text(
        "from lab.exchange.allreduce import AllReduce\n"
        "class Mine(AllReduce):\n    def __init__(self, k=1): super().__init__()\n"
    )
    (project / "mine.yaml").write_text("_target_: parts.Mine\nk: 2\n")
    one = ["strategy=hierarchical", f"exchange@exchange.inter={inner}", "exchange.inter.k=3"]
    config = load(one)
    assert config.exchange._target_.endswith("Hierarchical")
    assert config.exchange.inter == {"_target_": "parts.Mine", "k": 3}
    assert list(config.code) == ["parts_py"]
    both = [f"exchange@exchange.{place}={inner}" for place in ("first", "third")]
    phases = load(["exchange=schedule", *both, "exchange.until=[0.1,0.2]"]).exchange
    assert [phases[each]._target_ for each in ("first", "third")] == 2 * ["parts.Mine"]
    assert phases._target_.endswith("Schedule") and phases.second._target_.startswith("lab.")
    line = "exchange@exchange.inter=topk"
    with refusing(f"{line}: exchange is your own code, which has no choices in it; leave"):
        load(["exchange=parts.Mine", line])


def test_additions_work_together_with_code(project: Path) -> None:
    config = load(
        ["model=nets.Open", "+model.colour=red", "exchange=onebit", "~exchange.threshold"]
    )
    assert config.model.colour == "red" and "threshold" not in config.exchange

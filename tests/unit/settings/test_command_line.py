"""One dialect: words, settings and Hydra's flags, for every command."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lab import __main__ as lister
from lab import explain, plot, sweep, train, verify
from lab.settings.command import Command, CommandLine, answer, read
from lab.settings.config import GROUPS, PARTS, ConfigError, load
from lab.settings.fields import file_to_write, own_settings, split
from lab.settings.files import choices_of, conf_dir
from lab.settings.help import chosen_by, of_choices
from lab.settings.names import run_name, variant
from lab.settings.overrides import own_choices
from lab.study import grid
from tests.conftest import ROOT
from tests.support import refusing
from tests.support.commands import refusal, said

MINE = """\
# @package _global_
defaults:
  - /exchange: onebit
  - /transform: none
strategy: mine
overlap: true
bucket_mb: 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of a user's choices, whose name needs quotes in Hydra's grammar."""
    folder = tmp_path / "it's, = mine"
    for group, text in (("strategy", MINE), ("studies", "strategy: mine,tree\nworld_size: 2\n")):
        (folder / group).mkdir(parents=True)
        (folder / group / "mine.yaml").write_text(text)
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["strategy=onebit", "batch_size=32", "exchange.threshold=mean"],
        ["model.hidden=[3,4]", "precision=bf16", "strategy=local_sgd", "model=mlp"]
        + ["cluster=emulated", "cluster.rates=[1gbit,10mbit]"],
        ["strategy=overlap", "exchange=topk", "optim.lr=1"],
        ["+exchange.more=3", "exchange.more=4"],
        ["strategy=onebit", "~exchange.threshold", "++exchange.block_size=7"],
    ],
)
def test_settings_are_what_hydra_composes(arguments: list[str]) -> None:
    # The second time its groups are not composed again.
    loaded = [OmegaConf.to_yaml(load(arguments)) for _ in range(2)]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        expected = compose("train", overrides=arguments)
    assert loaded == [OmegaConf.to_yaml(expected)] * 2


def test_a_loaded_run_can_be_changed_without_changing_the_next() -> None:
    load(["strategy=onebit"]).exchange.threshold = "changed"
    assert load(["strategy=onebit"]).exchange.threshold != "changed"


def test_a_folder_of_ones_own_choices_is_searched(folder: Path) -> None:
    words = [f"--config-dir={folder}"]
    line = read(train.COMMAND, [*words, "strategy=mine"])
    for same in (["--config-dir", str(folder)], ["-cd", str(folder)]):
        assert read(train.COMMAND, [*same, "strategy=mine"]).settings == line.settings
    config = load(line.settings)
    assert (config.strategy, config.bucket_mb, config.config_dir) == ("mine", 3, str(folder))
    assert load(["strategy=tree", *line.settings[:1]]).strategy == "tree"
    assert "\n    mine\n" in said(train.main, *words, "--help")
    assert "config_dir" not in str(variant(line.settings))
    assert run_name(line.settings, "mine", 2) == "mine-n2"


def test_a_sweep_finds_ones_own_studies_and_hands_the_folder_on(folder: Path) -> None:
    line = read(sweep.COMMAND, ["--config-dir", str(folder), "study=mine", "batch_size=8,16"])
    study = grid.read(line.settings)
    assert [cell.strategy for cell in study.cells] == ["mine", "tree"] * 2
    for cell in study.cells:
        assert load(list(cell.arguments)).config_dir == str(folder)


def test_the_labs_own_choices_are_not_replaced(folder: Path) -> None:
    (folder / "strategy" / "tree.yaml").write_text(MINE)
    config_dir = read(train.COMMAND, ["--config-dir", str(folder)]).settings
    assert load(["strategy=tree", *config_dir]).strategy == "tree"
    assert choices_of("strategy", str(folder)).count("tree") == 1


def test_cfg_job_prints_settings_that_hold() -> None:
    arguments = ["strategy=onebit", "steps=3", "device=cpu", "--cfg", "job"]
    printed = OmegaConf.create(said(train.main, *arguments))
    assert printed == OmegaConf.create(OmegaConf.to_yaml(load(arguments[:3])))


def test_cfg_job_refuses_what_a_run_would_refuse() -> None:
    for wrong in (
        ["strategy=diloco", "overlap=true"],
        ["+exchange.nope=3"],
        ["batch_size=0"],
        ["comm.deterministic=abc"],
        ["strategy=ddp", "sync.static_graph=abc"],
        ["data.size=1000000000"],
    ):
        key = wrong[-1].partition("=")[0].lstrip("+")
        assert key in refusal(train.main, *wrong, "device=cpu", "-c", "job")


def test_multirun_is_a_sweep() -> None:
    grid_of_two = ["strategy=none,tree", "world_size=2", "--cfg", "job"]
    printed = said(train.main, "-m", *grid_of_two)
    assert printed == said(sweep.main, *grid_of_two)
    documents = [OmegaConf.create(text) for text in printed.split("---\n")]
    assert [document.strategy for document in documents] == ["none", "tree"]


def test_multirun_under_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert "leave the launcher out" in refusal(train.main, "--multirun")


def test_what_is_added_and_removed_names_a_cell() -> None:
    study = grid.read(["study=s", "strategy=onebit", "~exchange.threshold", "+data.more=1,2"])
    assert [cell.arguments[1:] for cell in study.cells] == [
        ("~exchange.threshold", "+data.more=1"),
        ("~exchange.threshold", "+data.more=2"),
    ]
    assert len({cell.name for cell in study.cells}) == 2


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("~batch_size", "~batch_size: a run needs this setting"),
        ("~exchange._target_", "~exchange._target_: a run needs this setting"),
        ("++nope=1", r"++nope=1: nothing reads this setting"),
        ("+batch_size=3", "+batch_size=3: is set already; write batch_size=3"),
        ("hydra.searchpath=[a]", "hydra.searchpath=[a]: use --config-dir DIR"),
        ("config_dir=nowhere", "config_dir=nowhere: there is no such folder"),
        ("cell=figures", "cell='figures': must be able to name a directory: use only"),
        (
            "study=ghp_abcdefghijklmnopqrst",
            "study='ghp_abcdefghijklmnopqrst': must be able to name",
        ),
        (f"steps={10**20}", f"steps={10**20}: must be an integer from 1 to 9007199254740992"),
        (f"model.hidden={'[' * 600}1{']' * 600}", f"model.hidden={'[' * 67}… is nested too deep"),
    ],
)
def test_what_no_run_can_use_is_refused(argument: str, message: str) -> None:
    with refusing(message):
        load([argument])


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (plot.COMMAND, ["runs/a", "--out", "figures"], "--out figures: use out=figures"),
        (plot.COMMAND, ["runs/a", "--format=svg"], "--format svg: use format=svg"),
        (verify.COMMAND, ["kim2017", "--runs", "runs/k"], "--runs runs/k: use runs=runs/k"),
        (explain.COMMAND, ["runs/a", "--why"], "--why: no such flag; the flags are --help"),
        (plot.COMMAND, [], "needs at least one STUDY[/CELL]"),
        (explain.COMMAND, ["runs/a", "runs/b"], "runs/a runs/b: expected one STUDY[/CELL]"),
        (
            plot.COMMAND,
            ["runs/a", "outt=x"],
            "outt=x: no such setting; did you mean out? allowed: out, format, only",
        ),
        (plot.COMMAND, ["runs/a", "-m"], "-m: no such flag; the flags are --help, --version, "),
    ],
)
def test_wrong_words_are_answered_in_a_line(
    command: Command, arguments: list[str], message: str
) -> None:
    with refusing(message):
        own_settings(command.settings, read(command, arguments).settings)


def test_a_command_may_take_several_words_and_a_folder_have_an_equals_sign() -> None:
    line = read(plot.COMMAND, ["runs/a=b", "out=c", "runs/b"])
    assert (line.words, line.word, line.settings) == (["runs/a=b", "runs/b"], "runs/a=b", ["out=c"])


def test_settings_are_split_by_whose_they_are() -> None:
    arguments = ["hardware=a", "batch_size=3", "hardware.inter.latency_s=1", "out=x", "out=y", "~z"]
    assert split(arguments, ("hardware", "out")) == (
        {"hardware": "a", "hardware.inter.latency_s": "1", "out": "y"},
        ["batch_size=3", "~z"],
    )


def test_a_file_to_write_has_a_place(tmp_path: Path) -> None:
    assert file_to_write("out", "null", ".md") is None
    assert file_to_write("out", f"{tmp_path}/a.md", ".md") == tmp_path / "a.md"
    for wrong in (f"{tmp_path}/no/a.md", f"{tmp_path}/a.txt", f"{tmp_path}/.md"):
        with pytest.raises(ConfigError, match=f"out={wrong}: must name FILE.md in an existing"):
            file_to_write("out", wrong, ".md")
    with pytest.raises(ConfigError, match="out=study.json: runs write a file with this name"):
        file_to_write("out", "study.json", ".json")
    (tmp_path / "b.md").mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        file_to_write("out", f"{tmp_path}/b.md", ".md")


@pytest.mark.parametrize(
    "setting",
    [
        *("model=mynets.Net", "strategy=./mine.yaml", "config_dir=mine", "data.path=a"),
        *("model._target_=os", "model.depth=${oc.env:HOME}", "data=a/b", "+model.a=[1,b.c]"),
    ],
)
def test_a_file_of_data_names_the_labs_own_choices_alone(setting: str) -> None:
    with pytest.raises(ConfigError, match="a file may set only plain values and the lab's own"):
        own_choices([setting])
    others = ["model=alexnet_paper", "data.shape=[3,224,224]", "model.dropout=0.5", "tf32=true"]
    assert own_choices(others) == others


def test_a_command_whose_output_nobody_reads_ends_without_a_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "lab.explain", "--help"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(("module", "package"), [("plot", "pandas"), ("report", "jinja2")])
def test_a_command_names_the_extra_that_it_needs(module: str, package: str) -> None:
    code = f"""
import sys
sys.modules[{package!r}] = None
from lab import {module}
sys.exit({module}.main(["docs/results/demo"]))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    needs = f"lab.{module}: error: {package} is not installed: pip install 'scaling-lab[report]'\n"
    assert (done.returncode, done.stderr) == (2, needs)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (None, "import of torch halted"),
        ("raise OSError('libcudart.so.13: cannot open')", "libcudart.so.13: cannot open"),
    ],
)
def test_a_torch_that_cannot_be_imported_is_one_line(
    body: str | None, reason: str, tmp_path: Path
) -> None:
    if body:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch/__init__.py").write_text(body)
    path = f"sys.path.insert(0, {str(tmp_path)!r})" if body else "sys.modules['torch'] = None"
    code = f"import sys; {path}; from lab import train; sys.exit(train.main(['steps=1']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    told = done.stderr.partition(reason)
    assert done.returncode == 2
    assert told[:2] == ("lab.train: error: torch cannot be imported: ", reason)
    assert told[2].count("\n") == 1


SLOW = {"torch", "scipy", "pandas", "altair"}  # to import: a tenth of a second to two
COMMANDS = sorted(path.stem for path in (ROOT / "lab").glob("*.py") if path.stem[0] != "_")
WRONG = ["sweep repeats=0", "predict hardware=no", "advise top=0"]


def test_help_and_a_wrong_setting_are_answered_without_slow_libraries() -> None:
    # Hydra takes a fifth of a second: plain values are checked, and help is made, before it loads.
    without_hydra = [*(f"{command} --help" for command in COMMANDS), "train batch_size=x"]
    code = f"""
import importlib, sys
for words in {without_hydra + WRONG}:
    command, argument = words.split()
    code = importlib.import_module("lab." + command).main([argument])
    slow = {SLOW} | ({{"hydra"}} if words in {without_hydra} else set())
    print("ended:", words, code, slow & {{*sys.modules}})"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert [line for line in done.stdout.splitlines() if line.startswith("ended:")] == [
        f"ended: {words} {0 if '--help' in words else 2} set()" for words in without_hydra + WRONG
    ], done.stderr
    for line, words in zip(done.stderr.splitlines(), ["train batch_size=x", *WRONG], strict=True):
        command, argument = words.split()
        assert line.startswith(f"lab.{command}: error: {argument}: ")


def test_help_marks_what_is_taken_and_describes_every_choice() -> None:
    lines = said(train.main, "strategy=zero1", "--help").split("\n\n")[2].splitlines()[1:]
    for group in (*GROUPS, *PARTS):
        described = [line for line in lines if line.startswith(f"  {group}: ")]
        assert len(described) == 1
    choices = [line[4:].split(maxsplit=1) for line in lines if line.startswith("    ")]
    assert all(len(words) == 2 for words in choices), choices
    taken = [line.split()[1] for line in lines if line.startswith("  * ")]
    assert taken[:4] == ["zero1", "allreduce", "zero1", "none"] and "sgd" in taken


@pytest.mark.parametrize("strategy", ["allreduce", "cntk", "zeropp"])
def test_help_lists_the_settings_that_hydra_would_compose(strategy: str) -> None:
    words = [f"strategy={strategy}", "model=mlp"]
    config = OmegaConf.to_container(load(words))
    assert isinstance(config, dict)
    content = of_choices(words, chosen_by(words, None), None)
    assert {group: content[group] for group in GROUPS[1:]} == {g: config[g] for g in GROUPS[1:]}


@pytest.mark.parametrize("words", [["codec=topk"], ["codec=topk", "steps=3"]])
def test_help_marks_the_parts_of_an_exchange_and_lists_their_settings(words: list[str]) -> None:
    lines = said(train.main, "strategy=onebit", *words, "--help").splitlines()
    taken = {line.split()[1] for line in lines if line.startswith("  * ")}
    assert {"two_stage", "topk", "error_feedback"} <= taken
    assert {"  codec.ratio=0.01", "  memory.keeps=true"} <= {*lines}
    assert not any(line.startswith("  exchange.") for line in lines)


def test_the_script_runs_every_command() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"lab": "lab.__main__:main"}
    script = [sys.executable, "-c", "from lab.__main__ import main; raise SystemExit(main())"]
    done = subprocess.run([*script, "train", "batch_size=x"], capture_output=True, text=True)
    assert (done.returncode, done.stderr[:28]) == (2, "lab.train: error: batch_size")
    assert "\n  lab.train " in said(lister.main, "--help")


def test_an_interrupt_while_modules_load_is_one_line(tmp_path: Path) -> None:
    # Whatever the lab imports first, here its own settings, is interrupted.
    (tmp_path / "yaml.py").write_text("import signal; signal.raise_signal(signal.SIGINT)\n")
    code = "import sys; sys.argv[0] = '/bin/lab'; import lab, yaml"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (130, "\nstopped\n")


def test_a_command_ends_without_a_search_for_garbage() -> None:
    code = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count() > 0))  # runs after what is registered later
from lab.plot import main
raise SystemExit(main(["--version"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "True", done.stderr


def test_a_lack_of_memory_is_one_line_and_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    def fill(_: CommandLine) -> int:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nmore")

    assert answer(plot.COMMAND, ["runs/a"], fill) == 1
    said = "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried"
    assert capsys.readouterr().err == f"lab.plot: error: {said}\n"

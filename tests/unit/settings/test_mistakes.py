"""Typical mistakes of a command line get one line that says what to write instead."""

from __future__ import annotations

import pytest

from lab import advise, predict, sweep, train
from lab.settings import hints
from lab.settings.config import FIELDS, GROUPS
from lab.settings.files import choices_of, keys_of
from lab.study import grid
from tests.support.commands import refusal

COMMANDS = {"advise": advise, "train": train, "sweep": sweep, "predict": predict}
MISTAKES = [
    # Names that other programs use.
    ("train", "lr=0.1", "lr=0.1: no such setting; write optim.lr=0.1"),
    ("train", "optim.learning_rate=0.1", "write optim.lr=0.1"),
    ("train", "optimizer=sgd", "write optim=sgd"),
    ("train", "optim.scheduler=cosine", "write optim.schedule=cosine"),
    ("sweep", "bs=64,128", "write batch_size=64"),
    ("train", "dataset=digits", "write data=digits"),
    ("train", "data_dir=photos", "write data.path=photos"),
    ("train", "max_grad_norm=1", "write clip_grad_norm=1"),
    ("train", "compression=onebit", "write strategy=onebit"),
    ("train", "bucket_cap_mb=4", "write bucket_mb=4"),
    ("predict", "network=lenet", "write model=lenet"),
    # Switches.
    ("train", "fp16=true", "write precision=fp16"),
    ("train", "amp=true", "write precision=fp16 or precision=bf16"),
    ("train", "gpu=1", "CUDA_VISIBLE_DEVICES=1"),
    # Numbers of ranks, and grids.
    ("train", "world_size=4", "torchrun --nproc-per-node 4 -m lab.train"),
    ("train", "gpus=2", "torchrun --nproc-per-node 2 -m lab.train"),
    ("sweep", "nproc=2", "for python -m lab.sweep, write world_size=2"),
    ("train", "--nproc-per-node 4", "torchrun --nproc-per-node 4 -m lab.train"),
    ("train", "strategy=onebit,tree", "for a list, use python -m lab.sweep"),
    ("train", "repeats=3", "python -m lab.sweep repeats=3"),
    ("train", "turns=4", "python -m lab.sweep turns=4"),
    ("train", "report=live", "python -m lab.sweep report=live"),
    ("train", "study=kim2017", "python -m lab.sweep study=kim2017"),
    ("train", "strategy=onebit:bucket_mb=4", "python -m lab.sweep strategy=onebit:bucket_mb=4"),
    ("train", "hardware=eth10g", "python -m lab.predict hardware=eth10g"),
    # Another form than key=value.
    ("train", "--lr 0.1", "--lr: write optim.lr=0.1"),
    ("train", "--lr strategy=tree", "--lr: write optim.lr="),
    ("train", "--batch-size=64", "--batch-size: write batch_size=64"),
    ("sweep", "--strategy onebit", "--strategy: write strategy=onebit"),
    ("train", "strategy onebit", "write strategy=onebit"),
    ("train", "strategy = onebit", "write strategy=onebit, without spaces"),
    ("train", "strategy= onebit", "write strategy=onebit, without spaces"),
    ("train", "strategy =onebit", "write strategy=onebit, without spaces"),
    ("train", "onebit", "write strategy=onebit"),
    # Values.
    ("train", "strategy=1bit", "strategy=1bit: did you mean onebit? allowed: allreduce, auto,"),
    ("train", "strategy=one-bit", "did you mean onebit?"),
    ("sweep", "strategy=none,hvd", "did you mean horovod?"),
    ("train", "strategy=ddp_overlap", "did you mean ddp or overlap?"),
    ("train", "strategy=deepspeed", "did you mean zero1 or fsdp?"),
    ("train", "model=alexnet_smal", "did you mean alexnet_small?"),
    ("train", "batch_size=1e3", "batch_size=1e3: must be an integer; write 1000"),
    ("train", "batch_size=many", "batch_size=many: must be an integer"),
    ("train", "epochs=-1", "must be a number above 0 and at most 1000000"),
    ("train", "optim.lr=", "optim.lr=: must be a number"),
    ("train", "optim.lr=abc", "optim.lr=abc: must be a number of at least 0"),
    ("sweep", "optim.lr=0.1,-5", "optim.lr=-5: must be a number of at least 0"),
    ("sweep", "optim.momentum=high dry_run=true", "optim.momentum=high: must be a number of at"),
    ("sweep", "optim=adamw optim.betas=[0.9,1]", "optim.betas=1: must be a number of at least 0"),
    ("sweep", "optim=adamw optim.betas=0.9", "optim.betas=0.9: must be a list of 2 numbers"),
    ("sweep", "optim=torch.optim.RMSprop optim.lr=-1", "optim.lr=-1: must be a number of at lea"),
    ("sweep", "optim.schedule=poly", "optim.schedule=poly: allowed: constant, cosine, linear"),
    ("advise", "optim.eps=-1 optim=adamw", "optim.eps=-1: must be a number of at least 0"),
    ("train", "optim.lr=" + "1" * 400, "1: must be a number of at least 0"),  # no float is so large
    ("train", "optim.lr=" + "1" * 5000, "1… has too many digits"),
    ("train", "batch_size=" + "1" * 5000, "1: must be an integer"),
    ("sweep", "repeats=" + "1" * 5000, "1: must be an integer from 1 to 10000"),
    ("train", "runs_dir=jösé", "quote values that contain commas, brackets, '=' or other letters"),
    ("train", "overlap=maybe", "overlap=maybe: must be true or false"),
    ("train", "device=gpu", "allowed: auto, cpu, cuda"),
    ("train", "sync=${x}", "sync=${x}: Error resolving interpolation"),
    ("train", "overlap=null", "overlap=null: must be true or false"),
    ("train", "runs_dir=null", "runs_dir=null: must be text"),
    ("train", "scaling=[weak]", "scaling=[weak]: allowed: strong, weak"),
    ("train", "batch_size.x=1", "batch_size.x=1: must be an integer"),
    ("train", "exchange=[ring,tree]", "exchange=[ring,tree]: allowed: allreduce,"),
    ("train", "exchange=[1]", "exchange=[1]: allowed: allreduce,"),
    ("train", "recorder=null", "recorder=null: allowed: csv,"),
    ("train", "seed=-1", "seed=-1: must be an integer from 0 to 4611686018427387904"),
    ("train", "strategy=./mine", "strategy=./mine: allowed: allreduce,"),
    ("train", "+exchange.foo=1", "exchange.foo: no such argument; allowed: exchange.dtype"),
    ("train", "+comm.foo=1", "comm.foo: no such argument; allowed: comm.nccl_algo"),
    ("train", "+exchange._partial_=true", "+exchange._partial_=true: nothing reads this setting"),
    ("train", "+recorder.mode=offline", "+recorder.mode=offline: this choice of recorder has no"),
    ("train", "+cluster.rate=1gbit", "+cluster.rate=1gbit: this choice of cluster has no settings"),
    ("train", "=1", "=1: no such setting"),
    ("train", "+transform.foo=1", "+transform.foo=1: this choice of transform has no settings"),
    ("train", "profile=alexnet_titanx", "profile=alexnet_titanx: model=lab.model.convnet.lenet"),
    ("train", "resume=", "resume=: must not be empty"),
    ("train", "config_dir=", "config_dir=: there is no such folder"),
    ("train", "+config_dir=nope", "+config_dir=nope: there is no such folder"),
    ("train", "config_dir=a,b", "config_dir=a,b: there is no such folder"),
    ("sweep", "repeats=1000000000", "repeats=1000000000: must be an integer from 1 to 10000"),
    ("predict", "fit=", "fit=: must be a path, or left out"),
    # Slips of the pen, with the group that has the setting.
    ("train", "exchange.treshold=mean", "did you mean exchange.threshold?"),
    ("train", "model.hiden=[3]", "did you mean model.hidden?"),
    ("sweep", "threshold=mean", "did you mean exchange.threshold?"),
    ("train", "OVERLAP=true", "did you mean overlap?"),
    # Of a command's own settings.
    ("sweep", "turn=3", "turn=3: no such setting; did you mean turns?"),
    ("sweep", "TURNS=3", "did you mean turns?"),
    ("sweep", "turns.x=3", "turns.x=3: no such setting; did you mean turns?"),
    ("sweep", "+turns=3", "did you mean turns?"),
    ("predict", "out.x=1", "did you mean out?"),
    ("sweep", "--turns --multirun", "--turns: use turns=..."),
]


@pytest.mark.parametrize(("command", "words", "hint"), MISTAKES, ids=lambda value: str(value)[:30])
def test_a_mistake_is_answered_in_a_line_that_leads_on(command: str, words: str, hint: str) -> None:
    # With --cfg job, a line that were accepted would print settings and not train.
    assert hint in refusal(COMMANDS[command].main, *words.split(), "--cfg", "job")


def test_a_value_of_two_lines_is_answered_in_one() -> None:
    assert refusal(predict.main, "out=a\nb").startswith("out=a\\nb: must name FILE.json")


def test_what_is_unlike_any_setting_gets_no_wrong_hint() -> None:
    line = refusal(train.main, "qqqzzz=1", "--cfg", "job")
    assert line == "qqqzzz=1: no such setting; --help lists all settings"


def test_hints_name_settings_and_choices_that_are_there() -> None:
    known = {*FIELDS}
    for group in GROUPS:
        for names in keys_of(group).values():
            known |= {f"{group}.{name}" for name in names}
    assert set(hints.NAMES) <= known
    assert not {name for names in hints.NAMES.values() for name in names} & known
    assert {*hints.OF_SWEEP} == grid.OF_SWEEP - {"world_size"}  # of that, the launcher decides
    strategies = {
        name for each in hints.CHOICES["strategy"].values() for name in each.split(" or ")
    }
    assert strategies <= set(choices_of("strategy"))

"""Switches of the whole process, TF32 and deterministic algorithms; overlap under torch.compile."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from lab.distributed.comm import Comm, run_ranks
from lab.distributed.worker import InlineWorker, Job
from lab.exchange.allreduce import AllReduce
from lab.measure.environment import environment
from lab.problem import blueprint
from lab.settings.config import ConfigError, load
from lab.sync.base import SyncParts
from lab.sync.gradsync import GradSync
from lab.training import assemble
from lab.training import assemble as compiling
from lab.training.assemble import compiled, compiled_as, set_arithmetic
from tests.support import refusing
from tests.support.ranks import told, train


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    products, cudnn = torch.backends.cuda.matmul, cast(Any, torch.backends.cudnn)
    before = products.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    products.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_is_one_switch_for_products_and_convolutions(tf32: bool) -> None:
    set_arithmetic(tf32, deterministic=False)
    assert environment(num_hosts=1)["tf32"] == {"products": tf32, "convolutions": tf32}
    expected = "tf32" if tf32 else "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == expected
    assert (torch.backends.cudnn.conv.fp32_precision == "tf32") is tf32  # type: ignore[attr-defined]


def test_fp32_is_ieee_unless_tf32_is_set() -> None:
    assert load([]).tf32 is False


@pytest.mark.parametrize(("variable", "tf32"), [("0", True), ("1", False)])
def test_a_variable_that_says_otherwise_is_refused_before_ranks_meet(
    monkeypatch: pytest.MonkeyPatch, variable: str, tf32: bool
) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", variable)
    config = load([f"tf32={tf32}", "device=cpu"])
    line = rf"tf32={str(tf32).lower()}: NVIDIA_TF32_OVERRIDE={variable} overrides this"
    with pytest.raises(ConfigError, match=line):
        assemble.join(config)
    set_arithmetic(not tf32, deterministic=False)


def test_deterministic_prepares_cublas_too() -> None:
    set_arithmetic(tf32=False, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
    set_arithmetic(tf32=False, deterministic=False)
    assert not torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.benchmark


def test_a_workspace_that_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_arithmetic(tf32=False, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_threads_are_set_or_left_as_the_environment_has_them() -> None:
    torch.set_num_threads(1)
    set_arithmetic(tf32=False, deterministic=False)
    assert torch.get_num_threads() == 1
    set_arithmetic(tf32=False, deterministic=False, threads=2)
    assert torch.get_num_threads() == 2


WIDTH = 64  # a layer's weight has 16 KiB


class Noting(InlineWorker):
    """An exchange that records when it gets a bucket."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def submit(self, label: str, job: Job) -> None:
        self._events.append("submit")
        super().submit(label, job)


def noting(events: list[str]) -> Callable[..., Any]:
    """A backend that compiles nothing, and records when the backward of a graph runs."""
    # Slow to import, so not for every process that only collects tests.
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def backward(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            events.append("backward")
            return graph(*arguments)

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), bw_compiler=backward)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))


def events_of_a_step(monkeypatch: pytest.MonkeyPatch, *settings: str) -> list[str]:
    """Return the events of a compiled model's second step, after checking its gradients."""
    events: list[str] = []
    monkeypatch.setattr(compiling, "BACKEND", noting(events))
    model, plain, x = layers(), layers(), torch.randn(8, WIDTH)
    config = load([*settings, "compile=true"])

    def rank_main(comm: Comm) -> None:
        module, settings = compiled(model, config), (config.overlap, config.bucket_mb)
        sync = GradSync(SyncParts(model, module, AllReduce(), comm, Noting(events), *settings))
        with sync:
            for _ in range(2):
                events.clear()
                model.zero_grad()
                with sync.micro_batch(last=True):
                    sync.module(x).square().sum().backward()
                events.append("end of backward")
                assert sync.finish() is None

    run_ranks(1, rank_main)
    plain(x).square().sum().backward()
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad)
    return events


def test_buckets_leave_while_backward_of_a_compiled_model_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = events_of_a_step(monkeypatch, "strategy=overlap", "bucket_mb=0.01")
    # The last job adds up the flags of gradients.
    assert events == ["backward", "submit"] * 4 + ["end of backward", "submit"]


def test_without_overlap_a_model_is_compiled_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    events = events_of_a_step(monkeypatch, "strategy=allreduce", "bucket_mb=0.01")
    assert events == ["backward", "end of backward", *["submit"] * 5]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["strategy=overlap"], None),
        (["strategy=overlap", "compile=true"], "regions"),
        (["strategy=ddp", "compile=true"], "regions"),  # cut by DDP itself
        (["strategy=allreduce", "compile=true"], "whole"),
        (["strategy=overlap", "bucket_mb=null", "compile=true"], "whole"),  # all leave at once
    ],
)
def test_a_record_says_how_the_model_was_compiled(
    settings: list[str], expected: str | None
) -> None:
    assert compiled_as(load(settings)) == expected


def test_ddp_gets_a_model_that_it_can_cut_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda model, backend: given.append(backend) or model)
    compiled(layers(), load(["strategy=ddp", "compile=true"]))
    compiled(layers(), load(["strategy=overlap", "compile=true"]))
    assert given[0] == "inductor" and callable(given[1])


class Scores(nn.Linear):
    """A linear model of images."""

    def __init__(self, *, input_shape: tuple[int, ...], output_size: int) -> None:
        super().__init__(math.prod(input_shape), output_size)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(1))


class MadeInInference(Scores):
    def __init__(self, *, input_shape: tuple[int, ...], output_size: int) -> None:
        with torch.inference_mode():
            super().__init__(input_shape=input_shape, output_size=output_size)


class StillLazy(Scores):
    def __init__(self, *, input_shape: tuple[int, ...], output_size: int) -> None:
        super().__init__(input_shape=input_shape, output_size=output_size)
        self.unused = nn.LazyLinear(3)


class SparseTable(Scores):
    """A model whose table gets a sparse gradient, without a module that says so."""

    def __init__(self, *, input_shape: tuple[int, ...], output_size: int) -> None:
        super().__init__(input_shape=input_shape, output_size=output_size)
        self.table = nn.Parameter(torch.zeros(1, output_size))

    def forward(self, input: Tensor) -> Tensor:
        row = torch.zeros(len(input), dtype=torch.int64)
        scores = super().forward(input)
        return scores + nn.functional.embedding(row, self.table, sparse=True)


class Nothing:
    def __call__(self, model: nn.Module) -> None: ...


class NoFunction: ...


class Lazy(nn.Sequential):
    def __init__(self, *, input_shape: tuple[int, ...], output_size: int) -> None:
        super().__init__(nn.Flatten(), nn.LazyLinear(output_size), nn.BatchNorm1d(output_size))


def test_lazy_modules_have_their_shapes_in_predictions() -> None:
    model = blueprint(load([f"model={__name__}.Lazy", *ONE_STEP])).model
    assert model.training and cast(Any, model)[1].weight.shape == (10, 3072)


def frozen(model: nn.Module, *, bias: bool = False) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias") == bias)
    return model


def test_a_function_of_a_model_is_a_transform() -> None:
    words = (f"model={__name__}.Scores", *ONE_STEP, f"transform={__name__}.frozen")
    for own, left in (((), "weight"), (("transform.bias=true",), "bias")):
        made = blueprint(load([*words, *own])).model
        assert [name for name, p in made.named_parameters() if p.requires_grad] == [left]


ONE_STEP = ("data=synthetic", "data.num_images=8", "batch_size=4", "steps=1", "strategy=none")


def test_parts_of_the_users_that_cannot_train_are_refused_before_the_first_step() -> None:
    lines = {
        "model=MadeInInference": "weight: was made in torch.inference_mode(), so it cannot be",
        "model=StillLazy": "unused.weight: has no values yet (a lazy module); run one batch",
        "transform=Nothing": f"transform={__name__}.Nothing: returns type NoneType; it must",
        "transform=NoFunction": f"transform={__name__}.NoFunction: its instances must take a model",
    }
    plain = f"model={__name__}.Scores"
    runs = [(plain, word.replace("=", f"={__name__}."), *ONE_STEP) for word in lines]
    for found, line in zip(told(*runs), lines.values(), strict=True):
        assert found.startswith(line)
    for word, line in list(lines.items())[2:]:  # predictions say the same
        with refusing(line):
            blueprint(load([plain, word.replace("=", f"={__name__}."), *ONE_STEP]))


def test_sparse_gradients_are_updated_without_an_exchange_too(tmp_path: Path) -> None:
    model = f"model={__name__}.SparseTable"
    ours, reference = (
        train(1, model, *ONE_STEP, f"strategy={strategy}", f"runs_dir={tmp_path}")[0].weights
        for strategy in ("none", "overlap")
    )
    torch.testing.assert_close(ours, reference)
    assert ours["table"].any()

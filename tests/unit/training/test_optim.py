"""Any optimizer: its settings, its learning rate over time, and whether it may update parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.optim import Optimizer

from lab.settings.config import ConfigError, load
from lab.settings.optim import LearningRate
from lab.sync.refusals import require_piecewise
from lab.training.optim import Optim, rate

MINE = "tests.support.optimizers"


def optim(target: str, **settings: Any) -> Optim:
    return Optim(OmegaConf.create({"_target_": target, **settings}), batch_size=512)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def train(net: nn.Module, optimizer: Optimizer, steps: range, ours: Optim | None = None) -> None:
    for step in steps:
        inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        net(inputs).square().sum().backward()
        if ours:
            ours.prepare(optimizer, step, total_steps=10)
        optimizer.step()
        optimizer.zero_grad()


def weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


ALL = ("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam")
ALL += ("RMSprop", "Rprop", "SGD")


@pytest.mark.parametrize("name", ALL)
def test_any_optimizer_of_torch_updates_as_torch_alone(name: str) -> None:
    ours, theirs = model(), model()
    mine = optim(f"torch.optim.{name}", lr=0.05, schedule="constant", warmup_steps=0)
    optimizer = mine.optimizer(ours)
    assert type(optimizer).__name__ == name
    train(ours, optimizer, range(5), mine)
    train(theirs, getattr(torch.optim, name)(theirs.parameters(), lr=0.05), range(5))
    torch.testing.assert_close(weights(ours), weights(theirs))


def test_a_parameter_may_get_its_first_gradient_later_than_others() -> None:
    """Torch's fused SGD fails then, as in a model that skips layers at random."""
    ours, theirs = model(), model()
    settings: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}
    mine = optim("torch.optim.SGD", schedule="constant", warmup_steps=0, **settings)
    both = mine.optimizer(ours), torch.optim.SGD(theirs.parameters(), **settings)
    fused = []
    for step in range(3):
        for net in (ours, theirs):
            for place, parameter in enumerate(net.parameters()):
                parameter.grad = torch.ones_like(parameter) if place <= step else None
        mine.prepare(both[0], step, total_steps=3)
        for optimizer in both:
            optimizer.step()
        fused.append(both[0].param_groups[0]["fused"])
    torch.testing.assert_close(weights(ours), weights(theirs))
    assert fused == [True, False, False]


def test_torch_fuses_the_update_where_it_can_unless_told_otherwise() -> None:
    def fused(target: str, **settings: Any) -> bool | None:
        return optim(target, **settings).optimizer(model()).param_groups[0].get("fused")

    assert fused("torch.optim.SGD") and fused("torch.optim.AdamW")
    assert not fused("torch.optim.AdamW", fused=False)
    assert not fused("torch.optim.AdamW", foreach=True)
    assert not fused("torch.optim.RMSprop")


def test_weights_of_two_bytes_are_updated_on_cpus() -> None:
    """Torch's fused SGD leaves most of them as they were."""
    layer = nn.Linear(64, 64, dtype=torch.bfloat16)
    layer.weight.grad, before = torch.ones_like(layer.weight), layer.weight.detach().clone()
    optim("torch.optim.SGD", lr=0.5).optimizer(layer).step()
    assert torch.equal(layer.weight, before - 0.5)


class Weight(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


@pytest.mark.parametrize("target", ["SGD", "Adam", "AdamW", "Adagrad"])
@pytest.mark.parametrize("layout", ["columns", "every other row", "column-major", "complex"])
def test_what_lies_around_a_slice_is_left_alone(target: str, layout: str) -> None:
    """Torch's fused kernels on CPUs step through consecutive values; see pytorch#192920."""
    whole = torch.randn(8, 8)
    before = whole.clone()
    views = {"columns": whole[:, 4:], "every other row": whole[::2], "column-major": whole.t()}
    views["complex"] = torch.view_as_complex(whole.view(8, 4, 2).clone())
    ours = Weight(views[layout])
    alone = Weight(views[layout].contiguous())
    optimizer = optim(f"torch.optim.{target}").optimizer(ours)
    plain = optim(f"torch.optim.{target}", fused=False).optimizer(alone)
    assert bool(optimizer.param_groups[0]["fused"]) == (layout == "column-major")
    for _ in range(3):
        alone.weight.grad = torch.randn_like(alone.weight)
        ours.weight.grad = torch.empty_like(ours.weight).copy_(alone.weight.grad)
        optimizer.step()
        plain.step()
    torch.testing.assert_close(ours.weight.data, alone.weight.data, rtol=1e-6, atol=1e-6)
    assert layout == "column-major" or torch.equal(whole[1::2, :4], before[1::2, :4])


def test_choices_of_the_lab_are_torchs_with_these_hyperparameters() -> None:
    (sgd,) = Optim(load([]).optim, 128).optimizer(model()).param_groups
    assert {key: sgd[key] for key in ("lr", "momentum", "weight_decay", "nesterov")} == {
        "lr": 0.01, "momentum": 0.9, "weight_decay": 0.0005, "nesterov": False,
    }  # fmt: skip
    (adamw,) = Optim(load(["optim=adamw"]).optim, 128).optimizer(model()).param_groups
    reference = torch.optim.AdamW(model().parameters()).param_groups[0]
    same = ("lr", "betas", "eps", "weight_decay", "amsgrad")
    assert {key: adamw[key] for key in same} == {key: reference[key] for key in same}


def test_vectors_can_be_left_without_decay() -> None:
    mine = optim("torch.optim.AdamW", lr=0.1, weight_decay=0.5, decay_vectors=False)
    net = model()
    optimizer = mine.optimizer(net)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = [p.detach().clone() for p in net.parameters()]
    mine.prepare(optimizer, 19, total_steps=100)
    optimizer.step()
    for old, new in zip(before, net.parameters(), strict=True):
        expected = old if old.dim() < 2 else old * (1 - 0.1 * 0.5)
        torch.testing.assert_close(new.detach(), expected)


def test_this_runs_settings_hold_after_a_resume() -> None:
    first = optim("torch.optim.AdamW", lr=0.1, betas=[0.5, 0.6], schedule="constant")
    net = model()
    optimizer = first.optimizer(net)
    train(net, optimizer, range(3), first)
    second = optim("torch.optim.AdamW", lr=0.2, weight_decay=0.3, schedule="constant")
    resumed = second.optimizer(net)
    resumed.load_state_dict(optimizer.state_dict())
    second.prepare(resumed, 50, total_steps=100)
    (group,) = resumed.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.2, (0.9, 0.999), 0.3)
    assert {float(state["step"]) for state in resumed.state.values()} == {3}


def test_a_users_own_class_keeps_what_it_counts_in_its_groups() -> None:
    mine = optim(f"{MINE}.SignDescent", lr=0.1, schedule="constant", warmup_steps=0)
    net = model()
    optimizer = mine.optimizer(net)
    before = weights(net)
    train(net, optimizer, range(1), mine)
    assert (weights(net) - before).abs().tolist() == pytest.approx(len(before) * [0.1])
    train(net, optimizer, range(1, 3), mine)
    assert optimizer.param_groups[0]["count"] == 3


def test_a_function_may_make_groups_with_rates_of_their_own() -> None:
    mine = optim(f"{MINE}.two_rates", lr=0.2, eps=1e-6, warmup_steps=4)
    optimizer = mine.optimizer(model())
    mine.prepare(optimizer, 0, total_steps=100)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.025])
    assert {group["eps"] for group in optimizer.param_groups} == {1e-6}


def test_an_error_in_a_users_constructor_stays_the_users() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        optim(f"{MINE}.Broken").optimizer(model())


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("SGD", {"lr": -0.1}, r"optim\.lr=-0.1: must be a number of at least 0"),
        ("SGD", {"lr": "fast"}, r"optim\.lr=fast: must be a number"),
        ("SGD", {"momentum": float("nan")}, r"optim\.momentum=nan: must be a number"),
        ("SGD", {"momentum": -1}, r"optim\.momentum=-1: must be a number of at least 0"),
        ("SGD", {"nesterov": "maybe"}, r"optim\.nesterov=maybe: must be true or false"),
        ("SGD", {"nesterov": True}, r"optim\.nesterov=true: needs optim\.momentum above 0"),
        (
            "SGD",
            {"beta": 1},
            r"optim\.beta=1: no such setting; torch\.optim\.SGD has lr, .*; the lab adds decay_vec",
        ),
        ("SGD", {"decay_vectors": 1}, r"optim\.decay_vectors=1: must be true or false"),
        ("Rprop", {"decay_vectors": False}, r"optim\.decay_vectors=false: .*Rprop has no weight"),
        ("AdamW", {"betas": 3}, r"optim\.betas=3: must be a list of 2 numbers"),
        ("AdamW", {"betas": [2, 0]}, r"optim\.betas=2: must be a number of at least 0 and below 1"),
        ("LBFGS", {}, r"optim=torch\.optim\.LBFGS: evaluates the loss several times in a step"),
        ("SparseAdam", {}, r"optim=torch\.optim\.SparseAdam: accepts only sparse gradients"),
        ("Optimizer", {}, r"optim\.defaults: must be set"),
        ("lr_scheduler.StepLR", {}, r"StepLR: must be a torch\.optim\.Optimizer, or return one"),
        ("Sgd", {}, r"optim=torch\.optim\.Sgd: torch\.optim has no Sgd; did you mean SGD\?"),
        ("Muon", {}, r"optim=torch\.optim\.Muon: Muon only supports 2D parameters"),
        ("nowhere.Adam", {}, r"optim=nowhere\.Adam: no module nowhere in "),
        (f"{MINE}.MINE", {}, r"tests\.support\.optimizers has no MINE"),
        (f"{MINE}.not_one", {}, r"not_one: returns type list; it must return"),
        (f"{MINE}.with_a_scheduler", {}, r"with_a_scheduler: has a learning-rate scheduler"),
        (f"{MINE}.SignDescent", {}, r"optim\.lr: must be set; .*SignDescent has no default for it"),
    ],
)
def test_what_is_refused_is_named(name: str, settings: dict[str, Any], message: str) -> None:
    if name == "Muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has it from 2.9 on")
    target = name if name.startswith((MINE, "nowhere")) else f"torch.optim.{name}"
    with pytest.raises(ConfigError, match=message):
        optim(target, **settings).optimizer(model())


def piecewise(net: nn.Module, *words: str) -> None:
    config: Any = load(["strategy=priority", *words])
    require_piecewise(config, Optim(config.optim, 32).optimizer, net.parameters())


def convnet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 4))


@pytest.mark.parametrize(
    "optim",
    [
        ("optim=sgd",),
        ("optim=sgd", "optim.lr=0"),
        ("optim=adamw", "optim.decay_vectors=false"),
        ("optim=torch.optim.RMSprop",),
        ("optim=torch.optim.Adafactor",),
        ("optim=torch.optim.NAdam",),
    ],
)
def test_optimizers_that_treat_each_parameter_by_itself(optim: tuple[str, ...]) -> None:
    ours, state = convnet(), torch.get_rng_state()
    piecewise(ours, *optim)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("optim=tests.support.optimizers.TrustAll",), "gives different weights"),
        (("optim=tests.support.optimizers.Counting",), "gives different weights"),
        (("optim=tests.support.optimizers.Failing",), "where are the others?"),
        (("clip_grad_norm=1",), "clip_grad_norm=1.0: needs all gradients at once"),
    ],
)
def test_others_are_refused_in_a_line(settings: tuple[str, ...], message: str) -> None:
    lr = ("optim.lr=0.1",) if settings[0].startswith("optim") else ()
    with pytest.raises(ConfigError) as refused:
        piecewise(convnet(), *settings, *lr)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def rates(steps: int = 104, **settings: Any) -> list[float]:
    schedule = LearningRate(warmup_steps=4, **settings)
    return [rate(schedule, 0.1, step, total_steps=104) for step in range(steps + 1)]


@pytest.mark.parametrize(
    "settings",
    [{}, {"schedule": "constant"}, {"schedule": "linear"}, {"schedule": "step", "step_every": 30}],
)
def test_warm_up_is_linear_and_ends_at_the_peak(settings: dict[str, Any]) -> None:
    assert rates(**settings)[:5] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])


@pytest.mark.parametrize(
    ("settings", "course"),
    [
        ({}, {4: 0.1, 54: 0.05, 104: 0.0}),
        ({"final_share": 0.2}, {4: 0.1, 54: 0.06, 104: 0.02}),  # half of the way to 0.02
        ({"schedule": "linear"}, {4: 0.1, 5: 0.099, 29: 0.075, 54: 0.05, 79: 0.025, 104: 0.0}),
        ({"schedule": "linear", "final_share": 0.2}, {4: 0.1, 54: 0.06, 104: 0.02}),
        ({"schedule": "constant"}, dict.fromkeys((4, 5, 54, 103, 104), 0.1)),
        (
            {"schedule": "step", "step_every": 30, "step_factor": 0.5},
            {29: 0.1, 30: 0.05, 59: 0.05, 60: 0.025, 100: 0.0125},
        ),
    ],
)
def test_the_course_after_warm_up(settings: dict[str, Any], course: dict[int, float]) -> None:
    found = rates(**settings)
    assert {step: found[step] for step in course} == pytest.approx(course)


def test_linear_scaling_multiplies_the_peak() -> None:
    assert LearningRate(linear_scaling=True).peak(0.1, batch_size=512) == pytest.approx(0.4)
    assert LearningRate().peak(0.1, batch_size=512) == 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "poly"}, "schedule=poly: allowed: constant, cosine, linear, step"),
        ({"base_batch_size": 0}, "base_batch_size=0: must be an integer of at least 1"),
        ({"warmup_steps": -1}, "warmup_steps=-1: must be an integer of at least 0"),
        ({"warmup_steps": True}, "warmup_steps=true: must be an integer"),
        ({"linear_scaling": 1}, "linear_scaling=1: must be true or false"),
        ({"final_share": 1.5}, "final_share=1.5: must be a number from 0 to 1"),
        ({"step_factor": float("nan")}, "step_factor=nan: must be a number from 0 to 1"),
        ({"schedule": "step"}, "step_every=null: must be an integer of at least 1"),
        ({"step_every": 30}, "step_every=30: needs optim.schedule=step"),
        ({"step_factor": 0.5}, "step_factor=0.5: needs optim.schedule=step"),
        ({"base_batch_size": 64}, "base_batch_size=64: needs optim.linear_scaling=true"),
        ({"schedule": "constant", "final_share": 0.1}, "final_share=0.1: needs optim.schedule=cos"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"optim.{message}"):
        LearningRate(**settings)

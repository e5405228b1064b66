"""Any optimizer of torch's kind, with its hyperparameters."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.optim import Optimizer

from lab.distributed.replicas import is_sharded
from lab.exchange.layout import is_fusible
from lab.settings import checks
from lab.settings.errors import ConfigError, one_line
from lab.settings.optim import OF_SCHEDULE, LearningRate, schedule_of
from lab.settings.own_code import callable_at, user_traceback
from lab.sync.update import way_of


class Optim:
    """Makes an optimizer, and sets its hyperparameters in each step.

    Args:
        node: the group `optim`: `_target_`, the path of the optimizer's class, or of a function
            that makes one from parameters; its hyperparameters, of which those left out have its
            own defaults; the settings of Schedule; and `decay_vectors`, False for weight decay of
            parameters of two dimensions or more alone, and not of biases and the weights of norms.
        batch_size: global batch of the run.
        capturable: steps may be part of a CUDA graph: the learning rate is a number on the device,
            float32, and so are counts of steps, in optimizers that have the argument.

    Raises:
        ConfigError: there is no such optimizer, or a setting is not one of its own, has another
            type or is out of range.
    """

    def __init__(self, node: DictConfig, batch_size: int, capturable: bool = False) -> None:
        settings: Any = OmegaConf.to_container(node, resolve=True)
        self.schedule = schedule_of(settings)
        settings = {name: value for name, value in settings.items() if name not in OF_SCHEDULE}
        self.target = target = str(settings.pop("_target_"))
        self.decay_vectors: bool = settings.pop("decay_vectors", True)
        self._make: Callable[..., Any] = callable_at(target, f"optim={target}")
        if target == "torch.optim.SparseAdam":
            raise ConfigError(
                f"optim={target}: accepts only sparse gradients, but ranks exchange dense ones; "
                "use torch.optim.Adam"
            )
        if isinstance(self._make, type) and not issubclass(self._make, Optimizer):
            raise ConfigError(f"optim={target}: must be a torch.optim.Optimizer, or return one")
        _, *own = inspect.signature(self._make).parameters.items()  # the weights come first
        self._own: dict[str, Parameter] = dict(own)
        _check(target, settings, self._own)
        lr = settings.get("lr", self._own["lr"].default if "lr" in self._own else None)
        if not isinstance(lr, int | float):
            raise ConfigError(f"optim={target}: needs a learning rate; set optim.lr")
        self.peak_lr = self.schedule.peak(lr, batch_size)
        tuples = {n: tuple[Any](v) for n, v in settings.items() if isinstance(v, list)}
        self._settings = {**settings, **tuples, "lr": self.peak_lr}
        self._capturable = capturable
        if capturable and "capturable" in self._own:
            self._settings.setdefault("capturable", True)
        if not self.decay_vectors and "weight_decay" not in self._own:
            raise ConfigError(f"optim.decay_vectors=false: {target} has no weight_decay")
        self._groups: list[dict[str, Any]] = []
        self._rates: list[Tensor] = []  # of each group, if they are on the device

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return the optimizer of `model`: one fused pass over all parameters where torch has it.

        Raises:
            ConfigError: the optimizer refuses a value or these parameters, or cannot step once per
                gradient.
        """
        groups = self._parameter_groups(model)
        try:
            optimizer = self._construct(groups)
        except (ValueError, TypeError) as error:
            if user_traceback(error):
                raise
            raise ConfigError(f"optim={self.target}: {one_line(error)}") from None
        if not isinstance(optimizer, Optimizer):
            kind = type(optimizer).__name__
            raise ConfigError(
                f"optim={self.target}: returns type {kind}; it must return a torch.optim.Optimizer"
            )
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # as torch marks it
            raise ConfigError(
                f"optim={self.target}: has a learning-rate scheduler, which nothing would step; "
                "leave it out, and set optim.schedule"
            )
        if _must_be_set(inspect.signature(optimizer.step).parameters):
            raise ConfigError(
                f"optim={self.target}: evaluates the loss several times in a step; use an "
                "optimizer whose step() needs no closure"
            )
        if isinstance(optimizer, torch.optim.SGD):
            number = sum(len(group["params"]) for group in optimizer.param_groups)
            optimizer.register_step_pre_hook(partial(_first_momentum, number))
        own = {*self._own, *self._settings}
        self._groups = [{k: v for k, v in g.items() if k in own} for g in optimizer.param_groups]
        if self._capturable:
            device = optimizer.param_groups[0]["params"][0].device
            self._rates = [torch.zeros((), device=device) for _ in self._groups]
        return optimizer

    def prepare(self, optimizer: Optimizer, step: int, total_steps: int) -> None:
        """Set the hyperparameters of `step`. This run's settings hold after a resume too."""
        for group, own in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(own)
            group["lr"] = rate(self.schedule, own["lr"], step, total_steps)
        for group, on_device in zip(optimizer.param_groups, self._rates, strict=False):
            group["lr"] = on_device.fill_(group["lr"])

    def _parameter_groups(self, model: nn.Module) -> list[Any]:
        parameters = [p for p in model.parameters() if p.requires_grad]
        if self.decay_vectors:
            return parameters
        vectors = [p for p in parameters if p.dim() < 2]
        others = [p for p in parameters if p.dim() >= 2]
        groups = {"params": others}, {"params": vectors, "weight_decay": 0.0}
        return [group for group in groups if group["params"]]

    def _construct(self, groups: list[Any]) -> Any:
        """Make the optimizer, fused unless it is the user's, or is told how to run, or cannot."""
        parameters = [
            p for each in groups for p in (each["params"] if isinstance(each, dict) else [each])
        ]
        sharded = any(map(is_sharded, parameters))
        way = way_of(self.target, self._own, self._settings, sharded)
        if way and all(map(is_fusible, parameters)):
            try:
                return self._make(groups, **self._settings, **{way: True})
            except RuntimeError:  # not on this device
                pass
        return self._make(groups, **self._settings)


def rate(schedule: LearningRate, peak: float, step: int, total_steps: int) -> float:
    """Return the learning rate of step `step` of `total_steps`, counted from 0."""
    warmup = schedule.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule.schedule == "constant":
        return peak
    if schedule.schedule == "step":
        assert schedule.step_every is not None
        return peak * schedule.step_factor ** (step // schedule.step_every)
    done = (step - warmup) / max(1, total_steps - warmup)
    left = (1 + math.cos(math.pi * done)) / 2 if schedule.schedule == "cosine" else 1 - done
    return peak * (schedule.final_share + (1 - schedule.final_share) * left)


def _first_momentum(number: int, optimizer: Optimizer, *_: object) -> None:
    """Let no fused step of SGD meet parameters that get their first gradient later than others.

    It makes the momentum of all of a group's parameters at once, and raises an internal error where
    some have it already.

    Args: number: of the optimizer's parameters.
    """
    if len(optimizer.state) == number:
        return  # all have it, as in most steps: to look at each would take longer
    for group in optimizer.param_groups:
        if group["momentum"] and group["fused"]:
            states = (optimizer.state.get(p, {}) for p in group["params"] if p.grad is not None)
            has = {state.get("momentum_buffer") is not None for state in states}
            group["fused"] = len(has) < 2  # only for this step: `prepare` sets it again


def _must_be_set(parameters: Mapping[str, Parameter]) -> list[str]:
    """List the parameters that have no default."""
    kinds = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
    return [n for n, p in parameters.items() if p.default is p.empty and p.kind not in kinds]


def _check(target: str, settings: Mapping[str, Any], own: Mapping[str, Parameter]) -> None:
    named = [n for n, p in own.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in own.values())
    for name, value in settings.items():
        key, default = f"optim.{name}", own[name].default if name in named else None
        if name not in named and not takes_any:
            others = ["decay_vectors", *OF_SCHEDULE]
            raise ConfigError(
                f"{key}={value}: no such setting; {target} has {', '.join(named)}; the lab "
                f"adds {', '.join(others)}"
            )
        if isinstance(default, bool):
            checks.truth(key, value)
        if checks.is_number(default):
            checks.number(key, value)
        if isinstance(default, tuple):
            length = len(tuple[Any](default))
            if not isinstance(value, list) or len(list[Any](value)) != length:
                raise ConfigError(f"{key}={value}: must be a list of {length} values")
    for name in _must_be_set(own):
        if name not in settings:
            raise ConfigError(f"optim.{name}: must be set; {target} has no default for it")

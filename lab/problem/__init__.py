"""The problem of a run: data, task and model, built from its settings to fit each other.

Each of the three may be the user's own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.nn.parameter import is_lazy

from lab.data import Data
from lab.data.own import as_data
from lab.settings.config import build
from lab.settings.errors import ConfigError, as_config_error
from lab.settings.own_code import callable_at, values_of
from lab.task.base import Task
from lab.task.tasks import OwnLoss

# Settings of data that change how much of it there is, but no shape: a few samples are enough.
FEW = {"num_images": 8}


@dataclass(frozen=True)
class Blueprint:
    """Data, task and model of a run that is not trained.

    Attributes:
        data: on the CPU, with as few samples as it can be asked for.
        model: on the meta device, with its transform; on the CPU if its constructor needs values.
    """

    data: Data
    task: Task
    model: nn.Module

    @property
    def target(self) -> torch.Tensor:
        return self.data.targets()[0][0]


def blueprint(config: DictConfig) -> Blueprint:
    """Build a run's data, task and model for their shapes alone.

    Raises: ConfigError: a part cannot be built, or the model does not fit the data.
    """
    few: Any = {key: value for key, value in FEW.items() if key in config.data}
    node: Any = OmegaConf.merge(config.data, few)
    data = build_data(node, config.seed, torch.device("cpu"))
    task = build_task(config.task)
    shape, _ = output_shapes(task, data)
    try:
        with torch.device("meta"):
            model = build_model(config.model, data, shape[-1])
    except ConfigError:
        raise
    except Exception:  # of the user's constructor, which may compute with values
        model = build_model(config.model, data, shape[-1])
    if "_target_" in config.transform:
        with as_config_error():
            model, _ = transformed(config.transform, model)
    if lazy := [p for p in model.parameters() if is_lazy(p)]:  # a forward pass gives them shapes
        model.eval()
        with torch.no_grad():
            model(torch.zeros(1, *data.input_shape, dtype=data.input_dtype, device=lazy[0].device))
        model.train()
    return Blueprint(data, task, model)


def require_float32(model: nn.Module) -> None:
    """Refuse to predict a model of other dtypes: a profile counts 4 bytes for each gradient value.

    Raises: ConfigError: names a trainable parameter, its dtype, and what to do; or there is none.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("model has no trainable parameters, so there is nothing to predict")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise ConfigError(
                f"model: {name} is {kind}; profiles and predictions are for float32 gradients; "
                "build the model in float32 (precision=bf16 computes in bfloat16)"
            )


def build_data(node: DictConfig, seed: int, device: torch.device) -> Data:
    """Build a data set, or make one of what a user's callable returns.

    Raises: ConfigError: a setting is wrong, or the callable returns no data.
    """
    made = build(node, seed=seed, device=device)
    with as_config_error():
        return as_data(made, device, f"data={node._target_}")


def build_task(node: DictConfig) -> Task:
    """Build a task, or make one of a user's loss function.

    Raises: ConfigError: a setting is wrong.
    """
    target = callable_at(node._target_, f"task={node._target_}")
    if values_of(target, "task"):
        settings = {str(key): value for key, value in node.items() if key != "_target_"}
        return OwnLoss(node._target_, functools.partial(target, **settings))
    made = build(node)
    if isinstance(made, nn.Module):
        trained = [name for name, p in made.named_parameters() if p.requires_grad]
        if trained:
            raise ConfigError(
                f"task={node._target_}: has parameters that would not be trained "
                f"({', '.join(trained[:3])}); make them part of the model"
            )
    if not isinstance(made, Task):
        return OwnLoss(node._target_, made)
    if lacking := [name for name in ("name", "num_sums", "loss") if not hasattr(made, name)]:
        raise ConfigError(f"task={node._target_}: its class must set {', '.join(lacking)}")
    return made


def transformed(node: DictConfig, model: nn.Module) -> tuple[nn.Module, str]:
    """Return a model after its transform, and the name of the transform's class or function.

    Raises:
        ConfigError: a setting is wrong, or a user's transform does not take or return a module.
        ValueError: the transform refuses the model.
    """
    transform = callable_at(node._target_, f"transform={node._target_}")
    name = getattr(transform, "__name__", node._target_)
    if values_of(transform, "transform"):
        made = build(node, model)
    elif callable(transform := build(node)):
        made, name = transform(model), type(transform).__name__
    else:
        raise ConfigError(f"transform={node._target_}: its instances must take a model to return")
    if not isinstance(made, nn.Module):
        raise ConfigError(
            f"transform={node._target_}: returns type {type(made).__name__}; it must return a "
            "torch.nn.Module"
        )
    return made, name


def output_shapes(task: Task, data: Data) -> list[tuple[int, ...]]:
    """Return the output shapes that a training and a test sample need.

    Raises: ConfigError: the task cannot learn these targets, or there are none.
    """
    for part, targets in zip(("training", "test"), data.targets(), strict=True):
        if not len(targets):
            raise ConfigError(f"data has no {part} samples")
    try:
        return [task.output_shape(targets, data.num_classes) for targets in data.targets()]
    except ValueError as error:
        raise ConfigError(str(error)) from error


def build_model(node: DictConfig, data: Data, output_size: int) -> nn.Module:
    """Build a model, with those facts of its data that its signature asks for.

    Embeddings with sparse=True get dense gradients, of the same values: exchanges deliver dense
    ones, and few optimizers take others.

    Raises: ConfigError: a setting is wrong, the model does not fit the data, or it is no nn.Module.
    """
    shape, classes, vocabulary = data.input_shape, data.num_classes, data.vocabulary
    facts: dict[str, Any] = {
        "input_shape": shape,
        "output_size": output_size,
        **({"image_shape": shape} if len(shape) == 3 else {}),
        **({"num_classes": classes} if classes is not None else {}),
        **({"vocabulary": vocabulary, "context": shape[0]} if vocabulary is not None else {}),
    }
    model = build(node, **facts)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model={node._target_}: returns type {type(model).__name__}; it must return a "
            "torch.nn.Module"
        )
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False
    return model

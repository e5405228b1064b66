"""Count the work of a cell's model, which is built without its values."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from lab.data import Data
from lab.measure.operations import Uncountable, count
from lab.model.work import Work
from lab.problem.build import build_data, build_model, build_task, output_shapes
from lab.settings.config import build
from lab.settings.errors import ConfigError

PARTS = ("model", "transform", "task", "data")
# Settings of data that change how much of it there is, but no shape: a few samples are enough.
FEW = {"num_images": 8}


def work_of(config: DictConfig) -> Work:
    """Count a run's model, at most once in a process.

    Data is built only to learn its shapes, on the CPU, with as few samples as it can be asked for.

    Raises:
        ConfigError: a part cannot be built, the model does not fit the data, or its operations
            cannot be counted.
    """
    parts = {part: OmegaConf.to_container(config[part], resolve=True) for part in PARTS}
    return _work(OmegaConf.to_yaml(parts), config.seed)


@lru_cache(maxsize=64)
def _work(parts: str, seed: int) -> Work:
    config: Any = OmegaConf.create(parts)
    few = {key: value for key, value in FEW.items() if key in config.data}
    config.data.update(few)
    data = build_data(config.data, seed, torch.device("cpu"))
    task = build_task(config.task)
    shape, _ = output_shapes(task, data)
    try:
        model = _model(config, data, shape[-1])
        target = data.targets()[0][0]
        return count(model, data.input_shape, data.input_dtype, target, task.loss)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except Uncountable as error:
        raise ConfigError(
            f"model={config.model['_target_']}: cannot be counted for an estimate ({error}); "
            "measure it with lab.profile_layers out=FILE.yaml and give profile=FILE.yaml"
        ) from None


def _model(config: DictConfig, data: Data, output_size: int) -> nn.Module:
    """Build the model on the meta device; one that needs values, on the CPU."""
    try:
        with torch.device("meta"):
            model = build_model(config.model, data, output_size)
    except ConfigError:
        raise
    except Exception:  # of the user's constructor, which may compute with values
        model = build_model(config.model, data, output_size)
    return build(config.transform)(model) if "_target_" in config.transform else model

"""Count the work of a cell's model, which is built without its values."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lab.measure.operations import Uncountable, count
from lab.model.work import Work
from lab.problem.build import blueprint, require_float32
from lab.settings.errors import ConfigError

PARTS = ("model", "transform", "task", "data", "seed")


def work_of(config: DictConfig) -> Work:
    """Count a run's model, at most once in a process.

    Raises:
        ConfigError: a part cannot be built, the model does not fit the data, or its operations
            cannot be counted.
    """
    parts: Any = OmegaConf.to_container(config, resolve=True)
    return _work(OmegaConf.to_yaml({part: parts[part] for part in PARTS}))


@lru_cache(maxsize=64)
def _work(parts: str) -> Work:
    config: Any = OmegaConf.create(parts)
    plan = blueprint(config)
    require_float32(plan.model)
    shape, dtype = plan.data.input_shape, plan.data.input_dtype
    try:
        return count(plan.model, shape, dtype, plan.target, plan.task.loss)
    except Uncountable as error:
        raise ConfigError(
            f"model={config.model['_target_']}: cannot be counted for an estimate ({error}); "
            "measure it with lab.profile_layers out=FILE.yaml and give profile=FILE.yaml"
        ) from None

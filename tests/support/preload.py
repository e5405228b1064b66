"""Imports for the process that all ranks fork from, so that no rank has to repeat them.

Nothing here may start a thread, as pyarrow's import does: a fork lacks the thread but keeps its
locks locked.
"""

import gc
import importlib
import pkgutil

import torch._dynamo  # noqa: F401

from tests.support import compositions, ranks

for package in ("codec", "data", "exchange", "model", "sync", "task", "transform"):
    folder = importlib.import_module(f"lab.{package}")
    for module in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
        importlib.import_module(module.name)

compositions.share()
ranks.load([])  # Hydra caches its parsed grammar

gc.freeze()  # else each collection in a rank looks at all that was imported

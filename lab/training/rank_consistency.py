"""Facts that the ranks of a run must have alike: settings, software, data, model, checkpoint."""

from __future__ import annotations

import hashlib
import platform
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.cuda.nccl
from omegaconf import DictConfig, OmegaConf
from torch import nn

import lab
from lab.data import Data, GlobalSampler
from lab.distributed import launcher
from lab.settings.names import of_all_ranks

NUM_SAMPLES = 4  # of each part of the data that are read and compared
LENGTH = 12  # hexadecimal digits of a digest


def settings_and_software(config: DictConfig) -> dict[str, str]:
    """State the settings, the hashes of the user's code among them, and what computes.

    That is versions, and the lab's own code, which one host has once at a path.
    """
    settings: Any = OmegaConf.to_container(config, resolve=True)
    one_host = launcher.local_size() == launcher.world_size()
    code = str(Path(lab.__file__).resolve().parent) if one_host else f"code {lab_code()}"
    found = {
        "lab": f"{lab.__version__} ({code})",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return of_all_ranks(settings) | found


@cache
def lab_code() -> str:
    """Hash the lab's Python files."""
    root, hashed = Path(lab.__file__).parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        hashed.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return hashed.hexdigest()[:LENGTH]


def parameters(model: nn.Module) -> dict[str, str]:
    """State a model's parameters and buffers: names, shapes, dtypes, in order.

    With the settings they decide the plan of buckets.
    """
    stated = {"number of parameters": str(sum(1 for _ in model.parameters()))}
    kinds = {"parameter": model.named_parameters(), "buffer": model.named_buffers()}
    for kind, found in kinds.items():
        for place, (name, tensor) in enumerate(found):
            frozen = "" if tensor.requires_grad or kind == "buffer" else ", frozen"
            dtype = str(tensor.dtype).removeprefix("torch.")
            stated[f"{kind} {place}"] = f"{name} {list(tensor.shape)} {dtype}{frozen}"
    return stated


def data_facts(data: Data) -> dict[str, str]:
    """State how many samples there are, of what shape, and a digest of a few of both parts."""
    names = ("num_train", "num_test", "input_shape", "input_dtype", "num_classes", "vocabulary")
    facts = {f"data's {name}": str(getattr(data, name)) for name in names}
    with _untouched_randomness():
        first, again = _digest(data), _digest(data)
    # A data set may change samples at random as they are read; those cannot be compared.
    return facts | {"data's samples (digest)": first if first == again else "random"}


def checkpoint_facts(path: Path) -> dict[str, str]:
    """State which checkpoint this rank sees at a path; DONE has the digests of its files."""
    try:
        digest = hashlib.sha256((path / "DONE").read_bytes()).hexdigest()[:LENGTH]
    except OSError as error:
        return {"resume": f"none ({path}: {error.strerror})"}
    return {"resume": f"{path.name} ({digest})"}


def _digest(data: Data) -> str:
    """Hash samples at fixed places of both parts, or what the data set names instead."""
    own = getattr(data, "digest", None)
    if own is not None:
        return own()
    test = data.test_batches(0, max(1, data.num_test // NUM_SAMPLES), NUM_SAMPLES)
    hashed = hashlib.sha256()
    for part in (data.train_batches(_Spread(data.num_train)), test):
        for tensor in filter(torch.is_tensor, next(part, ())):
            values = tensor.detach().cpu().contiguous()
            hashed.update(f"{tuple(values.shape)} {values.dtype}".encode())
            hashed.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()[:LENGTH]


class _Spread(GlobalSampler):
    """One batch of samples that lie evenly over the data, for one rank."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples, min(NUM_SAMPLES, num_samples), 0, 1, seed=0)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        places = np.linspace(0, self.num_samples - 1, self.batch_size).astype(np.int64)
        yield np.zeros_like(places), places


@contextmanager
def _untouched_randomness() -> Iterator[None]:
    """Leave all generators of random numbers as they were: a user's data set may draw from them."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(arrays)

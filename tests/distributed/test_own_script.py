"""The example script with the lab's hook: few changed lines, and the loss curve of GradSync."""

from __future__ import annotations

import difflib
import importlib.util
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import lab
from tests.conftest import ROOT
from tests.support.ranks import CREW

FOLDER = ROOT / "examples/own_loop"


def script(name: str) -> Any:
    """Import a script of the folder, anew."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_script(name: str) -> list[float]:
    """Run a script of the folder as a rank; return its losses."""
    return script(name).main()


def run_with_grad_sync() -> list[float]:
    """Run the plain script with GradSync in the place of DDP, waiting before each update."""
    plain, syncs = script("train"), []

    def enter(model: nn.Module) -> nn.Module:
        syncs.append(lab.grad_sync(model, "onebit").__enter__())
        return model

    class AdamW(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            syncs[0].finish()
            super().step(closure)

    with (
        mock.patch.object(plain, "DistributedDataParallel", enter),
        mock.patch.object(torch.optim, "AdamW", AdamW),
    ):
        return plain.main()


def test_two_lines_more_make_the_script_one_bit_with_the_losses_of_grad_sync() -> None:
    plain = CREW.call(2, run_script, "train")
    onebit = CREW.call(2, run_script, "train_onebit")
    reference = CREW.call(2, run_with_grad_sync)
    for rank in range(2):
        assert onebit[rank] == pytest.approx(reference[rank], rel=0, abs=1e-6)
        assert onebit[rank] != pytest.approx(plain[rank], rel=0, abs=1e-3)
        assert onebit[rank][-1] < 0.8 * onebit[rank][0]  # it learns


def test_at_most_three_lines_of_code_differ() -> None:
    plain, onebit = (
        (FOLDER / name).read_text().rpartition('"""')[2].splitlines()
        for name in ("train.py", "train_onebit.py")
    )
    diff = difflib.ndiff(plain, onebit)
    changes = [line[2:] for line in diff if line[:2] in ("+ ", "- ") and line[2:].strip()]
    assert changes == ["import lab", '    lab.attach(model, "onebit")']

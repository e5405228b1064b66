"""The lab within others' trainers: each example, with accumulation, as two ranks run it."""

from __future__ import annotations

import io
import runpy
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.conftest import ROOT
from tests.support.ranks import spawn

Trained = tuple[list[float], list[Tensor]]  # the losses of a start, and the weights at its end


def train_all(library: str, folder: Path) -> tuple[dict[str, Trained], str, str]:
    """Train by an example as a rank; return what came of each way, rank 0's output, and how a
    start is refused that finds the residuals of ranks 0 and 1 exchanged.

    "onebit resumed" stops after the first of two epochs, and has the losses of the second.
    """
    dist.init_process_group("gloo")
    main = runpy.run_path(str(ROOT / f"examples/trainers/with_{library}.py"))["main"]

    def train(exchange: str | None, name: str, epochs: int = 2) -> Trained:
        losses, model = main(exchange, str(folder / name), epochs)
        return losses, [p.detach().clone() for p in model.parameters()]

    found = {}
    with redirect_stdout(io.StringIO()) as output:
        found["ddp"] = train(None, "ddp")
        found["allreduce"] = train("allreduce", "allreduce")
        found["onebit"] = train("onebit", "onebit")
        train("onebit", "onebit resumed", epochs=1)
        found["onebit resumed"] = train("onebit", "onebit resumed")
        dist.barrier()  # each rank saves its own residuals
        if dist.get_rank() == 0:
            swap_residuals(folder / "onebit resumed")
        dist.barrier()
        refusal = ""
        try:
            train("onebit", "onebit resumed", epochs=3)
        except ValueError as error:
            refusal = str(error)
    return found, output.getvalue(), refusal


def swap_residuals(folder: Path) -> None:
    for first in folder.rglob("residuals_0.pt"):
        second, aside = first.with_name("residuals_1.pt"), first.with_name("aside")
        first.rename(aside)
        second.rename(first)
        aside.rename(second)
    if (checkpoint := folder / "last.ckpt").exists():  # one file of all ranks
        state = torch.load(checkpoint)
        torch.save(state | {"lab": state["lab"][::-1]}, checkpoint)


@pytest.mark.parametrize("library", ["lightning", "accelerate", "transformers"])
def test_a_trainer_accumulates_is_certified_and_resumes(library: str, tmp_path: Path) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed here: pip install 'scaling-lab[trainers]'")
    ranks = spawn(2, train_all, library, tmp_path)
    output = ranks[0][1]
    # Once for each start with an exchange; a false alarm would have raised.
    assert (
        output.count(
            "certificate: weights equal on 2 ranks; gradients averaged once over 2 of 2 ranks"
        )
        == 4
    )
    for rank, (found, _, refusal) in enumerate(ranks):
        assert f"belongs to rank {1 - rank} of 2, but this is rank {rank} of 2" in refusal
        plain, weights = found["ddp"]
        assert found["allreduce"][0] == pytest.approx(plain, abs=1e-6)
        torch.testing.assert_close(found["allreduce"][1], weights, atol=1e-6, rtol=0)
        (losses, whole), (resumed, again) = found["onebit"], found["onebit resumed"]
        assert losses != plain
        assert resumed == losses[len(losses) // 2 :]
        assert all(map(torch.equal, whole, again))

"""A model and a batch for it whose values mean nothing, to measure what values do not change."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lab.problem.build import Blueprint

VALUE = 0.01  # drawing values would take minutes under callgrind


def filled(plan: Blueprint, batch_size: int) -> tuple[nn.Module, Tensor]:
    """Return the plan's model on the CPU, and inputs [batch_size, ...]; token ids are 0."""
    model = plan.model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(VALUE)
    inputs = torch.zeros(batch_size, *plan.data.input_shape, dtype=plan.data.input_dtype)
    return model, inputs.fill_(VALUE)

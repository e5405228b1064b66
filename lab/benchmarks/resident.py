"""The program whose memory is measured: it trains a few steps, and prints the peak of one in bytes.

lab.benchmarks.footprint runs it, in a process of its own for each set of settings.
"""

from __future__ import annotations

import sys
from statistics import median

import torch
from torch import nn

from lab.benchmarks.filled import filled
from lab.measure.memory import peak_bytes, reset_peak
from lab.problem.build import blueprint
from lab.settings.config import load
from lab.training.optim import make_optim
from lab.training.trainer import AUTOCAST

CPU = torch.device("cpu")
WARMUP, STEPS = 2, 3


def main(settings: list[str]) -> None:
    """Print the median peak of steps above the memory that was resident before the model was."""
    torch.set_num_threads(1)
    config = load(settings)
    plan = blueprint(config)
    optim = make_optim(config.optim, config.batch_size)
    small = nn.Conv2d(1, 1, 3)
    small(torch.zeros(1, 1, 8, 8)).sum().backward()
    optim.optimizer(small).step()  # what all this loads is no memory of the model's step
    reset_peak(CPU)
    before = peak_bytes(CPU)
    model, inputs = filled(plan, config.batch_size)
    optimizer = optim.optimizer(model)
    targets = torch.zeros(config.batch_size, *plan.target.shape, dtype=plan.target.dtype)
    half = AUTOCAST.get(config.precision)
    peaks = []
    for _ in range(WARMUP + STEPS):
        reset_peak(CPU)
        with torch.autocast("cpu", half, enabled=half is not None):
            outputs = model(inputs)
        plan.task.loss(outputs.float() if half else outputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        peaks.append(peak_bytes(CPU) - before)
    print(int(median(peaks[WARMUP:])))


if __name__ == "__main__":
    main(sys.argv[1:])

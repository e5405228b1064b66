"""Train with Accelerate and an exchange of the lab: accumulation, and residuals in checkpoints.

torchrun --nproc-per-node 2 with_accelerate.py          (or `accelerate launch`)

If you run it again with more epochs, it continues from its last checkpoint.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lab


def attach(accelerator: Accelerator, ddp: nn.Module, exchange: str) -> None:
    """Average gradients of `ddp` with the lab. save_state and load_state keep a file per rank.

    (`register_for_checkpointing` would save only rank 0's residuals, which other ranks reject.)
    """
    state = lab.attach(ddp, exchange, scaler=accelerator.scaler)
    name = f"residuals_{accelerator.process_index}.pt"

    def save(models: list[nn.Module], weights: list[dict], folder: str) -> None:
        torch.save(state.state_dict(), Path(folder, name))

    def load(models: list[nn.Module], folder: str) -> None:
        state.load_state_dict(torch.load(Path(folder, name)))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def main(
    exchange: str | None = "onebit", folder: str = "trained", epochs: int = 4
) -> tuple[list[float], nn.Module]:
    accelerator = Accelerator(
        cpu=True,  # or on GPUs
        gradient_accumulation_steps=2,
        # Without this, load_state does not restore the order of samples, even with plain DDP.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    torch.manual_seed(0)
    inputs = torch.randn(256, 64)
    data = TensorDataset(inputs, inputs[:, :10].argmax(dim=1))
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(
        net, optimizer, DataLoader(data, 8, shuffle=True)
    )
    if exchange:
        attach(accelerator, model, exchange)
    done = max((int(path.name) for path in Path(folder).glob("[0-9]*")), default=0)
    if done:
        accelerator.load_state(f"{folder}/{done}")
    losses = []
    for epoch in range(done, epochs):
        loader.set_epoch(epoch)
        for batch, targets in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(batch), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        accelerator.save_state(f"{folder}/{epoch + 1}")
    return losses, net


if __name__ == "__main__":
    losses, _ = main()
    if dist.get_rank() == 0:
        print("loss", *(f"{loss:.4f}" for loss in losses[::8]))
    dist.destroy_process_group()

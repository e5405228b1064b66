"""Train with Lightning and an exchange of the lab: accumulation, and residuals in checkpoints.

torchrun --nproc-per-node 2 with_lightning.py

If you run it again with more epochs, it continues from its last checkpoint.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lab


class LabStrategy(DDPStrategy):
    """DDP that averages gradients with an exchange of the lab.

    Each rank has its own residuals. Rank 0 gathers them all into the checkpoint.
    """

    def __init__(self, exchange: str, **of_ddp: Any) -> None:
        super().__init__(**of_ddp)
        self._exchange = exchange

    def configure_ddp(self) -> None:
        super().configure_ddp()
        scaler = getattr(self.precision_plugin, "scaler", None)  # of "16-mixed"
        self._state = lab.attach(self.model, self._exchange, scaler=scaler)

    def save_checkpoint(self, checkpoint, filepath, storage_options=None) -> None:
        states = [None] * self.world_size if self.is_global_zero else None
        dist.gather_object(self._state.state_dict(), states)
        super().save_checkpoint({**checkpoint, "lab": states}, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._state.load_state_dict(checkpoint["lab"][self.global_rank])


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        loss = F.cross_entropy(self.net(inputs), targets)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main(
    exchange: str | None = "onebit", folder: str = "trained", epochs: int = 4
) -> tuple[list[float], nn.Module]:
    pl.seed_everything(0)
    inputs = torch.randn(256, 64)
    data = TensorDataset(inputs, inputs[:, :10].argmax(dim=1))
    model = Classifier()
    trainer = pl.Trainer(
        accelerator="cpu",  # or "gpu"
        devices=2,
        strategy=LabStrategy(exchange) if exchange else DDPStrategy(),
        accumulate_grad_batches=2,
        max_epochs=epochs,
        callbacks=[ModelCheckpoint(folder, save_last=True)],
        logger=False,
    )
    last = Path(folder, "last.ckpt")
    trainer.fit(model, DataLoader(data, 8, shuffle=True), ckpt_path=last if last.exists() else None)
    return model.losses, model


if __name__ == "__main__":
    losses, _ = main()
    if dist.get_rank() == 0:
        print("loss", *(f"{loss:.4f}" for loss in losses[::8]))

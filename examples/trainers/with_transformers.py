"""Train with Hugging Face's Trainer and an exchange of the lab: accumulation and residuals.

torchrun --nproc-per-node 2 with_transformers.py

If you run it again with more epochs, it continues from its last checkpoint.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import lab


class LabExchange(TrainerCallback):
    """Averages gradients of Trainer's DDP with the lab, and saves a file of residuals per rank."""

    def __init__(self, trainer: Trainer, exchange: str) -> None:
        self._trainer, self._exchange = trainer, exchange

    def on_train_begin(self, args, state, control, **_) -> None:
        scaler = self._trainer.accelerator.scaler
        self._state = lab.attach(self._trainer.model_wrapped, self._exchange, scaler=scaler)
        if state.global_step:
            self._state.load_state_dict(torch.load(self._file(args, state.global_step)))

    def on_save(self, args, state, control, **_) -> None:
        torch.save(self._state.state_dict(), self._file(args, state.global_step))

    def _file(self, args: TrainingArguments, step: int) -> Path:
        folder = Path(args.output_dir, f"checkpoint-{step}")
        return folder / f"residuals_{args.process_index}.pt"


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.losses: list[float] = []

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = F.cross_entropy(self.net(inputs), labels)
        self.losses.append(loss.item())
        return {"loss": loss}


def main(
    exchange: str | None = "onebit", folder: str = "trained", epochs: int = 4
) -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    inputs = torch.randn(256, 64)
    labels = inputs[:, :10].argmax(dim=1)
    model = Classifier()
    args = TrainingArguments(
        folder,
        use_cpu=True,  # or on GPUs
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_train_epochs=epochs,
        save_strategy="epoch",
        ddp_find_unused_parameters=False,
        report_to="none",
    )
    data = [{"inputs": x, "labels": y} for x, y in zip(inputs, labels, strict=True)]
    trainer = Trainer(model, args, train_dataset=data)
    if exchange:
        trainer.add_callback(LabExchange(trainer, exchange))
    last = get_last_checkpoint(folder) if Path(folder).is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    return model.losses, model


if __name__ == "__main__":
    losses, _ = main()
    if dist.get_rank() == 0:
        print("loss", *(f"{loss:.4f}" for loss in losses[::8]))

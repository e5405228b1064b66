"""train.py with 1-bit SGD: two more lines.

torchrun --nproc-per-node 2 examples/own_loop/train_onebit.py
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import lab

STEPS, BATCH, CONTEXT, WIDTH = 20, 8, 32, 64


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.tokens.weight  # tied

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        hidden = self.tokens(ids) + self.places.weight[:, None]
        return self.head(self.layers(hidden, mask, is_causal=True))


def main() -> list[float]:
    dist.init_process_group("gloo")
    text = torch.tensor(list(Path(__file__).with_name("train.py").read_bytes()))
    torch.manual_seed(0)
    model = DistributedDataParallel(Transformer())
    lab.attach(model, "onebit")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=draw)
        chunks = torch.stack([text[start : start + CONTEXT + 1] for start in starts], dim=1)
        loss = F.cross_entropy(model(chunks[:-1]).flatten(0, 1), chunks[1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print("loss", *(f"{loss:.4f}" for loss in losses))
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()

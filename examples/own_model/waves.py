import torch


def waves(seed, count=2000, noise=0.1):
    chance = torch.Generator().manual_seed(seed)
    x = 6 * torch.rand(count, 1, generator=chance)
    return x, torch.sin(x) + noise * torch.randn(count, 1, generator=chance)

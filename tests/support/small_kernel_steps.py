"""A model of three parameters, trained by kernels."""

import torch
from torch import nn

from hf_zero.engine.engine import ZeroEngine


class Small(nn.Module):
    """Of parameters with and without padding behind them."""

    def __init__(self, sizes: tuple[int, ...] = (32, 5, 48)):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.linspace(-1, 1, size)) for size in sizes)

    def forward(self) -> torch.Tensor:
        return sum((part.square() * (index + 1)).sum() for index, part in enumerate(self.parts))


def small_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def small(
    sizes: tuple[int, ...] = (32, 5, 48), *, make_optimizer=small_adamw, **more
) -> tuple[Small, torch.optim.Optimizer, ZeroEngine]:
    torch.manual_seed(0)
    model = Small(sizes)
    optimizer = make_optimizer(model)
    return model, optimizer, ZeroEngine(model, [optimizer], {"stage": 2, "kernels": "always", **more})

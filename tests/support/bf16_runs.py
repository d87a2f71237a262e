"""GPT-2 in bfloat16, whose masters are stepped by kernels."""

import torch
from torch import nn
from training import fused_adamw, gpt2, gpt2_batch

from hf_zero.engine.engine import ZeroEngine


def built(
    stage: int, *, device: str = "cpu", make_optimizer=fused_adamw, **settings
) -> tuple[nn.Module, torch.optim.Optimizer, ZeroEngine]:
    torch.manual_seed(0)
    model = gpt2().to(torch.bfloat16).to(device)
    optimizer = make_optimizer(model)
    wanted = {"stage": stage, "bucket_bytes": "20KiB", "kernels": "always", **settings}
    return model, optimizer, ZeroEngine(model, [optimizer], wanted)


def backward(model: nn.Module, seed: int) -> torch.Tensor:
    batch = gpt2_batch(torch.Generator().manual_seed(seed), 2)
    device = next(model.parameters()).device
    loss = model(**{name: values.to(device) for name, values in batch.items()}).loss
    loss.backward()
    return loss.detach()

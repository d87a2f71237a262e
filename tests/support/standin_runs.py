"""GPT-2 on the stand-in for an accelerator: settings, and steps under them or in a plain loop."""

import standin_device
import torch
import torch.distributed as dist
from torch import nn
from training import fused_adamw, gpt2, gpt2_batch

from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.state.loss_scale import GradScaler

MAX_NORM = 100.0
FILES, HOST = {"optimizer": "nvme"}, {"optimizer": "cpu"}
IN_BLOCKS = {"weights": "int8", "gradients": "int8"}
# Settings that change no digit, by name: each trains as a plain loop does.
EXACT = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "state in host memory": {"stage": 2, "offload": HOST},
    "half of it": {"stage": 2, "offload": HOST | {"ratio": 0.5}},
    "early steps": {"stage": 3, "offload": HOST | {"speculate_bytes": "1MiB"}},
    "state in files": {"stage": 2, "offload": FILES | {"speculate_bytes": 0}},
    "early steps in files": {"stage": 3, "offload": FILES | {"speculate_bytes": "1MiB"}},
    **{
        f"parameters in {params}, state in {state}": {"stage": 3, "offload": {"params": params, "optimizer": state}}
        for params in ("cpu", "nvme")
        for state in ("none", "cpu", "nvme")
    },
    "activations in host memory": {"stage": 3, "offload": {"activations": "cpu"}},
}
# Settings that do, and others that change none from there.
INEXACT = {
    "bf16": ({"stage": 1, "param_dtype": "bfloat16"}, {"stage": 3, "offload": HOST}),
    "blocks on the wire": ({"stage": 1, "comm": IN_BLOCKS}, {"stage": 2, "offload": HOST}),
    "8-bit moments": ({"stage": 2, "moments": "8bit"}, {"offload": HOST}),
    "a step late": ({"stage": 2, "offload": HOST | {"delay": 1, "delay_warmup": 1}}, {"stage": 3}),
}


def own_device() -> torch.device:
    """Another one than the first, which is the current one of this thread and of all others."""
    return torch.device(standin_device.NAME, dist.get_rank() + 1)


def prepared(settings: dict | None) -> tuple[nn.Module, torch.optim.Optimizer, ZeroEngine | None]:
    torch.manual_seed(0)
    model = gpt2(layers=2).to(own_device())
    optimizer = fused_adamw(model)
    return model, optimizer, None if settings is None else ZeroEngine(model, [optimizer], settings)


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, engine: ZeroEngine | None, scaler: GradScaler, seeds
) -> list:
    """Their losses; without an engine, a plain loop's."""
    losses = []
    for seed in seeds:
        batch = gpt2_batch(torch.Generator().manual_seed(100 * seed + dist.get_rank()), 2)
        loss = model(**{name: values.to(own_device()) for name, values in batch.items()}).loss
        scaler.scale(loss).backward()
        losses.append(loss.detach().cpu())
        scaler.unscale_(optimizer)
        if engine is None:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(dist.get_world_size())
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        else:
            engine.clip_grad_norm_(MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses

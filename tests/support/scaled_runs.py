"""A plain loop with a gradient scaler, under DDP and under the engine."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import adamw_in_two_groups, gpt2, gpt2_batch

from hf_zero import GradScaler
from hf_zero.engine.engine import ZeroEngine

SCALE = {"init_scale": 2.0**12, "growth_interval": 3}
OVERFLOWS = {1: 0, 4: 1, 5: 0, 9: 1}
"""Step → the rank with an infinite loss."""


@dataclass
class Run:
    """A rank's observations of a run."""

    losses: list[float]
    scales: list[float]
    skipped: list[bool]
    norms: list[float]
    tensors: dict[str, torch.Tensor]

    def equals(self, other: "Run") -> bool:
        return (
            (self.losses, self.scales, self.skipped) == (other.losses, other.scales, other.skipped)
            and self.tensors.keys() == other.tensors.keys()
            and all(torch.equal(self.tensors[name], other.tensors[name]) for name in self.tensors)
        )


def train(
    rank: int,
    config: dict | None,
    make_optimizer=adamw_in_two_groups,
    steps: int = 12,
    max_norm: float | None = None,
    dtype: torch.dtype = torch.float32,
    autocast: bool = True,
    overflows: dict[int, int] = OVERFLOWS,
) -> Run:
    """Runs a plain loop with a scaler. `config` None uses DDP with torch's own scaler."""
    torch.manual_seed(0)
    model = gpt2().to(dtype)
    made = make_optimizer(model)
    optimizers = made if isinstance(made, list) else [made]
    if config is None:
        engine, entry, scaler = None, DistributedDataParallel(model), torch.amp.GradScaler("cpu", **SCALE)
    else:
        engine, entry, scaler = ZeroEngine(model, optimizers, config), model, GradScaler("cpu", **SCALE)
    generator = torch.Generator().manual_seed(100 + rank)
    run = Run([], [], [], [], {})
    for step in range(steps):
        with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
            loss = entry(**gpt2_batch(generator, 2)).loss
        run.losses.append(loss.item())
        scaler.scale(loss * (float("inf") if overflows.get(step) == rank else 1.0)).backward()
        if max_norm is not None:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            clip = engine.clip_grad_norm_ if engine else partial(nn.utils.clip_grad_norm_, model.parameters())
            run.norms.append(float(clip(max_norm)))
        before = scaler.get_scale()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        run.scales.append(scaler.get_scale())
        run.skipped.append(scaler.get_scale() < before)
        for optimizer in optimizers:
            optimizer.zero_grad()
    run.tensors = {name: value.detach().float().clone() for name, value in model.state_dict().items()}
    return run


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if ".h." in name and p.dim() == 2]
    held = set(matrices)
    others = [p for p in model.parameters() if p not in held]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=1e-3)]

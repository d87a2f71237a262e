"""The Lion of the package lion-pytorch, which the extra `dev` installs; if missing, a copy of its formula.

The copy has lion-pytorch's name, by which kernels find it. If the package is installed, test_kernel_steps.py compares the copy
with it, bit for bit.
"""

from collections.abc import Iterable

import torch


class PlainLion(torch.optim.Optimizer):
    """Lion of lion-pytorch 0.2.5; Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675."""

    def __init__(
        self,
        parameters: Iterable,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
    ):
        self._init_lr = lr
        self.decoupled_wd = decoupled_weight_decay
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            weight_decay = group["weight_decay"] / (self._init_lr if self.decoupled_wd else 1.0)
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum = state["exp_avg"]
                parameter.mul_(1 - lr * weight_decay)
                mixed = momentum.clone().mul_(beta1).add_(parameter.grad, alpha=1 - beta1)
                parameter.add_(mixed.sign_(), alpha=-lr)
                momentum.mul_(beta2).add_(parameter.grad, alpha=1 - beta2)


try:
    from lion_pytorch import Lion
except ImportError:
    Lion = type("Lion", (PlainLion,), {"__module__": "lion_pytorch.lion_pytorch"})

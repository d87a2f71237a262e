"""A few steps of an engine whose kernels run in Triton's interpreter, on CPU tensors.

Run by test_kernel_steps.py in its own process: `python engine_interpreted.py` prints one JSON object, which maps each case to the
result of `trained`.
"""

import json
import sys
from functools import partial

import torch
from plain_lion import Lion
from torch import nn
from triton_interpreter import interpret

from hf_zero.engine.engine import ZeroEngine

adamw = partial(torch.optim.AdamW, lr=0.01)
sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True)
lion = partial(Lion, lr=0.01, weight_decay=0.1)
CASES = {
    "AdamW": (adamw, {"stage": 2}),
    "AdamW with masters": (adamw, {"stage": 3, "param_dtype": "bfloat16"}),
    "SGD": (sgd, {"stage": 0}),
    "Lion": (lion, {"stage": 2, "param_dtype": "bfloat16"}),
    "AdamW, moments in 8 bits": (adamw, {"stage": 2, "param_dtype": "bfloat16", "moments": "8bit"}),
    "AdamW, rounded by chance": (adamw, {"stage": 1, "param_dtype": "bfloat16", "rounding": "stochastic"}),
}


class Squares(nn.Module):
    """Three parameters. One has padding after it, and one is large enough for 8-bit blocks."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(size, generator=generator)) for size in (4200, 5, 48))

    def forward(self) -> torch.Tensor:
        return sum(part.float().square().sum() for part in self.parts)


def trained(case: str, kernels: str) -> dict[str, list[float]]:
    """Returns the norms, and the sums of parameters and state, of two steps without effective clipping."""
    make_optimizer, settings = CASES[case]
    model = Squares()
    optimizer = make_optimizer(model.parameters())
    engine = ZeroEngine(model, [optimizer], {**settings, "kernels": kernels})
    norms = []
    for max_norm in (float("inf"), 1e9):
        model().backward()
        norms.append(engine.clip_grad_norm_(max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    tensors = [row.tensor.detach() for row in engine.state.rows()]
    tensors += [value for _, value in sorted(engine.whole_state_dict(wanted=True).items())]
    report = engine.memory_report().kernels
    return {
        "norms": norms,
        "sums": [tensor.double().sum().item() for tensor in tensors],
        "buckets": [] if report is None else [report.buckets, report.all_buckets],
    }


if __name__ == "__main__":
    interpret()
    json.dump({case: trained(case, "auto") for case in CASES}, sys.stdout)

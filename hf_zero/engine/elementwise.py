"""Whether an optimizer treats every element by itself, so that it may be given parts of parameters."""

import copy
from collections import defaultdict

import torch
from torch import nn

_NEED_WHOLE_MATRICES = frozenset(
    [
        "adafactor",
        "adalomo",
        "apolloadamw",
        "came",
        "galoreadafactor",
        "galoreadamw",
        "galoreadamw8bit",
        "kron",
        "lamb",
        "lars",
        "lbfgs",
        "lomo",
        "muon",
        "shampoo",
        "sm3",
        "soap",
        "sparseadam",
        "stableadamw",
    ]
)
"""Names (lower case) of optimizers that look at whole parameters and cannot be tried on a small example."""

_SHAPE = (4, 6)
_CUT = 10


def refuse_unless_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raises `ValueError` for an optimizer whose update of an element depends on other elements.

    A copy of the optimizer steps twice on a 4 x 6 matrix, and on the same elements as two flat pieces; an element-wise one
    gives the same values. Optimizers that cannot be copied so are judged by name.
    """
    name = type(optimizer).__name__
    fault = "needs whole parameters" if name.lower() in _NEED_WHOLE_MATRICES else _fault_on_pieces(optimizer)
    if fault is not None:
        raise ValueError(
            f"hf_zero: the optimizer {name} {fault}, so it cannot be given shards of parameters; layouts that keep "
            "parameters whole are not built yet. Use an element-wise optimizer (AdamW, Adam, SGD, RMSprop, Adagrad, NAdam, "
            "RAdam, Lion, ...), or train without hf_zero."
        )


def _fault_on_pieces(optimizer: torch.optim.Optimizer) -> str | None:
    generator = torch.Generator().manual_seed(0)
    start, gradient = (torch.randn(_SHAPE, generator=generator) for _ in range(2))
    # Pieces unlike each other and the whole, so that whatever is taken over a parameter (a sign, a norm) differs.
    gradient.abs_().view(-1)[_CUT:].mul_(-3.0)
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    try:
        (whole,) = _stepped(optimizer, group, [start], [gradient])
    except Exception:
        # A class that cannot step outside its own construction tells nothing about its arithmetic.
        return None
    flat, flat_gradient = start.reshape(-1), gradient.reshape(-1)
    try:
        pieces = _stepped(optimizer, group, [flat[:_CUT], flat[_CUT:]], [flat_gradient[:_CUT], flat_gradient[_CUT:]])
    except Exception as error:
        return f"fails on flat pieces of a parameter ({error})"
    if torch.allclose(torch.cat(pieces), whole.reshape(-1), rtol=1e-5, atol=1e-7):
        return None
    return "updates an element by what other elements are"


def _stepped(
    optimizer: torch.optim.Optimizer, group: dict, values: list[torch.Tensor], gradients: list[torch.Tensor]
) -> list[torch.Tensor]:
    parameters = [nn.Parameter(value.clone()) for value in values]
    # A learning rate of 0 (warm-up) would hide every difference.
    settings = {k: v for k, v in group.items() if k != "params"} | {"lr": 0.1, "params": parameters}
    trial = copy.copy(optimizer)
    trial.param_groups, trial.state = [settings], defaultdict(dict)
    with torch.random.fork_rng(devices=[]):
        for _ in range(2):
            for parameter, gradient in zip(parameters, gradients):
                parameter.grad = gradient.clone()
            trial.step()
    return [parameter.detach() for parameter in parameters]

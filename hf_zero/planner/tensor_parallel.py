"""A rank's part of a tensor-parallel model without memory, by transformers' own plan."""

import torch
from torch import nn

from ..forecast.fit import PlanError
from ..layout.boxes import Box

_FIRST_OF_TWO = ("colwise", "colwise_gather_output", "colwise_rep")
_LAST = ("rowwise", "rowwise_split_input", "rowwise_rep")
_AS_THEY_ARE = (
    "sequence_parallel",
    "replicated_with_grad_allreduce",
    "mla_kv_a_proj",
    "all_reduce",
    "moe_tp_experts",
    "moe_identity_expert",
    "local_params",
    "replicate",
)
"""Styles that leave parameters whole on each rank."""

_BY_EXPERT = "grouped_gemm"
"""The style of parameters that are split by expert."""

_PACKED = 2
"""Number of projections next to each other in one tensor, each of which is cut."""


def split_without_memory(model: nn.Module, tp_size: int, ep_size: int) -> frozenset[nn.Parameter]:
    """Gives each parameter of a model on the meta device the shape of the first rank's part, the largest of all parts.

    Returns:
        The parameters split by `ep_size`.

    Raises:
        PlanError: transformers has no plan for the model, the plan has an unknown style, or `ep_size` does not divide the
            number of experts.
    """
    plan, expert_plan = _plan_of(model, "tp", tp_size), _plan_of(model, "ep", ep_size)
    # Tied parameters get one common part.
    made: dict[nn.Parameter, nn.Parameter] = {}
    experts = set()
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            path = f"{module_name}.{name}"
            if parameter not in made and _style_of(path, expert_plan) == _BY_EXPERT:
                made[parameter] = _some_experts(parameter, path, ep_size)
                experts.add(made[parameter])
            elif parameter not in made:
                made[parameter] = _part(parameter, name, _style_of(path, plan), tp_size)
            module.register_parameter(name, made[parameter])
    return frozenset(experts)


def _plan_of(model: nn.Module, kind: str, size: int) -> dict[str, str]:
    if size == 1:
        return {}
    plan: dict[str, str] = dict(getattr(model, f"{kind}_plan", None) or {})
    if not plan:
        raise PlanError(
            f"hf_zero: transformers has no {kind}_plan for {type(model).__name__}, so {kind}_size {size} cannot be planned. Plan "
            f"it with {kind}_size 1."
        )
    return plan


def _some_experts(parameter: nn.Parameter, path: str, ep_size: int) -> nn.Parameter:
    count = parameter.shape[0]
    if count % ep_size:
        raise PlanError(
            f"hf_zero: ep_size is {ep_size}; allowed: a number that divides the {count} experts of {path!r}."
        )
    return _part(parameter, path, _BY_EXPERT, ep_size)


def _part(parameter: nn.Parameter, name: str, style: str | None, size: int) -> nn.Parameter:
    dim, repeats = _cut(parameter.dim(), name, style)
    if dim is None:
        return parameter
    shape = Box.whole(parameter.shape).split(dim, size, 0, repeats=repeats).local_shape
    return nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"), requires_grad=parameter.requires_grad)


def _cut(dims: int, name: str, style: str | None) -> tuple[int | None, int]:
    """Returns the dimension along which a style cuts a parameter (or None), and the number of tensors in this dimension."""
    matrix = dims > 1
    cuts: dict[str | None, tuple[int | None, int]] = {
        None: (None, 1),
        "embedding_rowwise": (0, 1),
        "embedding_colwise": (1, 1),
        "grouped_gemm": (0, 1),
        "packed_colwise": (dims - 2 if matrix else 0, _PACKED if matrix else 1),
        "packed_rowwise": (dims - 1 if matrix else None, _PACKED),
        **dict.fromkeys(_FIRST_OF_TWO, (max(dims - 2, 0), 1)),
        **dict.fromkeys(_LAST, (None if name == "bias" else dims - 1, 1)),
        **dict.fromkeys(_AS_THEY_ARE, (None, 1)),
    }
    if style not in cuts:
        raise PlanError(
            f"hf_zero: the model's tp_plan has the style {style!r}, which the planner does not know; known styles: "
            f"{', '.join(sorted(str(each) for each in cuts if each))}."
        )
    return cuts[style]


def _style_of(name: str, plan: dict[str, str]) -> str | None:
    """Returns the style of a parameter, or else of its module. Plans have asterisks for the numbers of layers."""
    general = ".".join("*" if part.isdigit() else part for part in name.split("."))
    owner = general.rpartition(".")[0]
    return plan.get(general, plan.get(owner))

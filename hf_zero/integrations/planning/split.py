"""The part of a model without memory that one rank of a tensor-parallel copy holds, by transformers' own plan for the model."""

import torch
from torch import nn

from ...layout.boxes import Box
from ...plan.errors import PlanError

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

_PACKED = 2
"""Projections side by side in one tensor, of which each is cut."""


def split_without_memory(model: nn.Module, tp_size: int) -> None:
    """Gives each parameter of a model on the meta device the shape of the first rank's part, which no other's exceeds.

    Raises:
        PlanError: transformers has no plan for the model, or one with a style that is not known here.
    """
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    if not plan:
        raise PlanError(
            f"hf_zero: transformers has no tp_plan for {type(model).__name__}, so tp_size {tp_size} cannot be planned. Plan it "
            "with tp_size 1."
        )
    # Of tied parameters one part is made.
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in made:
                style = _style_of(f"{module_name}.{name}", plan)
                made[parameter] = _part(parameter, name, style, tp_size)
            module.register_parameter(name, made[parameter])


def _part(parameter: nn.Parameter, name: str, style: str | None, tp_size: int) -> nn.Parameter:
    dim, repeats = _cut(parameter.dim(), name, style)
    if dim is None:
        return parameter
    shape = Box.whole(parameter.shape).split(dim, tp_size, 0, repeats=repeats).local_shape
    return nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"), requires_grad=parameter.requires_grad)


def _cut(dims: int, name: str, style: str | None) -> tuple[int | None, int]:
    """The dimension along which a style cuts a parameter, or None, and how many tensors side by side it cuts there."""
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
            f"hf_zero: the model's tp_plan has the style {style!r}, of which the planner does not know how it cuts; known are "
            f"{', '.join(sorted(str(each) for each in cuts if each))}."
        )
    return cuts[style]


def _style_of(name: str, plan: dict[str, str]) -> str | None:
    """Of a parameter, or else of its module; layers' numbers are asterisks in plans."""
    general = ".".join("*" if part.isdigit() else part for part in name.split("."))
    owner = general.rpartition(".")[0]
    return plan.get(general, plan.get(owner))

"""Several models, and parameters outside of all models, trained together by one engine."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

_OUTSIDE = "optimizer["


class Models(nn.Module):
    """A module with all parameters of several models, and with their optimizers' parameters outside of the models. Never called.

    The parameters of the first model keep their names. Names in further models begin with `model[1]`, `model[2]` and so on. The
    name of a parameter outside of all models is its index in the optimizers: `optimizer[0].group[1].2`. No module written in
    Python has attributes with such names.

    Args:
        models: the models that the script calls.
        outside: maps a group's name to the group's parameters outside of all models, by their index in the group.

    Attributes:
        models: the argument `models`.
        named_models: (prefix of the names, model) for each model.
    """

    def __init__(self, models: Sequence[nn.Module], outside: dict[str, dict[int, nn.Parameter]]):
        super().__init__()
        self.models = tuple(models)
        # Not registered as submodules, because `nn.Module` does not support such names.
        self.named_models = [(f"model[{index}]" if index else "", model) for index, model in enumerate(models)]
        self._named = list(self.named_models)
        for name, parameters in outside.items():
            holder = nn.Module()
            for index, parameter in parameters.items():
                holder.register_parameter(str(index), parameter)
            self._named.append((name, holder))

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        for name, module in self._named:
            path = f"{prefix}.{name}" if prefix and name else prefix or name
            yield from module.named_modules(memo, path, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        for name, module in self._named[1:]:
            if target == name or target.startswith(f"{name}."):
                return module.get_submodule(target[len(name) + 1 :])
        return self.models[0].get_submodule(target)


def joined(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], *, in_training: bool = False
) -> nn.Module:
    """Returns a module with all parameters of the models and optimizers. This is the model itself, unless more are needed.

    Args:
        models: the models.
        optimizers: their optimizers.
        in_training: the optimizers have already trained the models, so no parameter has been replaced.

    Raises:
        ValueError: an optimizer has a tensor that is no Parameter. Or it has parameters of no model, and some parameters of the
            models have no optimizer: most likely they were replaced after the optimizer was built.
    """
    of_models = {parameter for model in models for parameter in model.parameters()}
    outside: dict[str, dict[int, nn.Parameter]] = {}
    for number, optimizer in enumerate(optimizers):
        for group_number, group in enumerate(optimizer.param_groups):
            found = {index: p for index, p in enumerate(group["params"]) if p not in of_models}
            for tensor in found.values():
                if not isinstance(tensor, nn.Parameter):
                    raise ValueError(
                        f"hf_zero: {type(optimizer).__name__} holds a {type(tensor).__name__} of shape {tuple(tensor.shape)} "
                        "that is not an nn.Parameter, such as a buffer with requires_grad. DDP would not reduce its gradient. "
                        "Make it an nn.Parameter."
                    )
            if found:
                outside[f"{_OUTSIDE}{number}].group[{group_number}]"] = found
    trained = [p for parameters in outside.values() for p in parameters.values() if p.requires_grad]
    held = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    if trained and not in_training and not all(p in held for p in of_models if p.requires_grad):
        kinds = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ValueError(
            f"hf_zero: {kinds} holds {len(trained)} parameters that are not in the model (first: shape "
            f"{tuple(trained[0].shape)}) and lacks some of the model's. Build the optimizer after resize_token_embeddings and "
            "get_peft_model, and freeze all other parameters."
        )
    return Models(models, outside) if len(models) > 1 or outside else models[0]


def models_in(module: nn.Module) -> tuple[nn.Module, ...]:
    """Returns the models in a module returned by `joined`."""
    return module.models if isinstance(module, Models) else (module,)


def named_models_in(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns (prefix of the names, model) for each model in a module returned by `joined`."""
    return module.named_models if isinstance(module, Models) else [("", module)]


def is_of_first(name: str) -> bool:
    """Whether a parameter with this name is in the first model."""
    return not name.startswith(("model[", _OUTSIDE))


def is_outside(name: str) -> bool:
    """Whether a parameter with this name is in no model, so its values are in no weights file."""
    return name.startswith(_OUTSIDE)

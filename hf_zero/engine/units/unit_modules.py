"""Chooses the modules that are units: unsharded before their forward, resharded after it."""

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from ...config import AUTO, ConfigError

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""A container may be iterated and never called, so that its hooks would never run: what lies in it is looked at instead."""

_SMALLEST_SHARE = 64
"""By size, a unit has at least this part of the model: below it, gathers cost more than memory is won."""


def find_unit_modules(model: nn.Module, names: Sequence[str] | str) -> list[tuple[str, nn.Module]]:
    """(name, module) of each unit in registration order, none inside another; may be empty.

    Args:
        names: class names, as in transformers' `_no_split_modules`; `auto` finds them: what the model names there, else
            the repeated blocks of its ModuleLists and Sequentials, else its children of some size.

    Raises:
        ConfigError: no module has a class that was named.
    """
    if names != AUTO:
        found = _of_classes(model, set(names))
        if not found:
            known = sorted({type(module).__name__ for module in model.modules()})
            raise ConfigError(
                f"hf_zero config: `unit_modules` is {list(names)!r}, and {type(model).__name__} has no module of such a class. "
                f"It has: {', '.join(known)}."
            )
        return found
    return (
        _of_classes(model, _no_split_classes(model)) or _of_classes(model, _repeated_classes(model)) or _by_size(model)
    )


def _no_split_classes(model: nn.Module) -> set[str]:
    # Wrappers such as PEFT's do not repeat what the model inside them says.
    return {name for module in model.modules() for name in (getattr(module, "_no_split_modules", None) or ())}


def _repeated_classes(model: nn.Module) -> set[str]:
    repeated: set[str] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            blocks = [
                child for child in module if not isinstance(child, _CONTAINERS) and any(True for _ in child.children())
            ]
            counts = Counter(type(child).__name__ for child in blocks)
            repeated.update(name for name, count in counts.items() if count > 1)
    return repeated


def _of_classes(model: nn.Module, classes: set[str]) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if name and not inside and type(module).__name__ in classes and _numel(module) > 0:
            found.append((name, module))
    return found


def _by_size(model: nn.Module) -> list[tuple[str, nn.Module]]:
    least = _numel(model) / _SMALLEST_SHARE
    # A container without a forward is never called, so its hooks would never run: its children are looked at instead.
    children = [(name, child) for name, child in model.named_children() if _numel(child) >= least]
    found: list[tuple[str, nn.Module]] = []
    for name, child in children:
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            found.extend((f"{name}.{inner}", module) for inner, module in _by_size(child))
        else:
            found.append((name, child))
    return found


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def group_layers(
    units: Sequence[tuple[str, nn.Module]], parameters_of: Mapping[str, Sequence[nn.Parameter]], least_bytes: int
) -> list[list[str]]:
    """Names of the modules of each unit: layers of a class that follow one another in a list, until they have `least_bytes`.

    Args:
        units: (name, module) of the layers, in registration order.
        parameters_of: layer's name → what it would gather by itself.
    """
    groups: list[list[str]] = []
    place, gathered_bytes = None, 0
    for name, module in units:
        nbytes = sum(parameter.nbytes for parameter in parameters_of[name])
        its_place = (name.rpartition(".")[0], type(module))
        if groups and its_place == place and gathered_bytes < least_bytes:
            groups[-1].append(name)
            gathered_bytes += nbytes
        else:
            groups.append([name])
            place, gathered_bytes = its_place, nbytes
    return groups


def own_parameters(
    model: nn.Module, units: Sequence[tuple[str, nn.Module]]
) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Unit name → its (name, parameter) pairs, the root's under ""; a weight tied into another unit is the root's."""
    owners: dict[nn.Parameter, set[str]] = {}
    for name, module in model.named_modules():
        unit = next((outer for outer, _ in units if name == outer or name.startswith(f"{outer}.")), "")
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, set()).add(unit)
    own: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in ("", *(name for name, _ in units))}
    for name, parameter in model.named_parameters():
        units_of = owners[parameter]
        own[next(iter(units_of)) if len(units_of) == 1 else ""].append((name, parameter))
    return own

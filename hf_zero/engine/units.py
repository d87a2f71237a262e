"""Chooses the modules to unshard before their forward, and to reshard afterwards: the units."""

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from ..config import AUTO, ConfigError
from .compiled import compiles_itself
from .models import named_models_in

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Containers may be iterated without a call, so their hooks would never run. Their children are considered instead."""


_SMALLEST_SHARE = 64
"""A unit chosen by size has at least 1 / this number of the model's elements. Gathers of smaller units would not pay off."""


def find_unit_modules(model: nn.Module, names: Sequence[str] | str) -> list[tuple[str, nn.Module]]:
    """Returns (name, module) of each unit in registration order, without nested units; may be empty.

    Args:
        names: class names, as in transformers' `_no_split_modules`. `auto` uses the classes in the model's `_no_split_modules`,
            or else repeated blocks of its ModuleLists and Sequentials, or else its children with a minimum size.

    Raises:
        ConfigError: no module has one of the classes.
    """
    units = [
        (f"{prefix}.{name}" if prefix else name, module)
        for prefix, part in named_models_in(model)
        for name, module in _units_of(part, names)
    ]
    if not units and names != AUTO:
        known = sorted({type(module).__name__ for module in model.modules()})
        raise ConfigError(
            f"hf_zero config: `unit_modules` is {list(names)!r}, but {type(model).__name__} has no module of any such class. "
            f"Its classes: {', '.join(known)}."
        )
    return units


def _units_of(model: nn.Module, names: Sequence[str] | str) -> list[tuple[str, nn.Module]]:
    if names != AUTO:
        return _of_classes(model, set(names))
    return (
        _of_classes(model, _no_split_classes(model)) or _of_classes(model, _repeated_classes(model)) or _by_size(model)
    )


def _no_split_classes(model: nn.Module) -> set[str]:
    # Search all modules, because wrappers such as PEFT's do not copy the attribute of the model inside.
    return {name for module in model.modules() for name in (getattr(module, "_no_split_modules", None) or ())}


def _repeated_classes(model: nn.Module) -> set[str]:
    repeated: set[str] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            # A block has children. Otherwise each Linear of a plain Sequential would be a unit.
            blocks = [
                child for child in module if not isinstance(child, _CONTAINERS) and any(True for _ in child.children())
            ]
            counts = Counter(type(child).__name__ for child in blocks)
            repeated.update(name for name, count in counts.items() if count > 1)
    return repeated


def _of_classes(model: nn.Module, classes: set[str]) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        # The model itself, with an empty name, is no unit, because all parameters would be whole at the same time.
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if name and not inside and type(module).__name__ in classes and _numel(module) > 0:
            found.append((name, module))
    return found


def _by_size(model: nn.Module) -> list[tuple[str, nn.Module]]:
    least = _numel(model) / _SMALLEST_SHARE
    children = [(name, child) for name, child in model.named_children() if _numel(child) >= least]
    found: list[tuple[str, nn.Module]] = []
    for name, child in children:
        # A compiled container is called as a whole, so hooks of layers inside would run in the middle of a graph.
        if isinstance(child, _CONTAINERS) and not compiles_itself(child):
            found.extend((f"{name}.{inner}", module) for inner, module in _by_size(child))
        else:
            found.append((name, child))
    return found


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def group_layers(
    units: Sequence[tuple[str, nn.Module]], parameters_of: Mapping[str, Sequence[nn.Parameter]], least_bytes: int
) -> list[list[str]]:
    """Joins consecutive layers of one class in a list into units of at least `least_bytes`; returns the names of each unit.

    Args:
        units: (name, module) of the layers, in registration order.
        parameters_of: maps a layer's name to the parameters that the layer alone would gather.
        least_bytes: number of bytes from which on a unit gets no further layer.
    """
    groups: list[list[str]] = []
    parent, gathered_bytes = None, 0
    for name, module in units:
        nbytes = sum(parameter.nbytes for parameter in parameters_of[name])
        its_parent = (name.rpartition(".")[0], type(module))
        if groups and its_parent == parent and gathered_bytes < least_bytes:
            groups[-1].append(name)
            gathered_bytes += nbytes
        else:
            groups.append([name])
            parent, gathered_bytes = its_parent, nbytes
    return groups


def own_parameters(
    model: nn.Module, units: Sequence[tuple[str, nn.Module]]
) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Maps unit names to (name, parameter) pairs, "" for the root, which also has weights tied between units."""
    owners: dict[nn.Parameter, set[str]] = {}
    for name, module in model.named_modules():
        unit = next((outer for outer, _ in units if name == outer or name.startswith(f"{outer}.")), "")
        # Search by module, because `named_parameters` yields a tied weight only once, which would hide the second unit.
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(unit)
    own: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in ("", *(name for name, _ in units))}
    for name, parameter in model.named_parameters():
        units_of = owners[parameter]
        own[next(iter(units_of)) if len(units_of) == 1 else ""].append((name, parameter))
    return own

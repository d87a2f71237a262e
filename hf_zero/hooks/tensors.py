"""Finds the tensors in the inputs and outputs of a forward, and whether a forward is a recomputation."""

from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from itertools import repeat
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

_LEAVES = frozenset({type(None), bool, int, float, str})
_PLAIN = _LEAVES | {torch.Tensor, nn.Parameter}
_IS_TENSOR: Callable[[object], bool] = torch.Tensor.__instancecheck__


def differentiable_tensors(value: object) -> list[torch.Tensor]:
    """The tensors that take gradients in nested lists, tuples, dicts, ModelOutputs and dataclasses."""
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in the same places."""
    if isinstance(value, torch.Tensor):
        return [value]
    # Plain nests are looked through here: torch's walk takes several times as long, and each layer is looked at.
    kind = type(value)
    if kind in _LEAVES:
        return []
    found = []
    if kind is tuple or kind is list or kind is dict:
        items = value.values() if kind is dict else value
        if _PLAIN.issuperset(map(type, items)):
            # Nearly always: in a loop in C.
            return list(filter(_IS_TENSOR, items))
        for item in items:
            if isinstance(item, torch.Tensor):
                found.append(item)
            elif type(item) not in _LEAVES:
                found += tensors_in(item)
        return found
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        # torch's walk takes a dataclass for a leaf, and would miss the tensors that a model returns in one. Python takes the
        # class itself for a dataclass, too, which has no values.
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_in(list(vars(leaf).values()))
    return found


def is_in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


def set_all(owners: Iterable[Any], name: str, values: Iterable[Any]) -> None:
    """Sets an attribute of many objects in a loop in C, which takes a tenth of a loop in Python."""
    # `setattr` returns None, so `any` goes on to the end.
    any(map(setattr, owners, repeat(name), values))

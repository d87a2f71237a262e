"""Finds the tensors in the inputs and outputs of a forward, and whether a forward is a recomputation."""

from collections.abc import Callable, Iterable, Iterator, Mapping
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
    """Returns the tensors that require gradients in nested lists, tuples, mappings, ModelOutputs and dataclasses."""
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]


def leaves(value: Any) -> Iterator[Any]:
    """Yields all leaves of nested lists, tuples and dicts."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    else:
        yield value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns all tensors in nested lists, tuples, mappings, ModelOutputs and dataclasses."""
    if isinstance(value, torch.Tensor):
        return [value]
    # Walk plain containers here: torch's walk is several times slower, and this runs for each layer.
    kind = type(value)
    if kind in _LEAVES:
        return []
    found = []
    if kind is tuple or kind is list or kind is dict:
        items = value.values() if kind is dict else value
        if _PLAIN.issuperset(map(type, items)):
            # The usual case is a container without containers, filtered in a loop in C.
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
        # torch's walk treats a dataclass as a leaf, so a model's tensors in one would be missed. `is_dataclass` is also true for
        # the class itself, which has no values.
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_in(list(vars(leaf).values()))
        # The same holds for mappings of another class than dict, such as a tokenizer's BatchEncoding.
        elif isinstance(leaf, Mapping):
            found += tensors_in(list(leaf.values()))
    return found


_MOST_NODES = 16
"""In the graph of a loss that replays mini-batches: a few sums over the leaf that has the hook."""


def reaches_no_parameter(loss: torch.Tensor) -> bool:
    """Whether the small graph of a loss ends in no parameter, so only hooks can compute gradients.

    Losses that cache gradients (GradCache) are of this kind: a hook replays the forward and the backward of each mini-batch.
    """
    if loss.is_leaf:
        return not isinstance(loss, nn.Parameter)
    waiting: list[Any] = [loss.grad_fn]
    seen = {loss.grad_fn}
    while waiting:
        node = waiting.pop()
        if isinstance(getattr(node, "variable", None), nn.Parameter) or len(seen) > _MOST_NODES:
            return False
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return True


graph_task, NO_TASK = torch._C._current_graph_task_id, -1
"""The number of the running backward pass of this thread, and the number outside of one."""


def is_in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread."""
    return graph_task() != NO_TASK


def set_all(owners: Iterable[Any], name: str, values: Iterable[Any]) -> None:
    """Sets an attribute of many objects in a loop in C, which needs a tenth of the time of a Python loop."""
    # `setattr` returns None, so `any` runs to the end.
    any(map(setattr, owners, repeat(name), values))

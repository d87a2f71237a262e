"""Detects parameters moved or replaced by a script, and reads exact weights."""

from collections.abc import Container, Iterable, Iterator
from operator import attrgetter, is_

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..buckets.bucket import Bucket, ParameterSlot
from ..buckets.sharded_parameter import all_are_hidden, show_values
from ..hooks.guards import look_only
from ..hooks.tensors import is_in_backward
from ..hooks.weak import WeakHook
from .buffers import ignored_parameters
from .compiled import is_compiled
from .moved_parameters import moved_parameter, replaced_module

_PARAMETERS = attrgetter("_parameters")
_DEPTH_OF_WRAPPERS = 4
"""Maximum number of nested modules searched: peft's two modules around a model, and the models inside."""


class ParameterPlaces:
    """The (module, attribute) of every parameter in the buckets; tied parameters have several.

    A parameter may leave the engine in three ways: its data moves (`.to(dtype)`, `.half()`), another Parameter replaces it
    (`load_state_dict(assign=True)`), or another module replaces its module (merge_and_unload, a resized head). Then steps
    would update memory that the model no longer reads. The next forward with a graph detects this, and so does the step.
    """

    def __init__(self, model: nn.Module, buckets: Iterable[Bucket]):
        slot_of = {slot.parameter: slot for bucket in buckets for slot in bucket.slots}
        self._places = [
            (module, name, slot_of[parameter])
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter in slot_of
        ]
        self._buckets = list(dict.fromkeys(slot.bucket for _, _, slot in self._places))
        holding = {module for module, _, _ in self._places}
        self._links = [
            (parent._modules, name, child, path)
            for path, parent in model.named_modules()
            for name, child in parent._modules.items()
            if child is not None and any(inner in holding for inner in child.modules())
        ]
        trained = {parameter for parameter, slot in slot_of.items() if slot.bucket.trained}
        self._name_of_frozen = {p: name for name, p in model.named_parameters() if p not in trained}
        ignored = ignored_parameters(model)
        self._frozen = [parameter for parameter in self._name_of_frozen if parameter not in ignored]
        # The same tuples as separate lists, for loops in C.
        self._modules = [module for module, _, _ in self._places]
        self._names = [name for _, name, _ in self._places]
        self._held = [slot.parameter for _, _, slot in self._places]
        self._parents = [children for children, _, _, _ in self._links]
        self._child_names = [name for _, name, _, _ in self._links]
        self._children = [child for _, _, child, _ in self._links]
        self._in_forward = False

    def watch(self, model: nn.Module, entry: nn.Module) -> list[RemovableHandle]:
        """Checks before each forward of `entry`, or of the model inside an adapter's wrappers, which a script may call directly.

        Args:
            model: the model of `entry`.
        """
        # Compiled modules inside would trace the hook.
        parts = () if is_compiled(entry) else self._wrapped(model)
        return [
            entry.register_forward_pre_hook(WeakHook(self, ParameterPlaces._begin), prepend=True),
            # Call the hook also after an exception. Otherwise `_in_forward` would stay True, and direct calls of submodules
            # would be unchecked.
            entry.register_forward_hook(WeakHook(self, ParameterPlaces._end), always_call=True),
            *(
                part.register_forward_pre_hook(WeakHook(self, ParameterPlaces._before_part), prepend=True)
                for part in parts
            ),
        ]

    @property
    def frozen(self) -> Iterable[nn.Parameter]:
        """The model's parameters not trained by the engine."""
        return self._name_of_frozen

    def own_memory(self, *, spared: Container[nn.Parameter]) -> None:
        """Gives whole trained parameters separate memory outside of their buckets, except the ones in `spared`."""
        for slot in {slot for _, _, slot in self._places if slot.bucket.trained and slot.parameter not in spared}:
            slot.parameter.data = slot.parameter.detach().clone()

    def before_step(self) -> None:
        """Raises `RuntimeError` for a parameter outside of its bucket, which the step would not change."""
        self._refuse_unfrozen()
        for slot, held in self._strays():
            raise moved_parameter(slot, held)

    def _refuse_unfrozen(self) -> None:
        # `_frozen` lists the parameters frozen at `prepare`.
        with look_only():
            is_thawed = any(map(attrgetter("requires_grad"), self._frozen))
        if is_thawed:
            thawed = next(self._name_of_frozen[parameter] for parameter in self._frozen if parameter.requires_grad)
            raise RuntimeError(
                f"hf_zero: {thawed!r} was frozen when the model was prepared and now has requires_grad, so its gradient would "
                "not be reduced. Prepare model and optimizer again after unfreezing. (Freezing a trained parameter needs no "
                "call.)"
            )

    def _strays(self) -> Iterator[tuple[ParameterSlot, torch.Tensor | None]]:
        """Yields slots whose parameter has left its module or its bucket, and the present object in the module.

        Raises:
            RuntimeError: a module was replaced.
        """
        if self._all_are_in_place():
            return
        for children, name, child, path in self._links:
            if children.get(name) is not child:
                raise replaced_module(f"{path}.{name}" if path else name, child, children.get(name))
        for module, name, slot in self._places:
            # Bypasses the dict's own methods, which would wait for a running gather.
            held = dict.get(module._parameters, name)
            if held is not slot.parameter or not slot.bucket.holds(slot):
                yield slot, held

    def _all_are_in_place(self) -> bool:
        """Fast check for each step, with loops in C. A "no" may be false."""
        with look_only():
            held = map(dict.get, map(_PARAMETERS, self._modules), self._names)
            return (
                all(map(is_, map(dict.get, self._parents, self._child_names), self._children))
                and all(map(is_, held, self._held))
                and (all_are_hidden(self._held) or all(bucket.holds_all for bucket in self._buckets))
            )

    def take_back(self) -> None:
        """Copies strayed values into their slots, and restores the engine's parameters in their modules.

        Raises:
            ValueError: a parameter now has a different number of elements.
        """
        for module, name, slot in self._places:
            current = module._parameters.get(name)
            if current is None or current.numel() != slot.interval.numel:
                raise ValueError(
                    f"hf_zero: {slot.name!r} had {slot.interval.numel} elements when it was prepared and now has "
                    f"{'none' if current is None else current.numel()}. Change the model before accelerator.prepare, or "
                    "prepare model and optimizer again."
                )
            if current is not slot.parameter:
                # Before the new data, because a parameter with hidden values refuses new data.
                show_values(slot.parameter)
                with torch.no_grad():
                    slot.parameter.data = current.detach().to(slot.parameter.device)
                module._parameters[name] = slot.parameter
            if not slot.bucket.holds(slot):
                slot.bucket.adopt(slot)
                # No version is -1, so the master follows the values as after a script's edit.
                slot.version = -1

    def _wrapped(self, model: nn.Module) -> Iterator[nn.Module]:
        """Yields the nested modules below the model with all of the parameters."""
        inner = model
        for _ in range(_DEPTH_OF_WRAPPERS):
            below = {id(child): child for children, _, child, _ in self._links if children is inner._modules}
            if len(below) != 1 or any(module is inner for module, _, _ in self._places):
                return
            inner = next(iter(below.values()))
            yield inner

    def _begin(self, *_args: object) -> None:
        self._look()
        self._in_forward = True

    def _end(self, *_args: object) -> None:
        self._in_forward = False

    def _before_part(self, *_args: object) -> None:
        if not self._in_forward:
            self._look()

    def _look(self) -> None:
        # An evaluation of a cast or merged model is allowed. A recomputation inside backward was checked in the forward.
        if torch.is_grad_enabled() and not is_in_backward():
            for slot, held in self._strays():
                # Plain tensors are there only during a call of torch.func.functional_call, which restores the Parameter.
                if held is None or isinstance(held, nn.Parameter):
                    raise moved_parameter(slot, held)

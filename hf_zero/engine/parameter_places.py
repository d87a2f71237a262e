"""Notices parameters that a script has moved or replaced, and reads exact weights."""

from collections.abc import Container, Iterable, Iterator
from operator import attrgetter, is_

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..buckets.bucket import Bucket, ParameterSlot
from ..buckets.sharded import all_are_hidden, show_values
from ..hooks.guards import look_only
from ..hooks.tensors import is_in_backward
from ..hooks.weak import WeakHook
from .buffers import ignored_parameters
from .compiled import is_compiled

_PARAMETERS = attrgetter("_parameters")
_DEPTH_OF_WRAPPERS = 4
"""peft's two modules around a model, and the model in whose layers the adapters are."""


class ParameterPlaces:
    """The (module, attribute) places of every parameter in the buckets; tied ones have several.

    A parameter leaves the engine in three ways: its data moves (`.to(dtype)`, `.half()`), another Parameter takes its place
    (`load_state_dict(assign=True)`), or another module takes that of its module (merge_and_unload, a resized head). Steps
    would then update memory that the model no longer reads. It is seen at the next forward that builds a graph, and again at
    the step.
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
        # The same by column, for loops of C.
        self._modules = [module for module, _, _ in self._places]
        self._names = [name for _, name, _ in self._places]
        self._held = [slot.parameter for _, _, slot in self._places]
        self._parents = [children for children, _, _, _ in self._links]
        self._child_names = [name for _, name, _, _ in self._links]
        self._children = [child for _, _, child, _ in self._links]
        self._in_forward = False

    def watch(self, model: nn.Module, entry: nn.Module) -> list[RemovableHandle]:
        """Looks before each forward of `entry`, and of the model inside an adapter's wrappers if a script calls that one.

        Args:
            model: that `entry` stands for.
        """
        # Compiled, they would trace the hook.
        parts = () if is_compiled(entry) else self._wrapped(model)
        return [
            entry.register_forward_pre_hook(WeakHook(self, ParameterPlaces._begin), prepend=True),
            # Also after an exception: `_in_forward` would stay True, and a part called by itself would not be looked at.
            entry.register_forward_hook(WeakHook(self, ParameterPlaces._end), always_call=True),
            *(
                part.register_forward_pre_hook(WeakHook(self, ParameterPlaces._before_part), prepend=True)
                for part in parts
            ),
        ]

    @property
    def frozen(self) -> Iterable[nn.Parameter]:
        """The model's parameters that the engine does not train."""
        return self._name_of_frozen

    def own_memory(self, *, spared: Container[nn.Parameter]) -> None:
        """Gives trained parameters that are whole memory outside of their buckets, all but those `spared`."""
        for slot in {slot for _, _, slot in self._places if slot.bucket.trained and slot.parameter not in spared}:
            slot.parameter.data = slot.parameter.detach().clone()

    def before_step(self) -> None:
        """Raises `RuntimeError` for a parameter outside of its memory, which the step would not reach."""
        self._refuse_unfrozen()
        for slot, held in self._strays():
            raise _moved(slot, held)

    def _refuse_unfrozen(self) -> None:
        # It was frozen when the model was prepared.
        with look_only():
            is_thawed = any(map(attrgetter("requires_grad"), self._frozen))
        if is_thawed:
            thawed = next(self._name_of_frozen[parameter] for parameter in self._frozen if parameter.requires_grad)
            raise RuntimeError(
                f"hf_zero: {thawed!r} was frozen when the model was prepared and has requires_grad now, so its gradient would "
                "stay on each rank. Prepare model and optimizer anew after unfreezing. (Freezing a trained parameter needs "
                "nothing.)"
            )

    def _strays(self) -> Iterator[tuple[ParameterSlot, torch.Tensor | None]]:
        """Lists slots whose parameter has left its module or its memory, and the present object there.

        Raises:
            RuntimeError: a module is another one.
        """
        if self._all_are_in_place():
            return
        for children, name, child, path in self._links:
            if children.get(name) is not child:
                raise _replaced(f"{path}.{name}" if path else name, child, children.get(name))
        for module, name, slot in self._places:
            # Past the dict's own methods, which wait for a gather that is under way: what is held can be seen without.
            held = dict.get(module._parameters, name)
            if held is not slot.parameter or not slot.bucket.holds(slot):
                yield slot, held

    def _all_are_in_place(self) -> bool:
        """As far as that is seen at a glance, which each step takes: in loops of C. False may be wrong."""
        with look_only():
            held = map(dict.get, map(_PARAMETERS, self._modules), self._names)
            return (
                all(map(is_, map(dict.get, self._parents, self._child_names), self._children))
                and all(map(is_, held, self._held))
                and (all_are_hidden(self._held) or all(bucket.holds_all for bucket in self._buckets))
            )

    def take_back(self) -> None:
        """Copies strayed values into their slots and hangs the engine's parameters back in their places.

        Raises:
            ValueError: one has another number of elements now.
        """
        for module, name, slot in self._places:
            current = module._parameters.get(name)
            if current is None or current.numel() != slot.interval.numel:
                raise ValueError(
                    f"hf_zero: {slot.name!r} had {slot.interval.numel} elements and has "
                    f"{'none' if current is None else current.numel()} now. Change the model before accelerator.prepare, or "
                    "prepare model and optimizer anew."
                )
            if current is not slot.parameter:
                # First: a parameter whose values are hidden refuses other data.
                show_values(slot.parameter)
                with torch.no_grad():
                    slot.parameter.data = current.detach().to(slot.parameter.device)
                module._parameters[name] = slot.parameter
            if not slot.bucket.holds(slot):
                slot.bucket.adopt(slot)
                # autograd never counts -1: the master follows the values as it follows a script's edit.
                slot.version = -1

    def _wrapped(self, model: nn.Module) -> Iterator[nn.Module]:
        """The modules below the model that hold all of the parameters."""
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
        # Evaluation of a model that has been cast or merged is nobody's concern; nor is a recomputation inside backward.
        if torch.is_grad_enabled() and not is_in_backward():
            for slot, held in self._strays():
                # What is no Parameter is there for this call only: torch.func.functional_call puts it back.
                if held is None or isinstance(held, nn.Parameter):
                    raise _moved(slot, held)


def _moved(slot: ParameterSlot, held: torch.Tensor | None) -> RuntimeError:
    """The error for a parameter whose data or Parameter object is another one now."""
    was, now = slot.bucket.flat.dtype, None if held is None else held.dtype
    if held is None:
        what = "has been taken out of its module"
        instead = "Change the model before accelerator.prepare, or prepare model and optimizer anew."
    elif held.shape != slot.view.shape:
        what = f"has shape {tuple(held.shape)} and had {tuple(slot.view.shape)}, as after resize_token_embeddings"
        instead = (
            "Resize before accelerator.prepare, or call hf_zero.engine_of(model).resize_embeddings(num_tokens), on every rank, "
            "in place of model.resize_token_embeddings(num_tokens)."
        )
    elif now != was:
        what = f"is {now} and was {was}, as after .to(), .half() or .bfloat16()"
        instead = (
            "Cast before accelerator.prepare, or train in 16 bits by mixed_precision (bf16=True) or `param_dtype` of the hf_zero "
            f"config. To go on in {was} with the values that it has now: hf_zero.engine_of(model).readopt(), on every rank."
        )
    else:
        what = "is another Parameter or in other memory, as after load_state_dict(assign=True)"
        instead = (
            "Do that before accelerator.prepare, or call hf_zero.engine_of(model).readopt(), on every rank, which takes the "
            "values over."
        )
    return RuntimeError(
        f"hf_zero: {slot.name!r} {what}. It has left the engine's memory since it was prepared, so a step would not reach it. "
        f"{instead}"
    )


def _replaced(path: str, was: nn.Module, now: nn.Module | None) -> RuntimeError:
    """The error for a module that is not in the model any more."""
    become = "gone" if now is None else f"another {type(now).__name__}"
    return RuntimeError(
        f"hf_zero: {path!r} was a {type(was).__name__} when the model was prepared and is {become} now, as after "
        "merge_and_unload or resize_token_embeddings: parameters that are trained are not in the model any more, so a step would "
        "not reach it. To go on training, call hf_zero.engine_of(model).close() before the change, on every rank, and prepare "
        "the changed model with a new optimizer (to resize, hf_zero.engine_of(model).resize_embeddings(num_tokens) does all of "
        "that). Evaluation under torch.no_grad() and saving need nothing."
    )

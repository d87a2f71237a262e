"""Operations on fake tensors, whose results torch infers once and this file repeats.

torch infers the shape of a result in Python, which takes most of the time of a trace, and a stack of layers repeats the same
operations on the same shapes. A result is repeated only if nothing else than the shapes, strides, dtypes and devices of the
tensors and the other arguments can determine it. All other operations go to torch.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_Shape = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]
"""Sizes, strides, dtype and device of a tensor with its own storage."""

_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of arguments that are compared by value."""


class _NotRepeatableError(Exception):
    """Raised for an argument not described completely by its shape or value."""


class FakeOperations:
    """Runs operations on the fake tensors of one mode. Call inside a dispatch mode, where the operation is not seen again."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        # None: torch runs the operation each time.
        self._known: dict[Any, tuple[type | None, tuple[_Shape | None, ...]] | None] = {}

    def run(self, func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Returns the result of an operation, in new fake tensors as from torch."""
        if func.namespace != "aten" or torch.is_inference_mode_enabled():
            return func(*args, **kwargs)
        try:
            key = func, torch.get_default_dtype(), _key_of(args), *((name, _key_of(kwargs[name])) for name in kwargs)
        except _NotRepeatableError:
            return func(*args, **kwargs)
        if func.is_view:
            return self._view(func, args, kwargs)
        if key not in self._known:
            result = func(*args, **kwargs)
            self._known[key] = _described(result, [*args, *kwargs.values()])
            return result
        known = self._known[key]
        return func(*args, **kwargs) if known is None else self._repeated(*known)

    def _view(self, func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Returns a view of the first argument: torch's C++ computes one from the strides on every device alike."""
        with in_kernel_invocation_manager(self._mode):
            viewed = func(*args, **kwargs)
        device = args[0].fake_device
        if isinstance(viewed, torch.Tensor):
            return FakeTensor(self._mode, viewed, device)
        return type(viewed)(FakeTensor(self._mode, each, device) for each in viewed)

    def _repeated(self, kind: type | None, shapes: tuple[_Shape | None, ...]) -> Any:
        with in_kernel_invocation_manager(self._mode):
            empty = [
                None if shape is None else torch.empty_strided(*shape[:2], dtype=shape[2], device="meta")
                for shape in shapes
            ]
        tensors = [
            None if each is None or shape is None else FakeTensor(self._mode, each, shape[3])
            for each, shape in zip(empty, shapes)
        ]
        return tensors[0] if kind is None else kind(tensors)


def _key_of(argument: Any) -> Any:
    """Returns a key. Arguments with equal keys give results of the same shape.

    Raises:
        _NotRepeatableError: shapes and values do not describe the argument.
    """
    if isinstance(argument, torch.Tensor):
        if not _is_described(argument):
            raise _NotRepeatableError
        fake: Any = argument
        return fake.shape, fake.stride(), fake.storage_offset(), fake.dtype, fake.fake_device
    if isinstance(argument, list | tuple):
        return tuple(map(_key_of, argument))
    if argument is None:
        return None
    if type(argument) not in _PLAIN:
        raise _NotRepeatableError
    # 1, 1.0 and True are equal, but results differ in their dtypes.
    return type(argument), argument


def _is_described(tensor: Any) -> bool:
    """Whether sizes, strides, offset, dtype and device describe a tensor; torch computes with the values of constants."""
    return (
        type(tensor) is FakeTensor
        and tensor.constant is None
        and tensor.layout is torch.strided
        and not tensor.is_complex()
        and not tensor.is_quantized
    )


def _described(result: Any, arguments: Iterable[Any]) -> tuple[type | None, tuple[_Shape | None, ...]] | None:
    """Returns the class of a sequence of results and the shape of each; None if one is not in a new storage of its own."""
    results = [result] if isinstance(result, torch.Tensor) else result
    if not isinstance(results, list | tuple):
        return None
    # A result may be an argument, as of an operation in place, or a view of one.
    storages = {id(each.untyped_storage()) for each in arguments if isinstance(each, torch.Tensor)}
    shapes: list[_Shape | None] = []
    for each in results:
        if each is None:
            shapes.append(None)
            continue
        if not isinstance(each, torch.Tensor) or not _is_described(each) or each.storage_offset():
            return None
        fake: Any = each
        storage = each.untyped_storage()
        last = sum((size - 1) * stride for size, stride in zip(each.shape, each.stride()))
        whole = each.itemsize * (last + 1) if each.numel() else 0
        if id(storage) in storages or storage.nbytes() != whole or each.requires_grad:
            return None
        storages.add(id(storage))
        shapes.append((tuple(each.shape), each.stride(), each.dtype, fake.fake_device))
    return (None if isinstance(result, torch.Tensor) else type(result)), tuple(shapes)

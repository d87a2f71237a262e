"""Refuses trained parameters that share memory with others: in buckets each has memory of its own, and they would come apart."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

_PLAIN = (torch.Tensor, nn.Parameter)


class _Extent(NamedTuple):
    """A tensor's bytes from its first element to its last."""

    device: str
    begin: int
    end: int
    name: str
    tensor: torch.Tensor


def refuse_shared_storage(model: nn.Module) -> None:
    """Raises `ValueError` for a trained parameter, some of whose elements are also those of another parameter or of a buffer.

    One Parameter that several modules have is one tensor, and is trained as such.
    """
    found = {id(tensor): (name, tensor) for name, tensor in (*model.named_buffers(), *model.named_parameters())}
    for one, other in _overlapping(found.values()):
        if (one.tensor.requires_grad or other.tensor.requires_grad) and _share_elements(one.tensor, other.tensor):
            raise ValueError(
                f"hf_zero: {one.name!r} and {other.name!r} are two tensors in the same memory, so that a step of one changes the "
                "other. In the engine's flat buckets each has memory of its own, and they would come apart. Make them one "
                "Parameter (decoder.weight = encoder.weight; a transpose goes into forward), or give one of them memory of its "
                "own (.detach().clone()), before the model is prepared."
            )


def _overlapping(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[_Extent, _Extent]]:
    """Pairs of tensors whose extents overlap."""
    before: list[_Extent] = []
    for extent in sorted((_extent(name, tensor) for name, tensor in named if _has_memory(tensor)), key=lambda e: e[:3]):
        before = [other for other in before if other.device == extent.device and extent.begin < other.end]
        yield from ((other, extent) for other in before)
        before.append(extent)


def _has_memory(tensor: torch.Tensor) -> bool:
    # Of other classes it is not known where their elements lie.
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


def _extent(name: str, tensor: torch.Tensor) -> _Extent:
    begin = tensor.data_ptr()
    return _Extent(str(tensor.device), begin, begin + _span(tensor) * tensor.element_size(), name, tensor)


def _span(tensor: torch.Tensor) -> int:
    """How many elements lie from its first to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))


def _share_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether some do, of tensors whose extents overlap: columns of one matrix lie between each other."""
    if _span(one) == one.numel() or _span(other) == other.numel():
        return True
    return bool(torch.isin(_addresses(one), _addresses(other)).any())


def _addresses(tensor: torch.Tensor) -> torch.Tensor:
    places = torch.arange(_span(tensor)).as_strided(tensor.shape, tensor.stride())
    return places.reshape(-1) * tensor.element_size() + tensor.data_ptr()

"""Masters and optimizer state in host memory between steps, and on the device during a step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import gt, is_, itemgetter
from sys import getrefcount
from typing import Any, ClassVar

import torch

from ..buckets.bucket import Bucket, Row
from ..buckets.rows import PackedPart
from ..hooks.guards import LOOKS, Guard, Guarded, look_only
from ..hooks.tensors import leaves
from ..hooks.weak import WeakMethod
from ..offload.device_window import DeviceWindow, HostBytes
from .bucket_state import MasterAway, Placeholders, Regions, States, StateStorage
from .nested_state import with_each

_HOST = torch.device("cpu")
_ALIGNMENT = 64
"""Bytes: kernels read several elements at a time from aligned addresses."""


class _Landing(Guarded):
    """The class of state during its copy to host memory: a reader waits for the end of the copy."""

    __slots__ = ()

    _wait: ClassVar[Any]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in LOOKS:
            for tensor in leaves((args, kwargs)):
                if isinstance(tensor, _Landing):
                    tensor._wait()
        with look_only():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> Any:
        # The wait restores the tensor's class. Without the wait, the copy would have this class.
        self._wait()
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._wait()
        return self.__reduce_ex__(protocol)


class StateOnHost(StateStorage):
    """Keeps the tensors of a bucket's state in one block of pinned host memory, and copies them to the device for a step.

    Between steps, `optimizer.state` has the tensors in host memory. While they are copied there, readers wait. The state that
    passes to the device is that of `inner`: as the optimizer made it, or in 8-bit blocks.

    [Note: what moves]
    All tensors of a row's state with more than one element, also in lists and dicts, whatever their shapes. A tensor that the
    optimizer made or replaced in a step gets memory after the step. A tensor in host memory that a script or a load has put into
    `optimizer.state` is copied to the device before the step, and one that the optimizer itself has left there stays.
    """

    is_away = True

    def __init__(self, bucket: Bucket, inner: StateStorage, window: DeviceWindow):
        self._bucket = bucket
        self._inner = inner
        self._bytes = HostBytes(window, bucket.layout.index)
        self.bytes_in_step = inner.bytes_in_step
        # Where each tensor of the block belongs, and the tensor in host memory.
        self._held: list[tuple[Any, Any, torch.Tensor]] = []
        self._block = _Block([])
        self._views: list[torch.Tensor] = []
        # See `_count_references`, if a script has no views.
        self._references: list[int] = []
        self._is_seen = False
        # Tensors that the optimizer keeps in host memory, by their `id`.
        self._left: dict[int, torch.Tensor] = {}
        self._fetched: torch.Tensor | None = None
        self._fetched_views: list[torch.Tensor] = []
        waits = type("_Landing", (_Landing,), {"__slots__": (), "_wait": WeakMethod(self, StateOnHost._wait)})
        self._guard = Guard(waits)

    def start_fetch(self) -> None:
        self._bytes.start_fetch()

    def lend(self, states: States, regions: Regions) -> None:
        if self._held:
            self._give_back()
            self._is_seen = self._is_seen_by_others()
            self._fetched = self._bytes.fetched()
            self._fetched_views = self._block.views_of(self._fetched)
            for (holder, key, tensor), view in zip(self._held, self._fetched_views):
                if _get(holder, key) is tensor:
                    holder[key] = view
            self._held = []
        self._to_device(states)
        self._inner.lend(states, regions)

    def store(self, states: States, regions: Regions) -> None:
        self._inner.store(states, regions)
        moved, self._left = self._found_in(states)
        fetched, tensors = self._fetched, [tensor for _, _, tensor in moved]
        # In most steps the optimizer has changed the values only.
        if fetched is None or not (
            len(tensors) == len(self._fetched_views) and all(map(is_, tensors, self._fetched_views))
        ):
            block = _Block(tensors)
            if fetched is None or block != self._block:
                fetched, self._block = self._bytes.new_flat(block.nbytes), block
            for tensor, view in zip(tensors, block.views_of(fetched)):
                # Copy if the optimizer has made or replaced the tensor. All others already have their values in place.
                if tensor.data_ptr() != view.data_ptr():
                    view.copy_(tensor)
        if fetched is self._fetched:
            self._fetched = None
        self._fetched_views = []
        self._give_back()
        before = self._bytes.host
        self._bytes.start_store(fetched)
        is_new = self._bytes.host is not before or len(self._views) != len(moved)
        if is_new or not self._block.has(self._views):
            is_new, self._views = True, self._block.views_of(self._bytes.host)
        self._held = [(holder, key, view) for (holder, key, _), view in zip(moved, self._views)]
        for holder, key, view in self._held:
            holder[key] = view
        if is_new:
            self._references = self._count_references()
        self._guard.guard(self._views)
        if self._is_seen:
            self._wait()

    def values(self, row: Row, name: str, value: Any) -> Any:
        return self._inner.values(row, name, value)

    def view(self, row: Row, kind: str, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
        return self._inner.view(row, kind, tensor)

    def put(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        # Otherwise the state of all buckets would be on the device together until the next step.
        state = with_each(state, self._on_host)
        for holder, key, tensor in list(_tensors_of(self._blocks())):
            holder[key] = self._on_host(tensor)
        return self._inner.put(row, state)

    def nbytes(self, tensors: Sequence[torch.Tensor]) -> int:
        return self._inner.nbytes(tensors)

    def close(self, states: States) -> None:
        self._wait()
        # Without an engine, the optimizer steps on the device.
        self._to_device(states)
        self._held = []
        self._inner.close(states)

    def _to_device(self, states: States) -> None:
        for holder, key, tensor in list(_tensors_of([*states.values(), *self._blocks()])):
            if tensor.is_cpu and _has_values(tensor) and id(tensor) not in self._left:
                holder[key] = tensor.to(self._bucket.device)

    def _found_in(self, states: States) -> tuple[list[tuple[Any, Any, torch.Tensor]], dict[int, torch.Tensor]]:
        """Returns (dict or list, key, tensor) of all tensors on the device, and the optimizer's tensors on the host."""
        moved, left, fetched = [], {}, set(map(id, self._fetched_views))
        for holder in (states.values(), self._blocks()):
            for found in _tensors_of(list(holder)):
                tensor = found[2]
                if id(tensor) in fetched or _moves(tensor, self._bucket.device):
                    moved.append(found)
                elif tensor.is_cpu and _has_values(tensor):
                    left[id(tensor)] = tensor
        return moved, left

    def _count_references(self) -> list[int]:
        """Counts references to the views, to the memory of the views, and to the Python object of the memory."""
        memory = self._bytes.host.untyped_storage()
        return [*map(getrefcount, self._views), torch._C._storage_Use_Count(memory._cdata), getrefcount(memory)]

    def _is_seen_by_others(self) -> bool:
        """Whether a script may have a view of the state in host memory.

        Such a view, or an array of NumPy's, reads the memory without `_Landing`, so the next copy there must end at once.
        """
        # A tensor that a script has replaced has one reference less, which may hide one of the script's.
        if any(_get(holder, key) is not tensor for holder, key, tensor in self._held):
            return True
        return any(map(gt, self._count_references(), self._references))

    def _give_back(self) -> None:
        """Frees the copy on the device after a failed step, or if the step has left other tensors."""
        if self._fetched is not None:
            self._bytes.give_back(self._fetched)
            self._fetched = None

    def _blocks(self) -> list[dict[str, Any]]:
        return list(map(vars, self._inner.blocks().values()))

    def _on_host(self, value: Any) -> Any:
        return value.to(_HOST) if _moves(value, self._bucket.device) else value

    def _wait(self) -> None:
        self._bytes.wait()
        self._guard.unguard(self._views)


def _get(holder: Any, key: Any) -> Any:
    if isinstance(holder, dict):
        return holder.get(key)
    return holder[key] if key < len(holder) else None


def _tensors_of(holder: Any) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """Yields (dict or list, key, tensor) of all tensors in dicts and lists, in order."""
    for key, value in enumerate(holder) if isinstance(holder, list) else holder.items():
        # The layout of a subclass is not known.
        if type(value) is torch.Tensor:
            yield holder, key, value
        elif isinstance(value, dict | list):
            yield from _tensors_of(value)


def _moves(value: Any, device: torch.device) -> bool:
    return type(value) is torch.Tensor and value.device == device and _has_values(value)


def _has_values(tensor: torch.Tensor) -> bool:
    # A placeholder of moments in blocks has several elements and the memory of one.
    return tensor.numel() > 1 and tensor.untyped_storage().nbytes() >= tensor.nbytes


class _Block:
    """The layout of tensors in one block of memory.

    Attributes:
        nbytes: the bytes of the block.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._forms = [(tensor.dtype, tensor.shape) for tensor in tensors]
        self._dtypes = set(map(itemgetter(0), self._forms))
        # Arguments of `as_strided` for each tensor: one call instead of three, for several hundred tensors in each step.
        self._layouts: list[tuple[torch.Size, tuple[int, ...], int]] = []
        self.nbytes = 0
        for tensor in tensors:
            self._layouts.append((tensor.shape, _dense_strides(tensor.shape), self.nbytes // tensor.itemsize))
            self.nbytes += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Block) and self._forms == other._forms

    __hash__ = None  # type: ignore[assignment]  # equal blocks are different objects

    def has(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the dtypes and shapes of `tensors` equal the ones of the block, in order."""
        with look_only():
            return self._forms == [(tensor.dtype, tensor.shape) for tensor in tensors]

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns the tensors as views of a block (uint8)."""
        flats = {dtype: flat.view(dtype) for dtype in self._dtypes}
        return [flats[dtype].as_strided(*layout) for (dtype, _), layout in zip(self._forms, self._layouts)]


def _dense_strides(shape: torch.Size) -> tuple[int, ...]:
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


class MasterOnHost(MasterAway):
    """Keeps a bucket's separate master in pinned host memory, and copies it to the device for a step."""

    def __init__(self, bucket: Bucket, window: DeviceWindow, placeholders: Placeholders):
        super().__init__(bucket, placeholders.of((), bucket.precision.master, bucket.device))
        self._bytes = HostBytes(window, bucket.layout.index)

    def move_in(self) -> None:
        flat = self._bytes.new_flat(self._bucket.master.nbytes)
        self._bucket.fetch(flat.view(self._bucket.precision.master).copy_(self._bucket.master))
        self._leave()
        # One bucket after the other, because the device may not have room for all masters.
        self._bytes.wait()

    def start_fetch(self) -> None:
        self._bytes.start_fetch()

    def _fetched(self, regions: Regions) -> torch.Tensor:
        return self._bytes.fetched().view(self._bucket.precision.master)

    @contextmanager
    def _in_memory(self) -> Iterator[None]:
        self._bucket.fetch(self._fetched({}))
        try:
            yield
        finally:
            # With the caller's edits.
            self._leave()

    def put(self, row: Row, values: torch.Tensor) -> None:
        if self._bucket.is_away:
            self._part_of(row).copy_(values.reshape(-1))
        else:
            super().put(row, values)

    def view(self, row: Row, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
        return self._part_of(row).view(row.tensor.shape) if self._bucket.is_away else tensor

    def _part_of(self, row: Row) -> torch.Tensor:
        self._bytes.wait()
        cut = row.layout.in_shard
        return self._bytes.host.view(self._bucket.precision.master)[cut.start : cut.stop]

    def _leave(self) -> None:
        self._bytes.start_store(self._bucket.master.view(torch.uint8))
        super()._leave()

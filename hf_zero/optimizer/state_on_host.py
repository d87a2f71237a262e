"""Masters and optimizer state in host memory between steps, and on the device during a step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from ..buckets.bucket import Bucket, Row
from ..buckets.rows import PackedPart
from ..hooks.guards import LOOKS, Guard, Guarded, look_only
from ..hooks.tensors import leaves
from ..hooks.weak import WeakMethod
from ..offload.device_window import DeviceWindow, HostBytes
from .bucket_state import MasterStorage, Placeholders, Regions, States, StateStorage
from .nested_state import with_each

_HOST = torch.device("cpu")
_ALIGNMENT = 64
"""Bytes: kernels read several elements at a time from aligned addresses."""


class _Landing(Guarded):
    """The class of state that is copied to host memory: a reader waits for the end of the copy."""

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
        self.lent_bytes = inner.lent_bytes
        # Where each tensor of the block belongs, the tensor, and its first byte.
        self._held: list[tuple[Any, Any, torch.Tensor, int]] = []
        self._forms: list[tuple[torch.dtype, torch.Size]] = []
        # Tensors that the optimizer keeps in host memory, by their `id`.
        self._left: dict[int, torch.Tensor] = {}
        self._lent: torch.Tensor | None = None
        waits = type("_Landing", (_Landing,), {"__slots__": (), "_wait": WeakMethod(self, StateOnHost._wait)})
        self._guard = Guard(waits)

    def start_fetch(self) -> None:
        self._bytes.start_fetch()

    def lend(self, states: States, regions: Regions) -> None:
        if self._held:
            self._give_back()
            self._lent = self._bytes.fetched()
            for holder, key, tensor, start in self._held:
                if _get(holder, key) is tensor:
                    holder[key] = _view(self._lent, start, tensor)
            self._held = []
        self._to_device(states)
        self._inner.lend(states, regions)

    def store(self, states: States, regions: Regions) -> None:
        self._inner.store(states, regions)
        moved = list(_tensors_of([*states.values(), *self._blocks()], self._bucket.device))
        self._left = {id(tensor): tensor for _, _, tensor in _tensors_of(list(states.values()), _HOST)}
        forms = [(tensor.dtype, tensor.shape) for _, _, tensor in moved]
        starts, nbytes = _starts(tensor for _, _, tensor in moved)
        lent = self._lent
        if lent is None or forms != self._forms:
            lent = self._bytes.new_flat(nbytes)
        for (_, _, tensor), start in zip(moved, starts):
            view = _view(lent, start, tensor)
            # Copy if the optimizer has made or replaced the tensor. All others already have their values in place.
            if tensor.data_ptr() != view.data_ptr():
                view.copy_(tensor)
        if lent is self._lent:
            self._lent = None
        self._give_back()
        self._bytes.start_store(lent)
        self._forms = forms
        for (holder, key, tensor), start in zip(moved, starts):
            holder[key] = on_host = _view(self._bytes.host, start, tensor)
            self._held.append((holder, key, on_host, start))
        self._guard.guard([tensor for _, _, tensor, _ in self._held])

    def values(self, row: Row, name: str, value: Any) -> Any:
        return self._inner.values(row, name, value)

    def view(self, row: Row, kind: str, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
        return self._inner.view(row, kind, tensor)

    def put(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        # Otherwise the state of all buckets would be on the device together until the next step.
        state = with_each(state, self._on_host)
        for holder, key, tensor in list(_tensors_of(self._blocks(), self._bucket.device)):
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
        for holder, key, tensor in list(_tensors_of([*states.values(), *self._blocks()], _HOST)):
            if id(tensor) not in self._left:
                holder[key] = tensor.to(self._bucket.device)

    def _give_back(self) -> None:
        """Frees the copy on the device of a step that failed, or that has left other tensors."""
        if self._lent is not None:
            self._bytes.give_back(self._lent)
            self._lent = None

    def _blocks(self) -> list[dict[str, Any]]:
        return list(map(vars, self._inner.blocks().values()))

    def _on_host(self, value: Any) -> Any:
        return value.to(_HOST) if _moves(value, self._bucket.device) else value

    def _wait(self) -> None:
        self._bytes.wait()
        self._guard.unguard([tensor for _, _, tensor, _ in self._held])


def _get(holder: Any, key: Any) -> Any:
    if isinstance(holder, dict):
        return holder.get(key)
    return holder[key] if key < len(holder) else None


def _tensors_of(holder: Any, device: torch.device) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """Yields (dict or list, key, tensor) of all tensors on `device` with several elements in dicts and lists, in order."""
    for key, value in enumerate(holder) if isinstance(holder, list) else holder.items():
        if isinstance(value, dict | list):
            yield from _tensors_of(value, device)
        elif _moves(value, device):
            yield holder, key, value


def _moves(value: Any, device: torch.device) -> bool:
    # A placeholder of moments in blocks has several elements and the memory of one. The layout of a subclass is not known.
    return (
        type(value) is torch.Tensor
        and value.device == device
        and value.numel() > 1
        and value.untyped_storage().nbytes() >= value.nbytes
    )


def _starts(tensors: Iterator[torch.Tensor]) -> tuple[list[int], int]:
    """Returns the first byte of each tensor in a block of all of them, and the bytes of the block."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return starts, end


def _view(flat: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    return flat[start : start + like.nbytes].view(like.dtype).view(like.shape)


class MasterOnHost(MasterStorage):
    """Keeps a bucket's separate master in pinned host memory, and copies it to the device for a step."""

    is_away = True

    def __init__(self, bucket: Bucket, window: DeviceWindow, placeholders: Placeholders):
        super().__init__(bucket)
        self._bytes = HostBytes(window, bucket.layout.index)
        self._absent = placeholders.of((), bucket.precision.master, bucket.device)

    def move_in(self) -> None:
        flat = self._bytes.new_flat(self._bucket.master.nbytes)
        self._bucket.fetch(flat.view(self._bucket.precision.master).copy_(self._bucket.master))
        self._leave()
        # One bucket after the other, because the device may not have room for all masters.
        self._bytes.wait()

    def start_fetch(self) -> None:
        self._bytes.start_fetch()

    def fetch(self, regions: Regions) -> None:
        self._bucket.fetch(self._bytes.fetched().view(self._bucket.precision.master))
        # Before the step, because the stepped master must include a script's edits of the parameter.
        self._bucket.follow_edits()

    def store(self) -> None:
        self._bucket.write_back()
        self._leave()

    @contextmanager
    def fetched_master(self) -> Iterator[None]:
        if not self._bucket.is_away:
            yield
            return
        self._bucket.fetch(self._bytes.fetched().view(self._bucket.precision.master))
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
        self._bucket.store(self._absent)

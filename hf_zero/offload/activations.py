"""Keeps autograd's saved tensors in host memory from a forward to the backward.

[Note: which tensors move]
A whole storage is moved the first time that one of its tensors is saved. Other saved views of the storage (such as the parts of
an attention's projection) use the same copy, so none of them keeps memory on the device. If a tensor was written to in the
meantime, its storage is moved again. Parameters and buffers stay on the device, because they exist permanently anyway. Small
tensors stay as well, because they are not worth a copy.

Autograd does not check whether a tensor saved by hooks was modified before backward. A moved tensor keeps its saved values. For
tensors that stay, this file checks the version.
"""

from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from weakref import ReferenceType, ref

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..pinned_memory import passing_host_bytes
from ..queues import Mark, SideQueue, side_queue

SMALL_BYTES = 4096
"""Smaller storages stay on the device."""

_ON_THE_WAY = 2
"""Number of storages copied to the host before the device waits, and number of storages fetched ahead of the one in use."""


class ActivationsInHostMemory:
    """Copies tensors saved by a training forward to host memory during the forward, and back before backward needs them.

    Args:
        device: the training device. Tensors on other devices stay there.

    Attributes:
        held_bytes: bytes in host memory now.
        most_bytes: the maximum of `held_bytes` so far.
    """

    def __init__(self, device: torch.device):
        self.held_bytes = self.most_bytes = 0
        self._device = device
        self._queue = side_queue(device)
        self._lasting: set[int] = set()
        self._moved: dict[tuple[int, int], tuple[ReferenceType[torch.UntypedStorage], ReferenceType[_Moved]]] = {}
        self._last: ReferenceType[_Moved] | None = None
        self._leaving: deque[tuple[Mark, torch.UntypedStorage]] = deque()
        self._ahead: deque[ReferenceType[_Moved]] = deque()
        self._hooks: AbstractContextManager | None = None

    def begin(self, lasting: Iterable[torch.Tensor]) -> None:
        """Starts to move tensors, at the start of a training forward. `lasting`: tensors of storages to leave on the device."""
        # If the last forward ended without `end`, its hooks are still entered and would move tensors saved by other code.
        self.end()
        # Unused fetches of the last backward would keep memory on the device.
        self._drop_ahead(0)
        self._moved = {key: entry for key, entry in self._moved.items() if entry[0]() is not None}
        # Compare identities: torch keeps one Python object for a storage while the storage exists.
        self._lasting = {id(tensor.untyped_storage()) for tensor in lasting}
        self._last = None
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()

    def end(self) -> None:
        """Ends the forward, also after an exception. May be called without `begin`."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__(None, None, None)
        self._free_sent(0)

    def moved(self) -> list["_Moved"]:
        """Returns the storages now in host memory."""
        return [found for _, known in self._moved.values() if (found := known()) is not None]

    def _pack(self, tensor: torch.Tensor) -> "_Kept | _View":
        if not self._moves(tensor):
            return _Kept(tensor)
        storage = tensor.untyped_storage()
        key = id(storage), tensor._version
        alive, known = self._moved.get(key, (None, None))
        # A new object may have the id of a deleted storage, so check the weak reference.
        moved = known() if alive is not None and known is not None and alive() is storage else None
        if moved is None:
            moved = self._move(storage)
            self._moved[key] = ref(storage), ref(moved)
        return _View(tensor, moved)

    def _moves(self, tensor: torch.Tensor) -> bool:
        # `_View` only restores plain tensors and conjugates: a subclass would lose its class, and a negated view its sign.
        return (
            type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            and tensor.device.type == self._device.type
            and tensor.untyped_storage().nbytes() >= SMALL_BYTES
            and id(tensor.untyped_storage()) not in self._lasting
            and not tensor.is_neg()
        )

    def _move(self, storage: torch.UntypedStorage) -> "_Moved":
        values = passing_host_bytes(storage.nbytes(), self._device)
        with self._queue.in_parallel():
            values.copy_(_bytes_of(storage), non_blocking=True)
        # Keep the storage until the copy has ended; otherwise its memory could be reused too early.
        self._leaving.append((self._queue.mark(), storage))
        self._free_sent(_ON_THE_WAY)
        moved = _Moved(self, values, self._last)
        # A weak reference: autograd decides how long moved bytes exist. A strong chain would keep bytes of deleted graphs.
        self._last = ref(moved)
        self.held_bytes += values.nbytes
        self.most_bytes = max(self.most_bytes, self.held_bytes)
        return moved

    def _free_sent(self, count: int) -> None:
        """Frees all storages except the `count` storages with the latest copies."""
        while len(self._leaving) > count:
            mark, _ = self._leaving.popleft()
            mark.hold_up_device()

    def _unpack(self, saved: "_Kept | _View") -> torch.Tensor:
        if isinstance(saved, _Kept):
            return saved.tensor()
        moved = saved.moved
        found = saved.on(moved.storage(self._device, self._queue))
        # Backward uses the last storage first, so fetch the previous ones in the meantime.
        before = moved.before
        for _ in range(_ON_THE_WAY):
            earlier = before() if before is not None else None
            if before is None or earlier is None:
                break
            if before not in self._ahead:
                earlier.start_fetch(self._device, self._queue)
                self._ahead.append(before)
            before = earlier.before
        self._drop_ahead(_ON_THE_WAY)
        return found

    def _drop_ahead(self, count: int) -> None:
        while len(self._ahead) > count:
            # The object may already be deleted, which dropped the fetch.
            moved = self._ahead.popleft()()
            if moved is not None:
                moved.forget_fetch()


class _Kept:
    """A tensor left on the device."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor
        self._version = tensor._version

    def tensor(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"hf_zero: a tensor of shape {tuple(self._tensor.shape)} that backward needs was modified after the forward "
                f"that saved it (version {self._version} then, {self._tensor._version} now). Modify it after backward, or run "
                "the forward again."
            )
        return self._tensor


class _View:
    """A tensor on a moved storage."""

    def __init__(self, tensor: torch.Tensor, moved: "_Moved"):
        self.moved = moved
        self._dtype = tensor.dtype
        self._size, self._stride, self._offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        self._is_conj = tensor.is_conj()

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Returns the same tensor on `storage`, which has its bytes."""
        tensor = torch.empty(0, dtype=self._dtype, device=storage.device)
        tensor.set_(storage, self._offset, self._size, self._stride)
        return tensor.conj() if self._is_conj else tensor


class _Moved:
    """A storage's bytes in host memory, and on the device while in use or fetched ahead.

    Attributes:
        before: the previously moved storage of the same forward, as long as the storage exists.
    """

    def __init__(self, owner: ActivationsInHostMemory, values: torch.Tensor, before: "ReferenceType[_Moved] | None"):
        self.before = before
        self._owner = owner
        self._values = values
        self._fetched: tuple[torch.UntypedStorage, Mark] | None = None
        self._in_use: ReferenceType[torch.UntypedStorage] | None = None

    def start_fetch(self, device: torch.device, queue: SideQueue) -> None:
        """Starts to copy the bytes to the device, unless a copy exists."""
        if self._fetched is None and self._at_hand() is None:
            self._fetched = self._fetch(device, queue)

    def storage(self, device: torch.device, queue: SideQueue) -> torch.UntypedStorage:
        """Returns the bytes on the device. Later calls return the same storage as long as a tensor uses it."""
        held = self._at_hand()
        if held is None:
            (held, mark), self._fetched = self._fetched or self._fetch(device, queue), None
            mark.hold_up_device()
            # A weak reference: the device memory must be freed together with autograd's last tensor on the storage.
            self._in_use = ref(held)
        return held

    def forget_fetch(self) -> None:
        """Drops an unused fetch."""
        if self._fetched is not None:
            # Wait for the copy; otherwise the memory could be reused too early.
            self._fetched[1].hold_up_device()
            self._fetched = None

    def _fetch(self, device: torch.device, queue: SideQueue) -> tuple[torch.UntypedStorage, Mark]:
        # Allocate outside of `in_parallel`: memory belongs to the queue of its allocation, and the computing queue uses this.
        there = torch.empty_like(self._values, device=device, pin_memory=False)
        with queue.in_parallel():
            there.copy_(self._values, non_blocking=True)
        return there.untyped_storage(), queue.mark()

    def _at_hand(self) -> torch.UntypedStorage | None:
        return None if self._in_use is None else self._in_use()

    def __del__(self) -> None:
        self.forget_fetch()
        self._owner.held_bytes -= self._values.nbytes


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

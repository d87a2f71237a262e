"""Tensors that autograd saves in a forward, kept in another memory until the backward.

[Note: which tensors move]
A storage moves whole, the first time that a tensor of it is saved: views of it that are saved too (the parts of an attention's
projection) find it there, and none of them keeps memory on the device. A tensor that was written into since is another one, and
moves again. Parameters and buffers last anyway, and small tensors are not worth a copy: these stay.

Autograd itself does not look any more whether a tensor that hooks have saved was written into before backward. What has moved
is what it was when it was saved. For what stays, the look is ours.
"""

from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from weakref import ReferenceType, ref

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..device import Mark, SideQueue, passing_host_bytes, side_queue

SMALL_BYTES = 4096
"""Storages below this stay where they are."""

_ON_THE_WAY = 2
"""Storages that are copied down at a time before the device waits, and fetched ahead of the one in use."""


class ActivationsInHostMemory:
    """Copies tensors that a training forward saves to host memory behind the forward, and back ahead of the backward.

    Args:
        device: on which they are made; tensors elsewhere stay.

    Attributes:
        held_bytes: in host memory now.
        most_bytes: the most that has been there at a time.
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
        """A training forward starts. `lasting`: tensors of the storages that stay."""
        # If the last forward has ended without `end`, its hooks are still
        # entered, and would move tensors that other code saves.
        self.end()
        # What the last backward had fetched ahead and did not use would keep memory on the device.
        self._drop_ahead(0)
        self._moved = {key: entry for key, entry in self._moved.items() if entry[0]() is not None}
        # By identity: torch keeps one Python object for a storage while the storage lives.
        self._lasting = {id(tensor.untyped_storage()) for tensor in lasting}
        self._last = None
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()

    def end(self) -> None:
        """The forward is over, or an exception has ended it. May be called without `begin`."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__(None, None, None)
        self._let_go(0)

    def moved(self) -> list["_Moved"]:
        """The storages that are in host memory now."""
        return [found for _, known in self._moved.values() if (found := known()) is not None]

    def _pack(self, tensor: torch.Tensor) -> "_Kept | _View":
        if not self._moves(tensor):
            return _Kept(tensor)
        storage = tensor.untyped_storage()
        key = id(storage), tensor._version
        alive, known = self._moved.get(key, (None, None))
        # One that is gone may have left its identity to another.
        moved = known() if alive is not None and known is not None and alive() is storage else None
        if moved is None:
            moved = self._move(storage)
            self._moved[key] = ref(storage), ref(moved)
        return _View(tensor, moved)

    def _moves(self, tensor: torch.Tensor) -> bool:
        # `_View` makes plain tensors or their conjugates again: a subclass would lose its class, a negated view its sign.
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
        with self._queue.aside():
            values.copy_(_bytes_of(storage), non_blocking=True)
        # Its memory may be given to another tensor only when the copy has ended.
        self._leaving.append((self._queue.mark(), storage))
        self._let_go(_ON_THE_WAY)
        moved = _Moved(self, values, self._last)
        # Weak: autograd decides how long moved bytes stay. A strong chain would keep the bytes of tensors whose graph is gone.
        self._last = ref(moved)
        self.held_bytes += values.nbytes
        self.most_bytes = max(self.most_bytes, self.held_bytes)
        return moved

    def _let_go(self, count: int) -> None:
        """Lets go of all but the `count` storages whose copies began last."""
        while len(self._leaving) > count:
            mark, _ = self._leaving.popleft()
            mark.hold_up_device()

    def _unpack(self, saved: "_Kept | _View") -> torch.Tensor:
        if isinstance(saved, _Kept):
            return saved.tensor()
        moved = saved.moved
        found = saved.on(moved.storage(self._device, self._queue))
        # Backward asks for the last one first; those before it come up meanwhile.
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
            # One that nobody needs any more has given up by itself.
            moved = self._ahead.popleft()()
            if moved is not None:
                moved.forget_fetch()


class _Kept:
    """A tensor that stays."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor
        self._version = tensor._version

    def tensor(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"hf_zero: a tensor of shape {tuple(self._tensor.shape)} that backward needs was written into after the forward "
                f"that saved it (version {self._version} then, {self._tensor._version} now). Write after backward, or run the "
                "forward again."
            )
        return self._tensor


class _View:
    """A tensor on a storage that has moved."""

    def __init__(self, tensor: torch.Tensor, moved: "_Moved"):
        self.moved = moved
        self._dtype = tensor.dtype
        self._size, self._stride, self._offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        self._is_conj = tensor.is_conj()

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The same tensor, on the storage that has its bytes."""
        tensor = torch.empty(0, dtype=self._dtype, device=storage.device)
        tensor.set_(storage, self._offset, self._size, self._stride)
        return tensor.conj() if self._is_conj else tensor


class _Moved:
    """A storage's bytes in host memory, and on the device while somebody uses them or is about to.

    Attributes:
        before: what moved before it in the same forward, while anybody needs it.
    """

    def __init__(self, owner: ActivationsInHostMemory, values: torch.Tensor, before: "ReferenceType[_Moved] | None"):
        self.before = before
        self._owner = owner
        self._values = values
        self._fetched: tuple[torch.UntypedStorage, Mark] | None = None
        self._in_use: ReferenceType[torch.UntypedStorage] | None = None

    def start_fetch(self, device: torch.device, queue: SideQueue) -> None:
        """Begins to bring the bytes up, if they are not there."""
        if self._fetched is None and self._at_hand() is None:
            self._fetched = self._fetch(device, queue)

    def storage(self, device: torch.device, queue: SideQueue) -> torch.UntypedStorage:
        """The bytes on the device, which later calls find there as long as somebody holds them."""
        held = self._at_hand()
        if held is None:
            (held, mark), self._fetched = self._fetched or self._fetch(device, queue), None
            mark.hold_up_device()
            # Weak: memory on the device goes with the last tensor that autograd holds on it.
            self._in_use = ref(held)
        return held

    def forget_fetch(self) -> None:
        """Drops a fetch that was not used."""
        if self._fetched is not None:
            # Its memory may be given to another tensor only when the copy has ended.
            self._fetched[1].hold_up_device()
            self._fetched = None

    def _fetch(self, device: torch.device, queue: SideQueue) -> tuple[torch.UntypedStorage, Mark]:
        # Outside of `aside`: memory belongs to the queue in which it is allocated. The computing queue reads and frees this.
        there = torch.empty_like(self._values, device=device, pin_memory=False)
        with queue.aside():
            there.copy_(self._values, non_blocking=True)
        return there.untyped_storage(), queue.mark()

    def _at_hand(self) -> torch.UntypedStorage | None:
        return None if self._in_use is None else self._in_use()

    def __del__(self) -> None:
        self.forget_fetch()
        self._owner.held_bytes -= self._values.nbytes


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

"""Copies of state between host memory and the device for a step there, and a limit on the bytes on the device."""

from collections import Counter, deque
from collections.abc import Mapping

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..device import allocated_bytes
from ..hooks.tensors import is_in_backward
from ..hooks.weak import WeakHook
from ..pinned_memory import pinned
from ..queues import Mark, queue_end, side_queue
from .host_memory import HostCores

WINDOW = 4
"""Buckets on the device that need no free memory: one lands in host memory, one is stepped, and two are fetched."""


class DeviceWindow:
    """Copies state between host memory and the device, in both directions at a time.

    [Note: memory of other phases]
    Backward frees activations, and the gradients that replace them are smaller in most runs. So state is fetched during backward,
    in the order of the step, as long as no more memory is allocated than at the end of a forward. After the step, the next
    forward begins while state is copied to the host. Before each layer, the host waits if state and the layer's activations would
    need more than this memory; the device still runs earlier layers then. So most copies run while the device computes. If
    activations are smaller than the state, at most `WINDOW` buckets are on the device in addition.

    Args:
        device: the device of the step.
        cores: the cores near the device; host memory is allocated near these cores.

    Attributes:
        most_bytes: maximum bytes on the device so far.
    """

    def __init__(self, device: torch.device, cores: HostCores):
        self.device = device
        self.cores = cores
        # Two queues, because a link moves bytes in both directions at the same time.
        self.up, self.down = side_queue(device), side_queue(device)
        self.most_bytes = 0
        self._stored: list[HostBytes] = []
        self._held_bytes = 0
        # The bytes of the largest `WINDOW` buckets; None if a new count is needed.
        self._limit_bytes: int | None = None
        # Copies whose source or target on the device is still in use, the oldest first.
        self._landing: deque[tuple[Mark, torch.Tensor]] = deque()
        # Bytes of everything else: the most at the end of a forward, before the last layer, and how they grow in each layer.
        self._most_other_bytes = 0
        self._layer: tuple[object, int] | None = None
        self._growth: dict[object, int] = {}

    def add(self, state: "HostBytes") -> None:
        """Adds a part of a new bucket's state. The step takes the buckets in the reverse order of these calls."""
        self._stored.append(state)

    def fetch_ahead(self) -> None:
        """Fetches state for the coming step while memory is free; see [Note: memory of other phases]."""
        for state in reversed(self._stored):
            if not state.is_fetched:
                if not self._is_free(state.nbytes):
                    return
                state.start_fetch()

    def drop_fetched(self) -> None:
        """Frees fetched state without a step, because a forward needs the memory."""
        for state in self._stored:
            state.drop_fetch()

    def watch(self, model: nn.Module, bucket_of: Mapping[nn.Parameter, object]) -> list[RemovableHandle]:
        """Calls `before_layer` before the forward of the first module of each bucket; returns the removable handles."""
        first_of: dict[object, nn.Module] = {}
        for module in model.modules():
            for parameter in filter(bucket_of.__contains__, module.parameters(recurse=False)):
                first_of.setdefault(bucket_of[parameter], module)
        hook = WeakHook(self, DeviceWindow._before_forward)
        return [module.register_forward_pre_hook(hook) for module in dict.fromkeys(first_of.values())]

    def _before_forward(self, module: nn.Module, _args: tuple) -> None:
        if not is_in_backward():
            self.before_layer(module)

    def before_layer(self, layer: object) -> None:
        """Waits for copies to the host until the layer's activations have room."""
        self._end_layer()
        # In the first forward, only measure the layer.
        if self._landing or layer not in self._growth:
            self._layer = layer, self._other_bytes
            self._make_room(other_bytes=self._growth.get(layer, 0))

    def after_forward(self) -> None:
        """Notes the memory at the end of a forward."""
        self._end_layer()
        self._most_other_bytes = max(self._most_other_bytes, self._other_bytes)

    def before_unknown_layers(self) -> None:
        """Waits for copies to the host before a forward without calls of `before_layer`."""
        while self._landing and not self._fits(0):
            self._land()

    def hold(self, nbytes: int) -> None:
        """Counts bytes before their allocation on the device. Waits for the oldest copies to the host if there is no room."""
        self._make_room(nbytes)
        self._held_bytes += nbytes
        self.most_bytes = max(self.most_bytes, self._window_bytes)

    def let_go(self, flat: torch.Tensor, end: Mark) -> None:
        """Ends `hold`, and keeps the memory until `end`."""
        self._held_bytes -= flat.nbytes
        self._landing.append((end, flat))

    def close(self) -> None:
        """Waits for all copies, and frees their memory on the device."""
        while self._landing:
            self._land()

    def end_of_queue(self) -> Mark:
        """Marks the current end of the device's own queue."""
        return Mark() if self.device.type == "cpu" else queue_end(self.device)

    def _make_room(self, nbytes: int = 0, *, other_bytes: int = 0) -> None:
        """Waits for the oldest copies until `nbytes` have room in the window, or everything together in other phases' memory."""
        self._drop_landed()
        while self._landing and not (self._fits(nbytes) or self._is_free(nbytes + other_bytes)):
            self._land()

    def _fits(self, nbytes: int) -> bool:
        """Whether `nbytes` more are not more than the bytes of the largest `WINDOW` buckets."""
        if self._limit_bytes is None:
            sizes = Counter[int]()
            for state in self._stored:
                sizes[state.bucket] += state.nbytes
            self._limit_bytes = sum(size for _, size in sizes.most_common(WINDOW))
        return self._window_bytes + nbytes <= self._limit_bytes

    def renew_limit(self) -> None:
        """Notes a new size of a part of a bucket's state."""
        self._limit_bytes = None

    def _is_free(self, nbytes: int) -> bool:
        self._drop_landed()
        return allocated_bytes(self.device) + nbytes <= self._most_other_bytes

    def _land(self) -> None:
        # Drop the memory after the wait: it would be used again at once.
        self._landing[0][0].wait()
        self._landing.popleft()

    def _drop_landed(self) -> None:
        while self._landing and self._landing[0][0].is_past:
            self._landing.popleft()

    def _end_layer(self) -> None:
        if self._layer is not None:
            (layer, before), self._layer = self._layer, None
            self._growth[layer] = max(0, self._other_bytes - before)

    @property
    def _window_bytes(self) -> int:
        return self._held_bytes + sum(flat.nbytes for _, flat in self._landing)

    @property
    def _other_bytes(self) -> int:
        return allocated_bytes(self.device) - self._window_bytes


class HostBytes:
    """Bytes in pinned host memory. `fetched` returns a copy on the device, and `start_store` stores new bytes.

    Reads and writes of `host` must be preceded by `wait`.

    Attributes:
        host: the bytes, uint8.
        bucket: the index of the bucket.
    """

    def __init__(self, window: DeviceWindow, bucket: int):
        self._window = window
        self.bucket = bucket
        self.host = torch.empty(0, dtype=torch.uint8)
        # The end of the last copy from and to `host`.
        self._read = self._landed = Mark()
        # The copy on the device, and the version of `host` at the copy.
        self._fetched: tuple[torch.Tensor, int] | None = None
        window.add(self)

    @property
    def nbytes(self) -> int:
        return self.host.nbytes

    @property
    def is_fetched(self) -> bool:
        """Whether a copy on the device has the current bytes, or there are none."""
        return not self.nbytes or (self._fetched is not None and self._fetched[1] == self.host._version)

    def start_fetch(self) -> None:
        """Starts to copy the bytes to the device. Does nothing after an earlier call, unless a script has edited them since."""
        if self.is_fetched:
            return
        self.drop_fetch()
        flat = self.new_flat(self.nbytes)
        with self._window.up.in_parallel():
            # The last step's bytes must be in host memory before they are read from there.
            self._landed.hold_up_device()
            flat.copy_(self.host, non_blocking=True)
            self._note_use(flat)
        self._read, self._fetched = self._window.up.mark(), (flat, self.host._version)

    def fetched(self) -> torch.Tensor:
        """Makes the device's queue wait for the copy on the device, and returns the copy. `start_store` must follow."""
        self.start_fetch()
        if self._fetched is None:
            return self.new_flat(0)
        (flat, _), self._fetched = self._fetched, None
        self._read.hold_up_device()
        return flat

    def drop_fetch(self) -> None:
        """Frees an unused copy on the device."""
        if self._fetched is not None:
            self._window.let_go(self._fetched[0], self._read)
            self._fetched = None

    def new_flat(self, nbytes: int) -> torch.Tensor:
        """Allocates `nbytes` on the device, uint8, for `start_store`."""
        self._window.hold(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._window.device)

    def start_store(self, flat: torch.Tensor) -> None:
        """Starts to replace the bytes by the contents of `flat`, the result of `fetched` or `new_flat`."""
        if flat.nbytes != self.nbytes:
            # Pages of running copies must not be freed.
            self.wait()
            with self._window.cores.near():
                self.host = pinned(flat.nbytes, self._window.device)
            self._window.renew_limit()
        with self._window.down.in_parallel():
            self.host.copy_(flat, non_blocking=True)
            self._note_use(flat)
        self._landed = self._window.down.mark()
        self._window.let_go(flat, self._landed)

    def give_back(self, flat: torch.Tensor) -> None:
        """Frees the result of `fetched` after the current work of the device's queue."""
        self._window.let_go(flat, self._window.end_of_queue())

    def wait(self) -> None:
        """Waits for running copies, after which the host may read and write the bytes."""
        self._read.wait()
        self._landed.wait()

    def _note_use(self, flat: torch.Tensor) -> None:
        # Otherwise the allocator could reuse the memory before the end of the copy.
        device = self._window.device
        if device.type != "cpu":
            flat.record_stream(torch.get_device_module(device).current_stream(device))

"""Memory that the GPUs of one host can read of each other: torch's symmetric memory, copied by the copy engines.

As torch's own `_low_contention_all_gather` does it: a barrier on a side stream, a copy from each peer, a barrier. No
multiprocessor is taken from training but for the barriers, and nothing is copied into buffers of NCCL. Not run on a GPU yet.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from ...layout.intervals import Interval
from ..groups.groups import Groups
from ..transport import Handle, Label, Transport
from .peer_memory import PeerMemory, SharedBuffer

_CHANNEL = 0
"""Of the signals: one is enough where all barriers are on one stream."""


class DevicePeers(PeerMemory):
    """GPUs that reach each other's memory. Building it is collective, and tries it.

    Args:
        timeout_s: after which a barrier that a peer never reached ends the process.

    Raises:
        RuntimeError: the driver or the links between the GPUs do not allow it.
    """

    def __init__(self, groups: Groups, transport: Transport, device: torch.device, timeout_s: float):
        super().__init__(groups, transport.ledger)
        self._device = device
        self._timeout_ms = int(1e3 * timeout_s)
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device, priority=-1)
        # Each rank begins with another peer, so that not all read from one.
        self._order = [(self.group.place + step) % self.group.size for step in range(self.group.size)]
        if groups.peers_elsewhere(self.group):
            raise RuntimeError("the ranks of a shard group are on several nodes")
        self.share(1, torch.float32, [Interval(0, 1)] * self.group.size)

    def share(self, numel: int, dtype: torch.dtype, parts: Sequence[Interval]) -> SharedBuffer:
        own = symmetric_memory.empty(numel, dtype=dtype, device=self._device)
        signals = symmetric_memory.rendezvous(own, cast(dist.ProcessGroup, self.group.handle))
        taken = [
            signals.get_buffer(place, (part.stop - part.start,), dtype, part.start) for place, part in enumerate(parts)
        ]
        return SharedBuffer(own=own, parts=tuple(taken), signals=signals)

    def _start(self, flat: torch.Tensor, shared: SharedBuffer, label: Label) -> Handle:
        self._stream.wait_stream(self._module.current_stream(self._device))
        places = flat.chunk(self.group.size)
        with self._module.stream(self._stream):
            shared.signals.barrier(_CHANNEL, self._timeout_ms)
            for place in self._order:
                if places[place].data_ptr() != shared.parts[place].data_ptr():
                    places[place].copy_(shared.parts[place], non_blocking=True)
            shared.signals.barrier(_CHANNEL, self._timeout_ms)
            arrived = self._stream.record_event()
        return Handle(label, self._ledger, lambda: self._module.current_stream(self._device).wait_event(arrived))

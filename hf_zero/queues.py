"""Streams, events and host values of a device, with one interface for CPU and accelerators."""

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import cast

import torch


class Moment:
    """A point in a device's work, for later time measurement. This class is for the host."""

    def __init__(self):
        self._seconds = time.perf_counter()

    @property
    def is_past(self) -> bool:
        """Whether the device has reached this point. The call does not wait for the device."""
        return True

    def seconds_until(self, later: "Moment") -> float:
        """Returns the seconds from this moment to a later moment of the same device; both must be past."""
        return later._seconds - self._seconds


class _QueueMoment(Moment):
    """An event in the current queue, after all work queued by the host so far."""

    def __init__(self, clock: "_QueueClock"):
        self._clock = clock
        self._event = clock.recorded()

    def __del__(self) -> None:
        # Nothing refers to this moment any more, so its event can be reused.
        self._clock.free.append(self._event)

    @property
    def is_past(self) -> bool:
        return self._event.query()

    def seconds_until(self, later: Moment) -> float:
        return 1e-3 * self._event.elapsed_time(cast(_QueueMoment, later)._event)


class _QueueClock:
    """Creates moments of a device. Events of earlier moments are reused.

    Attributes:
        free: events of moments that no longer exist.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._module = torch.get_device_module(device)
        self.free: list[torch.Event] = []

    def __call__(self) -> Moment:
        return _QueueMoment(self)

    def recorded(self) -> torch.Event:
        try:
            event = self.free.pop()
        except IndexError:
            event = self._module.Event(enable_timing=True)
        # Name the clock's device, because the default is the stream of the thread's current device.
        event.record(self._module.current_stream(self._device))
        return event


def clock(device: torch.device) -> Callable[[], Moment]:
    """Returns a function to create a moment of `device` at the present point."""
    return Moment if device.type == "cpu" else _QueueClock(device)


@cache
def _settings_of_events(kind: type[torch.Event]) -> dict[str, bool]:
    # With this setting, a host thread waiting for an event sleeps; otherwise the thread keeps a core busy.
    return {"blocking": True} if "blocking" in inspect.signature(kind).parameters else {}


class Arrival:
    """A started copy. This base class is a copy that finished at once."""

    def wait(self) -> None:
        """Waits until the copy has finished."""


ARRIVED = Arrival()
"""A copy that finished at once."""


class LatestArrival(Arrival):
    """The latest of a series of copies to the same memory.

    Attributes:
        pending: the copy, until somebody has waited for it.
    """

    def __init__(self):
        self.pending: Arrival = ARRIVED

    def wait(self) -> None:
        pending = self.pending
        if pending is not ARRIVED:
            self.pending = ARRIVED
            pending.wait()


class Mark(Arrival):
    """A point in the work of a `SideQueue`. On the host, the point is reached at its creation."""

    @property
    def is_past(self) -> bool:
        """Whether the device has reached this point. The call does not wait for the device."""
        return True

    def hold_up_device(self) -> None:
        """Makes the device's own queue wait for this point. The host does not wait."""


class SideQueue:
    """Copies between host and device, in parallel with the device's own queue. On the host, copies are synchronous."""

    def in_parallel(self, *, after: Mark | None = None) -> AbstractContextManager[None]:
        """Queues the work inside the context in parallel with later work of the device.

        Args:
            after: a point in the device's queue; None means the current end of that queue.
        """
        return nullcontext()

    def mark(self) -> Mark:
        """Marks the end of the queued work."""
        return Mark()


class _Event(Mark):
    """Marks the current end of a stream of `device`."""

    def __init__(self, stream: torch.Stream, device: torch.device):
        self._device = device
        kind = torch.get_device_module(device).Event
        self._event = kind(**_settings_of_events(kind))
        self._event.record(stream)

    @property
    def is_past(self) -> bool:
        return self._event.query()

    def hold_up_device(self) -> None:
        self.hold_up(torch.get_device_module(self._device).current_stream(self._device))

    def hold_up(self, stream: torch.Stream) -> None:
        """Makes the device's `stream` wait for this point."""
        stream.wait_event(self._event)

    def wait(self) -> None:
        self._event.synchronize()


def queue_end(device: torch.device) -> Mark:
    """Marks the current end of an accelerator's current queue."""
    return _Event(torch.get_device_module(device).current_stream(device), device)


class _StreamQueue(SideQueue):
    """A separate stream with normal priority. Copies over the bus use no multiprocessors, to which priorities apply."""

    def __init__(self, device: torch.device):
        self._module = torch.get_device_module(device)
        self._device = device
        self._stream = self._module.Stream(device)

    @contextmanager
    def in_parallel(self, *, after: Mark | None = None) -> Iterator[None]:
        if after is None:
            # Wait for the device's queue, which writes the source of the copy. Otherwise the copy would read old values.
            self._stream.wait_stream(self._module.current_stream(self._device))
        else:
            cast(_Event, after).hold_up(self._stream)
        with self._module.stream(self._stream):
            yield

    def mark(self) -> Mark:
        return _Event(self._stream, self._device)


def side_queue(device: torch.device) -> SideQueue:
    """Returns a queue for copies to and from `device`."""
    return SideQueue() if device.type == "cpu" else _StreamQueue(device)


class HostValue:
    """Copies a scalar to the host without stopping the device's queue.

    `value` waits only for this copy.
    """

    def __init__(self, scalar: torch.Tensor):
        if scalar.device.type == "cpu":
            self._copy, self._there = scalar, ARRIVED
            return
        # Pinned, because a copy to pageable memory would make the host wait for all work in the device's queue.
        self._copy = torch.empty(scalar.shape, dtype=scalar.dtype, pin_memory=True)
        self._copy.copy_(scalar, non_blocking=True)
        self._there = queue_end(scalar.device)

    def value(self) -> float:
        self._there.wait()
        return self._copy.item()

"""Two ranks over a link of a given rate: a token bucket delays their messages, on a simulated clock or on the real one.

On the simulated clock, nothing sleeps. A rank's clock advances by the floating-point operations of its kernels and by the bytes
that the optimizer's step and the encoding of messages read and write. A wait for a collective advances it to the arrival of the
last message. The order of starts and waits, the messages and their sizes are the engine's own, so other work on the machine
changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hf_zero.comm.control import Transfers
from hf_zero.comm.point_to_point import PointToPointTransport
from hf_zero.planner.search import Machine
from hf_zero.wire import block_collectives

_ARRIVAL_TAGS = 0x01000000
"""Added to the tag of a collective for the times at which its messages arrive."""


class SimulatedClock:
    """The time of a rank. The clocks of all ranks start at 0."""

    now_s = 0.0

    def spend(self, seconds: float) -> None:
        self.now_s += seconds

    def wait_until(self, moment_s: float) -> None:
        self.now_s = max(self.now_s, moment_s)


class RealClock(SimulatedClock):
    """The monotonic clock of the host, which all of its ranks share. Kernels sleep for their time."""

    @property
    def now_s(self) -> float:
        return time.monotonic()

    def spend(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait_until(self, moment_s: float) -> None:
        time.sleep(max(0.0, moment_s - self.now_s))


def slowed(machine: Machine, factor: float) -> Machine:
    """Returns a machine on which everything takes `factor` times as long, so that ratios of times are the same."""
    rates = ("flops", "node_bytes_a_second", "link_bytes_a_second", "memory_bytes_a_second")
    slower = {name: getattr(machine, name) / factor for name in rates}
    return replace(
        machine, **slower, **{name: getattr(machine, name) * factor for name in ("call_s", "step_s", "step_between_s")}
    )


class TokenBucket:
    """One token for each byte, refilled at a constant rate. A message has arrived when its last byte has a token.

    Attributes:
        sent_bytes: the bytes of all messages.
    """

    def __init__(self, clock: SimulatedClock, bytes_a_second: float, message_s: float):
        self._clock, self._bytes_a_second, self._message_s = clock, bytes_a_second, message_s
        self._empty_until_s = 0.0
        self.sent_bytes = 0

    def arrival_s(self, nbytes: int) -> float:
        """Returns the time at which a message that is sent now arrives."""
        self.sent_bytes += nbytes
        began_s = max(self._empty_until_s, self._clock.now_s)
        self._empty_until_s = began_s + self._message_s + nbytes / self._bytes_a_second
        return self._empty_until_s


class _LateTransfers:
    """The transfers of a collective, which end at the arrival over the limited link."""

    def __init__(self, transfers: list[Transfers], arrivals: list[torch.Tensor], clock: SimulatedClock):
        self._transfers, self._arrivals, self._clock = transfers, arrivals, clock

    def wait(self, deadline_s: float | None = None) -> None:
        for each in self._transfers:
            each.wait(deadline_s)
        self._clock.wait_until(max(arrival.item() for arrival in self._arrivals))


class _KernelTimes(TorchDispatchMode):
    """Spends the time of a machine for the matrix products and the optimizer steps that this rank computes."""

    def __init__(self, machine: Machine, clock: SimulatedClock):
        super().__init__()
        self._machine, self._clock = machine, clock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=out)
            self._clock.spend(flops / self._machine.flops)
        elif packet is torch.ops.aten._fused_adamw_:
            params, gradients, first, second = args[:4]
            nbytes = sum(each.nbytes for each in gradients) + sum(
                2 * each.nbytes for each in (*params, *first, *second)
            )
            self._clock.spend(nbytes / self._machine.memory_bytes_a_second)
        return out


@contextmanager
def limited_link(machine: Machine, clock: SimulatedClock) -> Iterator[TokenBucket]:
    """Delays the messages of this rank's transports as the links of `machine` would, and its work as its kernels would."""
    link = (machine.bytes_a_second(machine.ranks, machine.nodes), machine.latency_s(machine.ranks, machine.nodes))
    bucket = TokenBucket(clock, *link)
    start = PointToPointTransport._start

    def start_late(transport: Any, tag: int, label: Any, group: Any, received: Any, sent: Any) -> _LateTransfers:
        transfers = start(transport, tag, label, group, received, sent)
        arrival_s = bucket.arrival_s(sum(sent[peer].nbytes for peer in group.peers))
        arrivals = {peer: torch.empty(1, dtype=torch.float64) for peer in group.peers}
        told = [torch.tensor([arrival_s], dtype=torch.float64)] * group.size
        times = start(transport, tag + _ARRIVAL_TAGS, label, group, arrivals, told)
        return _LateTransfers([transfers, times], [*arrivals.values()], clock)

    def timed(encode: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            encode(*args)
            nbytes = sum(each.nbytes for each in args if isinstance(each, torch.Tensor))
            clock.spend(nbytes / machine.memory_bytes_a_second)

        return call

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(PointToPointTransport, "_start", start_late))
        for name in ("quantize", "dequantize", "dequantize_sum"):
            encode = timed(getattr(block_collectives, name))
            stack.enter_context(mock.patch.object(block_collectives, name, encode))
        stack.enter_context(_KernelTimes(machine, clock))
        yield bucket

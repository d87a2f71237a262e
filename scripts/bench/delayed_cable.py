"""A cable between two network interfaces, on which each packet travels for a given time: needs root, and no netem in the kernel.

    python scripts/bench/delayed_cable.py left0 right0 --delay 5ms

Makes the two interfaces (TUN devices, which may then be moved into network namespaces), and carries packets between them until it
is ended. How fast they are sent is limited by the interfaces' queueing disciplines, not here.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import os
import select
import struct
import time
from collections import deque

TUN_DEVICE = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
"""From linux/if_tun.h: packets as they are, without Ethernet's header or the driver's own."""

LARGEST_PACKET = 65535


class Direction:
    """What has entered one end of the cable and has not yet left the other.

    Args:
        entry, exit: file descriptors of the two interfaces.
        delay_s: between the two.
    """

    def __init__(self, entry: int, exit: int, delay_s: float):
        self.entry = entry
        self._exit = exit
        self._delay_s = delay_s
        self._under_way: deque[tuple[float, bytes]] = deque()

    @property
    def next_s(self) -> float | None:
        """When the next packet is due, by `time.monotonic`; None where none is under way."""
        return self._under_way[0][0] if self._under_way else None

    def take(self) -> None:
        """Reads one packet."""
        packet = os.read(self.entry, LARGEST_PACKET)
        self._under_way.append((time.monotonic() + self._delay_s, packet))

    def deliver(self) -> None:
        """Writes the packets that are due; they are lost where the other interface is down, as on any cable."""
        while self._under_way and self._under_way[0][0] <= time.monotonic():
            _, packet = self._under_way.popleft()
            try:
                os.write(self._exit, packet)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise


def carry(left: int, right: int, delay_s: float) -> None:
    """Carries packets between two interfaces for ever."""
    directions = {left: Direction(left, right, delay_s), right: Direction(right, left, delay_s)}
    while True:
        due = [each.next_s for each in directions.values() if each.next_s is not None]
        timeout_s = max(0.0, min(due) - time.monotonic()) if due else None
        readable, _, _ = select.select(list(directions), [], [], timeout_s)
        for entry in readable:
            directions[entry].take()
        for each in directions.values():
            each.deliver()


def make_interface(name: str) -> int:
    """A TUN device; it lives as long as the file descriptor."""
    descriptor = os.open(TUN_DEVICE, os.O_RDWR)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return descriptor


def milliseconds(text: str) -> float:
    """Of `5ms`."""
    number = text.removesuffix("ms")
    if number == text:
        raise argparse.ArgumentTypeError(f"{text!r} is no delay; write milliseconds, such as 5ms")
    return float(number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("interfaces", nargs=2, help="names of the two ends, of at most 15 characters")
    parser.add_argument("--delay", type=milliseconds, required=True, help="one way, such as 5ms")
    options = parser.parse_args()
    left, right = map(make_interface, options.interfaces)
    carry(left, right, options.delay / 1000)


if __name__ == "__main__":
    main()

"""Checksums of the bytes sent and delivered by collectives.

[Note: one number for all messages]
All-gathers and all-to-alls deliver the bytes as they were sent, also int8 blocks. So does the reduce-scatter by messages
from rank to rank, before its additions. A rank does not know the messages of other ranks. But summed over all ranks, the
checksums of the received messages equal the checksums of the sent messages, each counted once per receiver. So each rank keeps
the difference of its own two sums, modulo 2^64, and the differences of all ranks add up to 0.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from ..arithmetic.checksums import WRAPS, checksum_of_parts
from .waits import Label

_MOST = 256
"""Limit for unread checksums per kind and bucket, which stay on the device. A long evaluation gathers without a comparison."""


class WireSums:
    """Notes, per kind of collective and bucket, the checksum of a rank's received bytes minus that of its sent bytes."""

    def __init__(self) -> None:
        # Subtract on the host: a difference on the device would free the first number while a side stream still reads it.
        self._ended: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        self._differences: dict[str, int] = {}
        self._started: set[object] = set()

    def over(
        self, label: Label, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], *, copies: int = 1
    ) -> Callable[[Callable[[], object]], Callable[[], object]]:
        """Notes the checksum of a collective's messages before the collective starts.

        Args:
            sent, received: whole messages, including this rank's message to itself.
            copies: number of ranks which receive each of `sent`.

        Returns:
            A decorator for the function which waits for the collective. The decorated function also notes the received messages.
        """
        number, token = checksum_of_parts(sent) * copies, object()
        self._started.add(token)

        def noted(wait: Callable[[], object]) -> Callable[[], object]:
            def complete() -> None:
                wait()
                pairs = self._ended[label.words]
                pairs.append((checksum_of_parts(received), number))
                self._started.discard(token)
                if len(pairs) > _MOST:
                    self.read()

            return complete

        return noted

    @property
    def is_complete(self) -> bool:
        """Whether all noted collectives have ended."""
        return not self._started

    def read(self) -> dict[str, int]:
        """Returns the differences by kind and bucket. Waits for the device."""
        noted = [number for pairs in self._ended.values() for pair in pairs for number in pair]
        for device in {number.device for number in noted if number.device.type != "cpu"}:
            # Wait for the device, because some collectives are only waited for in a side stream.
            torch.accelerator.synchronize(device)
        for words, pairs in self._ended.items():
            difference = sum(int(got) - int(sent) for got, sent in pairs)
            self._differences[words] = (self._differences.get(words, 0) + difference) % WRAPS
        self._ended.clear()
        return self._differences

    def forget(self) -> None:
        """Drops the differences of earlier reads."""
        self._differences = {}

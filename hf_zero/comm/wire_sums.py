"""Checksums of the bytes that collectives send and deliver.

[Note: one number for all messages]
All-gathers and all-to-alls deliver the bytes that were sent, also int8 blocks. So does the reduce-scatter that sends
messages from rank to rank, before it adds. A rank does not know the messages of other ranks. But summed over all ranks, the
checksums of the received messages equal the checksums of the sent messages, each counted once per receiver. So each rank keeps
the difference of its own two sums, modulo 2^64, and the differences of all ranks add up to 0.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from ..arithmetic.checksums import WRAPS, checksum_of_parts
from .ledger import Label

_MOST = 256
"""Collectives of a kind and bucket whose checksums wait on the device. A long evaluation gathers without a comparison."""


class WireSums:
    """Notes, for each kind of collective and bucket, the checksum that a rank has received minus the one that it has sent."""

    def __init__(self) -> None:
        # The host subtracts: a difference on the device would free the first number while a side stream reads it.
        self._ended: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        self._differences: dict[str, int] = {}
        self._started: set[object] = set()

    def over(
        self, label: Label, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], *, copies: int = 1
    ) -> Callable[[Callable[[], object]], Callable[[], object]]:
        """Notes what a collective sends, before it starts.

        Args:
            sent, received: whole messages, this rank's message to itself among them.
            copies: the ranks to which each of `sent` goes.

        Returns:
            A function of a function that waits for the collective. It returns one that also notes what has been received.
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
        """Whether no collective that was noted is under way."""
        return not self._started

    def read(self) -> dict[str, int]:
        """Returns the differences by kind and bucket. Waits for the device."""
        noted = [number for pairs in self._ended.values() for pair in pairs for number in pair]
        for device in {number.device for number in noted if number.device.type != "cpu"}:
            # Some collectives are waited for in a side stream.
            torch.accelerator.synchronize(device)
        for words, pairs in self._ended.items():
            difference = sum(int(got) - int(sent) for got, sent in pairs)
            self._differences[words] = (self._differences.get(words, 0) + difference) % WRAPS
        self._ended.clear()
        return self._differences

    def forget(self) -> None:
        """Drops the differences that have been read."""
        self._differences = {}

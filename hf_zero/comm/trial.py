"""Times a bucket's collectives quantised and as they are, with this run's ranks, link and device."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from .transport import Transport

HIDDEN_SHARE = 0.5
"""Of the time that a bucket takes as it is, the part that backward is taken to hide. Arithmetic runs in backward's own
queue, so nothing hides it: blocks have to pay in what is left. The more is hidden, the less they pay."""

_REPEATS = 5
_LONGEST_S = 5.0
"""After this long no further repeat is begun."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How long a bucket takes as it is and in blocks: medians of repeats, each of its slowest rank, in seconds.

    Attributes:
        kind: what travels, "gradients" or "weights".
        bytes_sent: by a rank, of a bucket as it is.
        exact_s: as it is.
        blocks_s: in blocks: quantised, sent, dequantised.
        arithmetic_s: quantised and dequantised, and not sent.
    """

    kind: str
    bytes_sent: int
    exact_s: float
    blocks_s: float
    arithmetic_s: float

    @property
    def gb_per_second(self) -> float:
        """1e9 bytes a second that a rank sends of a bucket as it is."""
        return self.bytes_sent / self.exact_s / 1e9

    @property
    def exposed_exact_s(self) -> float:
        """What training would wait for a bucket as it is."""
        return (1 - HIDDEN_SHARE) * self.exact_s

    @property
    def exposed_blocks_s(self) -> float:
        """What training would wait for a bucket in blocks: all of the arithmetic, and what is not hidden of the rest."""
        return self.arithmetic_s + max(0.0, self.blocks_s - self.arithmetic_s - HIDDEN_SHARE * self.exact_s)

    @property
    def pays(self) -> bool:
        """Whether training waits less for blocks."""
        return self.exposed_blocks_s < self.exposed_exact_s

    def __str__(self) -> str:
        return (
            f"{self.bytes_sent / 2**20:,.1f} MiB of {self.kind} take {_ms(self.exact_s)} as they are "
            f"({self.gb_per_second:.3f} GB/s) and {_ms(self.blocks_s)} in int8, {_ms(self.arithmetic_s)} of it arithmetic; "
            f"exposed {_ms(self.exposed_exact_s)} and {_ms(self.exposed_blocks_s)}"
        )


def slowest_medians(
    ways: Mapping[str, Callable[[], None]], transport: Transport, synchronise: Callable[[], None]
) -> dict[str, float]:
    """Seconds that each of some ways takes, by name: the median of repeats, each of its slowest rank. Collective.

    The ways take turns, after one turn that does not count. All ranks get the same figures.

    Args:
        synchronise: returns when the device has done all that was asked of it.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(1 + _REPEATS):
        for name, way in ways.items():
            synchronise()
            start = time.perf_counter()
            way()
            synchronise()
            # By this all ranks also begin the next one together.
            slowest = max(transport.exchange(time.perf_counter() - start))
            if repeat:
                seconds[name].append(slowest)
        if sum(map(sum, seconds.values())) > _LONGEST_S:
            break
    return {name: median(each) for name, each in seconds.items()}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"

"""Whether a forecast fits into the memory of a rank, and the errors of a planner."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import ConfigError
from .peak import Forecast


class PlanError(ConfigError):
    """Raised if a plan cannot be made for a model, a batch or a machine."""


class NothingFitsError(PlanError):
    """No set-up fits into the memory.

    Attributes:
        least: settings of the set-up that needs the least memory.
    """

    def __init__(self, message: str, least: Mapping[str, Any]):
        super().__init__(message)
        self.least = least


FITS, CLOSE, TOO_LARGE = "fits", "close", "too large"
"""The three verdicts on a set-up; see [Note: three classes]."""

FORECAST_ERROR = 0.15
"""Largest relative difference between a forecast and the measured peak. scripts/bench/planned_peaks.py enforces this bound; its
cells are between 6 % below the measured peak and 8 % above it."""

RESERVE = {"accelerator": 0.08, "host": 0.15, "host's heap": 0.3, "activations unknown": 0.4}
"""The part of free memory that must stay free for a set-up to *fit*, by the user of that memory. Set by hand.

A caching allocator rounds up and splits. On a host, page tables and sockets of the ranks count as well, and a forecast may be 5 %
low. glibc keeps freed blocks of up to 32 MiB in its heap, unless MALLOC_MMAP_THRESHOLD_ is smaller.
"""


@dataclass(frozen=True, kw_only=True)
class Room:
    """Bytes that a rank may use. None means that no limit is known.

    [Note: three classes]
    A set-up *fits* if its forecast leaves the reserve of the device free. It is *too large* if its forecast exceeds the device by
    more than the error of forecasts. In between, it is *close*: the run may succeed or run out of memory. Offloaded bytes are
    counted exactly, so host memory and disk have no *close*.

    Attributes:
        host, disk: for each rank of a node.
        reserve: the part of the device that a fitting set-up leaves free.
    """

    device: int
    host: int | None = None
    disk: int | None = None
    reserve: float = RESERVE["accelerator"]

    def fit_of(self, forecast: Forecast) -> str:
        """Returns FITS, CLOSE or TOO_LARGE."""
        needed = forecast.device_bytes
        if self._other_shortage(forecast) or needed > self.device * (1 + FORECAST_ERROR):
            return TOO_LARGE
        return FITS if needed <= self.device * (1 - self.reserve) else CLOSE

    def describe(self, forecast: Forecast) -> str:
        """Formats the verdict and its reason: `close: 390 of 390 MB`."""
        where, needed, there = self._other_shortage(forecast) or ("", forecast.device_bytes, self.device)
        how = f"{where}, {of(needed, there)}" if where else of(needed, there)
        return f"{self.fit_of(forecast)}: {how if there else f'{size(needed)} of {where}, none was given'}"

    def _other_shortage(self, forecast: Forecast) -> tuple[str, int, int] | None:
        """Returns (memory, needed bytes, free bytes) of the host or the disk if offloaded state does not fit, otherwise None."""
        needs = (("host memory", forecast.host_bytes, self.host), ("disk", forecast.disk_bytes, self.disk))
        for where, needed, there in needs:
            if there is not None and needed > there:
                return where, needed, there
        return None


def size(nbytes: float) -> str:
    """Formats bytes: 12.3 MB, 4.56 GB."""
    return f"{nbytes / 1e6:.1f} MB" if nbytes < 1e9 else f"{gb(nbytes)} GB"


def gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f}" if nbytes < 10e9 else f"{nbytes / 1e9:.1f}"


def of(part: float, whole: float) -> str:
    """Formats a part of a whole: 390 of 410 MB."""
    if max(part, whole) < 1e9:
        return f"{part / 1e6:.0f} of {whole / 1e6:.0f} MB"
    return f"{gb(part)} of {gb(whole)} GB"

"""Exchanges of small values through the launcher's store, for threads that run in parallel with training."""

import hmac
import pickle
import time
import weakref
from typing import Any

import torch.distributed as dist

from ..comm.all_or_none import Merged
from ..comm.control import rounds
from ..comm.groups import Groups
from .arrivals import CommunicationError
from .store import StoreSilentError, StoreThread

_GLANCE_S = 0.02
_SIGNATURE_BYTES = 32


class StoreExchange:
    """Exchanges values through the launcher's store, over its own connection.

    Args:
        name: the same on all ranks, and unique to this object.
        secret: the same on all ranks, and never sent through the store.
        timeout_s: how long an exchange waits for missing ranks.
    """

    def __init__(self, groups: Groups, name: str, secret: bytes, timeout_s: float):
        self._groups = groups
        self._secret = secret
        self._timeout_s = timeout_s
        self._count = 0
        self._thread: StoreThread | None = None
        if groups.world_size > 1:
            self._thread = StoreThread(timeout_s)
            # Close before Python ends as well: a thread returning from torch after the end would abort the process.
            weakref.finalize(self, self._thread.close)
            self._store = self._thread.keys.below(f"hf_zero/store_exchange/{name}")

    def hurry(self, seconds: float) -> None:
        """Shortens the waits for other ranks and for the store from now on, because this process wants to end."""
        self._timeout_s = seconds
        if self._thread is not None:
            self._thread.within_s = seconds

    def merge(self, value: Merged) -> Merged:
        """Returns the values of all ranks merged into one. A rank reads a few values, however many ranks there are.

        Raises:
            CommunicationError: a rank or the store did not answer in time, or a value was not written by any of the ranks.
        """
        if self._groups.world_size == 1:
            return value
        try:
            return self._merge(value)
        except StoreSilentError as error:
            raise CommunicationError(
                f"hf_zero: the ranks cannot finish a checkpoint together: {error}. Look at that process and its host."
            ) from error
        except dist.DistNetworkError as error:
            raise CommunicationError(
                f"hf_zero: the launcher's store is not available, so the ranks cannot finish a checkpoint together ({error}). "
                "The host of the store was lost, or its process has ended; its own error is the reason."
            ) from error

    def _merge(self, value: Merged) -> Merged:
        self._count += 1
        rank, size = self._groups.rank, self._groups.world_size
        in_rounds = rounds(size)
        for number, distances in enumerate(in_rounds):
            key, data = self._key(number, rank), pickle.dumps(value)
            self._store.set(key, self._signature(key, data) + data)
            for distance in distances:
                value = value.merged(self._take(number, (rank - distance) % size))
        # All ranks have arrived here, so all have read the previous values, and their keys can be deleted.
        for number in range(len(in_rounds)):
            self._store.delete(f"{self._count - 1}/{number}/{rank}")
        return value

    def _key(self, number: int, rank: int) -> str:
        """Names a rank's value at the beginning of a round."""
        return f"{self._count}/{number}/{rank}"

    def _missing(self, sender: int) -> int:
        """Returns the first rank without a value in this merge. If all ranks have one, returns the sender."""
        ranks = range(self._groups.world_size)
        return next((rank for rank in ranks if not self._store.check(self._key(0, rank))), sender)

    def _take(self, number: int, rank: int) -> Any:
        key, began_s = self._key(number, rank), time.monotonic()
        # Poll instead of using the store's own wait, which could not be shortened by `hurry`.
        while (signed := self._store.find_bytes(key)) is None:
            if time.monotonic() > began_s + self._timeout_s:
                raise CommunicationError(
                    f"hf_zero: rank {self._missing(rank)} did not join the other ranks to finish a checkpoint. It has ended, "
                    f"or was blocked for more than {self._timeout_s:.0f} s; its own error is the reason."
                )
            time.sleep(_GLANCE_S)
        signature, data = signed[:_SIGNATURE_BYTES], signed[_SIGNATURE_BYTES:]
        # Check before unpickling: torch's store answers anybody with access to its port, and unpickling may run code.
        if not hmac.compare_digest(signature, self._signature(key, data)):
            raise CommunicationError(
                f"hf_zero: the value in the launcher's store from rank {rank} was not written by that rank. Another process "
                "writes to the store: let only the run's own nodes reach MASTER_PORT."
            )
        return pickle.loads(data)

    def _signature(self, key: str, data: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + data, "sha256")
